"""Settings of prompts, engines, makers and rewards; the one home of their defaults. Free of torch and vllm."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from buffer.config import Resources, Route, Strict

DOTTED = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"
# Arguments of vLLM that have a setting of their own, or that log-probs, versions and seeds rest on.
NOT_EXTRA = {
    "model",
    "tokenizer",
    "dtype",
    "max_model_len",
    "max_num_seqs",
    "seed",
    "gpu_memory_utilization",
    "enforce_eager",
    "kv_cache_memory_bytes",
    "logprobs_mode",
    "async_scheduling",
    "load_format",
    "generation_config",
    "override_generation_config",
    "logits_processors",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "distributed_executor_backend",
    "enable_sleep_mode",
}
# Sampling that a trainer's log-probs cannot follow.
NOT_REPLAYED = ("top_p", "top_k", "min_p", "typical_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
WHY_NOT_REPLAYED = (
    "it takes tokens out of the distribution that is sampled from, or shifts them; the trainer's log-probs are of all tokens, "
    "so every ratio of the two policies would be biased. Leave it out; a lower `temperature`, which the trainer follows, "
    "sharpens samples without that"
)
DATA_PARALLEL = "data_parallel"  # how all of vLLM's arguments for it begin
MORE_REPLICAS = "data parallelism is several makers, raise `replicas` of the group"


class ReasoningGymPrompts(Strict):
    type: Literal["reasoning_gym"]
    dataset: str
    size: int = Field(1000, ge=1)
    seed: int = 0
    config: dict[str, Any] = {}
    shuffle: bool = False
    epochs: int | None = Field(None, ge=1, description="Passes over the data; null means as many as the run needs.")
    suffix: str = Field("", description="Text added to the end of every question.")
    teacher_prompt: str | None = Field(
        None,
        description="What a teacher sees instead, with {question} and {answer} filled in, as the column `teacher_prompt`; null: "
        "the same as the student.",
    )


class FilePrompts(Strict):
    """A .jsonl or .parquet file, or a Hugging Face dataset folder, with a `prompt` column (text or chat messages)."""

    type: Literal["file"]
    path: str
    column: str = "prompt"
    seed: int = 0
    shuffle: bool = True
    epochs: int | None = Field(None, ge=1)


class CustomPrompts(Strict):
    type: Annotated[str, Field(pattern=DOTTED)]
    options: dict[str, Any] = {}
    seed: int = 0
    shuffle: bool = False
    epochs: int | None = Field(None, ge=1)


def _prompt_tag(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "custom" if isinstance(kind, str) and ":" in kind else str(kind)


PromptsConfig = Annotated[
    Annotated[ReasoningGymPrompts, Tag("reasoning_gym")]
    | Annotated[FilePrompts, Tag("file")]
    | Annotated[CustomPrompts, Tag("custom")],
    Discriminator(_prompt_tag),
]


class ModelConfig(Strict):
    path: str = Field(description="A Hugging Face checkpoint folder, or the name of a model prepared offline.")


class Sampling(Strict):
    n: int = Field(8, ge=1, description="Samples of one prompt: the size of a group.")
    temperature: float = Field(1.0, ge=0)
    max_tokens: int = Field(512, ge=1)
    stop: list[str] = []


class VllmEngine(Strict):
    type: Literal["vllm"] = "vllm"
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    max_model_len: int = Field(2048, ge=8)
    max_num_seqs: int = Field(64, ge=1, description="Sequences decoded at once.")
    kv_cache_gib: float = Field(0.5, gt=0, description="Key/value cache on CPU, GiB, of all processes together.")
    gpu_memory_utilization: float = Field(0.85, gt=0, le=1)
    tensor_parallel: int = Field(
        1, ge=1, description="Processes that share out every layer: its heads and its columns."
    )
    pipeline_parallel: int = Field(
        1, ge=1, description="Stages that share out the layers, each of tensor_parallel processes."
    )
    enforce_eager: bool | None = Field(None, description="null: eager on CPU, compiled on GPU.")
    threads: int | None = Field(None, ge=1, description="CPU threads of all processes together; null: resources.cpus.")
    extra: dict[str, Any] = Field({}, description="Passed to vllm.EngineArgs as they are.")

    @field_validator("extra")
    @classmethod
    def _leave_ours_alone(cls, extra: dict[str, Any]) -> dict[str, Any]:
        if taken := sorted(NOT_EXTRA & extra.keys()):
            raise ValueError(f"{', '.join(taken)}: set by Tandem, or a setting of its own beside `extra`")
        if sampling := sorted(extra.keys() & {*NOT_REPLAYED}):
            raise ValueError(f"{', '.join(sampling)}: not offered: {WHY_NOT_REPLAYED}")
        if parallel := sorted(key for key in extra if key.startswith(DATA_PARALLEL)):
            raise ValueError(f"{', '.join(parallel)}: {MORE_REPLICAS}")
        return extra

    @property
    def workers(self) -> int:
        """Processes that hold the model; one: the maker's own."""
        return self.tensor_parallel * self.pipeline_parallel


