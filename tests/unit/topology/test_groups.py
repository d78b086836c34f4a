"""Groups of plain objects in this process; tests/integration/test_groups.py has the same on a cluster."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from topology.groups import DeviceGroup, RankError, function, groups, worker

pytestmark = pytest.mark.timeout(30)


@worker(group="counters")
class Counter:
    @function(dispatch=lambda n, i, data: (i, *data))
    def __init__(self, worker: int, start: int = 0) -> None:
        if start < 0:
            raise ValueError(f"start is {start}")
        self.worker = worker
        self.total = start
        self.release = threading.Event()

    @function(dispatch="slice", collect="flatten")
    def add(self, values: list[int], factor: int = 1) -> list[tuple[int, int]]:
        self.total += sum(values) * factor
        return [(self.worker, value * factor) for value in values]

    @function()
    def totals(self) -> int:
        return self.total

    @function(execute="first")
    def first(self) -> int:
        return self.worker

    @function()
    def wait(self, seconds: float) -> bool:
        return self.release.wait(seconds)

    def hidden(self) -> None: ...


def test_without_a_declaration_there_is_one_object_here_and_answers_have_the_shape_of_a_group() -> None:
    counter: Any = Counter(5)
    assert counter.add([1, 2], factor=10) == [(0, 10), (0, 20)]
    assert counter.totals() == [35]


def test_each_declared_worker_has_an_object_of_its_own_and_a_list_is_balanced_over_them() -> None:
    with groups(DeviceGroup("counters", workers=2)):
        counter: Any = Counter(0)
        assert counter.add([1, 2, 3, 4, 5]) == [(0, 1), (0, 2), (0, 3), (1, 4), (1, 5)]
        assert counter.totals() == [6, 9]
        assert counter.first() == 0


def test_futures_go_on_meanwhile_can_be_asked_again_and_can_be_awaited() -> None:
    with groups(DeviceGroup("counters", workers=2)):
        counter: Any = Counter(0)
        slow = counter.wait.future(0.3)
        with pytest.raises(TimeoutError, match=r"counters: wait\(\) has not answered within 0.01 s"):
            slow.result(timeout=0.01)
        assert not slow.done()
        assert slow.result(timeout=10) == [False, False]

        async def main() -> Any:
            return await counter.totals.future()

        assert asyncio.run(main()) == [0, 0]


def test_an_object_that_cannot_be_built_is_an_error_with_its_worker() -> None:
    with pytest.raises(RankError, match=r"rank counters/0 failed \(ValueError: start is -1\) in __init__\(\)"):
        Counter(-1)


def test_a_call_has_the_deadline_of_its_group() -> None:
    with groups(DeviceGroup("counters", timeout=0.05)):
        counter: Any = Counter(0)
        with pytest.raises(RankError, match=r"rank counters/0 did not answer within 0.05 s in wait\(\)"):
            counter.wait(0.3)


def test_only_what_is_marked_can_be_called_and_arguments_must_fit() -> None:
    counter: Any = Counter(0)
    with pytest.raises(AttributeError, match=r"Counter.hidden cannot be called on a group.*\(__init__, add, first"):
        counter.hidden()
    with pytest.raises(TypeError, match="missing a required argument: 'values'"):
        counter.add()
    with pytest.raises(TypeError, match="Counter.__init__ is dispatched by a callable: give start by position"):
        Counter(start=1)


def test_a_group_that_is_not_declared_in_the_block_is_named_with_those_that_are() -> None:
    with (
        groups(DeviceGroup("others")),
        pytest.raises(ValueError, match="group counters is not declared here, only: others"),
    ):
        Counter(0)


def test_a_class_of_several_groups_has_objects_in_each_and_its_methods_say_which_answers() -> None:
    @worker(group=("big", "small"))
    class Both:
        def __init__(self) -> None:
            self.calls = 0

        @function(group="big")
        def of_big(self) -> int:
            self.calls += 1
            return self.calls

        @function(group="small")
        def of_small(self) -> int:
            return self.calls

    with groups(DeviceGroup("big", workers=2), DeviceGroup("small")):
        both: Any = Both()
        assert both.of_big() == [1, 1]
        assert both.of_small() == [0]


def test_what_cannot_work_is_refused_where_it_is_written() -> None:
    with pytest.raises(ValueError, match="Wrong.go is of group b, the class of: a"):

        @worker(group="a")
        class Wrong:
            @function(group="b")
            def go(self) -> None: ...

    with pytest.raises(TypeError, match="go is async: a worker runs one plain method after another"):

        class Async:
            @function()
            async def go(self) -> None: ...

    with pytest.raises(ValueError, match="group a has 0 workers"):
        DeviceGroup("a", workers=0)
    with (
        pytest.raises(ValueError, match="groups a, a: a name stands twice"),
        groups(DeviceGroup("a"), DeviceGroup("a")),
    ):
        pass
