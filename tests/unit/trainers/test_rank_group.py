from __future__ import annotations

import asyncio
import pickle
import threading
from typing import Any

import pytest

from trainers.rank_group import LocalWorker, RankError, RankGroup

pytestmark = pytest.mark.timeout(30)


class Rank:
    def __init__(self, number: int) -> None:
        self.number = number
        self.release = threading.Event()

    def echo(self, *args: Any) -> tuple[Any, ...]:
        return (self.number, *args)

    def items(self, values: list[int]) -> list[int]:
        return [value * 10 for value in values]

    def fail(self) -> None:
        if self.number == 1:
            raise ValueError("bad tensor")
        self.release.wait(20)

    def thread(self) -> str:
        return threading.current_thread().name


class Silent:
    name = "trainer/policy/rank/1"

    async def invoke(self, method: str, *args: Any) -> Any:
        await asyncio.Event().wait()


def group(size: int) -> tuple[RankGroup, list[Rank]]:
    ranks = [Rank(i) for i in range(size)]
    return RankGroup([LocalWorker(rank, f"rank/{rank.number}") for rank in ranks], timeout=5.0), ranks


def test_all_ranks_get_the_same_arguments_and_answer_in_rank_order() -> None:
    ranks, _ = group(3)
    assert asyncio.run(ranks.call("echo", "a")) == [(0, "a"), (1, "a"), (2, "a")]


def test_first_calls_one_rank_and_returns_its_answer() -> None:
    ranks, _ = group(3)
    assert asyncio.run(ranks.call("echo", "a", execute="first")) == (0, "a")


def test_slice_cuts_every_argument_and_flatten_joins_the_answers() -> None:
    ranks, _ = group(2)
    assert asyncio.run(ranks.call("items", [1, 2, 3, 4], dispatch="slice", collect="flatten")) == [10, 20, 30, 40]


def test_slice_that_does_not_fit_is_refused_with_the_numbers() -> None:
    ranks, _ = group(2)
    with pytest.raises(ValueError, match="cannot slice 3 items over 2 ranks"):
        asyncio.run(ranks.call("items", [1, 2, 3], dispatch="slice"))


def test_callables_dispatch_and_collect() -> None:
    ranks, _ = group(3)
    answer = asyncio.run(ranks.call("echo", 5, dispatch=lambda n, i, data: (data[0] + i, n), collect=max))
    assert answer == (2, 7, 3)


def test_failing_rank_is_named_at_once_while_others_still_wait_for_it() -> None:
    ranks, plain = group(2)
    try:
        with pytest.raises(RankError, match=r"rank rank/1 failed \(ValueError: bad tensor\) in fail\(\)") as caught:
            asyncio.run(ranks.call("fail"))
    finally:
        plain[0].release.set()
    assert caught.value.rank == "rank/1"
    assert isinstance(caught.value.__cause__, ValueError)


def test_rank_that_does_not_answer_is_named_when_the_deadline_passes() -> None:
    ranks = RankGroup([LocalWorker(Rank(0), "rank/0"), Silent()], timeout=0.05)
    with pytest.raises(RankError, match=r"rank trainer/policy/rank/1 did not answer within 0.05 s in echo\(\)"):
        asyncio.run(ranks.call("echo"))


def test_calls_of_one_local_worker_share_one_thread() -> None:
    ranks, _ = group(1)

    async def main() -> list[str]:
        return [await ranks.call("thread", execute="first") for _ in range(3)]

    assert len(set(asyncio.run(main()))) == 1


def test_empty_group_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one worker"):
        RankGroup([], timeout=1.0)


def test_the_error_crosses_processes_with_all_it_says() -> None:
    error = pickle.loads(pickle.dumps(RankError("rank/1", "save", "failed (OSError: full)")))
    assert (error.rank, error.method, str(error)) == (
        "rank/1",
        "save",
        "trainer rank rank/1 failed (OSError: full) in save()",
    )
