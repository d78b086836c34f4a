"""What a rollout maker asks of an inference engine.

Guarantees an engine gives:
1. Tokens in, tokens out; log-probs are those of the distribution that was sampled from (temperature applied).
2. Every token carries the version of the weights that made it.
3. No token comes from half-loaded weights. A refused update changes nothing. After an update that broke half-way
   nothing is generated until a whole version is in.
4. No cached prefix crosses versions.
5. The same group, seed and version give the same samples.
6. After a failure inside, every call raises InfraFailure; nothing waits for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from weights.manifest import Manifest

NO_VERSION = -1  # the version of an engine that holds only what it loaded from the model folder


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """The samples to draw from one prompt: one for each seed."""

    prompt_ids: Sequence[int]  # [prompt tokens]
    seeds: Sequence[int]  # [samples], each below 2**63
    temperature: float  # 0 means greedy
    max_tokens: int
    stop: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Sample:
    """One finished completion. The end-of-sequence token, where sampled, is part of it."""

    token_ids: np.ndarray  # int32 [tokens]
    logprobs: np.ndarray  # float32 [tokens]
    versions: np.ndarray  # int32 [tokens]
    truncated: bool  # cut at max_tokens, rather than stopped


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """The samples of one row to be scored, each behind the same prompt."""

    prompt_ids: Sequence[int]  # [prompt tokens]
    responses: Sequence[np.ndarray]  # int32 [tokens] of each sample
    top_k: int


@dataclass(frozen=True, slots=True)
class Scores:
    """What a frozen model says at each token of one sample, at temperature 1."""

    token_ids: np.ndarray  # int32 [tokens]: the response, as it was scored
    logprobs: np.ndarray  # float32 [tokens], of those tokens
    top_ids: np.ndarray  # int32 [tokens, top_k], the likeliest first
    top_logprobs: np.ndarray  # float32 [tokens, top_k]


class Engine(Protocol):
    max_model_len: int  # prompt and completion together, tokens

    async def start(self) -> None: ...

    async def generate(self, request: GroupRequest) -> list[Sample]:
        """The samples of one group, in the order of its seeds. Raises InfraFailure, or ValueError for a bad request.

        Cancelling the call frees the group's place in the engine.
        """
        ...

    async def load_weights(self, manifest: Manifest, buckets: Sequence[np.ndarray], *, between_groups: bool) -> None:
        """Take a full version into use: between two steps, or, with `between_groups`, when no group is being generated.

        Raises WeightsError (names, shapes or checksums are wrong: the old weights go on) or InfraFailure.
        """
        ...

    @property
    def version(self) -> int:
        """Of the weights that are in; NO_VERSION while there are none of any version."""
        ...

    async def sleep(self, level: int) -> None:
        """Give the device's memory back, as soon as no group is being generated: level 1 keeps the weights in the host's
        memory, level 2 drops them, so that after wake() nothing is generated until a version has been loaded.

        Until wake() generate and load_weights raise InfraFailure. Cancelling the call leaves the engine awake.
        """
        ...

    async def wake(self) -> None:
        """Take the device's memory again. Nothing happens when the engine is awake."""
        ...

    def status(self) -> dict[str, float | int | str | None]:
        """`state` (ready, asleep, quarantined, broken, closed, ...), `running` groups, `tokens_generated`,
        `seconds_generating`, `seconds_idle`, `seconds_sync_pause`."""
        ...

    async def close(self) -> None: ...