class MakerGroup(Strict):
    """What every kind has: how many makers of it there are, and for which rows."""

    replicas: int = Field(1, ge=1)
    route: Route | None = Field(
        None, description="The rows that the group takes, by a column of the prompts; null: all."
    )


class RolloutMaker(MakerGroup):
    kind: Literal["rollout"]
    resources: Resources = Resources()
    engine: VllmEngine = VllmEngine()
    sampling: Sampling = Sampling()
    update: Literal["in_flight", "between_rows"] = Field(
        "in_flight", description="Take new weights between two engine steps, or only when no row is being generated."
    )
    recompute: bool = Field(
        True,
        description="update: in_flight: running rows compute their cache again under the new weights, so that a token is "
        "exactly what its version says. false: they go on with the old cache, which is faster and slightly off-policy.",
    )


class RewardFunction(Strict):
    name: Literal["reasoning_gym", "math_verify", "exact_match", "regex", "overlong", "http"] | None = Field(
        None, description="Built in."
    )
    path: str | None = Field(None, pattern=DOTTED, description="Your own: package.module:function.")
    weight: float = 1.0
    normalise: Literal["none", "group", "running"] = Field(
        "none",
        description="Before the weight: group: minus the mean of the row's samples, over their standard deviation; running: "
        "the same with the mean and deviation of every score this maker has seen.",
    )
    timeout: float = Field(10.0, gt=0, description="Seconds for one call; then the process is killed.")
    options: dict[str, Any] = Field({}, description="Settings of a built-in one; keyword arguments of your own.")
    convention: Literal["row", "trl"] = Field(
        "row",
        description="How your own is called: row: `prompt` and each column as they are; trl: `prompts` and each column "
        "as lists with one entry a completion, completions as messages where the prompt is messages.",
    )

    @model_validator(mode="after")
    def _name_or_path(self) -> RewardFunction:
        if (self.name is None) == (self.path is None):
            raise ValueError("give exactly one of `name` (built in) and `path` (package.module:function)")
        if self.name is not None and self.convention != "row":
            raise ValueError("`convention` is read for functions of your own (`path`) only: remove it")
        return self


class RewardModelTerm(Strict):
    """What a group of `kind: reward_model` or `judge` adds to the reward of a sample."""

    group: str = Field(description="Its name in `makers`.")
    weight: float = 1.0
    normalise: Literal["none", "group", "running"] = Field("none", description="As of a function.")
    reduce: Literal["last", "min", "mean", "sum"] | None = Field(
        None,
        description="granularity: token: how the scores of a sample's tokens become one. Needed there, and there only.",
    )
    per_token: bool = Field(
        False,
        description="granularity: token, reduce: sum: also the column `token_rewards`, with which PPO rewards each token where "
        "it stands. Any other algorithm sees their sum.",
    )

    @model_validator(mode="after")
    def _sum_of_tokens(self) -> RewardModelTerm:
        if self.per_token and (self.reduce != "sum" or self.normalise != "none"):
            raise ValueError(
                "`per_token` gives each token its score, a sample their sum: set reduce: sum, normalise: none"
            )
        return self


class RewardMaker(MakerGroup):
    kind: Literal["reward"]
    resources: Resources = Resources(cpus=0.1)
    functions: list[RewardFunction] = []
    models: list[RewardModelTerm] = Field(
        [], description="Groups of `kind: reward_model` or `judge` whose scores are added."
    )
    workers: int = Field(1, ge=1, description="Processes that call reward functions in one maker.")
    slots: int = Field(8, ge=1, description="Rows scored at once by one maker.")
    start_timeout: float = Field(120.0, gt=0, description="Seconds for a process to import its functions.")

    @model_validator(mode="after")
    def _weighs_something(self) -> RewardMaker:
        if not (self.functions or self.models):
            raise ValueError("nothing gives a reward: name `functions`, `models` or both")
        if not any([term.weight for term in self.functions] + [term.weight for term in self.models]):
            raise ValueError("every weight is 0, so each reward would be 0: give one function or model a weight")
        named = [term.group for term in self.models]
        if twice := sorted({group for group in named if named.count(group) > 1}):
            raise ValueError(f"models: {', '.join(twice)} stands twice: name each group once")
        return self


