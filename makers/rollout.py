"""The rollout maker: draws the samples of a row with the newest weights it holds.

Guarantees:
1. Every token of a row comes from version `lease.min_version` or a newer one, and says which.
2. A row is answered as soon as its last sample ends; rows do not wait for each other.
3. New weights are followed in the background. A version that does not cover the model exactly, or arrives damaged, is
   not taken: the old one goes on, and rows that need a newer one fail as this maker's failure, not as the run's.
4. A row that cannot fit the context fails as data, with its numbers.
5. Asleep it holds no device memory. Rows in progress end before it sleeps; a row that comes meanwhile waits; and after
   waking the newest weights are in before the next row.
6. The same lease seed and the same weights give the same tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
import time
from collections.abc import Callable, Mapping

import numpy as np

from buffer.columns import FINISHED_BY_LENGTH, FINISHED_BY_STOP, Columns, nbytes
from buffer.records import DataFailure, InfraFailure, Lease, Produced, Prompt
from makers import parity
from makers.config import RolloutMaker as RolloutMakerConfig
from makers.engines.engine import NO_VERSION, Engine, GroupRequest, Sample
from makers.parity import Probe
from makers.prompt_ids import PromptEncoder
from weights.client import WeightClient

logger = logging.getLogger(__name__)

OVERSUBSCRIPTION = (
    1.5  # a group holds its slot until its longest sample ends; more groups keep the engine full meanwhile
)
POLL_SECONDS = 20.0  # one long poll for new weights
UPDATE_ATTEMPTS = 3  # failed updates in a row after which rows no longer wait for them
RETRY_SECONDS = 0.5  # after the first failed update; doubles up to MAX_RETRY_SECONDS
MAX_RETRY_SECONDS = 30.0


class RolloutMaker:
    """Fills the stage `rollout`; see buffer/columns.py for its columns."""

    stage = "rollout"
    needs: tuple[str, ...] = ()

    def __init__(
        self,
        config: RolloutMakerConfig,
        *,
        name: str,
        model_path: str,
        engine: Engine,
        weights: WeightClient | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.slots = math.ceil(OVERSUBSCRIPTION * config.engine.max_num_seqs / config.sampling.n)
        self._config = config
        self._name = name
        self._model_path = model_path
        self._engine = engine
        self._weights = weights
        self._clock = clock
        self._encoder: PromptEncoder | None = None
        self._follower: asyncio.Task[None] | None = None
        self._changed = asyncio.Condition()  # the version, the number of failed updates, or whether it is asleep
        self._device = asyncio.Lock()  # held by an update, and by sleep until it ends
        self._turn = asyncio.Lock()  # one sleep() or wake() at a time
        self._asleep = False
        self._waiting = 0  # rows that wait for a version
        self._updates = 0
        self._failures = 0  # updates that failed since the last one that did not
        self._update_error: str | None = None
        self._seconds_syncing = 0.0

    async def start(self) -> None:
        """Engine up, and the newest published version in it. Where nothing is published yet it is taken later."""
        # One after the other: both import transformers, and two threads in its circular imports can meet half a module.
        await self._engine.start()
        self._encoder = await asyncio.to_thread(PromptEncoder, self._model_path)
        if self._weights is None:
            return
        await self._take_newest(self._weights)
        self._follower = asyncio.create_task(self._follow(self._weights), name=f"{self._name}: follow the weights")

    async def make(self, lease: Lease, inputs: Mapping[str, Columns]) -> tuple[Produced, Columns]:
        request = self._request(lease)
        try:
            async with asyncio.timeout(lease.timeout):
                await self._wait_for_version(lease)
                entered = self._clock()
                samples = await self._engine.generate(request)
        except TimeoutError as error:
            raise InfraFailure(
                f"maker {self._name}: row {lease.row_id} not generated within {lease.timeout:g} s "
                f"(holds version {self._engine.version}, the row needs {lease.min_version})"
            ) from error
        except ValueError as error:
            raise DataFailure(
                f"row {lease.row_id} (prompt {lease.prompt.id!r}): refused by the engine: {error}"
            ) from error
        columns = _columns(request, samples)
        return _produced(columns, samples, self._clock() - entered), columns

    async def probe(self) -> Probe:
        """What it answers to the text of `makers.parity`, greedily. Raises InfraFailure while it holds no version."""
        if self._engine.version == NO_VERSION:
            raise InfraFailure(f"maker {self._name}: holds no version of the weights")
        assert self._encoder is not None, "probe() before start()"
        prompt_ids = self._encoder.encode(Prompt("parity", parity.TEXT, {}))
        request = GroupRequest(prompt_ids, seeds=[0], temperature=0.0, max_tokens=parity.TOKENS)
        [sample] = await self._engine.generate(request)
        first, last = int(sample.versions[0]), int(sample.versions[-1])
        if first != last:  # new weights came in the middle: of these it is not sure
            return await self.probe()
        return Probe(first, tuple(map(int, sample.token_ids)), tuple(map(float, sample.logprobs)))

    def status(self) -> dict[str, float | int | str | None]:
        """The engine's counters; seconds of pulling and loading weights; rows waiting for a version; the last error."""
        return {
            **self._engine.status(),
            "waiting": self._waiting,
            "updates": self._updates,
            "update_failures": self._failures,
            "update_error": self._update_error,
            "seconds_syncing": self._seconds_syncing,
        }

    async def sleep(self, level: int) -> None:
        """See makers.maker.Sleeper. Raises InfraFailure, and ValueError for level 2 where nobody would bring weights."""
        if level == 2 and self._weights is None:
            raise ValueError(
                f"maker {self._name}: sleep level 2 drops the weights, and no trainer publishes any: use 1"
            )
        async with self._turn:
            if self._asleep:
                return
            await self._note_sleep(True)
            try:
                async with contextlib.AsyncExitStack() as stack:
                    await stack.enter_async_context(self._device)
                    await self._engine.sleep(level)
                    stack.pop_all()  # held until wake()
            except BaseException:
                await self._note_sleep(False)
                raise

    async def wake(self) -> None:
        """See makers.maker.Sleeper. Where the newest weights cannot be had, they are followed as ever. Raises InfraFailure."""
        async with self._turn:
            if not self._asleep:
                return
            await self._engine.wake()
            try:
                if self._weights is not None:
                    await self._take_newest(self._weights)
            except Exception as error:
                logger.warning("maker %s: updating the weights after sleep failed: %r", self._name, error)
                await self._note_update(error)
            finally:
                self._device.release()
                await self._note_sleep(False)

    async def close(self) -> None:
        if self._follower is not None:
            self._follower.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._follower
        await self._engine.close()
        async with self._changed:
            self._changed.notify_all()

    def _request(self, lease: Lease) -> GroupRequest:
        assert self._encoder is not None, "make() before start()"
        sampling = self._config.sampling
        try:
            prompt_ids = self._encoder.encode(lease.prompt)
        except DataFailure as failure:
            raise DataFailure(f"row {lease.row_id}: {failure}") from failure
        longest = self._engine.max_model_len
        if len(prompt_ids) + sampling.max_tokens > longest:
            raise DataFailure(
                f"row {lease.row_id} (prompt {lease.prompt.id!r}): {len(prompt_ids)} prompt tokens + {sampling.max_tokens} "
                f"new tokens (sampling.max_tokens) exceed {longest} (engine.max_model_len)"
            )
        return GroupRequest(
            prompt_ids=prompt_ids,
            seeds=[_sample_seed(lease.seed, index) for index in range(lease.samples)],
            temperature=sampling.temperature,
            max_tokens=sampling.max_tokens,
            stop=sampling.stop,
        )

    async def _wait_for_version(self, lease: Lease) -> None:
        def ready() -> bool:
            ended = self._engine.status()["state"] in ("broken", "closed")
            if self._asleep and not ended:
                return False
            return ended or self._engine.version >= lease.min_version or self._failures >= UPDATE_ATTEMPTS

        self._waiting += 1
        try:
            async with self._changed:
                await self._changed.wait_for(ready)
        finally:
            self._waiting -= 1
        if self._engine.version < lease.min_version:
            raise InfraFailure(
                f"maker {self._name}: holds version {self._engine.version}, row {lease.row_id} needs {lease.min_version}; "
                f"{self._failures} updates in a row failed, the last with: {self._update_error}"
            )

    async def _follow(self, weights: WeightClient) -> None:
        """Consumes published versions; produces loaded ones; waits for a newer version; unblocked by its publication."""
        while self._engine.status()["state"] != "broken":
            try:
                await weights.wait_newer(self._engine.version, POLL_SECONDS)
                async with self._device:
                    await self._take_newest(weights)
            except Exception as error:
                logger.warning("maker %s: updating the weights failed: %r", self._name, error)
                await self._note_update(error)
                await asyncio.sleep(min(MAX_RETRY_SECONDS, RETRY_SECONDS * 2 ** (self._failures - 1)))

    async def _take_newest(self, weights: WeightClient) -> None:
        if await weights.wait_newer(self._engine.version, 0.0) > self._engine.version:
            await self._update(weights)

    async def _update(self, weights: WeightClient) -> None:
        began = self._clock()
        try:
            manifest, buckets = await weights.pull()
            between = self._config.update == "between_rows"
            await self._engine.load_weights(manifest, buckets, between_groups=between)
        finally:
            self._seconds_syncing += self._clock() - began
        await self._note_update(None)

    async def _note_sleep(self, asleep: bool) -> None:
        async with self._changed:
            self._asleep = asleep
            self._changed.notify_all()

    async def _note_update(self, error: Exception | None) -> None:
        async with self._changed:
            if error is None:
                self._updates, self._failures, self._update_error = self._updates + 1, 0, None
            else:
                self._failures, self._update_error = self._failures + 1, repr(error)
            self._changed.notify_all()


