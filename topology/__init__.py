"""Who runs where: one YAML -> plan -> named actors, and the handle of a run.

import topology
run = topology.start("config.yaml")
run.status(); run.attach("rollout"); run.wait(); run.stop()
"""

from __future__ import annotations

from typing import Any

__all__ = ["existing", "resume", "start"]


def start(config: str, overrides: tuple[str, ...] = (), name: str | None = None) -> Any:
    """Start a run from a YAML file; returns a `topology.run.Run`."""
    from topology import launch

    return launch.start(config, overrides, name)


def resume(run_dir: str, overrides: tuple[str, ...] = ()) -> Any:
    """Go on from the newest checkpoint of an ended run; returns a `topology.run.Run`."""
    from topology import launch

    return launch.resume(run_dir, overrides)


def existing(name: str) -> Any:
    """The handle of a run by name or folder; returns a `topology.run.Run`."""
    from topology.run import Run
    from topology.runs import existing_run

    return Run(existing_run(name))
