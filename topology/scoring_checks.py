"""What makes a teacher or a reference on an engine impossible; the same form as topology/checks.py."""

from __future__ import annotations

from collections.abc import Iterator

from makers.config import JudgeMaker, ReferenceMaker, RolloutMaker, TeacherMaker, VllmEngine
from topology.config import RunConfig
from topology.models import ModelInfo
from topology.roles import POLICY, max_response_tokens
from trainers.config import GroupPolicy


def scoring_engine(maker: object) -> VllmEngine | None:
    """Of a maker with a frozen model on vLLM; None for any other."""
    return maker.engine if isinstance(maker, TeacherMaker | ReferenceMaker | JudgeMaker) else None


def check_teachers(config: RunConfig, model: ModelInfo) -> Iterator[str]:
    teachers = {group: maker for group, maker in config.makers.items() if isinstance(maker, TeacherMaker)}
    for group, teacher in teachers.items():
        if teacher.top_k is None:
            yield (
                f"makers.{group}.top_k: null asks for the full vocabulary of each token, which only a teacher on the trainer's "
                "own ranks can give: set top_k (64, say), or use a colocated teacher (trainers.policy.distill.teacher)"
            )
    sizes = {teacher.top_k for teacher in teachers.values()}
    if len(sizes) > 1:
        yield f"makers.*.top_k: all teacher groups need the same, got {sorted(sizes, key=str)}"
    if teachers and config.collect is None and "teacher" not in config.trainers[POLICY].stages:
        yield (
            f"makers.{next(iter(teachers))}: nobody reads what a teacher says, as trainers.policy does not distil: remove the "
            "group, or add trainers.policy.distill"
        )


def check_references(config: RunConfig, model: ModelInfo) -> Iterator[str]:
    references = [group for group, maker in config.makers.items() if isinstance(maker, ReferenceMaker)]
    algorithm = None if config.collect is not None else config.trainers[POLICY].algorithm
    if (
        references
        and isinstance(algorithm, GroupPolicy)
        and algorithm.penalises_loss
        and algorithm.reference == "start"
    ):
        yield (
            f"trainers.policy.algorithm.reference: start: KL would be to the start weights, not to makers.{references[0]}: "
            "set it to `maker`, or remove the group"
        )
    for group, maker in config.makers.items():
        if not isinstance(maker, ReferenceMaker) or maker.engine is None:
            continue
        if maker.dtype != ReferenceMaker.model_fields["dtype"].default:
            yield f"makers.{group}.dtype: {maker.dtype} is not read with an engine: set makers.{group}.engine.dtype"
        for rollout, other in config.makers.items():
            if isinstance(other, RolloutMaker) and other.sampling.temperature not in (0.0, 1.0):
                yield (
                    f"makers.{group}.engine: vLLM gives the log-probs of given tokens at temperature 1 only, but "
                    f"makers.{rollout} samples at {other.sampling.temperature:g}: remove makers.{group}.engine, so that "
                    "transformers computes them at that temperature, or sample at 1"
                )


def check_judge(config: RunConfig, group: str, maker: JudgeMaker) -> Iterator[str]:
    """The template comes on top, and its prompt; both are counted in the judge's tokens when a row comes."""
    least = maker.max_tokens + max_response_tokens(config)
    if least >= maker.engine.max_model_len:
        yield (
            f"makers.{group}.engine.max_model_len: {maker.engine.max_model_len} has no room for a completion of up to "
            f"{max_response_tokens(config)} tokens and a verdict of {maker.max_tokens} (makers.{group}.max_tokens), beside the "
            f"template and the prompt: set it well above {least}, or lower one of the two"
        )


def check_scoring(config: RunConfig, group: str, model: ModelInfo) -> Iterator[str]:
    """`model`: that of the group, its own or the run's."""
    maker = config.makers[group]
    engine = scoring_engine(maker)
    if engine is None:
        return
    if isinstance(maker, JudgeMaker):
        yield from check_judge(config, group, maker)
    if isinstance(maker, TeacherMaker) and maker.top_k is not None and maker.top_k > model.vocab:
        yield f"makers.{group}.top_k: {maker.top_k} is more than the {model.vocab} tokens of the model's vocabulary"
    if model.max_positions and engine.max_model_len > model.max_positions:
        yield (
            f"makers.{group}.engine.max_model_len: {engine.max_model_len} is more than the model's "
            f"{model.max_positions} positions"
        )
    for rollout, other in config.makers.items():
        if isinstance(maker, JudgeMaker) or not isinstance(other, RolloutMaker):
            continue
        if other.engine.max_model_len >= engine.max_model_len:
            yield (
                f"makers.{group}.engine.max_model_len: {engine.max_model_len} for rows of makers.{rollout} with up to "
                f"{other.engine.max_model_len} tokens, to which vLLM adds one when it scores: set it to at least "
                f"{other.engine.max_model_len + 1}, or lower makers.{rollout}.engine.max_model_len"
            )
