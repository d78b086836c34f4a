"""The reference maker against the torch learner, which computes the same one sample at a time."""

from __future__ import annotations

import asyncio
import functools
import itertools

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from buffer.columns import validate_answer
from buffer.records import DataFailure, InfraFailure, Lease, Prompt
from makers.config import ReferenceMaker as ReferenceMakerConfig
from makers.factory import build_maker
from makers.scoring import Scorer, batches_by_length
from tests.live_maker import with_started
from tests.rollouts import rollout_columns
from topology.models import resolve_model
from trainers.batch import MicroBatch, Part, Totals
from trainers.config import TrainerConfig
from trainers.packing import GroupBatch, pack
from trainers.torch_learner import TorchPolicy

pytestmark = pytest.mark.timeout(60)
FAMILIES = ("tiny-llama", "tiny-qwen2", "tiny-qwen3")
TOLERANCE = 2e-5  # float32 on both sides


@functools.cache
def model_path(family: str = "tiny-llama") -> str:
    return str(resolve_model(family))


def rollout(prompt=13, responses=(7, 1, 20, 7), temperatures=(1.0, 0.7, 0.7, 1.3), seed=0) -> dict[str, np.ndarray]:
    columns = rollout_columns(np.random.default_rng(seed), prompt, responses)
    return {**columns, "temperatures": np.asarray(temperatures, np.float32)}


def make_lease(row: int = 5, samples: int = 4) -> Lease:
    return Lease(
        id=row, row_id=row, stage="reference", maker="m", prompt=Prompt(f"p{row}", "x"), min_version=0, seed=1,
        samples=samples, timeout=30.0,
    )  # fmt: skip


def make_maker(path: str | None = None, **changes):
    settings = {"kind": "reference", "dtype": "float32", "threads": 1} | changes
    config = ReferenceMakerConfig.model_validate(settings)
    return build_maker(config, name="maker/reference/0", model_path=path or model_path(), weights=None, seed=0)


def with_maker(scenario, path: str | None = None, **changes):
    return with_started(make_maker(path, **changes), scenario)


def score(columns, **changes) -> np.ndarray:
    async def scenario(maker):
        lease = make_lease(samples=columns["response_offsets"].size - 1)
        produced, made = await maker.make(lease, {"rollout": columns})
        validate_answer(lease, produced, made, {"rollout": columns})
        return made["reference_logprobs"]

    return with_maker(scenario, **changes)


def learner_logprobs(columns, family: str) -> np.ndarray:
    trainer = TrainerConfig.model_validate({"algorithm": {"type": "grpo"}, "backend": {"type": "torch"}, "steps": 1})
    group = GroupBatch.of(columns, np.zeros(columns["response_offsets"].size - 1))
    parts: MicroBatch = (Part(0, tuple(range(columns["response_offsets"].size - 1))),)
    batch = pack([group], parts, Totals(1, 1, 1), share_prompt=False)
    return TorchPolicy(trainer, resolve_model(family)).log_probs([batch])[0].numpy()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_logprobs_are_those_of_the_torch_learner_at_each_samples_temperature(family):
    columns = rollout()
    truth = learner_logprobs(columns, family)
    assert truth.size == 35
    np.testing.assert_allclose(score(columns, path=model_path(family)), truth, atol=TOLERANCE)


@pytest.mark.parametrize("micro_batch_tokens", [1, 8, 14, 1000])
def test_the_split_into_forward_passes_changes_nothing(micro_batch_tokens):
    columns = rollout()
    whole = score(columns)
    np.testing.assert_allclose(score(columns, micro_batch_tokens=micro_batch_tokens), whole, atol=TOLERANCE)


def test_every_entry_belongs_to_its_own_token():
    """Each response is what the model itself finds most likely, so that a shifted entry is no longer the maximum."""
    model = AutoModelForCausalLM.from_pretrained(model_path(), dtype=torch.float32).eval()
    columns = rollout(prompt=9, responses=(6, 3), temperatures=(0.01, 0.01))
    start = columns["prompt_ids"].tolist()
    for begin, end in itertools.pairwise(columns["response_offsets"].tolist()):
        ids = [*start, 40 + begin]  # the first token differs by sample, the rest follows from it
        while len(ids) < len(start) + end - begin:
            with torch.no_grad():
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        columns["response_ids"][begin:end] = ids[len(start) :]
    logprobs = score(columns)
    firsts = columns["response_offsets"][:-1]
    assert (logprobs[firsts] < -1).all()
    assert np.delete(logprobs, firsts) == pytest.approx(0.0, abs=0.02)


