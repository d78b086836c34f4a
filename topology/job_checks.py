"""What makes a job (a run with `collect`) impossible: one small check for each reason. Pure; see `topology.checks`."""

from __future__ import annotations

from collections.abc import Iterator

from buffer.config import BufferConfig
from makers.config import RolloutMaker
from topology.config import CheckpointConfig, RowsConfig, RunConfig
from topology.models import ModelInfo
from topology.roles import stages_of
from trainers.collecting.config import BestOfN, Rejection
from weights.config import WeightsConfig


def check_job(config: RunConfig, model: ModelInfo) -> Iterator[str]:
    collect = config.collect
    if collect is None:
        return
    for stage in ("rollout", *collect.scores):
        if stage not in stages_of(config):
            remedy = "add one" if stage == "rollout" else f"add one, or take `{stage}` out of collect.scores"
            yield f"makers: no group provides `{stage}`, which collect needs; {remedy} (groups: {', '.join(config.makers)})"
    chooses = isinstance(collect.select, BestOfN | Rejection)
    if not collect.scores and (chooses or collect.report):
        what = "select" if chooses else "report"
        yield f"collect.scores: empty, but collect.{what} goes by the score of a sample: give a stage, as in {{reward: 1.0}}"
    for group, maker in config.makers.items():
        if isinstance(maker, RolloutMaker):
            yield from _check_samples(config, group, maker.sampling.n)


def _check_samples(config: RunConfig, group: str, n: int) -> Iterator[str]:
    assert config.collect is not None
    select, report = config.collect.select, config.collect.report
    keep = getattr(select, "keep", None)
    if keep is not None and keep > n:
        yield f"collect.select.keep: {keep} of the {n} samples that makers.{group}.sampling.n gives: use at most {n}"
    if report is not None and max(report.pass_at) > n:
        yield (
            f"collect.report.pass_at: {max(report.pass_at)} draws from the {n} samples that makers.{group}.sampling.n gives: "
            f"use at most {n}, or raise n"
        )


def check_unread(config: RunConfig, model: ModelInfo) -> Iterator[str]:
    """Sections that only a trainer reads."""
    standard = {"weights": WeightsConfig(), "checkpoint": CheckpointConfig(), "rows": RowsConfig(), "evaluation": None}
    for section, unset in standard.items():
        if getattr(config, section) != unset:
            yield f"{section}: read only with `trainers`, but this run has `collect`: remove the section"
    for key in ("max_staleness", "order", "window"):
        if getattr(config.buffer, key) != getattr(BufferConfig(), key):
            yield f"buffer.{key}: read only with `trainers`; how many rows are in flight is collect.parts_in_flight"


JOB_CHECKS = (check_job, check_unread)
