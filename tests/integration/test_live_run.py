"""A run that changes and survives while it trains, through the command line: makers come and go, processes are killed.

One run of the generated tiny model goes through all of it; each test reads what the run folder and the status say.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import TINY, assert_nothing_left, events, lines, processes_of, status, tandem, wait_for
from topology.runs import read_json

pytestmark = pytest.mark.timeout(420)
SETTINGS = ("trainers.policy.steps=100000", "checkpoint.every=5", "buffer.max_attempts=20")
OTHER_SAMPLING = """
kind: rollout
engine: {type: vllm, dtype: float32, max_model_len: 128, max_num_seqs: 8}
sampling: {n: 4, temperature: 1.0, max_tokens: 6}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("live")
    yield folder
    for process in processes_of(folder):
        process.kill()


@pytest.fixture(scope="module")
def run(folder: Path) -> Iterator[Path]:
    """The folder of a tiny run that trains on and on."""
    sets = [part for setting in SETTINGS for part in ("--set", setting)]
    done = tandem(folder, "run", TINY, "--detach", *sets)
    assert done.returncode == 0, done.stdout + done.stderr
    run = folder / "runs/tiny"
    wait_for(lambda: (recorded(run).get("step") or 0) >= 6, 120, "a checkpoint")
    yield run
    done = tandem(folder, "stop", "tiny")
    assert done.returncode == 0, done.stdout + done.stderr


def recorded(run: Path) -> dict[str, Any]:
    return read_json(run / "status.json") or {}


def actor(run: Path, name: str) -> dict[str, Any] | None:
    return next((row for row in recorded(run).get("actors", []) if row["name"] == name), None)


def goes_on(run: Path, steps: int = 3, timeout: float = 90) -> None:
    """So many steps more than now."""
    now = recorded(run)["step"]
    wait_for(lambda: recorded(run)["step"] >= now + steps or recorded(run)["state"] == "failed", timeout, "more steps")
    assert recorded(run)["state"] == "running", recorded(run)["cause"]


def kill(run: Path, name: str, number: signal.Signals = signal.SIGKILL) -> int:
    found = actor(run, name)
    assert found is not None
    assert found["pid"] is not None
    os.kill(found["pid"], number)
    return found["pid"]


def back(run: Path, name: str, pid: int) -> Callable[[], bool]:
    def there() -> bool:
        found = actor(run, name)
        return found is not None and found["state"] == "healthy" and found["pid"] not in (None, pid)

    return there


def told(folder: Path, kind: str, **fields: Any) -> list[dict[str, Any]]:
    return [
        event
        for event in events(folder, "tiny")
        if event["event"] == kind and all(event.get(key) == value for key, value in fields.items())
    ]


def committed_by(run: Path) -> set[str]:
    import pyarrow.parquet as pq

    return {maker for file in (run / "rows").glob("*.parquet") for maker in pq.read_table(file)["maker"].to_pylist()}


def test_makers_that_are_attached_agree_with_the_others_before_they_work(folder: Path, run: Path) -> None:
    done = tandem(folder, "attach", "tiny", "rollout")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "attached to run tiny: maker/rollout/1\n"
    (parity,) = told(folder, "parity", maker="maker/rollout/1")
    assert parity["against"] == "maker/rollout/0"
    assert 0 <= parity["nats"] < 0.05
    found = actor(run, "maker/rollout/1") or {}
    assert found["state"] == "healthy"
    goes_on(run)


