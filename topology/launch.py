"""From a config to a run, and back to it: everything that is checked before anything starts, the start, and the handle.

Guarantees: whatever can be known beforehand is checked before the run folder exists (`ConfigError`); a start that fails
ends what it had started; a handle works from any process that can read the run folder.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from makers.config import CustomMaker, FilePrompts, ModelConfig, RewardMaker
from topology.bundles import Node
from topology.capacity import Capacity
from topology.changes import grown
from topology.config import ConfigError, RunConfig, dump_config, load_config
from topology.joining import cluster_address, connected
from topology.keeper import HEAD_START, end_keeper, start_keeper
from topology.members import snapshot
from topology.models import ModelError, ModelInfo, model_info, resolve_model
from topology.names import namespace_of
from topology.plan import GIB, Plan, make_plan
from topology.roles import POLICY, model_of
from topology.runs import (
    ENDED,
    JOB_CODE,
    RUNS,
    RunError,
    RunFolder,
    process_alive,
    read_json,
    run_folder,
    wait_for_file,
    write_json,
)
from topology.vocabulary import difference
from trainers.checkpoints import LATEST, RANKS_FOLDER, Checkpoint, CheckpointError, find_latest
from trainers.config import CustomAlgorithm, MegatronBackend

CONNECT = 60.0  # seconds to reach a cluster, and for one call to a supervisor


@dataclass(frozen=True)
class Prepared:
    """A config that passed every check, with what the checks found."""

    config: RunConfig
    model_path: Path
    model: ModelInfo
    plan: Plan
    address: str | None  # host:port of the cluster to join


@dataclass(frozen=True)
class Run:
    """A run, live or ended, seen through its folder."""

    folder: RunFolder

    @property
    def name(self) -> str:
        return self.folder.name

    def status(self) -> dict[str, Any]:
        return self.folder.status()

    def wait(self, timeout: float | None = None) -> dict[str, Any]:
        """Block until the run has ended; its last status. Raises TimeoutError."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (status := self.status())["state"] not in ENDED:
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"run {self.name} is still {status['state']} after {timeout:g} s")
            time.sleep(0.2)
        return status

    def stop(self, now: bool = False) -> dict[str, Any]:
        """Drain and stop (or end at once). Returns the last status; the run's cluster is gone afterwards."""
        if self.status()["state"] not in ENDED:
            timeout = load_config(self.folder.config).limits.stop + CONNECT
            with self._supervisor() as supervisor:
                import ray

                ray.get(supervisor.stop.remote(now), timeout=CONNECT)
            self.wait(timeout)
        self.wait_for_cluster_end()
        return self.status()

    def attach(self, group: str, replicas: int = 1, maker: Mapping[str, Any] | None = None) -> list[str]:
        """Makers more, which work when this returns; their names.

        `replicas` more of a group that the run has, or with `maker` (keys as in the config) a new group. Raises ConfigError
        for what cannot work, RunError: the run is then as it was.
        """
        config = load_config(self.folder.config)
        section = None if maker is None else dict(maker)
        check(grown(config, group, section, replicas))
        return self._ask_supervisor("attach", group, section, replicas, timeout=2 * config.limits.start)

    def detach(self, maker: str, now: bool = False) -> None:
        """One maker fewer: it finishes its rows first, or with `now` others make them again. Raises ConfigError, RunError."""
        config = load_config(self.folder.config)
        self._ask_supervisor("detach", maker, now, timeout=config.limits.start + config.buffer.lease_timeout)

    def checkpoint(self) -> Path:
        """Have a checkpoint written of the present step, when that is done; its folder. Raises ConfigError, RunError."""
        limits = load_config(self.folder.config).limits
        return Path(self._ask_supervisor("checkpoint", timeout=limits.batch + 3 * limits.step))

    def _ask_supervisor(self, method: str, *args: Any, timeout: float) -> Any:
        state = self.status()["state"]
        if state in ENDED:
            raise ConfigError(f"run {self.name} has ended ({state}): {method} works while it runs")
        with self._supervisor() as supervisor:
            import ray

            try:
                return ray.get(getattr(supervisor, method).remote(*args), timeout=timeout)
            except ray.exceptions.RayTaskError as error:
                if isinstance(error.cause, ConfigError):
                    raise ConfigError(str(error.cause)) from None
                raise RunError(f"run {self.name}: {method}: {error.cause}") from None
            except ray.exceptions.GetTimeoutError:
                raise RunError(f"run {self.name}: {method} was not done within {timeout:g} s") from None

    def wait_for_cluster_end(self, timeout: float = 60.0) -> None:
        """The keeper ends the run's own cluster shortly after the run; wait for that. Raises TimeoutError."""
        cluster = read_json(self.folder.cluster_file)
        deadline = time.monotonic() + timeout
        while cluster and cluster.get("keeper") and process_alive(cluster["keeper"], cluster["keeper_started"]):
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"the cluster of run {self.name} (keeper process {cluster['keeper']}) is still there"
                )
            time.sleep(0.1)

    @contextmanager
    def _supervisor(self) -> Iterator[Any]:
        cluster = read_json(self.folder.cluster_file)
        if cluster is None:
            raise RunError(f"run {self.name} has no cluster")
        with connected(self.folder, cluster["address"], own=cluster.get("keeper") is not None) as ray:
            try:
                supervisor = ray.get_actor("supervisor", namespace=namespace_of(self.name))
            except ValueError as error:
                raise RunError(f"run {self.name}: no supervisor in its cluster") from error
            yield supervisor


