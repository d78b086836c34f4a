from __future__ import annotations

import asyncio

import pytest
import torch

from weights.client import LocalWeightClient
from weights.config import WeightsConfig
from weights.manifest import BadManifest, CoverageError, StaleVersion, VersionGone, check_coverage
from weights.packing import pack, unpack
from weights.store import WeightStore


class FakeExporter:
    """Exports one tensor filled with the version's number; other behaviour by attribute."""

    def __init__(self, names: tuple[str, ...] = ("w",), error: Exception | None = None) -> None:
        self.names = names
        self.error = error
        self.gate: asyncio.Event | None = None
        self.shift = 0

    async def export(self, version):
        if self.gate is not None:
            await self.gate.wait()
        if self.error is not None:
            raise self.error
        return pack(version + self.shift, [(name, torch.full((3,), float(version))) for name in self.names], 1024)


def make_store(**settings) -> WeightStore:
    return WeightStore(WeightsConfig(**settings), clock=lambda: 0.0)


def test_a_published_version_is_pulled_whole():
    async def scenario():
        store = make_store()
        assert store.newest() == -1
        await store.publish(0, FakeExporter())
        await store.publish(4, FakeExporter())
        manifest, buckets = await LocalWeightClient(store).pull()
        assert manifest.version == store.newest() == 4
        assert unpack(manifest, buckets)["w"].tolist() == [4.0, 4.0, 4.0]
        assert store.status()["published"] == 2

    asyncio.run(scenario())


@pytest.mark.parametrize("version", [3, 2, 0])
def test_an_older_or_equal_version_is_an_error(version):
    async def scenario():
        store = make_store()
        await store.publish(3, FakeExporter())
        with pytest.raises(StaleVersion, match=f"version {version} is not newer than version 3"):
            await store.publish(version, FakeExporter())
        assert store.newest() == 3

    asyncio.run(scenario())


def test_two_publications_of_the_same_version_at_once_install_one():
    async def scenario():
        store = make_store()
        results = await asyncio.gather(*(store.publish(1, FakeExporter()) for _ in range(2)), return_exceptions=True)
        assert [type(result) for result in results] == [type(None), StaleVersion]

    asyncio.run(scenario())


def test_only_the_newest_versions_are_kept():
    async def scenario():
        store = make_store(keep=2)
        for version in range(4):
            await store.publish(version, FakeExporter())
        assert store.get(2)[0].version == 2
        with pytest.raises(VersionGone, match="version 1 of the weights is not held; held: 2, 3"):
            store.get(1)
        assert store.status()["versions_held"] == 2

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("exporter", "error"),
    [
        (FakeExporter(error=RuntimeError("rank 0 died")), RuntimeError),
        (FakeExporter(names=("w", "other")), CoverageError),
        (FakeExporter(names=("other",)), CoverageError),
    ],
)
def test_a_failed_export_leaves_the_newest_version_untouched(exporter, error):
    async def scenario():
        store = make_store()
        await store.publish(0, FakeExporter())
        with pytest.raises(error):
            await store.publish(1, exporter)
        assert store.newest() == 0
        assert store.status()["failures"] == 1
        await store.publish(1, FakeExporter())
        assert store.newest() == 1

    asyncio.run(scenario())


def test_an_export_that_answers_for_another_version_is_refused():
    async def scenario():
        exporter = FakeExporter()
        exporter.shift = 1
        with pytest.raises(BadManifest, match="asked for version 5, the exporter answered version 6"):
            await make_store().publish(5, exporter)

    asyncio.run(scenario())


def test_an_export_that_never_ends_is_given_up_by_name():
    async def scenario():
        store, exporter = make_store(timeout=0.02), FakeExporter()
        exporter.gate = asyncio.Event()
        with pytest.raises(TimeoutError, match=r"export of version 1 .* 0\.02 s \(weights\.timeout\)"):
            await store.publish(1, exporter)
        assert store.newest() == -1

    asyncio.run(scenario())


def test_wait_newer_sleeps_until_a_newer_version_is_published():
    async def scenario():
        store = make_store()
        await store.publish(0, FakeExporter())
        waiting = asyncio.ensure_future(store.wait_newer(0, timeout=5.0))
        await asyncio.sleep(0)
        assert not waiting.done()
        await store.publish(3, FakeExporter())
        assert await waiting == 3
        assert await store.wait_newer(2, timeout=0.0) == 3

    asyncio.run(scenario())


def test_wait_newer_answers_the_old_version_when_its_time_is_over():
    async def scenario():
        store = make_store()
        assert await store.wait_newer(-1, timeout=0.01) == -1
        await store.publish(2, FakeExporter())
        assert await store.wait_newer(2, timeout=0.01) == 2

    asyncio.run(scenario())


def test_readers_go_on_while_a_version_is_exported():
    async def scenario():
        store, slow = make_store(), FakeExporter()
        await store.publish(0, FakeExporter())
        slow.gate = asyncio.Event()
        publishing = asyncio.ensure_future(store.publish(1, slow))
        await asyncio.sleep(0)
        assert store.get()[0].version == 0
        slow.gate.set()
        await publishing
        assert store.get()[0].version == 1

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("expected", "message"),
    [
        ({"a": (2,), "b": (3,), "c": (1,)}, r"1 missing \(c\)"),
        ({"a": (2,)}, r"1 unknown \(b\)"),
        ({"a": (2,), "b": (4,)}, r"1 of another shape \(b is \(3,\), not \(4,\)\)"),
    ],
)
def test_coverage_is_exact_and_the_message_names_the_tensors(expected, message):
    manifest, _ = pack(8, [("a", torch.zeros(2)), ("b", torch.zeros(3))], 1024)
    check_coverage(manifest, {"a": (2,), "b": (3,)}, what="the model")
    with pytest.raises(CoverageError, match=f"version 8 does not cover the model: {message}"):
        check_coverage(manifest, expected, what="the model")
