"""Everything that is checked before anything starts, from a config to a plan that can be launched.

Guarantee: whatever can be known beforehand is a `ConfigError` here, while there is no run folder and no process yet.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from makers.config import Call, CustomMaker, FilePrompts, JudgeMaker, ModelConfig, RewardMaker
from makers.prompts import PromptsError
from makers.prompts.mixed import refuse_reserved
from topology.bundles import Node
from topology.capacity import Capacity
from topology.config import ConfigError, RunConfig, load_config
from topology.joining import cluster_address, connected
from topology.models import ModelError, ModelInfo, model_info, resolve_model
from topology.plan import GIB, Plan, make_plan
from topology.roles import model_of, on_policy_of, reads_tokens
from topology.vocabulary import difference
from trainers.config import CustomAlgorithm, TrainerConfig


@dataclass(frozen=True)
class Prepared:
    """A config that passed every check, with what the checks found."""

    config: RunConfig
    model_path: Path
    model: ModelInfo
    plan: Plan
    address: str | None  # host:port of the cluster to join


def prepare(config_path: str | Path, overrides: Any = (), name: str | None = None) -> Prepared:
    """Read a config, prepare its model, and check all that can be known before a start. Raises ConfigError."""
    return check(load_config(config_path, overrides, name))


def check(config: RunConfig) -> Prepared:
    try:
        path = resolve_model(config.model.path)
        model = model_info(path)
    except ModelError as error:
        raise ConfigError(str(error)) from None
    config = _absolute_paths(config)
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # where prompts of the user's own are looked for, here as in every actor
    own_models = _own_models(config, path)
    address = cluster_address(config)
    plan = make_plan(config, model, capacity_of(config, address), own_models, _teacher_of_ranks(config, path))
    _check_own_code(config)
    columns = _check_prompts(config, model)
    _check_routes(config, columns)
    _check_judges(config, columns)
    _check_reward_functions(config, columns)
    return Prepared(config, path, model, plan, address)


def _own_models(config: RunConfig, policy: Path) -> dict[str, ModelInfo]:
    """By group, of makers with a model of their own; each numbers tokens as the policy does, or ConfigError."""
    found = {}
    for group, maker in config.makers.items():
        own = model_of(maker)
        if own is None:
            continue
        key = f"makers.{group}.model.path"
        try:
            folder = resolve_model(own.path)
            found[group] = model_info(folder)
        except ModelError as error:
            raise ConfigError(f"{key}: {error}") from None
        if reads_tokens(config.makers[group]) and (other := difference(policy, folder)):
            raise ConfigError(f"{key}: {other}: it would score other tokens; use a model with the policy's tokenizer")
    return found


def _teacher_of_ranks(config: RunConfig, policy: Path) -> ModelInfo | None:
    """A teacher's logits are compared with the policy's one by one: same tokenizer, same size, or ConfigError."""
    teacher = None if config.trainers.policy is None else config.trainers.policy.teacher
    if teacher is None:
        return None
    key = "trainers.policy.distill.teacher.model"
    try:
        folder = resolve_model(teacher.model)
        found = model_info(folder)
    except ModelError as error:
        raise ConfigError(f"{key}: {error}") from None
    if other := difference(policy, folder):
        raise ConfigError(f"{key}: {other}: its logits mean other tokens; use a model with the policy's tokenizer")
    return found


def capacity_of(config: RunConfig, address: str | None) -> Capacity:
    """What the cluster at `address` offers. A run's own cluster offers as many CPUs as the plan needs, unless told."""
    if address is None:
        gpus = config.cluster.gpus if config.cluster.gpus is not None else _count_gpus()
        cpus = config.cluster.cpus if config.cluster.cpus is not None else float("inf")
        what = "this machine" if config.cluster.cpus is None else f"this machine (cluster.cpus: {config.cluster.cpus})"
        return Capacity(what, (Node("this machine", cpus, gpus, psutil.virtual_memory().available / GIB),))
    with connected(None, address, own=False):
        from topology.placement import cluster_nodes

        return Capacity(f"the cluster at {address}", cluster_nodes())


def _count_gpus() -> int:
    return len([device for device in Path("/dev").glob("nvidia[0-9]*") if device.name[6:].isdigit()])


