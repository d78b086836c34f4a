"""What the sections of a config mean for the plan: which stage a maker group fills, how many ranks a trainer has. Pure."""

from __future__ import annotations

from makers.config import CustomMaker, MakerConfig, ModelConfig, RolloutMaker
from topology.config import RunConfig
from trainers.config import MegatronBackend, TrainerConfig

POLICY = "policy"


def stage_of(maker: MakerConfig, group: str) -> str:
    """The stage that a maker group fills: its kind, or for a maker of one's own the group's name."""
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


def ranks_of(trainer: TrainerConfig) -> int:
    return trainer.backend.ranks if isinstance(trainer.backend, MegatronBackend) else 1


def tensor_parallel_of(trainer: TrainerConfig) -> int:
    """Ranks next to each other that exchange activations in every layer."""
    return trainer.backend.tensor_parallel if isinstance(trainer.backend, MegatronBackend) else 1


def stages_of(config: RunConfig) -> tuple[str, ...]:
    return tuple(dict.fromkeys(stage_of(maker, group) for group, maker in config.makers.items()))
