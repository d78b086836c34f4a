"""The reward maker as the buffer calls it: columns in, columns out."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from buffer.columns import validate_answer
from buffer.records import DataFailure, InfraFailure, Lease, Prompt
from makers.config import RewardMaker as RewardMakerConfig
from makers.reward import RewardMaker, load_decoder, split_and_decode
from tests.live_maker import with_started

HERE = "tests.unit.makers.reward_functions"
pytestmark = pytest.mark.timeout(60)
WORDS = ["<eos>", "3", "4", "it", "is"]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return str(folder)


def rollout(*samples: str) -> dict[str, np.ndarray]:
    ids = [[WORDS.index(word) for word in sample.split()] for sample in samples]
    return {
        "response_ids": np.array([i for sample in ids for i in sample], dtype=np.int32),
        "response_offsets": np.cumsum([0, *map(len, ids)]).astype(np.int64),
    }


def lease(**fields) -> Lease:
    prompt = Prompt(id="p/7", content="4 - 1 =", fields=fields)
    return Lease(
        id=1,
        row_id=7,
        stage="reward",
        maker="maker/reward/0",
        prompt=prompt,
        samples=2,
        min_version=0,
        seed=0,
        timeout=9.0,
    )


def with_maker(model_path: str, functions: list[dict], scenario, models: Sequence[dict] = ()):
    config = RewardMakerConfig(kind="reward", functions=functions, models=models, slots=4)
    return with_started(RewardMaker(config, name="maker/reward/0", model_path=model_path), scenario)


def test_rewards_are_the_weighted_sum_and_each_function_has_a_column(model_path):
    functions = [
        {"name": "exact_match", "weight": 2.0, "options": {"extract": "last_number"}},
        {"name": "regex", "weight": -0.5, "options": {"pattern": "it"}},
        {"name": "exact_match"},
    ]

    async def scenario(maker):
        assert (maker.stage, maker.needs, maker.slots) == ("reward", ("rollout",), 4)
        produced, columns = await maker.make(
            lease(answer="3"), {"rollout": rollout("it is 3 <eos>", "3 <eos>", "4", "")}
        )
        assert set(columns) == {"rewards", "reward/exact_match", "reward/regex", "reward/exact_match_2"}
        assert all(column.dtype == np.float32 and column.shape == (4,) for column in columns.values())
        assert columns["reward/exact_match"].tolist() == [1, 1, 0, 0]
        assert columns["reward/regex"].tolist() == [1, 0, 0, 0]
        assert columns["reward/exact_match_2"].tolist() == [0, 1, 0, 0]
        assert columns["rewards"].tolist() == [1.5, 3.0, 0.0, 0.0]
        assert (produced.samples, produced.tokens, produced.nbytes) == (4, 0, 4 * 4 * 4)
        assert produced.stats["reward_mean"] == 1.125
        assert produced.stats["reward_max"] == 3.0
        assert produced.stats["reward_std"] == pytest.approx(np.std([1.5, 3.0, 0.0, 0.0]))
        assert produced.stats["reward/exact_match"] == 0.5
        assert produced.stats["reward/regex"] == 0.25
        assert produced.seconds > 0
        status = maker.status()
        assert (status["rows_scored"], status["samples_scored"], status["running"]) == (1, 4, 0)
        assert status["workers_alive"] == 1
        assert status["timeouts"] == 0

    with_maker(model_path, functions, scenario)


def test_functions_are_put_on_one_scale_before_their_weights_and_the_penalty_counts_tokens(model_path):
    functions = [
        {"name": "exact_match", "normalise": "group", "weight": 2.0},
        {"name": "overlong", "options": {"max_tokens": 3, "cache": 2}},
    ]

    async def scenario(maker):
        _, columns = await maker.make(lease(answer="3"), {"rollout": rollout("3", "it is", "3 <eos>", "it is 4 <eos>")})
        assert columns["reward/exact_match"].tolist() == [1, 0, 1, 0]
        assert columns["reward/overlong"].tolist() == [0, -0.5, -0.5, -1]
        np.testing.assert_allclose(columns["rewards"], [2, -2.5, 1.5, -3], atol=1e-5)

    with_maker(model_path, functions, scenario)


def test_nan_scores_and_empty_answers_do_not_become_rewards_unseen(model_path):
    async def scenario(maker):
        with pytest.raises(DataFailure, match="row 7 .*returned nan for completion 0: a finite float32 is needed"):
            await maker.make(lease(how="nan"), {"rollout": rollout("3", "4")})
        _, columns = await maker.make(lease(how="good"), {"rollout": rollout("<eos>", "<eos>")})
        assert columns["rewards"].tolist() == [0.0, 0.0]  # a group that is all alike

    with_maker(model_path, [{"path": f"{HERE}:misbehave", "normalise": "group"}], scenario)


def test_a_row_that_cannot_be_scored_names_itself_and_is_counted(model_path):
    async def scenario(maker):
        with pytest.raises(
            DataFailure, match=r"reward function misbehave on row 7 \(prompt p/7\): did not return within"
        ):
            await maker.make(lease(how="sleep"), {"rollout": rollout("3")})
        assert maker.status()["timeouts"] == 1
        assert maker.status()["rows_scored"] == 0
        _, columns = await maker.make(lease(how="good"), {"rollout": rollout("3", "4")})
        assert columns["rewards"].tolist() == [1.0, 1.0]

    with_maker(model_path, [{"path": f"{HERE}:misbehave", "timeout": 0.2}], scenario)


def test_a_weighted_sum_beyond_float32_is_a_data_failure(model_path):
    async def scenario(maker):
        with pytest.raises(DataFailure, match="row 7 .*: the weighted sum of its rewards is not finite"):
            await maker.make(lease(), {"rollout": rollout("3")})

    with_maker(model_path, [{"path": f"{HERE}:Scaled", "options": {"scale": 2e38}, "weight": 4.0}], scenario)


def test_rows_in_flight_together_keep_their_own_rewards(model_path):
    async def scenario(maker):
        leases = [lease(answer=answer) for answer in ("3", "4") * 10]
        done = await asyncio.gather(*(maker.make(each, {"rollout": rollout("3", "4")}) for each in leases))
        assert [columns["rewards"].tolist() for _, columns in done] == [[1, 0], [0, 1]] * 10

    with_maker(model_path, [{"name": "exact_match"}], scenario)


def test_a_model_folder_whose_tokenizer_cannot_be_read_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InfraFailure, match=f"maker/reward/0: no tokenizer in {tmp_path}"):
        with_maker(str(tmp_path), [{"name": "exact_match"}], None)


def test_samples_are_cut_at_their_offsets_and_special_tokens_left_out(model_path):
    columns = rollout("it is 3 <eos>", "", "4")
    assert split_and_decode(load_decoder(model_path), columns["response_ids"], columns["response_offsets"]) == [
        "itis3",
        "",
        "4",
    ]


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def test_the_scores_of_models_are_weighed_and_added_to_those_of_functions(model_path):
    models = [{"group": "b", "weight": 0.5}, {"group": "a", "weight": 2.0, "normalise": "group"}]

    async def scenario(maker):
        assert maker.needs == ("rollout", "reward/a", "reward/b")
        inputs = {
            "rollout": rollout("3", "4"),
            "reward/a": {"scores": floats(7, 5)},
            "reward/b": {"scores": floats(4, -2)},
        }
        produced, columns = await maker.make(lease(answer="3"), inputs)
        assert columns["reward/exact_match"].tolist() == [1, 0]
        assert (columns["reward/a"].tolist(), columns["reward/b"].tolist()) == ([7, 5], [4, -2])
        np.testing.assert_allclose(columns["rewards"], [1 + 2 + 2, -2 - 1], atol=1e-5)
        assert produced.stats["reward/a"] == 6.0

    with_maker(model_path, [{"name": "exact_match"}], scenario, models)


def test_models_alone_give_rewards_without_a_process_or_a_tokenizer(tmp_path):
    async def scenario(maker):
        assert maker.status()["workers"] == 0
        _, columns = await maker.make(lease(), {"rollout": rollout("3", "4"), "reward/a": {"scores": floats(7, 5)}})
        assert columns["rewards"].tolist() == [-7, -5]

    with_maker(str(tmp_path), [], scenario, [{"group": "a", "weight": -1.0}])


@pytest.mark.parametrize(
    ("reduce", "expected"), [("last", [3, -1, 0]), ("min", [-2, -1, 0]), ("mean", [1, -1, 2]), ("sum", [3, -1, 4])]
)
def test_the_scores_of_a_samples_tokens_become_one(model_path, reduce, expected):
    async def scenario(maker):
        scores = {"token_scores": floats(2, -2, 3, -1, 4, 0)}
        _, columns = await maker.make(lease(), {"rollout": rollout("it is 3", "4", "3 4"), "reward/steps": scores})
        assert columns["rewards"].tolist() == columns["reward/steps"].tolist() == expected
        assert "token_rewards" not in columns

    with_maker(model_path, [], scenario, [{"group": "steps", "reduce": reduce}])


def test_token_rewards_are_weighted_and_the_reward_has_their_sum(model_path):
    models = [{"group": "steps", "reduce": "sum", "per_token": True, "weight": 0.5}, {"group": "whole"}]

    async def scenario(maker):
        inputs = {
            "rollout": rollout("it is 3", "4"),
            "reward/steps": {"token_scores": floats(2, -2, 4, -1)},
            "reward/whole": {"scores": floats(10, 20)},
        }
        produced, columns = await maker.make(lease(), inputs)
        assert columns["token_rewards"].tolist() == [1, -1, 2, -0.5]
        assert columns["rewards"].tolist() == [12, 19.5]
        validate_answer(lease(), produced, columns, inputs)

    with_maker(model_path, [], scenario, models)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "nothing gives a reward: name `functions`, `models` or both"),
        ({"functions": [{"name": "http", "weight": 0}], "models": [{"group": "a", "weight": 0}]}, "every weight is 0"),
        ({"models": [{"group": "a"}, {"group": "a"}]}, "models: a stands twice"),
        ({"models": [{"group": "a", "reduce": "min", "per_token": True}]}, "set reduce: sum, normalise: none"),
    ],
)
def test_settings_that_cannot_give_a_reward_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        RewardMakerConfig.model_validate({"kind": "reward", **settings})