def _absolute_paths(config: RunConfig) -> RunConfig:
    """Files are named relative to where the command is given; actors run elsewhere."""

    def absolute(prompts: Any) -> Any:
        if not isinstance(prompts, FilePrompts):
            return prompts
        return prompts.model_copy(update={"path": str(Path(prompts.path).expanduser().resolve())})

    def located(model: ModelConfig) -> ModelConfig:
        folder = Path(model.path).expanduser()
        return model.model_copy(update={"path": str(folder.resolve())}) if folder.is_dir() else model

    def taught_at_home(policy: TrainerConfig) -> TrainerConfig:
        if policy.teacher is None:
            return policy
        return policy.with_teacher_from(located(ModelConfig(path=policy.teacher.model)).path)

    def at_home(maker: Any) -> Any:
        own = model_of(maker)
        return maker if own is None else maker.model_copy(update={"model": located(own)})

    changes: dict[str, Any] = {"prompts": absolute(config.prompts), "model": located(config.model)}
    trainers = config.trainers
    if trainers.policy is not None:
        changes["trainers"] = trainers.model_copy(update={"policy": taught_at_home(trainers.policy)})
    changes["makers"] = {group: at_home(maker) for group, maker in config.makers.items()}
    if config.evaluation is not None:
        changes["evaluation"] = config.evaluation.model_copy(update={"prompts": absolute(config.evaluation.prompts)})
    return config.model_copy(update=changes)


def _check_prompts(config: RunConfig, model: ModelInfo) -> tuple[str, ...] | None:
    """The columns of the training prompts, None if that is not known before they are read."""
    from makers.prompts import check_prompts, take

    sources = {"prompts": (config.prompts, 1)}
    if config.evaluation is not None:
        sources["evaluation.prompts"] = (config.evaluation.prompts, config.evaluation.size)
    columns = None
    for key, (source, wanted) in sources.items():
        try:
            summary = check_prompts(source)
            if summary.rows is not None and summary.rows < wanted:
                raise ConfigError(f"{key}: {wanted} prompts are wanted, the data has {summary.rows}")
            first = take(source, 1)[0]
        except PromptsError as error:
            raise ConfigError(f"{key}: {error}") from None
        if not isinstance(first.content, str) and not model.has_chat_template:
            raise ConfigError(
                f"{key}: row {first.id} has chat messages, but the model's tokenizer has no chat template: "
                "give text prompts, or add a chat template to the model folder"
            )
        columns = columns if key != "prompts" else summary.columns
    return columns


def _check_routes(config: RunConfig, columns: tuple[str, ...] | None) -> None:
    if on_policy_of(config) < 1:
        try:
            refuse_reserved(columns or ())
        except PromptsError as error:
            raise ConfigError(f"prompts: {error}") from None
    for group, maker in config.makers.items():
        route = maker.route
        if route and columns is not None and route.column not in columns and None not in route.values:
            raise ConfigError(
                f"makers.{group}.route.column: the prompts have no column `{route.column}`, only {', '.join(columns)}, so the "
                "group would get no row"
            )


def _check_own_code(config: RunConfig) -> None:
    """Maker kinds and algorithms of the user's own must be found before anything starts."""
    from makers.dotted import check_dotted

    paths = {f"makers.{group}.kind": m.kind for group, m in config.makers.items() if isinstance(m, CustomMaker)}
    for group, maker in config.makers.items():
        if isinstance(maker, JudgeMaker) and isinstance(maker.parser, Call):
            paths[f"makers.{group}.parser.path"] = maker.parser.path
    for role, trainer in config.trainers.items():
        if isinstance(trainer.algorithm, CustomAlgorithm):
            paths[f"trainers.{role}.algorithm.type"] = trainer.algorithm.type
    for key, path in paths.items():
        try:
            check_dotted(path)
        except ValueError as error:
            raise ConfigError(f"{key}: {error}") from None


def _check_judges(config: RunConfig, columns: tuple[str, ...] | None) -> None:
    from makers.judging.template import check_template

    for group, maker in config.makers.items():
        if isinstance(maker, JudgeMaker):
            try:
                check_template(maker.template_text(), columns)
            except ValueError as error:
                raise ConfigError(f"makers.{group}.template: {error}") from None


def _check_reward_functions(config: RunConfig, columns: tuple[str, ...] | None) -> None:
    from makers.rewards.check import check_functions

    for group, maker in config.makers.items():
        if not isinstance(maker, RewardMaker) or not maker.functions:
            continue
        try:
            check_functions(maker.functions, columns)
        except ValueError as error:
            raise ConfigError(f"makers.{group}.functions: {error}") from None
