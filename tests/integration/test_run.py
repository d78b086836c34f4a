"""Whole runs of a tiny model through the command line: real Ray, real vLLM, real Megatron-core."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import command_line
from tests.command_line import TINY, assert_nothing_left, events, lines, processes_of, status
from topology.keeper import cluster_environment, start_keeper
from topology.runs import RunFolder, wait_for_file

SHORT = 5  # max_tokens of the second group; the first has 8

pytestmark = pytest.mark.timeout(300)


def tandem(folder: Path, *args: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = command_line.tandem(folder, *args)
    assert done.returncode == code, f"{args} exited with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def wait_until(folder: Path, name: str, wanted: Any, timeout: float = 120) -> dict[str, Any]:
    deadline = time.monotonic() + timeout
    while not wanted(found := status(folder, name)):
        assert time.monotonic() < deadline, f"run {name} did not get there: {found}"
        assert found["state"] not in ("failed", "stopped"), found
        time.sleep(0.5)
    return found


def metrics(folder: Path, name: str) -> list[dict[str, Any]]:
    return lines(folder / "runs" / name / "metrics.jsonl")


@pytest.fixture
def workplace(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    for process in processes_of(tmp_path / "runs"):
        process.kill()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run with two groups of rollout makers from start to end, looked at by several tests."""
    folder = tmp_path_factory.mktemp("finished")
    engine = "{type: vllm, dtype: bfloat16, max_model_len: 128, max_num_seqs: 8}"
    short = f"{{kind: rollout, engine: {engine}, sampling: {{n: 4, temperature: 1.3, max_tokens: {SHORT}}}}}"
    settings = ("makers.rollout.sampling.temperature=0.8", f"makers.short={short}")
    tandem(folder, "run", TINY, *(word for setting in settings for word in ("--set", setting)))
    return folder


def test_a_run_ends_at_its_last_step_and_leaves_no_process(finished: Path) -> None:
    found = status(finished, "tiny")
    assert (found["state"], found["step"], found["steps"]) == ("done", 4, 4)
    assert_nothing_left(finished / "runs" / "tiny")


def test_the_ledger_closes_in_rows_and_tokens(finished: Path) -> None:
    ledger = status(finished, "tiny")["ledger"]
    for counted in (ledger, ledger["tokens"]):
        assert counted["admitted"] == counted["trained"] + sum(counted["dropped"].values()) + counted["in_flight"]
    assert ledger["trained"] == 4 * 4


def test_every_step_has_metrics_within_the_staleness_bound(finished: Path) -> None:
    steps = metrics(finished, "tiny")
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    assert all(step["staleness/max"] <= 1 for step in steps)
    assert [step["version/trainer"] for step in steps] == [1, 2, 3, 4]
    assert all(step["bound_by"] in ("maker", "trainer", "reward", "sync") for step in steps)
    assert len(steps[0]) < 60


def test_in_every_step_trainer_and_makers_agree_on_the_log_probs_at_each_temperature(finished: Path) -> None:
    assert all(0 <= step["mismatch/kl"] < 1e-3 for step in metrics(finished, "tiny"))


def test_the_sampled_rows_are_on_disk_with_text_tokens_and_versions(finished: Path) -> None:
    from pyarrow import parquet

    table = parquet.read_table(finished / "runs/tiny/rows/step-000001.parquet")
    assert table.num_rows == 4 * 4
    record = table.to_pylist()[0]
    assert len(record["response_ids"]) == len(record["behaviour_logprobs"]) == len(record["policy_versions"])
    assert set(record["policy_versions"]) <= {0, 1}


def test_rows_say_which_maker_made_them_and_each_group_samples_in_its_own_way(finished: Path) -> None:
    """A generated model hardly ever ends a sample by itself: its length is the group's max_tokens."""
    from pyarrow import parquet

    files = sorted((finished / "runs/tiny/rows").glob("step-00000[1-4].parquet"))
    records = [record for file in files for record in parquet.read_table(file).to_pylist()]
    longest = {"maker/rollout/0": 8, "maker/short/0": SHORT}
    assert {record["maker"] for record in records} == longest.keys()
    for maker, tokens in longest.items():
        assert max(len(record["response_ids"]) for record in records if record["maker"] == maker) == tokens


def test_the_report_stands_alone(finished: Path) -> None:
    page = (finished / "runs/tiny/report.html").read_text()
    assert "<svg" in page
    assert "http://" not in page.replace("http://www.w3.org", "")


