"""A plan as rich tables and as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from topology.bundles import asked, say
from topology.config import RunConfig
from topology.plan import Plan


def plan_as_dict(plan: Plan) -> dict[str, Any]:
    whole: dict[str, Any] = _plain(asdict(plan))
    totals = {"cpus": plan.cpus, "gpus": plan.gpus, "memory_gib": round(plan.memory_gib, 2)}
    return {**whole, "totals": totals}


def render_plan(config: RunConfig, plan: Plan) -> RenderableType:
    edges = Table("from", "to", "what", box=None)
    for edge in plan.edges:
        edges.add_row(*edge)
    numbers = Table(show_header=False, box=None)
    for what, value in plan.arithmetic.items():
        numbers.add_row(what, value)
    if config.collect is None:
        numbers.add_row("worst-case staleness", f"{plan.worst_case_staleness} version(s), {_order(config)}")
    warnings = [Text(f"note: {warning}", style="yellow") for warning in plan.warnings]
    parts = [_actors(config, plan), _bundles(plan), _nodes(plan), edges, numbers]
    spaced = [part for table in parts for part in (table, Text())][:-1]
    return Group(*spaced, *warnings)


def _actors(config: RunConfig, plan: Plan) -> Table:
    table = Table(
        "actor",
        "kind",
        "CPUs",
        "GPUs",
        "memory",
        "of a GPU",
        title=f"run {config.name}",
        title_justify="left",
        box=None,
    )
    for actor in plan.actors:
        resources = actor.resources
        memory, gpu = f"{actor.memory_gib:.1f} GiB", f"{actor.gpu_memory_gib:.1f} GiB" if actor.gpu_memory_gib else ""
        table.add_row(actor.name, actor.kind, f"{resources.cpus:g}", f"{resources.gpus:g}", memory, gpu)
    table.add_row("[b]all[/b]", "", f"{plan.cpus:g}", f"{plan.gpus:g}", f"{plan.memory_gib:.1f} GiB")
    return table


def _bundles(plan: Plan) -> Table:
    """What is reserved together, and what of it is never split over nodes."""
    table = Table("reserved", "policy", "bundles", "of", "the first holds", box=None)
    for group in plan.groups:
        first = group.bundles[0]
        needs = say(asked(first.resources))
        table.add_row(group.name, group.policy, str(len(group.bundles)), needs, shortened(first.actors))
    return table


def _nodes(plan: Plan) -> Table:
    table = Table("node", "CPUs", "GPUs", "memory", "actors", box=None)
    for node in plan.nodes:
        resources, memory = node.resources, f"{node.memory_gib:.1f} GiB"
        table.add_row(node.name, f"{resources.cpus:g}", f"{resources.gpus:g}", memory, shortened(node.actors))
    return table


def shortened(actors: Sequence[str]) -> str:
    """Neighbours of one group in one word: `maker/rollout/0-3`."""
    runs: list[list[str]] = []
    for actor in actors:
        stem, _, index = actor.rpartition("/")
        last_stem, _, last = runs[-1][-1].rpartition("/") if runs else ("", "", "")
        if stem and stem == last_stem and last.isdigit() and index.isdigit() and int(index) == int(last) + 1:
            runs[-1].append(actor)
        else:
            runs.append([actor])
    return ", ".join(run[0] + (f"-{run[-1].rpartition('/')[2]}" if len(run) > 1 else "") for run in runs)


def _order(config: RunConfig) -> str:
    buffer = config.buffer
    return {
        "fifo": "order fifo",
        "window": f"order window, {buffer.window} rows beyond the oldest",
        "ready": "order ready: older rows are dropped when they would be taken",
    }[buffer.order]


def _plain(value: Any) -> Any:
    """Settings as plain data too, and memory in figures that can be read."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if hasattr(value, "model_dump"):
        return value.model_dump()
    return round(value, 2) if isinstance(value, float) else value
