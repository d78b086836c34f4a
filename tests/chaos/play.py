"""Plays a scenario: starts a run, does to it what is written there, from outside, and waits for its end."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.chaos.checks import broken
from tests.chaos.observer import Observer
from tests.chaos.scenario import Fault, Scenario
from tests.command_line import TANDEM, TINY, function, lines, processes_of, wait_for
from tests.job_cluster import node
from topology.joining import connected
from topology.names import namespace_of
from topology.runs import ENDED

PATIENCE = 300.0  # seconds without what is waited for, and without a step
PHASE = 3.0  # seconds that a phase is waited for; a run that recovers has none
GONE = 30.0  # seconds after the end of a run until nothing of it may be left
STEPS_A_FAULT = 20  # of the run: so many that the faults fall into it, while a hung supervisor is waited for too
THROUGH = "faults_are_through"  # a file
REWARDS = f"""
import time
from pathlib import Path

def slow(completions, **_):
    # A tiny model trains many steps while a process starts: this bounds how many.
    if not Path(__file__).with_name("{THROUGH}").exists():
        time.sleep(0.3)
    return [float(len(set(text)) % 3) for text in completions]
"""
PING = 8.0
SETTINGS = (
    "makers.rollout.replicas=2",
    "makers.rollout.sampling.max_tokens=24",
    "checkpoint.every=3",
    "buffer.max_attempts=50",
    function("rewards_of_chaos:slow"),
    "limits.restarts=50",
    "limits.start=280",
    f"limits.ping={PING:g}",
)


class Stuck(Exception):
    pass


@dataclass(frozen=True)
class Done:
    """What was done, and when (seconds since the epoch): from `time`, to `until` for a command that took a while."""

    fault: Fault
    actor: str
    pid: int | None
    phase: str | None
    time: float
    until: float


@dataclass
class Played:
    scenario: Scenario
    done: list[Done] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0
    observer: Observer | None = None
    metrics: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)


def play(scenario: Scenario, say: Callable[[str], None] = lambda text: None, keep: Path | None = None) -> Played:
    """The folder of the run stays in `keep` if something was wrong."""
    began = time.monotonic()
    temporary = Path(tempfile.mkdtemp(prefix="chaos-"))
    played = Played(scenario)
    try:
        with _cluster(temporary, scenario.joined) as environment:
            Player(scenario, temporary, environment, played, say).play()
    finally:
        for process in processes_of(temporary):
            with suppress(psutil.Error):
                process.kill()
        run = temporary / "runs" / scenario.name
        played.metrics, played.events = (
            lines(file) if file.exists() else [] for file in (run / "metrics.jsonl", run / "events.jsonl")
        )
        if played.wrong and keep is not None:
            shutil.copytree(temporary / "runs", keep / scenario.name, dirs_exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
    played.seconds = time.monotonic() - began
    return played


@contextmanager
def _cluster(folder: Path, joined: bool) -> Iterator[dict[str, str]]:
    """The environment of all commands, with a cluster that the run joins or without."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("RAY_ADDRESS", None)
    if not joined:
        yield environment
        return
    (folder / "token").write_text(secrets.token_hex(32))
    environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(folder / "token")}
    environment |= {"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    temporary = folder / "ray"
    head = ("--head", "--port=0", "--num-cpus=16", f"--temp-dir={temporary}", "--include-dashboard=false")
    with node(folder / "cluster.log", environment, *head):
        file = temporary / "ray_current_cluster"
        wait_for(lambda: file.exists() and file.read_text(), 90, "the address of the head")
        yield {**environment, "RAY_ADDRESS": file.read_text().strip()}


class Player:
    def __init__(
        self,
        scenario: Scenario,
        folder: Path,
        environment: dict[str, str],
        played: Played,
        say: Callable[[str], None],
    ) -> None:
        self.scenario = scenario
        self.folder = folder
        self.run = folder / "runs" / scenario.name
        self._environment = environment
        self._played = played
        self._say = say
        self._there_before = {process.pid for process in processes_of(folder)}

    def play(self) -> None:
        try:
            self._start()
            self.seen = self._played.observer = Observer(self.run)
            try:
                self._wait(lambda: self.seen.now["step"] >= 2, "the second step")
                for fault in self.scenario.faults:
                    self._do(fault)
                (self.folder / THROUGH).touch()
                self._wait(lambda: self.seen.now["state"] in ENDED, "the end of the run")
            finally:
                self.seen.close()
            self._played.wrong += broken(self.run, self.seen.rows, self.seen.now)
            self._played.wrong += self._left()
        except Stuck as error:
            self._played.wrong.append(str(error))
            self._tandem("stop", self.scenario.name, "--now", excuse=lambda: True)

    # --- faults -------------------------------------------------------------------------------------------------------

    def _do(self, fault: Fault) -> None:
        if fault.calm:
            self._wait(lambda: self._ended or self._calm(), "a run that has got over it")
        if self._ended:
            return
        step = self.seen.now["step"]
        self._wait(lambda: self._ended or self.seen.now["step"] >= step + fault.steps, f"{fault.steps} steps more")
        deadline = time.monotonic() + PHASE
        while self.seen.now["phase"] != fault.phase and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(fault.delay)
        if fault.deed not in ("kill", "stop"):  # a command needs a supervisor that answers
            self._wait(lambda: self._ended or self._answers(), "a supervisor that answers")
        if self._ended:
            return
        if fault.deed in ("kill", "stop"):
            self._hurt(fault)
        elif fault.deed == "attach":
            self._attach(fault)
        else:
            self._detach(fault)

    def _hurt(self, fault: Fault) -> None:
        self._wait(lambda: self._ended or self._victims(fault), f"somebody to {fault.kind}")
        if self._ended:
            return
        victims = self._victims(fault)
        name, pid = victims[fault.which % len(victims)]
        with suppress(ProcessLookupError):  # died a moment ago, of something else
            os.kill(pid, signal.SIGKILL if fault.deed == "kill" else signal.SIGSTOP)
            self._note(fault, name, time.time(), pid)
        if fault.deed == "stop" and fault.victim == "supervisor":
            self._wait(lambda: not _runs(pid), "the end of the supervisor that hangs")

    def _attach(self, fault: Fault) -> None:
        group = fault.victim.split("/")[1]
        began = time.time()
        before = {row["name"] for row in self.seen.now["actors"]}
        self._tandem("attach", self.scenario.name, group, excuse=self._ends_anyway)
        self._wait(lambda: self._ended or bool(self._names(fault) - before), "the newcomer in the status")
        for name in self._names(fault) - before:
            self._note(fault, name, began)
        self._wait(lambda: self._ended or self._calm(), "the first row of the newcomer")

    def _detach(self, fault: Fault) -> None:
        names = sorted(self._names(fault))
        name, began = names[fault.which % len(names)], time.time()
        words = ["detach", self.scenario.name, name] + (["--now"] if fault.deed == "detach --now" else [])
        self._tandem(*words, excuse=self._ends_anyway)
        self._note(fault, name, began)
        if len(names) == 1 and not self._ended:  # of its stage: the run waits for another
            self._wait(lambda: self._ended or self.seen.now["state"] == "waiting", "the run that waits")
            self._tandem("attach", self.scenario.name, fault.victim.split("/")[1], excuse=self._ends_anyway)

    def _note(self, fault: Fault, name: str, began: float, pid: int | None = None) -> None:
        now = self.seen.now
        self._played.done.append(Done(fault, name, pid, now["phase"], began, time.time()))
        self._say(f"  step {now['step']}, {now['phase']}: {fault.deed} {name}")

    # --- what there is ------------------------------------------------------------------------------------------------

    @property
    def _ended(self) -> bool:
        return self.seen.now["state"] in ENDED

    def _ends_anyway(self) -> bool:
        """Whether a command may be refused: the run has come to its last step."""
        time.sleep(2.0)
        return self._ended or self.seen.now["step"] >= self.seen.now["steps"]

    def _answers(self) -> bool:
        return self.seen.now["state"] in ("running", "waiting") and time.time() - self.seen.now["time"] < 3

    def _names(self, fault: Fault) -> set[str]:
        return {row["name"] for row in self.seen.now["actors"] if row["name"].startswith(f"{fault.victim}/")}

    def _victims(self, fault: Fault) -> list[tuple[str, int]]:
        """Whose process runs."""
        now = self.seen.now
        if fault.victim == "supervisor":
            found = [("supervisor", now["supervisor"]["pid"])]
        else:
            found = [
                (row["name"], row["pid"])
                for row in now["actors"]
                if row["name"] == fault.victim or row["name"].startswith(f"{fault.victim}/")
                if row["state"] == "healthy" and (fault.victim != "trainer/policy" or row["kind"] == "trainer")
            ]
        return sorted((name, pid) for name, pid in found if pid is not None and _runs(pid))

    def _calm(self) -> bool:
        """Everybody is there, nobody stands still, and every maker has filled something."""
        now = self.seen.now
        return (
            now["state"] == "running"
            and time.time() - now["time"] < 3
            and all(done.pid is None or not _runs_or_stands_still(done.pid) for done in self._played.done)
            and all(row["state"] == "healthy" for row in now["actors"])
            and all(row["committed"] for row in now["actors"] if row["kind"] == "maker")
        )

    def _left(self) -> list[str]:
        """What is left of the run, when it has had time to go."""
        deadline = time.monotonic() + GONE
        while (left := [*self._processes_left(), *self._names_left()]) and time.monotonic() < deadline:
            time.sleep(1.0)
        return [f"left: {what}" for what in left]

    def _processes_left(self) -> list[str]:
        """In a cluster that is not its own, workers that wait for work are the cluster's."""
        left = [process for process in processes_of(self.folder) if process.pid not in self._there_before]
        names = [(process.pid, " ".join(_words(process))) for process in left]
        return [f"process {pid} {name}" for pid, name in names if name and not name.startswith("ray::IDLE")]

    def _names_left(self) -> list[str]:
        address = self._environment.get("RAY_ADDRESS")
        if address is None:
            return []
        variables = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH")
        os.environ.update({name: self._environment[name] for name in variables})
        try:
            with connected(None, address, own=False) as ray:
                space = namespace_of(self.scenario.name)
                named = ray.util.list_named_actors(all_namespaces=True)
                actors = [f"actor {row['name']}" for row in named if row["namespace"] == space]
                groups = ray.util.placement_group_table().values()
                return actors + [f"placement group {row['name']}" for row in groups if row["state"] != "REMOVED"]
        finally:
            for name in variables:
                os.environ.pop(name)

    # --- doing and waiting --------------------------------------------------------------------------------------------

    def _start(self) -> None:
        (self.folder / "rewards_of_chaos.py").write_text(REWARDS)
        steps = STEPS_A_FAULT * len(self.scenario.faults)
        settings = [*SETTINGS, f"trainers.policy.steps={steps}"]
        settings.append(f"trainers.policy.backend.data_parallel={self.scenario.ranks}")
        words = [word for setting in settings for word in ("--set", setting)]
        self._tandem("run", TINY, "--name", self.scenario.name, "--detach", *words)

    def _tandem(self, *words: str, excuse: Callable[[], bool] = lambda: False) -> None:
        """Raises Stuck for a command that fails without an excuse."""
        command = f"tandem {' '.join(words[:4])}"
        try:
            done = subprocess.run(
                [TANDEM, *words],
                cwd=self.folder,
                env=self._environment,
                capture_output=True,
                text=True,
                timeout=PATIENCE,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise Stuck(f"{command}: not done within {PATIENCE:g} s") from None
        if done.returncode != 0 and not excuse():
            raise Stuck(f"{command}: exit code {done.returncode}\n{done.stdout}{done.stderr}".strip())

    def _wait(self, condition: Callable[[], Any], what: str) -> None:
        deadline, step = time.monotonic() + PATIENCE, self.seen.now["step"]
        while not condition():
            if self.seen.now["step"] != step:
                deadline, step = time.monotonic() + PATIENCE, self.seen.now["step"]
            if time.monotonic() > deadline:
                now = self.seen.now
                actors = [(row["name"], row["state"], row["pid"], row["committed"]) for row in now["actors"]]
                raise Stuck(
                    f"{what}: not within {PATIENCE:g} s; the run is {now['state']} at step {now['step']} "
                    f"({now.get('phase')}): {now.get('cause')}; {actors}"
                )
            time.sleep(0.1)


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_STOPPED)
    except psutil.NoSuchProcess:
        return False


def _runs_or_stands_still(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
