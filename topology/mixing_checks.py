"""What makes a mix of sampled rows and a dataset's rows (`distill.lmbda`) impossible. Pure; see `topology.checks`."""

from __future__ import annotations

from collections.abc import Iterator

from makers.config import DatasetMaker, RolloutMaker
from topology.config import RunConfig
from topology.models import ModelInfo
from topology.roles import POLICY, on_policy_of, samples_of_row
from trainers.config import DistillAlgorithm, Dpo, Sft

KEY = "trainers.policy.distill"


def check_mixing(config: RunConfig, model: ModelInfo) -> Iterator[str]:
    datasets = [group for group, maker in config.makers.items() if isinstance(maker, DatasetMaker)]
    rollouts = [group for group, maker in config.makers.items() if isinstance(maker, RolloutMaker)]
    policy = config.trainers[POLICY]
    if on_policy_of(config) == 1.0:
        if policy.distill is not None and policy.distill.sft_alpha:
            yield (
                f"{KEY}.sft_alpha: counts on rows of a dataset, but lmbda is 1, so that the policy samples every row: lower "
                "lmbda and add a group of `kind: dataset`, or set sft_alpha to 0"
            )
        if datasets and rollouts and not isinstance(policy.algorithm, Sft | Dpo):
            yield (
                f"makers.{datasets[0]}: would take rows at random from makers.{rollouts[0]}: say with {KEY}.lmbda (below 1, "
                "with the algorithm `distill`) how many rows the policy samples, or remove one of the groups"
            )
        return
    yield from _check_mixed(config, datasets, rollouts)


def _check_mixed(config: RunConfig, datasets: list[str], rollouts: list[str]) -> Iterator[str]:
    policy, part = config.trainers[POLICY], on_policy_of(config)
    if not datasets:
        yield (
            f"{KEY}.lmbda: {part:g}, but no group gives the other {1 - part:.0%} of the rows: add one with `kind: dataset`, or "
            "set lmbda to 1"
        )
    if not rollouts:
        yield (
            f"{KEY}.lmbda: {part:g}, but no group samples that fraction of the rows: add one with `kind: rollout`, or use `sft`"
        )
    if not isinstance(policy.algorithm, DistillAlgorithm) or (policy.distill and policy.distill.advantage_alpha):
        yield (
            f"{KEY}.lmbda: {part:g}, but a dataset's rows have no log-probs of a policy that sampled them, which "
            f"`{policy.algorithm.type}`{' with advantage_alpha' if isinstance(policy.algorithm, DistillAlgorithm) else ''} "
            "compares with: use the algorithm `distill` with advantage_alpha 0, or set lmbda to 1"
        )
    for group in (*datasets, *rollouts):
        maker = config.makers[group]
        if maker.route is not None:
            yield f"makers.{group}.route: with {KEY}.lmbda {part:g} the draw says which rows the group takes: remove it"
        samples = samples_of_row(maker)
        if samples != 1:
            where, remedy = (
                (f"makers.{group}.sampling.n", "use n: 1")
                if group in rollouts
                else (f"makers.{group}", "name the column `completion`")
            )
            yield (
                f"{where}: {samples} samples, but with {KEY}.lmbda {part:g} some rows are a dataset's, which have one "
                f"completion, and all rows of a run have the same number of samples: {remedy}"
            )
