"""Settings of trainers, algorithms, backends and optimizers; the one home of their defaults. Free of torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from buffer.config import Resources, Strict


class ImportanceSampling(Strict):
    """Truncated importance sampling: weight = min(exp(proximal - behaviour), cap), per token."""

    cap: float = Field(2.0, gt=0)


class Grpo(Strict):
    """Group relative policy optimisation and its two best known variants."""

    type: Literal["grpo"]
    clip_low: float = Field(0.2, ge=0)
    clip_high: float = Field(0.28, ge=0)
    normalise: Literal["sequence", "constant", "token"] = Field(
        "token",
        description="sequence: mean over a sample, then over samples (GRPO). constant: sum / max_tokens (Dr.GRPO). "
        "token: mean over all tokens of the step (DAPO).",
    )
    scale_rewards: bool = Field(
        True, description="Divide advantages by the group's standard deviation (false: Dr.GRPO)."
    )
    kl_coef: float = Field(0.0, ge=0, description="Weight of KL(policy, start weights) in the loss.")
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    entropy_coef: float = Field(0.0, description="Weight of the entropy bonus.")
    importance_sampling: ImportanceSampling | None = ImportanceSampling()
    mask_truncated: bool = Field(False, description="Leave samples that hit max_tokens out of the loss.")

    @property
    def proportional_to_advantage(self) -> bool:
        """Whether a token with advantage 0 has a gradient of exactly 0, so that it need not be computed."""
        return self.kl_coef == 0 and self.entropy_coef == 0


class CustomAlgorithm(Strict):
    type: Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]
    options: dict[str, Any] = {}


def _algorithm_tag(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "custom" if isinstance(kind, str) and ":" in kind else str(kind)


AlgorithmConfig = Annotated[
    Annotated[Grpo, Tag("grpo")] | Annotated[CustomAlgorithm, Tag("custom")], Discriminator(_algorithm_tag)
]


class MegatronBackend(Strict):
    type: Literal["megatron"]
    tensor_parallel: int = Field(1, ge=1)
    pipeline_parallel: int = Field(1, ge=1)
    context_parallel: int = Field(1, ge=1)
    data_parallel: int = Field(1, ge=1)
    expert_parallel: int = Field(1, ge=1, description="Of the data-parallel ranks: how many share out the experts.")
    sequence_parallel: bool = Field(False, description="Split norms and dropout along the sequence over tensor ranks.")
    dtype: Literal["bfloat16", "float32"] = Field("bfloat16", description="Of parameters; main parameters are float32.")
    micro_batch_tokens: int = Field(4096, ge=1, description="Packed tokens of one forward and backward.")
    share_prompt: bool = Field(True, description="Compute the prompt of a group once for all its samples.")
    distributed_optimizer: bool = True
    recompute: bool = Field(False, description="Recompute activations in the backward pass.")
    threads: int | None = Field(None, ge=1, description="CPU threads of a rank; null: resources.cpus.")

    @property
    def ranks(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel * self.context_parallel * self.data_parallel


class TorchBackend(Strict):
    """Plain torch on one process: the reference the Megatron backend is checked against."""

    type: Literal["torch"]
    dtype: Literal["bfloat16", "float32"] = "float32"
    micro_batch_tokens: int = Field(4096, ge=1)
    threads: int | None = Field(None, ge=1)


BackendConfig = Annotated[MegatronBackend | TorchBackend, Discriminator("type")]


class Optimizer(Strict):
    lr: float = Field(1e-6, gt=0)
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = Field(0, ge=0)
    min_lr: float = Field(0.0, ge=0)


class Mismatch(Strict):
    """Bounds on the k3 KL between trainer and maker log-probs at equal version."""

    warn: float = Field(0.02, gt=0)
    stop: float = Field(1.0, gt=0)
    versions: int | None = Field(
        None,
        ge=0,
        description="Past versions whose weights each rank keeps to compare at, one copy of its parameters each; null: as many "
        "as rows can be versions old. 0: only tokens of the trainer's own version are compared.",
    )


class WandbConfig(Strict):
    project: str
    mode: Literal["online", "offline"] = "offline"


class MetricsConfig(Strict):
    """metrics.jsonl is always written; these are further sinks."""

    tensorboard: bool = False
    wandb: WandbConfig | None = None


class TrainerConfig(Strict):
    algorithm: AlgorithmConfig
    backend: BackendConfig
    optimizer: Optimizer = Optimizer()
    groups_per_step: int = Field(8, ge=1, description="Rows (prompt groups) of one step.")
    minibatches: int = Field(1, ge=1, description="Optimizer steps on the rows of one step, the proximal policy fixed.")
    steps: int = Field(ge=1)
    mismatch: Mismatch = Mismatch()
    max_nonfinite_steps: int = Field(3, ge=1, description="Steps in a row that were not finite, and end the run.")
    max_empty_steps: int = Field(5, ge=1, description="Batches in a row without one valid token, that end the run.")
    resources: Resources = Field(Resources(), description="Of each rank.")

    @property
    def threads(self) -> int:
        """CPU threads of a rank: the backend's own setting, else the CPUs it asks for."""
        return self.backend.threads or max(1, int(self.resources.cpus))
