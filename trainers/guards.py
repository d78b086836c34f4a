"""What a trainer refuses to go on with. Pure decisions: the loop asks, these raise.

1. A row older than the bound is never trained on (the buffer promises it; the trainer checks again).
2. Steps whose loss or gradient is not finite, and steps without a token to train on, are skipped; too many of one kind
   in a row end the run.
3. A trainer and a maker that hold the same version must agree on the log-probs of its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from buffer.records import SampledRow
from trainers.config import Mismatch

ROLLOUT = "rollout"


class StalenessExceeded(RuntimeError):
    """A row came that is older than the bound allows: the admission is broken, or another trainer publishes."""


class SkippedTooOften(RuntimeError):
    """So many steps in a row could not be trained that going on makes no sense."""


class MismatchExceeded(RuntimeError):
    """Trainer and makers compute different log-probs with the same weights."""


def ages(rows: Sequence[SampledRow], version: int, bound: int) -> list[int]:
    """Age of each row: `version`, the published one, minus the oldest version among the row's tokens; 0 for a row that no
    policy made (a dataset's).

    Raises StalenessExceeded for a row older than `bound`, or with tokens of a version that is not published yet, and
    ValueError for a row that does not say which versions made it.
    """
    found = []
    for row in rows:
        made = row.produced[ROLLOUT]
        if made.min_version is None and made.max_version is None:
            found.append(0)
            continue
        if made.min_version is None or made.max_version is None:
            raise ValueError(f"row {row.row_id}: its rollout does not say which policy versions made its tokens")
        age = version - made.min_version
        if age > bound:
            raise StalenessExceeded(
                f"row {row.row_id} has tokens of version {made.min_version}, {age} versions behind version {version}; "
                f"the bound is {bound}"
            )
        if made.max_version > version:
            raise StalenessExceeded(
                f"row {row.row_id} has tokens of version {made.max_version}, but version {version} is the newest "
                f"that this trainer published"
            )
        found.append(age)
    return found


@dataclass
class SkipCounter:
    """Counts skipped steps, and those in a row of one kind. `limits`: how many in a row of a kind end the run."""

    limits: dict[str, int]
    total: int = 0
    in_a_row: dict[str, int] = field(default_factory=dict)

    def trained(self) -> None:
        self.in_a_row.clear()

    def skipped(self, kind: str, step: int, cause: str) -> None:
        """Raises SkippedTooOften when this one was the last that is allowed."""
        self.total += 1
        self.in_a_row[kind] = self.in_a_row.get(kind, 0) + 1
        if self.in_a_row[kind] >= self.limits[kind]:
            raise SkippedTooOften(
                f"step {step} was skipped {self.in_a_row[kind]} times in a row ({kind}; limit {self.limits[kind]}): {cause}"
            )


class MismatchGate:
    """Watches the k3 KL between trainer and makers at equal version."""

    def __init__(self, bounds: Mismatch) -> None:
        self.bounds = bounds

    def check(self, step: int, kl: float | None) -> str | None:
        """A warning when `kl` passes the first bound, else None. `kl` is None when no token could be compared.

        Raises MismatchExceeded when it passes the second, or is not a number.
        """
        if kl is None or kl <= self.bounds.warn:
            return None
        text = f"step {step}: KL between trainer and makers at equal version is {kl:.4g}"
        if not kl <= self.bounds.stop:
            raise MismatchExceeded(
                f"{text}, above mismatch.stop {self.bounds.stop:g}: their weights or their arithmetic differ "
                f"(a tensor not loaded, a stale cache, different dtypes or sampling settings)"
            )
        return f"{text}, above mismatch.warn {self.bounds.warn:g}"
