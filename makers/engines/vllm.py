"""vLLM as an async rollout engine: one thread owns vLLM, callers wait on futures.

Guarantees, beside those of makers/engines/engine.py:
1. Every call into vLLM happens on one thread; between two steps it takes what was asked meanwhile, in order.
2. A group's caller is woken when the last of its samples ends; no other work is done for it per step.
3. After an exception inside vLLM (it cannot go on after one) every waiting and later call raises InfraFailure.
4. New weights are unpacked and verified off that thread: generation stops only for the load itself.

CPU is what has been measured. On GPU the same code runs with other settings (`engine_arguments`); it has not been run
on one yet.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from buffer.records import InfraFailure
from makers.config import VllmEngine
from makers.engines.engine import NO_VERSION, GroupRequest, Sample
from weights.manifest import Manifest, check_coverage

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 30.0  # longer than any single step or load should take


def _future() -> concurrent.futures.Future[Any]:
    """A future that its waiter cannot cancel, so that the thread may always set it."""
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()
    future.set_running_or_notify_cancel()
    return future


@dataclass
class _Counters:
    tokens_generated: int = 0
    seconds_generating: float = 0.0
    seconds_idle: float = 0.0
    seconds_sync_pause: float = 0.0


@dataclass
class _Update:
    version: int
    weights: Any  # tensors by name, as the core takes them
    between_groups: bool
    done: concurrent.futures.Future[None] = field(default_factory=_future)


@dataclass
class _Sleep:
    level: int
    done: concurrent.futures.Future[None] = field(default_factory=_future)


@dataclass
class _Addition:
    group: int
    request: GroupRequest
    done: concurrent.futures.Future[list[Sample]] = field(default_factory=_future)


class InProcessVllm:
    """The Engine protocol on vLLM's own LLMEngine, in this process."""

    def __init__(
        self,
        config: VllmEngine,
        model_path: str,
        *,
        threads: int,
        seed: int,
        recompute: bool,
        version: int = NO_VERSION,
        sleeps: bool = False,
        core: Callable[..., Any] | None = None,
    ) -> None:
        self.max_model_len = config.max_model_len
        self._config = config
        self._model_path = model_path
        self._threads = threads
        self._seed = seed
        self._recompute = recompute
        self._first_version = version  # of the weights in the model folder
        self._sleeps = sleeps  # shares its device, and so has to be able to give the memory back
        self._make_core = core or _vllm_core
        self._core: Any = None
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._calls: dict[int, _Addition] = {}  # groups in the core
        self._held: deque[_Addition] = deque()  # groups that let an update go first
        self._update: _Update | None = None  # waits for the running groups to end
        self._sleep: _Sleep | None = None  # waits for the running groups to end
        self._asleep = False
        self._next_group = 0
        self._state = "new"
        self._cause = ""
        self._counters = _Counters()
        self._thread = threading.Thread(target=self._live, name="vllm", daemon=True)
        self._started: concurrent.futures.Future[None] = _future()

    async def start(self) -> None:
        self._state = "starting"
        self._thread.start()
        await asyncio.wrap_future(self._started)

    async def generate(self, request: GroupRequest) -> list[Sample]:
        call = _Addition(self._next_group, request)
        self._next_group += 1
        self._post(lambda: self._add(call))
        try:
            return await asyncio.wrap_future(call.done)
        except asyncio.CancelledError:
            self._inbox.put(lambda: self._abandon(call))
            raise

    async def load_weights(self, manifest: Manifest, buckets: Sequence[np.ndarray], *, between_groups: bool) -> None:
        self._require_alive()
        weights = await asyncio.to_thread(self._verify, manifest, buckets)
        update = _Update(manifest.version, weights, between_groups)
        self._post(lambda: self._take_update(update))
        await asyncio.wrap_future(update.done)

    async def sleep(self, level: int) -> None:
        request = _Sleep(level)
        self._post(lambda: self._take_sleep(request))
        try:
            await asyncio.wrap_future(request.done)
        except asyncio.CancelledError:
            self._inbox.put(self._rise)
            raise

    async def wake(self) -> None:
        done = _future()
        self._post(lambda: self._answer(done))
        await asyncio.wrap_future(done)

    @property
    def version(self) -> int:
        return NO_VERSION if self._core is None else int(self._core.version)

    def status(self) -> dict[str, float | int | str | None]:
        state = self._state
        if state == "ready" and self._asleep:
            state = "asleep"
        elif state == "ready" and self._core.quarantined is not None:
            state = "quarantined"
        return {
            "state": state,
            "version": self.version,
            "running": len(self._calls) + len(self._held),
            **vars(self._counters),
        }

    async def close(self) -> None:
        if self._state in ("new", "closed"):
            self._state = "closed"
            return
        self._inbox.put(self._stop)
        await asyncio.to_thread(self._thread.join, CLOSE_SECONDS)
        if self._thread.is_alive():
            raise InfraFailure(f"vLLM's thread did not end within {CLOSE_SECONDS:g} s of close()")

    def _require_alive(self) -> None:
        if self._state != "ready":
            raise InfraFailure(f"vLLM engine is {self._state}" + (f": {self._cause}" if self._cause else ""))

    def _post(self, act: Callable[[], None]) -> None:
        """Hand `act` to the thread. It is either run, or this raises: the thread empties its inbox once more after it
        has left the state `ready`."""
        self._inbox.put(act)
        self._require_alive()

    def _verify(self, manifest: Manifest, buckets: Sequence[np.ndarray]) -> Any:
        from makers.engines.shared import SharedWeights
        from weights.packing import unpack

        check_coverage(manifest, self._core.expected, what=f"the model in {self._model_path}")
        tensors = unpack(manifest, buckets)
        return SharedWeights(manifest, buckets) if self._config.workers > 1 else tensors

    # Below: on vLLM's thread only.

    def _live(self) -> None:
        """Consumes the inbox; produces finished groups; waits only when no group runs; unblocked by the inbox."""
        try:
            self._core = self._make_core(
                self._config,
                self._model_path,
                threads=self._threads,
                seed=self._seed,
                recompute=self._recompute,
                version=self._first_version,
                sleeps=self._sleeps,
            )
            self._state = "ready"
        except BaseException as error:
            self._state, self._cause = "broken", f"start failed: {error!r}"
            self._started.set_exception(InfraFailure(f"vLLM did not start on {self._model_path}: {error!r}"))
            return
        self._started.set_result(None)
        try:
            while self._state == "ready":
                self._take_inbox()
                self._update_when_due()
                self._sleep_when_due()
                self._step()
        except BaseException as error:
            logger.exception("vLLM failed")
            self._state, self._cause = "broken", f"vLLM failed: {error!r}"
        self._fail_waiting(InfraFailure(f"vLLM engine is {self._state}: {self._cause or 'closed'}"))
        self._core.close()

    def _take_inbox(self) -> None:
        if not self._core.running and self._update is None and self._sleep is None and self._inbox.empty():
            began = time.perf_counter()
            act = self._inbox.get()
            self._counters.seconds_idle += time.perf_counter() - began
            act()
        while not self._inbox.empty():
            self._inbox.get()()

    def _step(self) -> None:
        if not self._core.running or self._state != "ready":
            return
        began = time.perf_counter()
        finished = self._core.step()
        self._counters.seconds_generating += time.perf_counter() - began
        for group, samples in finished:
            self._counters.tokens_generated += sum(sample.token_ids.size for sample in samples)
            self._calls.pop(group).done.set_result(samples)

    def _add(self, call: _Addition) -> None:
        if self._asleep:
            call.done.set_exception(InfraFailure("vLLM engine is asleep"))
            return
        if self._update is not None or self._state != "ready":
            self._held.append(call)
            return
        try:
            self._core.add(call.group, call.request)
        except (ValueError, InfraFailure) as error:
            call.done.set_exception(error)
        except BaseException:
            self._held.append(call)  # failed with all others
            raise
        else:
            self._calls[call.group] = call

    def _abandon(self, call: _Addition) -> None:
        if call in self._held:
            self._held.remove(call)
        elif self._calls.pop(call.group, None) is not None and self._state == "ready":
            self._core.abort(call.group)

    def _take_update(self, update: _Update) -> None:
        if self._asleep:
            update.done.set_exception(InfraFailure(f"vLLM engine is asleep, version {update.version} has to wait"))
            return
        if self._update is not None:
            self._update.done.set_exception(InfraFailure(f"version {update.version} came before it was in use"))
        self._update = update

    def _update_when_due(self) -> None:
        update = self._update
        if update is None or (update.between_groups and self._core.running):
            return
        self._update = None
        began = time.perf_counter()
        try:
            self._core.load(update.version, update.weights)
        except Exception as error:
            logger.exception(
                "loading version %d failed; nothing is generated until a whole version is in", update.version
            )
            failure = InfraFailure(f"loading version {update.version} failed: {error!r}")
            for group in self._core.abort_all():
                self._calls.pop(group).done.set_exception(failure)
            update.done.set_exception(failure)
        else:
            self._counters.seconds_sync_pause += time.perf_counter() - began
            update.done.set_result(None)
        while self._held:
            self._add(self._held.popleft())

    def _take_sleep(self, request: _Sleep) -> None:
        if self._asleep or self._sleep is not None:
            request.done.set_exception(InfraFailure("vLLM engine is asleep already, or about to be"))
            return
        self._sleep = request

    def _sleep_when_due(self) -> None:
        request = self._sleep
        if request is None or self._core.running:
            return
        self._sleep = None
        try:
            self._core.sleep(request.level)
        except ValueError as error:
            request.done.set_exception(error)
        except BaseException as error:
            request.done.set_exception(InfraFailure(f"vLLM failed to fall asleep: {error!r}"))
            raise
        else:
            self._asleep = True
            request.done.set_result(None)

    def _rise(self) -> None:
        """Awake afterwards, and no sleep is asked for."""
        if self._sleep is not None:
            self._sleep.done.set_exception(InfraFailure("vLLM engine was woken before it was asleep"))
            self._sleep = None
        if self._asleep:
            self._core.wake()
            self._asleep = False

    def _answer(self, done: concurrent.futures.Future[Any]) -> None:
        try:
            self._rise()
        except BaseException as error:
            done.set_exception(InfraFailure(f"vLLM failed to wake up: {error!r}"))
            raise
        done.set_result(None)

    def _stop(self) -> None:
        self._state = "closed"

    def _fail_waiting(self, failure: InfraFailure) -> None:
        """Nobody waits any more: neither those in the core nor those still in the inbox."""
        while not self._inbox.empty():
            self._inbox.get()()
        calls: list[Any] = [*self._calls.values(), *self._held, self._update, self._sleep]
        for call in filter(None, calls):
            call.done.set_exception(failure)
        self._calls.clear()
        self._held.clear()
        self._update = self._sleep = None


def _vllm_core(config: VllmEngine, model_path: str, *, threads: int, **settings: Any) -> Any:
    from makers.engines.vllm_core import VllmCore, prepare_environment

    prepare_environment(threads, config.workers)
    return VllmCore(config, model_path, **settings)
