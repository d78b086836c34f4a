"""Operations of a step: by hand on a few tokens, and a real model's forward as torch counts it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from topology.models import model_info, resolve_model
from trainers.batch import Minibatch, Part, RowShape, StepPlan, Totals
from trainers.flops import ModelShape, Utilisation

MODEL = ModelShape(layer_weights=10, output_weights=20, attention_width=2)
ROWS = [RowShape(2, (3, 1))]
TOTALS = Totals(4, 2, 8)


def plan(*parts: tuple[int, tuple[int, ...]]) -> StepPlan:
    ranks = ((tuple(Part(row, samples) for row, samples in parts),),)
    return StepPlan(1, None, (np.zeros(2, np.float32),), (Minibatch(ranks, TOTALS),))


@pytest.mark.parametrize(
    ("share_prompt", "flops"),
    [
        # 2 + 2 + 0 tokens fed, 4 predicted; pairs: 1 + 2 of the prompt, 3 + 4 of the first sample's two fed tokens.
        (True, 3 * (2 * 10 * 4 + 2 * 20 * 4 + 4 * 2 * 10)),
        # The prompt twice: 6 tokens, 13 pairs.
        (False, 3 * (2 * 10 * 6 + 2 * 20 * 4 + 4 * 2 * 13)),
    ],
)
def test_utilisation_is_what_was_needed_over_what_could_be_done(share_prompt: bool, flops: int) -> None:
    found = Utilisation(MODEL, 1e-9, share_prompt).of(plan((0, (0, 1))), ROWS, seconds=2.0)
    assert found == pytest.approx(flops / 2.0 / 1000.0)


def test_a_prompt_counts_once_for_each_part_of_a_row_that_is_computed_apart() -> None:
    apart = Utilisation(MODEL, 1e-9, True).of(plan((0, (0,)), (0, (1,))), ROWS, seconds=1.0)
    assert apart == Utilisation(MODEL, 1e-9, False).of(plan((0, (0, 1))), ROWS, seconds=1.0)


def test_a_models_weights_and_attention_are_those_that_its_forward_multiplies() -> None:
    from transformers import AutoModelForCausalLM

    folder = resolve_model("tiny-llama")
    info, tokens = model_info(folder), 16
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, tokens, dtype=torch.long), use_cache=False)
    width = info.layers * info.heads * info.head_dim
    weights = info.layer_weights + info.hidden * info.vocab
    # torch counts the half of the attention too that the mask takes away.
    assert counter.get_total_flops() == 2 * weights * tokens + 4 * width * tokens**2
