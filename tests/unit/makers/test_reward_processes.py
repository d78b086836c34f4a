"""Reward functions in their processes: whatever one does, the row fails as data and the next row is scored."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from buffer.records import DataFailure, InfraFailure
from makers.config import RewardFunction
from makers.rewards.check import check_function, check_functions
from makers.rewards.pool import WorkerPool, labels

HERE = "tests.unit.makers.reward_functions"
pytestmark = pytest.mark.timeout(60)


def own(name: str, **values) -> RewardFunction:
    return RewardFunction(path=f"{HERE}:{name}", **values)


def run(scenario, *functions: RewardFunction, workers: int = 1):
    """Run `await scenario(pool)`, and see that no process of the pool is left."""

    async def main():
        pool = WorkerPool(functions, workers=workers, start_timeout=30.0)
        await pool.start()
        pids = pool.pids()
        assert len(pids) == workers
        try:
            return await scenario(pool)
        finally:
            pids += pool.pids()
            await pool.close()
            assert [pid for pid in pids if is_running(pid)] == []

    return asyncio.run(main())


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until_gone(pids: list[int], seconds: float = 10.0) -> list[int]:
    deadline = time.monotonic() + seconds
    while (left := [pid for pid in pids if is_running(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def test_several_functions_score_a_row_each_with_its_own_values():
    async def scenario(pool):
        assert pool.labels == ["exact_match", "length", "exact_match_2", "asynchronous"]
        scores = await pool.score("row 1", ["4", "four"], "2 + 2?", {"answer": "4", "words": "four"})
        assert scores.values == [[1.0, 0.0], [1.0, 4.0], [0.0, 1.0], [0.5, 0.5]]
        assert len(scores.seconds) == 4
        assert scores.seconds[3] >= 0.001
        again = await pool.score("row 2", ["5"], "2 + 2?", {"answer": "4", "words": "5"})
        assert again.values == [[0.0], [1.0], [1.0], [0.5]]

    exact = RewardFunction(name="exact_match")
    words = RewardFunction(name="exact_match", options={"field": "words"})
    run(scenario, exact, own("length"), words, own("asynchronous"))


def test_names_of_repeated_functions_are_unique():
    functions = [own("f"), RewardFunction(path="m:f_2"), own("f"), own("f")]
    assert labels(functions) == ["f", "f_2", "f_3", "f_4"]


BAD_ANSWERS = {
    "raise": r"raised ZeroDivisionError: no such luck \(reward_functions\.py, line \d+\)\n.*in _raise.*no such luck$",
    "leave": r"raised SystemExit: 5 .*\n.*SystemExit: 5$",
    "nan": "returned nan for completion 0: a finite float32 is needed",
    "inf": r"returned 1e\+39 for completion 0: a finite float32 is needed",
    "few": "returned 1 values for 2 completions",
    "text": r"returned '1\.0' \(str\) for completion 0: a number is needed",
    "none": r"returned None \(NoneType\) for completion 0",
    "scalar": r"returned 1\.0 \(float\): a list of 2 numbers is needed, one a completion",
}


def test_a_bad_answer_is_a_data_failure_that_names_function_and_row_and_keeps_the_process():
    async def scenario(pool):
        before = pool.pids()
        for how, message in BAD_ANSWERS.items():
            with pytest.raises(
                DataFailure, match=r"(?s)^reward function misbehave on row 7 \(prompt p/7\): " + message
            ):
                await pool.score("row 7 (prompt p/7)", ["a", "b"], "p", {"how": how})
            assert (await pool.score("row 8", ["a"], "p", {"how": "good"})).values == [[1.0]]
        assert pool.pids() == before
        assert pool.counts.errors == len(BAD_ANSWERS)
        assert pool.counts.restarts == 0

    run(scenario, own("misbehave"))


def test_what_a_function_prints_does_not_reach_the_protocol(capfd):
    async def scenario(pool):
        assert (await pool.score("row 1", ["a"], "p", {"how": "print"})).values == [[1.0]]
        assert (await pool.score("row 2", ["a"], "p", {"how": "print"})).values == [[1.0]]

    run(scenario, own("misbehave"))
    output = capfd.readouterr()
    assert output.out == ""
    assert output.err.count("raw bytes") == 2


@pytest.mark.parametrize(
    ("how", "message"),
    [("exit", r"ended its process \(exit code 3\)"), ("crash", r"ended its process \(signal 11, SIGSEGV\)")],
)
def test_a_function_that_ends_its_process_fails_the_row_and_the_next_row_gets_a_new_process(how, message):
    async def scenario(pool):
        (before,) = pool.pids()
        with pytest.raises(DataFailure, match="reward function misbehave on row 7: " + message):
            await pool.score("row 7", ["a"], "p", {"how": how})
        assert (await pool.score("row 8", ["a"], "p", {"how": "good"})).values == [[1.0]]
        assert pool.pids() != [before]
        assert (pool.counts.crashes, pool.counts.restarts, pool.counts.timeouts) == (1, 1, 0)

    run(scenario, own("misbehave"))


@pytest.mark.parametrize("how", ["spin", "sleep"])
def test_a_function_that_never_returns_is_killed_at_its_deadline_and_the_next_row_is_scored(how):
    async def scenario(pool):
        (stuck,) = pool.pids()
        start = time.monotonic()
        with pytest.raises(DataFailure, match=r"misbehave on row 7: did not return within 0\.3 s; its process was kil"):
            await pool.score("row 7", ["a"], "p", {"how": how})
        assert 0.3 <= time.monotonic() - start < 5.0
        assert not is_running(stuck)
        assert (await pool.score("row 8", ["a"], "p", {"how": "good"})).values == [[1.0]]
        assert (pool.counts.timeouts, pool.counts.crashes, pool.counts.restarts) == (1, 0, 1)

    run(scenario, own("misbehave", timeout=0.3))


def test_a_regular_expression_that_backtracks_for_ever_in_c_is_killed_too():
    async def scenario(pool):
        with pytest.raises(DataFailure, match=r"reward function regex on row 1: did not return within 0\.3 s"):
            await pool.score("row 1", ["a" * 64 + "b"], "p", {})
        assert (await pool.score("row 2", ["aaa"], "p", {})).values == [[1.0]]

    run(scenario, RewardFunction(name="regex", options={"pattern": "^(a+)+$"}, timeout=0.3))


def test_the_deadline_counts_for_each_function_and_names_the_slow_one():
    async def scenario(pool):
        with pytest.raises(DataFailure, match=r"reward function misbehave on row 1: did not return within 0\.2 s"):
            await pool.score("row 1", ["a"], "p", {"how": "sleep"})

    run(scenario, own("length", timeout=9.0), own("misbehave", timeout=0.2), own("length"))


def test_children_of_a_function_die_with_its_process(tmp_path: Path):
    file = tmp_path / "pid"

    async def scenario(pool):
        task = asyncio.create_task(pool.score("row 1", [str(file)], "p", {"how": "child"}))
        while not (file.exists() and file.read_text()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait([task])

    run(scenario, own("misbehave"))
    assert wait_until_gone([int(file.read_text())]) == []


def test_a_cancelled_row_does_not_give_its_answer_to_the_next():
    async def scenario(pool):
        task = asyncio.create_task(pool.score("row 1", ["a"], "p", {"how": "sleep"}))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await pool.score("row 2", ["a", "b"], "p", {"how": "good"})).values == [[1.0, 1.0]]

    run(scenario, own("misbehave"))


def test_rows_beyond_the_processes_wait_and_a_stuck_one_holds_only_its_own():
    async def scenario(pool):
        stuck = asyncio.create_task(pool.score("row 0", ["a"], "p", {"how": "sleep"}))
        await asyncio.sleep(0)
        rows = await asyncio.gather(*(pool.score(f"row {i}", ["a"], "p", {"how": "good"}) for i in range(1, 20)))
        assert [row.values for row in rows] == [[[1.0]]] * 19
        assert not stuck.done()
        with pytest.raises(DataFailure, match="row 0: did not return"):
            await stuck

    run(scenario, own("misbehave", timeout=0.5), workers=2)


def test_a_process_killed_while_idle_is_replaced_without_failing_a_row():
    async def scenario(pool):
        (pid,) = pool.pids()
        os.kill(pid, signal.SIGKILL)
        while pool.status()["workers_alive"]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert (await pool.score("row 1", ["a"], "p", {})).values == [[1.0]]
        assert pool.counts.restarts == 1

    run(scenario, own("length"))


def test_one_process_serves_many_rows_and_imports_nothing_heavy_itself():
    async def scenario(pool):
        for expected in (1.0, 2.0, 3.0):
            assert (await pool.score("row", ["a"], "p", {})).values == [[expected], [0.0]]

    run(scenario, own("counting"), own("heavy_modules"))


def test_columns_of_any_picklable_kind_arrive_and_others_fail_the_row():
    async def scenario(pool):
        assert (await pool.score("row 1", ["a"], "p", {"x": {1: (2, None)}, "y": b"\x00"})).values == [[1.0]]
        with pytest.raises(DataFailure, match="row 2: its columns cannot be sent to the reward functions"):
            await pool.score("row 2", ["a"], "p", {"x": lambda: 0})
        assert (await pool.score("row 3", ["\ud800", "é" * 100_000], "p", {})).values == [[1.0, 100_000.0]]

    run(scenario, own("length"))


def test_a_pool_that_cannot_import_its_function_does_not_start_and_leaves_nothing():
    async def main():
        pool = WorkerPool([own("lengths")], workers=2, start_timeout=30.0)
        with pytest.raises(InfraFailure, match="reward function lengths: .*has no 'lengths'; near: length"):
            await pool.start()
        assert pool.pids() == []

    asyncio.run(main())


def test_a_closed_pool_scores_no_more():
    async def main():
        pool = WorkerPool([own("misbehave")], workers=1, start_timeout=30.0)
        await pool.start()
        task = asyncio.create_task(pool.score("row 1", ["a"], "p", {"how": "sleep"}))
        await asyncio.sleep(0.05)
        await pool.close()
        with pytest.raises(InfraFailure, match="row 1: not scored, the reward maker was closed"):
            await task
        with pytest.raises(InfraFailure, match="row 2"):
            await pool.score("row 2", ["a"], "p", {"how": "good"})
        assert pool.pids() == []

    asyncio.run(main())


ORPHANS = """
import asyncio, sys
from makers.config import RewardFunction
from makers.rewards.pool import WorkerPool

