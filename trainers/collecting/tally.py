"""What a job has collected so far, counted from what its part files say of their rows. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import comb
from typing import Any

from trainers.collecting.config import PassConfig


@dataclass(frozen=True, slots=True)
class RowCount:
    """Of one row. `right`: samples whose score reaches the report's threshold (0 without a report)."""

    row_id: int
    samples: int
    kept: int
    right: int
    score: float  # summed over the samples
    tokens: int  # of all responses, kept or not


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Probability that one of `k` samples, drawn from `samples` of which `right` are right, is right: 1 - C(n-c, k) / C(n, k).

    The unbiased estimator of "Evaluating Large Language Models Trained on Code" (https://arxiv.org/abs/2107.03374).
    Raises ValueError for more draws than samples.
    """
    if k > samples:
        raise ValueError(f"pass@{k} of {samples} samples: there are not so many")
    return 1.0 - comb(samples - right, k) / comb(samples, k)


@dataclass
class Tally:
    """Sums over rows, each counted once."""

    report: PassConfig | None
    rows: int = 0
    samples: int = 0
    kept: int = 0
    tokens: int = 0
    score: float = 0.0
    passed: dict[int, float] = field(default_factory=dict)  # by k, summed over the rows

    def add(self, counts: Iterable[RowCount]) -> None:
        for one in counts:
            self.rows += 1
            self.samples += one.samples
            self.kept += one.kept
            self.tokens += one.tokens
            self.score += one.score
            for k in self.report.pass_at if self.report else ():
                self.passed[k] = self.passed.get(k, 0.0) + pass_at_k(one.samples, one.right, k)

    def figures(self) -> dict[str, Any]:
        """JSON-able; means are over all samples (`score`) and over all rows (`pass@k`), None without any."""
        named = {f"pass@{k}": value / self.rows for k, value in self.passed.items()}
        counts = {"rows": self.rows, "samples": self.samples, "kept": self.kept, "tokens": self.tokens}
        return {**counts, "score": self.score / self.samples if self.samples else None, **named}
