"""The run folder, read without a cluster."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path

import psutil
import pytest

from topology.config import ConfigError
from topology.runs import RunError, RunFolder, existing_run, process_alive, run_folder, wait_for_file, write_json


@pytest.mark.parametrize("name", ["..", "A", "", ".hidden", "x" * 64, "a b"])
def test_a_run_name_cannot_leave_the_folder_of_runs(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="run name"):
        run_folder(name, tmp_path)


def test_a_run_can_be_named_by_its_folder(tmp_path: Path) -> None:
    assert run_folder(f"{tmp_path}/abc").path == tmp_path / "abc"


def test_runs_are_in_the_folder_that_the_environment_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TANDEM_RUNS", str(tmp_path))
    assert run_folder("abc").path == tmp_path / "abc"
    monkeypatch.setenv("TANDEM_RUNS", "")
    assert run_folder("abc").path == Path.cwd() / "runs/abc"


def test_a_node_that_does_not_see_the_run_folder_says_so(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "abc")
    with pytest.raises(RunError, match=r"does not see the run folder .*abc.*TANDEM_RUNS"):
        folder.require_here()
    folder.create()
    folder.config.touch()
    folder.require_here()


def test_an_unknown_run_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    (tmp_path / "known").mkdir()
    (tmp_path / "known" / "config.yaml").touch()
    with pytest.raises(ConfigError, match=r"no run `other` .*runs there: known"):
        existing_run("other", tmp_path)


def test_a_run_whose_cluster_is_gone_without_a_last_word_has_failed(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    write_json(folder.status_file, {"name": "x", "state": "running", "step": 3})
    write_json(folder.cluster_file, {"address": "x", "keeper": os.getpid(), "keeper_started": 1.0})
    assert folder.status()["state"] == "failed"
    started = psutil.Process().create_time()
    write_json(folder.cluster_file, {"address": "x", "keeper": os.getpid(), "keeper_started": started})
    assert folder.status()["state"] == "running"


def test_an_ended_run_keeps_its_last_status(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    write_json(folder.status_file, {"name": "x", "state": "done", "step": 3})
    assert folder.status() == {"name": "x", "state": "done", "step": 3}


def test_a_process_id_that_was_used_again_does_not_count_as_alive() -> None:
    assert process_alive(os.getpid(), psutil.Process().create_time())
    assert not process_alive(os.getpid(), psutil.Process().create_time() - 1000)


def test_two_processes_cannot_resume_a_run_at_once(tmp_path: Path) -> None:
    with (
        RunFolder(tmp_path).being_resumed(),
        pytest.raises(ConfigError, match="is being resumed by another process"),
        RunFolder(tmp_path).being_resumed(),
    ):
        pass
    with RunFolder(tmp_path).being_resumed():  # the first is through
        pass


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "is broken: Expecting property name"),
        ("[]", "is broken: an object is expected, found list"),
        ('"running"', "is broken: an object is expected, found str"),
        ('{"state": "running"}', "is broken: it has no name, step"),
    ],
)
def test_a_broken_status_is_told_with_its_file(text: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text(text)
    with pytest.raises(RunError, match=rf"status\.json {told}"):
        RunFolder(tmp_path).status()


def test_a_folder_in_the_place_of_a_status_is_told(tmp_path: Path) -> None:
    (tmp_path / "status.json").mkdir()
    with pytest.raises(RunError, match=r"status\.json cannot be read: Is a directory"):
        RunFolder(tmp_path).status()


def test_a_damaged_line_of_metrics_is_left_out(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.metrics.write_text('{"step": 1}\n\0\0}\n[2]\n{"step": 3}\n')
    assert folder.tail(folder.metrics, 10) == [{"step": 1}, {"step": 3}]


def test_a_half_written_last_line_of_metrics_is_left_out(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.metrics.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert folder.tail(folder.metrics, 10) == [{"step": 1}, {"step": 2}]


def test_the_token_is_readable_by_its_owner_alone(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.write_token()
    assert stat.S_IMODE(folder.token_file.stat().st_mode) == 0o600
    assert len(folder.token_file.read_text()) == 64


def test_waiting_for_a_file_ends_with_the_process_that_should_write_it(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="the cluster ended before it was ready"):
        wait_for_file(tmp_path / "x", 5, lambda: False, "the cluster")
    with pytest.raises(TimeoutError, match="the cluster was not ready within 0 s"):
        wait_for_file(tmp_path / "x", 0.1, lambda: True, "the cluster")


def test_the_tail_of_a_long_file_is_its_last_whole_lines(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.metrics.write_text("".join(f'{{"step": {step}, "filler": "{"x" * 400}"}}\n' for step in range(200)))
    assert [row["step"] for row in folder.tail(folder.metrics, 2)] == [198, 199]
    assert [row["step"] for row in folder.tail(folder.metrics, 1000)] == list(range(200))
    assert folder.tail(folder.events, 2) == []


def test_a_run_in_a_joined_cluster_has_failed_once_its_supervisor_is_silent(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    write_json(folder.cluster_file, {"address": "x", "keeper": None})
    for silent, state in ((5.0, "running"), (1000.0, "failed")):
        write_json(folder.status_file, {"name": "x", "state": "running", "step": 3, "time": time.time() - silent})
        assert folder.status()["state"] == state
