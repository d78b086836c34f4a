"""Settings: round trips, and one clear line for every kind of mistake."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from topology.config import ConfigError, dump_config, load_config, parse_config

CONFIGS = sorted(Path("configs").glob("*.yaml"))
DEMO = Path("configs/demo.yaml")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_shipped_config_loads_and_survives_a_round_trip(path: Path) -> None:
    config = load_config(path)
    assert parse_config(yaml.safe_load(dump_config(config))) == config
    assert path.read_text().startswith("# "), "a shipped config says in its first line what it is for"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("makers.rollout.samplng.n=3", "makers.rollout.samplng: unknown key, did you mean `sampling`?"),
        ("makers.rollout.sampling.n=foo", "makers.rollout.sampling.n: Input should be a valid integer"),
        (
            "makers.rollout.sampling.n=0",
            "makers.rollout.sampling.n: Input should be greater than or equal to 1 (given: 0)",
        ),
        ("makers.reward.functions.0.weigth=3", "makers.reward.functions.0.weigth: unknown key, did you mean `weight`?"),
        (
            "makers.reward.functions.0.path=x",
            "makers.reward.functions.0.path: package.module:name is needed (given: 'x')",
        ),
        ("makers.reward.functions.0.path=a:b", "makers.reward.functions.0: give exactly one of `name`"),
        ("trainers.policy.algorithm.type=ppoo", "trainers.policy.algorithm: unknown kind or type; known: 'grpo'"),
        ("trainers.policy.steps=null", "trainers.policy.steps: Input should be a valid integer (given: None)"),
        ("trainers.policy={}", "trainers.policy.algorithm: missing"),
        ("name=../elsewhere", "name: lower-case letters, digits, dot, dash"),
        ("model.path=[1]", "model.path: Input should be a valid string (given: [1])"),
        ("colour=blue", "colour: unknown key"),
        (
            "trainers.policy.backend.virtual_pipeline_model_parallel_size=2",
            "trainers.policy.backend.virtual_pipeline_model_parallel_size: not offered: the interleaved pipeline schedule",
        ),
        ("trainers.policy.backend.moe_grouped_gemm=true", "backend.moe_grouped_gemm: not offered: it needs"),
        (
            "trainers.policy.backend.expert_tensor_parallel=2",
            "backend.expert_tensor_parallel: not offered: tensor-parallel experts beside expert_parallel",
        ),
        (
            "makers.rollout.engine.data_parallel=2",
            "makers.rollout.engine.data_parallel: not offered: data parallelism is several makers, raise `replicas`",
        ),
        (
            "makers.rollout.sampling.top_p=0.9",
            "makers.rollout.sampling.top_p: not offered: it takes tokens out of the distribution that is sampled from",
        ),
        (
            "makers.rollout.engine.extra={top_p: 0.9}",
            "makers.rollout.engine.extra: top_p: not offered: it takes tokens out of the distribution",
        ),
        (
            "makers.rollout.engine.extra={override_generation_config: {top_p: 0.9}}",
            "makers.rollout.engine.extra: override_generation_config: set by Tandem",
        ),
        (
            "trainers.policy.algorithm.epsilon=0.2",
            "trainers.policy.algorithm.epsilon: unknown key: it is called `clip_low` here",
        ),
        (
            "trainers.policy.algorithm.num_iterations=2",
            "trainers.policy.algorithm.num_iterations: not offered: each row is trained once",
        ),
        ("makers={}", "makers: Dictionary should have at least 1 item"),
    ],
)
def test_a_wrong_setting_is_refused_with_its_path(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(DEMO, [override])
    assert message in str(caught.value)


def test_all_problems_are_reported_at_once() -> None:
    with pytest.raises(ConfigError, match="2 problems"):
        load_config(DEMO, ["foo=1", "makers.rollout.replicas=0"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("no-equals", "write it as key.path=value"),
        ("name.deep=1", "there is no section `name`|single value"),
        ("makers.reward.functions.7.weight=1", "`7` is no position in a list of 1"),
    ],
)
def test_an_override_that_leads_nowhere_is_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(DEMO, [override])


def test_overrides_are_yaml_values_and_reach_into_lists() -> None:
    config = load_config(DEMO, ["makers.reward.functions.0.weight=0.5", "checkpoint.every=null"], name="other")
    assert config.makers["reward"].functions[0].weight == 0.5
    assert config.checkpoint.every is None
    assert config.name == "other"


def test_a_key_that_stands_twice_is_refused_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "twice.yaml"
    file.write_text("name: a\nseed: 1\nseed: 2\n")
    with pytest.raises(ConfigError, match=r"line 3: key `seed` stands twice"):
        load_config(file)


@pytest.mark.parametrize(
    ("text", "message"), [("a: [", "not valid YAML"), ("- 1", "a config is a mapping"), ("", "a mapping")]
)
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "broken.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_config(file)


def test_a_missing_file_is_refused_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: cannot be read"):
        load_config(tmp_path / "none.yaml")


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not a text file"):
        load_config(file)


def test_a_key_that_is_no_name_is_refused_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text("name: a\n? [b]\n: 1\n")
    with pytest.raises(ConfigError, match=r"unhashable key[\s\S]*line 2"):
        load_config(file)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("name=[", "--set name=[: the value is not valid YAML"),
        ("seed={a: 1, a: 2}", "key `a` stands twice"),
        ("makers={Roll/out: {kind: rollout}}", "makers.Roll/out.[key]: lower-case letters"),
        ("trainers.policy.optimizer.lr=.inf", "trainers.policy.optimizer.lr: Input should be a finite number"),
        ("weights.bucket_byte=1", "weights.bucket_byte: unknown key, did you mean `bucket_bytes`?"),
        (
            "makers.rollout.engine.extra.data_parallel_size=2",
            "makers.rollout.engine.extra: data_parallel_size: data parallelism is several makers, raise `replicas`",
        ),
        (
            "makers.rollout.engine.extra.logprobs_mode=raw_logprobs",
            "makers.rollout.engine.extra: logprobs_mode: set by",
        ),
    ],
)
def test_a_value_that_cannot_be_meant_is_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(DEMO, [override])
    assert message in str(caught.value)


def test_the_topology_that_the_readme_explains_loads() -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", Path("README.md").read_text(), re.DOTALL)
    whole = [data for block in blocks if "name" in (data := yaml.safe_load(block))]
    assert [parse_config(data, "README.md").name for data in whole] == ["arithmetic-2m1t"]


def test_a_run_has_trainers_or_collects_and_not_both() -> None:
    run = yaml.safe_load(DEMO.read_text())
    job = {key: value for key, value in run.items() if key != "trainers"}
    with pytest.raises(ConfigError, match=r"trainers\.policy: missing: nobody takes the rows; or give `collect`"):
        parse_config(job)
    with pytest.raises(ConfigError, match="trainers, collect: give one of the two"):
        parse_config({**run, "collect": {}})
    assert parse_config({**job, "collect": {}}).collect is not None
