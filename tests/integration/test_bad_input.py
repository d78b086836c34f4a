"""What a user can get wrong, and what can go wrong around a run, through the command line alone.

What can be known beforehand ends with exit code 2 and one message, before a run folder, a process or a cluster exists.
What shows only in the run costs the row, or ends the run with exit code 3 and the cause in the last line.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from topology.models import resolve_model
from topology.runs import RunFolder, write_json

TANDEM = str(Path(sys.executable).with_name("tandem"))
TINY = str(Path(__file__).resolve().parents[2] / "configs/tiny.yaml")
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


def unknown_arguments(texts):
    return [0.0 for text in texts]


not_a_function = 5
"""

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One folder for all: nothing that is refused leaves anything in it, and what runs has a name of its own."""
    folder = tmp_path_factory.mktemp("bad")
    (folder / "my_rewards.py").write_text(REWARDS)
    yield folder
    for process in processes_of(folder):
        process.kill()


# --- what can be known beforehand -------------------------------------------------------------------------------------


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


def data(folder: Path, name: str, *lines: Any) -> str:
    """A file of prompts as a setting; a line that is text is written as it is."""
    file = folder / f"{name}.jsonl"
    file.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return f"prompts={{type: file, path: {file.name}, shuffle: false}}"


def function(path: str, **settings: Any) -> str:
    return "makers.reward.functions=" + json.dumps([{"path": path, **settings}])


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
            "needs 2.1 CPUs (1 x rollout, 1 x reward, trainer), this machine (cluster.cpus: 1) has 1: lower",
        ),
        ("makers.rollout.replicas=2000", "GiB (2000 x rollout, 1 x reward, trainer), this machine has"),
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
    settings = ("--set", "prompts={type: 'my_prompts:Mine'}", "--set", function("my_rewards:always_raises"))
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
    meta = {"format": "tandem-checkpoint", "format_version": 1, "step": 2, "version": 2, "prompt_cursor": 8}
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


# --- what shows only in the run ---------------------------------------------------------------------------------------

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
    assert last.endswith("(prompt chain_sum/3): raised ValueError: no luck [/today] (my_rewards.py, line 18)") or (
        "raised ValueError: no luck [/today] (my_rewards.py, line 18)" in last
    )
    listed = tandem(workplace, "list").stdout
    assert "hopeless" in listed
    assert "failed" in listed
    assert_nothing_left(workplace / "runs/hopeless")


def test_ctrl_c_before_the_first_step_leaves_nothing(workplace: Path) -> None:
    with command(workplace, "run", TINY, "--name", "early") as process:
        wait_for(lambda: processes_of(workplace / "runs/early"), 60, "a process of the run")
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "interrupted" in output
    assert "Traceback" not in output
    assert status(workplace, "early")["state"] in ("stopped", "failed")
    assert_nothing_left(workplace / "runs/early")


# --- a full disk, a killed command, Ctrl-C ----------------------------------------------------------------------------


class SmallDisk:
    """A mount namespace in which `folder/runs` is a disk of its own."""

    def __init__(self, folder: Path, mebibytes: int) -> None:
        self.runs = folder / "runs"
        self.runs.mkdir()
        namespaces = ["--mount"] if os.geteuid() == 0 else ["--mount", "--user", "--map-root-user"]
        script = 'mount -t tmpfs -o "size=$1m" tandem-test "$2" && echo mounted && exec sleep 600'
        command = ["unshare", *namespaces, "sh", "-c", script, "sh", str(mebibytes), str(self.runs)]
        try:
            self._holder = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        except FileNotFoundError:
            pytest.skip("no `unshare` here to make a small disk with")
        assert self._holder.stdout is not None
        answer = self._holder.stdout.readline()
        if answer != "mounted\n":
            self._holder.wait(timeout=10)
            pytest.skip(f"no small disk can be mounted here: {answer.strip()}")
        enter = ["--mount"] if os.geteuid() == 0 else ["--mount", "--user", "--preserve-credentials"]
        self._enter = ["nsenter", f"--target={self._holder.pid}", *enter, f"--wd={folder}"]

    def command(self, *args: str) -> list[str]:
        return [*self._enter, *args]

    def grow(self, mebibytes: int) -> None:
        remount = self.command("mount", "-o", f"remount,size={mebibytes}m", str(self.runs))
        subprocess.run(remount, check=True, timeout=10)

    def run_folder(self, name: str) -> Path:
        return Path(f"/proc/{self._holder.pid}/root{self.runs}/{name}")

    def close(self) -> None:
        self._holder.kill()
        self._holder.wait(timeout=10)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[SmallDisk]:
    disk = SmallDisk(tmp_path, 10)  # one checkpoint of the tiny model is 5.3 MiB
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

    run = small_disk.run_folder("tiny")
    settings = ["--set", "checkpoint.every=1", "--set", "trainers.policy.steps=3"]
    with command(tmp_path, "run", TINY, *settings, prefix=small_disk.command()) as started:
        wait_for((run / "cluster.json").exists, 60, "the run's cluster")
        assert state()["state"] in ("starting", "running")
        wait_for(lambda: len(processes_of(tmp_path)) > 8, 60, "the run's actors")
        started.kill()
    assert state()["state"] in ("starting", "running")
    assert "tiny" in tandem_there("list").stdout
    assert (
        "run tiny is starting: stop it first with `tandem stop tiny`" in tandem_there("resume", "tiny", code=2).stderr
    )
    assert "run name `tiny` is in use" in tandem_there("run", TINY, code=2).stderr

    wait_for(lambda: state()["state"] not in ("starting", "running"), 120, "the end of the run")
    ended = state()
    assert (ended["state"], ended["step"]) == ("failed", 3)
    assert "checkpoint step-000003 was not written" in ended["cause"]
    assert "MiB free" in ended["cause"]
    assert "the previous one, step-000001, is untouched: `tandem resume` goes on from it" in ended["cause"]
    assert "\n" not in ended["cause"]
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["latest", "step-000001"]
    kinds = [json.loads(line)["event"] for line in (run / "events.jsonl").read_text().splitlines()]
    assert kinds.count("checkpoint_failed") == 2
    assert_nothing_left(tmp_path / "runs/tiny")

    small_disk.grow(100)
    going_on = ["resume", "tiny", "--set", "trainers.policy.steps=100000", "--set", "checkpoint.every=null"]
    with command(tmp_path, *going_on, prefix=small_disk.command()) as resumed:
        wait_for(lambda: state()["state"] == "running" and state()["step"] >= 2, 120, "a step after the checkpoint")
        resumed.send_signal(signal.SIGINT)
        output, _ = resumed.communicate(timeout=60)
    assert resumed.returncode == 130, output
    assert "interrupted: run tiny is being stopped" in output
    stopped = state()
    assert stopped["state"] == "stopped"
    assert (run / f"checkpoints/step-{stopped['step']:06d}/meta.json").exists()
    assert_nothing_left(tmp_path / "runs/tiny")


# --- helpers ----------------------------------------------------------------------------------------------------------


def tandem(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([TANDEM, *args], cwd=folder, capture_output=True, text=True, timeout=150, check=False)


class command:
    """A `tandem` command that goes on meanwhile; it is killed when the block is left."""

    def __init__(self, folder: Path, *args: str, prefix: list[str] | None = None) -> None:
        self._process = subprocess.Popen(
            [*(prefix or []), TANDEM, *args],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def __enter__(self) -> subprocess.Popen[str]:
        return self._process

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait(timeout=10)


def status(folder: Path, name: str) -> dict[str, Any]:
    return json.loads(tandem(folder, "status", name, "--json").stdout)


def events(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "runs" / name / "events.jsonl").read_text().splitlines()]


def wait_for(condition: Callable[[], Any], timeout: float, what: str) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come within {timeout:g} s"
        time.sleep(0.5)


def processes_of(folder: Path) -> list[psutil.Process]:
    """Every process of a run below `folder`: its keeper, its cluster, its actors and what they started."""
    found = []
    for process in psutil.process_iter():
        try:
            of_cluster = process.environ().get("RAY_AUTH_TOKEN_PATH", "").startswith(str(folder))
            of_keeper = "topology.keeper" in process.cmdline() and any(
                str(folder) in part for part in process.cmdline()
            )
        except psutil.Error:
            continue
        if of_cluster or of_keeper:
            found.append(process)
    return found


def assert_nothing_left(run: Path) -> None:
    deadline = time.monotonic() + 30
    while (left := processes_of(run)) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert not left, [process.cmdline() for process in left]
