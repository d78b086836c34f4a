"""What the controller sends to its ranks for one step, and how the samples of a step become micro-batches.

Guarantees, all asserted by tests:

1. Every sample that is to be computed is in exactly one micro-batch of one rank.
2. Every rank gets the same number of micro-batches (some may be empty), so that collectives pair up.
3. No micro-batch exceeds `micro_batch_tokens`, except one that holds a single sample (with `whole_rows`: a single row) which
   alone exceeds it.
4. The plan is a function of its arguments: the same rows give the same plan on every machine.
5. The normalisers of a minibatch count every sample that is not masked, over all ranks and micro-batches, computed or not.

Everything is plain Python and numpy, and picklable. Nothing here imports torch.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

Columns = Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class RowShape:
    """Lengths of one row in tokens: its prompt, and the response of each of its samples."""

    prompt: int
    responses: tuple[int, ...]

    @classmethod
    def of(cls, rollout: Columns) -> RowShape:
        """Of the columns of stage `rollout`."""
        lengths = np.diff(rollout["response_offsets"])
        return cls(int(rollout["prompt_ids"].size), tuple(int(n) for n in lengths))


@dataclass(frozen=True, slots=True)
class Part:
    """Samples of one row that are computed together. `row` counts the rows of the step from 0."""

    row: int
    samples: tuple[int, ...]


MicroBatch = tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Totals:
    """What a loss is divided by: counts over one whole minibatch, all micro-batches and ranks; masked samples excluded."""

    tokens: int
    samples: int  # samples with at least one token
    max_response_tokens: int  # completion budget of the makers, the constant of Dr.GRPO


@dataclass(frozen=True, slots=True)
class Minibatch:
    """The data of one optimizer step: `ranks[data_parallel_rank][i]` is a micro-batch."""

    ranks: tuple[tuple[MicroBatch, ...], ...]
    totals: Totals


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step of a trainer, as its ranks receive it beside the rollout columns of every row.

    `step` counts from 1. `version` is the published version that equals the weights before this step, or None when no
    published version does. `advantages[row]` is float32, one per sample [n] or one per response token [T]. `labels`
    are further figures by name that the algorithm reads, one float32 [T] for each row.
    """

    step: int
    version: int | None
    advantages: tuple[np.ndarray, ...]
    minibatches: tuple[Minibatch, ...]
    labels: Mapping[str, tuple[np.ndarray, ...]] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return len(self.advantages)

    @property
    def optimizer_steps(self) -> int:
        """That are taken when all of them are finite."""
        return sum(minibatch.totals.tokens > 0 for minibatch in self.minibatches)


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of one step before they are divided: `masks[row]` is bool [samples], False leaves a sample out."""

    step: int
    shapes: list[RowShape]
    masks: list[np.ndarray]


def packed_tokens(prompt: int, responses: Sequence[int], share_prompt: bool) -> int:
    """Tokens that are fed to the model. The last token of a response predicts nothing, so it is never fed."""
    fed = sum(max(length - 1, 0) for length in responses)
    return fed + prompt * (1 if share_prompt else len(responses))


def split_row(row: int, shape: RowShape, samples: Sequence[int], budget: int | None, share_prompt: bool) -> list[Part]:
    """Cut the samples of one row, in order, into as few consecutive parts as fit in `budget` tokens each; None: into one."""
    if budget is None:
        return [Part(row, tuple(samples))] if samples else []
    parts: list[Part] = []
    chosen: list[int] = []
    for sample in samples:
        lengths = [shape.responses[i] for i in [*chosen, sample]]
        if chosen and packed_tokens(shape.prompt, lengths, share_prompt) > budget:
            parts.append(Part(row, tuple(chosen)))
            chosen = []
        chosen.append(sample)
    if chosen:
        parts.append(Part(row, tuple(chosen)))
    return parts


def _fill(sizes: Sequence[int], bins: int) -> tuple[list[list[int]], list[int]]:
    """Largest first into the emptiest bin. Returns the item numbers and the load of each bin."""
    contents: list[list[int]] = [[] for _ in range(bins)]
    heap = [(0, i) for i in range(bins)]
    for item in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        load, target = heapq.heappop(heap)
        contents[target].append(item)
        heapq.heappush(heap, (load + sizes[item], target))
    loads = [sum(sizes[item] for item in content) for content in contents]
    return contents, loads


def _deal(contents: list[list[int]], loads: list[int], ranks: int) -> list[list[list[int]]]:
    """Give every rank the same number of bins: heaviest first, back and forth, so that the ranks' sums stay close."""
    order = sorted(range(len(contents)), key=lambda i: (-loads[i], i))
    dealt: list[list[list[int]]] = [[] for _ in range(ranks)]
    for turn in range(0, len(order), ranks):
        hand = order[turn : turn + ranks]
        for rank, index in enumerate(hand if (turn // ranks) % 2 == 0 else reversed(hand)):
            dealt[rank].append(contents[index])
    return dealt


def plan_micro_batches(
    shapes: Mapping[int, RowShape],
    samples: Mapping[int, Sequence[int]],
    *,
    micro_batch_tokens: int,
    share_prompt: bool,
    data_parallel: int,
    whole_rows: bool = False,
) -> tuple[tuple[MicroBatch, ...], ...]:
    """Micro-batches [data_parallel][num_micro_batches] for the given samples of the given rows, balanced by tokens.

    A row stays whole while it fits, because its samples share their prompt; a larger one is cut between samples, unless
    `whole_rows` are asked for by a loss that compares them.
    """
    if micro_batch_tokens < 1 or data_parallel < 1:
        raise ValueError(
            f"micro_batch_tokens={micro_batch_tokens} and data_parallel={data_parallel} must be at least 1"
        )
    parts = [
        part
        for row in sorted(shapes)
        for part in split_row(row, shapes[row], samples[row], None if whole_rows else micro_batch_tokens, share_prompt)
    ]
    sizes = [
        packed_tokens(shapes[part.row].prompt, [shapes[part.row].responses[i] for i in part.samples], share_prompt)
        for part in parts
    ]
    rounds = max(1, math.ceil(sum(sizes) / (micro_batch_tokens * data_parallel)))
    while True:
        contents, loads = _fill(sizes, rounds * data_parallel)
        crowded = any(
            load > micro_batch_tokens and len(content) > 1 for content, load in zip(contents, loads, strict=True)
        )
        if not crowded:
            break
        rounds += 1
    return tuple(
        tuple(tuple(parts[item] for item in sorted(content)) for content in bins)
        for bins in _deal(contents, loads, data_parallel)
    )


def plan_step(
    *,
    step: int,
    version: int | None,
    shapes: Sequence[RowShape],
    advantages: Sequence[np.ndarray],
    masks: Sequence[np.ndarray],
    max_response_tokens: int,
    micro_batch_tokens: int,
    share_prompt: bool,
    data_parallel: int = 1,
    minibatches: int = 1,
    skip_zero_advantage: bool = False,
    whole_rows: bool = False,
) -> StepPlan:
    """Decide which sample is computed where.

    `advantages[row]` is float32 [n] or [T]; `masks[row]` is bool [n], False leaves the sample out of the loss and of
    the normalisers. With `skip_zero_advantage` a sample whose advantage is exactly 0 stays in the normalisers but is
    not computed: right for a loss that is proportional to the advantage (`Grpo.proportional_to_advantage`), where its
    gradient is exactly 0. Minibatches are consecutive rows. Raises ValueError on lengths that do not fit together and
    on advantages that are not finite.
    """
    if not 1 <= minibatches <= len(shapes):
        raise ValueError(f"{minibatches} minibatches from {len(shapes)} rows: needs at least one row in each")
    for row, shape in enumerate(shapes):
        _check_row(row, shape, advantages[row], masks[row])
    planned = []
    for rows in np.array_split(np.arange(len(shapes)), minibatches):
        valid = {int(row): [int(i) for i in np.flatnonzero(masks[row])] for row in rows}
        lengths = [shapes[row].responses[i] for row, kept in valid.items() for i in kept]
        computed = {row: [i for i in kept if shapes[row].responses[i] > 0] for row, kept in valid.items()}
        if skip_zero_advantage:
            computed = _with_signal(shapes, advantages, computed)
        ranks = plan_micro_batches(
            {row: shapes[row] for row in valid},
            computed,
            micro_batch_tokens=micro_batch_tokens,
            share_prompt=share_prompt,
            data_parallel=data_parallel,
            whole_rows=whole_rows,
        )
        totals = Totals(sum(lengths), sum(length > 0 for length in lengths), max_response_tokens)
        planned.append(Minibatch(ranks, totals))
    arrays = tuple(np.asarray(values, dtype=np.float32) for values in advantages)
    return StepPlan(step=step, version=version, advantages=arrays, minibatches=tuple(planned))


def _with_signal(
    shapes: Sequence[RowShape], advantages: Sequence[np.ndarray], samples: Mapping[int, list[int]]
) -> dict[int, list[int]]:
    """The samples with an advantage other than 0; all of them when none has one, so that a step is never empty by luck."""
    chosen = {}
    for row, kept in samples.items():
        values, lengths = advantages[row], shapes[row].responses
        if values.size != len(lengths):
            pieces = np.split(values, np.cumsum(lengths)[:-1])
            values = np.array([np.any(piece) for piece in pieces])
        chosen[row] = [i for i in kept if values[i] != 0]
    return chosen if any(chosen.values()) else dict(samples)


def _check_row(row: int, shape: RowShape, advantages: np.ndarray, mask: np.ndarray) -> None:
    samples, tokens = len(shape.responses), sum(shape.responses)
    if shape.prompt < 1:
        raise ValueError(f"row {row} of the step has an empty prompt: the first response token has no predecessor")
    if advantages.shape not in ((samples,), (tokens,)):
        raise ValueError(
            f"row {row} of the step: advantages have shape {advantages.shape}, "
            f"need one per sample ({samples},) or one per response token ({tokens},)"
        )
    if mask.shape != (samples,) or mask.dtype != np.bool_:
        raise ValueError(f"row {row} of the step: mask is {mask.dtype}{mask.shape}, needs bool({samples},)")
    if not np.isfinite(advantages).all():
        raise ValueError(
            f"row {row} of the step: {np.count_nonzero(~np.isfinite(advantages))} advantages are not finite"
        )
