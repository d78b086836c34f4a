"""The guarantees in the docstring of trainers.megatron.vocab, against torch's own log-softmax."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.two_ranks import answers_of_two
from trainers.megatron import vocab
from trainers.megatron.vocab import VocabShard, log_probs

ROWS, HIDDEN, VOCAB, PADDED = 11, 8, 37, 40

TEMPERATURES = torch.linspace(0.5, 1.5, ROWS)


def problem() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, weights with padding rows, targets, and upstream gradients of log-probs and entropies."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(ROWS, HIDDEN, generator=generator)
    weight = torch.randn(PADDED, HIDDEN, generator=generator)
    targets = torch.randint(0, VOCAB, (ROWS,), generator=generator)
    return hidden, weight, targets, torch.randn(ROWS, generator=generator), torch.randn(ROWS, generator=generator)


def expected(with_entropy: bool) -> dict[str, torch.Tensor]:
    hidden, weight, targets, d_logprob, d_entropy = problem()
    hidden.requires_grad_(), weight.requires_grad_()
    every = (hidden @ weight[:VOCAB].t() / TEMPERATURES[:, None]).log_softmax(-1)
    logprob = every.gather(-1, targets[:, None])[:, 0]
    entropy = -(every.exp() * every).sum(-1)
    ((logprob * d_logprob).sum() + ((entropy * d_entropy).sum() if with_entropy else 0)).backward()
    return {"logprob": logprob.detach(), "entropy": entropy.detach(), "hidden": hidden.grad, "weight": weight.grad}


def actual(
    rank: int, ranks: int, with_entropy: bool, group: dist.ProcessGroup | None = None
) -> dict[str, torch.Tensor]:
    hidden, weight, targets, d_logprob, d_entropy = problem()
    part = weight.chunk(ranks)[rank].clone().requires_grad_()
    hidden.requires_grad_()
    shard = VocabShard(rank * PADDED // ranks, PADDED // ranks, VOCAB, group)
    logprob, entropy = log_probs(hidden, part, targets, TEMPERATURES, shard, entropy_gradient=with_entropy)
    ((logprob * d_logprob).sum() + ((entropy * d_entropy).sum() if with_entropy else 0)).backward()
    return {"logprob": logprob.detach(), "entropy": entropy.detach(), "hidden": hidden.grad, "weight": part.grad}


@pytest.mark.parametrize("with_entropy", [True, False])
@pytest.mark.parametrize("rows_per_chunk", [1, 4, 11, 100])
def test_values_and_gradients_equal_a_log_softmax_whatever_the_chunks(monkeypatch, rows_per_chunk, with_entropy):
    monkeypatch.setattr(vocab, "CHUNK_BYTES", rows_per_chunk * 4 * PADDED)

    found = actual(0, 1, with_entropy)

    for name, value in expected(with_entropy).items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5, msg=name)


def test_no_more_than_one_chunk_of_logits_is_kept_for_the_backward_pass(monkeypatch):
    monkeypatch.setattr(vocab, "CHUNK_BYTES", 4 * 4 * PADDED)  # 4 rows of 11
    hidden, weight, targets, *_ = problem()
    kept: list[int] = []

    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        log_probs(
            hidden.requires_grad_(),
            weight.requires_grad_(),
            targets,
            TEMPERATURES,
            VocabShard(0, PADDED, VOCAB),
            entropy_gradient=True,
        )

    assert max(n for n in kept if n != weight.numel()) <= 4 * PADDED


def test_no_row_at_all_gives_gradients_of_zero():
    hidden, weight = torch.zeros(0, HIDDEN, requires_grad=True), torch.ones(PADDED, HIDDEN, requires_grad=True)

    logprob, _ = log_probs(
        hidden,
        weight,
        torch.zeros(0, dtype=torch.int64),
        torch.zeros(0),
        VocabShard(0, PADDED, VOCAB),
        entropy_gradient=False,
    )
    logprob.sum().backward()

    assert weight.grad is not None
    assert not weight.grad.any()


def test_in_bfloat16_the_softmax_is_still_taken_in_float32():
    hidden, weight, targets, *_ = problem()
    low = (hidden.bfloat16(), weight[:VOCAB].bfloat16())

    logprob, _ = log_probs(*low, targets, torch.ones(ROWS), VocabShard(0, VOCAB, VOCAB), entropy_gradient=False)

    exact = (low[0] @ low[1].t()).float().log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    torch.testing.assert_close(logprob, exact, rtol=1e-6, atol=1e-6)


def _rank(rank: int, meeting: str, results) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
    found = actual(rank, 2, True, dist.group.WORLD)
    results.put((rank, {name: value.tolist() for name, value in found.items()}))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.timeout(90)
def test_two_ranks_with_half_the_vocabulary_each_have_the_gradients_of_one():
    by_rank = dict(answers_of_two(_rank, 2))
    reference = expected(True)

    for rank in range(2):
        for name in ("logprob", "entropy", "hidden"):
            assert relative_error(by_rank[rank][name], reference[name]) < 1e-5, (rank, name)
        assert relative_error(by_rank[rank]["weight"], reference["weight"].chunk(2)[rank]) < 1e-5


def relative_error(found: list, reference: torch.Tensor) -> float:
    return float((torch.tensor(found) - reference).norm() / reference.norm())
