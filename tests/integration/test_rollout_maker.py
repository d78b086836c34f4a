"""The rollout maker on the real vLLM engine, against plain transformers."""

from __future__ import annotations

import asyncio
import functools
import time

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer

from buffer.columns import validate_columns
from buffer.records import DataFailure, InfraFailure, Lease, Prompt
from makers.config import RolloutMaker as RolloutMakerConfig
from makers.engines.engine import NO_VERSION, GroupRequest
from makers.engines.vllm import InProcessVllm
from makers.rollout import RolloutMaker
from topology.models import resolve_model
from weights.client import LocalWeightClient
from weights.config import WeightsConfig
from weights.manifest import CorruptWeights, CoverageError
from weights.packing import pack
from weights.store import WeightStore

pytestmark = pytest.mark.timeout(180)
TEMPERATURE = 0.7
TOLERANCE = 2e-4  # float32 on both sides
PROMPT = list(range(20, 90))  # two whole blocks of the prefix cache, and a rest


@functools.cache
def model_path(family: str = "tiny-llama") -> str:
    return str(resolve_model(family))


@functools.cache
def weights_of(version: int, family: str = "tiny-llama") -> dict[str, torch.Tensor]:
    """Version 0 is the folder's; every other version differs from it, and from the rest, by random noise."""
    generator = torch.Generator().manual_seed(version)
    tensors = load_file(f"{model_path(family)}/model.safetensors")
    noise = 0.0 if version == 0 else 0.03
    return {
        name: tensor.float() + noise * torch.randn(tensor.shape, generator=generator)
        for name, tensor in sorted(tensors.items())
    }


@functools.cache
def packed(version: int, family: str = "tiny-llama"):
    return pack(version, weights_of(version, family).items(), 1 << 19)


@functools.cache
def reference(version: int, family: str = "tiny-llama") -> torch.nn.Module:
    config = AutoConfig.from_pretrained(model_path(family))
    model, loading = getattr(transformers, config.architectures[0]).from_pretrained(
        None, config=config, state_dict=dict(weights_of(version, family)), dtype=torch.float32, output_loading_info=True
    )
    assert not any(loading.values()), loading
    return model.eval()


def true_logprobs(version: int, prompt, tokens, temperature=TEMPERATURE, family: str = "tiny-llama") -> np.ndarray:
    ids = torch.tensor([[*prompt, *map(int, tokens)]])
    with torch.no_grad():
        logits = reference(version, family)(ids).logits[0, len(prompt) - 1 : -1]
    logprobs = torch.log_softmax(logits / temperature, dim=-1)
    return logprobs.gather(1, torch.tensor(tokens).long()[:, None])[:, 0].numpy()


def config(**changes) -> RolloutMakerConfig:
    settings = {
        "kind": "rollout",
        "engine": {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 16, "kv_cache_gib": 0.0625, "threads": 1},
        "sampling": {"n": 4, "temperature": TEMPERATURE, "max_tokens": 24},
    }
    return RolloutMakerConfig.model_validate(settings | changes)


def make_engine(family: str = "tiny-llama", recompute: bool = True) -> InProcessVllm:
    return InProcessVllm(config().engine, model_path(family), threads=1, seed=0, recompute=recompute)


@pytest.fixture(scope="module")
def engine():
    """One engine for all tests; each begins with a newer version of the weights in it."""
    engine = make_engine()
    asyncio.run(engine.start())
    yield engine
    asyncio.run(engine.close())


class Shared:
    """The engine of the module as a maker's own: starting and closing are the module's business."""

    def __init__(self, engine: InProcessVllm) -> None:
        self.engine = engine

    def __getattr__(self, name):
        return getattr(self.engine, name)

    @property
    def version(self) -> int:
        return self.engine.version

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        pass


class Publisher:
    """Publishes prepared versions to a store of its own."""

    def __init__(self) -> None:
        self.store = WeightStore(WeightsConfig(), clock=time.monotonic)

    async def publish(self, version: int) -> None:
        await self.store.publish(version, self)

    async def export(self, version):
        return packed(version)


def make_maker(engine, publisher: Publisher | None, **changes) -> RolloutMaker:
    client = None if publisher is None else LocalWeightClient(publisher.store)
    return RolloutMaker(
        config(**changes), name="maker/rollout/0", model_path=model_path(), engine=Shared(engine), weights=client
    )


def request(seeds=(1, 2, 3, 4), max_tokens=24, temperature=TEMPERATURE, prompt=PROMPT) -> GroupRequest:
    return GroupRequest(prompt_ids=prompt, seeds=seeds, temperature=temperature, max_tokens=max_tokens)


