"""The divergences of a student from a teacher: by hand, dense, and over shards of the vocabulary."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.two_ranks import answers_of_two
from trainers.distillation.divergence import Buckets, Divergence, dense_full, dense_top_k
from trainers.megatron import vocab
from trainers.megatron.vocab import VocabShard
from trainers.megatron.vocab_divergence import (
    UNMEASURED,
    Distillation,
    TopK,
    WholeVocabulary,
    log_probs_and_divergence,
    top_of,
)

ROWS, HIDDEN, VOCAB, PADDED, K = 11, 8, 37, 40, 5
KINDS = ("forward_kl", "reverse_kl", "jsd")
MODES = ("top_k", "all_of_it", "full", "top_of_ranks")
SAMPLING = torch.linspace(0.5, 1.5, ROWS)


def problem() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        "hidden": torch.randn(ROWS, HIDDEN, generator=generator),
        "weight": torch.randn(PADDED, HIDDEN, generator=generator),
        "targets": torch.randint(0, VOCAB, (ROWS,), generator=generator),
        "teacher_hidden": torch.randn(ROWS, 6, generator=generator),
        "teacher_weight": torch.randn(PADDED, 6, generator=generator),
        "upstream": torch.randn(3, ROWS, generator=generator),
    }


def teachers_top(given: dict[str, torch.Tensor], count: int, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and log-probs [R, K] of the teacher, not sorted, exact in float64."""
    logits = given["teacher_hidden"].double() @ given["teacher_weight"][:VOCAB].double().t() / temperature
    top = logits.log_softmax(-1).topk(count, dim=-1)
    return top.indices.flip(-1), top.values.flip(-1)


def expected(mode: str, divergence: Divergence, temperatures: torch.Tensor) -> dict[str, torch.Tensor]:
    """Dense, in float64."""
    given = problem()
    hidden, weight = given["hidden"].double().requires_grad_(), given["weight"].double().requires_grad_()
    logits = hidden @ weight[:VOCAB].t()
    every = (logits / temperatures.double()[:, None]).log_softmax(-1)
    logprob = every.gather(-1, given["targets"][:, None])[:, 0]
    entropy = -(every.exp() * every).sum(-1)
    if mode in ("top_k", "top_of_ranks"):
        value = by_hand(logits, *teachers_top(given, K, divergence.temperature), divergence)
    else:
        teacher = given["teacher_hidden"].double() @ given["teacher_weight"][:VOCAB].double().t()
        value = dense_full(logits, teacher, divergence)
    figures = torch.stack([logprob, entropy, value])
    (figures * given["upstream"]).sum().backward()
    return {"figures": figures.detach(), "hidden": hidden.grad, "weight": weight.grad}


def by_hand(logits: torch.Tensor, ids: torch.Tensor, log_q: torch.Tensor, divergence: Divergence) -> torch.Tensor:
    """Two distributions of K + 1 buckets, and the textbook formulas."""
    p_top = (logits / divergence.temperature).softmax(-1).gather(-1, ids)
    p = torch.cat([p_top, 1 - p_top.sum(-1, keepdim=True)], dim=-1)
    q = torch.cat([log_q.exp(), 1 - log_q.exp().sum(-1, keepdim=True)], dim=-1)
    if divergence.kind == "forward_kl":
        return (q * (q / p).log()).sum(-1)
    if divergence.kind == "reverse_kl":
        return (p * (p / q).log()).sum(-1)
    m = divergence.beta * q + (1 - divergence.beta) * p
    return (divergence.beta * q * (q / m).log() + (1 - divergence.beta) * p * (p / m).log()).sum(-1)


