"""Starts a run: its folder, its cluster, its supervisor; and starts it again from a checkpoint.

Guarantee: a start that fails, or is interrupted, ends what it had started and says so in the run folder.
"""

from __future__ import annotations

import math
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from topology.config import ConfigError, dump_config
from topology.joining import CONNECT, connected
from topology.keeper import HEAD_START, end_keeper, start_keeper
from topology.members import snapshot
from topology.names import namespace_of
from topology.plan import GIB
from topology.prepare import Prepared, prepare
from topology.roles import POLICY
from topology.run import Run
from topology.runs import (
    ENDED,
    JOB_CODE,
    RUNS,
    RunError,
    RunFolder,
    read_json,
    run_folder,
    wait_for_file,
    write_json,
)
from trainers.checkpoints import LATEST, RANKS_FOLDER, Checkpoint, CheckpointError, find_latest
from trainers.config import MegatronBackend


def start(config_path: str | Path, overrides: Any = (), name: str | None = None, root: Path | None = None) -> Run:
    """Start a run and return its handle; the run goes on whatever becomes of this process."""
    return launch(prepare(config_path, overrides, name), root)


def launch(prepared: Prepared, root: Path | None = None) -> Run:
    """Create the run folder, the cluster and the supervisor. Raises ConfigError if the name is in use, RunError."""
    folder = run_folder(prepared.config.name, root)
    if JOB_CODE in folder.path.parts:
        raise ConfigError(
            f"the run folder would be {folder.path}, in Ray's temporary copy of this job's code: name a folder that all nodes "
            f"see, as in `ray job submit ... -- env {RUNS}=/shared/runs tandem run ...`"
        )
    try:
        folder.path.mkdir(parents=True)
    except FileExistsError:
        raise ConfigError(_in_use(folder)) from None
    except OSError as error:
        raise ConfigError(f"the run folder {folder.path} cannot be created: {error.strerror}") from None
    folder.create()
    return _start_actors(prepared, folder, None)


def _in_use(folder: RunFolder) -> str:
    state = folder.status()["state"] if folder.config.exists() else "not a run"
    go_on = f"go on from its checkpoint with `tandem resume {folder.path}`, "
    return (
        f"run name `{folder.name}` is in use ({folder.path}, {state}): choose another with --name, "
        f"{go_on if (folder.checkpoints / LATEST).exists() else ''}or remove the folder"
    )


def resume(run_dir: str | Path, overrides: Any = ()) -> Run:
    """Go on from the newest checkpoint of an ended run, in the same folder; a job goes on from its files."""
    from topology.runs import existing_run

    folder = existing_run(str(Path(run_dir).resolve()))
    with folder.being_resumed():
        return _resume(folder, overrides)


def _resume(folder: RunFolder, overrides: Any) -> Run:
    state = folder.status()["state"]
    if state not in ENDED:
        raise ConfigError(f"run {folder.name} is {state}: stop it first with `tandem stop {folder.name}`")
    prepared = prepare(folder.config, overrides, name=folder.name)
    if prepared.config.collect is not None:
        if state == "done":
            raise ConfigError(
                f"run {folder.name} is done: its prompts are used up, {folder.collected} has what it collected"
            )
        return _start_again(prepared, folder, None)
    try:
        checkpoint = find_latest(folder.checkpoints)
    except CheckpointError as error:
        raise ConfigError(str(error)) from None
    _check_same_model(checkpoint, prepared)
    steps = prepared.config.trainers[POLICY].steps
    if checkpoint.step >= steps:
        raise ConfigError(
            f"the newest checkpoint of run {folder.name} is at step {checkpoint.step} of {steps}: nothing is left to do; "
            f"to train longer: --set trainers.policy.steps={checkpoint.step * 2}"
        )
    return _start_again(prepared, folder, {**checkpoint.meta, "folder": str(checkpoint.path)})


def _start_again(prepared: Prepared, folder: RunFolder, checkpoint: dict[str, Any] | None) -> Run:
    for file in (folder.status_file, folder.cluster_file):
        file.unlink(missing_ok=True)
    return _start_actors(prepared, folder, checkpoint)


