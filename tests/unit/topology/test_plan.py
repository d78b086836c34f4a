"""The plan: its numbers, and everything it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from topology.capacity import Capacity, Node
from topology.config import ConfigError, RunConfig, load_config
from topology.models import ModelInfo
from topology.plan import make_plan
from topology.roles import max_response_tokens

SMOL = ModelInfo(
    family="llama",
    layers=30,
    hidden=576,
    intermediate=1536,
    heads=9,
    kv_heads=3,
    head_dim=64,
    vocab=49152,
    tied=True,
    experts=0,
    expert_intermediate=0,
    max_positions=8192,
    parameters=134_515_008,
    has_chat_template=True,
)
ROOMY = Capacity("this machine", (Node("here", cpus=64, gpus=0, memory_gib=256),))


def cluster(*nodes: Node) -> Capacity:
    return Capacity("the cluster at 10.0.0.1:6379", nodes)


def node(name: str = "a", cpus: float = 64, gpus: float = 0, memory_gib: float = 256, **custom: float) -> Node:
    return Node(name, cpus, gpus, memory_gib, custom)


BACKEND = "trainers.policy.backend"
COLOCATED = "placement.colocate=[[rollout, policy]]"
GPUS = ("makers.rollout.resources.gpus=1", "trainers.policy.resources.gpus=1")


def engines(replicas: int, gpus: int) -> tuple[str, ...]:
    group = "makers.rollout"
    return f"{group}.replicas={replicas}", f"{group}.resources.gpus={gpus}", f"{group}.engine.pipeline_parallel={gpus}"


def demo(*overrides: str) -> RunConfig:
    return load_config("configs/demo.yaml", overrides)


def test_the_plan_names_every_actor_and_does_the_arithmetic() -> None:
    plan = make_plan(demo("makers.rollout.replicas=2", "weights.every=2", "trainers.policy.steps=20"), SMOL, ROOMY)
    assert [actor.name for actor in plan.actors] == [
        "supervisor",
        "buffer",
        "weights",
        "trainer/policy",
        "trainer/policy/rank/0",
        "maker/rollout/0",
        "maker/rollout/1",
        "maker/reward/0",
    ]
    assert plan.cpus == pytest.approx(3.1)
    assert plan.arithmetic["samples per step"] == "12 groups x 8 samples = 96"
    assert plan.arithmetic["rows per version"] == "12 groups x 2 step(s) = 24"
    assert plan.arithmetic["rows in flight at most"] == "(max_staleness 1 + 1) x 24 = 48"
    assert ("weights", "maker/rollout", "newest version") in plan.edges


@pytest.mark.parametrize(
    ("overrides", "staleness"),
    [
        (("buffer.max_staleness=0",), 0),
        (("buffer.max_staleness=2",), 2),
        (("buffer.max_staleness=2", "buffer.order=window", "buffer.window=12"), 3),
        (("buffer.order=ready",), 1),
    ],
)
def test_the_plan_states_the_worst_case_staleness(overrides: tuple[str, ...], staleness: int) -> None:
    assert make_plan(demo(*overrides), SMOL, ROOMY).worst_case_staleness == staleness


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("trainers.policy.minibatches=5",), "12 groups_per_step cannot be split into 5 equal minibatches"),
        (("makers={rollout: {kind: rollout}}",), "no group provides `reward`"),
        (
            ("makers={reward: {kind: reward, functions: [{name: exact_match}]}}",),
            "no group provides `rollout`",
        ),
        (("makers.rollout.sampling.max_tokens=256",), "256 leaves no room for a prompt in engine.max_model_len 256"),
        (("makers.rollout.engine.max_model_len=10000",), "10000 is more than the model's 8192 positions"),
        (("makers.rollout.sampling.n=80",), "one group of 80 samples does not fit engine.max_num_seqs 64"),
        (("makers.rollout.sampling.n=1",), "sampling.n: 1, but trainers.policy.algorithm `grpo` compares the samples"),
        (("makers.rollout.sampling.temperature=0",), "temperature 0 gives 8 equal samples"),
        (("buffer.window=3",), "buffer.window: 3 is read only with `order: window`"),
        (
            ("makers.reward.slots=64",),
            r"makers.reward: 64 slots over 1 worker\(s\) may take 640 s .* more than buffer.lease_timeout 300",
        ),
        (("trainers.policy.optimizer.warmup_steps=999",), "warmup_steps: 999 is more than the 20 steps"),
        (("trainers.policy.optimizer.schedule=constant",), "min_lr: 6e-06 is not read with `schedule: constant`"),
        (
            ("makers.reward.functions.0={name: overlong, options: {max_tokens: 40, cache: 8}}",),
            r"functions.0.options: the penalty begins after 32 tokens .* longer than sampling.max_tokens 24",
        ),
        (("weights.every=50",), "no version would ever be published"),
        (("evaluation.at_start=false", "evaluation.at_end=false"), "nothing would be evaluated"),
        (
            ("trainers.critic={backend: {type: torch}}",),
            "trainers.critic: nobody reads its values, as trainers.policy.algorithm is `grpo`: remove it, or use `ppo`",
        ),
        (
            ("trainers.policy.algorithm={type: ppo, kl_coef: 0}",),
            "trainers.critic: missing, but trainers.policy.algorithm is `ppo`",
        ),
        (
            ("trainers.policy.algorithm={type: ppo}", "trainers.critic={backend: {type: torch}}"),
            "no group provides `reference`, which trainers.policy needs; .*or set trainers.policy.algorithm.kl_coef to 0",
        ),
        (
            (
                "trainers.policy.algorithm={type: ppo, kl_coef: 0}",
                "trainers.critic={backend: {type: torch}, minibatches: 5, optimizer: {warmup_steps: 99}}",
            ),
            "(?s)trainers.critic.minibatches: 12 groups_per_step .*trainers.critic.optimizer.warmup_steps: 99 is more",
        ),
        (
            ("makers.other={kind: rollout, sampling: {n: 4, max_tokens: 8}}",),
            r"all rollout groups need the same number of samples, got \[4, 8\]",
        ),
        (
            ("makers.second={kind: reward, functions: [{name: exact_match}]}",),
            "makers.second.functions: differ from makers.reward.functions",
        ),
        (
            (
                "makers.reward.route={column: task, values: [a, b]}",
                "makers.second={kind: reward, functions: [{name: exact_match}], route: {column: task, values: [b]}}",
            ),
            "makers.second.functions: differ from makers.reward.functions",
        ),
        (
            ("makers.rollout.engine.tensor_parallel=2",),
            "makers.rollout.engine.tensor_parallel: the model's 9 attention heads cannot be shared out over 2 processes: "
            "use a divisor of 9",
        ),
        (
            ("makers.rollout.engine.tensor_parallel=9",),
            "tensor_parallel: the model's 1536 intermediate columns cannot be shared out over 9",
        ),
        (("makers.rollout.engine.pipeline_parallel=31",), "pipeline_parallel: 31 stages for 30 layers: use at most 30"),
        (
            ("makers.rollout.engine.tensor_parallel=3", "makers.rollout.resources.gpus=2"),
            r"makers.rollout.resources.gpus: 2, but the engine has 3 x 1 = 3 process\(es\) .* set gpus: 3, or make the "
            "product 2",
        ),
        (
            ("makers.rollout.engine.pipeline_parallel=2", "makers.rollout.resources.gpus=0.5"),
            r"resources.gpus: 0.5, but the engine has 1 x 2 = 2 process\(es\)",
        ),
        (
            ("makers.a={kind: reference}", "makers.b={kind: reference, model: {path: other}}"),
            "makers.b: has another model or dtype than makers.a",
        ),
        (("cluster={address: 'h:1', cpus: 4}",), "cluster.cpus: read only for a cluster of the run's own"),
        # the layout of ranks
        ((f"{BACKEND}.tensor_parallel=2",), "backend.tensor_parallel: 2 does not divide the model's 9 attention heads"),
        ((f"{BACKEND}.tensor_parallel=9",), "9 does not divide the model's 3 key and value heads: use 1 or 3"),
        ((f"{BACKEND}.pipeline_parallel=4",), "pipeline_parallel: 4 stages cannot share 30 layers evenly"),
        ((f"{BACKEND}.expert_parallel=2",), "expert_parallel: 2 ranks share out experts, but the model has none"),
        ((f"{BACKEND}.sequence_parallel=true",), "sequence_parallel: .* tensor_parallel is 1: raise that or leave"),
        (
            (f"{BACKEND}.context_parallel=4", f"{BACKEND}.micro_batch_tokens=2"),
            "micro_batch_tokens: 2 tokens cannot be split over 4 ranks: use at least 4",
        ),
        (
            (f"{BACKEND}.data_parallel=97",),
            r"data_parallel: 97 ranks for the 96 samples .* \(12 groups x 8\).* at most 96",
        ),
        (("trainers.policy.minibatches=4", f"{BACKEND}.data_parallel=32"), "32 ranks for the 24 samples"),
        # the devices of one actor
        (
            ("makers.rollout.resources.gpus=2",),
            r"makers.rollout.resources.gpus: 2, but the engine has 1 x 1 = 1 process\(es\)",
        ),
        (("trainers.policy.resources.gpus=2",), "trainers.policy.resources.gpus: 2, but a rank uses one GPU"),
        (
            ("trainers.policy.resources.gpus=0.5", f"{BACKEND}.data_parallel=2"),
            r"0.5 puts several of 2 ranks on one GPU, which their collectives \(NCCL\) refuse: set gpus: 1",
        ),
        # placement
        (
            ("placement.groups={rollouts: spread}",),
            "placement.groups.rollouts: no maker group or trainer has that name",
        ),
        (
            ("placement.colocate=[[rollout, critic]]",),
            "placement.colocate.0: no maker group or trainer is named `critic`; there are: policy, reward, rollout",
        ),
        (("placement.colocate=[[rollout, policy], [policy, rollout]]",), "colocate.1: `policy` stands twice"),
        (("placement.colocate=[[policy]]",), r"colocate.0: 1 group\(s\) share nothing: name at least two"),
        (("placement.colocate=[[rollout, reward]]",), "so there are no turns to take: name a trainer"),
        (("placement.colocate=[[reward, policy]]",), r"`reward` \(reward\) has nothing that could sleep"),
        (("placement.sleep_level=2",), "placement.sleep_level: 2 is read only with `placement.colocate`"),
        (
            (COLOCATED, "placement.groups={rollout: spread, policy: pack}"),
            "rollout, policy lie together, but are to be pack and spread: name one",
        ),
        (
            (COLOCATED, "makers.rollout.replicas=2"),
            "equal numbers of CPUs are needed, got rollout 2 x 1, policy 1 x 1",
        ),
        (
            (COLOCATED, "makers.rollout.resources.gpus=1"),
            "equal numbers of GPUs are needed, got rollout 1 x 1, policy 1 x 0",
        ),
        (
            (COLOCATED, *GPUS, f"{BACKEND}.tensor_parallel=3", f"{BACKEND}.data_parallel=2", *engines(3, 2)),
            "the GPUs of one engine or tensor-parallel group must divide those of the other, got rollout 3 x 2, policy 2 x 3",
        ),
        (
            (COLOCATED, *GPUS, "makers.rollout.resources.gpus=0.5", "makers.rollout.replicas=2"),
            "rollout asks for 0.5 GPUs, but turns are taken on whole ones",
        ),
        (
            (COLOCATED, *GPUS, f"{BACKEND}.dtype=float32"),
            "dtype: Megatron cannot move float32 parameters .* use bfloat16, or distributed_optimizer: false",
        ),
        (
            (
                "placement.colocate=[[rollout, other, policy]]",
                *GPUS,
                "makers.other={kind: rollout, resources: {gpus: 1}, sampling: {n: 8, max_tokens: 24}}",
            ),
            "the makers rollout, other are awake at the same time and want 1.7 of each GPU's memory",
        ),
        (
            ("makers.policy={kind: rollout, sampling: {n: 8, max_tokens: 24}}",),
            "makers.policy: a trainer has the same name",
        ),
    ],
)
def test_a_plan_that_cannot_work_is_refused_with_numbers_and_remedy(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_plan(demo(*overrides), SMOL, ROOMY)


def test_a_model_family_that_megatron_cannot_load_is_refused_with_the_supported_ones() -> None:
    with pytest.raises(ConfigError, match="family `gpt2` is not supported.*llama, qwen2, qwen3"):
        make_plan(demo(), replace(SMOL, family="gpt2"), ROOMY)


def test_more_actors_than_the_cluster_holds_are_refused_with_the_sum() -> None:
    with pytest.raises(
        ConfigError, match=r"needs 6\.1 CPUs \(5 x rollout, 1 x reward, 1 x policy rank\), the cluster at .* has 4"
    ):
        make_plan(demo("makers.rollout.replicas=5"), SMOL, cluster(node(cpus=4)))


def test_more_memory_than_the_machine_has_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"memory: the plan needs about .* GiB .* this machine has 8\.0"):
        make_plan(demo("makers.rollout.replicas=20"), SMOL, Capacity(ROOMY.what, (node(memory_gib=8),)))


def test_groups_of_one_stage_may_differ_where_their_routes_have_no_row_in_common() -> None:
    second = "makers.second={kind: reward, functions: [{name: exact_match}], route: {column: task, values: [b]}}"
    plan = make_plan(demo("makers.reward.route={column: task, values: [a]}", second), SMOL, ROOMY)
    assert ("buffer", "maker/second", "leases of rows with task in ['b']") in plan.edges


TEACHER = "makers.teacher={kind: teacher, engine: {max_model_len: 600}}"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            (TEACHER,),
            "makers.teacher: nobody reads what a teacher says, as trainers.policy does not distil: remove the group",
        ),
        (
            (TEACHER, "makers.teacher.top_k=null"),
            r"makers.teacher.top_k: null asks for the full vocabulary .*: set top_k \(64, say\), or use a colocated teacher "
            r"\(trainers.policy.distill.teacher\)",
        ),
        ((TEACHER, "makers.teacher.top_k=49153"), "makers.teacher.top_k: 49153 is more than the 49152 tokens"),
        (
            (TEACHER, "makers.teacher.engine.max_model_len=64"),
            r"makers.teacher.engine.max_model_len: 64 for rows of makers.rollout with up to \d+ tokens, .* set it to at least",
        ),
        ((TEACHER, "makers.teacher.engine.max_model_len=9000"), "9000 is more than the model's 8192 positions"),
        (
            (TEACHER, "makers.teacher.engine.tensor_parallel=2"),
            "makers.teacher.engine.tensor_parallel: the model's 9 attention",
        ),
        (
            (TEACHER, "makers.other={kind: teacher, top_k: 8, route: {column: a, values: [1]}}"),
            r"makers.\*.top_k: all teacher groups need the same, got \[64, 8\]",
        ),
        (
            (TEACHER, "makers.other={kind: teacher, model: {path: tiny-llama}}"),
            "makers.other: has another model or dtype than makers.teacher",
        ),
        (
            ("makers.reference={kind: reference, engine: {}}", "makers.rollout.sampling.temperature=0.7"),
            "makers.reference.engine: vLLM gives the log-probs of given tokens at temperature 1 only, but makers.rollout "
            "samples at 0.7",
        ),
        (
            ("makers.frozen={kind: reference}", "trainers.policy.algorithm.kl_coef=0.1"),
            "trainers.policy.algorithm.reference: start: KL would be to the start weights, not to makers.frozen",
        ),
        (
            ("makers.reference={kind: reference, engine: {}, dtype: float32}",),
            "makers.reference.dtype: float32 is not read with an engine",
        ),
    ],
)
def test_a_teacher_or_a_reference_on_an_engine_that_cannot_work_is_refused(
    overrides: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_plan(demo(*overrides), SMOL, ROOMY)


def test_rollout_groups_may_sample_each_in_its_own_way_and_the_largest_budget_counts() -> None:
    config = demo("makers.other={kind: rollout, sampling: {n: 8, temperature: 0.5, max_tokens: 90, stop: [x]}}")
    make_plan(config, SMOL, ROOMY)
    assert max_response_tokens(config) == 90
    assert max_response_tokens(demo()) == 24


def test_key_value_heads_are_shared_out_or_repeated() -> None:
    model = replace(SMOL, heads=12, kv_heads=4)
    for tensor_parallel in (2, 4, 12):
        make_plan(demo(f"makers.rollout.engine.tensor_parallel={tensor_parallel}"), model, ROOMY)
    with pytest.raises(
        ConfigError, match="4 key/value heads can be neither shared out over nor repeated in 3 processes"
    ):
        make_plan(demo("makers.rollout.engine.tensor_parallel=3"), model, ROOMY)


def test_an_engine_has_as_many_gpus_as_processes_or_a_part_of_one() -> None:
    gpus = cluster(node(gpus=8))
    make_plan(demo("makers.rollout.engine.tensor_parallel=3", "makers.rollout.resources.gpus=3"), SMOL, gpus)
    make_plan(demo("makers.rollout.resources.gpus=0.5"), SMOL, gpus)


def test_a_reference_with_fewer_positions_than_a_row_may_have_is_refused() -> None:
    config = demo("makers.frozen={kind: reference, model: {path: small}}")
    with pytest.raises(
        ConfigError, match=r"makers.frozen.model.path: has 128 positions, but rows of makers.rollout may .* 256"
    ):
        make_plan(config, SMOL, ROOMY, {"frozen": replace(SMOL, max_positions=128)})


def test_a_reference_counts_with_its_own_model_or_the_runs() -> None:
    config = demo("makers.frozen={kind: reference, dtype: float32, micro_batch_tokens: 1024}")
    seen = []
    for own in ({}, {"frozen": replace(SMOL, parameters=10**9)}):
        plan = make_plan(config, SMOL, ROOMY, own)
        assert ("maker/frozen", "buffer", "reference columns, by reference") in plan.edges
        seen.append(next(actor.memory_gib for actor in plan.actors if actor.name == "maker/frozen/0"))
    assert seen == pytest.approx([0.7 + 0.50 + 0.19, 0.7 + 3.73 + 0.19], abs=0.01)


def test_the_first_replica_of_each_part_of_a_trainer_counts_the_copy_that_checkpoints_are_written_from() -> None:
    layout = (f"{BACKEND}.tensor_parallel=3", f"{BACKEND}.data_parallel=2", f"{BACKEND}.pipeline_parallel=2")
    memory = []
    for saving in ("true", "false"):
        plan = make_plan(demo(*layout, f"checkpoint.at_end={saving}", "checkpoint.every=null"), SMOL, ROOMY)
        memory.append([actor.memory_gib for actor in plan.named("rank")])
    copies = [saving - without for saving, without in zip(*memory, strict=True)]
    copy = SMOL.parameters / 6 * 14 / 2**30  # bfloat16, and float32 main parameters and two moments
    assert copies == pytest.approx([copy] * 3 + [0.0] * 3 + [copy] * 3 + [0.0] * 3)


@pytest.mark.parametrize(
    ("overrides", "nodes", "message"),
    [
        (
            (*GPUS, f"{BACKEND}.tensor_parallel=3"),
            [node("a", gpus=2), node("b", gpus=2)],
            "trainer/policy/rank/0 to trainer/policy/rank/2, on one node, needs 3 GPUs, the largest node has 2 GPUs",
        ),
        (
            ("placement.groups.policy=strict_pack", "trainers.policy.resources.gpus=1", f"{BACKEND}.data_parallel=4"),
            [node("a", gpus=2), node("b", gpus=2)],
            r"policy is to be on one node \(strict_pack\), which needs 4 GPUs, the largest node has 2 GPUs: use `pack`",
        ),
        (
            ("placement.groups.rollout=strict_spread", "makers.rollout.replicas=3"),
            [node("a"), node("b")],
            r"a node for each of 3 \(strict_spread\), the cluster has 2 that can hold one: use `spread`",
        ),
        (
            ("makers.rollout.resources.cpus=3", "makers.rollout.replicas=2", "trainers.policy.resources.cpus=2"),
            [node("a", cpus=4), node("b", cpus=4), node("c", cpus=1)],
            r"placement: policy needs 1 x 2 CPUs \(pack\), which finds no room beside the others; left: a 1 CPU.*; b 1 CPU",
        ),
        (
            ("makers.rollout.replicas=4",),
            [node("a", memory_gib=4), node("b", memory_gib=64)],
            r"memory: the plan needs about .* GiB \(10 actors\), node a of the cluster at .* has 4\.0: .* spread them",
        ),
        (("makers.rollout.resources.gpus=1",), [node()], r"needs 1 GPUs .*, the cluster at .* has 0"),
    ],
)
def test_a_cluster_whose_nodes_are_too_small_is_refused_with_what_is_missing(
    overrides: tuple[str, ...], nodes: list[Node], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_plan(demo(*overrides), replace(SMOL, heads=12), cluster(*nodes))


def test_an_actor_that_fits_on_no_single_node_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="maker/rollout/0 needs 8 CPUs, the largest node has 4"):
        make_plan(demo("makers.rollout.resources.cpus=8"), SMOL, cluster(*[node(cpus=4)] * 3))


def test_gpus_that_are_not_there_are_refused() -> None:
    with pytest.raises(ConfigError, match="needs 1 GPUs"):
        make_plan(demo("makers.rollout.resources={gpus: 1}"), SMOL, ROOMY)


def test_a_custom_resource_that_no_cluster_offers_is_refused_and_one_that_is_there_is_taken() -> None:
    config = demo("makers.reward.resources={custom: {verifier: 2}}")
    with pytest.raises(ConfigError, match=r"resources.custom: the plan needs 2 verifier, this machine has 0"):
        make_plan(config, SMOL, ROOMY)
    assert make_plan(config, SMOL, cluster(node(verifier=2.0))).cpus == 3


DISTILL = "trainers.policy.distill={}"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("trainers.policy.algorithm={type: distill}",),
            "trainers.policy.distill: missing, but trainers.policy.algorithm",
        ),
        ((DISTILL,), "makers: no group provides `teacher`"),
        ((DISTILL, "trainers.policy.distill.temperature=2"), "distill.temperature: 2, but the log-probs of a group"),
        ((DISTILL, "trainers.policy.distill.coef=0"), "coef, sft_alpha and advantage_alpha are all 0"),
        (
            (DISTILL, "trainers.policy.distill.advantage_alpha=0.1", "makers.rollout.sampling.temperature=0.8"),
            "makers.rollout.sampling.temperature: 0.8, but trainers.policy.distill.advantage_alpha compares",
        ),
    ],
)
def test_a_distillation_that_cannot_learn_is_refused(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_plan(demo(*overrides), SMOL, ROOMY)


@pytest.mark.parametrize(
    ("teacher", "overrides", "message"),
    [
        (replace(SMOL, vocab=50000), (), "teacher.model: a vocabulary of 50000 tokens, the policy's has 49152"),
        (
            SMOL,
            ("trainers.policy.distill.teacher.top_k=60000",),
            "teacher.top_k: 60000 of a vocabulary of 49152 tokens",
        ),
        (replace(SMOL, max_positions=64), (), "teacher.model: has 64 positions, but rows of makers.rollout may have"),
        (
            replace(SMOL, heads=8),
            (f"{BACKEND}.tensor_parallel=3",),
            "teacher.model: it is split as the policy is, but trainers.policy.backend.tensor_parallel: 3",
        ),
    ],
)
def test_a_teacher_that_the_ranks_cannot_hold_is_refused(
    teacher: ModelInfo, overrides: tuple[str, ...], message: str
) -> None:
    settings = ("trainers.policy.distill={teacher: {model: other}}", *overrides)
    with pytest.raises(ConfigError, match=message):
        make_plan(demo(*settings), SMOL, ROOMY, teacher=teacher)


def test_a_teacher_on_the_ranks_is_counted_with_its_part_and_needs_no_group_of_makers() -> None:
    def memory(teacher: ModelInfo | None, *settings: str) -> float:
        config = demo(f"{BACKEND}.tensor_parallel=3", *settings)
        return make_plan(config, SMOL, ROOMY, teacher=teacher).named("rank")[0].memory_gib

    distill = "trainers.policy.distill={teacher: {model: other, dtype: float32}}"
    more = memory(SMOL, distill) - memory(None)
    assert more == pytest.approx(SMOL.parameters * 4 / 3 / 2**30)


def test_sft_and_dpo_need_rows_of_a_dataset_and_nothing_else() -> None:
    plan = make_plan(load_config("configs/sft-tiny.yaml"), replace(SMOL, max_positions=2048), ROOMY)
    assert plan.arithmetic["samples per step"] == "16 groups x 1 samples = 16"
    assert not any("weights" in edge for edge in plan.edges), "nobody pulls any"
    for settings, said in (
        (["makers.dataset={kind: dataset, chosen: a, rejected: b}"], "`sft` learns from completions, not from pairs"),
        (["trainers.policy.algorithm={type: dpo}"], "`dpo` learns from pairs"),
        (
            ["makers={reward: {kind: reward, functions: [{name: exact_match}]}}"],
            "`sft` learns from a dataset: add a group",
        ),
        (["evaluation.by=makers"], "use `by: ranks`, the loss of held-out rows"),
        (["makers.rollout={kind: rollout}"], "`sft` learns from datasets alone"),
        (["trainers.policy.algorithm={type: grpo}"], "`grpo` needs rows that its policy sampled"),
        (["makers.more={kind: dataset, completion: question}"], "has other columns or max_tokens than makers.dataset"),
    ):
        with pytest.raises(ConfigError, match=said):
            make_plan(load_config("configs/sft-tiny.yaml", settings), SMOL, ROOMY)