def actual(
    mode: str,
    divergence: Divergence,
    temperatures: torch.Tensor,
    rank: int = 0,
    ranks: int = 1,
    group: dist.ProcessGroup | None = None,
) -> dict[str, torch.Tensor]:
    given = problem()
    hidden, weight = given["hidden"].requires_grad_(), given["weight"].chunk(ranks)[rank].clone().requires_grad_()
    shard = VocabShard(rank * PADDED // ranks, PADDED // ranks, VOCAB, group)
    theirs = given["teacher_hidden"], given["teacher_weight"].chunk(ranks)[rank]
    if mode == "full":
        teacher: Any = WholeVocabulary(*theirs)
    elif mode == "top_of_ranks":
        teacher = top_of(*theirs, given["targets"], shard, K, divergence.temperature)
    else:
        ids, log_q = teachers_top(given, K if mode == "top_k" else VOCAB, divergence.temperature)
        teacher = TopK(Buckets.of(ids, log_q.float()), torch.zeros(ROWS))
    found = log_probs_and_divergence(
        hidden,
        weight,
        given["targets"],
        temperatures,
        shard,
        Distillation(teacher, divergence),
        entropy_gradient=True,
    )
    (found[:3] * given["upstream"]).sum().backward()
    return {
        "figures": found[:3].detach(),
        "hidden": hidden.grad,
        "weight": weight.grad,
        "overlap": found[3].detach(),
        "teacher": found[4].detach(),
    }


def relative_error(found: Any, reference: torch.Tensor) -> float:
    return float((torch.as_tensor(found).double() - reference).norm() / reference.norm())


@pytest.mark.parametrize("rows_per_chunk", [4, 100])
@pytest.mark.parametrize("together", [True, False], ids=["one temperature", "two temperatures"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_equal_dense_float64_whatever_the_chunks(
    monkeypatch, kind, mode, together, rows_per_chunk
):
    monkeypatch.setattr(vocab, "CHUNK_BYTES", rows_per_chunk * 4 * PADDED)
    divergence = Divergence(kind, beta=0.3, temperature=1.0 if mode == "top_k" else 0.7)
    temperatures = torch.full((ROWS,), divergence.temperature) if together else SAMPLING

    found, reference = actual(mode, divergence, temperatures), expected(mode, divergence, temperatures)

    for name, value in reference.items():
        assert relative_error(found[name], value) < 1e-5, name


@pytest.mark.parametrize("kind", KINDS)
def test_the_plain_top_k_equals_the_textbook_formulas(kind):
    given, divergence = problem(), Divergence(kind, beta=0.3)
    logits = given["hidden"].double() @ given["weight"][:VOCAB].double().t()
    ids, log_q = teachers_top(given, K, 1.0)

    found = dense_top_k(logits, Buckets.of(ids, log_q), divergence)

    assert relative_error(found, by_hand(logits, ids, log_q, divergence)) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", MODES[:3])
def test_a_teacher_that_is_the_student_gives_no_divergence_and_no_gradient(mode, kind):
    given = problem()
    hidden, weight = given["hidden"].requires_grad_(), given["weight"]
    top = (given["hidden"].detach() @ weight[:VOCAB].t()).log_softmax(-1).topk(K if mode == "top_k" else VOCAB, dim=-1)
    teacher: Any = (
        WholeVocabulary(given["hidden"].detach(), weight)
        if mode == "full"
        else TopK(Buckets.of(top.indices, top.values), torch.zeros(ROWS))
    )
    shard = VocabShard(0, PADDED, VOCAB)
    found = log_probs_and_divergence(
        hidden,
        weight,
        given["targets"],
        torch.ones(ROWS),
        shard,
        Distillation(teacher, Divergence(kind)),
        entropy_gradient=False,
    )
    found[2].sum().backward()

    assert found[2].abs().max() < 1e-5
    assert hidden.grad.abs().max() < 1e-5
    if mode != "full":
        assert (found[3] == 1.0).all(), "the top-k is the same"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("plain", [True, False], ids=["dense", "over shards"])
def test_the_tail_sees_what_a_renormalised_top_k_is_blind_to(kind, plain):
    """Nats added to every logit outside the top leave the top's proportions as they are."""
    logits = torch.tensor([[4.0, 3.0, 2.0, 0.0, 0.0, 0.0]])
    top = logits.log_softmax(-1).topk(3, dim=-1)
    student = (logits + 5.0 * (torch.arange(6) > 2)).requires_grad_()
    buckets = Buckets.of(top.indices, top.values)

    divergence = Divergence(kind)
    value = dense_top_k(student, buckets, divergence) if plain else of_logits(student, buckets, divergence)
    value.sum().backward()

    p, q = student.detach().softmax(-1)[0], logits.softmax(-1)[0]
    p, q = torch.cat([p[:3], p[3:].sum()[None]]), torch.cat([q[:3], q[3:].sum()[None]])
    exact = float(divergence.terms(p, p.log(), q, q.log()).sum())
    assert float(value) == pytest.approx(exact, rel=1e-5)
    assert exact > 0.2
    assert (student.grad[0, 3:] > 0).all(), "where the student's mass exceeds the teacher's, it is pushed down"


def of_logits(logits: torch.Tensor, buckets: Buckets, divergence: Divergence) -> torch.Tensor:
    """The sharded function with logits for hidden states, and the identity for weights."""
    size = logits.size(-1)
    found = log_probs_and_divergence(
        logits,
        torch.eye(size),
        torch.zeros(logits.size(0), dtype=torch.int64),
        torch.ones(logits.size(0)),
        VocabShard(0, size, size),
        Distillation(TopK(buckets, torch.zeros(logits.size(0))), divergence),
        entropy_gradient=False,
    )
    return found[2]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("plain", [True, False], ids=["dense", "over shards"])
def test_repeated_ids_accumulate(kind, plain):
    logits = torch.tensor([[1.0, 0.5, -0.2, 0.1]], requires_grad=True)
    twice = Buckets.of(torch.tensor([[2, 1, 2]]), torch.tensor([[0.25, 0.3, 0.15]]).log())
    once = Buckets.of(torch.tensor([[2, 1]]), torch.tensor([[0.4, 0.3]]).log())
    function = dense_top_k if plain else of_logits

    found = function(logits, twice, Divergence(kind))
    (gradient,) = torch.autograd.grad(found.sum(), logits)
    reference = function(logits, once, Divergence(kind))
    (exact,) = torch.autograd.grad(reference.sum(), logits)

    torch.testing.assert_close(found, reference)
    torch.testing.assert_close(gradient, exact)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("plain", [True, False], ids=["dense", "over shards"])
@pytest.mark.parametrize("mass", [1.0, 1.0005, 1e-6])
def test_it_is_finite_where_a_mass_reaches_one_or_nothing(kind, plain, mass):
    logits = torch.tensor([[90.0, -90.0, 0.0, 0.0], [-90.0, -90.0, 0.0, 0.0]], requires_grad=True)
    buckets = Buckets.of(torch.tensor([[0, 1]] * 2), torch.tensor([[mass / 2, mass / 2]] * 2).log())

    value = (dense_top_k if plain else of_logits)(logits, buckets, Divergence(kind))
    value.sum().backward()

    assert torch.isfinite(value).all()
    assert torch.isfinite(logits.grad).all()


def test_the_overlap_counts_the_teachers_tokens_among_as_many_of_the_students():
    logits = torch.tensor([[5.0, 4.0, 3.0, 2.0, 1.0]])
    buckets = Buckets.of(torch.tensor([[0, 3, 4]]), torch.tensor([[0.3, 0.3, 0.2]]).log())

    found = log_probs_and_divergence(
        logits,
        torch.eye(5),
        torch.zeros(1, dtype=torch.int64),
        torch.ones(1),
        VocabShard(0, 5, 5),
        Distillation(TopK(buckets, torch.zeros(1)), Divergence("forward_kl")),
        entropy_gradient=False,
    )

    assert float(found[3]) == pytest.approx(1 / 3)


def _rank(rank: int, meeting: str, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
    for kind in KINDS:
        for mode in MODES:
            divergence = Divergence(kind, beta=0.3, temperature=1.0 if mode == "top_k" else 0.7)
            found = actual(mode, divergence, SAMPLING, rank, 2, dist.group.WORLD)
            results.put((rank, kind, mode, {name: value.tolist() for name, value in found.items()}))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.timeout(90)
def test_two_ranks_with_half_the_vocabulary_each_have_the_values_and_gradients_of_dense_float64():
    found = answers_of_two(_rank, 2 * len(KINDS) * len(MODES))

    for rank, kind, mode, values in found:
        divergence = Divergence(kind, beta=0.3, temperature=1.0 if mode == "top_k" else 0.7)
        reference = expected(mode, divergence, SAMPLING)
        assert relative_error(values["figures"], reference["figures"]) < 1e-5, (rank, kind, mode)
        assert relative_error(values["hidden"], reference["hidden"]) < 1e-5, (rank, kind, mode)
        assert relative_error(values["weight"], reference["weight"].chunk(2)[rank]) < 1e-5, (rank, kind, mode)
        alone = actual(mode, divergence, SAMPLING)
        for name in ("overlap", "teacher"):
            torch.testing.assert_close(torch.tensor(values[name]), alone[name], rtol=1e-5, atol=1e-5)
        assert (mode == "full") == (values["overlap"][0] == UNMEASURED)
