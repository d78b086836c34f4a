"""What an evaluation reports: means over rows nobody trains on."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import stdev

from buffer.records import Produced, SampledRow


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """Means over complete rows; each row weighs the same, since each has the same number of samples."""

    rows: int  # complete rows
    failed: int  # prompts that failed as data
    samples: int  # per row
    reward_mean: float | None  # None if no stage reports it
    reward_stderr: float | None  # standard error of reward_mean over rows; None below two rows
    pass_rate: float | None
    response_length: float  # tokens per sample
    min_version: int | None  # oldest and newest policy version among the tokens
    max_version: int | None
    seconds: float  # wall time
    stats: Mapping[str, float]  # every number the stages report, averaged over the rows that have it


@dataclass(slots=True)
class Tally:
    """Adds up rows as they come."""

    rows: int = 0
    tokens: int = 0
    sums: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    counts: Counter[str] = field(default_factory=Counter)
    versions: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)  # mean of each row

    def add(self, rows: Sequence[SampledRow]) -> None:
        for row in rows:
            self.rows += 1
            for produced in row.produced.values():
                self._add(produced)

    def _add(self, produced: Produced) -> None:
        self.tokens += produced.tokens
        self.versions += [v for v in (produced.min_version, produced.max_version) if v is not None]
        self.rewards += [produced.stats["reward_mean"]] if "reward_mean" in produced.stats else []
        for name, value in produced.stats.items():
            self.sums[name] += value
            self.counts[name] += 1

    def result(self, *, failed: int, samples: int, seconds: float) -> EvaluationResult:
        stats = {name: total / self.counts[name] for name, total in self.sums.items()}
        return EvaluationResult(
            rows=self.rows,
            failed=failed,
            samples=samples,
            reward_mean=stats.get("reward_mean"),
            reward_stderr=stdev(self.rewards) / len(self.rewards) ** 0.5 if len(self.rewards) > 1 else None,
            pass_rate=stats.get("pass_rate"),
            response_length=self.tokens / (self.rows * samples),
            min_version=min(self.versions, default=None),
            max_version=max(self.versions, default=None),
            seconds=seconds,
            stats=stats,
        )
