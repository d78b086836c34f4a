from __future__ import annotations

import dataclasses

import pytest

from buffer.records import DataFailure, InfraFailure, Prompt
from makers.config import CustomMaker, RolloutMaker
from makers.factory import build_maker
from makers.prompt_ids import PromptEncoder
from makers.rollout import _sample_seed
from topology.models import resolve_model


@dataclasses.dataclass
class Teacher:
    """A maker of a user's own."""

    k: int
    stage: str = "teacher"
    needs: tuple[str, ...] = ("rollout",)
    slots: int = 1

    async def start(self): ...
    async def make(self, lease, inputs): ...
    async def close(self): ...
    def status(self):
        return {}


def build(config):
    return build_maker(config, name="maker/x/0", model_path="/nowhere", weights=None, seed=1)


def test_a_rollout_maker_has_slots_for_half_as_many_groups_again_as_its_engine_decodes():
    config = RolloutMaker.model_validate(
        {"kind": "rollout", "engine": {"max_num_seqs": 64}, "sampling": {"n": 8, "max_tokens": 8}}
    )
    maker = build(config)
    assert (maker.stage, maker.needs, maker.slots) == ("rollout", (), 12)
    assert maker.status()["state"] == "new"


def test_a_maker_of_ones_own_is_built_with_its_options():
    assert build(CustomMaker(kind=f"{__name__}:Teacher", options={"k": 5})) == Teacher(5)


def test_something_that_is_no_maker_is_refused_with_what_it_lacks():
    with pytest.raises(InfraFailure, match="made a dict without stage, needs, slots, start, make, status, close"):
        build(CustomMaker(kind="builtins:dict"))


def test_the_seeds_of_neighbouring_leases_and_samples_never_meet():
    seeds = {_sample_seed(lease, index) for lease in range(50) for index in range(50)}
    assert len(seeds) == 2500
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert _sample_seed(3, 4) == _sample_seed(3, 4)


def test_text_without_a_chat_template_is_encoded_as_it_is_and_messages_are_refused():
    encoder = PromptEncoder(resolve_model("tiny-llama"))
    encoder._tokenizer.chat_template = None
    assert encoder.encode(Prompt("a", "hi")) == encoder._tokenizer.encode("hi")
    with pytest.raises(DataFailure, match="prompt 'b' is chat messages, and the tokenizer has no chat template"):
        encoder.encode(Prompt("b", [{"role": "user", "content": "hi"}]))
    with pytest.raises(DataFailure, match="prompt 'c' is empty"):
        encoder.encode(Prompt("c", ""))


def test_text_and_the_same_text_as_one_user_message_give_the_same_ids():
    encoder = PromptEncoder(resolve_model("tiny-llama"))
    messages = [{"role": "user", "content": "hi"}]
    assert encoder.encode(Prompt("a", "hi")) == encoder.encode(Prompt("b", messages))
