"""A live run's config with makers more or fewer: what `tandem attach` and `tandem detach` make of it. Pure.

Raises ConfigError for what cannot be: rows keep the columns they have, so a newcomer fills one of the run's stages.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import count, islice
from typing import Any

from topology.config import ConfigError, RunConfig, parse_config
from topology.roles import route_of, stage_of, stages_of


def grown(
    config: RunConfig, group: str, section: Mapping[str, Any] | None, replicas: int, present: Iterable[str]
) -> RunConfig:
    """`replicas` makers more in `group` than are `present` (names of actors), or with `section` (keys of a maker) the group
    as a new one."""
    makers = config.model_dump(mode="json")["makers"]
    if section is None:
        if group not in makers:
            raise ConfigError(
                f"makers.{group}: there is no such group in run {config.name} (there are: {', '.join(makers)}): name one of "
                "these, or give a new one with --maker"
            )
        if replicas < 1:
            raise ConfigError(f"replicas: {replicas}, at least 1 maker is to be attached")
        makers[group]["replicas"] = len(_of_group(group, present)) + replicas
    else:
        if group in makers:
            raise ConfigError(
                f"makers.{group}: run {config.name} has that group: attach more of it with --replicas, or give the new one "
                "another name"
            )
        makers[group] = dict(section)
    changed = parse_config({**config.model_dump(mode="json"), "makers": makers}, source=f"run {config.name}, changed")
    _check_colocated(config, group)
    stages, stage = stages_of(config), stage_of(changed.makers[group], group)
    if stage not in stages:
        raise ConfigError(
            f"makers.{group}: would fill the column `{stage}`, which nobody in run {config.name} needs: its rows have "
            f"{', '.join(stages)}, as when it was started"
        )
    return changed


def shrunk(config: RunConfig, actor: str) -> RunConfig:
    """Without this maker. The last one of its group stays in the config where no other group fills the stage for its rows, so
    that a resumed run has it again."""
    group = group_of(actor)
    maker = config.makers[group]
    if maker.replicas > 1:
        return config.model_copy(
            update={"makers": {**config.makers, group: maker.model_copy(update={"replicas": maker.replicas - 1})}}
        )
    others = {name: other for name, other in config.makers.items() if name != group}
    stage, route = stage_of(maker, group), route_of(config, maker)
    if any(
        stage_of(other, name) == stage and route_of(config, other) in (None, route) for name, other in others.items()
    ):
        return config.model_copy(update={"makers": others})
    return config


def newcomers(grown: RunConfig, group: str, present: Iterable[str]) -> list[str]:
    """Names for the makers that are not present yet: the lowest numbers that are free in their group."""
    taken = set(_of_group(group, present))
    more = grown.makers[group].replicas - len(taken)
    return list(islice((name for name in (f"maker/{group}/{i}" for i in count()) if name not in taken), more))


def were_joining(config: RunConfig, there: Iterable[str], rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """The makers that were just being attached when the supervisor died: more than the `config` that it wrote counts.

    `there` are the actors found; `rows` those of its last status, which may be a second old.
    """
    told = {row["name"]: bool(row.get("joining")) for row in rows}
    found: list[str] = []
    for group, maker in config.makers.items():
        names = set(_of_group(group, {*there, *told}))
        doubtful = sorted(name for name in names if told.get(name, True))
        found += doubtful[max(0, len(doubtful) - max(0, len(names) - maker.replicas)) :]
    return found


def were_lost(config: RunConfig, there: Collection[str], rows: Collection[Mapping[str, Any]]) -> list[str]:
    """The makers that the `config` counts and that died while nobody watched: they worked by the last status, and are not
    among those found."""
    joining = set(were_joining(config, there, rows))
    worked = {row["name"] for row in rows if row["state"] != "draining"} - joining - {*there}
    found: list[str] = []
    for group, maker in config.makers.items():
        missing = maker.replicas - len({*_of_group(group, there)} - joining)
        found += sorted(_of_group(group, worked))[: max(0, missing)]
    return found


def _of_group(group: str, actors: Iterable[str]) -> list[str]:
    return [name for name in actors if name.startswith(f"maker/{group}/")]


def group_of(actor: str) -> str:
    """Of `maker/GROUP/I`."""
    return actor.split("/")[1]


def _check_colocated(config: RunConfig, group: str) -> None:
    for names in config.placement.colocate:
        if group in names:
            raise ConfigError(
                f"makers.{group}: shares its devices in turns with {', '.join(n for n in names if n != group)} "
                "(placement.colocate), so it cannot grow or shrink in a live run: give a new group with --maker"
            )