def make_lease(row: int = 5, content="What is 2 + 3?", samples=4, seed=77, min_version=0, timeout=30.0) -> Lease:
    prompt = Prompt(id=f"p{row}", content=content)
    return Lease(
        id=row, row_id=row, stage="rollout", maker="m", prompt=prompt, min_version=min_version, seed=seed,
        samples=samples, timeout=timeout,
    )  # fmt: skip


async def load(engine, version: int | None = None, between_groups: bool = False) -> int:
    version = engine.version + 1 if version is None else version
    await engine.load_weights(*packed(version), between_groups=between_groups)
    return version


async def until(condition, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        await asyncio.sleep(0.002)


def same(left, right) -> bool:
    return all(
        np.array_equal(a.token_ids, b.token_ids) and np.array_equal(a.logprobs, b.logprobs)
        for a, b in zip(left, right, strict=True)
    )


def test_logprobs_are_those_of_the_tempered_distribution(engine):
    async def scenario():
        version = await load(engine)
        return version, await engine.generate(request())

    version, samples = asyncio.run(scenario())
    for sample in samples:
        assert set(sample.versions) == {version}
        np.testing.assert_allclose(sample.logprobs, true_logprobs(version, PROMPT, sample.token_ids), atol=TOLERANCE)
        untempered = true_logprobs(version, PROMPT, sample.token_ids, temperature=1.0)
        assert np.abs(sample.logprobs - untempered).max() > 0.05


def test_temperature_zero_takes_the_most_likely_token_each_time(engine):
    async def scenario():
        version = await load(engine)
        return version, await engine.generate(request(seeds=(1, 2), temperature=0.0))

    version, (first, second) = asyncio.run(scenario())
    assert np.array_equal(first.token_ids, second.token_ids)
    ids = torch.tensor([[*PROMPT, *map(int, first.token_ids)]])
    with torch.no_grad():
        best = reference(version)(ids).logits[0, len(PROMPT) - 1 : -1].argmax(-1)
    assert np.array_equal(first.token_ids, best.numpy())


def test_the_same_seeds_give_the_same_samples_and_other_seeds_others(engine):
    async def scenario():
        await load(engine)
        return [await engine.generate(request(seeds=seeds)) for seeds in [(1, 2), (1, 2), (3, 4)]]

    first, again, other = asyncio.run(scenario())
    assert same(first, again)
    assert not any(np.array_equal(a.token_ids, b.token_ids) for a, b in zip(first, other, strict=True))
    assert not np.array_equal(first[0].token_ids, first[1].token_ids)


def test_tokens_around_an_update_in_flight_carry_their_version_and_its_own_logprobs(engine):
    async def scenario():
        before = await load(engine)
        generating = asyncio.ensure_future(engine.generate(request(seeds=range(8), max_tokens=400)))
        seconds = engine.status()["seconds_generating"]
        await until(lambda: engine.status()["seconds_generating"] > seconds + 0.05)
        after = await load(engine)
        return before, after, await generating

    before, after, samples = asyncio.run(scenario())
    crossing = [sample for sample in samples if set(sample.versions) == {before, after}]
    assert crossing, "no sample was in flight at the update"
    for sample in crossing:
        assert (np.diff(sample.versions) >= 0).all()
        for version in (before, after):
            mine = sample.versions == version
            truth = true_logprobs(version, PROMPT, sample.token_ids)[mine]
            np.testing.assert_allclose(sample.logprobs[mine], truth, atol=TOLERANCE)
        first_after = int(np.argmax(sample.versions == after))
        wrong = true_logprobs(before, PROMPT, sample.token_ids)[first_after:]
        assert np.abs(sample.logprobs[first_after:] - wrong).max() > 0.01


def test_a_cached_prefix_is_never_used_under_newer_weights(engine):
    async def scenario():
        await load(engine)
        old = await engine.generate(request())
        version = await load(engine)
        return version, old, await engine.generate(request())

    version, old, new = asyncio.run(scenario())
    assert not same(old, new)
    for sample in new:
        np.testing.assert_allclose(sample.logprobs, true_logprobs(version, PROMPT, sample.token_ids), atol=TOLERANCE)


def test_without_recomputing_old_rows_go_on_and_new_rows_see_nothing_of_the_old_cache(engine, monkeypatch):
    monkeypatch.setattr(engine._core, "_recompute", False)

    async def scenario():
        before = await load(engine)
        generating = asyncio.ensure_future(engine.generate(request(seeds=range(8), max_tokens=400)))
        seconds = engine.status()["seconds_generating"]
        await until(lambda: engine.status()["seconds_generating"] > seconds + 0.05)
        after = await load(engine)
        new = await engine.generate(request())
        return before, after, await generating, new

    before, after, old, new = asyncio.run(scenario())
    assert any(set(sample.versions) == {before, after} for sample in old)
    for sample in new:
        assert set(sample.versions) == {after}
        np.testing.assert_allclose(sample.logprobs, true_logprobs(after, PROMPT, sample.token_ids), atol=TOLERANCE)


def broken_version(kind: str, version: int, family: str = "tiny-llama"):
    tensors = dict(weights_of(version, family))
    name = "model.layers.1.self_attn.q_proj.weight"
    if kind == "missing":
        del tensors[name]
    elif kind == "unknown":
        tensors["model.layers.9.mlp.up_proj.weight"] = torch.zeros(4)
    elif kind == "shape":
        tensors[name] = tensors[name][:-1]
    manifest, buckets = pack(version, tensors.items(), 1 << 19)
    if kind == "corrupt":
        spec = next(spec for spec in manifest.tensors if spec.name == name)
        buckets[spec.bucket][spec.offset] ^= 1
    return manifest, buckets


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("missing", CoverageError, r"1 missing \(model.layers.1.self_attn.q_proj.weight\)"),
        ("unknown", CoverageError, r"1 unknown \(model.layers.9.mlp.up_proj.weight\)"),
        ("shape", CoverageError, r"q_proj.weight is \(127, 128\), not \(128, 128\)"),
        ("corrupt", CorruptWeights, "tensor model.layers.1.self_attn.q_proj.weight: checksum"),
    ],
)
def test_a_bad_update_is_refused_and_the_old_weights_go_on_bit_for_bit(engine, kind, error, message):
    async def scenario():
        version = await load(engine)
        before = await engine.generate(request())
        with pytest.raises(error, match=message):
            await engine.load_weights(*broken_version(kind, version + 1), between_groups=False)
        assert engine.version == version
        assert engine.status()["state"] == "ready"
        return before, await engine.generate(request())

    assert same(*asyncio.run(scenario()))


