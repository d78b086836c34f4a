"""The columns of each stage, and the check that a bad batch dies at its source.

Columns are flat numpy arrays by name, one dict for one stage of one row; offsets say where each sample begins. A maker checks
what it made with `validate_answer` before it answers, so an error carries the row and sample it belongs to.
`rollout`, `reward`, `reference`, `teacher` and `reward/GROUP` have the schemas below; the columns of any other stage are flat
numeric arrays of its own choice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

import numpy as np

from buffer.records import Lease, Produced

Columns = dict[str, np.ndarray]

# A float32 log-softmax is <= 0 by construction, but logit - logsumexp(logits) rounds to a few 1e-5 above it for logits of
# some hundreds. What is really wrong (probabilities, a missing sign, other logits) lies far beyond.
MAX_LOGPROB = 1e-4

NO_POLICY = -1  # version of the tokens of a row that no policy made: they are a dataset's
FINISHED_BY_STOP, FINISHED_BY_LENGTH = 0, 1
LARGEST, SMALLEST = float(np.finfo(np.float32).max), float(np.finfo(np.float32).smallest_subnormal)  # finite, above 0
NO_INPUTS: Mapping[str, Columns] = {}


class Column(NamedTuple):
    dtype: type[np.generic]
    per: Literal["prompt token", "response token", "sample", "sample boundary", "response token x K"]


ROLLOUT: Mapping[str, Column] = {
    "prompt_ids": Column(np.int32, "prompt token"),
    "response_ids": Column(np.int32, "response token"),
    "response_offsets": Column(np.int64, "sample boundary"),  # sample i is response_ids[offsets[i] : offsets[i + 1]]
    "behaviour_logprobs": Column(np.float32, "response token"),  # of the distribution that was sampled from
    "policy_versions": Column(np.int32, "response token"),
    "finish_reasons": Column(np.int8, "sample"),
    "temperatures": Column(np.float32, "sample"),  # that the log-probs were taken at; 1 for greedy samples
}
REWARD: Mapping[str, Column] = {"rewards": Column(np.float32, "sample")}
REWARD_FUNCTION = Column(np.float32, "sample")  # of a column named `reward/NAME`, unweighted
TOKEN_REWARDS: Mapping[str, Column] = {  # optional: what of `rewards` belongs to single tokens; a sample's sum is in it
    "token_rewards": Column(np.float32, "response token")
}
REWARD_MODEL = "reward/"  # how the stage of a group of reward models begins; it has one of these two columns
SCORES: Mapping[str, Column] = {"scores": Column(np.float32, "sample")}
TOKEN_SCORES: Mapping[str, Column] = {"token_scores": Column(np.float32, "response token")}
REFERENCE: Mapping[str, Column] = {
    "reference_logprobs": Column(np.float32, "response token"),  # of a frozen policy, at the row's `temperatures`
}
# K tokens for each response token, K the same all over the row (and the run): the likeliest first, whatever was sampled.
TEACHER: Mapping[str, Column] = {
    "teacher_ids": Column(np.int32, "response token x K"),
    "teacher_logprobs": Column(np.float32, "response token x K"),  # at temperature 1
    "teacher_mass": Column(np.float32, "response token"),  # the probability of the K together; 0 where K is 0
    "teacher_target_logprobs": Column(np.float32, "response token"),  # of the token that was sampled
}


def nbytes(columns: Mapping[str, np.ndarray]) -> int:
    return sum(array.nbytes for array in columns.values())


def validate_columns(
    lease: Lease, columns: Mapping[str, np.ndarray], samples: int, inputs: Mapping[str, Columns] = NO_INPUTS
) -> None:
    """Raises ValueError, with row, stage, column, sample and numbers, unless these are the lease's columns.

    `inputs` are the columns, by stage, that they were made from.
    """
    try:
        _check_arrays(columns)
        if lease.stage == "rollout":
            _check_schema(columns, ROLLOUT)
            _check_rollout(columns, samples, lease.min_version)
        elif lease.stage == "reward":
            functions = {name: REWARD_FUNCTION for name in columns if name.startswith("reward/")}
            tokens = {name: column for name, column in TOKEN_REWARDS.items() if name in columns}
            _check_schema(columns, {**REWARD, **functions, **tokens})
            _check_rewards({name: array for name, array in columns.items() if name not in tokens}, samples)
            _check_token_scores(columns, tokens, inputs)
        elif lease.stage.startswith(REWARD_MODEL):
            schema = TOKEN_SCORES if "token_scores" in columns else SCORES
            _check_schema(columns, schema)
            _check_token_scores(columns, schema, inputs)
        elif lease.stage == "reference":
            _check_schema(columns, REFERENCE)
            _check_reference(columns, inputs)
        elif lease.stage == "teacher":
            _check_schema(columns, TEACHER)
            _check_teacher(columns, inputs)
    except ValueError as error:
        raise ValueError(f"row {lease.row_id} (prompt {lease.prompt.id!r}), {lease.stage}: {error}") from None


def validate_answer(
    lease: Lease, produced: Produced, columns: Mapping[str, np.ndarray], inputs: Mapping[str, Columns] = NO_INPUTS
) -> None:
    """`validate_columns` for the samples the lease asks for; and what `produced` says of the columns must be true.

    The table, which never sees columns, goes by `produced`: its ages and bytes are only as good as this.
    """
    validate_columns(lease, columns, lease.samples, inputs)
    told: dict[str, int | None] = {"samples": produced.samples, "nbytes": produced.nbytes}
    found: dict[str, int | None] = {"samples": lease.samples, "nbytes": nbytes(columns)}
    if lease.stage == "rollout":
        versions = columns["policy_versions"]
        told |= {"tokens": produced.tokens, "min_version": produced.min_version, "max_version": produced.max_version}
        first, last = (None, None) if made_by_none(versions) else (int(versions.min()), int(versions.max()))
        found |= {"tokens": versions.size, "min_version": first, "max_version": last}
    wrong = [f"{name} {told[name]}, not {value}" for name, value in found.items() if told[name] != value]
    if wrong:
        raise ValueError(
            f"row {lease.row_id} (prompt {lease.prompt.id!r}), {lease.stage}: the answer beside the columns says "
            f"{'; '.join(wrong)}"
        )


def made_by_none(policy_versions: np.ndarray) -> bool:
    """Whether a row's tokens are a dataset's, and have no age."""
    return bool(policy_versions.max() == NO_POLICY)


def _check_arrays(columns: Mapping[str, np.ndarray]) -> None:
    if not columns:
        raise ValueError("no columns")
    for name, array in columns.items():
        if not isinstance(array, np.ndarray):
            raise ValueError(f"{name} is a {type(array).__name__}, not a numpy array")
        if array.ndim != 1 or array.dtype.kind not in "biuf":
            raise ValueError(f"{name} has shape {array.shape} and dtype {array.dtype}, not one dimension of numbers")


def _check_schema(columns: Mapping[str, np.ndarray], schema: Mapping[str, Column]) -> None:
    if columns.keys() != schema.keys():
        raise ValueError(f"the columns are {sorted(columns)}, not {sorted(schema)}")
    for name, column in schema.items():
        if columns[name].dtype != column.dtype:
            raise ValueError(f"{name} has dtype {columns[name].dtype}, not {np.dtype(column.dtype)}")


def _check_rollout(columns: Mapping[str, np.ndarray], samples: int, min_version: int) -> None:
    offsets = columns["response_offsets"]
    _check_lengths(columns, ROLLOUT, {"sample boundary": samples + 1, "sample": samples})
    _check_offsets(offsets, len(columns["response_ids"]))
    _check_lengths(columns, ROLLOUT, {"response token": int(offsets[-1])})
    if len(columns["prompt_ids"]) == 0:
        raise ValueError("prompt_ids is empty")
    for name in ("prompt_ids", "response_ids"):
        _require_between(columns[name], name, "a token id is >= 0", 0)
    logprobs, versions = columns["behaviour_logprobs"], columns["policy_versions"]
    _check_logprobs(logprobs, "behaviour_logprobs", offsets)
    if not (made_by_none(versions) and versions.min() == NO_POLICY):
        newer = f"the lease needs {min_version} or newer"
        _require_between(versions, "policy_versions", newer, min_version, offsets=offsets)
    if versions[0] != versions[-1] or versions.min() != versions.max():
        _check_growth(versions, offsets)
    reasons, temperatures = columns["finish_reasons"], columns["temperatures"]
    known = "a reason is 0 (stop) or 1 (length)"
    _require_between(reasons, "finish_reasons", known, FINISHED_BY_STOP, FINISHED_BY_LENGTH)
    positive = "a temperature is finite and > 0 (1 for greedy samples)"
    _require_between(temperatures, "temperatures", positive, SMALLEST, LARGEST)


def _check_growth(versions: np.ndarray, offsets: np.ndarray) -> None:
    within_sample = np.ones(len(versions), dtype=bool)
    within_sample[offsets[:-1]] = False
    grows = np.diff(versions, prepend=versions[:1]) >= 0
    _require(grows | ~within_sample, versions, "policy_versions", "versions only grow within a sample", offsets)


def _check_logprobs(logprobs: np.ndarray, name: str, offsets: np.ndarray) -> None:
    _require_between(logprobs, name, "a log-prob is finite and <= 0", -LARGEST, MAX_LOGPROB, offsets)


def _check_rewards(columns: Mapping[str, np.ndarray], samples: int) -> None:
    for name, rewards in columns.items():
        if len(rewards) != samples:
            raise ValueError(f"{name} has {len(rewards)} entries for {samples} samples")
        _require_between(rewards, name, "a reward is finite", -LARGEST, LARGEST)


def _check_token_scores(
    columns: Mapping[str, np.ndarray], schema: Mapping[str, Column], inputs: Mapping[str, Columns]
) -> None:
    """Of `schema`: as many as there are samples or response tokens, and finite."""
    for name in schema:
        offsets = _offsets_of(inputs)
        _check_lengths(columns, schema, {"response token": int(offsets[-1]), "sample": offsets.size - 1})
        of_tokens = schema[name].per == "response token"
        _require_between(columns[name], name, "a score is finite", -LARGEST, LARGEST, offsets if of_tokens else None)


def _check_reference(columns: Mapping[str, np.ndarray], inputs: Mapping[str, Columns]) -> None:
    offsets = _offsets_of(inputs)
    _check_lengths(columns, REFERENCE, {"response token": int(offsets[-1])})
    _check_logprobs(columns["reference_logprobs"], "reference_logprobs", offsets)


def _check_teacher(columns: Mapping[str, np.ndarray], inputs: Mapping[str, Columns]) -> None:
    offsets = _offsets_of(inputs)
    tokens = int(offsets[-1])
    _check_lengths(columns, TEACHER, {"response token": tokens})
    ids, logprobs, mass = columns["teacher_ids"], columns["teacher_logprobs"], columns["teacher_mass"]
    if ids.size % tokens or logprobs.size != ids.size:
        raise ValueError(
            f"teacher_ids has {ids.size} and teacher_logprobs {logprobs.size} entries: both need K for each of the {tokens} "
            "response tokens"
        )
    _check_logprobs(columns["teacher_target_logprobs"], "teacher_target_logprobs", offsets)
    _require_between(mass, "teacher_mass", "a probability lies between 0 and 1", 0.0, 1.0, offsets)
    if ids.size:
        k = ids.size // tokens
        _require_between(ids, "teacher_ids", "a token id is >= 0", 0, offsets=offsets * k)
        _check_logprobs(logprobs, "teacher_logprobs", offsets * k)
        best_first = np.diff(logprobs.reshape(tokens, k), prepend=np.inf).reshape(-1) <= 0
        _require(best_first, logprobs, "teacher_logprobs", "the likeliest token comes first", offsets * k)


def _offsets_of(inputs: Mapping[str, Columns]) -> np.ndarray:
    if "rollout" not in inputs:
        raise ValueError("is made from the columns of `rollout`, so the maker has to name that stage in its `needs`")
    return inputs["rollout"]["response_offsets"]


def _check_lengths(
    columns: Mapping[str, np.ndarray], schema: Mapping[str, Column], expected: Mapping[str, int]
) -> None:
    for name, column in schema.items():
        length = expected.get(column.per)
        if length is not None and len(columns[name]) != length:
            raise ValueError(f"{name} has {len(columns[name])} entries, not {length} (one for each {column.per})")


def _check_offsets(offsets: np.ndarray, tokens: int) -> None:
    if offsets[0] != 0 or offsets[-1] != tokens:
        raise ValueError(
            f"response_offsets run from {offsets[0]} to {offsets[-1]}, not from 0 to the {tokens} response_ids"
        )
    lengths = np.diff(offsets)
    # A generated sample holds at least its end-of-sequence token; without one it was never generated.
    if (lengths <= 0).any():
        sample = int(np.argmax(lengths <= 0))
        raise ValueError(f"sample {sample} has {lengths[sample]} response tokens: each has at least one")


def _require_between(
    values: np.ndarray,
    name: str,
    rule: str,
    low: float,
    high: float = math.inf,
    offsets: np.ndarray | None = None,
) -> None:
    """low <= value <= high everywhere (so no NaN). Seen from the extremes: every row of a run passes through here."""
    if not (low <= values.min() and values.max() <= high):
        _require((low <= values) & (values <= high), values, name, rule, offsets)


def _require(good: np.ndarray, values: np.ndarray, name: str, rule: str, offsets: np.ndarray | None = None) -> None:
    """`good` [entries] is true everywhere, or the first bad entry is named (and its sample, if offsets are given)."""
    if good.all():
        return
    index = int(np.argmin(good))
    where = f"[{index}]"
    if offsets is not None:
        sample = int(np.searchsorted(offsets, index, side="right")) - 1
        where = f" of sample {sample}, token {index - int(offsets[sample])},"
    raise ValueError(
        f"{name}{where} is {values[index]}: {rule}; {int((~good).sum())} of {len(good)} entries break this"
    )
