"""A plan as rich tables and as plain data."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from topology.config import RunConfig
from topology.plan import Plan


def plan_as_dict(plan: Plan) -> dict[str, Any]:
    actors = [
        {
            "name": actor.name,
            "kind": actor.kind,
            "resources": actor.resources.model_dump(),
            "memory_gib": round(actor.memory_gib, 2),
        }
        for actor in plan.actors
    ]
    shown = {key: value for key, value in asdict(plan).items() if key != "actors"}
    totals = {"cpus": plan.cpus, "gpus": plan.gpus, "memory_gib": round(plan.memory_gib, 2)}
    return {"actors": actors, "totals": totals, **shown}


def render_plan(config: RunConfig, plan: Plan) -> RenderableType:
    actors = Table(
        "actor", "kind", "CPUs", "GPUs", "memory", title=f"run {config.name}", title_justify="left", box=None
    )
    for actor in plan.actors:
        resources = actor.resources
        actors.add_row(
            actor.name, actor.kind, f"{resources.cpus:g}", f"{resources.gpus:g}", f"{actor.memory_gib:.1f} GiB"
        )
    actors.add_row("[b]all[/b]", "", f"{plan.cpus:g}", f"{plan.gpus:g}", f"{plan.memory_gib:.1f} GiB")
    edges = Table("from", "to", "what", box=None)
    for edge in plan.edges:
        edges.add_row(*edge)
    numbers = Table(show_header=False, box=None)
    for what, value in plan.arithmetic.items():
        numbers.add_row(what, value)
    buffer = config.buffer
    order = {
        "fifo": "order fifo",
        "window": f"order window, {buffer.window} rows beyond the oldest",
        "ready": "order ready: older rows are dropped when they would be taken",
    }[buffer.order]
    numbers.add_row("worst-case staleness", f"{plan.worst_case_staleness} version(s), {order}")
    warnings = [Text(f"note: {warning}", style="yellow") for warning in plan.warnings]
    return Group(actors, Text(), edges, Text(), numbers, *warnings)
