"""What a user can get wrong, through the command line alone.

What can be known beforehand ends with exit code 2 and one message that names the key, file or row, the numbers and the
remedy, before a run folder, a process or a cluster exists.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import TINY, data, function, processes_of, tandem
from topology.models import resolve_model
from topology.runs import RunFolder, write_json

REWARDS = """
def by_kind(completions, kind, **fields):
    return [0.0 for text in completions]


def unknown_arguments(texts):
    return [0.0 for text in texts]


not_a_function = 5
"""

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all: nothing that is refused leaves anything in it."""
    folder = tmp_path_factory.mktemp("bad")
    (folder / "my_rewards.py").write_text(REWARDS)
    return folder


def refused(folder: Path, *args: str, code: int = 2) -> str:
    """The message of a command that must fail, after checking that it left nothing behind."""
    before = sorted(folder.rglob("*"))
    done = tandem(folder, *args)
    assert done.returncode == code, f"{args} exited with {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert [path for path in sorted(folder.rglob("*")) if "__pycache__" not in path.parts] == [
        path for path in before if "__pycache__" not in path.parts
    ]
    assert not processes_of(folder)
    return done.stderr


def plan_refused(folder: Path, *settings: str) -> str:
    return refused(folder, "plan", TINY, *(part for setting in settings for part in ("--set", setting)))


def model_folder(folder: Path, name: str, change: Callable[[Path], None]) -> str:
    """A copy of the tiny model, changed."""
    copy = folder / name
    shutil.copytree(resolve_model("tiny-llama"), copy)
    change(copy)
    return f"model.path={name}"


def edit(file: Path, **values: Any) -> None:
    content = {**json.loads(file.read_text()), **values}
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("makers.rollout.replcias=2", "makers.rollout.replcias: unknown key, did you mean `replicas`?"),
        ("makers.rollout.replicas=two", "makers.rollout.replicas: Input should be a valid integer"),
        ("model=5", "model: a section of keys is needed (given: 5)"),
        ("name=My Run", "name: lower-case letters, digits, dot, dash and underscore (at most 63) is needed"),
        ("prompts.type=csv", "prompts: unknown kind or type; known: 'reasoning_gym', 'file', or package.module:Name"),
        ("makers.reward.functions=[{path: mine}]", "functions.0.path: package.module:name is needed (given: 'mine')"),
        ("makers.rollout.replicas", "--set makers.rollout.replicas: write it as key.path=value"),
        ("trainers.policy.minibatches=3", "4 groups_per_step cannot be split into 3 equal minibatches: use a divisor"),
        (
            "cluster.cpus=1",
            "needs 2.1 CPUs (1 x rollout, 1 x reward, 1 x policy rank), this machine (cluster.cpus: 1) has 1: lower",
        ),
        ("makers.rollout.replicas=2000", "GiB (2006 actors), this machine has"),
        ("model.path=/nowhere/qwen", "model.path '/nowhere/qwen': no such folder, and not a known name; known names: "),
        ("prompts.dataset=chain_summ", "prompts: reasoning-gym has no dataset 'chain_summ'; near: chain_sum"),
    ],
)
def test_a_config_that_cannot_work_is_refused_with_the_key_and_the_remedy(
    workplace: Path, setting: str, message: str
) -> None:
    assert message in plan_refused(workplace, setting)


def test_every_problem_of_a_config_is_told_at_once(workplace: Path) -> None:
    told = plan_refused(workplace, "trainers.policy.steps=-1", "buffer.max_stale=2")
    assert "2 problems" in told
    assert "trainers.policy.steps: Input should be greater than or equal to 1 (given: -1)" in told
    assert "buffer.max_stale: unknown key, did you mean `max_staleness`?" in told


