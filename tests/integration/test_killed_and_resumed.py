"""Killed and resumed equals uninterrupted, bit by bit: real Ray, real vLLM, real Megatron-core, a tiny model.

One run is killed with SIGKILL, cluster and all, at one boundary after the other, and goes on from its checkpoint each time; it
is compared with a run of the same config that nothing interrupted. With `max_staleness: 0`, one rank and one maker, what
each step trains on is known beforehand. So that the last bits are known too, the model is in float32 and the engine holds
one group at a time, whose samples all have the same length: which sequences share an engine step then does not depend on
when rows arrive (on CPU the rounding of a matrix product depends on how many rows it has).

With a larger max_staleness it depends on the clock which version makes a row, so that two runs cannot be compared. What
holds then as well is that a resumed run trains on the rows of the checkpoint as they were, which is tested here with the
cut of a buffer that has complete rows.

Boundaries are held open, not hit by chance: a reward function waits for as long as a file is there, and the process whose
turn comes next is stopped meanwhile.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from pyarrow import parquet

from tests import command_line
from tests.command_line import TINY, assert_nothing_left, data, events, function, lines, processes_of, wait_for
from trainers.checkpoints import find_latest
from trainers.state_files import StateFile

pytestmark = pytest.mark.timeout(600)  # mostly the start of processes, on a busy machine

GROUPS, STEPS = 4, 8
PROMPTS = 2 * GROUPS  # an epoch ends after every second step
REWARD = """
import pathlib, time

def letters(completions, number, **_):
    # Every second prompt waits: two of the four of a step.
    hold = pathlib.Path(__file__).with_name(f"hold-{number // 4}")
    while number % 2 and hold.exists():
        time.sleep(0.01)
    return [len(set(text)) / 10 for text in completions]
"""
SETTINGS = (
    f"trainers.policy.steps={STEPS}",
    "trainers.policy.backend.dtype=float32",
    "trainers.policy.optimizer.lr=1.0e-3",
    "makers.rollout.engine={type: vllm, dtype: float32, max_model_len: 256, max_num_seqs: 4, kv_cache_gib: 0.0625}",
    "makers.rollout.sampling={n: 4, temperature: 1.0, max_tokens: 12}",
    "makers.reward.workers=4",
    function("rewards_of_test:letters", timeout=140),
    "buffer.max_staleness=0",
    "checkpoint={every: 2, keep: 2}",
)
# What a moment of the clock decides, not the training.
MOMENTARY = ("time", "tokens_per_s/", "idle/", "bound_by", "knob", "buffer/bytes", "buffer/age", "version/maker_")


def tandem(folder: Path, *args: str) -> str:
    done = command_line.tandem(folder, *args)
    assert done.returncode == 0, f"{args} exited with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def run(folder: Path, name: str, *more: str) -> None:
    words = [word for setting in SETTINGS for word in ("--set", setting)]
    prompts = data(folder, "prompts", *({"prompt": f"{n} and {n + 3} are", "number": n} for n in range(PROMPTS)))
    (folder / "rewards_of_test.py").write_text(REWARD)
    tandem(folder, "run", TINY, "--name", name, "--set", prompts, *words, *more)


@dataclass
class Victim:
    """A run that goes on by itself. `kills` has, by boundary, the last status before."""

    folder: Path
    name: str = "victim"
    kills: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        return self.folder / "runs" / self.name

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.path / "status.json").read_text())
        assert found["state"] in ("starting", "running"), found
        return found

    def hold(self, step: int) -> None:
        self._file(step).touch()

    def release(self, *steps: int) -> None:
        for step in steps:
            self._file(step).unlink(missing_ok=True)

    def _file(self, step: int) -> Path:
        return self.folder / f"hold-{(step - 1) % 2}"

    def wait_for(self, step: int, **wanted: Any) -> None:
        """Until the trainer has done this step and the status is as wanted (`phase`, or the number of rows by stage)."""

        def there() -> bool:
            status = self.status
            found = {**status["buffer"]["rows"], "phase": status["phase"]}
            return status["step"] == step and all(found.get(name) == value for name, value in wanted.items())

        wait_for(there, 120, f"step {step} with {wanted}")

    def wait_for_held_rows(self, step: int) -> None:
        """Until the trainer waits for the rows after this step, and all but those that are held are complete."""
        self.wait_for(step, phase="wait_for_batch", complete=GROUPS // 2, **{"reward/leased": GROUPS // 2})

    def stop_process(self, actor: str) -> int:
        [pid] = [row["pid"] for row in self.status["actors"] if row["name"] == actor]
        os.kill(pid, signal.SIGSTOP)
        return pid

    def stop_while_writing(self) -> bool:
        """Stop the trainer, who alone can end a checkpoint, when one is begun. False if it was faster."""
        deadline = time.monotonic() + 60
        while not (partial := list(self.checkpoints.glob(".partial-*"))):
            assert time.monotonic() < deadline
        trainer = self.stop_process("trainer/policy")
        time.sleep(0.1)  # a rename that was under way
        if not partial[0].exists():
            os.kill(trainer, signal.SIGCONT)
        return partial[0].exists()

    def resume(self, *more: str) -> None:
        tandem(self.folder, "resume", self.name, *more)

    def kill(self, boundary: str) -> None:
        """Everything of the run at once: its actors, its cluster and the keeper of that."""
        self.kills[boundary] = self.status
        for process in processes_of(self.path):
            with suppress(psutil.NoSuchProcess):  # without those before it, it has ended by itself
                process.kill()
        assert_nothing_left(self.path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("runs")
    yield folder
    for process in processes_of(folder / "runs"):
        process.kill()


@pytest.fixture(scope="module")
def uninterrupted(folder: Path) -> Path:
    run(folder, "uninterrupted")
    return folder / "runs/uninterrupted"


@pytest.fixture(scope="module")
def victim(folder: Path, uninterrupted: Path) -> Victim:
    """The run that was killed four times, after its end."""
    victim = Victim(folder)
    victim.hold(2)
    run(folder, victim.name, "--detach")
    victim.wait_for_held_rows(step=1)
    victim.stop_process("maker/rollout/0")
    victim.release(2)
    victim.wait_for(2, phase="wait_for_batch", complete=0, **{"rollout/leased": 2})
    wait_for(lambda: find_latest(victim.path).step == 2, 30, "the checkpoint of step 2")
    victim.kill("while rows are generated, at the end of an epoch")

    for actor, phase, step, boundary in (
        ("trainer/policy/rank/0", "train", 2, "in the middle of a step"),
        ("weights", "publish", 3, "during a publication"),
    ):
        victim.hold(3)
        victim.resume("--detach")
        victim.wait_for_held_rows(step=2)
        victim.stop_process(actor)
        victim.release(3)
        victim.wait_for(step, phase=phase)
        victim.kill(boundary)

    victim.hold(4)
    victim.resume("--detach")
    victim.wait_for_held_rows(step=3)
    assert tandem(folder, "checkpoint", victim.name).strip() == str(victim.checkpoints / "step-000003")
    for step in (4, 6):
        victim.hold(step + 1)
        victim.release(step)
        if victim.stop_while_writing():
            break
        victim.wait_for_held_rows(step)
        victim.hold(step + 2)
        victim.release(step + 1)
        victim.wait_for_held_rows(step + 1)
    victim.kill("while a checkpoint is written, after one with complete rows in the buffer")
    assert list(victim.checkpoints.glob(".partial-*"))
    victim.release(1, 2)
    victim.resume()
    return victim


def state_of(path: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Model and optimizer of the last checkpoint, by name."""
    file = StateFile(find_latest(path).path / "trainer/rank-00000.safetensors")
    return {shard["key"]: shard["data"] for shard in file.part("shards")}