def test_a_load_that_breaks_half_way_quarantines_the_engine_until_a_whole_version_is_in(engine, monkeypatch):
    from vllm.model_executor.model_loader.reload import inplace

    def fail(*_):
        raise RuntimeError("out of memory")

    async def scenario():
        await load(engine)
        generating = asyncio.ensure_future(engine.generate(request(max_tokens=400)))
        await until(lambda: engine.status()["running"] == 1)
        with monkeypatch.context() as patch:
            patch.setattr(inplace, "finalize_layerwise_reload", fail)
            with pytest.raises(InfraFailure, match="out of memory"):
                await load(engine)
        with pytest.raises(InfraFailure, match="out of memory"):
            await generating
        assert engine.status()["state"] == "quarantined"
        with pytest.raises(InfraFailure, match="quarantined"):
            await engine.generate(request())
        version = await load(engine, engine.version + 2)
        return version, await engine.generate(request())

    version, samples = asyncio.run(scenario())
    for sample in samples:
        np.testing.assert_allclose(sample.logprobs, true_logprobs(version, PROMPT, sample.token_ids), atol=TOLERANCE)


def test_a_short_group_is_answered_while_a_long_one_runs_on(engine):
    async def scenario():
        await load(engine)
        long = asyncio.ensure_future(engine.generate(request(seeds=range(4), max_tokens=400)))
        await until(lambda: engine.status()["running"] == 1)
        await engine.generate(request(seeds=(9,), max_tokens=2))
        assert not long.done()
        await long

    asyncio.run(scenario())


def test_a_cancelled_group_leaves_the_engine_free(engine):
    async def scenario():
        await load(engine)
        long = asyncio.ensure_future(engine.generate(request(max_tokens=400)))
        await until(lambda: engine.status()["running"] == 1)
        long.cancel()
        await until(lambda: engine.status()["running"] == 0)
        assert len(await engine.generate(request())) == 4

    asyncio.run(scenario())


def test_a_request_that_vllm_refuses_costs_the_engine_nothing(engine):
    async def scenario():
        await load(engine)
        with pytest.raises(ValueError, match="900"):  # of a vocabulary of 320
            await engine.generate(request(prompt=[5, 900]))
        assert len(await engine.generate(request())) == 4

    asyncio.run(scenario())


