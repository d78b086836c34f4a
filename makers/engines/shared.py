"""A version of the weights in memory that the worker processes of one node read.

Guarantees: the bytes are written once, whatever the number of workers; a worker copies nothing and sees what was
verified; the memory has no name in any file system, so nothing of it is left when the processes that use it are gone.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from weights.manifest import Manifest
from weights.packing import ALIGNMENT, unpack


class SharedWeights:
    """Buckets in anonymous shared memory, given back with the last reference to this object and the last mapping of it.

    Pickled it is a manifest and the way to that memory, good as long as the original lives.
    """

    def __init__(self, manifest: Manifest, buckets: Sequence[np.ndarray]) -> None:
        self._manifest = manifest
        padded = (-(-size // ALIGNMENT) * ALIGNMENT for size in manifest.bucket_sizes)
        *self._starts, end = accumulate(padded, initial=0)
        self._memory = open(os.memfd_create(f"weights-{manifest.version}"), "wb", buffering=0)  # noqa: SIM115
        self._path = f"/proc/{os.getpid()}/fd/{self._memory.fileno()}"
        self._memory.truncate(end)
        whole = np.memmap(self._path, mode="r+")
        for start, bucket in zip(self._starts, buckets, strict=True):
            whole[start : start + bucket.nbytes] = bucket.reshape(-1).view(np.uint8)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_memory"}

    def items(self) -> Iterable[tuple[str, Any]]:
        """Names and tensors, read-only."""
        whole = np.memmap(self._path, mode="r")
        parts = zip(self._starts, self._manifest.bucket_sizes, strict=True)
        buckets = [whole[start : start + size] for start, size in parts]
        return unpack(self._manifest, buckets, verify=False).items()