def test_a_name_in_use_is_refused_before_anything_starts(finished: Path) -> None:
    done = tandem(finished, "run", TINY, code=2)
    assert "run name `tiny` is in use" in done.stderr
    assert "tandem resume" in done.stderr


def test_both_makers_were_attached_and_the_run_says_so(finished: Path) -> None:
    attached = {event["maker"] for event in events(finished, "tiny") if event["event"] == "attach"}
    assert attached == {"maker/rollout/0", "maker/short/0", "maker/reward/0"}


def test_logs_and_list_show_the_run(finished: Path) -> None:
    assert "maker-rollout-0" in tandem(finished, "logs", "tiny").stdout
    assert "tiny" in tandem(finished, "list").stdout
    assert "has no log of `nobody`" in tandem(finished, "logs", "tiny", "nobody", code=2).stderr


def test_resume_goes_on_from_the_checkpoint(finished: Path) -> None:
    assert "nothing is left to do" in tandem(finished, "resume", "runs/tiny", code=2).stderr
    tandem(finished, "resume", "runs/tiny", "--set", "trainers.policy.steps=6")
    steps = metrics(finished, "tiny")
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5, 6]
    assert steps[-1]["version/trainer"] == 6


def test_an_exported_policy_loads_in_transformers_megatron_and_vllm(finished: Path) -> None:
    tandem(finished, "export", "runs/tiny", "exported")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert AutoModelForCausalLM.from_pretrained(finished / "exported").config.model_type == "llama"
    assert AutoTokenizer.from_pretrained(finished / "exported").chat_template
    again = ("--name", "again", "--set", "model.path=exported", "--set", "trainers.policy.steps=1")
    tandem(finished, "run", TINY, *again)
    assert metrics(finished, "again")[0]["mismatch/kl"] < 1e-3


def test_without_restarts_the_death_of_a_maker_ends_the_run_with_its_name_in_seconds(workplace: Path) -> None:
    settings = ("--set", "trainers.policy.steps=100000", "--set", "limits.restarts=0")
    tandem(workplace, "run", TINY, "--detach", *settings)
    found = wait_until(workplace, "tiny", lambda s: s["state"] == "running" and s["step"] >= 1)
    victim = next(actor for actor in found["actors"] if actor["name"] == "maker/rollout/0")
    os.kill(victim["pid"], signal.SIGKILL)
    killed = time.monotonic()
    while (found := status(workplace, "tiny"))["state"] not in ("failed", "done"):
        assert time.monotonic() - killed < 20
    assert found["state"] == "failed"
    assert found["cause"].startswith("maker/rollout/0: its process died")
    assert_nothing_left(workplace / "runs" / "tiny")


def test_stop_drains_writes_a_checkpoint_and_leaves_nothing(workplace: Path) -> None:
    tandem(workplace, "run", TINY, "--detach", "--set", "trainers.policy.steps=100000")
    wait_until(workplace, "tiny", lambda s: s["step"] >= 1)
    tandem(workplace, "stop", "tiny")
    found = status(workplace, "tiny")
    assert found["state"] == "stopped"
    meta = json.loads((workplace / f"runs/tiny/checkpoints/step-{found['step']:06d}/meta.json").read_text())
    assert meta["step"] == found["step"]
    assert_nothing_left(workplace / "runs" / "tiny")


NAMED_ACTORS = """
import sys, ray
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
print(sorted(actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)))
"""


def test_a_run_joins_a_cluster_by_its_address_and_leaves_no_actor_in_it(workplace: Path, monkeypatch: Any) -> None:
    cluster = RunFolder(workplace / "runs" / "cluster")
    cluster.create()
    cluster.write_token()
    keeper = start_keeper(cluster, cpus=4, gpus=None, object_store_bytes=1 << 29)
    address = wait_for_file(cluster.cluster_file, 60, lambda: keeper.poll() is None, "the cluster")["address"]
    for name, value in cluster_environment(cluster).items():
        monkeypatch.setenv(name, value)

    tandem(workplace, "run", TINY, "--set", f"cluster.address={address}", "--set", "trainers.policy.steps=2")

    assert status(workplace, "tiny")["state"] == "done"
    deadline = time.monotonic() + 20
    while (left := _named_actors(address)) != "[]":
        assert time.monotonic() < deadline, left
    keeper.terminate()
    assert keeper.wait(timeout=30) == 0


def _named_actors(address: str) -> str:
    command = [sys.executable, "-c", NAMED_ACTORS, address]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip()
