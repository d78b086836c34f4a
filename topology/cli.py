"""The command `tandem`. Exit codes: 0 done; 2 config or arguments wrong; 3 the run failed; 130 interrupted."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from topology.config import ConfigError
from topology.interrupts import interrupt_as_usual, interrupt_no_more, interrupt_once
from topology.runs import ENDED, RUNS, RunError, RunFolder, all_runs, existing_run

app = typer.Typer(
    help="Decoupled experience makers and trainers for asynchronous post-training.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode="rich",
    epilog="Exit codes: 0 done; 2 the config or the arguments are wrong; 3 the run failed; 130 interrupted.",
)
out = Console(highlight=False)
err = Console(stderr=True, highlight=False)

Config = Annotated[Path, typer.Argument(help="Topology in YAML.")]
Name = Annotated[str, typer.Argument(help="Run name, or its folder.")]
Overrides = Annotated[list[str] | None, typer.Option("--set", help="key.path=value, may be repeated.")]
Detach = Annotated[bool, typer.Option("--detach", help="Start and return at once.")]
Json = Annotated[bool, typer.Option("--json", help="Machine-readable output on stdout only.")]

WRONG, FAILED, INTERRUPTED = 2, 3, 130
TANDEM = (sys.executable, "-m", "topology.cli")


@app.command()
def run(
    config: Config,
    overrides: Overrides = None,
    name: Annotated[str | None, typer.Option(help="Name of the run instead of the config's.")] = None,
    detach: Detach = False,
) -> None:
    """Plan, start and follow a run. Ctrl-C asks: detach or stop.

    The run lives in the folder runs/NAME ($TANDEM_RUNS/NAME where that is set) and outlives this command; where no
    terminal can answer, Ctrl-C stops it, and so does the SIGTERM of whoever ends the command.
    """
    interrupt_once()
    with errors():
        from topology.launch import launch
        from topology.prepare import prepare

        with err.status("checking the config, preparing the model ..."):
            prepared = prepare(config, overrides or (), name)
        with err.status(f"starting {len(prepared.plan.actors)} actors ..."):
            started = launch(prepared)
        _after_start(started, detach)


@app.command()
def resume(run_dir: Name, overrides: Overrides = None, detach: Detach = False) -> None:
    """Go on from the newest checkpoint of an ended run."""
    interrupt_once()
    with errors():
        from topology import launch

        with err.status("reading the checkpoint, starting ..."):
            started = launch.resume(existing_run(run_dir).path, overrides or ())
        _after_start(started, detach)


@app.command()
def plan(config: Config, overrides: Overrides = None, as_json: Json = False) -> None:
    """Show what would run, and whether it can; starts nothing."""
    from topology.prepare import prepare
    from topology.show import plan_as_dict, render_plan

    with errors():
        with err.status("checking the config ..."):
            prepared = prepare(config, overrides or ())
        if as_json:
            print(json.dumps(plan_as_dict(prepared.plan)))
        else:
            out.print(render_plan(prepared.config, prepared.plan))


@app.command("list")
def list_runs(
    root: Annotated[Path, typer.Option(envvar=RUNS, help="Folder that holds the run folders.")] = Path("runs"),
    as_json: Json = False,
) -> None:
    """The runs of a folder and their state."""
    with errors():
        statuses = [_status_or_why_not(folder) for folder in all_runs(root)]
        if as_json:
            print(json.dumps(statuses))
            return
        table = Table("run", "state", "step", "cause", box=None)
        for status in statuses:
            steps = f"{status['step']}/{status['steps']}" if status.get("steps") else str(status["step"])
            table.add_row(status["name"], status["state"], steps, Text(status.get("cause") or ""))
        out.print(table if statuses else f"no runs in {root}")


def _status_or_why_not(folder: RunFolder) -> dict[str, Any]:
    """One broken folder must not hide the others."""
    try:
        return folder.status()
    except RunError as error:
        return {"name": folder.name, "state": "unreadable", "cause": str(error), "step": 0}


@app.command()
def status(
    name: Name,
    watch: Annotated[bool, typer.Option("--watch", help="Follow until the run ends; Ctrl-C leaves it alone.")] = False,
    as_json: Json = False,
) -> None:
    """State of a run, live or ended: actors, versions, buffer, staleness, rates, what it is bound by."""
    from topology.run import Run

    with errors():
        found = Run(existing_run(name))
        if as_json:
            print(json.dumps(found.status()))
        elif watch:
            _follow(found, lambda: False)
        else:
            from topology.live import render

            out.print(render(found.status(), found.folder.tail(found.folder.metrics, 60)))


@app.command()
def logs(
    name: Name,
    actor: Annotated[str | None, typer.Argument(help="Actor such as maker/rollout/0; none: list them.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run ends.")] = False,
) -> None:
    """Logs of a run: of one actor, or the list of what there is."""
    from topology.names import log_file

    with errors():
        folder = existing_run(name)
        if actor is None:
            for file in sorted(folder.logs.glob("*.log")):
                out.print(f"{file.stem:32} {file.stat().st_size:>10} bytes")
            return
        file = log_file(folder.path, actor)
        if not file.exists():
            known = ", ".join(sorted(log.stem for log in folder.logs.glob("*.log"))) or "none yet"
            raise ConfigError(f"run {folder.name} has no log of `{actor}` (there are: {known})")
        with file.open(errors="replace") as stream:
            while True:
                sys.stdout.write(stream.read())
                sys.stdout.flush()
                if not follow or folder.status()["state"] in ENDED:
                    return
                time.sleep(0.5)


@app.command()
def stop(
    name: Name, now: Annotated[bool, typer.Option("--now", help="Do not finish the step, write no checkpoint.")] = False
) -> None:
    """Finish the step, write a checkpoint, stop; leaves no actor behind."""
    from topology.run import Run

    with errors():
        found = Run(existing_run(name))
        if (state := found.status()["state"]) in ENDED:
            out.print(f"run {found.name} has already ended: {state}")
            return
        with err.status(f"stopping {found.name} ..."):
            ended = found.stop(now)
        cause = f" ({ended['cause']})" if ended.get("cause") else ""
        out.print(f"run {found.name}: {ended['state']} at {_reached(ended)}{cause}", markup=False, soft_wrap=True)
        if ended["state"] == "failed":
            raise typer.Exit(FAILED)


@app.command()
def attach(
    name: Name,
    group: Annotated[str, typer.Argument(help="A maker group of the run; with --maker the name of a new one.")],
    replicas: Annotated[int, typer.Option(help="How many makers more.", min=1)] = 1,
    maker: Annotated[Path | None, typer.Option(help="A new group: a YAML file with the keys of a maker.")] = None,
) -> None:
    """Add makers to a live run; they work when this returns."""
    from topology.config import load_maker
    from topology.run import Run

    with errors():
        section = None if maker is None else load_maker(maker)
        found = Run(existing_run(name))
        with err.status(f"attaching to {found.name} ..."):
            names = found.attach(group, replicas, section)
        out.print(f"attached to run {found.name}: {', '.join(names)}", soft_wrap=True, markup=False)


@app.command()
def detach(
    name: Name,
    maker: Annotated[str, typer.Argument(help="Maker such as maker/rollout/1.")],
    now: Annotated[bool, typer.Option("--now", help="Do not finish its rows: others make them again.")] = False,
) -> None:
    """Take one maker out of a live run; loses no row."""
    from topology.run import Run

    with errors():
        found = Run(existing_run(name))
        with err.status(f"detaching {maker} ..."):
            found.detach(maker, now)
        out.print(f"detached from run {found.name}: {maker}", soft_wrap=True, markup=False)


@app.command()
def checkpoint(name: Name) -> None:
    """Write a checkpoint at the end of the present step; the run goes on."""
    from topology.run import Run

    with errors():
        found = Run(existing_run(name))
        with err.status(f"waiting for the end of a step of {found.name} ..."):
            folder = found.checkpoint()
        out.print(str(folder), soft_wrap=True, markup=False)


@app.command()
def export(
    run_dir: Name, destination: Annotated[Path, typer.Argument(help="A folder that does not exist yet.")]
) -> None:
    """Write the policy of the newest checkpoint as a Hugging Face checkpoint."""
    from topology.export import export_policy

    with errors():
        with err.status("loading the checkpoint ..."):
            step = export_policy(existing_run(run_dir), destination)
        out.print(f"policy of step {step} written to {destination}")


# --- following --------------------------------------------------------------------------------------------------------


def _after_start(started: Any, detach: bool) -> None:
    if detach:
        out.print(f"run {started.name} goes on by itself: tandem status {started.folder.path} --watch")
        return
    if sys.stdin.isatty():
        interrupt_as_usual()  # the run outlives this command, and Ctrl-C asks
    ended = _follow(started, lambda: _ask_to_stop(started))
    if ended is not None:
        _finish(started, ended)


def _follow(run: Any, on_interrupt: Callable[[], bool]) -> dict[str, Any] | None:
    """Show the run until it ends (its last status), or until Ctrl-C decides to leave it alone (None)."""
    from topology.live import LiveView

    while True:
        try:
            with LiveView(console=out) as view:
                while True:
                    status = run.status()
                    view.update(status, run.folder.tail(run.folder.metrics, 60))
                    if status["state"] in ENDED:
                        return status
                    time.sleep(0.5)
        except KeyboardInterrupt:
            if not on_interrupt():
                return None


def _ask_to_stop(run: Any) -> bool:
    """True to go on following (until the run has stopped), False to leave it alone."""
    if not sys.stdin.isatty():
        err.print(f"interrupted: run {run.name} is being stopped")
        # In a session of its own: a job server leaves this process 3 s, and a step may take longer.
        subprocess.run([*TANDEM, "stop", str(run.folder.path)], start_new_session=True, check=False)
        raise typer.Exit(INTERRUPTED)
    answer = typer.prompt("[d]etach (the run goes on), [s]top it, or [c]ontinue to watch", default="d")[:1].lower()
    if answer == "c":
        return True
    if answer == "s":
        run.stop()
        raise typer.Exit(INTERRUPTED)
    out.print(f"detached; look again with: tandem status {run.folder.path} --watch")
    return False


def _reached(status: dict[str, Any]) -> str:
    return f"{'part' if status.get('collected') else 'step'} {status['step']}"


def _finish(run: Any, ended: dict[str, Any]) -> NoReturn:
    from topology.report import build_report, summary

    run.wait_for_cluster_end()
    if run.folder.tail(run.folder.metrics, 1):
        out.print(summary(run.folder.path))
        try:
            out.print(f"report: {escape(str(build_report(run.folder.path)))}", soft_wrap=True)
        except OSError as error:  # a full disk: the run itself is what it is
            err.print(f"no report: {escape(str(error))}")
    if ended["state"] == "failed":
        _leave(f"[red]run {run.name} failed:[/red] {escape(str(ended['cause']))}", FAILED)
    total = f" of {ended['steps']}" if ended.get("steps") else ""
    cause = f" ({ended['cause']})" if ended.get("cause") else ""
    told = f"run {run.name}: {ended['state']} at {_reached(ended)}{total}{cause}, folder {run.folder.path}"
    out.print(told, soft_wrap=True, markup=False)
    raise typer.Exit(0)


@contextmanager
def errors() -> Iterator[None]:
    """One clear message and the exit code for what went wrong."""
    try:
        yield
    except ConfigError as error:
        _leave(f"[red]error:[/red] {escape(str(error))}", WRONG)
    except (RunError, TimeoutError) as error:
        _leave(f"[red]failed:[/red] {escape(str(error))}", FAILED)
    except (KeyboardInterrupt, typer.Abort):  # the latter: Ctrl-C at a question
        _leave("interrupted", INTERRUPTED)


def _leave(message: str, code: int) -> NoReturn:
    err.print(message, soft_wrap=True)
    raise typer.Exit(code) from None


def main() -> None:
    try:
        app()
    finally:
        interrupt_no_more()


if __name__ == "__main__":
    main()
