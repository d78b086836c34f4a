"""The values of the built-in reward functions, and their options."""

from __future__ import annotations

import pytest

from makers.rewards.builtin import build_builtin
from makers.rewards.calling import Call, FunctionSpec, RewardError, build_call
from makers.rewards.extract import extract

ENTRY = {"question": "4 - 1 =", "answer": "3", "metadata": {"source_dataset": "chain_sum"}, "dataset": "chain_sum"}


def score(name: str, completions: list[str], options=None, **fields) -> list[float]:
    return build_builtin(name, options or {})(completions, **fields)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("4 - 1 = 3", "3"),
        ("The answer is 3.", "3"),
        ("5 - 9 = -4", "-4"),
        ("5-9=-4", "-4"),
        ("7-3", "3"),
        ("it is \N{MINUS SIGN}4", "-4"),
        ("**6**\n", "6"),
        ("about 1,234.50 in all", "1,234.50"),
        ("1, 2, 3", "3"),
        ("1.5e3", "1.5e3"),
        ("x=.5", ".5"),
        ("none", None),
        ("", None),
    ],
)
def test_the_last_number_is_found_with_its_own_sign(text, number):
    assert extract("last_number", text) == number


def test_extraction_follows_its_mode():
    text = " <answer>1</answer> so 7 <answer> 2 \n</answer>, not 9 "
    assert extract("answer_tag", text) == "2"
    assert extract("answer_tag", "2") is None
    assert extract("whole", " two \n") == "two"
    assert extract("auto", text, "5") == "2"
    assert extract("auto", "1 and 2", "5") == "2"
    assert extract("auto", "1 and 2 ", "five") == "1 and 2"


def test_exact_match_compares_text_as_text_and_numbers_as_numbers():
    assert score("exact_match", ["Paris", " Paris\n", "paris", "in Paris"], answer="Paris") == [1, 1, 0, 0]
    assert score("exact_match", ["paris"], {"ignore_case": True}, answer="Paris") == [1]
    assert score("exact_match", ["3", "3.0", "1,000", "three"], answer=3) == [1, 1, 0, 0]
    options = {"extract": "last_number"}
    assert score("exact_match", ["it is 1,000", "1000.0", "none", "1000 or 2"], options, answer="1000") == [1, 1, 0, 0]


def test_exact_match_takes_another_column_a_list_of_answers_and_a_worked_solution():
    assert score("exact_match", ["UK", "GB", "US"], {"field": "names"}, names=["UK", "GB"]) == [1, 1, 0]
    options = {"extract": "last_number", "extract_field": "last_number"}
    assert score("exact_match", ["so 72", "48"], options, answer="48/2 = 24, 48+24 = 72\n#### 72") == [1, 0]
    with pytest.raises(ValueError, match="column 'answer': last_number finds nothing in 'none'"):
        score("exact_match", ["1"], options, answer="none")
    with pytest.raises(ValueError, match="the reference answer is None"):
        score("exact_match", ["1"], answer=None)


def test_regex_rewards_a_match_or_a_match_that_equals_a_column():
    assert score("regex", ["<think>a</think> b", "b"], {"pattern": r"<think>.*</think>"}) == [1, 0]
    options = {"pattern": r"answer is (\w+)", "field": "answer"}
    assert score("regex", ["the answer is 4", "answer is 5, no, answer is 4", "4"], options, answer="4") == [1, 1, 0]
    options = {"pattern": r"(?P<key>\w)=(?P<value>\d)", "group": "value", "field": "answer"}
    assert score("regex", ["a=4", "b=5"], options, answer=4) == [1, 0]
    options = {"pattern": "YES", "field": "answer", "ignore_case": True}
    assert score("regex", ["oh yes"], options, answer="Yes") == [1]


def test_math_verify_judges_by_value():
    texts = [r"so \boxed{\frac{1}{2}}", "The answer is 0.5", "$2/4$", "1/3", "no idea"]
    assert score("math_verify", texts, answer=r"\frac{1}{2}") == [1, 1, 1, 0, 0]
    assert score("math_verify", ["72", "70 + 3 = 73"], answer="72") == [1, 0]
    with pytest.raises(ValueError, match="column 'answer' holds no mathematical expression"):
        score("math_verify", ["1"], answer="")


def test_reasoning_gym_uses_the_score_of_the_dataset_on_the_last_number():
    texts = ["4 - 1 = 3", "3.0", "13", "-3", "3 is wrong, 5", "", "<answer>3</answer> not 4"]
    assert score("reasoning_gym", texts, **ENTRY) == [1.0, 1.0, 0.5, 0.5, 0.0, 0.0, 1.0]
    assert score("reasoning_gym", texts, {"partial": False}, **ENTRY) == [1, 1, 0, 0, 0, 0, 1]
    assert score("reasoning_gym", ["it is 3"], {"extract": "whole"}, **ENTRY) == [pytest.approx(1 / 7)]
    entry = {key: value for key, value in ENTRY.items() if key != "dataset"}
    assert score("reasoning_gym", ["3"], {"dataset": "chain_sum"}, **entry) == [1.0]


