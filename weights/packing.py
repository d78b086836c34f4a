"""Tensors into a few flat buckets of bytes, and back.

Guarantees:
1. Bit-exact: `unpack(*pack(...))` gives the same names, order, dtypes, shapes and bytes.
2. Each tensor is read once while its copy is warm: copied, tested for NaN and infinity, and hashed.
3. A tensor larger than a bucket gets a bucket of its own; every other bucket holds at most `bucket_bytes`.
4. The same tensors give the same buckets, byte for byte.
5. `unpack` copies nothing. What it returns are views of the buckets, which may be memory shared with other processes:
   read them, never write to them. Torch cannot enforce that.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence

import numpy as np
import torch
import xxhash

from weights.manifest import BadManifest, CorruptWeights, Manifest, NonFiniteWeights, TensorSpec

ALIGNMENT = 64  # bytes; a cache line, and a multiple of every item size

Bucket = np.ndarray  # uint8 [bytes]


def pack(
    version: int, named_tensors: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int
) -> tuple[Manifest, list[Bucket]]:
    """Pack `named_tensors`, walked once and in order, into uint8 buckets of at most `bucket_bytes` bytes.

    Raises NonFiniteWeights naming the tensor, BadManifest for a dtype that cannot travel or a name given twice.
    """
    packer = _Packer(bucket_bytes)
    for name, tensor in named_tensors:
        packer.add(name, tensor)
    buckets = packer.finish()
    return Manifest(version, tuple(packer.specs), tuple(bucket.size for bucket in buckets)), buckets


def unpack(manifest: Manifest, buckets: Sequence[Bucket], verify: bool = True) -> dict[str, torch.Tensor]:
    """The tensors of `manifest` as read-only views of `buckets`, in the manifest's order.

    Raises BadManifest when the buckets are not those of the manifest, CorruptWeights naming the tensor whose bytes
    do not match their checksum (skipped when `verify` is False).
    """
    sizes = tuple(bucket.nbytes for bucket in buckets)
    if sizes != manifest.bucket_sizes:
        raise BadManifest(
            f"version {manifest.version}: buckets of {sizes} bytes, manifest says {manifest.bucket_sizes}"
        )
    raw = [np.asarray(bucket).reshape(-1).view(np.uint8) for bucket in buckets]
    tensors = {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        for spec in manifest.tensors:
            part = raw[spec.bucket][spec.offset : spec.offset + spec.nbytes]
            if verify and (found := xxhash.xxh3_64_hexdigest(part)) != spec.checksum:
                raise CorruptWeights(
                    f"version {manifest.version}, tensor {spec.name}: checksum {found}, published {spec.checksum}"
                )
            tensors[spec.name] = torch.from_numpy(part).view(getattr(torch, spec.dtype)).reshape(spec.shape)
    return tensors


class _Packer:
    """Buckets are filled one after the other; `specs` grows with every tensor."""

    def __init__(self, bucket_bytes: int) -> None:
        self.specs: list[TensorSpec] = []
        self._bucket_bytes = bucket_bytes
        self._closed: list[Bucket | None] = []  # None: the number of the bucket that is open
        self._open: Bucket | None = None
        self._open_index = 0
        self._used = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        tensor = tensor.detach()
        nbytes = tensor.numel() * tensor.element_size()
        bucket, index, offset = self._reserve(nbytes)
        part = bucket[offset : offset + nbytes]
        if nbytes:
            copy = torch.from_numpy(part).view(tensor.dtype)
            copy.copy_(tensor.reshape(-1))
            _require_finite(name, copy)
        dtype = str(tensor.dtype).removeprefix("torch.")
        checksum = xxhash.xxh3_64_hexdigest(part)
        self.specs.append(TensorSpec(name, dtype, tuple(tensor.shape), index, offset, nbytes, checksum))

    def finish(self) -> list[Bucket]:
        self._close()
        return [bucket for bucket in self._closed if bucket is not None]

    def _reserve(self, nbytes: int) -> tuple[Bucket, int, int]:
        """A bucket, its number and an offset in it where `nbytes` are free."""
        if nbytes > self._bucket_bytes:
            own: Bucket = np.empty(nbytes, np.uint8)
            self._closed.append(own)
            return own, len(self._closed) - 1, 0
        offset = -(-self._used // ALIGNMENT) * ALIGNMENT
        if self._open is None or offset + nbytes > self._bucket_bytes:
            self._close()
            self._open, self._open_index, offset = np.empty(self._bucket_bytes, np.uint8), len(self._closed), 0
            self._used = 0
            self._closed.append(None)
        self._open[self._used : offset] = 0
        self._used = offset + nbytes
        return self._open, self._open_index, offset

    def _close(self) -> None:
        if self._open is not None:
            self._closed[self._open_index] = self._open[: self._used]
            self._open = None


def _require_finite(name: str, tensor: torch.Tensor) -> None:
    if not tensor.dtype.is_floating_point:
        return
    low, high = torch.aminmax(tensor)  # NaN passes through both; one pass and no temporary
    if not (torch.isfinite(low) and torch.isfinite(high)):
        count = int((~torch.isfinite(tensor)).sum())
        raise NonFiniteWeights(f"tensor {name}: {count} of {tensor.numel()} values are NaN or infinite; not published")
