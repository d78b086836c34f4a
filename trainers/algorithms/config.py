"""Settings of the policy-gradient algorithms; the one home of their defaults. Free of torch.

Each algorithm says what it needs: whose columns (`stages`), and whether a row must have two samples (`needs_groups`).
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from buffer.config import Strict

Level = Literal["token", "sequence", "geometric"]
KlEstimator = Literal["k1", "k2", "k3"]

# What users of verl, TRL and ms-swift write, and what it is called here.
CALLED_HERE = {
    "epsilon": "clip_low",
    "clip_ratio": "clip_low",
    "clip_ratio_low": "clip_low",
    "epsilon_low": "clip_low",
    "epsilon_high": "clip_high",
    "clip_ratio_high": "clip_high",
    "cliprange": "clip_low",
    "beta": "kl_coef, or trainers.policy.distill.beta",
    "kl_loss_coef": "kl_coef",
    "kl_loss_type": "kl_estimator",
    "kl_in_reward": "kl_in",
    "use_kl_in_reward": "kl_in",
    "adv_estimator": "type",
    "advantage_estimator": "type",
    "loss_type": "type and normalise",
    "loss_agg_mode": "normalise",
    "mask_truncated_completions": "mask_truncated",
    "overlong_filter": "mask_truncated",
    "entropy_coeff": "entropy_coef",
    "norm_adv_by_std_in_grpo": "scale_rewards",
    "importance_sampling_level": "type: gspo",
    "importance_sampling": "corrections.truncate",
    "off_policy_mask_threshold": "corrections.mask_off_policy",
    "off_policy_sequence_mask_delta": "corrections.mask_off_policy",
    "teacher_kl_coef": "trainers.policy.distill.advantage_alpha",
    "ppo_mini_batch_size": "trainers.policy.minibatches",
    "steps_per_generation": "trainers.policy.minibatches",
    "num_mini_batches": "trainers.policy.minibatches",
    "dynamic_sample": "type: dapo",
    "filter_groups": "type: dapo",
    "max_resample_times": "max_refills",
    "max_num_gen_batches": "max_refills",
}

PASSES = {"num_iterations", "ppo_epochs", "num_ppo_epochs"}
ONE_PASS = (
    "each row is trained once; `trainers.policy.minibatches` parts the rows of a step among several optimizer steps"
)


class Truncate(Strict):
    """Truncated importance sampling (arXiv 1802.01561): a token's loss is multiplied with min(ratio, cap).

    The ratio of proximal to behaviour policy: of the token, of its sequence (the product), or its geometric mean.
    """

    level: Level = "token"
    cap: float = Field(2.0, gt=0)


class Band(Strict):
    """Tokens whose ratio of proximal to behaviour policy is outside of [low, high] have no gradient.

    At level `token` with 0.5 and 5 it is the band of IcePop (Ling Team, "Every step evolves", arXiv 2510.18855); with low 0 it
    is masked importance sampling. At the other levels whole samples go.
    """

    level: Level = "token"
    low: float = Field(0.5, ge=0)
    high: float = Field(5.0, gt=0)

    @model_validator(mode="after")
    def _ordered(self) -> Band:
        if self.low >= self.high:
            raise ValueError(f"low {self.low:g} must be below high {self.high:g}")
        return self


class Corrections(Strict):
    """What is done about tokens that another policy sampled. They compose: weights multiply, masks add up."""

    truncate: Truncate | None = Truncate()
    band: Band | None = None
    mask_off_policy: float | None = Field(
        None,
        gt=0,
        description="Samples with a negative advantage have no gradient where mean(behaviour - current log-prob) exceeds "
        "this, nats a token (DeepSeek-V3.2, arXiv 2512.02556).",
    )
    proximal: Literal["recomputed", "interpolated"] = Field(
        "recomputed",
        description="recomputed: the policy at the start of the step, by a forward if it has several minibatches. "
        "interpolated: between behaviour and current policy, without one (arXiv 2512.06547).",
    )
    interpolation: float | None = Field(
        None, gt=0, lt=1, description="Weight of the behaviour policy's log-prob in `interpolated`, e.g. 0.5."
    )

    @model_validator(mode="after")
    def _read(self) -> Corrections:
        if (self.interpolation is not None) != (self.proximal == "interpolated"):
            raise ValueError("`proximal: interpolated` and `interpolation` go together: give both or neither")
        return self


class ClippedPolicy(Strict):
    """What the policy losses with a clipped ratio have in common."""

    needs_groups: ClassVar[bool] = False  # whether a row must have two samples or more

    clip_low: float = Field(0.2, ge=0)
    clip_high: float = Field(0.28, ge=0)
    normalise: Literal["sequence", "constant", "token"] = Field(
        "token",
        description="sequence: mean over a sample, then over samples (GRPO). constant: sum / max_tokens (Dr.GRPO). "
        "token: mean over all tokens of the step (DAPO).",
    )
    entropy_coef: float = Field(0.0, description="Weight of the entropy bonus.")
    corrections: Corrections = Corrections()
    mask_truncated: bool = Field(False, description="Leave samples that hit max_tokens out of the loss.")


class GroupPolicy(ClippedPolicy):
    """Advantages from the rewards alone, without a critic."""

    kl_coef: float = Field(0.0, ge=0, description="Weight of KL(policy, reference); 0: no reference.")
    kl_estimator: KlEstimator = "k3"
    kl_in: Literal["loss", "reward"] = Field(
        "loss",
        description="loss: per token, current policy against `reference`. reward: its sum over a sample is taken off the "
        "reward, behaviour policy against a group of `kind: reference`.",
    )
    reference: Literal["start", "maker"] = Field(
        "start",
        description="Of `kl_in: loss`. start: the ranks' own start weights. maker: the column of a group of `kind: reference`.",
    )

    @property
    def stages(self) -> tuple[str, ...]:
        """Whose columns the trainer reads."""
        return ("rollout", "reward", "reference") if self.reads_reference else ("rollout", "reward")

    @property
    def reads_reference(self) -> bool:
        """Whether it needs the column of a reference maker."""
        return self.penalises_rewards or (self.penalises_loss and self.reference == "maker")

    @property
    def penalises_rewards(self) -> bool:
        return self.kl_coef > 0 and self.kl_in == "reward"

    @property
    def penalises_loss(self) -> bool:
        return self.kl_coef > 0 and self.kl_in == "loss"

    @property
    def proportional_to_advantage(self) -> bool:
        """Whether a token with advantage 0 has a gradient of exactly 0, so that it need not be computed."""
        return not self.penalises_loss and self.entropy_coef == 0


class Grpo(GroupPolicy):
    """Group relative policy optimisation (DeepSeekMath, arXiv 2402.03300)."""

    needs_groups: ClassVar[bool] = True

    type: Literal["grpo"]
    scale_rewards: Literal["group", "batch", "none"] = Field(
        "group",
        description="What advantages are divided by: the group's standard deviation (also `true`), that of all rewards of the "
        "step (arXiv 2508.08221), or nothing (also `false`).",
    )

    @model_validator(mode="before")
    @classmethod
    def _booleans(cls, given: Any) -> Any:
        scale = given.get("scale_rewards") if isinstance(given, dict) else None
        return given | {"scale_rewards": "group" if scale else "none"} if isinstance(scale, bool) else given


class DrGrpo(Grpo):
    """Dr.GRPO (arXiv 2503.20783): the loss of GRPO, divided by max_tokens rather than by lengths; rewards unscaled."""

    type: Literal["dr_grpo"]  # type: ignore[assignment]
    scale_rewards: Literal["group", "batch", "none"] = "none"
    normalise: Literal["sequence", "constant", "token"] = "constant"


class Dapo(Grpo):
    """DAPO (arXiv 2503.14476): the loss of GRPO over all tokens with a higher upper clip, on groups with a signal.

    Dynamic sampling: groups whose rewards are all equal are dropped before the step, and others sampled instead.
    """

    type: Literal["dapo"]  # type: ignore[assignment]
    max_refills: int = Field(
        10,
        ge=1,
        description="Times that a step's rows are sampled again; then it is trained with those that have a signal.",
    )


class Gspo(Grpo):
    """Group sequence policy optimisation (arXiv 2507.18071): clipped is the ratio of a sample, its geometric mean."""

    type: Literal["gspo"]  # type: ignore[assignment]
    clip_low: float = Field(3e-4, ge=0)
    clip_high: float = Field(4e-4, ge=0)
    normalise: Literal["sequence", "constant", "token"] = "sequence"


class Cispo(Grpo):
    """CISPO (MiniMax-M1, arXiv 2506.13585): the clipped ratio is a constant weight of log-probs; no token loses its gradient."""

    type: Literal["cispo"]  # type: ignore[assignment]
    clip_low: float = Field(1.0, ge=0, le=1, description="1: no lower bound, as in the paper.")
    clip_high: float = Field(4.0, ge=0)


class Rloo(GroupPolicy):
    """REINFORCE leave one out (arXiv 2402.14740): the loss of GRPO, the baseline is the mean of a group's other samples."""

    needs_groups: ClassVar[bool] = True

    type: Literal["rloo"]
    clip_high: float = Field(0.2, ge=0)
    kl_estimator: KlEstimator = "k1"
    kl_in: Literal["loss", "reward"] = "reward"


class ReinforcePlusPlus(GroupPolicy):
    """REINFORCE++ (arXiv 2501.03262): PPO's loss; advantages are rewards, normalised over all tokens of the step."""

    type: Literal["reinforce_plus_plus"]
    clip_high: float = Field(0.2, ge=0)
    kl_estimator: KlEstimator = "k1"
    kl_in: Literal["loss", "reward"] = "reward"
    baseline: Literal["none", "group"] = Field(
        "none", description="group: the mean of a group is taken off its rewards first (REINFORCE++-baseline)."
    )

    @property
    def needs_groups(self) -> bool:  # type: ignore[override]
        return self.baseline == "group"