def test_a_group_that_the_run_never_had_is_attached_from_a_file(folder: Path, run: Path) -> None:
    (folder / "short.yaml").write_text(OTHER_SAMPLING)
    done = tandem(folder, "attach", "tiny", "short", "--maker", "short.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "attached to run tiny: maker/short/0\n"
    assert "short:" in (run / "config.yaml").read_text()
    goes_on(run)


@pytest.mark.parametrize(
    ("arguments", "section", "message"),
    [
        (("nobody",), None, "makers.nobody: there is no such group in run tiny (there are: rollout, reward"),
        (("rollout", "--maker", "new.yaml"), "kind: rollout", "run tiny has that group"),
        (("new", "--maker", "new.yaml"), "kind: rollot", "unknown kind"),
        (("new", "--maker", "new.yaml"), "kind: reward\nfunctionz: []", "functionz: unknown key"),
        (("new", "--maker", "new.yaml"), "kind: reference", "would fill the column `reference`, which nobody"),
        (("new", "--maker", "new.yaml"), "kind: rollout\nsampling: {n: 3}", "sampling.n"),
        (
            ("new", "--maker", "new.yaml"),
            "kind: reward\nfunctions: [{path: 'nowhere:score'}]",
            "makers.new.functions: differ",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_the_reason_and_the_run_goes_on(
    folder: Path, run: Path, arguments: tuple[str, ...], section: str | None, message: str
) -> None:
    before = (run / "config.yaml").read_text()
    if section is not None:
        (folder / "new.yaml").write_text(section + "\n")
    done = tandem(folder, "attach", "tiny", *arguments)
    assert done.returncode == 2, done.stdout + done.stderr
    assert message in done.stderr
    assert (run / "config.yaml").read_text() == before
    assert actor(run, "maker/new/0") is None


def test_a_maker_that_is_detached_finishes_its_rows_and_is_gone(folder: Path, run: Path) -> None:
    found = actor(run, "maker/rollout/0")
    assert found is not None
    done = tandem(folder, "detach", "tiny", "maker/rollout/0")
    assert done.returncode == 0, done.stdout + done.stderr
    wait_for(lambda: actor(run, "maker/rollout/0") is None, 10, "the status without it")
    assert not Path(f"/proc/{found['pid']}").exists() or "zombie" in Path(f"/proc/{found['pid']}/status").read_text()
    goes_on(run)
    assert recorded(run)["failures"]["died"] == 0
    refused = tandem(folder, "detach", "tiny", "maker/rollout/0")
    assert refused.returncode == 2
    assert "run tiny has no such maker (there are: " in refused.stderr


@pytest.mark.parametrize("name", ["maker/rollout/1", "maker/reward/0"])
def test_a_maker_that_is_killed_is_made_anew_and_no_row_is_lost(folder: Path, run: Path, name: str) -> None:
    pid = kill(run, name)
    wait_for(back(run, name, pid), 90, f"{name} again")
    assert len(told(folder, "death", actor=name)) == 1
    assert len(told(folder, "restart", actor=name)) == 1
    goes_on(run)


@pytest.mark.parametrize("name", ["buffer", "weights"])
def test_a_service_that_is_killed_is_made_anew_and_training_goes_on(folder: Path, run: Path, name: str) -> None:
    pid = kill(run, name)
    wait_for(back(run, name, pid), 60, f"{name} again")
    goes_on(run)
    assert told(folder, "restart", actor="training") == []  # nothing of it was lost


@pytest.mark.parametrize("name", ["trainer/policy", "trainer/policy/rank/0"])
def test_a_trainer_that_is_killed_goes_on_from_the_last_checkpoint_while_the_makers_live(
    folder: Path, run: Path, name: str
) -> None:
    makers = {row["name"]: row["pid"] for row in recorded(run)["actors"] if row["kind"] == "maker"}
    restarts = len(told(folder, "restart", actor="training"))
    pid = kill(run, name)
    wait_for(back(run, name, pid), 90, f"{name} again")
    wait_for(lambda: len(told(folder, "restart", actor="training")) > restarts, 60, "the end of the restart")
    newest = told(folder, "restart", actor="training")[-1]
    assert newest["step"] % 5 == 0  # of a checkpoint
    goes_on(run)
    assert {row["name"]: row["pid"] for row in recorded(run)["actors"] if row["kind"] == "maker"} == makers
    assert recorded(run)["versions"]["trainer"] > newest["version"]


def test_a_maker_is_attached_while_training_is_down(folder: Path, run: Path) -> None:
    restarts = len(told(folder, "restart", actor="training"))
    kill(run, "trainer/policy/rank/0")
    wait_for(lambda: (actor(run, "trainer/policy") or {})["state"] != "healthy", 20, "training that is down")
    done = tandem(folder, "attach", "tiny", "reward")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "attached to run tiny: maker/reward/1\n"
    wait_for(lambda: len(told(folder, "restart", actor="training")) > restarts, 90, "the end of the restart")
    wait_for(lambda: (actor(run, "maker/reward/1") or {}).get("committed"), 30, "a row of the newcomer")


def test_a_run_without_a_maker_of_some_stage_waits_says_so_and_goes_on_when_one_comes(folder: Path, run: Path) -> None:
    for name in ("maker/rollout/1", "maker/short/0"):
        assert tandem(folder, "detach", "tiny", name, "--now").returncode == 0
    wait_for(lambda: recorded(run)["state"] == "waiting", 20, "the run that waits")
    assert recorded(run)["cause"] == "no maker for rollout: attach one"
    assert "waiting" in tandem(folder, "list").stdout
    done = tandem(folder, "attach", "tiny", "short", "--replicas", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    goes_on(run)


def test_the_supervisor_is_killed_and_another_goes_on_with_the_same_actors(folder: Path, run: Path) -> None:
    before = {row["name"]: row["pid"] for row in recorded(run)["actors"]}
    supervisor = next(p for p in processes_of(run) if "Supervisor" in " ".join(p.cmdline()))
    supervisor.send_signal(signal.SIGKILL)
    wait_for(lambda: told(folder, "adopted"), 60, "a supervisor that adopts the run")
    wait_for(lambda: time.time() - recorded(run)["time"] < 2, 30, "a new status")
    wait_for(
        lambda: {row["name"]: row["pid"] for row in recorded(run)["actors"]} == before, 30, "the actors that were there"
    )
    goes_on(run)


def test_all_actors_are_killed_at_once_and_come_back_though_nobody_is_left_who_calls_the_supervisor(
    folder: Path, run: Path
) -> None:
    adopted, pids = len(told(folder, "adopted")), {row["name"]: row["pid"] for row in recorded(run)["actors"]}
    for pid in (*pids.values(), recorded(run)["supervisor"]["pid"]):
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: len(told(folder, "adopted")) > adopted, 60, "a supervisor that adopts the run")
    for name, pid in pids.items():
        wait_for(back(run, name, pid), 90, f"{name} again")
    wait_for(lambda: recorded(run)["state"] == "running", 30, "the run that goes on")
    goes_on(run)


def test_nothing_is_left_and_the_ledger_closes_after_all_that(folder: Path, run: Path) -> None:
    done = tandem(folder, "stop", "tiny")
    assert done.returncode == 0, done.stdout + done.stderr
    found = status(folder, "tiny")
    ledger = found["ledger"]
    assert found["state"] == "stopped"
    assert ledger["admitted"] == ledger["trained"] + sum(ledger["dropped"].values()) + ledger["in_flight"]
    versions = [row["version/trainer"] for row in lines(run / "metrics.jsonl")]
    assert versions == sorted(versions)
    assert_nothing_left(run)