def test_a_row_comes_back_as_valid_columns_of_its_own_samples(engine):
    async def scenario():
        publisher, version = Publisher(), engine.version + 1
        await publisher.publish(version)
        maker = make_maker(engine, publisher)
        await maker.start()
        rows = await asyncio.gather(*(maker.make(make_lease(row, min_version=version), {}) for row in range(3)))
        assert maker.status()["version"] == version
        await maker.close()
        return version, rows

    version, rows = asyncio.run(scenario())
    tokenizer = AutoTokenizer.from_pretrained(model_path())
    text = "<|im_start|>user\nWhat is 2 + 3?<|im_end|>\n<|im_start|>assistant\n"
    for row, (produced, columns) in enumerate(rows):
        validate_columns(make_lease(row), columns, 4)
        assert columns["prompt_ids"].tolist() == tokenizer.encode(text)
        assert produced.tokens == columns["response_ids"].size == columns["response_offsets"][-1]
        assert produced.min_version == produced.max_version == version
        assert produced.nbytes == sum(array.nbytes for array in columns.values())
        lengths = np.diff(columns["response_offsets"])
        ends = columns["response_ids"][columns["response_offsets"][1:] - 1]
        stopped = columns["finish_reasons"] == 0
        assert (ends[stopped] == tokenizer.eos_token_id).all()  # the sampled end token stays in the response
        assert (lengths[~stopped] == 24).all()
        assert produced.stats["truncated"] == pytest.approx(float((~stopped).mean()))
        assert produced.stats["response_length_max"] == lengths.max()
        for i, (start, end) in enumerate(
            zip(columns["response_offsets"][:-1], columns["response_offsets"][1:], strict=True)
        ):
            truth = true_logprobs(version, columns["prompt_ids"].tolist(), columns["response_ids"][start:end])
            np.testing.assert_allclose(columns["behaviour_logprobs"][start:end], truth, atol=TOLERANCE, err_msg=str(i))


def test_a_prompt_that_does_not_fit_fails_as_data_with_its_numbers(engine):
    async def scenario():
        await load(engine)
        maker = make_maker(engine, None)
        await maker.start()
        with pytest.raises(
            DataFailure, match=r"row 5 \(prompt 'p5'\): 528 prompt tokens \+ 24 new tokens .* exceed 512"
        ):
            await maker.make(make_lease(content="x" * (528 - 19)), {})
        with pytest.raises(DataFailure, match="row 5: prompt 'p5': the chat template refused it"):
            await maker.make(make_lease(content=[{"role": "user"}]), {})

    asyncio.run(scenario())


def test_a_row_waits_until_its_version_is_in_and_the_maker_follows_publications(engine):
    async def scenario():
        publisher, version = Publisher(), engine.version + 1
        maker = make_maker(engine, publisher)
        await maker.start()  # nothing is published yet
        row = asyncio.ensure_future(maker.make(make_lease(min_version=version), {}))
        await until(lambda: maker.status()["waiting"] == 1)
        await publisher.publish(version)
        produced, _ = await row
        assert (produced.min_version, produced.max_version) == (version, version)
        with pytest.raises(
            InfraFailure, match=rf"not generated within 0\.05 s \(holds version {version}, the row needs"
        ):
            await maker.make(make_lease(min_version=version + 1, timeout=0.05), {})
        assert maker.status()["seconds_sync_pause"] > 0
        assert maker.status()["seconds_syncing"] > 0
        await maker.close()

    asyncio.run(scenario())


def test_between_rows_every_row_comes_from_one_version(engine):
    async def scenario():
        publisher, first = Publisher(), engine.version + 1
        await publisher.publish(first)
        maker = make_maker(engine, publisher, update="between_rows", sampling={"n": 4, "max_tokens": 300})
        await maker.start()
        old = asyncio.ensure_future(maker.make(make_lease(1), {}))
        await until(lambda: maker.status()["running"] == 1)
        await publisher.publish(first + 1)
        new = await maker.make(make_lease(2, min_version=first + 1), {})
        await maker.close()
        return first, (await old)[0], new[0]

    first, old, new = asyncio.run(scenario())
    assert (old.min_version, old.max_version) == (first, first)
    assert (new.min_version, new.max_version) == (first + 1, first + 1)


