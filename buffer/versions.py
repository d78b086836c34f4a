"""Which policy version is published, and which one the trainer holds.

Version v is published after optimizer step v * `every`; steps count from 1 and version 0 is the start. After a resume the
first publication may be any version. Versions and steps only grow.
"""

from __future__ import annotations


class Versions:
    def __init__(self, every: int) -> None:
        if every < 1:
            raise ValueError(f"a version is published every {every} steps: it must be at least 1")
        self.every = every
        self.published: int | None = None
        self.step = 0

    @property
    def newest(self) -> int:
        """The trainer's version: no token can come from a newer one. -1 before the first publication.

        A publication takes time, so the trainer can be ahead of `published`; ages count from here.
        """
        return max(-1 if self.published is None else self.published, self.step // self.every if self.step else -1)

    def publish(self, version: int) -> None:
        """Raises ValueError for a version older than the one already published; the same one again is allowed."""
        if version < (0 if self.published is None else self.published):
            raise ValueError(f"version {version} was published after version {self.published}: versions only grow")
        self.published = version

    def train(self, step: int) -> None:
        """Raises ValueError for a step that is already behind."""
        published = (self.published or 0) * self.every
        if step < self.step or step <= published:
            raise ValueError(
                f"rows trained in step {step}, but step {max(self.step, published)} is done and version {self.published} "
                f"published: steps count from 1, and version v comes after step v * {self.every}"
            )
        self.step = step
