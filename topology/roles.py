"""What the sections of a config mean for the plan: which stage a maker group fills, how many ranks a trainer has. Pure."""

from __future__ import annotations

from typing import Final

from buffer.config import Route
from makers.config import CustomMaker, MakerConfig, ModelConfig, RewardModelMaker, RolloutMaker, reward_model_stage
from topology.config import RunConfig
from trainers.config import RanksConfig

POLICY: Final = "policy"
CRITIC: Final = "critic"


def stage_of(maker: MakerConfig, group: str) -> str:
    """The stage that a maker group fills: its kind; of reward models one for each group; of a maker of one's own its name."""
    if isinstance(maker, RewardModelMaker):
        return reward_model_stage(group)
    return group if isinstance(maker, CustomMaker) else maker.kind


def model_of(maker: MakerConfig) -> ModelConfig | None:
    """The maker's own model; None: the run's."""
    model: ModelConfig | None = getattr(maker, "model", None)
    return model


def rollout_of(config: RunConfig) -> RolloutMaker:
    return next(maker for maker in config.makers.values() if isinstance(maker, RolloutMaker))


def max_response_tokens(config: RunConfig) -> int:
    """The largest completion budget: the constant of Dr.GRPO, one for all rows, whichever group made them."""
    return max(maker.sampling.max_tokens for maker in config.makers.values() if isinstance(maker, RolloutMaker))


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
        routes[stage_of(maker, group)].add(maker.route)
    return routes
