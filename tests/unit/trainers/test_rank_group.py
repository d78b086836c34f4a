from __future__ import annotations

import asyncio
import pickle
import threading
from concurrent.futures import Future
from typing import Any

import pytest

from buffer.records import ColumnsLost
from trainers.dispatch import function
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

    def pairs(self, values: list[int]) -> tuple[list[int], list[int]]:
        return values, [value * 2 for value in values]

    @function(dispatch="slice", collect="flatten")
    def doubled(self, values: list[int]) -> list[int]:
        return [value * 2 for value in values]

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


@pytest.mark.parametrize(("items", "parts"), [(5, [3, 2]), (1, [1, 0]), (0, [0, 0]), (4, [2, 2])])
def test_slice_balances_a_list_and_a_worker_without_items_gets_an_empty_one(items: int, parts: list[int]) -> None:
    ranks, _ = group(2)
    answer = asyncio.run(ranks.call("echo", list(range(items)), "same", dispatch="slice"))
    assert [len(part) for _, part, _ in answer] == parts
    assert [item for _, part, _ in answer for item in part] == list(range(items))
    assert {shared for _, _, shared in answer} == {"same"}


def test_lists_of_different_lengths_are_not_sliced_together() -> None:
    ranks, _ = group(2)
    with pytest.raises(ValueError, match=r"lists of different lengths together: \[2, 3\] items"):
        asyncio.run(ranks.call("echo", [1, 2, 3], ["a", "b"], dispatch="slice"))


def test_flatten_joins_tuples_of_lists_position_by_position() -> None:
    ranks, _ = group(2)
    assert asyncio.run(ranks.call("pairs", [1, 2, 3], dispatch="slice", collect="flatten")) == ([1, 2, 3], [2, 4, 6])


def test_flatten_of_something_else_says_which_worker_gave_what() -> None:
    ranks, _ = group(2)
    with pytest.raises(TypeError, match="flatten joins lists, or tuples of lists; worker 0 gave a str"):
        asyncio.run(ranks.call("thread", collect="flatten"))


def test_a_marked_function_is_called_as_it_says_and_a_keyword_replaces_what_it_says() -> None:
    ranks, _ = group(2)
    assert asyncio.run(ranks.call(Rank.doubled, [1, 2, 3])) == [2, 4, 6]
    assert asyncio.run(ranks.call(Rank.doubled, [1, 2, 3], collect="none")) == [[2, 4], [6]]
    assert Rank(0).doubled([1]) == [2]  # on a plain object the mark changes nothing


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"dispatch": "some"}, "dispatch='some': use 'all', 'slice' or a callable"),
        ({"execute": "last"}, "execute='last': use 'all', 'first'"),
        ({"collect": "sum"}, "collect='sum': use 'none', 'flatten' or a callable"),
    ],
)
def test_a_word_that_is_not_known_is_refused_where_it_stands(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        function(**wrong)


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


@pytest.mark.parametrize(
    ("lost", "raised"), [([0, 1], ColumnsLost), ([0], RankError), ([1], RankError)], ids=["all", "first", "second"]
)
def test_only_a_call_that_no_rank_could_begin_is_told_apart_from_a_failure(lost: list[int], raised: type) -> None:
    class Lossy(Rank):
        def begin(self) -> None:
            if self.number in lost:
                raise ColumnsLost("the node died")

    ranks = RankGroup([LocalWorker(Lossy(number)) for number in range(2)], timeout=5.0)
    with pytest.raises(raised, match="the node died"):
        asyncio.run(ranks.call("begin"))


def test_empty_group_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one worker"):
        RankGroup([], timeout=1.0)


def test_the_error_crosses_processes_with_all_it_says() -> None:
    error = pickle.loads(pickle.dumps(RankError("rank/1", "save", "failed (OSError: full)")))
    assert (error.rank, error.method, str(error)) == (
        "rank/1",
        "save",
        "rank rank/1 failed (OSError: full) in save()",
    )


def test_a_method_that_answers_with_a_future_leaves_the_rank_free_until_that_is_done() -> None:
    class Writer(Rank):
        def write(self) -> Future[str]:
            self.writing: Future[str] = Future()
            return self.writing

    async def main() -> None:
        rank = Writer(0)
        ranks = RankGroup([LocalWorker(rank, "rank/0")], timeout=5.0)
        writing = asyncio.create_task(ranks.call("write"))
        await asyncio.sleep(0)
        assert await ranks.call("echo", "a") == [(0, "a")]
        assert not writing.done()
        rank.writing.set_exception(OSError("disk full"))
        with pytest.raises(RankError, match=r"rank rank/0 failed \(OSError: disk full\) in write"):
            await writing

    asyncio.run(main())
