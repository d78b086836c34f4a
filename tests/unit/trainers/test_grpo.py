"""The GRPO loss against hand computation, and its properties."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainers.algorithms.base import LossTerms, TokenBatch, token_weights
from trainers.algorithms.factory import build_algorithm
from trainers.algorithms.grpo import GrpoLoss, kl_estimate
from trainers.algorithms.metrics import MetricSums, finish, mismatch
from trainers.batch import Totals
from trainers.config import CustomAlgorithm, Grpo


def batch(ratios, advantages, *, lengths=None, totals=None, stale=None, reference=None, samples=None) -> TokenBatch:
    """Tokens whose current policy is `ratios` times the proximal one, and that is `stale` times the behaviour one."""
    tokens = len(ratios)
    proximal = torch.full((tokens,), -2.0)
    return TokenBatch(
        current=(proximal + torch.tensor(ratios).log()).requires_grad_(),
        proximal=proximal,
        behaviour=proximal - torch.tensor(stale or [1.0] * tokens).log(),
        reference=None if reference is None else torch.tensor(reference),
        entropy=torch.arange(1.0, tokens + 1).requires_grad_(),
        advantages=torch.tensor(advantages),
        samples=torch.tensor(samples or [0] * tokens),
        lengths=torch.tensor(lengths or [float(tokens)] * tokens),
        totals=totals or Totals(tokens, 1, tokens),
    )


def grpo(**settings) -> GrpoLoss:
    return GrpoLoss(Grpo(type="grpo", **settings))


def test_the_clip_is_pessimistic_on_both_sides():
    tokens = batch([1.5, 1.5, 0.5, 0.5], [1.0, -1.0, 1.0, -1.0])

    terms = grpo(clip_low=0.2, clip_high=0.28)(tokens)
    terms.loss.backward()

    # min(r A, clip(r) A): 1.28, -1.5, 0.5, -0.8; their mean, negated
    assert float(terms.loss.detach()) == pytest.approx(-(1.28 - 1.5 + 0.5 - 0.8) / 4)
    torch.testing.assert_close(tokens.current.grad, torch.tensor([0.0, 1.5, -0.5, 0.0]) / 4)
    assert (terms.sums["clip_frac/high"], terms.sums["clip_frac/low"]) == (1, 1)


def test_importance_weights_are_cut_at_the_cap_and_carry_no_gradient():
    tokens = batch([1.0, 1.0, 1.0], [1.0, 1.0, 1.0], stale=[0.5, 1.0, 8.0])

    terms = grpo(corrections={"truncate": {"cap": 2.0}})(tokens)
    terms.loss.backward()

    assert float(terms.loss.detach()) == pytest.approx(-(0.5 + 1.0 + 2.0) / 3)
    torch.testing.assert_close(tokens.current.grad, -torch.tensor([0.5, 1.0, 2.0]) / 3)
    figures = finish({"tokens": 3.0, **{k: float(v) for k, v in terms.sums.items()}}, {})
    assert figures["is/mean"] == pytest.approx(9.5 / 3)
    assert figures["is/masked_frac"] == pytest.approx(1 / 3)
    assert figures["is/ess"] == pytest.approx(9.5**2 / (3 * (0.25 + 1 + 64)))
    assert float(terms.maxima["is/max"]) == pytest.approx(8.0)


def test_without_importance_sampling_stale_tokens_count_fully():
    assert float(grpo(corrections={"truncate": None})(batch([1.0], [1.0], stale=[8.0])).loss.detach()) == pytest.approx(
        -1
    )


@pytest.mark.parametrize(
    ("normalise", "weights"),
    [
        ("sequence", [1 / (3 * 4)] * 3 + [1 / (1 * 4)]),
        ("constant", [1 / (4 * 10)] * 4),
        ("token", [1 / 20] * 4),
    ],
)
def test_the_three_normalisations_use_totals_of_the_whole_step(normalise, weights):
    tokens = batch([1.0] * 4, [1.0] * 4, lengths=[3.0, 3.0, 3.0, 1.0], totals=Totals(20, 4, 10))

    torch.testing.assert_close(token_weights(tokens, normalise), torch.tensor(weights))


def test_kl_estimators_by_hand():
    policy, reference = torch.tensor([-1.0]), torch.tensor([-1.5])

    assert kl_estimate(policy, reference, "k1").item() == pytest.approx(0.5)
    assert kl_estimate(policy, reference, "k2").item() == pytest.approx(0.125)
    assert kl_estimate(policy, reference, "k3").item() == pytest.approx(math.exp(-0.5) - 1 + 0.5)


def test_kl_penalty_and_entropy_bonus_are_added_with_their_coefficients():
    tokens = batch([1.0, 1.0], [0.0, 0.0], reference=[-2.5, -2.0])

    terms = grpo(kl_coef=0.1, kl_estimator="k2", entropy_coef=0.01)(tokens)
    terms.loss.backward()

    assert float(terms.loss.detach()) == pytest.approx((0.1 * 0.125 - 0.01 * (1 + 2)) / 2)
    torch.testing.assert_close(tokens.current.grad, torch.tensor([0.1 * 0.5 / 2, 0.0]))
    torch.testing.assert_close(tokens.entropy.grad, torch.tensor([-0.005, -0.005]))
    assert float(terms.sums["kl"]) == float(terms.sums["kl/k2"]) == pytest.approx(0.125)


def test_kl_in_the_loss_is_to_a_reference_makers_column_where_the_algorithm_says_so():
    start = batch([1.0, 1.0], [0.0, 0.0], reference=[-2.5, -2.0])
    maker = replace(start, reference=None, labels={"reference": start.reference})
    loss = grpo(kl_coef=0.1, reference="maker")

    assert not loss.needs_reference
    assert float(loss(maker).loss.detach()) == float(grpo(kl_coef=0.1)(start).loss.detach()) > 0


def test_zero_advantage_has_no_gradient_exactly_when_the_config_says_so():
    assert Grpo(type="grpo").proportional_to_advantage
    assert not Grpo(type="grpo", kl_coef=0.1).proportional_to_advantage
    assert not Grpo(type="grpo", entropy_coef=0.1).proportional_to_advantage
    tokens = batch([1.2, 0.9], [0.0, 0.0])

    grpo()(tokens).loss.backward()

    assert tokens.current.grad.tolist() == [0.0, 0.0]


def take(tokens: TokenBatch, index: list[int]) -> TokenBatch:
    names = ("current", "proximal", "behaviour", "entropy", "advantages", "samples", "lengths")
    parts = {name: getattr(tokens, name).detach()[index] for name in names}
    parts["current"].requires_grad_()
    return TokenBatch(reference=None, totals=tokens.totals, **parts)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 11), st.sampled_from(["sequence", "constant", "token"]), st.integers(0, 10_000))
def test_splitting_and_permuting_tokens_changes_no_gradient(cut, normalise, seed):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda: torch.rand(12, generator=generator)  # noqa: E731
    whole = batch(
        (0.5 + draw()).tolist(),
        (draw() - 0.5).tolist(),
        lengths=[5.0] * 5 + [7.0] * 7,
        totals=Totals(12, 2, 8),
        stale=(0.5 + draw()).tolist(),
    )
    algorithm = grpo(normalise=normalise)
    loss = algorithm(whole).loss
    loss.backward()
    order = torch.randperm(12, generator=generator).tolist()

    parts = [take(whole, order[:cut]), take(whole, order[cut:])]
    losses = [algorithm(part).loss for part in parts]
    for value in losses:
        value.backward()

    torch.testing.assert_close(sum(value.detach() for value in losses), loss.detach())
    torch.testing.assert_close(torch.cat([part.current.grad for part in parts]), whole.current.grad[order])


def test_no_token_at_all_gives_a_loss_of_zero_with_a_graph():
    terms = grpo()(take(batch([1.0], [1.0]), []))

    terms.loss.backward()
    assert float(terms.loss.detach()) == 0.0


def test_mismatch_is_measured_on_tokens_of_the_trainers_version_only():
    trainer, maker = torch.tensor([-1.0, -2.0, -9.0]), torch.tensor([-1.1, -2.0, -1.0])
    figures = MetricSums()

    figures.add(*mismatch(trainer, maker, torch.tensor([True, True, False])))
    metrics = finish({k: float(v) for k, v in figures.sums.items()}, {k: float(v) for k, v in figures.maxima.items()})

    assert metrics["mismatch/kl"] == pytest.approx((math.exp(0.1) - 1 - 0.1) / 2, rel=1e-3)
    assert metrics["mismatch/logp_abs_diff_mean"] == pytest.approx(0.05)
    assert metrics["mismatch/logp_abs_diff_max"] == pytest.approx(0.1)
    assert metrics["mismatch/tokens"] == 2


def test_without_tokens_of_the_version_there_is_no_mismatch_figure():
    figures = MetricSums()
    figures.add(*mismatch(torch.tensor([-1.0]), torch.tensor([-2.0]), torch.tensor([False])))

    assert finish({k: float(v) for k, v in figures.sums.items()}, {}) == {"mismatch/tokens": 0.0}


class Reinforce:
    """A custom algorithm, as a user writes one."""

    needs_reference = False
    entropy_gradient = False

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(self, tokens: TokenBatch) -> LossTerms:
        loss = -(tokens.current * tokens.advantages * token_weights(tokens, "token")).sum() * self.scale
        return LossTerms(loss, {"entropy": tokens.entropy.detach().sum()}, {})


def test_a_custom_algorithm_by_dotted_path_gets_its_options_and_the_same_tensors():
    algorithm = build_algorithm(CustomAlgorithm(type=f"{__name__}:Reinforce", options={"scale": 3.0}))

    assert float(algorithm(batch([1.0], [2.0])).loss.detach()) == pytest.approx(3.0 * 2.0 * 2.0)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no.such:Thing", "cannot be imported"),
        ("math:nothing", "cannot be imported"),
        ("math:sqrt", "cannot be made with options"),
        ("builtins:dict", "dict, which is no algorithm: it lacks needs_reference, entropy_gradient"),
    ],
)
def test_a_dotted_path_that_leads_to_no_algorithm_is_refused(path, message):
    with pytest.raises(ValueError, match=message):
        build_algorithm(CustomAlgorithm(type=path))