def test_a_model_that_cannot_be_trained_is_refused(workplace: Path) -> None:
    mistral = model_folder(workplace, "mistral", lambda copy: edit(copy / "config.json", model_type="mistral"))
    assert "family `mistral` is not supported by the Megatron backend; supported: llama, qwen2, qwen3" in plan_refused(
        workplace, mistral
    )
    gpt2 = model_folder(workplace, "gpt2", lambda copy: edit(copy / "config.json", model_type="gpt2", hidden_size=None))
    told = plan_refused(workplace, gpt2)
    assert "family `gpt2` is not supported" in told
    assert "supported: llama, qwen2, qwen3" in told
    bare = model_folder(workplace, "bare", lambda copy: (copy / "tokenizer.json").unlink())
    assert "bare: no tokenizer" in plan_refused(workplace, bare)


def test_a_reference_that_numbers_tokens_otherwise_is_refused(workplace: Path) -> None:
    def swap(copy: Path) -> None:
        whole = json.loads((copy / "tokenizer.json").read_text())
        vocab = whole["model"]["vocab"]
        vocab["A"], vocab["B"] = vocab["B"], vocab["A"]
        (copy / "tokenizer.json").write_text(json.dumps(whole))

    model_folder(workplace, "other-words", swap)
    told = plan_refused(workplace, "makers.frozen={kind: reference, model: {path: other-words}}")
    assert "makers.frozen.model.path: 2 of 320 token ids mean something else in" in told
    told = plan_refused(workplace, "makers.frozen={kind: reference, model: {path: nothing-here}}")
    assert "makers.frozen.model.path: model.path 'nothing-here': no such folder" in told


def test_chat_messages_need_a_chat_template(workplace: Path) -> None:
    def without_template(copy: Path) -> None:
        (copy / "chat_template.jinja").unlink(missing_ok=True)
        edit(copy / "tokenizer_config.json", chat_template=None)

    model = model_folder(workplace, "plain", without_template)
    chat = data(workplace, "chat", {"prompt": [{"role": "user", "content": "hi"}]})
    told = plan_refused(workplace, model, chat)
    assert "prompts: row chat/0 has chat messages, but the model's tokenizer has no chat template: give text" in told


def test_data_that_cannot_be_used_is_refused_with_its_file_and_line(workplace: Path) -> None:
    missing = plan_refused(workplace, "prompts={type: file, path: gone.jsonl}")
    assert f"prompts: {workplace}/gone.jsonl: no such file or folder" in missing
    assert "empty.jsonl: the data is empty: at least one row is needed" in plan_refused(
        workplace, data(workplace, "empty")
    )
    told = plan_refused(workplace, data(workplace, "other", {"question": "2 + 2?"}))
    assert "other.jsonl, line 1: no column 'prompt'; there are: question" in told
    rows = [{"prompt": "2 + 2?"}] * 99
    told = plan_refused(workplace, data(workplace, "broken", *rows, '{"prompt": "2 + ', *rows))
    assert "broken.jsonl, line 100: not valid JSON" in told


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nowhere:score", "there is no module 'nowhere' in"),
        ("my_rewards:by_knd", "has no 'by_knd'; near: by_kind"),
        ("my_rewards:unknown_arguments", "does not take completions; it takes: texts"),
        ("my_rewards:not_a_function", "is int: a function, or a class with __call__, is needed"),
        ("my_rewards:by_kind", "needs the column kind; the prompts have: no other column. Rename the column"),
    ],
)
def test_a_reward_function_that_cannot_be_called_is_refused(workplace: Path, path: str, message: str) -> None:
    told = plan_refused(workplace, data(workplace, "one", {"prompt": "2 + 2?"}), function(path))
    assert f"makers.reward.functions: reward function {path}: " in told
    assert message in told


def test_prompts_of_ones_own_are_found_beside_the_command(workplace: Path) -> None:
    (workplace / "my_prompts.py").write_text(
        "class Mine(list):\n    def __init__(self):\n        self += [{'prompt': 'x'}]\n"
    )
    settings = ("--set", "prompts={type: 'my_prompts:Mine'}", "--set", function("my_rewards:by_kind"))
    assert tandem(workplace, "plan", TINY, *settings).returncode == 0
    told = plan_refused(workplace, "prompts={type: 'my_prompts:Yours'}")
    assert "error: prompts: my_prompts:Yours: module 'my_prompts'" in told