def test_a_row_of_single_tokens_is_scored_by_its_prompt_alone():
    columns = rollout(responses=(1, 1), temperatures=(1.0, 0.5))
    np.testing.assert_allclose(score(columns), learner_logprobs(columns, "tiny-llama"), atol=TOLERANCE)


def test_a_row_that_the_model_cannot_take_fails_as_data_with_its_numbers_and_the_next_is_scored():
    async def scenario(maker):
        long = rollout(prompt=2040, responses=(3, 9), temperatures=(1, 1))
        with pytest.raises(
            DataFailure,
            match=r"row 5 \(prompt 'p5'\), reference: 2040 prompt tokens \+ 9 response tokens exceed the 2048 positions",
        ):
            await maker.make(make_lease(), {"rollout": long})
        strange = rollout()
        strange["response_ids"][3] = 320
        with pytest.raises(DataFailure, match="token id 320 is beyond the model's vocabulary of 320"):
            await maker.make(make_lease(), {"rollout": strange})
        await maker.make(make_lease(), {"rollout": rollout()})
        return maker.status()

    status = with_maker(scenario)
    assert (status["rows_scored"], status["tokens_scored"], status["running"]) == (1, 35, 0)


def test_rows_that_wait_when_the_maker_closes_fail_as_its_failure():
    async def scenario():
        maker = make_maker()
        await maker.start()
        rows = [asyncio.ensure_future(maker.make(make_lease(row), {"rollout": rollout()})) for row in range(4)]
        await asyncio.sleep(0)
        await maker.close()
        return await asyncio.gather(*rows, return_exceptions=True)

    *_, last = asyncio.run(scenario())
    assert isinstance(last, InfraFailure)
    assert "closed before row 3 was scored" in str(last)


def test_a_row_that_comes_while_the_maker_sleeps_waits_until_it_wakes():
    async def scenario(maker):
        columns = rollout()
        _, before = await maker.make(make_lease(1), {"rollout": columns})
        await maker.sleep(1)
        row = asyncio.ensure_future(maker.make(make_lease(2), {"rollout": columns}))
        await asyncio.sleep(0.1)
        assert not row.done()
        await maker.wake()
        _, after = await row
        np.testing.assert_array_equal(before["reference_logprobs"], after["reference_logprobs"])
        await maker.sleep(1)
        waiting = asyncio.ensure_future(maker.make(make_lease(3), {"rollout": columns}))
        await asyncio.sleep(0)
        await maker.close()
        with pytest.raises(InfraFailure, match="closed before row 3"):
            await waiting

    with_maker(scenario)


def test_a_folder_without_a_model_is_the_makers_failure(tmp_path):
    with pytest.raises(InfraFailure, match=f"maker/reference/0: no reference model from {tmp_path}"):
        asyncio.run(make_maker(str(tmp_path)).start())


def test_the_scores_of_a_sample_are_whole_distributions():
    columns = rollout()
    seen = []
    for scored in Scorer(model_path(), dtype="float32", micro_batch_tokens=100).score(columns):
        assert scored.log_probs.shape == (scored.span.stop - scored.span.start, 320)
        torch.testing.assert_close(scored.log_probs.exp().sum(-1), torch.ones(len(scored.targets)))
        assert scored.targets.tolist() == columns["response_ids"][scored.span].tolist()
        seen.append((scored.span.start, scored.span.stop))
    assert sorted(seen) == list(itertools.pairwise(columns["response_offsets"].tolist()))


def test_batches_hold_every_sample_once_and_bounded_with_their_padding():
    lengths = np.array([3, 9, 1, 4, 4, 20])
    batches = batches_by_length(lengths, 10)
    assert batches == [[5], [1], [3, 4], [0, 2]]
    assert batches_by_length(lengths, 10_000) == [[5, 1, 3, 4, 0, 2]]
