"""States on disk: equal when they are read, whatever they hold; no code runs that a file brings."""

from __future__ import annotations

import os
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trainers.state_files import (
    StateFile,
    StateFileError,
    copied,
    random_state,
    set_random_state,
    write_state,
)


class Hostile:
    """Unpickling it makes a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


def through(file: Path, state: dict[str, Any]) -> dict[str, Any]:
    write_state(file, copied(state))
    return StateFile(file).read()


def test_a_state_is_read_as_it_was_written_with_its_types(tmp_path: Path) -> None:
    state = {
        "model": {"a.b": torch.tensor([1.5, -0.0], dtype=torch.bfloat16), "a": {"b": torch.arange(6).view(2, 3).t()}},
        "optimizer": {
            "state": {0: {"step": torch.tensor(3.0)}, 1: {}},
            "groups": [{"betas": (0.9, 0.95), "fused": True}],
        },
        "rest": [None, "text", 7, 1e-300, float("inf"), [], (), {}, -(2**70)],
    }
    found = through(tmp_path / "state.safetensors", state)
    assert torch.equal(found["model"]["a.b"], state["model"]["a.b"])
    assert found["model"]["a.b"].dtype == torch.bfloat16
    assert torch.equal(found["model"]["a"]["b"], torch.arange(6).view(2, 3).t())
    assert torch.equal(found["optimizer"]["state"][0]["step"], torch.tensor(3.0))
    assert found["optimizer"]["groups"] == state["optimizer"]["groups"]
    assert type(found["optimizer"]["groups"][0]["betas"]) is tuple
    assert found["rest"] == state["rest"]
    assert [type(value) for value in found["rest"]] == [type(value) for value in state["rest"]]
    assert [path.name for path in tmp_path.iterdir()] == ["state.safetensors"]


def test_tensors_that_share_memory_are_copied_apart(tmp_path: Path) -> None:
    tied = torch.arange(4.0)
    found = through(tmp_path / "state.safetensors", {"model": {"embedding": tied, "output": tied, "row": tied[1:3]}})
    tied.zero_()
    assert torch.equal(found["model"]["output"], torch.arange(4.0))
    assert torch.equal(found["model"]["row"], torch.tensor([1.0, 2.0]))


@pytest.mark.parametrize(("value", "kind"), [(object(), "object"), (np.float32(1), "float32"), (b"x", "bytes")])
def test_what_a_state_cannot_hold_is_refused_with_its_place(tmp_path: Path, value: Any, kind: str) -> None:
    with pytest.raises(TypeError, match=rf"a\.b\.1: a {kind} cannot be part of a state"):
        write_state(tmp_path / "state.safetensors", {"a": {"b": [0, value]}})


def test_a_pickle_in_place_of_a_state_is_refused_and_does_nothing(tmp_path: Path) -> None:
    file, touched = tmp_path / "state.safetensors", tmp_path / "touched"
    for write in (
        lambda: file.write_bytes(pickle.dumps(Hostile(touched))),
        lambda: torch.save(Hostile(touched), file),
        lambda: torch.save(Hostile(touched), file, _use_new_zipfile_serialization=False),
    ):
        write()
        with pytest.raises(StateFileError, match=r"state\.safetensors is cut short, or no safetensors file"):
            StateFile(file)
    assert not touched.exists()


def test_a_file_that_is_cut_short_missing_or_of_other_tensors_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    file = tmp_path / "state.safetensors"
    write_state(file, {"a": torch.ones(9)})
    os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(StateFileError, match="is cut short"):
        StateFile(file)
    with pytest.raises(StateFileError, match=r"other\.safetensors is missing"):
        StateFile(tmp_path / "other.safetensors")
    save_file({"a": torch.ones(1)}, file)
    with pytest.raises(StateFileError, match="but not of a training state"):
        StateFile(file)


def test_a_part_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    write_state(tmp_path / "state.safetensors", {"a": 1})
    with pytest.raises(StateFileError, match=r"state\.safetensors cannot be read: KeyError: 'model'"):
        StateFile(tmp_path / "state.safetensors").part("model")


def test_every_generator_goes_on_where_it_was(tmp_path: Path) -> None:
    def draw() -> list[float]:
        return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(()).item()]

    draw()  # of the two values that a Gaussian generator makes at once, one is left over
    write_state(tmp_path / "state.safetensors", copied(random_state()))
    expected = draw()
    draw()
    set_random_state(StateFile(tmp_path / "state.safetensors").read())
    assert draw() == expected
