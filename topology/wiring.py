"""Giving the trainers their collaborators: drawing their edges of the picture."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from buffer.records import Prompt
from makers.config import DatasetMaker
from topology.bundles import makers_in_turns, trainers_in_turns
from topology.config import LimitsConfig
from topology.handles import Peer, RayCritic, RayPublisher, RayRows, RaySleeper, RayWorker
from topology.models import model_info
from topology.plan import worst_case_staleness
from topology.roles import CRITIC, POLICY, maker_names, makers_that_pull, max_response_tokens, rank_names, stages_of
from topology.runs import RunFolder
from trainers.batch import Columns
from trainers.checkpoints import Checkpointer
from trainers.collecting.collector import Collector
from trainers.collecting.parts import Parts
from trainers.config import TrainerConfig
from trainers.critic import Critic
from trainers.flops import ModelShape, Utilisation
from trainers.metrics import MetricsBuilder
from trainers.planner import StepPlanner
from trainers.ports import Deadlines, Evaluation, NumberOnly, Publisher, Schedule
from trainers.rank_group import RankGroup
from trainers.recorder import open_recorder
from trainers.rows_writer import RowsWriter, load_decoder
from trainers.trainer import Trainer
from trainers.turns import Turns

MAKER_STATUS = 2.0  # seconds after which a maker's last status has to do


def call_limit(limits: LimitsConfig) -> float:
    """Seconds for a call that only asks or tells: a callee that hangs is found after 1.25 pings, and then made anew."""
    return 1.25 * limits.ping + limits.start


def build_trainer(shell: Any, ranks: Sequence[str], step: int, version: int) -> Trainer:
    """The trainer `policy` of the run that `shell` (a TrainerActor) belongs to."""
    config, folder = shell.config, RunFolder(Path(shell.identity.folder))
    settings = config.trainers[POLICY]
    makers = [name for group, maker in config.makers.items() for name in maker_names(group, maker)]
    writer = None
    if config.rows.every is not None:
        writer = RowsWriter(folder.rows, config.rows.every, load_decoder(Path(shell.identity.model_path)))
    group, limit = _group(shell, ranks), call_limit(config.limits)
    rows = RayRows(shell.peer("buffer"), limit)
    shell.statuses = MakerStatuses([shell.peer(name) for name in makers])
    return Trainer(
        settings,
        planner=StepPlanner(settings, max_response_tokens(config)),
        ranks=group,
        rows=rows,
        weights=_publisher(shell),
        makers=shell.statuses,
        recorder=open_recorder(
            folder.path, config.metrics, name=config.name, run_config=config.model_dump(mode="json")
        ),
        metrics=MetricsBuilder(utilisation=_utilisation(settings, shell.identity.model_path)),
        checkpointer=Checkpointer(folder.checkpoints, config.checkpoint.keep),
        schedule=Schedule(config.weights.every, config.checkpoint.every, config.checkpoint.at_end),
        deadlines=Deadlines(batch=config.limits.batch, step=config.limits.step, call=limit),
        max_age=worst_case_staleness(config),
        critic=None
        if config.trainers.critic is None
        else RayCritic(shell.actor(f"trainer/{CRITIC}"), config.limits.step),
        evaluation=_evaluation(config, shell.identity.model_path),
        rows_writer=writer,
        turns=_turns(shell, rows, group),
        start_step=step,
        start_version=version,
    )


def _utilisation(settings: TrainerConfig, model_path: str) -> Utilisation | None:
    if settings.peak_tflops is None:
        return None
    backend, model = settings.backend, model_info(model_path)
    shape = ModelShape(model.layer_weights, model.hidden * model.vocab, model.layers * model.heads * model.head_dim)
    return Utilisation(shape, settings.peak_tflops * backend.ranks, backend.share_prompt)


def _publisher(shell: Any) -> Publisher:
    """Where nobody pulls weights a version is a number that admission goes by, and its weights are not copied."""
    if not makers_that_pull(shell.config):
        return NumberOnly()
    return RayPublisher(shell.peer("weights"), shell.config.weights.timeout)


def build_collector(shell: Any) -> Collector:
    """The collector of the run that `shell` (a CollectorActor) belongs to."""
    config, folder = shell.config, RunFolder(Path(shell.identity.folder))
    limit = call_limit(config.limits)
    return Collector(
        config.collect,
        stages=stages_of(config),
        rows=RayRows(shell.peer("buffer"), limit),
        parts=Parts(folder.collected, config.collect.jsonl),
        decode=load_decoder(Path(shell.identity.model_path)),
        recorder=open_recorder(
            folder.path, config.metrics, name=config.name, run_config=config.model_dump(mode="json")
        ),
        deadlines=Deadlines(batch=config.limits.batch, step=config.limits.step, call=limit),
        report=folder.collected / "report.json",
    )


def build_critic(shell: Any, ranks: Sequence[str]) -> Critic:
    """The critic of the run that `shell` (a CriticActor) belongs to."""
    return Critic(shell.config.trainers[CRITIC], _group(shell, ranks))


def _group(shell: Any, ranks: Sequence[str]) -> RankGroup:
    return RankGroup([RayWorker(name, shell.actor(name)) for name in ranks], shell.config.limits.step)


def _turns(shell: Any, rows: RayRows, policy: RankGroup) -> Turns | None:
    config, limit = shell.config, shell.config.limits.step
    makers = [RaySleeper(shell.peer(name), config.placement.sleep_level, limit) for name in makers_in_turns(config)]
    if not makers:
        return None
    sharing = [
        policy if role == POLICY else _group(shell, rank_names(role, config.trainers[role]))
        for role in trainers_in_turns(config)
    ]
    return Turns(makers, rows, sharing, limit)


class MakerStatuses:
    """Statuses of all makers by name; of one that is busy or gone, its last."""

    def __init__(self, makers: Sequence[Peer]) -> None:
        self._makers = makers
        self._last: dict[str, dict[str, Any]] = {}

    def of(self, makers: Sequence[Peer]) -> None:
        """These from now on."""
        self._makers = makers
        self._last = {maker.name: self._last[maker.name] for maker in makers if maker.name in self._last}

    async def __call__(self) -> dict[str, dict[str, Any]]:
        async def ask(maker: Peer) -> None:
            self._last[maker.name] = await maker.call("status", timeout=MAKER_STATUS)

        asked = [ask(maker) for maker in self._makers]
        await asyncio.gather(*asked, return_exceptions=True)  # the supervisor is who watches over makers
        return dict(self._last)


def _evaluation(config: Any, model_path: str) -> Evaluation | None:
    from makers.prompts import take

    wanted = config.evaluation
    if wanted is None:
        return None
    prompts = take(wanted.prompts, wanted.size)
    return Evaluation(
        prompts=prompts,
        rows=_held_out(config, prompts, model_path) if wanted.by == "ranks" else (),
        samples=wanted.samples,
        every=wanted.every,
        at_start=wanted.at_start,
        at_end=wanted.at_end,
        timeout=wanted.timeout,
        seed=config.seed,
    )


def _held_out(config: Any, prompts: Sequence[Prompt], model_path: str) -> list[Columns]:
    """As the dataset maker would have them. Raises DataFailure that names the row."""
    from makers.dataset import DatasetRows

    maker = next(maker for maker in config.makers.values() if isinstance(maker, DatasetMaker))
    rows = DatasetRows(maker, model_path)
    return [rows.columns(prompt) for prompt in prompts]
