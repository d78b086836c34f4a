"""RMSNorm for Megatron's plain-torch layers, with sequence parallelism and few passes over the activations.

torch has no fused RMSNorm on CPU: its own is a chain of elementwise operations, each of them recorded and run again
backward. Statistics are taken in float32, as Hugging Face's models do.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Norm(torch.nn.Module):
    """y = weight * x / sqrt(mean(x^2) + eps) over the last dimension. Same constructor as Megatron's norms."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        if config.normalization != "RMSNorm":
            raise ValueError(f"only RMSNorm is supported, not {config.normalization}")
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # Megatron then sums its gradient over the ranks

    def forward(self, x: Tensor) -> Tensor:
        return _RmsNorm.apply(x, self.weight, self.eps)  # type: ignore[no-any-return]


class _RmsNorm(torch.autograd.Function):
    """With n = x / rms: dx = (g * w - n * mean(g * w * n)) / rms, dw = sum of g * n over the rows."""

    @staticmethod
    def forward(ctx, x, weight, eps):  # type: ignore[no-untyped-def]
        wide = x.float()
        scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = scale.square_().div_(x.size(-1)).add_(eps).rsqrt_()
        normal = (wide * scale).to(x.dtype)
        ctx.save_for_backward(normal, weight, scale)
        return normal * weight

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        normal, weight, scale = ctx.saved_tensors
        d_weight = (gradient * normal).flatten(0, -2).sum(0, dtype=torch.float32).to(weight.dtype)
        wide, inner = normal.float(), (gradient * weight).float()
        mean = torch.linalg.vecdot(inner, wide).unsqueeze(-1).div_(normal.size(-1))
        return inner.addcmul_(wide, mean, value=-1.0).mul_(scale).to(gradient.dtype), d_weight, None
