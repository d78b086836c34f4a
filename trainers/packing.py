"""A micro-batch as flat arrays, packed without padding. numpy only.

Layout: segments one after another, each a prompt followed by the responses that are computed with it. With a shared
prompt a segment is a whole part of a group, `[prompt, r_1, ..., r_G]`; else every sample is a segment of its own.

Invariants, asserted by tests:

1. Positions restart behind the prompt for every response: token j of a response is at position `prompt + j`.
2. The logits of row i predict token i + 1. The first token of *every* response is therefore predicted by the last row of
   the prompt, and the last token of a response predicts nothing and is not fed.
3. Targets appear in the order of parts, samples and tokens, whatever the layout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from trainers.batch import Columns, MicroBatch, StepPlan, Totals
from trainers.distillation.columns import MASS, TARGET, TeacherTop, check_width, teacher_top


@dataclass(frozen=True, slots=True)
class GroupBatch:
    """One row of the step: a prompt and its samples as a trainer sees them.

    `advantages`, `temperatures` and each of the `labels` are per response token [T].
    """

    prompt_ids: np.ndarray
    response_ids: np.ndarray
    offsets: np.ndarray
    behaviour_logprobs: np.ndarray
    policy_versions: np.ndarray
    temperatures: np.ndarray
    advantages: np.ndarray
    labels: Mapping[str, np.ndarray] = field(default_factory=dict)
    teacher: TeacherTop | None = None  # of the response tokens

    @classmethod
    def of(cls, rollout: Columns, advantages: np.ndarray, labels: Mapping[str, np.ndarray] | None = None) -> GroupBatch:
        """From the columns of stage `rollout` (and `teacher`) and the row's advantages, per sample [n] or per token [T]."""
        labels, teacher = dict(labels or {}), None
        if MASS in rollout:
            teacher = teacher_top(rollout, rollout["response_ids"].size)
            labels |= {MASS: rollout[MASS], TARGET: rollout[TARGET]}
        lengths = np.diff(rollout["response_offsets"])
        per_token = np.repeat(advantages, lengths) if advantages.size == lengths.size else advantages
        return cls(
            prompt_ids=rollout["prompt_ids"],
            response_ids=rollout["response_ids"],
            offsets=rollout["response_offsets"],
            behaviour_logprobs=rollout["behaviour_logprobs"],
            policy_versions=rollout["policy_versions"],
            temperatures=np.repeat(rollout["temperatures"], lengths),
            advantages=per_token.astype(np.float32, copy=False),
            labels=labels,
            teacher=teacher,
        )

    def span(self, sample: int) -> slice:
        """Where the response of a sample lies in the flat arrays."""
        return slice(int(self.offsets[sample]), int(self.offsets[sample + 1]))


@dataclass(frozen=True, slots=True)
class Segment:
    """Fed tokens of one prompt and of each response that follows it; a response of one token feeds none."""

    prompt: int
    responses: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return self.prompt + sum(self.responses)


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """One micro-batch. Arrays of length [packed] are fed to the model; arrays of length [targets] are predicted by it."""

    token_ids: np.ndarray  # int64 [packed]
    positions: np.ndarray  # int64 [packed]
    segments: tuple[Segment, ...]
    logit_rows: np.ndarray  # int64 [targets]: the fed row whose logits predict the target
    targets: np.ndarray  # int64 [targets]
    behaviour: np.ndarray  # float32 [targets]: log-prob under the policy that sampled
    versions: np.ndarray  # int32 [targets]
    temperatures: np.ndarray  # float32 [targets]: that the target was sampled at
    advantages: np.ndarray  # float32 [targets]
    samples: np.ndarray  # int64 [targets]: which sample of this micro-batch, from 0
    lengths: np.ndarray  # float32 [targets]: tokens of the target's sample
    labels: Mapping[str, np.ndarray]  # float32 [targets] each
    totals: Totals
    teacher: TeacherTop | None = None  # of the targets