# --- before -----------------------------------------------------------------------------------------------------------


def prepare(config_path: str | Path, overrides: Any = (), name: str | None = None) -> Prepared:
    """Read a config, prepare its model, and check all that can be known before a start. Raises ConfigError."""
    return check(load_config(config_path, overrides, name))


def check(config: RunConfig) -> Prepared:
    try:
        path = resolve_model(config.model.path)
        model = model_info(path)
    except ModelError as error:
        raise ConfigError(str(error)) from None
    config = _absolute_paths(config)
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # where prompts of the user's own are looked for, here as in every actor
    own_models = _own_models(config, path)
    address = cluster_address(config)
    plan = make_plan(config, model, capacity_of(config, address), own_models)
    _check_own_code(config)
    _check_reward_functions(config, _check_prompts(config, model))
    return Prepared(config, path, model, plan, address)


def _own_models(config: RunConfig, policy: Path) -> dict[str, ModelInfo]:
    """By group, of makers with a model of their own; each numbers tokens as the policy does, or ConfigError."""
    found = {}
    for group, maker in config.makers.items():
        own = model_of(maker)
        if own is None:
            continue
        key = f"makers.{group}.model.path"
        try:
            folder = resolve_model(own.path)
            found[group] = model_info(folder)
        except ModelError as error:
            raise ConfigError(f"{key}: {error}") from None
        if other := difference(policy, folder):
            raise ConfigError(f"{key}: {other}: it would score other tokens; use a model with the policy's tokenizer")
    return found


def capacity_of(config: RunConfig, address: str | None) -> Capacity:
    """What the cluster at `address` offers. A run's own cluster offers as many CPUs as the plan needs, unless told."""
    if address is None:
        gpus = config.cluster.gpus if config.cluster.gpus is not None else _count_gpus()
        cpus = config.cluster.cpus if config.cluster.cpus is not None else float("inf")
        what = "this machine" if config.cluster.cpus is None else f"this machine (cluster.cpus: {config.cluster.cpus})"
        return Capacity(what, (Node("this machine", cpus, gpus, psutil.virtual_memory().available / GIB),))
    with connected(None, address, own=False):
        from topology.placement import cluster_nodes

        return Capacity(f"the cluster at {address}", cluster_nodes())


def _count_gpus() -> int:
    return len([device for device in Path("/dev").glob("nvidia[0-9]*") if device.name[6:].isdigit()])


