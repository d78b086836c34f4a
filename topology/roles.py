"""What the sections of a config mean for the plan: which stage a maker group fills, how many ranks a trainer has. Pure."""

from __future__ import annotations

from typing import Final

from buffer.config import Route
from makers.config import (
    CustomMaker,
    DatasetMaker,
    JudgeMaker,
    MakerConfig,
    ModelConfig,
    RewardModelMaker,
    RolloutMaker,
    reward_model_stage,
)
from makers.prompts.mixed import FROM_DATASET
from topology.config import RunConfig
from trainers.config import RanksConfig

POLICY: Final = "policy"
CRITIC: Final = "critic"


def stage_of(maker: MakerConfig, group: str) -> str:
    """The stage that a maker group fills: its kind; of reward models and judges one for each
    group; of a maker of one's own the group's
    name. A dataset's rows stand where a policy's would."""
    if isinstance(maker, RewardModelMaker | JudgeMaker):
        return reward_model_stage(group)
    if isinstance(maker, DatasetMaker):
        return "rollout"
    return group if isinstance(maker, CustomMaker) else maker.kind


def model_of(maker: MakerConfig) -> ModelConfig | None:
    """The maker's own model; None: the run's."""
    model: ModelConfig | None = getattr(maker, "model", None)
    return model


def reads_tokens(maker: MakerConfig) -> bool:
    """Whether its model takes the row's token ids, and so needs the tokenizer of the run's; a judge reads text."""
    return not isinstance(maker, JudgeMaker)


def rollout_of(config: RunConfig) -> RolloutMaker:
    return next(maker for maker in config.makers.values() if isinstance(maker, RolloutMaker))


def samples_of(config: RunConfig) -> int:
    """Samples of one row: the size of a group."""
    sizes = [samples_of_row(maker) for maker in config.makers.values()]
    return next(size for size in sizes if size is not None)


def samples_of_row(maker: MakerConfig) -> int | None:
    """Of a group that fills the stage `rollout`; None: it does not."""
    if isinstance(maker, RolloutMaker):
        return maker.sampling.n
    return maker.samples if isinstance(maker, DatasetMaker) else None


def makers_that_pull(config: RunConfig) -> bool:
    """Whether any maker follows the trainer's weights."""
    return any(isinstance(maker, RolloutMaker) for maker in config.makers.values())


def max_response_tokens(config: RunConfig) -> int:
    """The largest completion budget: the constant of Dr.GRPO, one for all rows, whichever group made them."""
    budgets = [maker.sampling.max_tokens for maker in config.makers.values() if isinstance(maker, RolloutMaker)]
    budgets += [maker.max_tokens for maker in config.makers.values() if isinstance(maker, DatasetMaker)]
    return max(budgets)


def role_of(actor: str) -> str:
    """Of `trainer/ROLE` and `trainer/ROLE/rank/I`."""
    return actor.split("/")[1]


def ranks_of(trainer: RanksConfig) -> int:
    return trainer.backend.ranks


def maker_names(group: str, maker: MakerConfig) -> list[str]:
    return [f"maker/{group}/{index}" for index in range(maker.replicas)]


def rank_names(role: str, trainer: RanksConfig) -> list[str]:
    return [f"trainer/{role}/rank/{index}" for index in range(ranks_of(trainer))]


def tensor_parallel_of(trainer: RanksConfig) -> int:
    """Ranks next to each other that exchange activations in every layer."""
    return trainer.backend.tensor_parallel


def stages_of(config: RunConfig) -> tuple[str, ...]:
    return tuple(dict.fromkeys(stage_of(maker, group) for group, maker in config.makers.items()))


def routes_of(config: RunConfig) -> dict[str, set[Route | None]]:
    """By stage, of its groups; None: a group that takes every row."""
    routes: dict[str, set[Route | None]] = {stage: set() for stage in stages_of(config)}
    for group, maker in config.makers.items():
        routes[stage_of(maker, group)].add(route_of(config, maker))
    return routes


def on_policy_of(config: RunConfig) -> float:
    """The fraction of rows that the policy samples; below 1, a dataset gives the others."""
    policy = config.trainers.policy
    return 1.0 if policy is None or policy.distill is None else policy.distill.lmbda


def route_of(config: RunConfig, maker: MakerConfig) -> Route | None:
    """The rows a group takes: where rows are mixed, those drawn for its kind; held-out prompts, not drawn, are sampled."""
    if on_policy_of(config) < 1:
        if isinstance(maker, DatasetMaker):
            return Route(column=FROM_DATASET, values=(True,))
        if isinstance(maker, RolloutMaker):
            return Route(column=FROM_DATASET, values=(False, None))
    return maker.route
