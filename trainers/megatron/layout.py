"""From a packed micro-batch to what this rank feeds to its part of the model."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from torch import Tensor

from trainers.megatron.attention import PackedLayout, attention_dtype, rotary_tables
from trainers.megatron.context import own_stripe
from trainers.packing import PackedBatch, padded


def place(batch: PackedBatch, config: Any, rope_theta: float, device: torch.device) -> tuple[Tensor, PackedLayout]:
    """Token ids [1, own rows] and the layout that goes with them. `config` is Megatron's.

    With context parallelism a rank has its stripe of the rows and the targets that are predicted there. Rows are filled
    up so that context and sequence parallelism can split them evenly.
    """

    def on_device(array: np.ndarray) -> Tensor:
        return torch.as_tensor(array, device=device)

    stripe = own_stripe()
    over_tensor_ranks = parallel_state.get_tensor_model_parallel_world_size() if config.sequence_parallel else 1
    batch = padded(batch, stripe.step * over_tensor_ranks)
    own_rows = slice(stripe.first, None, stripe.step)
    own = np.flatnonzero(batch.logit_rows % stripe.step == stripe.first)
    dtype = attention_dtype(config.params_dtype, device)
    cos, sin = rotary_tables(on_device(batch.positions[own_rows]), config.kv_channels, rope_theta, dtype)
    layout = PackedLayout(
        qkv_format="thd",
        segments=batch.segments,
        cos=cos,
        sin=sin,
        logit_rows=on_device(batch.logit_rows[own] // stripe.step),
        targets=on_device(batch.targets[own]),
        temperatures=on_device(batch.temperatures[own]),
        own=on_device(own),
        every_target=batch.targets.size,
    )
    return on_device(batch.token_ids[own_rows])[None], layout
