"""SFT and DPO of a tiny model through the command line: real Ray, real Megatron-core.

What is learnt, and that a run which goes on from a checkpoint ends with the weights of one that was never interrupted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests import command_line
from tests.command_line import events, lines
from trainers.checkpoints import find_latest
from trainers.state_files import StateFile

pytestmark = pytest.mark.timeout(300)
CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def tandem(folder: Path, *args: str) -> None:
    done = command_line.tandem(folder, *args)
    assert done.returncode == 0, f"{args} exited with {done.returncode}\n{done.stdout}\n{done.stderr}"


def metrics(folder: Path, name: str) -> list[dict[str, Any]]:
    return lines(folder / "runs" / name / "metrics.jsonl")


def mean(found: list[dict[str, Any]], key: str) -> float:
    return sum(step[key] for step in found) / len(found)


def weights(folder: Path, name: str) -> dict[str, torch.Tensor]:
    checkpoint = find_latest(folder / "runs" / name / "checkpoints")
    assert checkpoint is not None
    found: dict[str, torch.Tensor] = {}
    for file in sorted(checkpoint.path.rglob("*.safetensors")):
        found |= {f"{file.name}/{key}": value for key, value in tensors(StateFile(file).read())}
    assert found
    return found


def tensors(state: Any, path: str = "") -> list[tuple[str, torch.Tensor]]:
    if isinstance(state, torch.Tensor):
        return [(path, state)]
    if isinstance(state, dict):
        return [pair for key, value in state.items() for pair in tensors(value, f"{path}/{key}")]
    if isinstance(state, list | tuple):
        return [pair for index, value in enumerate(state) for pair in tensors(value, f"{path}/{index}")]
    return []


def test_the_loss_of_sft_falls_and_a_run_that_goes_on_ends_with_the_same_weights(tmp_path: Path) -> None:
    config = str(CONFIGS / "sft-tiny.yaml")
    tandem(tmp_path, "run", config, "--name", "whole")
    found = metrics(tmp_path, "whole")
    assert found[0]["loss"] > 5
    assert mean(found[-4:], "loss") < 0.4 * found[0]["loss"]
    assert {step["version/trainer"] for step in found} == set(range(1, 17)), "versions count steps"

    held_out = [event for event in events(tmp_path, "whole") if event["event"] == "validation"]
    assert [event["step"] for event in held_out] == [0, 8, 16]
    assert held_out[-1]["loss"] < 0.5 * held_out[0]["loss"]
    assert held_out[0]["rows"] == 32

    tandem(tmp_path, "run", config, "--name", "cut", "--set", "trainers.policy.steps=8")
    tandem(tmp_path, "resume", "cut", "--set", "trainers.policy.steps=16")
    first, second = weights(tmp_path, "whole"), weights(tmp_path, "cut")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert [step["loss"] for step in metrics(tmp_path, "cut")] == [step["loss"] for step in found]


def test_the_accuracy_of_dpo_rises(tmp_path: Path) -> None:
    tandem(tmp_path, "run", str(CONFIGS / "dpo-tiny.yaml"))
    found = metrics(tmp_path, "dpo-tiny")
    assert found[0]["dpo/margin"] == pytest.approx(0, abs=1e-5), "policy and reference begin equal"
    assert mean(found[-4:], "dpo/accuracy") > mean(found[1:5], "dpo/accuracy") + 0.2
    assert mean(found[-4:], "dpo/margin") > 0.3
