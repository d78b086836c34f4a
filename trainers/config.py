"""Settings of trainers, algorithms, backends and optimizers; the one home of their defaults. Free of torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, overload

from pydantic import Discriminator, Field, Tag, model_validator

from buffer.config import Resources, Strict
from trainers.algorithms.config import (
    Cispo,
    ClippedPolicy,
    Corrections,
    Dapo,
    DrGrpo,
    GroupPolicy,
    Grpo,
    Gspo,
    KlEstimator,
    ReinforcePlusPlus,
    Rloo,
)

__all__ = ["ClippedPolicy", "Corrections", "Dapo", "GroupPolicy", "Grpo"]  # also to be had from here


class Ppo(ClippedPolicy):
    """Proximal policy optimisation: advantages by GAE from the values of the trainer `critic`."""

    type: Literal["ppo"]
    clip_high: float = Field(0.2, ge=0)
    gamma: float = Field(1.0, gt=0, le=1, description="Discount of a reward for each token it lies ahead.")
    lam: float = Field(0.95, ge=0, le=1, description="Lambda of GAE: 0 trusts the values, 1 the rewards alone.")
    kl_coef: float = Field(
        0.05, ge=0, description="Weight of KL(behaviour, reference) in the reward of each token; 0: no reference."
    )
    kl_estimator: KlEstimator = "k1"
    whiten_advantages: bool = Field(True, description="To mean 0 and deviation 1 over the valid tokens of a step.")
    bootstrap_truncated: bool = Field(
        False,
        description="A sample that hit max_tokens is worth its last value beyond its end; false: nothing, as the reward "
        "function has judged what is there.",
    )

    @property
    def stages(self) -> tuple[str, ...]:
        """Whose columns the trainer reads."""
        return ("rollout", "reward", "reference") if self.kl_coef > 0 else ("rollout", "reward")


class Sft(Strict):
    """Supervised fine-tuning: cross entropy over the tokens of completions that a dataset has."""

    stages: ClassVar[tuple[str, ...]] = ("rollout",)
    pairs: ClassVar[bool] = False

    type: Literal["sft"]
    normalise: Literal["token", "sequence"] = Field(
        "token", description="token: mean over all tokens of the step. sequence: over a sample, then over samples."
    )


class Dpo(Strict):
    """Direct preference optimisation, and the losses that differ from it in how a margin is judged."""

    pairs: ClassVar[bool] = True

    type: Literal["dpo"]
    beta: float = Field(0.1, gt=0, description="How much a log-ratio to the reference counts: the reward's scale.")
    loss: Literal["sigmoid", "ipo", "hinge"] = "sigmoid"
    label_smoothing: float = Field(0.0, ge=0, lt=0.5, description="sigmoid: how often the label of a pair is wrong.")
    reference: Literal["start", "maker"] = Field(
        "start", description="start: the ranks' own start weights. maker: the column of a group of `kind: reference`."
    )

    @model_validator(mode="after")
    def _smoothing_is_read(self) -> Dpo:
        if self.label_smoothing and self.loss != "sigmoid":
            raise ValueError(f"label_smoothing is read with `loss: sigmoid` only, not with `{self.loss}`")
        return self

    @property
    def stages(self) -> tuple[str, ...]:
        return ("rollout", "reference") if self.reference == "maker" else ("rollout",)


class DistillAlgorithm(ClippedPolicy):
    """What `distill` says, alone: needs no reward. The ratio's settings are read with `distill.advantage_alpha` only."""

    stages: ClassVar[tuple[str, ...]] = ("rollout",)

    type: Literal["distill"]


class CustomAlgorithm(Strict):
    """An algorithm of one's own, with the advantages of GRPO."""

    stages: ClassVar[tuple[str, ...]] = ("rollout", "reward")

    type: Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]
    options: dict[str, Any] = {}


