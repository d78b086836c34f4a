"""Files from somebody else run no code: a checkpoint full of pickles, a model folder that brings its own modules."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import save
from topology.models import resolve_model
from trainers.checkpoints import CheckpointError
from trainers.config import CriticConfig, TrainerConfig
from trainers.learner import Rendezvous
from trainers.rank import TrainerRank

pytestmark = pytest.mark.timeout(120)


class Touch:
    """Unpickling it makes a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


@contextmanager
def rank(kind: str, *, critic: bool = False) -> Iterator[TrainerRank]:
    backend = {"type": kind, "threads": 1}
    config: Any = (
        CriticConfig(backend=backend)
        if critic
        else TrainerConfig(algorithm={"type": "grpo"}, backend=backend, groups_per_step=1, steps=2)
    )
    made = TrainerRank(
        config,
        model_path=str(resolve_model("tiny-llama")),
        rendezvous=Rendezvous(rank=0, world_size=1, address="127.0.0.1:0", timeout=60.0),
        bucket_bytes=1 << 16,
        seed=0,
        steps=2,
    )
    made.start()
    try:
        yield made
    finally:
        made.close()


@pytest.mark.parametrize(("kind", "critic"), [("megatron", False), ("torch", False), ("torch", True)])
def test_pickles_in_a_checkpoint_are_refused_and_do_nothing(kind: str, critic: bool, tmp_path: Path) -> None:
    touched, good, bad = tmp_path / "touched", tmp_path / "good", tmp_path / "bad"
    with rank(kind, critic=critic) as made:
        save(made, str(good))
        for file in sorted(good.iterdir()):
            for write in (
                lambda target: target.write_bytes(pickle.dumps(Touch(touched))),
                lambda target: torch.save(Touch(touched), target),
            ):
                shutil.copytree(good, bad)
                write(bad / file.name)
                with pytest.raises(CheckpointError, match=f"{bad}.*{file.stem}"):
                    made.restore(str(bad))
                shutil.rmtree(bad)
        made.restore(str(good))
    assert not touched.exists()


def test_the_files_of_torchs_distributed_checkpoint_are_not_read(tmp_path: Path) -> None:
    """They are pickled: an older format of ours, or somebody else's."""
    touched, folder = tmp_path / "touched", tmp_path / "old"
    with rank("megatron") as made:
        save(made, str(folder))
        (folder / "rank-00000.safetensors").unlink()
        description = json.loads((folder / "model.json").read_text())
        for name in ("common.pt", ".metadata", "__0_0.distcp"):
            (folder / name).write_bytes(pickle.dumps(Touch(touched)))
        for changed in (description, {name: value for name, value in description.items() if name != "ranks"}):
            (folder / "model.json").write_text(json.dumps(changed))
            with pytest.raises(CheckpointError, match=r"rank-00000\.safetensors is missing|'ranks'"):
                made.restore(str(folder))
    assert not touched.exists()


@pytest.fixture
def model_with_code(tmp_path: Path) -> Path:
    """A model of a family that only its own module knows, and a tokenizer of its own; importing either makes a file."""
    folder = tmp_path / "model"
    shutil.copytree(resolve_model("tiny-llama"), folder)
    code = f"import pathlib\npathlib.Path({str(tmp_path / 'touched')!r}).touch()\n"
    (folder / "own.py").write_text(code + "class Config: pass\nclass Model: pass\nclass Tokenizer: pass\n")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}}
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    tokenizer |= {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["own.Tokenizer", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return folder


def test_a_model_folder_that_brings_code_is_refused_by_whoever_loads_it(model_with_code: Path, tmp_path: Path) -> None:
    from makers.prompt_ids import PromptEncoder
    from makers.reward import load_decoder
    from makers.scoring import Scorer
    from trainers.megatron.model import read_config

    (model_with_code / "tokenizer.json").unlink()  # else it is read, and nothing asks for code
    for load in (
        lambda: read_config(model_with_code),
        lambda: PromptEncoder(model_with_code),
        lambda: load_decoder(str(model_with_code)),
        lambda: Scorer(model_with_code, dtype="float32", micro_batch_tokens=64),
    ):
        with pytest.raises(ValueError, match="trust_remote_code|custom code"):
            load()
    assert not (tmp_path / "touched").exists()


def test_an_engine_runs_code_of_a_model_folder_only_when_the_config_says_so() -> None:
    from makers.config import VllmEngine
    from makers.engines.vllm_core import engine_arguments

    assert engine_arguments(VllmEngine(type="vllm"), "model", 0, False)["trust_remote_code"] is False
    asked = VllmEngine(type="vllm", extra={"trust_remote_code": True})
    assert engine_arguments(asked, "model", 0, False)["trust_remote_code"] is True
