"""One YAML file -> one frozen, typed `RunConfig`. Free of ray, torch, vllm and megatron.

Guarantees: an unknown or duplicate key, a wrong type and a value out of range end in one `ConfigError` that lists every
problem with the key's path, what was given and, for a misspelt key, the nearest known one.
"""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, ValidationError, model_validator

from buffer.config import BufferConfig, Strict
from makers.config import (
    DATA_PARALLEL,
    MORE_REPLICAS,
    NOT_REPLAYED,
    WHY_NOT_REPLAYED,
    MakerConfig,
    ModelConfig,
    PromptsConfig,
)
from trainers.algorithms.config import CALLED_HERE, ONE_PASS, PASSES
from trainers.collecting.config import CollectConfig
from trainers.config import NOT_OFFERED, MetricsConfig, TrainersConfig
from weights.config import WeightsConfig

RUN_NAME = r"^[a-z0-9][a-z0-9._-]{0,62}$"
RUN_NAME_IN_WORDS = "lower-case letters, digits, dot, dash and underscore (at most 63)"


class ConfigError(Exception):
    """The config or the arguments are wrong; the message says what, where and what to do (exit code 2)."""


class EvaluationConfig(Strict):
    """Held-out prompts, sampled by the same makers (or scored by the ranks); nobody trains on them."""

    by: Literal["makers", "ranks"] = Field(
        "makers",
        description="makers: rollouts are sampled and scored. ranks: the trainer's loss of held-out rows of the dataset (`sft`).",
    )
    prompts: PromptsConfig
    size: int = Field(128, ge=1, description="Prompts taken from the start of the source.")
    samples: int = Field(4, ge=1, description="Samples of one prompt.")
    every: int | None = Field(None, ge=1, description="Steps between two evaluations during the run.")
    at_start: bool = True
    at_end: bool = True
    timeout: float = Field(600.0, gt=0, description="Seconds for one evaluation.")


class CheckpointConfig(Strict):
    every: int | None = Field(None, ge=1, description="Steps between two checkpoints; null: only at the end.")
    keep: int = Field(3, ge=1)
    at_end: bool = True


class RowsConfig(Strict):
    every: int | None = Field(1, ge=1, description="Steps between two files of sampled rows; null: none.")


PlacementPolicy = Literal["pack", "strict_pack", "spread", "strict_spread"]


class PlacementConfig(Strict):
    """Which node an actor is on. One engine, and the ranks of one tensor-parallel group, are never split over nodes."""

    groups: dict[str, PlacementPolicy] = Field(
        {},
        description="By maker group or trainer. pack (what is not named here): on as few nodes as possible. spread: over "
        "as many as possible. strict_pack, strict_spread: all on one node, each on a node of its own, or the run does not "
        "start.",
    )
    colocate: list[list[str]] = Field(
        [],
        description="Sets of a trainer and maker groups on the same devices, in turns, as [[rollout, policy]]: makers "
        "sleep while the trainer takes its step, and its state moves to CPU memory while they work.",
    )
    sleep_level: Literal[1, 2] = Field(
        1,
        description="What a colocated engine does with its weights: 1: to CPU memory. 2: drops them, and loads new ones.",
    )


class ClusterConfig(Strict):
    address: str | None = Field(
        None, description="host:port of a running cluster; null: RAY_ADDRESS (which a Ray job has), else its own."
    )
    cpus: int | None = Field(None, ge=1, description="CPUs the run's own cluster offers; null: what the plan needs.")
    gpus: int | None = Field(None, ge=0, description="GPUs the run's own cluster offers; null: what is found.")
    object_store_gib: float = Field(2.0, gt=0)


class LimitsConfig(Strict):
    """Every wait has a deadline; these are theirs, in seconds. And how much dying is borne."""

    start: float = Field(300.0, gt=0, description="From the first actor to all of them ready.")
    batch: float = Field(600.0, gt=0, description="Trainer waiting for complete rows.")
    step: float = Field(1800.0, gt=0, description="One optimizer step, or one checkpoint, on the ranks.")
    stop: float = Field(120.0, gt=0, description="Draining after `tandem stop`.")
    ping: float = Field(60.0, gt=0, description="An actor that has started and does not answer for so long is hung.")
    restarts: int = Field(
        5,
        ge=0,
        description="How often an actor that died is made anew within restart_window; 0: its death ends the run.",
    )
    restart_window: float = Field(600.0, gt=0, description="Seconds after which the death of an actor is forgiven.")