def _sample_seed(lease_seed: int, index: int) -> int:
    """Far apart even for neighbouring lease seeds, so that no two groups share a sample's random numbers."""
    digest = hashlib.blake2b(f"{lease_seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _columns(request: GroupRequest, samples: list[Sample]) -> Columns:
    lengths = [sample.token_ids.size for sample in samples]
    reasons = [FINISHED_BY_LENGTH if sample.truncated else FINISHED_BY_STOP for sample in samples]
    return {
        "prompt_ids": np.asarray(request.prompt_ids, np.int32),
        "response_ids": np.concatenate([sample.token_ids for sample in samples]),
        "response_offsets": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        "behaviour_logprobs": np.concatenate([sample.logprobs for sample in samples]),
        "policy_versions": np.concatenate([sample.versions for sample in samples]),
        "finish_reasons": np.asarray(reasons, np.int8),
        # Greedy samples come with the log-probs of the distribution as it is.
        "temperatures": np.full(len(samples), request.temperature or 1.0, np.float32),
    }


def _produced(columns: Columns, samples: list[Sample], seconds: float) -> Produced:
    lengths = np.diff(columns["response_offsets"])
    versions = columns["policy_versions"]
    return Produced(
        samples=len(samples),
        tokens=int(versions.size),
        nbytes=nbytes(columns),
        min_version=int(versions.min()),
        max_version=int(versions.max()),
        seconds=seconds,
        stats={
            "truncated": float(np.mean([sample.truncated for sample in samples])),
            "response_length_mean": float(lengths.mean()),
            "response_length_max": float(lengths.max()),
        },
    )