@pytest.mark.parametrize("verb", [["status"], ["stop"], ["logs"], ["resume"], ["export", "out"]])
def test_a_run_that_is_not_there_is_refused(workplace: Path, verb: list[str]) -> None:
    told = refused(workplace, verb[0], "nobody", *verb[1:])
    assert f"no run `nobody` in {workplace}/runs (runs there: none): give a run's name, or its folder" in told


def test_a_place_where_no_run_can_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "runs").touch()
    assert f"the run folder {tmp_path}/runs/tiny cannot be created: Not a directory" in refused(tmp_path, "run", TINY)


def test_a_folder_in_the_way_of_the_run_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "runs/tiny").mkdir(parents=True)
    told = refused(tmp_path, "run", TINY)
    assert f"run name `tiny` is in use ({tmp_path}/runs/tiny, not a run): choose another with --name, or remove" in told


# --- checkpoints that cannot be used ----------------------------------------------------------------------------------


@pytest.fixture
def ended(tmp_path: Path) -> Path:
    """The folder of an ended run with one checkpoint, small and made by hand."""
    run = tmp_path / "runs/old"
    ranks = run / "checkpoints/step-000002/trainer"
    ranks.mkdir(parents=True)
    shutil.copy(TINY, run / "config.yaml")
    write_json(RunFolder(run).status_file, {"name": "old", "state": "stopped", "step": 2, "steps": 4})
    shape = {"model_type": "llama", "vocab_size": 320, "hidden_size": 128, "intermediate_size": 256}
    write_json(ranks / "model.json", {"model": {**shape, "num_hidden_layers": 2}, "files": {}})
    (ranks / "state").write_bytes(b"x" * 100)
    files = {f"trainer/{file.name}": file.stat().st_size for file in ranks.iterdir()}
    meta = {"format": "tandem-checkpoint", "format_version": 2, "step": 2, "version": 2}
    write_json(ranks.parent / "meta.json", {**meta, "files": files})
    (run / "checkpoints/latest").write_text("step-000002\n")
    return tmp_path


def test_a_run_without_a_checkpoint_is_not_resumed(ended: Path) -> None:
    shutil.rmtree(ended / "runs/old/checkpoints")
    (ended / "runs/old/checkpoints").mkdir()
    assert "has no file `latest`: no checkpoint was written there" in refused(ended, "resume", "old")
    assert "has no file `latest`" in refused(ended, "export", "old", "out")


def test_a_broken_checkpoint_is_not_resumed(ended: Path) -> None:
    state = ended / "runs/old/checkpoints/step-000002/trainer/state"
    state.write_bytes(b"x" * 99)
    told = refused(ended, "resume", "old")
    assert "step-000002 is broken: trainer/state has 99 bytes, 100 bytes were written. No other checkpoint" in told
    state.unlink()
    assert "is broken: trainer/state is missing, 100 bytes were written" in refused(ended, "resume", "old")
    assert "is broken: trainer/state is missing" in refused(ended, "export", "old", "out")


def test_a_checkpoint_of_something_else_is_not_resumed(ended: Path) -> None:
    told = refused(ended, "resume", "old", "--set", "model.path=tiny-qwen2")
    assert "step-000002 is of another model than" in told
    assert "model_type llama there, qwen2 here" in told
    meta = ended / "runs/old/checkpoints/step-000002/meta.json"
    edit(meta, format="somebody-else")
    assert "is not a Tandem checkpoint: meta.json has format 'somebody-else'" in refused(ended, "resume", "old")
    meta.unlink()
    assert "is not a Tandem checkpoint: it has no meta.json" in refused(ended, "resume", "old")


def test_a_folder_of_somebody_else_is_no_run(ended: Path) -> None:
    (ended / "photos").mkdir()
    assert "no run `photos`" in refused(ended, "resume", "./photos")


def test_nothing_is_exported_over_what_is_there(ended: Path) -> None:
    (ended / "out").mkdir()
    assert "out exists: choose a folder that does not, or remove it" in refused(ended, "export", "old", "out")