def _absolute_paths(config: RunConfig) -> RunConfig:
    """Files are named relative to where the command is given; actors run elsewhere."""

    def absolute(prompts: Any) -> Any:
        if not isinstance(prompts, FilePrompts):
            return prompts
        return prompts.model_copy(update={"path": str(Path(prompts.path).expanduser().resolve())})

    def located(model: ModelConfig) -> ModelConfig:
        folder = Path(model.path).expanduser()
        return model.model_copy(update={"path": str(folder.resolve())}) if folder.is_dir() else model

    def at_home(maker: Any) -> Any:
        own = model_of(maker)
        return maker if own is None else maker.model_copy(update={"model": located(own)})

    changes: dict[str, Any] = {"prompts": absolute(config.prompts), "model": located(config.model)}
    changes["makers"] = {group: at_home(maker) for group, maker in config.makers.items()}
    if config.evaluation is not None:
        changes["evaluation"] = config.evaluation.model_copy(update={"prompts": absolute(config.evaluation.prompts)})
    return config.model_copy(update=changes)


def _check_prompts(config: RunConfig, model: ModelInfo) -> tuple[str, ...] | None:
    """The columns of the training prompts, None if that is not known before they are read."""
    from makers.prompts import PromptsError, check_prompts, take

    sources = {"prompts": (config.prompts, 1)}
    if config.evaluation is not None:
        sources["evaluation.prompts"] = (config.evaluation.prompts, config.evaluation.size)
    columns = None
    for key, (source, wanted) in sources.items():
        try:
            summary = check_prompts(source)
            if summary.rows is not None and summary.rows < wanted:
                raise ConfigError(f"{key}: {wanted} prompts are wanted, the data has {summary.rows}")
            first = take(source, 1)[0]
        except PromptsError as error:
            raise ConfigError(f"{key}: {error}") from None
        if not isinstance(first.content, str) and not model.has_chat_template:
            raise ConfigError(
                f"{key}: row {first.id} has chat messages, but the model's tokenizer has no chat template: "
                "give text prompts, or add a chat template to the model folder"
            )
        columns = columns if key != "prompts" else summary.columns
    return columns


def _check_own_code(config: RunConfig) -> None:
    """Maker kinds and algorithms of the user's own must be found before anything starts."""
    from makers.dotted import check_dotted

    paths = {f"makers.{group}.kind": m.kind for group, m in config.makers.items() if isinstance(m, CustomMaker)}
    algorithm = config.trainers[POLICY].algorithm
    if isinstance(algorithm, CustomAlgorithm):
        paths[f"trainers.{POLICY}.algorithm.type"] = algorithm.type
    for key, path in paths.items():
        try:
            check_dotted(path)
        except ValueError as error:
            raise ConfigError(f"{key}: {error}") from None


def _check_reward_functions(config: RunConfig, columns: tuple[str, ...] | None) -> None:
    from makers.rewards.check import check_functions

    for group, maker in config.makers.items():
        if not isinstance(maker, RewardMaker):
            continue
        try:
            check_functions(maker.functions, columns)
        except ValueError as error:
            raise ConfigError(f"makers.{group}.functions: {error}") from None


# --- starting ---------------------------------------------------------------------------------------------------------


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
    """Go on from the newest checkpoint of an ended run, in the same folder."""
    from topology.runs import existing_run

    folder = existing_run(str(Path(run_dir).resolve()))
    state = folder.status()["state"]
    if state not in ENDED:
        raise ConfigError(f"run {folder.name} is {state}: stop it first with `tandem stop {folder.name}`")
    try:
        checkpoint = find_latest(folder.checkpoints)
    except CheckpointError as error:
        raise ConfigError(str(error)) from None
    prepared = prepare(folder.config, overrides, name=folder.name)
    _check_same_model(checkpoint, prepared)
    steps = prepared.config.trainers[POLICY].steps
    if checkpoint.step >= steps:
        raise ConfigError(
            f"the newest checkpoint of run {folder.name} is at step {checkpoint.step} of {steps}: nothing is left to do; "
            f"to train longer: --set trainers.policy.steps={checkpoint.step * 2}"
        )
    for file in (folder.status_file, folder.cluster_file):
        file.unlink(missing_ok=True)
    return _start_actors(prepared, folder, {**checkpoint.meta, "folder": str(checkpoint.path)})


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
        address = read_json(folder.cluster_file)["address"]
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
    with suppress(Exception), Run(folder)._supervisor() as supervisor:
        import ray

        try:
            ray.get(supervisor.stop.remote(True), timeout=CONNECT)
            ray.get(supervisor.hold.remote(), timeout=CONNECT)  # fails when it has ended
        finally:
            ray.kill(supervisor)
