"""The weight channel as a maker sees it.

Guarantees: `pull` returns one whole version, manifest and every bucket, or raises. It does not look into the buckets;
whoever unpacks them verifies the checksums.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from weights.manifest import Manifest
from weights.store import WeightStore

Buckets = list[NDArray[np.uint8]]


class WeightClient(Protocol):
    async def wait_newer(self, than: int, timeout: float) -> int:
        """Long poll: the newest version as soon as it is newer than `than`; after `timeout` seconds whatever it is.

        -1 while nothing is published.
        """
        ...

    async def pull(self, version: int | None = None) -> tuple[Manifest, Buckets]:
        """Manifest and buckets (read-only by rule) of `version`, or of the newest. Raises VersionGone."""
        ...


class LocalWeightClient:
    """For a store in the same process, whose references are the buckets themselves."""

    def __init__(self, store: WeightStore) -> None:
        self._store = store

    async def wait_newer(self, than: int, timeout: float) -> int:
        return await self._store.wait_newer(than, timeout)

    async def pull(self, version: int | None = None) -> tuple[Manifest, Buckets]:
        manifest, references = self._store.get(version)
        buckets: list[Any] = references
        return manifest, buckets