def _check_same_model(checkpoint: Checkpoint, prepared: Prepared) -> None:
    """The Megatron backend notes beside its state which model it is of."""
    stored = read_json(checkpoint.path / RANKS_FOLDER / "model.json")
    if stored is None or not isinstance(prepared.config.trainers[POLICY].backend, MegatronBackend):
        return
    model = prepared.model
    here = {
        "model_type": model.family,
        "vocab_size": model.vocab,
        "hidden_size": model.hidden,
        "intermediate_size": model.intermediate,
        "num_hidden_layers": model.layers,
    }
    there = stored.get("model", {})
    other = [f"{key} {there[key]} there, {value} here" for key, value in here.items() if there.get(key, value) != value]
    if other:
        raise ConfigError(
            f"{checkpoint.path} is of another model than {prepared.model_path}: {', '.join(other)}; "
            "give the model it was trained from with --set model.path=..., or start a new run"
        )


def _start_actors(prepared: Prepared, folder: RunFolder, checkpoint: dict[str, Any] | None) -> Run:
    config = prepared.config
    folder.config.write_text(dump_config(config))
    own = prepared.address is None
    first_step = 0 if checkpoint is None else checkpoint["step"]
    status = snapshot(config, {}, state="starting", cause=None, folder=str(folder.path), first_step=first_step)
    folder.write_starting(status)
    keeper, supervisor = None, None
    try:
        if own:
            folder.write_token()
            keeper = _start_cluster(prepared, folder)
            wait_for_file(
                folder.cluster_file, HEAD_START + CONNECT, lambda: keeper.poll() is None, "the run's Ray cluster"
            )
        else:
            write_json(folder.cluster_file, {"address": prepared.address, "keeper": None})
        address = folder.cluster()["address"]
        with connected(folder, address, own=own) as ray:
            supervisor = _create_supervisor(ray, prepared, folder, checkpoint)
            ray.get(supervisor.start.remote(), timeout=CONNECT)
    except BaseException as error:
        state, cause = "failed", f"start: {str(error) or type(error).__name__}"
        if isinstance(error, KeyboardInterrupt):
            state, cause = "stopped", "interrupted before it had started"
        try:
            if keeper is not None:
                end_keeper(keeper)
            elif supervisor is not None:
                _end_supervisor(folder)
        finally:
            write_json(folder.status_file, {**status, "state": state, "cause": cause})
        if isinstance(error, (RuntimeError, TimeoutError, ConnectionError)):
            raise RunError(f"run {folder.name} could not be started: {error}; {_last_words(folder)}") from error
        raise
    return Run(folder)


def _last_words(folder: RunFolder) -> str:
    """Where the log of the run's own cluster is, and how it ends."""
    log = folder.logs / "cluster.log"
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()] if log.exists() else []
    return f"see {log}" + (f", which ends with: {lines[-1].strip()}" if lines else "")


def _start_cluster(prepared: Prepared, folder: RunFolder) -> Any:
    cluster = prepared.config.cluster
    cpus = cluster.cpus if cluster.cpus is not None else max(math.ceil(prepared.plan.cpus), os.cpu_count() or 1)
    store = int(cluster.object_store_gib * GIB)
    return start_keeper(folder, cpus=cpus, gpus=cluster.gpus, object_store_bytes=store)


def _create_supervisor(ray: Any, prepared: Prepared, folder: RunFolder, checkpoint: dict[str, Any] | None) -> Any:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from topology.actors import Identity
    from topology.supervisor import Supervisor

    identity = Identity(
        run=folder.name,
        name="supervisor",
        folder=str(folder.path),
        python_path=(os.getcwd(),),
        threads=1,
        config=prepared.config,
        model_path=str(prepared.model_path),
    )
    # On this node: the run folder is here.
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    supervisor = ray.remote(Supervisor).options(
        name="supervisor",
        namespace=namespace_of(folder.name),
        lifetime="detached",
        num_cpus=0,
        max_concurrency=1000,
        max_restarts=-1,  # it finds the other actors again by their names
        scheduling_strategy=here,
    )
    try:
        actor = supervisor.remote(identity, prepared.plan, checkpoint)
    except ValueError as error:  # how Ray says that the name is taken
        raise ConfigError(
            f"run name `{folder.name}` is in use on the cluster at {prepared.address}: choose another with --name, or stop "
            "that run"
        ) from error
    return actor


def _end_supervisor(folder: RunFolder) -> None:
    """It is detached: with all that it has started it would stay for ever in a cluster that is not the run's own."""
    with suppress(Exception), Run(folder).supervisor() as supervisor:
        import ray

        try:
            ray.get(supervisor.stop.remote(True), timeout=CONNECT)
            ray.get(supervisor.hold.remote(), timeout=CONNECT)  # fails when it has ended
        finally:
            ray.kill(supervisor)
