"""What goes wrong in or around a run that began well, through the command line alone.

A row that cannot be made costs the row; what the run cannot do without ends it with exit code 3 and the cause in the last
line; the last checkpoint stays valid, and no process is left.
"""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import (
    TANDEM,
    TINY,
    Command,
    SmallDisk,
    assert_nothing_left,
    data,
    events,
    function,
    processes_of,
    status,
    tandem,
    wait_for,
)
from topology.runs import read_json

REWARDS = """
import time


def by_kind(completions, kind, **fields):
    if kind == "raises":
        raise ValueError("no luck [/today]")
    if kind == "nan":
        return [float("nan")] * len(completions)
    if kind == "too_few":
        return [1.0]
    if kind == "hangs":
        time.sleep(3600)
    return [float(len(text) % 3) for text in completions]


def always_raises(completions, **fields):
    raise ValueError("no luck [/today]")
"""

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("runs")
    (folder / "my_rewards.py").write_text(REWARDS)
    yield folder
    for process in processes_of(folder):
        process.kill()


KINDS = ["fine", "fine", "raises", "fine", "too_long", "fine", "nan", "fine", "too_few", "fine", "hangs"]
KINDS += ["fine"] * 5 + ["too_long"]
FAILURES = {
    2: "reward function by_kind on row 2 (prompt mixed/2): raised ValueError: no luck [/today] (my_rewards.py, line 7)",
    4: "tokens",
    6: "reward function by_kind on row 6 (prompt mixed/6): returned nan for completion 0: a finite float32 is needed",
    8: "reward function by_kind on row 8 (prompt mixed/8): returned 1 values for 4 completions",
    10: "reward function by_kind on row 10 (prompt mixed/10): did not return within 2 s; its process was killed",
    16: "tokens",
}


def test_rows_that_fail_as_data_are_counted_and_named_and_the_run_ends_where_the_data_does(workplace: Path) -> None:
    rows = [{"prompt": "x" * 400 if kind == "too_long" else f"{i} + 1?", "kind": kind} for i, kind in enumerate(KINDS)]
    settings = [data(workplace, "mixed", *rows), "prompts.epochs=1", function("my_rewards:by_kind", timeout=2)]
    settings += ["trainers.policy.steps=9"]
    done = tandem(workplace, "run", TINY, "--name", "mixed", *(p for s in settings for p in ("--set", s)))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "run mixed: done at step 2 of 9 (the prompts ended before the last step)" in done.stdout
    found = status(workplace, "mixed")
    assert (found["state"], found["cause"]) == ("done", "the prompts ended before the last step")
    ledger = found["ledger"]
    assert (ledger["admitted"], ledger["trained"]) == (len(KINDS), 8)
    assert ledger["dropped"] == {"data": len(FAILURES)}
    assert ledger["in_flight"] == len(KINDS) - 8 - len(FAILURES)
    log = tandem(workplace, "logs", "mixed", "buffer").stdout.splitlines()
    for row, text in FAILURES.items():
        assert any(f"row {row} (prompt mixed/{row})" in line and text in line for line in log), (row, text)
    end = next(event for event in events(workplace, "mixed") if event["event"] == "end_of_data")
    assert end["cause"].startswith("4 rows wanted, 3 can still come: 17 prompts were taken and there are no more")
    assert_nothing_left(workplace / "runs/mixed")


def test_a_reward_function_that_always_fails_ends_the_run_with_its_name_and_a_row(workplace: Path) -> None:
    settings = ("--set", function("my_rewards:always_raises"), "--set", "buffer.max_data_failures=5")
    done = tandem(workplace, "run", TINY, "--name", "hopeless", *settings)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("run hopeless failed: buffer: 6 rows failed as data with no complete row between them")
    assert "(buffer.max_data_failures is 5)" in last
    assert "reward function always_raises on row " in last
    assert last.endswith(": raised ValueError: no luck [/today] (my_rewards.py, line 18)")
    (listed,) = (line for line in tandem(workplace, "list").stdout.splitlines() if line.strip().startswith("hopeless"))
    assert listed.split()[1:3] == ["failed", "0/4"]
    assert_nothing_left(workplace / "runs/hopeless")


