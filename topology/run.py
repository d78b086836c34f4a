"""The handle of a run: it works from any process that can read the run folder, during the run and after it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from topology.changes import grown
from topology.config import ConfigError, load_config
from topology.joining import CONNECT, connected
from topology.names import namespace_of
from topology.prepare import check
from topology.runs import ENDED, RunError, RunFolder, process_alive


@dataclass(frozen=True)
class Run:
    """A run, live or ended, seen through its folder."""

    folder: RunFolder

    @property
    def name(self) -> str:
        return self.folder.name

    def status(self) -> dict[str, Any]:
        return self.folder.status()

    def wait(self, timeout: float | None = None) -> dict[str, Any]:
        """Block until the run has ended; its last status. Raises TimeoutError."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (status := self.status())["state"] not in ENDED:
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"run {self.name} is still {status['state']} after {timeout:g} s")
            time.sleep(0.2)
        return status

    def stop(self, now: bool = False) -> dict[str, Any]:
        """Drain and stop (or end at once). Returns the last status; the run's cluster is gone afterwards."""
        if self.status()["state"] not in ENDED:
            timeout = load_config(self.folder.config).limits.stop + CONNECT
            with self.supervisor() as supervisor:
                import ray

                ray.get(supervisor.stop.remote(now), timeout=CONNECT)
            self.wait(timeout)
        self.wait_for_cluster_end()
        return self.status()

    def attach(self, group: str, replicas: int = 1, maker: Mapping[str, Any] | None = None) -> list[str]:
        """Makers more, which work when this returns; their names.

        `replicas` more of a group that the run has, or with `maker` (keys as in the config) a new group. Raises ConfigError
        for what cannot work, RunError: the run is then as it was.
        """
        config = load_config(self.folder.config)
        section = None if maker is None else dict(maker)
        present = [actor["name"] for actor in self.folder.status().get("actors", ())]
        check(grown(config, group, section, replicas, present))
        return self._ask_supervisor("attach", group, section, replicas, timeout=2 * config.limits.start)

    def detach(self, maker: str, now: bool = False) -> None:
        """One maker fewer: it finishes its rows first, or with `now` others make them again. Raises ConfigError, RunError."""
        config = load_config(self.folder.config)
        self._ask_supervisor("detach", maker, now, timeout=config.limits.start + 2 * config.buffer.lease_timeout)

    def checkpoint(self) -> Path:
        """Have a checkpoint written of the present step, when that is done; its folder. Raises ConfigError, RunError."""
        limits = load_config(self.folder.config).limits
        return Path(self._ask_supervisor("checkpoint", timeout=limits.batch + 3 * limits.step))

    def _ask_supervisor(self, method: str, *args: Any, timeout: float) -> Any:
        state = self.status()["state"]
        if state in ENDED:
            raise ConfigError(f"run {self.name} has ended ({state}): {method} works while it runs")
        with self.supervisor() as supervisor:
            import ray

            try:
                return ray.get(getattr(supervisor, method).remote(*args), timeout=timeout)
            except ray.exceptions.RayTaskError as error:
                if isinstance(error.cause, ConfigError):
                    raise ConfigError(str(error.cause)) from None
                raise RunError(f"run {self.name}: {method}: {error.cause}") from None
            except ray.exceptions.GetTimeoutError:
                raise RunError(f"run {self.name}: {method} was not done within {timeout:g} s") from None

    def wait_for_cluster_end(self, timeout: float = 60.0) -> None:
        """The keeper ends the run's own cluster shortly after the run; wait for that. Raises TimeoutError."""
        cluster = self.folder.cluster()
        deadline = time.monotonic() + timeout
        while cluster and cluster["keeper"] and process_alive(cluster["keeper"], cluster["keeper_started"]):
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"the cluster of run {self.name} (keeper process {cluster['keeper']}) is still there"
                )
            time.sleep(0.1)

    @contextmanager
    def supervisor(self) -> Iterator[Any]:
        cluster = self.folder.cluster()
        if cluster is None:
            raise RunError(f"run {self.name} has no cluster")
        with connected(self.folder, cluster["address"], own=cluster["keeper"] is not None) as ray:
            try:
                supervisor = ray.get_actor("supervisor", namespace=namespace_of(self.name))
            except ValueError as error:
                raise RunError(f"run {self.name}: no supervisor in its cluster") from error
            yield supervisor