def test_reasoning_gym_scores_with_the_config_that_made_the_row():
    entry = {**ENTRY, "dataset": "decimal_arithmetic", "answer": "1.25"}
    config = {"min_num_decimal_places": 1, "precision": 8}
    coarse = {**config, "max_num_decimal_places": 1}
    fine = {**config, "max_num_decimal_places": 3}
    assert score("reasoning_gym", ["1.3"], **entry, dataset_config=coarse) == [1.0]
    assert score("reasoning_gym", ["1.3"], **entry, dataset_config=fine) == [0.0]


def test_an_answer_on_which_the_scorer_of_a_dataset_stumbles_is_wrong_and_an_entry_is_an_error():
    from reasoning_gym.factory import create_dataset

    entry = {**create_dataset("prime_factorization", size=1, seed=1)[0], "dataset": "prime_factorization"}
    whole = {"extract": "whole"}
    assert score("reasoning_gym", ["a:1", entry["answer"]], whole, **entry) == [0.0, 1.0]
    with pytest.raises(ValueError, match="invalid literal"):
        score("reasoning_gym", ["a:1"], whole, **{**entry, "answer": "b:2"})


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("exact_match", {"fields": "a"}, "no option fields; there are: field, extract, extract_field, ignore_case"),
        ("exact_match", {"extract": "number"}, "option extract: 'number' is none of auto, whole, last_number"),
        ("regex", {}, "option pattern is missing"),
        ("regex", {"pattern": "(a"}, "option pattern: '\\(a' is not a regular expression"),
        ("regex", {"pattern": "(a)", "group": 2}, r"has no group 2; it has \[0, 1\]"),
        ("math_verify", {"seconds": 0}, "option seconds: 0; a whole number of at least 1"),
        ("reasoning_gym", {"dataset": "chain_sumz"}, "no dataset 'chain_sumz'; near: chain_sum"),
    ],
)
def test_wrong_options_are_refused_with_what_there_is(name, options, message):
    with pytest.raises(ValueError, match=message):
        build_builtin(name, options)


# how functions of the user are called


def call_of(function: str, **values) -> Call:
    return build_call(FunctionSpec("f", None, f"tests.unit.makers.reward_functions:{function}", **values))


def test_a_function_gets_only_the_arguments_it_accepts():
    fields = {"answer": "a", "other": 1}
    assert call_of("only_answer").arguments(["a"], "p", fields) == {"completions": ["a"], "answer": "a"}
    everything = call_of("length").arguments(["a"], "p", fields)
    assert everything == {"completions": ["a"], "prompt": "p", "answer": "a", "other": 1}


def test_options_reach_the_function_and_win_over_columns():
    call = call_of("with_options", options={"bonus": 2.0, "answer": "none"})
    assert call(["a", "b"], "p", {"answer": "x"}, None) == [3.0, 3.0]
    assert call_of("Scaled", options={"scale": 0.5})(["a", "b"], "p", {}, None) == [0.5, 0.5]


def test_a_function_for_trl_gets_lists_with_one_entry_a_completion():
    call = call_of("trl_style", convention="trl")
    assert call(["4", "5"], "p", {"answer": "4"}, None) == [1.0, 0.0]
    chat = [{"role": "user", "content": "p"}]
    arguments = call.arguments(["4", "5"], chat, {"answer": "4"})
    assert arguments["prompts"] == [chat, chat]
    assert arguments["answer"] == ["4", "4"]
    assert arguments["completions"][1] == [{"role": "assistant", "content": "5"}]
    assert call(["4", "5"], chat, {"answer": "4"}, None) == [1.0, 0.0]


def test_a_column_that_is_not_there_is_named():
    call = call_of("needs_solution")
    assert call.columns == ("solution",)
    with pytest.raises(RewardError, match="needs the column solution; the prompt has: answer"):
        call(["a"], "p", {"answer": "a"}, None)


@pytest.mark.parametrize(
    ("function", "values", "message"),
    [
        ("trl_style", {}, "takes `prompts`, as functions for TRL do: set `convention: trl`"),
        ("positional", {}, "takes completions, prompt by position only"),
        ("only_answer", {"options": {"bonus": 1}}, "does not take bonus; it takes: completions, answer"),
        ("Scaled", {"options": {}}, "(?s)building it with options {} raised.*missing 1 required"),
        ("NOT_CALLABLE", {}, "is int: a function, or a class with __call__, is needed"),
        ("lengths", {}, "has no 'lengths'; near: length"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused_when_it_is_built(function, values, message):
    with pytest.raises(ValueError, match=message):
        call_of(function, **values)
