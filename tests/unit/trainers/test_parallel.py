"""What of a layout is refused, with the numbers and the remedy."""

from __future__ import annotations

from typing import Any

import pytest

from trainers.config import MegatronBackend
from trainers.parallel import unsupported

DENSE = {"layers": 12, "heads": 8, "kv_heads": 4, "intermediate": 96}
SPARSE = {**DENSE, "experts": 6}


def reasons(shape: dict[str, int], **backend: Any) -> list[str]:
    return unsupported(MegatronBackend(type="megatron", **backend), **shape)


@pytest.mark.parametrize(
    ("shape", "backend"),
    [
        (DENSE, {}),
        (DENSE, {"tensor_parallel": 4, "sequence_parallel": True, "pipeline_parallel": 6, "context_parallel": 3}),
        (SPARSE, {"expert_parallel": 3, "data_parallel": 6}),
        (SPARSE, {"expert_parallel": 6, "data_parallel": 3, "tensor_parallel": 2, "sequence_parallel": True}),
    ],
)
def test_a_layout_that_divides_the_model_is_not_refused(shape, backend):
    assert reasons(shape, **backend) == []


@pytest.mark.parametrize(
    ("shape", "backend", "reason"),
    [
        (
            DENSE,
            {"tensor_parallel": 8},
            "tensor_parallel: 8 does not divide the model's 4 key and value heads: use 1, 2 or 4",
        ),
        (
            {**DENSE, "heads": 6},
            {"tensor_parallel": 4},
            "tensor_parallel: 4 does not divide the model's 6 attention heads: use 1 or 2",
        ),
        (
            {**DENSE, "intermediate": 99},
            {"tensor_parallel": 2},
            "tensor_parallel: 2 does not divide the model's 99 MLP rows: use 1",
        ),
        (
            DENSE,
            {"pipeline_parallel": 5},
            "pipeline_parallel: 5 stages cannot share 12 layers evenly: use 1, 2, 3, 4, 6 or 12",
        ),
        (
            DENSE,
            {"pipeline_parallel": 24},
            "pipeline_parallel: 24 stages cannot share 12 layers evenly: use 1, 2, 3, 4, 6 or 12",
        ),
        (
            DENSE,
            {"sequence_parallel": True},
            "sequence_parallel: splits over tensor-parallel ranks, but tensor_parallel is 1: raise that or leave this out",
        ),
        (
            DENSE,
            {"expert_parallel": 2, "data_parallel": 2},
            "expert_parallel: 2 ranks share out experts, but the model has none: use 1",
        ),
        (
            SPARSE,
            {"expert_parallel": 4, "data_parallel": 4},
            "expert_parallel: 4 does not divide the model's 6 experts: use 1, 2, 3 or 6",
        ),
        (
            SPARSE,
            {"expert_parallel": 2, "data_parallel": 3},
            "expert_parallel: 2 does not divide the 3 ranks that share out the experts (tensor_parallel 1 x "
            "context_parallel 1 x data_parallel 3): use 1 or 3",
        ),
        (
            SPARSE,
            {"tensor_parallel": 2},
            "sequence_parallel: experts need it with tensor_parallel 2, whose ranks would else send every token to them "
            "once each: set sequence_parallel: true",
        ),
        (
            DENSE,
            {"tensor_parallel": 2, "sequence_parallel": True, "context_parallel": 4, "micro_batch_tokens": 6},
            "micro_batch_tokens: 6 tokens cannot be split over 8 ranks: use at least 8",
        ),
    ],
)
def test_a_layout_that_cannot_run_is_refused_with_numbers_and_remedy(shape, backend, reason):
    assert reasons(shape, **backend) == [reason]


def test_every_reason_is_named():
    found = reasons(DENSE, tensor_parallel=16, pipeline_parallel=7)

    assert [text.partition(":")[0] for text in found] == ["tensor_parallel", "tensor_parallel", "pipeline_parallel"]
