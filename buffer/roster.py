"""The makers of a table: which stages they fill, what a stage needs, and who takes which rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from buffer.config import Route
from buffer.records import MakerInfo, Prompt
from buffer.rows import Takers

Routes = Mapping[str, Iterable[Route | None]]  # by stage: of its groups of makers; None: a group that takes every row
NO_ROUTES: Routes = {}


class Roster:
    """All makers of a stage agree on its needs, no stage needs itself, and every stage is one of the table's.

    `declared`: the routes of makers that may come. A route stays known when its last maker goes: another may come.
    """

    def __init__(self, stages: Sequence[str], declared: Routes = NO_ROUTES) -> None:
        self.makers: dict[str, MakerInfo] = {}
        self.needs: dict[str, tuple[str, ...]] = {}  # by stage; kept when its last maker goes
        self.names: dict[str, set[str]] = {stage: set() for stage in stages}  # by stage
        self._routes: dict[str, Takers] = {stage: frozenset(declared.get(stage, ())) for stage in stages}

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
        self._routes[info.stage] |= {info.route}

    def takers(self, stage: str, prompt: Prompt) -> Takers:
        """Of the known routes of the stage, those that take this prompt's row."""
        routes = self._routes[stage]
        if routes <= {None}:
            return routes
        return frozenset(route for route in routes if route is None or route.takes(prompt.fields))

    def knows(self, info: MakerInfo) -> bool:
        """Whether the maker's route is a known one."""
        return info.route in self._routes.get(info.stage, ())

    def takers_by_name(self, stage: str, prompt: Prompt) -> set[str]:
        """The makers that are there and take this prompt's row."""
        takers = self.takers(stage, prompt)
        return {name for name in self.names[stage] if self.makers[name].route in takers}

    def refusal(self, prompt: Prompt) -> str | None:
        """Why no maker, now or later, takes a row of this prompt; None: for each stage there is a known route."""
        for stage, routes in self._routes.items():
            if routes and not self.takers(stage, prompt):
                columns = sorted({route.column for route in routes if route is not None})
                has = ", ".join(f"{column} is {prompt.fields.get(column)!r}" for column in columns)
                there = "; ".join(sorted(str(route) for route in routes))
                return (
                    f"no group of makers fills `{stage}` of it: its {has}, and the routes are {there}. Add a group with that "
                    "value in its `route`, or one without a route"
                )
        return None

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
