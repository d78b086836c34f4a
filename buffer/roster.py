"""The makers of a table: which stages they fill, and what a stage needs."""

from __future__ import annotations

from collections.abc import Sequence

from buffer.records import MakerInfo


class Roster:
    """All makers of a stage agree on its needs, no stage needs itself, and every stage is one of the table's."""

    def __init__(self, stages: Sequence[str]) -> None:
        self.makers: dict[str, MakerInfo] = {}
        self.needs: dict[str, tuple[str, ...]] = {}  # by stage; kept when its last maker goes
        self.names: dict[str, set[str]] = {stage: set() for stage in stages}  # by stage

    def add(self, info: MakerInfo) -> None:
        """Raises ValueError for a maker that does not fit."""
        if info.name in self.makers:
            raise ValueError(f"maker {info.name} is attached already: give the new one another name")
        if info.slots < 1:
            raise ValueError(f"maker {info.name} has {info.slots} slots: it needs at least 1")
        for stage in (info.stage, *info.needs):
            if stage not in self.names:
                raise ValueError(f"maker {info.name}: rows have no stage {stage} in this run, only {list(self.names)}")
        expected = self.needs.get(info.stage, info.needs)
        if info.needs != expected:
            raise ValueError(
                f"maker {info.name}: stage {info.stage} needs {list(expected)} in this run, not {list(info.needs)}"
            )
        if info.stage in self._reached_from(info.needs):
            raise ValueError(f"maker {info.name}: stage {info.stage} would need itself, through {list(info.needs)}")
        self.makers[info.name] = info
        self.needs[info.stage] = info.needs
        self.names[info.stage].add(info.name)

    def remove(self, name: str) -> None:
        info = self.makers.pop(name)
        self.names[info.stage].remove(name)

    def made_from(self, stage: str) -> set[str]:
        """The stage, and every one that has needed it, or may have: of those no maker has told its needs yet."""
        others = (other for other in self.names if other not in self.needs or stage in self._reached_from([other]))
        return {stage, *others}

    def _reached_from(self, stages: Sequence[str]) -> set[str]:
        reached: set[str] = set()
        open_stages = set(stages)
        while open_stages:
            reached |= open_stages
            open_stages = {need for stage in open_stages for need in self.needs.get(stage, ())} - reached
        return reached