def test_ctrl_c_before_the_first_step_leaves_nothing(workplace: Path) -> None:
    with Command(workplace, "run", TINY, "--name", "early") as process:
        wait_for(lambda: processes_of(workplace / "runs/early"), 60, "a process of the run")
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "interrupted" in output
    assert "Traceback" not in output
    assert status(workplace, "early")["state"] == "stopped"
    assert_nothing_left(workplace / "runs/early")


@pytest.mark.parametrize("when", ["starting", "running"])
def test_two_sigterms_in_a_row_stop_the_run_as_one_does(workplace: Path, when: str) -> None:
    name = f"twice-{when}"
    run = workplace / "runs" / name
    with Command(workplace, "run", TINY, "--name", name, "--set", "trainers.policy.steps=100000") as process:
        wait_for(lambda: processes_of(run), 60, "a process of the run")
        if when == "running":
            wait_for(lambda: (read_json(run / "status.json") or {}).get("step"), 120, "a step")
        for _ in range(2):
            process.send_signal(signal.SIGTERM)
            time.sleep(0.3)
        output, _ = process.communicate(timeout=90)
    assert process.returncode == 130, output
    assert "interrupted" in output
    assert "Traceback" not in output
    assert status(workplace, name)["state"] == "stopped"
    assert_nothing_left(run)


# --- a full disk, a killed command, Ctrl-C ----------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[SmallDisk]:
    disk = SmallDisk(tmp_path, 100)
    yield disk
    for process in processes_of(tmp_path):
        process.kill()
    disk.close()


def test_a_full_disk_keeps_the_last_checkpoint_and_a_killed_command_keeps_the_run(
    small_disk: SmallDisk, tmp_path: Path
) -> None:
    def tandem_there(*args: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            small_disk.command(TANDEM, *args), capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == code, f"{args} exited with {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def state() -> dict[str, Any]:
        return json.loads(tandem_there("status", "tiny", "--json").stdout)

    def recorded(key: str) -> Any:  # cheaper than the command to ask for again and again
        return (read_json(run / "status.json") or {}).get(key)

    run = small_disk.path("tiny")
    small_disk.fill(90)  # what is left is enough for one checkpoint of 5.3 MiB
    settings = ["--set", "checkpoint.every=1", "--set", "trainers.policy.steps=3"]
    with Command(tmp_path, "run", TINY, *settings, prefix=small_disk.command()) as started:
        wait_for((run / "status.json").exists, 60, "the run's folder")
        assert state()["state"] == "starting"
        wait_for(lambda: recorded("actors"), 60, "the run's actors")
        started.kill()
    assert started.wait() == -signal.SIGKILL
    assert "tiny  starting  0/3" in tandem_there("list").stdout
    assert (
        "run tiny is starting: stop it first with `tandem stop tiny`" in tandem_there("resume", "tiny", code=2).stderr
    )
    assert "run name `tiny` is in use" in tandem_there("run", TINY, code=2).stderr

    wait_for(lambda: recorded("state") not in ("starting", "running"), 120, "the end of the run")
    ended = state()
    assert (ended["state"], ended["step"]) == ("failed", 3), ended
    assert "checkpoint step-000003 was not written" in ended["cause"]
    assert "MiB free" in ended["cause"]
    assert "the previous one, step-000001, is untouched: `tandem resume` goes on from it" in ended["cause"]
    assert "\n" not in ended["cause"]
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["latest", "step-000001"]
    kinds = [json.loads(line)["event"] for line in (run / "events.jsonl").read_text().splitlines()]
    assert kinds.count("checkpoint_failed") == 2
    assert_nothing_left(tmp_path / "runs/tiny")

    small_disk.free()
    going_on = ["resume", "tiny", "--set", "trainers.policy.steps=100000", "--set", "checkpoint.every=null"]
    with Command(tmp_path, *going_on, prefix=small_disk.command()) as resumed:
        wait_for(lambda: recorded("state") == "running" and recorded("step") >= 2, 120, "a step after the checkpoint")
        resumed.send_signal(signal.SIGINT)
        output, _ = resumed.communicate(timeout=60)
    assert resumed.returncode == 130, output
    assert "interrupted: run tiny is being stopped" in output
    stopped = state()
    assert stopped["state"] == "stopped"
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps[:4] == [1, 2, 3, 2]
    assert (run / f"checkpoints/step-{stopped['step']:06d}/meta.json").exists()
    assert_nothing_left(tmp_path / "runs/tiny")
