"""Which policy versions and optimizer steps there were, and what was trained in each step.

Steps count from 1. A version is the weights after some step: version and step are told together, since after a rewind the
same step gets another version. Versions only grow; steps grow by one, but for a rewind.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Versions:
    """`every`: a version is due after each step that it divides."""

    def __init__(self, every: int, step: int = 0) -> None:
        if every < 1:
            raise ValueError(f"a version is published every {every} steps: it must be at least 1")
        self.every = every
        self.published: int | None = None
        self.published_step = step  # whose weights the published version has
        self.step = step  # the last one that is done

    @property
    def newest(self) -> int:
        """The trainer's version: no token can come from a newer one. -1 before the first publication.

        A publication takes time, so the trainer can be ahead of `published`; ages count from here.
        """
        if self.published is None:
            return -1
        return self.published + max(0, self.step // self.every - self.published_step // self.every)

    def publish(self, version: int, step: int) -> bool:
        """False for a version that is not newer than the published one: it was told before. Raises ValueError below 0."""
        if version < 0 or step < 0:
            raise ValueError(f"version {version} of step {step} was published: versions and steps count from 0")
        if self.published is not None and version <= self.published:
            return False
        self.published, self.published_step = version, step
        self.step = max(self.step, step)
        return True

    def train(self, step: int) -> None:
        """Raises ValueError for any step but the next one."""
        if step != self.step + 1:
            raise ValueError(
                f"rows trained in step {step}, but step {self.step} is the last one done: steps count from 1, one by one"
            )
        self.step = step

    def as_dict(self) -> dict[str, Any]:
        return {"published": self.published, "published_step": self.published_step, "step": self.step}

    def load(self, state: Mapping[str, Any]) -> None:
        self.published, self.published_step, self.step = (
            state[name] for name in ("published", "published_step", "step")
        )


class StepLog:
    """Rows and tokens of each step from `first` + 1 on, and which rows still charge admission.

    A row is charged until a version that it helped to make is published. Where the log begins between two versions, or is
    rewound to there, the rows of the steps since the last one are charged too: the next version is made of fewer rows than
    the staleness bound counts on. Steps up to `first` had `groups` rows each.
    """

    def __init__(self, every: int, groups: int, first: int = 0) -> None:
        self._every = every
        self._groups = groups
        self._first = first
        self._rows: list[int] = []
        self._tokens: list[int] = []
        self._charged_from = first - first % every  # steps up to here are part of a published version
        self.unpublished = first % every * groups  # rows trained for a version that is not published

    def train(self, rows: int, tokens: int) -> None:
        self._rows.append(rows)
        self._tokens.append(tokens)
        self.unpublished += rows

    def publish(self, step: int) -> None:
        """The weights of `step` were published."""
        self._charge(step - step % self._every)

    def rewind(self, step: int) -> tuple[int, int]:
        """Forgets the steps after `step`: their rows and tokens. Raises ValueError for a step that is not in the log."""
        last = self._first + len(self._rows)
        if not self._first <= step <= last:
            raise ValueError(f"rewind to step {step}: only steps {self._first} to {last} are known")
        kept = step - self._first
        rows, tokens = sum(self._rows[kept:]), sum(self._tokens[kept:])
        del self._rows[kept:], self._tokens[kept:]
        self._charge(step - step % self._every)
        return rows, tokens

    def _charge(self, since: int) -> None:
        """Rows of the steps after `since` are charged."""
        self._charged_from = since
        before = max(0, self._first - since)  # steps that the log does not hold
        self.unpublished = before * self._groups + sum(self._rows[max(0, since - self._first) :])

    def as_dict(self) -> dict[str, Any]:
        return {
            "first": self._first,
            "rows": list(self._rows),
            "tokens": list(self._tokens),
            "charged_from": self._charged_from,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        self._first, self._rows, self._tokens = state["first"], list(state["rows"]), list(state["tokens"])
        self._charge(state["charged_from"])
