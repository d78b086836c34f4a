"""The owner of the weight channel: it calls a trainer's `export` and keeps what comes back.

Guarantees:
1. Versions only grow: publishing a version that is not newer than the newest is an error.
2. A version is installed whole or not at all. An export that fails, times out or does not fit the versions before it
   leaves the newest version untouched.
3. Every version holds the same names and shapes as the first.
4. The `keep` newest versions are held; older ones are forgotten (a reader that already took one keeps it).
5. Publishing waits for no reader, and a reader waits for no export.

Buckets are references here: values in one process, object references in a cluster. The store never opens them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from weights.config import WeightsConfig
from weights.manifest import BadManifest, Manifest, StaleVersion, VersionGone, check_coverage

NOTHING = -1  # the version of a store to which nothing was published


class Exporter(Protocol):
    """A trainer, as the weight store sees it."""

    async def export(self, version: int) -> tuple[Manifest, list[Any]]:
        """Pack the current weights as `version`: its manifest and one reference for each bucket."""
        ...


class WeightStore:
    """Holds the newest versions of one policy."""

    def __init__(self, config: WeightsConfig, clock: Callable[[], float]) -> None:
        self._config = config
        self._clock = clock
        self._held: dict[int, tuple[Manifest, list[Any]]] = {}  # oldest first
        self._changed = asyncio.Condition()
        self._publishing = asyncio.Lock()
        self._published = 0
        self._failures = 0
        self._seconds_exporting = 0.0
        self._published_at: float | None = None

    async def publish(self, version: int, exporter: Exporter) -> None:
        """Call `exporter.export(version)` and install what it returns.

        Raises StaleVersion, BadManifest, CoverageError, TimeoutError after `config.timeout` seconds, or what the
        exporter raised.
        """
        async with self._publishing:
            self._require_newer(version)
            started = self._clock()
            try:
                manifest, references = await self._export(version, exporter)
                self._check(version, manifest, references)
            except BaseException:
                self._failures += 1
                raise
            finally:
                self._seconds_exporting += self._clock() - started
            await self._install(manifest, references)

    def newest(self) -> int:
        """The newest version, NOTHING (-1) before the first."""
        return next(reversed(self._held), NOTHING)

    async def wait_newer(self, than: int, timeout: float) -> int:
        """Long poll: the newest version as soon as it is newer than `than`; after `timeout` seconds whatever it is."""
        try:
            async with asyncio.timeout(timeout), self._changed:
                await self._changed.wait_for(lambda: self.newest() > than)
        except TimeoutError:
            return self.newest()
        return self.newest()

    def get(self, version: int | None = None) -> tuple[Manifest, list[Any]]:
        """Manifest and bucket references of `version`, or of the newest. Raises VersionGone."""
        wanted = self.newest() if version is None else version
        if wanted not in self._held:
            held = ", ".join(map(str, self._held)) or "none"
            raise VersionGone(f"version {wanted} of the weights is not held; held: {held}")
        return self._held[wanted]

    def status(self) -> dict[str, float | int | None]:
        """Newest version, versions and bytes held, publications, failures, seconds spent exporting, seconds since."""
        since = None if self._published_at is None else self._clock() - self._published_at
        return {
            "version": self.newest(),
            "versions_held": len(self._held),
            "bytes": sum(manifest.nbytes for manifest, _ in self._held.values()),
            "published": self._published,
            "failures": self._failures,
            "seconds_exporting": self._seconds_exporting,
            "seconds_since_publish": since,
        }

    def _require_newer(self, version: int) -> None:
        if version <= self.newest():
            raise StaleVersion(f"version {version} is not newer than version {self.newest()}, which is published")

    async def _export(self, version: int, exporter: Exporter) -> tuple[Manifest, list[Any]]:
        timeout = asyncio.timeout(self._config.timeout)
        try:
            async with timeout:
                return await exporter.export(version)
        except TimeoutError as error:
            if not timeout.expired():  # the exporter's own
                raise
            raise TimeoutError(
                f"export of version {version} of the weights took over {self._config.timeout:g} s (weights.timeout)"
            ) from error

    def _check(self, version: int, manifest: Manifest, references: list[Any]) -> None:
        if manifest.version != version:
            raise BadManifest(f"asked for version {version}, the exporter answered version {manifest.version}")
        if len(references) != len(manifest.bucket_sizes):
            raise BadManifest(
                f"version {version}: {len(references)} buckets came, the manifest has {len(manifest.bucket_sizes)}"
            )
        if manifest.base is not None and manifest.base not in self._held:
            raise BadManifest(f"version {version} is a delta on version {manifest.base}, which is not held")
        if self._held and manifest.base is None:
            check_coverage(manifest, self._held[self.newest()][0].shapes, what=f"version {self.newest()}")

    async def _install(self, manifest: Manifest, references: list[Any]) -> None:
        async with self._changed:
            self._held[manifest.version] = (manifest, list(references))
            for old in list(self._held)[: -self._config.keep]:
                del self._held[old]
            self._published += 1
            self._published_at = self._clock()
            self._changed.notify_all()