class RewardModelMaker(MakerGroup):
    """Scores of a frozen classification checkpoint, for reward makers that name the group in their `models`."""

    kind: Literal["reward_model"]
    resources: Resources = Resources()
    model: ModelConfig = Field(description="With a head of one score, and the tokenizer of the run's model.")
    granularity: Literal["sequence", "token"] = Field(
        "sequence",
        description="sequence: one score a sample (AutoModelForSequenceClassification); token: one a response token, a process "
        "reward model (AutoModelForTokenClassification).",
    )
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    micro_batch_tokens: int = Field(
        4096, ge=1, description="Tokens, prompts and padding included, of one forward pass; a longer sample goes alone."
    )
    slots: int = Field(8, ge=1, description="Rows held at once by one maker, which computes them one after another.")
    threads: int | None = Field(None, ge=1, description="CPU threads; null: resources.cpus.")

    @property
    def cpu_threads(self) -> int:
        return self.resources.threads(self.threads)


def reward_model_stage(group: str) -> str:
    """The stage of a row that a group of reward models fills: each its own, since several may score the same row."""
    return f"reward/{group}"


def require_rising(bounds: tuple[float, float] | None) -> tuple[float, float] | None:
    """Raises ValueError for a range that holds no numbers."""
    if bounds is not None and not -math.inf < bounds[0] < bounds[1] < math.inf:
        raise ValueError(f"range {list(bounds)}: the lowest number comes first, below the highest, both finite")
    return bounds


class LastNumber(Strict):
    type: Literal["last_number"]
    range: tuple[float, float] | None = Field(
        None,
        description="Lowest and highest number, which become 0 and 1; one outside is no score. null: as it stands.",
    )

    @field_validator("range")
    @classmethod
    def _rises(cls, value: tuple[float, float] | None) -> tuple[float, float] | None:
        return require_rising(value)


class Pattern(Strict):
    """The number that the last match of a regular expression holds."""

    type: Literal["regex"]
    pattern: str = Field(description="With one group, the number.")
    range: tuple[float, float] | None = Field(None, description="As of last_number.")

    @field_validator("range")
    @classmethod
    def _rises(cls, value: tuple[float, float] | None) -> tuple[float, float] | None:
        return require_rising(value)

    @model_validator(mode="after")
    def _one_group(self) -> Pattern:
        try:
            groups = re.compile(self.pattern).groups
        except re.error as error:
            raise ValueError(f"pattern {self.pattern!r} is no regular expression: {error}") from None
        if groups != 1:
            raise ValueError(f"pattern {self.pattern!r} has {groups} groups, one is needed: the number")
        return self


class Words(Strict):
    type: Literal["words"]
    scores: dict[str, float] = Field(
        min_length=1, description="Score of each word; the one that stands last counts, in upper or lower case."
    )

    @model_validator(mode="after")
    def _words(self) -> Words:
        folded = [word.strip().casefold() for word in self.scores]
        if "" in folded or len({*folded}) < len(folded):
            raise ValueError(f"scores: the words {list(self.scores)} are not different, or one is empty")
        return self


class Call(Strict):
    """A function of your own, from the answer to a number, or to None where there is none."""

    type: Literal["function"]
    path: str = Field(pattern=DOTTED, description="package.module:function.")


JudgeParser = Annotated[LastNumber | Pattern | Words | Call, Discriminator("type")]


class JudgeMaker(MakerGroup):
    """Scores read from what a frozen model writes of each sample, for reward makers that name the group in their `models`."""

    kind: Literal["judge"]
    resources: Resources = Resources()
    model: ModelConfig | None = Field(
        None, description="Any chat or base model, with a tokenizer of its own; null: the run's, as it starts."
    )
    engine: VllmEngine = VllmEngine()
    template: str = Field(
        min_length=1,
        description="What it is asked: text with {prompt}, {completion} and any column of the prompts, or the path of a file "
        "(.txt, .md) that holds it.",
    )
    system: str = Field("", description="System text before it; empty: none.")
    temperature: float = Field(0.0, ge=0)
    max_tokens: int = Field(256, ge=1, description="Tokens of a verdict.")
    parser: JudgeParser = Field(LastNumber(type="last_number"), description="How a score is read from the verdict.")
    unparsed: Literal["fail"] | float = Field(
        "fail", description="A verdict without a score fails the row, or counts as this score."
    )
    slots: int = Field(8, ge=1, description="Rows judged at once by one maker.")

    def template_text(self) -> str:
        """Raises ValueError when it names a file that cannot be read."""
        if "\n" in self.template or not self.template.endswith((".txt", ".md")):
            return self.template
        try:
            return Path(self.template).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"template file {self.template} cannot be read: {error}") from None