def metrics_of(path: Path) -> dict[int, dict[str, Any]]:
    """By step, without what the clock decides; of a step that was trained again, the later ones."""
    return {
        step["step"]: {name: value for name, value in step.items() if not name.startswith(MOMENTARY)}
        for step in lines(path / "metrics.jsonl")
    }


def rows_of(path: Path, step: int) -> list[dict[str, Any]]:
    return parquet.read_table(path / f"rows/step-{step:06d}.parquet").to_pylist()


def test_every_kill_came_at_its_boundary(victim: Victim) -> None:
    *found, _ = [(status["step"], status["phase"]) for status in victim.kills.values()]
    assert found == [(2, "wait_for_batch"), (2, "train"), (3, "publish")]
    written = [event["step"] for event in events(victim.folder, victim.name) if event["event"] == "checkpoint"]
    assert written[:3] == [2, 3, 4]


def test_weights_and_optimizer_are_equal_in_every_bit(victim: Victim, uninterrupted: Path) -> None:
    found, expected = state_of(victim.path), state_of(uninterrupted)
    assert found.keys() == expected.keys()
    assert {name for name, tensor in expected.items() if not torch.equal(found[name], tensor)} == set()


def test_metrics_are_equal_in_every_bit(victim: Victim, uninterrupted: Path) -> None:
    assert metrics_of(victim.path) == metrics_of(uninterrupted)


def test_tokens_log_probs_and_rewards_are_equal_in_every_bit(victim: Victim, uninterrupted: Path) -> None:
    for step in range(1, STEPS + 1):
        assert rows_of(victim.path, step) == rows_of(uninterrupted, step), step


def test_the_ledger_is_that_of_a_run_that_was_never_killed(victim: Victim, uninterrupted: Path) -> None:
    found, expected = (json.loads((path / "status.json").read_text()) for path in (victim.path, uninterrupted))
    assert found["ledger"] == expected["ledger"]
    assert found["state"] == expected["state"] == "done"


def test_the_comparison_has_signal(uninterrupted: Path) -> None:
    """Else equality would say little."""
    steps = metrics_of(uninterrupted).values()
    assert all(step["reward/std"] > 0 and step["grad_norm"] > 1e-3 for step in steps)
    assert len({row["completion"] for step in range(1, STEPS + 1) for row in rows_of(uninterrupted, step)}) > STEPS


def test_a_checkpoint_of_a_run_that_has_ended_is_refused(victim: Victim) -> None:
    done = command_line.tandem(victim.folder, "checkpoint", victim.name)
    assert (done.returncode, "run victim has ended (done)" in done.stderr) == (2, True), done.stderr