def pack(groups: Sequence[GroupBatch], parts: MicroBatch, totals: Totals, *, share_prompt: bool) -> PackedBatch:
    """Pack the samples that `parts` names. An empty micro-batch becomes one token without targets: its rank still joins
    every collective, and contributes nothing."""
    ids: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    segments: list[Segment] = []
    rows: list[np.ndarray] = []
    fed = 0
    for part in parts:
        group = groups[part.row]
        prompt = int(group.prompt_ids.size)
        for chunk in [part.samples] if share_prompt else [(sample,) for sample in part.samples]:
            last_of_prompt = fed + prompt - 1
            ids.append(group.prompt_ids)
            positions.append(np.arange(prompt))
            fed += prompt
            lengths = []
            for sample in chunk:
                response = group.response_ids[group.span(sample)]
                kept = response.size - 1
                ids.append(response[:-1])
                positions.append(np.arange(prompt, prompt + kept))
                rows.append(np.concatenate([[last_of_prompt], np.arange(fed, fed + kept)]))
                lengths.append(kept)
                fed += kept
            segments.append(Segment(prompt, tuple(lengths)))
    if not segments:
        ids, positions, segments = [np.zeros(1, np.int64)], [np.zeros(1, np.int64)], [Segment(1, ())]
    return PackedBatch(
        token_ids=np.concatenate(ids).astype(np.int64),
        positions=np.concatenate(positions).astype(np.int64),
        segments=tuple(segments),
        logit_rows=np.concatenate([np.zeros(0, np.int64), *rows]).astype(np.int64),
        totals=totals,
        **_targets(groups, parts),
    )


def padded(batch: PackedBatch, multiple: int) -> PackedBatch:
    """The batch with its rows filled up to a multiple, by a segment without targets."""
    missing = -batch.token_ids.size % multiple
    if missing == 0:
        return batch
    return replace(
        batch,
        token_ids=np.concatenate([batch.token_ids, np.zeros(missing, np.int64)]),
        positions=np.concatenate([batch.positions, np.arange(missing)]),
        segments=(*batch.segments, Segment(missing, ())),
    )


def _targets(groups: Sequence[GroupBatch], parts: MicroBatch) -> dict[str, Any]:
    spans = [(groups[part.row], groups[part.row].span(sample)) for part in parts for sample in part.samples]
    lengths = np.array([span.stop - span.start for _, span in spans], dtype=np.int64)

    def joined(pieces: Sequence[np.ndarray], dtype: type) -> np.ndarray:
        return np.concatenate([np.zeros(0, dtype), *pieces]).astype(dtype)

    def flat(name: str, dtype: type) -> np.ndarray:
        return joined([getattr(group, name)[span] for group, span in spans], dtype)

    return {
        "targets": flat("response_ids", np.int64),
        "behaviour": flat("behaviour_logprobs", np.float32),
        "versions": flat("policy_versions", np.int32),
        "temperatures": flat("temperatures", np.float32),
        "advantages": flat("advantages", np.float32),
        "samples": np.repeat(np.arange(lengths.size), lengths),
        "lengths": np.repeat(lengths, lengths).astype(np.float32),
        "labels": {
            name: joined([group.labels[name][span] for group, span in spans], np.float32) for name in groups[0].labels
        },
        "teacher": _teacher(groups, spans),
    }


def _teacher(groups: Sequence[GroupBatch], spans: Sequence[tuple[GroupBatch, slice]]) -> TeacherTop | None:
    like = groups[0].teacher
    if like is None:
        return None
    return TeacherTop.joined([group.teacher[span] for group, span in spans if group.teacher is not None], like)


def pack_minibatch(
    groups: Sequence[GroupBatch], plan: StepPlan, minibatch: int, rank: int, *, share_prompt: bool
) -> list[PackedBatch]:
    """The micro-batches of one data-parallel rank in one minibatch of the plan."""
    chosen = plan.minibatches[minibatch]
    return [pack(groups, parts, chosen.totals, share_prompt=share_prompt) for parts in chosen.ranks[rank]]


def check_rollouts(plan: StepPlan, rollouts: Sequence[Columns]) -> list[GroupBatch]:
    """The rows of the plan joined with their columns. Raises ValueError where lengths do not fit together."""
    if len(rollouts) != plan.rows:
        raise ValueError(f"step {plan.step}: the plan has {plan.rows} rows, {len(rollouts)} rollouts were given")
    groups = []
    for row, (rollout, advantages) in enumerate(zip(rollouts, plan.advantages, strict=True)):
        samples, tokens = rollout["response_offsets"].size - 1, rollout["response_ids"].size
        if advantages.size not in (samples, tokens):
            raise ValueError(
                f"step {plan.step}, row {row}: {advantages.size} advantages for {samples} samples, {tokens} tokens"
            )
        labels = {name: values[row] for name, values in plan.labels.items()}
        for name, values in labels.items():
            if values.shape != (tokens,):
                raise ValueError(f"step {plan.step}, row {row}: {name} has shape {values.shape} for {tokens} tokens")
        groups.append(GroupBatch.of(rollout, advantages, labels))
    check_width([group.teacher.ids.shape[1] for group in groups if group.teacher is not None])
    return groups