class ReferenceMaker(MakerGroup):
    """Log-probs of the sampled tokens under a frozen policy, tempered as the samples were: column `reference_logprobs`."""

    kind: Literal["reference"]
    resources: Resources = Resources()
    model: ModelConfig | None = Field(None, description="null: the run's own model, with the weights it starts from.")
    engine: VllmEngine | None = Field(
        None,
        description="null: transformers computes them. vLLM: for samples drawn at temperature 1; `dtype` is its own.",
    )
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    micro_batch_tokens: int = Field(
        4096, ge=1, description="Response tokens, padded, of one forward pass; a longer sample goes alone."
    )
    slots: int = Field(4, ge=1, description="Rows held at once by one maker, which computes them one after another.")
    threads: int | None = Field(None, ge=1, description="CPU threads; null: resources.cpus.")

    @property
    def cpu_threads(self) -> int:
        return self.resources.threads(self.threads)


class DatasetMaker(MakerGroup):
    """Rows as the prompts' own columns have them, for SFT and DPO: stage `rollout`, filled by no policy."""

    kind: Literal["dataset"]
    resources: Resources = Resources(cpus=0.1)
    completion: str | None = Field(
        None,
        description="Column with the completion: text, or messages that end with the assistant's. null: the last turn of a "
        "prompt that is messages.",
    )
    chosen: str | None = Field(None, description="Column with the better completion of a pair, for DPO.")
    rejected: str | None = Field(None, description="Column with the worse one.")
    max_tokens: int = Field(512, ge=1, description="Tokens of a completion, its end included.")
    overlong: Literal["truncate", "fail"] = Field(
        "truncate", description="A longer completion is cut, without its end; or its row fails as data."
    )
    slots: int = Field(16, ge=1, description="Rows held at once by one maker.")

    @model_validator(mode="after")
    def _one_form(self) -> DatasetMaker:
        if (self.chosen is None) != (self.rejected is None):
            raise ValueError("a pair needs both columns, `chosen` and `rejected`")
        if self.chosen is not None and self.completion is not None:
            raise ValueError("give either `completion`, or `chosen` and `rejected`")
        return self

    @property
    def samples(self) -> int:
        """Of one row: a completion, or a pair (chosen first)."""
        return 1 if self.chosen is None else 2

    @property
    def columns(self) -> tuple[str | None, ...]:
        """Where the samples come from; None: the last turn of the prompt."""
        return (self.completion,) if self.chosen is None else (self.chosen, self.rejected)


class TeacherMaker(MakerGroup):
    """What a teacher thinks of each sampled token: its K likeliest tokens with their log-probs, and that of the token itself."""

    kind: Literal["teacher"]
    resources: Resources = Resources()
    model: ModelConfig | None = Field(None, description="null: the run's own model, with the weights it starts from.")
    engine: VllmEngine = VllmEngine()
    top_k: int | None = Field(
        64,
        ge=0,
        description="Likeliest tokens kept of each distribution; null, all of them: with a colocated teacher only.",
    )
    micro_batch_tokens: int = Field(
        1024, ge=1, description="Tokens of one step of the engine, prompts included: bounds the memory of their logits."
    )
    slots: int = Field(8, ge=1, description="Rows scored at once by one maker.")


class CustomMaker(MakerGroup):
    """A maker kind of your own: a class with `stage`, `needs` and `async make(lease, inputs)`."""

    kind: Annotated[str, Field(pattern=DOTTED)]
    resources: Resources = Resources()
    options: dict[str, Any] = {}


def _maker_tag(value: Any) -> str:
    kind = value.get("kind") if isinstance(value, dict) else getattr(value, "kind", None)
    return "custom" if isinstance(kind, str) and ":" in kind else str(kind)


MakerConfig = Annotated[
    Annotated[RolloutMaker, Tag("rollout")]
    | Annotated[RewardMaker, Tag("reward")]
    | Annotated[RewardModelMaker, Tag("reward_model")]
    | Annotated[JudgeMaker, Tag("judge")]
    | Annotated[ReferenceMaker, Tag("reference")]
    | Annotated[DatasetMaker, Tag("dataset")]
    | Annotated[TeacherMaker, Tag("teacher")]
    | Annotated[CustomMaker, Tag("custom")],
    Discriminator(_maker_tag),
]
