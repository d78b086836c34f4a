from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weights.manifest import BadManifest, CorruptWeights, Manifest, NonFiniteWeights
from weights.packing import ALIGNMENT, pack, unpack

DTYPES = [torch.bfloat16, torch.float32, torch.float16, torch.int64, torch.uint8, torch.bool]


def some_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "embed.weight": torch.randn(30, 8, generator=generator).bfloat16(),
        "layer.weight": torch.randn(5, 7, generator=generator),
        "layer.bias": torch.randn(7, generator=generator).half(),
    }


@st.composite
def named_tensors(draw: st.DrawFn) -> list[tuple[str, torch.Tensor]]:
    shapes = draw(st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=1, max_size=8))
    tensors = []
    for i, shape in enumerate(shapes):
        dtype = draw(st.sampled_from(DTYPES))
        values = torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(i))
        tensors.append((f"t{i}", values.to(dtype)))
    return tensors


@settings(max_examples=60, deadline=None)
@given(tensors=named_tensors(), bucket_bytes=st.integers(1, 2000))
def test_unpack_gives_back_the_names_order_dtypes_and_bits_of_pack(tensors, bucket_bytes):
    manifest, buckets = pack(3, tensors, bucket_bytes)
    found = unpack(manifest, buckets)
    assert manifest.version == 3
    assert list(found) == [name for name, _ in tensors]
    for name, tensor in tensors:
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert torch.equal(found[name], tensor)
    largest = max(tensor.numel() * tensor.element_size() for _, tensor in tensors)
    assert all(bucket.size <= max(bucket_bytes, largest) for bucket in buckets)


def test_bfloat16_travels_as_its_raw_bytes():
    tensor = torch.tensor([1.0, -2.5, 3.0e38], dtype=torch.bfloat16)
    manifest, buckets = pack(0, [("w", tensor)], 1024)
    assert manifest.tensors[0].dtype == "bfloat16"
    assert buckets[0].dtype == np.uint8
    assert buckets[0].tobytes() == tensor.view(torch.int16).numpy().tobytes()


def test_a_tensor_larger_than_a_bucket_gets_its_own_and_small_ones_still_share():
    tensors = [("a", torch.ones(4)), ("big", torch.ones(1000)), ("b", torch.ones(4))]
    manifest, buckets = pack(0, tensors, 256)
    where = {spec.name: spec.bucket for spec in manifest.tensors}
    assert where["a"] == where["b"] != where["big"]
    assert sorted(bucket.size for bucket in buckets) == [ALIGNMENT + 16, 4000]
    assert torch.equal(unpack(manifest, buckets)["big"], torch.ones(1000))


def test_the_same_tensors_give_the_same_bytes():
    first, second = pack(1, some_tensors().items(), 300)[1], pack(1, some_tensors().items(), 300)[1]
    assert [bucket.tobytes() for bucket in first] == [bucket.tobytes() for bucket in second]


def test_a_tensor_that_is_not_contiguous_is_packed_by_its_values():
    tensor = torch.arange(12.0).reshape(3, 4).t()
    assert torch.equal(unpack(*pack(0, [("w", tensor)], 1024))["w"], tensor)


def test_unpacked_tensors_are_views_of_the_buckets():
    manifest, buckets = pack(0, [("w", torch.zeros(4))], 1024)
    view = unpack(manifest, buckets)["w"]
    buckets[0][:] = np.frombuffer(np.arange(4, dtype=np.float32).tobytes(), np.uint8)
    assert view.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_buckets_that_cannot_be_written_are_unpacked_without_a_copy_or_a_warning(recwarn):
    manifest, buckets = pack(0, some_tensors().items(), 300)
    for bucket in buckets:
        bucket.setflags(write=False)
    found = unpack(manifest, buckets)
    assert torch.equal(found["layer.weight"], some_tensors()["layer.weight"])
    assert not recwarn.list


@pytest.mark.parametrize("name", list(some_tensors()))
def test_one_flipped_bit_is_found_and_the_tensor_named(name):
    manifest, buckets = pack(7, some_tensors().items(), 300)
    spec = next(spec for spec in manifest.tensors if spec.name == name)
    buckets[spec.bucket][spec.offset + spec.nbytes - 1] ^= 1
    with pytest.raises(CorruptWeights, match=f"version 7, tensor {name}: checksum"):
        unpack(manifest, buckets)
    assert set(unpack(manifest, buckets, verify=False)) == set(some_tensors())


def test_buckets_of_another_version_are_refused():
    manifest, buckets = pack(0, some_tensors().items(), 300)
    with pytest.raises(BadManifest, match="manifest says"):
        unpack(manifest, buckets[:-1])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_value_that_is_not_finite_is_never_packed_and_the_tensor_is_named(bad, dtype):
    tensors = {name: tensor.to(dtype) for name, tensor in some_tensors().items()}
    tensors["layer.weight"][2, 3] = bad
    with pytest.raises(NonFiniteWeights, match=r"tensor layer\.weight: 1 of 35 values"):
        pack(1, tensors.items(), 300)


def test_a_name_given_twice_is_refused():
    with pytest.raises(BadManifest, match="w more than once"):
        pack(1, [("w", torch.zeros(1)), ("w", torch.zeros(1))], 300)


def test_a_dtype_that_cannot_travel_is_refused():
    with pytest.raises(BadManifest, match="complex64"):
        pack(1, [("w", torch.zeros(1, dtype=torch.complex64))], 300)


def test_a_manifest_survives_json():
    manifest = pack(4, some_tensors().items(), 300)[0]
    assert Manifest.from_json(manifest.to_json()) == manifest
    with pytest.raises(BadManifest, match="not a manifest"):
        Manifest.from_json('{"version": 1}')


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nbytes": 4}, "4 bytes for shape"),
        ({"bucket": 9}, "bucket 9 of"),
        ({"offset": 100000}, "of a bucket of"),
        ({"dtype": "float3"}, "dtype float3"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(change, message):
    manifest = pack(4, some_tensors().items(), 300)[0]
    broken = dataclasses.replace(manifest.tensors[0], **change)
    with pytest.raises(BadManifest, match=message):
        dataclasses.replace(manifest, tensors=(broken, *manifest.tensors[1:]))


def test_tensors_that_overlap_are_refused():
    manifest = pack(4, [("a", torch.zeros(8)), ("b", torch.zeros(8))], 300)[0]
    moved = dataclasses.replace(manifest.tensors[1], offset=16)
    with pytest.raises(BadManifest, match="a and b overlap"):
        dataclasses.replace(manifest, tensors=(manifest.tensors[0], moved))