class RunConfig(Strict):
    name: str = Field(pattern=RUN_NAME)
    seed: int = 0
    model: ModelConfig
    prompts: PromptsConfig
    makers: dict[Annotated[str, Field(pattern=RUN_NAME)], MakerConfig] = Field(min_length=1)
    trainers: TrainersConfig = Field(TrainersConfig(), description="Who learns from the rows. This or `collect`.")
    collect: CollectConfig | None = Field(None, description="Rows go to files, and nobody learns. This or `trainers`.")
    buffer: BufferConfig = BufferConfig()
    weights: WeightsConfig = WeightsConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig | None = None
    rows: RowsConfig = RowsConfig()
    metrics: MetricsConfig = MetricsConfig()
    placement: PlacementConfig = PlacementConfig()
    cluster: ClusterConfig = ClusterConfig()
    limits: LimitsConfig = LimitsConfig()

    @model_validator(mode="after")
    def _one_consumer(self) -> RunConfig:
        if self.trainers.policy is None and self.collect is None:
            raise ValueError(
                "trainers.policy: missing: nobody takes the rows; or give `collect`, which writes them to files"
            )
        if tuple(self.trainers) and self.collect is not None:
            raise ValueError("trainers, collect: give one of the two: rows are trained on, or written to files")
        return self


class _UniqueKeys(yaml.SafeLoader):
    """SafeLoader that refuses a mapping with the same key twice (plain YAML keeps the last one, silently)."""


def _unique_mapping(loader: _UniqueKeys, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True)  # type: ignore[no-untyped-call]
        if isinstance(key, list | dict):
            break  # what follows refuses it, with its line
        if key in seen:
            raise ConfigError(f"line {key_node.start_mark.line + 1}: key `{key}` stands twice in one section")
        seen.add(key)
    return loader.construct_mapping(node, deep=True)


_UniqueKeys.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _unique_mapping)


def load_maker(path: str | Path) -> dict[str, Any]:
    """The keys of one maker, as in a section of `makers`. Raises ConfigError; what the keys mean is checked later."""
    return _read(Path(path), "a maker is a mapping with `kind` and its settings")


def load_config(path: str | Path, overrides: Iterable[str] = (), name: str | None = None) -> RunConfig:
    """Read, override (`a.b=c`, values in YAML) and validate one config file. Raises ConfigError."""
    file = Path(path)
    data = _read(file, "a config is a mapping with `name`, `model`, `prompts`, `makers`, and `trainers` or `collect`")
    for override in overrides:
        _apply_override(data, override)
    if name is not None:
        data["name"] = name
    return parse_config(data, source=str(file))


def _read(file: Path, expected: str) -> dict[str, Any]:
    try:
        text = file.read_text()
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: is not a text file; give a topology in YAML") from error
    try:
        data = yaml.load(text, Loader=_UniqueKeys)  # a SafeLoader
    except yaml.YAMLError as error:
        raise ConfigError(f"{file}: not valid YAML: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{file}: {expected}")
    return data


def parse_config(data: Mapping[str, Any], source: str = "config") -> RunConfig:
    """Validate a mapping. Raises ConfigError that lists every problem."""
    try:
        return RunConfig.model_validate(data)
    except ValidationError as error:
        lines = [_describe(problem, data) for problem in error.errors(include_url=False)]
        count = "1 problem" if len(lines) == 1 else f"{len(lines)} problems"
        raise ConfigError(f"{source}: {count}\n" + "\n".join(f"  {line}" for line in lines)) from None


