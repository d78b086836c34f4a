from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from topology import models
from topology.models import SUPPORTED_FAMILIES, ModelError, model_info, resolve_model


def write_checkpoint(folder: Path, config: dict | None = None, weights: str | None = "model.safetensors") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    if weights:
        (folder / weights).touch()
    (folder / "tokenizer.json").touch()
    return folder


CONFIG = {
    "model_type": "qwen2",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 100,
    "num_attention_heads": 4,
    "vocab_size": 50,
}


def test_a_folder_with_a_checkpoint_is_returned_as_it_is(tmp_path):
    folder = write_checkpoint(tmp_path / "mine", CONFIG)
    assert resolve_model(str(folder)) == folder.resolve()


@pytest.mark.parametrize(
    ("config", "weights", "message"),
    [
        (None, "model.safetensors", "no config.json"),
        (CONFIG, None, r"no \*.safetensors weights"),
        (CONFIG, "pytorch_model.bin", "save it as safetensors"),
    ],
)
def test_a_folder_that_is_no_checkpoint_is_refused_with_what_is_missing(tmp_path, config, weights, message):
    folder = write_checkpoint(tmp_path / "mine", config, weights)
    with pytest.raises(ModelError, match=message):
        resolve_model(str(folder))


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    folder = write_checkpoint(tmp_path / "mine", CONFIG)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"no tokenizer \(none of tokenizer.json, .*save_pretrained"):
        resolve_model(str(folder))


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(ModelError, match=r"'tiny-lama': no such folder.*smollm2-135m-instruct, tiny-llama"):
        resolve_model("tiny-lama")


def test_a_known_name_is_prepared_once_and_whole(tmp_path, monkeypatch):
    made: list[Path] = []

    def recipe(folder: Path) -> None:
        made.append(folder)
        write_checkpoint(folder, CONFIG)

    monkeypatch.setitem(models.RECIPES, "tiny-llama", recipe)
    folder = resolve_model("tiny-llama", tmp_path)
    assert resolve_model("tiny-llama", tmp_path) == folder
    assert len(made) == 1
    assert made[0] != folder
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_a_recipe_that_fails_leaves_nothing_behind(tmp_path, monkeypatch):
    def recipe(folder: Path) -> None:
        (folder / "half").touch()
        raise OSError("disk full")

    monkeypatch.setitem(models.RECIPES, "tiny-llama", recipe)
    with pytest.raises(OSError, match="disk full"):
        resolve_model("tiny-llama", tmp_path)
    assert list((tmp_path / "models").iterdir()) == []


def test_the_process_that_comes_second_takes_the_folder_of_the_first(tmp_path, monkeypatch):
    def recipe(folder: Path) -> None:
        write_checkpoint(folder, CONFIG)
        write_checkpoint(folder.parent / f"tiny-llama-r{models.RECIPE_REVISION}", {**CONFIG, "first": True})

    monkeypatch.setitem(models.RECIPES, "tiny-llama", recipe)
    folder = resolve_model("tiny-llama", tmp_path)
    assert json.loads((folder / "config.json").read_text())["first"]
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


@pytest.mark.parametrize("family", SUPPORTED_FAMILIES)
def test_model_info_counts_the_parameters_of_a_tiny_model_exactly(family):
    from safetensors import safe_open

    folder = resolve_model(f"tiny-{family.replace('_', '-')}")
    info = model_info(folder)
    with safe_open(folder / "model.safetensors", framework="pt") as tensors:
        count = sum(tensors.get_tensor(name).numel() for name in tensors.keys())  # noqa: SIM118
    assert info.parameters == count
    assert (info.family, info.layers, info.hidden, info.heads, info.kv_heads) == (family, 2, 128, 4, 2)
    assert (info.head_dim, info.vocab, info.has_chat_template) == (32, 320, True)
    assert info.tied == (family != "llama")


def test_a_tiny_model_is_the_same_wherever_it_is_made(tmp_path):
    again, cached = resolve_model("tiny-qwen2", tmp_path), resolve_model("tiny-qwen2")
    for name in ("model.safetensors", "tokenizer.json", "config.json", "generation_config.json"):
        assert (again / name).read_bytes() == (cached / name).read_bytes()


def test_a_tiny_tokenizer_gives_back_any_text_and_knows_its_template():
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(resolve_model("tiny-llama"))
    text = "2 + 3 = 5, naïve ✓\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer) == 320
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False
    )
    assert chat == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.encode("<|im_end|>") == [tokenizer.eos_token_id]


def test_a_config_without_the_fields_of_a_decoder_is_refused(tmp_path):
    with pytest.raises(
        ModelError, match=r"family `vision` is not supported .*no 'hidden_size'.*supported: llama, qwen2"
    ):
        model_info(write_checkpoint(tmp_path, {"model_type": "vision"}))


def test_the_command_prints_the_folder_and_imports_no_torch_for_a_prepared_model():
    folder = resolve_model("tiny-llama")
    code = (
        "import sys; from topology.models import main; assert main(['tiny-llama']) == 0; "
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, f"{folder}\n"), done.stderr


def test_a_student_is_the_first_layers_of_its_teacher_with_the_same_tokenizer(tmp_path):
    from safetensors.torch import load_file

    teacher, student = resolve_model("tiny-llama", tmp_path), resolve_model("tiny-llama-first-1", tmp_path)
    assert (model_info(student).layers, model_info(student).vocab) == (1, model_info(teacher).vocab)
    whole, part = (load_file(folder / "model.safetensors") for folder in (teacher, student))
    assert part.keys() == {name for name in whole if ".layers.1." not in name}
    assert all(part[name].equal(whole[name]) for name in part)
    assert (student / "tokenizer.json").read_bytes() == (teacher / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("name", ["tiny-llama-first-2", "tiny-llama-first-0"])
def test_a_student_has_some_of_the_layers_and_not_all(tmp_path, name):
    with pytest.raises(ModelError, match="first layers of a model with 2: use 1 to 1"):
        resolve_model(name, tmp_path)
    with pytest.raises(ModelError, match="not a known name"):
        resolve_model("tiny-llama-first-x", tmp_path)


@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("tiny-llama-reward", "LlamaForSequenceClassification"),
        ("tiny-llama-process-reward", "LlamaForTokenClassification"),
    ],
)
def test_a_generated_reward_model_has_a_head_of_one_label_and_no_student(name, head):
    found = model_info(resolve_model(name))
    assert (found.architectures, found.labels) == ((head,), 1)
    with pytest.raises(ModelError, match=f"first layers are taken of a language model, not of {head}"):
        resolve_model(f"{name}-first-1")