def _algorithm_tag(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "custom" if isinstance(kind, str) and ":" in kind else str(kind)


AlgorithmConfig = Annotated[
    Annotated[Grpo, Tag("grpo")]
    | Annotated[DrGrpo, Tag("dr_grpo")]
    | Annotated[Dapo, Tag("dapo")]
    | Annotated[Gspo, Tag("gspo")]
    | Annotated[Cispo, Tag("cispo")]
    | Annotated[Rloo, Tag("rloo")]
    | Annotated[ReinforcePlusPlus, Tag("reinforce_plus_plus")]
    | Annotated[Ppo, Tag("ppo")]
    | Annotated[Sft, Tag("sft")]
    | Annotated[Dpo, Tag("dpo")]
    | Annotated[DistillAlgorithm, Tag("distill")]
    | Annotated[CustomAlgorithm, Tag("custom")],
    Discriminator(_algorithm_tag),
]


class ValueRegression(Strict):
    """Squared error of the critic's values against the returns of GAE."""

    type: Literal["value"]
    clip: float | None = Field(
        0.2, gt=0, description="How far a value may move from that of the start of the step; null: any distance."
    )


# Words in keys that users of Megatron know, and why no backend has them.
NOT_OFFERED = {
    ("virtual_pipeline", "interleaved"): (
        "the interleaved pipeline schedule mixes up its messages where ranks talk through gloo, so it could not be tested; "
        "more micro-batches (a smaller micro_batch_tokens) shorten the pipeline's bubble as well"
    ),
    ("grouped_gemm",): (
        "it needs TransformerEngine's grouped GEMM, which has no build for CPUs; experts are computed one after another"
    ),
    ("expert_tensor_parallel",): (
        "tensor-parallel experts beside expert_parallel gather pieces of unequal size, which gloo cannot; with "
        "expert_parallel every expert is whole, without it tensor_parallel splits each"
    ),
}


class MegatronBackend(Strict):
    type: Literal["megatron"]
    tensor_parallel: int = Field(1, ge=1)
    pipeline_parallel: int = Field(1, ge=1)
    context_parallel: int = Field(1, ge=1)
    data_parallel: int = Field(1, ge=1)
    expert_parallel: int = Field(
        1, ge=1, description="Ranks that share out the experts of a layer: they are tensor, context and data ranks."
    )
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

    # No settings: the layout of ranks that whoever plans for a backend asks for.
    ranks: ClassVar[int] = 1
    tensor_parallel: ClassVar[int] = 1
    data_parallel: ClassVar[int] = 1
    share_prompt: ClassVar[bool] = False

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


class RanksConfig(Strict):
    """What every trainer has: a model on ranks of its own."""

    backend: BackendConfig
    resources: Resources = Field(Resources(), description="Of each rank.")
    minibatches: int = Field(1, ge=1, description="Optimizer steps on the rows of one step, the proximal policy fixed.")

    @property
    def threads(self) -> int:
        """CPU threads of a rank."""
        return self.resources.threads(self.backend.threads)


class ColocatedTeacher(Strict):
    """A frozen model on the policy's own ranks, split as the policy is."""

    model: str = Field(description="As `model.path`; with the policy's tokenizer and as large a vocabulary.")
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    top_k: int | None = Field(None, ge=1, description="Likeliest tokens that are compared; null: the whole vocabulary.")
    offload: bool = Field(False, description="In CPU memory while it is not used.")


class DistillConfig(Strict):
    """A term in the policy's loss that draws it to a teacher: that of the ranks, or one whose columns a group of
    `kind: teacher` provides."""

    teacher: ColocatedTeacher | None = Field(None, description="null: the makers' teacher.")
    temperature: float = Field(
        1.0, gt=0, description="Of both sides of the divergence; a makers' teacher gives log-probs at 1 only."
    )

    divergence: Literal["forward_kl", "reverse_kl", "jsd"] = Field(
        "forward_kl",
        description="forward_kl: KL(teacher, student). reverse_kl: KL(student, teacher). jsd: beta KL(teacher, m) + "
        "(1 - beta) KL(student, m) with m = beta teacher + (1 - beta) student.",
    )
    beta: float = Field(
        0.5, gt=0, lt=1, description="Of `jsd`: towards 0 it is like forward_kl, towards 1 like reverse_kl."
    )
    lmbda: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Fraction of the rows that the policy samples; below 1 a group of `kind: dataset` gives the others.",
    )
    coef: float = Field(1.0, ge=0, description="Weight of the divergence, a mean over tokens as `normalise` says.")
    sft_alpha: float = Field(
        0.0, ge=0, description="Weight of the cross entropy of a row's own tokens, on rows that no policy sampled."
    )
    advantage_alpha: float = Field(
        0.0,
        ge=0,
        description="Policy-gradient form: added to a token's advantage, times log p_teacher - log p_student of the token.",
    )


class TrainerConfig(RanksConfig):
    algorithm: AlgorithmConfig
    distill: DistillConfig | None = None
    optimizer: Optimizer = Optimizer()
    groups_per_step: int = Field(8, ge=1, description="Rows (prompt groups) of one step.")
    steps: int = Field(ge=1)
    mismatch: Mismatch = Mismatch()
    peak_tflops: float | None = Field(
        None,
        gt=0,
        description="What the device of one rank can do in `backend.dtype`, for the metric `mfu`; null: no such metric.",
    )
    max_nonfinite_steps: int = Field(3, ge=1, description="Steps in a row that were not finite, and end the run.")
    max_empty_steps: int = Field(5, ge=1, description="Batches in a row without one valid token, that end the run.")

    @property
    def teacher(self) -> ColocatedTeacher | None:
        """On the ranks."""
        return None if self.distill is None else self.distill.teacher

    def with_teacher_from(self, folder: str) -> TrainerConfig:
        """The same where there is no teacher on the ranks; else with another folder for its model."""
        if self.distill is None or self.distill.teacher is None:
            return self
        teacher = self.distill.teacher.model_copy(update={"model": folder})
        return self.model_copy(update={"distill": self.distill.model_copy(update={"teacher": teacher})})

    @property
    def stages(self) -> tuple[str, ...]:
        """Whose columns the trainer reads."""
        makers_teach = self.distill is not None and self.distill.teacher is None
        return (*self.algorithm.stages, "teacher") if makers_teach else self.algorithm.stages


class CriticConfig(RanksConfig):
    """The value model of a policy that is trained with `ppo`. It takes the policy's rows, step by step."""

    algorithm: ValueRegression = ValueRegression(type="value")
    optimizer: Optimizer = Optimizer(lr=1e-5)


class TrainersConfig(Strict):
    """The trainers of a run: to be read by role, like a mapping. Empty in a job (see `collect`)."""

    policy: TrainerConfig | None = Field(None, description="Needed, unless the run has `collect` in place of trainers.")
    critic: CriticConfig | None = Field(None, description="Needed by `ppo`, and by nothing else.")

    @overload
    def __getitem__(self, role: Literal["policy"]) -> TrainerConfig: ...

    @overload
    def __getitem__(self, role: str) -> TrainerConfig | CriticConfig: ...

    def __getitem__(self, role: str) -> TrainerConfig | CriticConfig:
        return dict(self.items())[role]

    def __iter__(self) -> Iterator[str]:  # type: ignore[override]
        yield from (role for role, _ in self.items())

    def items(self) -> Iterator[tuple[str, TrainerConfig | CriticConfig]]:
        if self.policy is not None:
            yield "policy", self.policy
        if self.critic is not None:
            yield "critic", self.critic