def dump_config(config: RunConfig) -> str:
    """The resolved config as YAML; loading it again gives the same config."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, width=120)


def _apply_override(data: dict[str, Any], override: str) -> None:
    key, equals, value = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"--set {override}: write it as key.path=value")
    try:
        given = yaml.load(value, Loader=_UniqueKeys)  # a SafeLoader
    except (yaml.YAMLError, ConfigError) as error:
        raise ConfigError(f"--set {override}: the value is not valid YAML: {error}") from error
    node: Any = data
    *parents, last = key.split(".")
    for part in parents:
        node = _child(node, part, override)
    if isinstance(node, list):
        node[_list_index(node, last, override)] = given
    elif isinstance(node, dict):
        node[last] = given
    else:
        raise ConfigError(f"--set {override}: `{'.'.join(parents)}` is a single value, it has no `{last}`")


def _child(node: Any, part: str, override: str) -> Any:
    if isinstance(node, list):
        return node[_list_index(node, part, override)]
    if not isinstance(node, dict):
        raise ConfigError(f"--set {override}: there is no section `{part}` to go into")
    if node.get(part) is None:
        node[part] = {}
    return node[part]


def _list_index(node: list[Any], part: str, override: str) -> int:
    if not part.isdigit() or int(part) >= len(node):
        raise ConfigError(f"--set {override}: `{part}` is no position in a list of {len(node)}")
    return int(part)


def _describe(problem: Any, data: Any) -> str:
    """One line for one pydantic error: the key's path, what is wrong, what was given, the nearest known key."""
    path = _written_path(problem["loc"], data)
    where = ".".join(str(part) for part in path) or "(top level)"
    kind, given = problem["type"], problem.get("input")
    if kind == "extra_forbidden":
        return f"{where}: {_unknown([str(part) for part in path])}"
    if kind == "missing":
        return f"{where}: missing"
    if kind == "model_type":
        return f"{where}: a section of keys is needed (given: {_shown(given)})"
    if kind == "string_pattern_mismatch":
        form = "package.module:name" if ":" in problem["ctx"]["pattern"] else RUN_NAME_IN_WORDS
        return f"{where}: {form} is needed (given: {_shown(given)})"
    message = problem["msg"].removeprefix("Value error, ")
    if kind.startswith("union_tag"):
        expected = problem.get("ctx", {}).get("expected_tags", "").replace(", 'custom'", "")
        return f"{where}: unknown kind or type{'' if not expected else f'; known: {expected}'}, or package.module:Name"
    return f"{where}: {message} (given: {_shown(given)})"


def _unknown(path: list[str]) -> str:
    """What users of other systems look for gets the reason why it is not here, and what to do instead."""
    *parents, key = path
    if "backend" in parents:
        for words, reason in NOT_OFFERED.items():
            if any(word in key for word in words):
                return f"not offered: {reason}"
    if "algorithm" in parents and key in CALLED_HERE:
        return f"unknown key: it is called `{CALLED_HERE[key]}` here"
    if "trainers" in parents and key in PASSES:
        return f"not offered: {ONE_PASS}"
    if "sampling" in parents and key in NOT_REPLAYED:
        return f"not offered: {WHY_NOT_REPLAYED}"
    if "engine" in parents and key.startswith(DATA_PARALLEL):
        return f"not offered: {MORE_REPLICAS}"
    return f"unknown key{_nearest(key)}"


def _shown(given: Any) -> str:
    shown = repr(given)
    return shown if len(shown) <= 60 else shown[:57] + "..."


def _written_path(location: tuple[Any, ...], data: Any) -> list[Any]:
    """The key path as the user wrote it: pydantic also puts the tag of a tagged union into the location."""
    path, node = [], data
    for position, step in enumerate(location):
        inside = step in node if isinstance(node, Mapping) else isinstance(node, list) and step in range(len(node))
        if inside:
            node = node[step]
        elif position < len(location) - 1:
            continue  # a tag
        path.append(step)
    return path


def _nearest(key: str) -> str:
    known = sorted(_all_keys(RunConfig))
    close = difflib.get_close_matches(key, known, n=1)
    if close == [key]:
        return " in this section: it belongs to another one"
    return f", did you mean `{close[0]}`?" if close else ""


def _all_keys(model: type[Strict], seen: set[type] | None = None) -> set[str]:
    """Every key of every section: a suggestion need not be more precise than that."""
    seen = seen if seen is not None else set()
    if model in seen:
        return set()
    seen.add(model)
    keys = set(model.model_fields)
    stack: list[Any] = [field.annotation for field in model.model_fields.values()]
    while stack:
        hint = stack.pop()
        if isinstance(hint, type) and issubclass(hint, Strict):
            keys |= _all_keys(hint, seen)
        else:
            stack.extend(typing.get_args(hint))
    return keys
