"""What a version of the weights is: the description that travels before and beside its buckets.

Guarantees:
1. A manifest that exists is coherent: names are unique, every tensor lies inside its bucket, tensors of a bucket do not
   overlap, and sizes follow from shape and dtype. Anything else is refused in the constructor.
2. `check_coverage` accepts exactly the names and shapes of the model: nothing missing, nothing extra.
3. JSON out and in gives an equal manifest.

Free of torch and numpy, so that the store and the command line stay light.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

ITEM_BYTES = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "bool": 1,
}
NAMES_SHOWN = 5


class WeightsError(Exception):
    """A version of the weights cannot be published, found or used."""


class BadManifest(WeightsError):
    """The description of a version contradicts itself or its buckets."""


class CoverageError(WeightsError):
    """The tensors of a version are not exactly the tensors of the model."""


class CorruptWeights(WeightsError):
    """Bytes of a tensor differ from what was published."""


class NonFiniteWeights(WeightsError):
    """A tensor holds NaN or infinity; such weights are never published."""


class StaleVersion(WeightsError):
    """A version was published that is not newer than the newest."""


class VersionGone(WeightsError):
    """A version was asked for that the store does not hold."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Where one tensor lies: bytes `[offset, offset + nbytes)` of bucket number `bucket`."""

    name: str
    dtype: str  # a key of ITEM_BYTES
    shape: tuple[int, ...]
    bucket: int
    offset: int
    nbytes: int
    checksum: str  # xxh3_64 of the bytes, 16 hexadecimal digits


@dataclass(frozen=True, slots=True)
class Manifest:
    """An immutable version of the weights. `bucket_sizes` in bytes; `base` is the version a delta builds on."""

    version: int
    tensors: tuple[TensorSpec, ...]
    bucket_sizes: tuple[int, ...]
    base: int | None = None

    def __post_init__(self) -> None:
        if self.version < 0:
            raise BadManifest(f"version {self.version} is negative")
        if self.base is not None and not 0 <= self.base < self.version:
            raise BadManifest(f"version {self.version}: base {self.base} is not an older version")
        if not self.tensors:
            raise BadManifest(f"version {self.version} has no tensor")
        names = {tensor.name for tensor in self.tensors}
        if len(names) != len(self.tensors):
            twice = sorted(name for name in names if sum(tensor.name == name for tensor in self.tensors) > 1)
            raise BadManifest(f"version {self.version}: {shorten(twice)} more than once")
        for tensor in self.tensors:
            self._check_tensor(tensor)
        self._check_overlap()

    def _check_tensor(self, tensor: TensorSpec) -> None:
        where = f"version {self.version}, tensor {tensor.name}"
        item = ITEM_BYTES.get(tensor.dtype)
        if item is None:
            raise BadManifest(f"{where}: dtype {tensor.dtype} is not one of {', '.join(ITEM_BYTES)}")
        if any(size < 0 for size in tensor.shape) or tensor.nbytes != math.prod(tensor.shape) * item:
            raise BadManifest(f"{where}: {tensor.nbytes} bytes for shape {tensor.shape} of {tensor.dtype}")
        if not 0 <= tensor.bucket < len(self.bucket_sizes):
            raise BadManifest(f"{where}: bucket {tensor.bucket} of {len(self.bucket_sizes)}")
        if tensor.offset < 0 or tensor.offset + tensor.nbytes > self.bucket_sizes[tensor.bucket]:
            raise BadManifest(
                f"{where}: bytes {tensor.offset}..{tensor.offset + tensor.nbytes} "
                f"of a bucket of {self.bucket_sizes[tensor.bucket]}"
            )

    def _check_overlap(self) -> None:
        filled = [tensor for tensor in self.tensors if tensor.nbytes]
        for left, right in pairwise(sorted(filled, key=lambda tensor: (tensor.bucket, tensor.offset))):
            if left.bucket == right.bucket and left.offset + left.nbytes > right.offset:
                raise BadManifest(f"version {self.version}: {left.name} and {right.name} overlap")

    @property
    def nbytes(self) -> int:
        """Bytes of all buckets."""
        return sum(self.bucket_sizes)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {tensor.name: tensor.shape for tensor in self.tensors}

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Raises BadManifest for text that is not a manifest."""
        try:
            data: dict[str, Any] = json.loads(text)
            tensors = tuple(TensorSpec(**{**tensor, "shape": tuple(tensor["shape"])}) for tensor in data["tensors"])
            return cls(data["version"], tensors, tuple(data["bucket_sizes"]), data["base"])
        except (ValueError, KeyError, TypeError) as error:
            raise BadManifest(f"not a manifest: {error!r}") from error


def check_coverage(manifest: Manifest, expected: Mapping[str, tuple[int, ...]], *, what: str) -> None:
    """Raise CoverageError unless `manifest` has exactly the names and shapes of `expected`.

    `what` says whose weights these are, for the message.
    """
    given = manifest.shapes
    missing, extra = sorted(expected.keys() - given.keys()), sorted(given.keys() - expected.keys())
    reshaped = sorted(name for name in expected.keys() & given.keys() if tuple(expected[name]) != given[name])
    problems = []
    if missing:
        problems.append(f"{len(missing)} missing ({shorten(missing)})")
    if extra:
        problems.append(f"{len(extra)} unknown ({shorten(extra)})")
    if reshaped:
        details = [f"{name} is {given[name]}, not {tuple(expected[name])}" for name in reshaped]
        problems.append(f"{len(reshaped)} of another shape ({shorten(details)})")
    if problems:
        raise CoverageError(f"version {manifest.version} does not cover {what}: {'; '.join(problems)}")


def shorten(names: list[str]) -> str:
    """The first few names, and how many more there are."""
    more = len(names) - NAMES_SHOWN
    return ", ".join(names[:NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
