"""SFT and DPO against computations by hand, and what of them does not depend on how a step is divided."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainers.algorithms.base import TokenBatch
from trainers.algorithms.dpo import DpoLoss
from trainers.algorithms.metrics import MetricSums, finish
from trainers.algorithms.sft import CrossEntropy
from trainers.batch import RowShape, Totals, plan_step
from trainers.config import Dpo, Sft


def tokens(samples: list[list[float]], *, reference: list[list[float]] | None = None, totals: Totals | None = None):
    """The log-probs of each sample, as a micro-batch."""
    lengths = [len(sample) for sample in samples]
    flat = torch.tensor([value for sample in samples for value in sample], dtype=torch.float32)
    zeros = torch.zeros_like(flat)
    of_reference = None if reference is None else torch.tensor([value for sample in reference for value in sample])
    return TokenBatch(
        current=flat.requires_grad_(),
        proximal=zeros,
        behaviour=zeros,
        reference=of_reference,
        entropy=zeros,
        advantages=zeros,
        samples=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int64)),
        lengths=torch.repeat_interleave(torch.tensor(lengths), torch.tensor(lengths, dtype=torch.int64)).float(),
        totals=totals or Totals(sum(lengths), len(lengths), 8),
        labels={} if of_reference is None else {"reference": of_reference},
    )


def test_cross_entropy_is_the_mean_over_tokens_or_over_samples() -> None:
    samples = [[-1.0, -2.0, -3.0], [-8.0]]
    by_token = CrossEntropy(Sft(type="sft"))(tokens(samples))
    assert float(by_token.loss.detach()) == pytest.approx(14 / 4)
    assert float(by_token.sums["sft/nll"]) == 14
    by_sample = CrossEntropy(Sft(type="sft", normalise="sequence"))(tokens(samples))
    assert float(by_sample.loss.detach()) == pytest.approx((2 + 8) / 2)


def test_the_gradient_of_cross_entropy_is_the_same_for_each_token() -> None:
    batch = tokens([[-1.0, -2.0], [-8.0]])
    CrossEntropy(Sft(type="sft"))(batch).loss.backward()
    torch.testing.assert_close(batch.current.grad, torch.full((3,), -1 / 3))


PAIR = [[-1.0, -1.0], [-3.0]]  # chosen, rejected
REFERENCE = [[-2.0, -1.5], [-2.0]]  # log-ratios 1.5 and -1: a margin of 2.5; per token 0.75 and -1: 1.75


@pytest.mark.parametrize(
    ("config", "cost"),
    [
        ({"beta": 0.4}, -math.log(1 / (1 + math.exp(-1.0)))),
        (
            {"beta": 0.4, "label_smoothing": 0.1},
            -0.9 * math.log(1 / (1 + math.exp(-1.0))) - 0.1 * math.log(1 / (1 + math.exp(1.0))),
        ),
        ({"beta": 0.2, "loss": "hinge"}, 1 - 0.5),
        ({"beta": 0.8, "loss": "hinge"}, 0.0),
        ({"beta": 0.5, "loss": "ipo"}, (1.75 - 1.0) ** 2),
    ],
)
def test_the_cost_of_a_pair_is_that_of_the_paper(config, cost: float) -> None:
    terms = DpoLoss(Dpo(type="dpo", **config))(tokens(PAIR, reference=REFERENCE))
    assert float(terms.loss.detach()) == pytest.approx(cost, abs=1e-6)


def test_the_figures_of_a_pair_are_means_over_pairs() -> None:
    worse = [[-2.0], [-1.0]]  # log-ratios -1 and 0
    terms = DpoLoss(Dpo(type="dpo", beta=0.5))(tokens(PAIR + worse, reference=[*REFERENCE, [-1.0], [-1.0]]))
    sums = MetricSums()
    sums.add({"tokens": torch.tensor(5)}, {})
    sums.add_terms(terms)
    figures = finish({name: float(value) for name, value in sums.sums.items()}, {})
    assert figures["dpo/accuracy"] == 0.5
    assert figures["dpo/margin"] == pytest.approx(0.5 * (2.5 - 1) / 2)
    assert figures["dpo/reward_chosen"] == pytest.approx(0.5 * (1.5 - 1) / 2)
    assert figures["dpo/reward_rejected"] == pytest.approx(0.5 * (-1 + 0) / 2)


def test_the_reference_of_a_maker_is_read_from_the_plans_labels() -> None:
    batch = tokens(PAIR, reference=REFERENCE)
    at_start = DpoLoss(Dpo(type="dpo"))
    of_maker = DpoLoss(Dpo(type="dpo", reference="maker"))
    assert (at_start.needs_reference, of_maker.needs_reference) == (True, False)
    assert torch.equal(at_start(batch).loss, of_maker(batch).loss)


def test_a_micro_batch_without_a_pair_contributes_nothing() -> None:
    terms = DpoLoss(Dpo(type="dpo"))(tokens([], reference=[], totals=Totals(4, 2, 8)))
    terms.loss.backward()
    assert float(terms.loss.detach()) == 0


LOG_PROBS = st.lists(st.floats(-9, 0, width=32), min_size=1, max_size=4)
PAIRS = st.lists(st.tuples(LOG_PROBS, LOG_PROBS), min_size=2, max_size=5)


@settings(max_examples=30, deadline=None)
@given(PAIRS, st.integers(1, 4), st.sampled_from(["sigmoid", "ipo", "hinge"]))
def test_micro_batches_of_pairs_add_up_to_the_loss_of_all_in_any_order(pairs, cut: int, loss: str) -> None:
    algorithm = DpoLoss(Dpo(type="dpo", loss=loss))
    totals = Totals(sum(map(len, (s for pair in pairs for s in pair))), 2 * len(pairs), 8)

    def of(some) -> float:
        samples = [list(sample) for pair in some for sample in pair]
        reference = [[-1.0] * len(sample) for sample in samples]
        return float(algorithm(tokens(samples, reference=reference, totals=totals)).loss.detach())

    cut = min(cut, len(pairs) - 1)
    assert of(pairs[cut:]) + of(pairs[:cut]) == pytest.approx(of(pairs), rel=1e-4, abs=1e-4)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9)), min_size=2, max_size=8),
    st.integers(1, 30),
    st.integers(1, 3),
    st.booleans(),
)
def test_whole_rows_are_never_cut_and_a_larger_one_goes_alone(rows, budget: int, ranks: int, share: bool) -> None:
    shapes = [RowShape(prompt, (first, second)) for prompt, first, second in rows]
    plan = plan_step(
        step=1,
        version=None,
        shapes=shapes,
        advantages=[np.zeros(2, np.float32)] * len(shapes),
        masks=[np.ones(2, bool)] * len(shapes),
        max_response_tokens=9,
        micro_batch_tokens=budget,
        share_prompt=share,
        data_parallel=ranks,
        whole_rows=True,
    )
    [minibatch] = plan.minibatches
    micro_batches = [parts for rank in minibatch.ranks for parts in rank]
    assert sorted(part.row for parts in micro_batches for part in parts) == list(range(len(shapes)))
    assert all(part.samples == (0, 1) for parts in micro_batches for part in parts)
    for parts in micro_batches:
        fed = sum(
            sum(n - 1 for n in shapes[part.row].responses) + shapes[part.row].prompt * (1 if share else 2)
            for part in parts
        )
        assert fed <= budget or len(parts) == 1


def test_smoothing_without_the_loss_that_reads_it_is_refused() -> None:
    with pytest.raises(ValueError, match="label_smoothing is read with `loss: sigmoid` only"):
        Dpo(type="dpo", loss="ipo", label_smoothing=0.1)
