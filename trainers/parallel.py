"""Which layouts of ranks a model can be trained in. Pure, free of torch: plans ask it, and the learner asks it again."""

from __future__ import annotations

import math

from trainers.config import MegatronBackend


def unsupported(
    backend: MegatronBackend, *, layers: int, heads: int, kv_heads: int, intermediate: int, experts: int = 0
) -> list[str]:
    """One line for every reason why a model of this shape cannot be trained so: key below `backend`, numbers, remedy.

    The vocabulary needs no divisor: it is padded. Layers are split evenly over pipeline stages, one stage a rank.
    """
    reasons = []
    tensor, pipeline, experts_over = backend.tensor_parallel, backend.pipeline_parallel, backend.expert_parallel
    for size, what in ((heads, "attention heads"), (kv_heads, "key and value heads"), (intermediate, "MLP rows")):
        if size % tensor:
            allowed = _divisors(math.gcd(heads, kv_heads, intermediate))
            reasons.append(f"tensor_parallel: {tensor} does not divide the model's {size} {what}: use {allowed}")
    if layers % pipeline:
        reasons.append(
            f"pipeline_parallel: {pipeline} stages cannot share {layers} layers evenly: use {_divisors(layers)}"
        )
    if backend.sequence_parallel and tensor == 1:
        reasons.append(
            "sequence_parallel: splits over tensor-parallel ranks, but tensor_parallel is 1: raise that or leave this out"
        )
    if experts_over > 1 and not experts:
        reasons.append(f"expert_parallel: {experts_over} ranks share out experts, but the model has none: use 1")
    elif experts_over > 1:
        if experts % experts_over:
            reasons.append(
                f"expert_parallel: {experts_over} does not divide the model's {experts} experts: use {_divisors(experts)}"
            )
        sharing = tensor * backend.context_parallel * backend.data_parallel  # the ranks of one pipeline stage
        if sharing % experts_over:
            reasons.append(
                f"expert_parallel: {experts_over} does not divide the {sharing} ranks that share out the experts "
                f"(tensor_parallel {tensor} x context_parallel {backend.context_parallel} x data_parallel "
                f"{backend.data_parallel}): use {_divisors(sharing)}"
            )
    if experts and tensor > 1 and not backend.sequence_parallel:
        reasons.append(
            f"sequence_parallel: experts need it with tensor_parallel {tensor}, whose ranks would else send every token "
            "to them once each: set sequence_parallel: true"
        )
    split = backend.context_parallel * (tensor if backend.sequence_parallel else 1)
    if backend.micro_batch_tokens < split:
        reasons.append(
            f"micro_batch_tokens: {backend.micro_batch_tokens} tokens cannot be split over {split} ranks: "
            f"use at least {split}"
        )
    return reasons


def _divisors(number: int) -> str:
    """`1, 2 or 4`."""
    *others, last = [str(n) for n in range(1, number + 1) if number % n == 0]
    return f"{', '.join(others)} or {last}" if others else last