def test_a_version_that_does_not_fit_fails_the_rows_that_need_it_and_serves_the_others(engine, monkeypatch):
    monkeypatch.setattr("makers.rollout.RETRY_SECONDS", 0.001)

    async def scenario():
        publisher, version = Publisher(), engine.version + 1
        await publisher.publish(version)
        maker = make_maker(engine, publisher)
        await maker.start()
        manifest, buckets = packed(version + 1)
        damaged = [bucket.copy() for bucket in buckets]
        damaged[0][0] ^= 1
        publisher.export = lambda _: asyncio.sleep(0, (manifest, damaged))
        await publisher.publish(version + 1)
        with pytest.raises(InfraFailure, match="3 updates in a row failed, the last with: CorruptWeights"):
            await maker.make(make_lease(min_version=version + 1), {})
        produced, _ = await maker.make(make_lease(min_version=version), {})
        assert produced.max_version == version
        del publisher.export
        await publisher.publish(version + 2)
        produced, _ = await maker.make(make_lease(min_version=version), {})
        await until(lambda: maker.status()["version"] == version + 2)
        assert maker.status()["update_failures"] == 0
        await maker.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("level", [1, 2])
def test_a_maker_ends_its_rows_before_it_sleeps_and_wakes_with_the_newest_weights(engine, level):
    async def scenario():
        publisher, old = Publisher(), engine.version + 1
        await publisher.publish(old)
        maker = make_maker(engine, publisher, sampling={"n": 4, "temperature": TEMPERATURE, "max_tokens": 300})
        await maker.start()
        running = asyncio.ensure_future(maker.make(make_lease(1), {}))
        await until(lambda: maker.status()["running"] == 1)
        await asyncio.gather(maker.sleep(level), maker.sleep(level))
        assert running.done()
        assert maker.status()["state"] == "asleep"
        meanwhile = asyncio.ensure_future(maker.make(make_lease(2), {}))
        await publisher.publish(old + 1)
        await until(lambda: maker.status()["waiting"] == 1)
        await asyncio.sleep(0.05)
        assert not meanwhile.done()
        assert maker.status()["version"] == (old if level == 1 else NO_VERSION)
        await maker.wake()
        await maker.wake()
        assert maker.status()["version"] == old + 1
        produced, columns = await meanwhile
        await publisher.publish(old + 2)  # is followed again
        await until(lambda: maker.status()["version"] == old + 2)
        await maker.close()
        return old, (await running)[0], produced, columns

    old, before, after, columns = asyncio.run(scenario())
    assert (before.min_version, before.max_version) == (old, old)
    assert after.min_version == old + 1
    first = slice(0, columns["response_offsets"][1])
    mine = columns["policy_versions"][first] == old + 1
    truth = true_logprobs(old + 1, columns["prompt_ids"].tolist(), columns["response_ids"][first])
    np.testing.assert_allclose(columns["behaviour_logprobs"][first][mine], truth[mine], atol=TOLERANCE)


def test_dropped_weights_come_back_though_no_newer_ones_were_published(engine):
    async def scenario():
        publisher, version = Publisher(), engine.version + 1
        await publisher.publish(version)
        maker = make_maker(engine, publisher)
        await maker.start()
        before = await maker.make(make_lease(), {})
        await maker.sleep(2)
        await maker.wake()
        after = await maker.make(make_lease(), {})
        await maker.close()
        return before, after

    (_, before), (_, after) = asyncio.run(scenario())
    for name, column in before.items():
        assert np.array_equal(column, after[name]), name


def test_weights_that_nobody_would_bring_back_are_not_dropped(engine):
    async def scenario():
        await load(engine)
        maker = make_maker(engine, None)
        await maker.start()
        with pytest.raises(ValueError, match="no trainer publishes any: use 1"):
            await maker.sleep(2)
        await maker.make(make_lease(), {})

    asyncio.run(scenario())


def test_a_sleep_that_is_given_up_leaves_the_maker_at_work(engine):
    async def scenario():
        await load(engine)
        maker = make_maker(engine, None, sampling={"n": 4, "max_tokens": 300})
        await maker.start()
        running = asyncio.ensure_future(maker.make(make_lease(1), {}))
        await until(lambda: maker.status()["running"] == 1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(maker.sleep(1), 0.01)
        await running
        await maker.make(make_lease(2), {})
        assert maker.status()["state"] == "ready"

    asyncio.run(scenario())


@pytest.mark.parametrize("family", ["tiny-qwen2", "tiny-qwen3", "tiny-qwen3-moe"])
def test_the_other_families_load_take_new_weights_and_agree_with_transformers(family):
    async def scenario():
        engine = make_engine(family)
        await engine.start()
        try:
            for version in (1, 2):  # what an engine derives from its weights must follow a second time too
                await engine.load_weights(*packed(version, family), between_groups=False)
            return await engine.generate(request(seeds=(1, 2)))
        finally:
            await engine.close()

    for sample in asyncio.run(scenario()):
        truth = true_logprobs(2, PROMPT, sample.token_ids, family=family)
        np.testing.assert_allclose(sample.logprobs, truth, atol=TOLERANCE)
