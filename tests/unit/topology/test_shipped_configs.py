"""Every shipped config has a plan on the machines that its first lines name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from topology.bundles import Node
from topology.capacity import Capacity
from topology.config import load_config
from topology.models import ModelInfo
from topology.plan import Plan, make_plan
from topology.roles import POLICY, model_of
from trainers.config import AlgorithmConfig

LAPTOP = Capacity("this machine", (Node("laptop", cpus=float("inf"), gpus=0, memory_gib=16),))
ONE_NODE = Capacity("this machine", (Node("a", cpus=64, gpus=8, memory_gib=512),))
TWO_NODES = Capacity("the cluster at head:6379", tuple(Node(name, 64, 8, 1024) for name in ("a", "b")))
ON_GPUS = {
    "gkd-colocated": ONE_NODE,
    "gkd-teacher-group": ONE_NODE,
    "gkd-separate": ONE_NODE,
    "separate": ONE_NODE,
    "8m1t-two-nodes": TWO_NODES,
    "tp-pp-two-nodes": TWO_NODES,
}


def model(layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int, parameters: float) -> ModelInfo:
    return ModelInfo(
        family="qwen3",
        layers=layers,
        hidden=hidden,
        intermediate=intermediate,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=128,
        vocab=151936,
        tied=False,
        max_positions=40960,
        parameters=int(parameters),
        has_chat_template=True,
    )


MODELS = {  # what their config.json says
    "tiny-llama-first-1": model(1, 128, 256, 4, 2, 3e5),
    "tiny-llama": model(2, 128, 256, 4, 2, 4e5),
    "tiny-llama-reward": replace(
        model(2, 128, 256, 4, 2, 4e5), architectures=("LlamaForSequenceClassification",), labels=1
    ),
    "tiny-llama-process-reward": replace(
        model(2, 128, 256, 4, 2, 4e5), architectures=("LlamaForTokenClassification",), labels=1
    ),
    "smollm2-135m-instruct-first-24": model(24, 576, 1536, 9, 3, 1.13e8),
    "smollm2-135m-instruct": model(30, 576, 1536, 9, 3, 1.35e8),
    "/models/Qwen3-4B": model(36, 2560, 9728, 32, 8, 4.0e9),
    "/models/Qwen3-8B": model(36, 4096, 12288, 32, 8, 8.2e9),
    "/models/Qwen3-32B": model(64, 5120, 25600, 64, 8, 3.28e10),
}


def plan_of(name: str) -> Plan:
    config = load_config(f"configs/{name}.yaml")
    own = {group: MODELS[own.path] for group, maker in config.makers.items() if (own := model_of(maker)) is not None}
    return make_plan(config, MODELS[config.model.path], ON_GPUS.get(name, LAPTOP), own)


@pytest.mark.parametrize("path", sorted(Path("configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_config_has_a_plan(path: Path) -> None:
    plan = plan_of(path.stem)
    assert (plan.gpus > 0) == (path.stem in ON_GPUS)
    assert load_config(path).name == path.stem


def test_every_built_in_algorithm_has_a_shipped_config_of_its_own() -> None:
    kinds, *_ = get_args(AlgorithmConfig)
    built_in = {get_args(kind)[1].tag for kind in get_args(kinds)} - {"custom"}
    configs = [load_config(path) for path in Path("configs").glob("*.yaml")]
    assert built_in == {config.trainers[POLICY].algorithm.type for config in configs if config.collect is None}


@pytest.mark.parametrize(("name", "makers", "ranks"), [("1m1t", 1, 1), ("1m2t", 1, 2), ("2m1t", 2, 1), ("2m2t", 2, 2)])
def test_a_topology_has_the_makers_and_ranks_of_its_name(name: str, makers: int, ranks: int) -> None:
    plan = plan_of(name)
    assert sum(actor.name.startswith("maker/rollout/") for actor in plan.actors) == makers
    assert len(plan.named("rank")) == ranks


def test_the_four_small_topologies_differ_in_makers_and_ranks_only() -> None:
    """So a run that goes from one to another is a run of each."""
    one, two, three, four = (
        load_config(f"configs/{name}.yaml", settings, "same")
        for name, settings in {
            "1m1t": (),
            "2m1t": ("makers.rollout.replicas=1",),
            "1m2t": ("trainers.policy.backend.data_parallel=1",),
            "2m2t": ("makers.rollout.replicas=1", "trainers.policy.backend.tensor_parallel=1"),
        }.items()
    )
    assert one == two == three == four


def test_eight_makers_and_their_trainer_each_fill_a_node() -> None:
    first, second = plan_of("8m1t-two-nodes").nodes
    assert (first.resources.gpus, second.resources.gpus) == (8, 8)
    assert {actor.split("/")[1] for actor in first.actors if "/rank/" in actor or "/rollout/" in actor} == {"policy"}
    assert {actor.split("/")[1] for actor in second.actors if "/rank/" in actor or "/rollout/" in actor} == {"rollout"}


def test_pipeline_stages_and_engines_share_the_sixteen_gpus_of_two_nodes() -> None:
    plan = plan_of("tp-pp-two-nodes")
    stages = [tuple(f"trainer/policy/rank/{index}" for index in range(start, start + 8)) for start in (0, 8)]
    (shared,) = [group for group in plan.groups if group.name == "rollout+policy"]
    assert [bundle.actors for bundle in shared.bundles] == [(f"maker/rollout/{i}", *stages[i]) for i in range(2)]
    assert plan.gpus == 16


def test_a_rank_of_a_large_model_is_counted_with_its_part_of_it() -> None:
    rank = plan_of("tp-pp-two-nodes").named("rank")[0]
    assert 30 < rank.gpu_memory_gib < 80
    assert rank.memory_gib > 30, "its state moves to the host while makers work"
