"""How many floating-point operations a step needs, for its utilisation of the hardware (MFU). Pure.

As PaLM counts (Chowdhery et al. 2022, arXiv:2204.02311, appendix B): two operations for each weight of a matrix product that a
token goes through and, in attention, four for each dimension of each earlier token; three times that with the backward pass.
Here a token counts its true number of earlier tokens instead of half the context, the output layer counts only for the tokens
that are predicted, and a prompt shared by samples counts once. What is computed twice (`recompute`, log-probs of the
proximal policy or the reference, a teacher) does not count: it is the price of the method, not a part of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainers.batch import Part, RowShape, StepPlan, packed_tokens

FORWARD_AND_BACKWARD = 3
TERA = 1e12


@dataclass(frozen=True)
class ModelShape:
    layer_weights: int  # of the matrix products that one token goes through, all layers
    output_weights: int  # hidden size x vocabulary
    attention_width: int  # layers x heads x dimensions of a head

    def flops(self, tokens: int, predicted: int, pairs: int) -> float:
        """Of forward and backward. `pairs`: of a token and one that it attends to, itself included."""
        forward = 2.0 * self.layer_weights * tokens + 2.0 * self.output_weights * predicted
        return FORWARD_AND_BACKWARD * (forward + 4.0 * self.attention_width * pairs)


@dataclass(frozen=True)
class Utilisation:
    """`peak_tflops`: of all ranks together."""

    model: ModelShape
    peak_tflops: float
    share_prompt: bool

    def of(self, plan: StepPlan, shapes: Sequence[RowShape], seconds: float) -> float:
        """Fraction of the peak that a step had which trained `plan` in so many seconds; `shapes` are of its rows."""
        parts = [part for minibatch in plan.minibatches for rank in minibatch.ranks for batch in rank for part in batch]
        needed = sum(self._flops(part, shapes[part.row]) for part in parts)
        return needed / seconds / (self.peak_tflops * TERA)

    def _flops(self, part: Part, shape: RowShape) -> float:
        responses = [shape.responses[sample] for sample in part.samples]
        prompts = 1 if self.share_prompt else len(responses)
        pairs = prompts * _triangle(shape.prompt)
        pairs += sum(_triangle(shape.prompt + max(length - 1, 0)) - _triangle(shape.prompt) for length in responses)
        return self.model.flops(packed_tokens(shape.prompt, responses, self.share_prompt), sum(responses), pairs)


def _triangle(length: int) -> int:
    """Pairs among so many tokens in a row: each attends to itself and to all before it."""
    return length * (length + 1) // 2
