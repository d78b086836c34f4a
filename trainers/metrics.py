"""The metrics object of a step: one flat mapping, the same keys every time, documented in docs/metrics.md.

Guarantees: a figure that could not be measured is None, never 0; counters of makers that restarted do not go backwards;
`bound_by` looks at the last steps, not at one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainers.batch import RowShape
from trainers.flops import Utilisation
from trainers.planner import Batch
from trainers.training import Trained

Scalar = float | int | str | None
Statuses = Mapping[str, Mapping[str, Any]]  # by maker name

WINDOW = 8  # steps that `bound_by` looks back on
SLACK = 0.1  # a trainer that waits less than this fraction of the time is the bound itself
BUSY = 0.8  # a part that works more than this fraction of the time is saturated
FROM_RESULT = (
    "kl",
    "entropy",
    "clip_frac/low",
    "clip_frac/high",
    "mismatch/kl",
    "mismatch/logp_abs_diff_mean",
    "mismatch/logp_abs_diff_max",
    "is/mean",
    "is/max",
    "is/ess",
    "is/masked_frac",
)
OF_ALGORITHMS = ("kl/", "distill/", "loss/", "sft/", "dpo/")  # figures that only some algorithms have
KNOBS = {
    "maker": "add rollout replicas (makers.*.replicas), give them more threads, or raise engine.max_num_seqs",
    "trainer": "give the trainer more threads (resources.cpus), or a larger backend.micro_batch_tokens",
    "reward": "add reward replicas or raise their workers (makers.*.workers), or make the functions faster",
    "sync": "publish less often (raise weights.every)",
}
RARER_CHECKPOINTS = "write checkpoints less often (raise checkpoint.every)"
OVERLAP = "raise buffer.max_staleness, so that making and training go on at the same time"


@dataclass(frozen=True)
class Shares:
    """What the parts did, as fractions of wall time. Parts work at the same time, so the sum may exceed 1."""

    train: float
    wait: float  # the trainer, for rows
    publish: float  # the trainer, for the export copy
    checkpoint: float  # the trainer, until it is written
    generate: float  # mean over rollout makers
    score: float  # mean over reward processes
    sync: float  # mean over rollout makers: paused for new weights


def bound_by(shares: Shares) -> tuple[str, str]:
    """What keeps the run from being faster (maker, trainer, reward or sync), and the knob to turn.

    A trainer that hardly waits is the bound itself. Otherwise it is the part that is busy the largest fraction of the
    time; if even that one has slack, the parts wait for each other.
    """
    sync = max(shares.publish, shares.sync)
    if shares.wait < SLACK:
        if shares.checkpoint > max(shares.train, shares.publish):
            return "trainer", RARER_CHECKPOINTS
        bound = "sync" if shares.publish > shares.train else "trainer"
        return bound, KNOBS[bound]
    busy = {"maker": shares.generate, "reward": shares.score, "trainer": shares.train, "sync": sync}
    bound = max(busy, key=lambda name: busy[name])
    return bound, KNOBS[bound] if busy[bound] >= BUSY else f"{KNOBS[bound]}; or {OVERLAP}"


@dataclass(frozen=True)
class StepRecord:
    """All that is known of one trained step. `seconds` by phase since the last record, the whole as `step`."""

    trained: Trained
    batch: Batch
    version: int
    seconds: Mapping[str, float]
    buffer: Mapping[str, Any]  # Buffer.status()
    makers: Statuses  # Maker.status() by name


class MetricsBuilder:
    """Builds the metrics objects of a run, in order. `wall_clock` gives seconds since the epoch."""

    def __init__(self, wall_clock: Callable[[], float] = time.time, utilisation: Utilisation | None = None) -> None:
        self._wall_clock = wall_clock
        self._utilisation = utilisation
        self._before: Statuses = {}
        self._window: deque[tuple[float, ...]] = deque(maxlen=WINDOW)

    def begin(self, makers: Statuses) -> None:
        """What the makers did until now is not part of any step."""
        self._before = makers

    def build(self, record: StepRecord) -> dict[str, Scalar]:
        wall = record.seconds["step"]
        work = MakerWork.between(self._before, record.makers)
        self._before = record.makers
        bound, knob = self._bound(record.seconds, work)
        return {
            "step": record.trained.result.step,
            "time": round(self._wall_clock(), 3),
            **_versions(record),
            **_rows(record.batch),
            **_learning(record.trained),
            **_critic(record.trained, record.seconds),
            **_seconds(record.seconds, work),
            "idle/trainer": _ratio(record.seconds.get("wait_for_batch", 0.0), wall),
            "idle/maker": None if work.generate is None else max(0.0, 1.0 - (_ratio(work.generate, wall) or 0.0)),
            **_buffer(record.buffer),
            "tokens_per_s/generated": _ratio(work.tokens, wall),
            "tokens_per_s/trained": _ratio(int(record.batch.lengths.sum()), wall),
            **self._mfu(record),
            "bound_by": bound,
            "knob": knob,
        }

    def _mfu(self, record: StepRecord) -> dict[str, Scalar]:
        if self._utilisation is None:
            return {}
        shapes, seconds = [RowShape.of(columns["rollout"]) for columns in record.batch.columns], record.seconds["train"]
        return {"mfu": self._utilisation.of(record.trained.plan, shapes, seconds)}

    def _bound(self, seconds: Mapping[str, float], work: MakerWork) -> tuple[str | None, str | None]:
        """Over the window. A step in which makers also evaluated says nothing about the balance, and is left out."""
        if "evaluate" not in seconds:
            trainer = [seconds.get(name, 0.0) for name in ("step", "train", "wait_for_batch", "publish", "checkpoint")]
            self._window.append((*trainer, work.generate or 0.0, work.score or 0.0, work.sync_pause or 0.0))
        wall, *parts = (sum(column) for column in zip(*self._window, strict=True)) if self._window else (0.0,)
        return bound_by(Shares(*(part / wall for part in parts))) if wall > 0 else (None, None)


@dataclass(frozen=True)
class MakerWork:
    """What the makers did between two looks at them. Seconds are means over makers (score: over reward processes)."""

    generate: float | None  # None where no maker of the kind was seen
    score: float | None
    sync: float | None
    sync_pause: float | None
    tokens: int | None

    @classmethod
    def between(cls, before: Statuses, now: Statuses) -> MakerWork:
        def grown(key: str) -> list[float]:
            return [_grown(before.get(name, {}).get(key), status[key]) for name, status in now.items() if key in status]

        processes = sum(status["workers"] for status in now.values() if "seconds_scoring" in status)
        tokens = grown("tokens_generated")
        return cls(
            generate=_mean(grown("seconds_generating")),
            score=sum(grown("seconds_scoring")) / processes if processes else None,
            sync=_mean(grown("seconds_syncing")),
            sync_pause=_mean(grown("seconds_sync_pause")),
            tokens=int(sum(tokens)) if tokens else None,
        )


def _versions(record: StepRecord) -> dict[str, Scalar]:
    held = [status["version"] for status in record.makers.values() if status.get("version") is not None]
    return {
        "version/trainer": record.version,
        "version/maker_min": min(held, default=None),
        "version/maker_max": max(held, default=None),
    }


def _rows(batch: Batch) -> dict[str, Scalar]:
    lengths = batch.lengths
    refilled = {} if batch.replaced is None else {"reward/replaced": batch.replaced}
    return {
        **refilled,
        "staleness/mean": float(np.mean(batch.ages)),
        "staleness/max": max(batch.ages),
        **_rewards(batch),
        "response_length/mean": float(lengths.mean()),
        "response_length/max": int(lengths.max()),
        "truncated_ratio": float(np.concatenate(batch.truncated).mean()),
    }


def _rewards(batch: Batch) -> dict[str, Scalar]:
    """None, all of them, of rows that nobody scored."""
    if not batch.scored:
        return dict.fromkeys(("reward/mean", "reward/std", "reward/frac_zero_std"))
    rewards = batch.rewards
    flat = np.concatenate(rewards).astype(np.float64)
    return {
        "reward/mean": float(flat.mean()),
        "reward/std": float(flat.std()),
        "reward/frac_zero_std": float(np.mean([np.all(group == group[0]) for group in rewards])),
    }


def _learning(trained: Trained) -> dict[str, Scalar]:
    result = trained.result
    figures: dict[str, Scalar] = {"loss": result.loss, "grad_norm": result.grad_norm, "lr": result.lr}
    figures |= {key: result.metrics.get(key) for key in FROM_RESULT}
    figures |= {key: value for key, value in result.metrics.items() if key.startswith(OF_ALGORITHMS)}
    figures |= trained.kl
    return figures if trained.estimates is not None else figures | {"time/compute": sum(result.seconds.values())}


def _critic(trained: Trained, seconds: Mapping[str, float]) -> dict[str, Scalar]:
    estimates, critic = trained.estimates, trained.critic
    if estimates is None or critic is None:
        return {}
    return {
        "value/loss": critic.loss,
        "value/clip_frac": critic.metrics.get("value/clip_frac"),
        "value/explained_variance": estimates.explained_variance,
        "value/returns": estimates.mean_return,
        "value/grad_norm": critic.grad_norm,
        "time/values": seconds.get("values", 0.0),
    }


def _seconds(seconds: Mapping[str, float], work: MakerWork) -> dict[str, Scalar]:
    trainer = ("wait_for_batch", "train", "publish", "hand_over", "evaluate", "checkpoint", "step")
    figures: dict[str, Scalar] = {f"time/{name}": seconds.get(name, 0.0) for name in trainer}
    makers = {"generate": work.generate, "score": work.score, "sync": work.sync, "sync_pause": work.sync_pause}
    return figures | {f"time/{name}": value for name, value in makers.items()}


def _buffer(status: Mapping[str, Any]) -> dict[str, Scalar]:
    rows, failures = status["ledger"]["rows"], status["failures"]
    return {
        "buffer/rows": rows["in_flight"],
        "buffer/bytes": status["bytes"],
        "buffer/age": status["age"]["mean"],
        "staleness/dropped": rows["dropped"].get("stale", 0),
        "failures/infra": failures["infra"] + failures["died"],
        "failures/data": failures["data"],
        "failures/timeout": failures["timeout"],
    }


def _grown(before: float | None, now: float) -> float:
    """How much a counter grew; one that is smaller than before began again at 0."""
    return now if before is None or now < before else now - before


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _ratio(amount: float | None, whole: float) -> float | None:
    return None if amount is None or whole <= 0 else amount / whole