async def main():
    function = RewardFunction(path="tests.unit.makers.reward_functions:misbehave", timeout=600)
    pool = WorkerPool([function], workers=3, start_timeout=30.0)
    await pool.start()
    tasks = [asyncio.create_task(pool.score("row", ["a"], "p", {"how": how})) for how in ("spin", "sleep")]
    await asyncio.sleep(0.3)
    print(*pool.pids(), flush=True)
    await asyncio.gather(*tasks)

asyncio.run(main())
"""


def test_no_process_survives_a_parent_that_is_killed():
    parent = subprocess.Popen([sys.executable, "-c", ORPHANS], stdout=subprocess.PIPE, text=True)
    try:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 3
        assert all(is_running(pid) for pid in pids)
    finally:
        parent.kill()
        parent.communicate(timeout=10)
    assert wait_until_gone(pids) == []


# asked before a run


def test_a_usable_function_passes_the_check():
    columns = ["answer", "words"]
    check_functions(
        [own("only_answer"), RewardFunction(name="exact_match"), own("Scaled", options={"scale": 1})], columns
    )


@pytest.mark.parametrize(
    ("function", "columns", "message"),
    [
        (own("lengths"), None, f"reward function {HERE}:lengths: .*has no 'lengths'; near: length"),
        (RewardFunction(path="no_such:f"), None, "reward function no_such:f: .*there is no module 'no_such'"),
        (own("needs_solution"), ["answer"], "needs the column solution; the prompts have: answer"),
        (RewardFunction(name="regex"), None, "reward function regex: option pattern is missing"),
        (RewardFunction(name="exact_match", options={"field": "a"}), ["b"], "exact_match: needs the column a"),
    ],
)
def test_an_unusable_function_is_refused_before_the_run(function, columns, message):
    with pytest.raises(ValueError, match=message):
        check_function(function, columns)


def test_a_module_that_takes_for_ever_to_import_is_refused_in_time(tmp_path: Path, monkeypatch):
    (tmp_path / "endless_module.py").write_text("import time\ntime.sleep(600)\n")
    (tmp_path / "ending_module.py").write_text("import os\nos._exit(0)\n")
    monkeypatch.chdir(tmp_path)  # the working folder is on the path of the functions
    with pytest.raises(ValueError, match="endless_module:f: importing took longer than 0.5 s"):
        check_function(RewardFunction(path="endless_module:f"), timeout=0.5)
    with pytest.raises(ValueError, match="ending_module:f: importing ended the interpreter"):
        check_function(RewardFunction(path="ending_module:f"))
