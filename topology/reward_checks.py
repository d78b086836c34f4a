"""What makes rewards impossible: functions, and models with a head; the same form as topology/checks.py."""

from __future__ import annotations

from collections.abc import Iterator

from makers.config import JudgeMaker, RewardMaker, RewardModelMaker, RolloutMaker
from makers.rewards.pool import labels
from topology.config import RunConfig
from topology.models import SEQUENCE, TOKEN, ModelInfo


def _check_reward_time(config: RunConfig, model: ModelInfo) -> Iterator[str]:
    """The last of `slots` rows waits for all rows before it: a slow function must not look like a hung maker."""
    for group, maker in config.makers.items():
        if isinstance(maker, RewardMaker):
            longest = maker.slots / maker.workers * sum(function.timeout for function in maker.functions)
            if longest > config.buffer.lease_timeout:
                yield (
                    f"makers.{group}: {maker.slots} slots over {maker.workers} worker(s) may take {longest:g} s with these "
                    f"function timeouts, more than buffer.lease_timeout {config.buffer.lease_timeout:g}: lower slots, raise "
                    "workers, or raise buffer.lease_timeout"
                )


def _check_overlong(config: RunConfig, model: ModelInfo) -> Iterator[str]:
    """A penalty that begins beyond what is ever sampled would silently do nothing."""
    budgets = [maker.sampling.max_tokens for maker in config.makers.values() if isinstance(maker, RolloutMaker)]
    for group, maker in config.makers.items():
        for index, function in enumerate(maker.functions if isinstance(maker, RewardMaker) else ()):
            options = function.options
            if function.name != "overlong" or not {"max_tokens", "cache"} <= options.keys() or not budgets:
                continue
            free = options["max_tokens"] - options["cache"]
            if free >= max(budgets):
                yield (
                    f"makers.{group}.functions.{index}.options: the penalty begins after {free} tokens (max_tokens - cache), "
                    f"but no sample is longer than sampling.max_tokens {max(budgets)}: lower max_tokens, or raise cache"
                )


def _check_reward_models(config: RunConfig, model: ModelInfo) -> Iterator[str]:
    makers = {group: maker for group, maker in config.makers.items() if isinstance(maker, RewardMaker)}
    models = {
        group: maker for group, maker in config.makers.items() if isinstance(maker, RewardModelMaker | JudgeMaker)
    }
    read = {term.group for maker in makers.values() for term in maker.models}
    for group, maker in makers.items():
        yield from _check_terms(group, maker, models)
    for group, scorer in models.items():
        if group not in read:
            yield (
                f"makers.{group}: no reward maker reads its scores: name it in one (`models: [{{group: {group}}}]`), or remove it"
            )
        if scorer.route is not None:
            yield (
                f"makers.{group}.route: only this group scores for `reward/{group}`, so rows beyond {scorer.route} would never "
                "be complete: remove the route"
            )
    needs = {group: sorted(term.group for term in maker.models) for group, maker in makers.items()}
    first = next(iter(needs), "")
    for group, needed in needs.items():
        if needed != needs[first]:
            yield (
                f"makers.{group}.models: reads {needed}, makers.{first} reads {needs[first]}: all reward groups need the "
                "same ones, if with a weight of 0"
            )


def _check_terms(group: str, maker: RewardMaker, models: dict[str, RewardModelMaker | JudgeMaker]) -> Iterator[str]:
    names = labels(maker.functions)
    for index, term in enumerate(maker.models):
        key = f"makers.{group}.models.{index}"
        scorer = models.get(term.group)
        if scorer is None:
            yield (
                f"{key}.group: `{term.group}` is no group of `kind: reward_model` or `judge`; there are: "
                f"{', '.join(models) or 'none'}"
            )
            continue
        if term.group in names:
            yield f"{key}.group: a function has the same name, so both would fill `reward/{term.group}`: rename the group"
        of_tokens = isinstance(scorer, RewardModelMaker) and scorer.granularity == "token"
        if of_tokens and term.reduce is None:
            yield (
                f"{key}.reduce: makers.{term.group} scores each token: say how these become one score (last, min, mean, sum)"
            )
        if not of_tokens and term.reduce is not None:
            yield f"{key}.reduce: makers.{term.group} gives one score a sample, so `{term.reduce}` is not read: remove it"


def check_head(config: RunConfig, group: str, own: ModelInfo) -> Iterator[str]:
    """Whether the model of a reward model's group has the head that gives its scores."""
    maker = config.makers[group]
    if not isinstance(maker, RewardModelMaker):
        return
    wanted, allowed = (TOKEN, (1, 2)) if maker.granularity == "token" else (SEQUENCE, (1,))
    if not any(name.endswith(wanted) for name in own.architectures):
        other = "sequence" if maker.granularity == "token" else "token"
        yield (
            f"makers.{group}.model.path: has no head for granularity `{maker.granularity}`: its config.json says "
            f"architectures {list(own.architectures)}, a class ...{wanted} is needed: use a reward model's checkpoint, or "
            f"granularity: {other} for one of the other kind"
        )
    elif own.labels not in allowed:
        yield (
            f"makers.{group}.model.path: its head has {own.labels} labels (config.json, id2label), "
            f"{' or '.join(map(str, allowed))} needed: use a checkpoint with num_labels {allowed[0]}"
        )


REWARD_CHECKS = (_check_reward_time, _check_overlong, _check_reward_models)
