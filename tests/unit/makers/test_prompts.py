"""Prompt sources: order, passes, the cursor, and what each kind of bad data is answered with."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import TypeAdapter

from makers.config import PromptsConfig
from makers.prompts import PromptsError, check_prompts, open_prompts, take

HERE = "tests.unit.makers.prompt_sources"
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]


def config(**values):
    return TypeAdapter(PromptsConfig).validate_python(values)


def gym(**values):
    digits = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    return config(**{"type": "reasoning_gym", "dataset": "chain_sum", "size": 5, "seed": 1, "config": digits, **values})


def write_jsonl(path: Path, rows) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def ten(tmp_path: Path) -> str:
    return str(write_jsonl(tmp_path / "ten.jsonl", [{"prompt": f"question {i}", "answer": i} for i in range(10)]))


def contents(source, count: int) -> list:
    return [prompt.content if (prompt := source.next()) else None for _ in range(count)]


def save_like_datasets(folder: Path, tables) -> None:
    """The form of Dataset.save_to_disk: Arrow streams listed, in order, by state.json."""
    folder.mkdir(parents=True)
    names = [f"data-{i:05d}-of-{len(tables):05d}.arrow" for i in range(len(tables))]
    for name, table in zip(names, tables, strict=True):
        with pa.OSFile(str(folder / name), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_info.json").write_text("{}")


# order, passes, cursor


def test_without_shuffling_rows_come_in_file_order_and_passes_repeat_them_with_the_same_ids(ten):
    source = open_prompts(config(type="file", path=ten, shuffle=False))
    first, second = [source.next() for _ in range(10)], [source.next() for _ in range(10)]
    assert [p.content for p in first] == [f"question {i}" for i in range(10)]
    assert first == second
    assert first[3].id == "ten/3"
    assert first[3].fields == {"answer": 3}
    assert source.cursor == 20
    assert source.epoch == 2


def test_each_pass_is_a_different_permutation_and_the_seed_decides_it(ten):
    source = open_prompts(config(type="file", path=ten, seed=4))
    one, two = contents(source, 10), contents(source, 10)
    assert sorted(one) == sorted(two) == [f"question {i}" for i in range(10)]
    assert one != two
    assert contents(open_prompts(config(type="file", path=ten, seed=4)), 20) == one + two
    assert contents(open_prompts(config(type="file", path=ten, seed=5)), 10) != one


@pytest.mark.parametrize("cursor", [0, 1, 9, 10, 11, 27])
def test_seek_on_a_fresh_source_goes_on_exactly_where_the_cursor_stood(ten, cursor):
    settings = config(type="file", path=ten, seed=4)
    whole = contents(open_prompts(settings), 40)
    source = open_prompts(settings)
    source.seek(cursor)
    assert source.cursor == cursor
    assert contents(source, 40 - cursor) == whole[cursor:]


def test_n_epochs_end_after_n_passes_and_stay_ended(ten):
    source = open_prompts(config(type="file", path=ten, epochs=2))
    assert None not in contents(source, 20)
    assert contents(source, 3) == [None, None, None]
    assert source.cursor == 20
    source.seek(20)
    assert source.next() is None
    with pytest.raises(PromptsError, match=r"prompt 21: this data ends after 20 \(10 rows a pass\)"):
        source.seek(21)


def test_take_gives_the_first_prompts_and_never_one_twice(ten):
    settings = config(type="file", path=ten, shuffle=False)
    assert [p.content for p in take(settings, 3)] == ["question 0", "question 1", "question 2"]
    with pytest.raises(PromptsError, match="11 prompts are wanted, the data has 10"):
        take(settings, 11)


# reasoning-gym


def test_a_reasoning_gym_prompt_carries_all_that_its_scorer_needs():
    prompt = open_prompts(gym(suffix=" Answer with a number.")).next()
    assert prompt.id == "chain_sum/0"
    assert prompt.content == prompt.fields["question"] + " Answer with a number."
    assert prompt.content.startswith("State the final answer to the following arithmetic problem: 4 - 1 =")
    assert prompt.fields["answer"] == "3"
    assert prompt.fields["dataset"] == "chain_sum"
    assert prompt.fields["metadata"]["expression"] == "4 - 1"
    assert prompt.fields["dataset_config"]["max_terms"] == 2


def test_a_reasoning_gym_prompt_may_show_its_answer_to_the_teacher_alone():
    prompt = open_prompts(gym(teacher_prompt="{question} (Answer: {answer})")).next()
    assert prompt.content == prompt.fields["question"]
    assert prompt.fields["teacher_prompt"] == prompt.fields["question"] + " (Answer: 3)"


def test_reasoning_gym_is_described_before_it_is_opened():
    summary = check_prompts(gym(size=300))
    assert summary.rows == 300
    assert set(summary.columns) == {"question", "answer", "metadata", "dataset", "dataset_config"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"dataset": "chain_sums"}, "no dataset 'chain_sums'; near: chain_sum"),
        ({"config": {"min_term": 2}}, "'chain_sum' has no setting min_term; it has: min_terms"),
        ({"config": {"min_terms": 9, "max_terms": 2}}, "refuses prompts.config .*max_terms must be >= min_terms"),
        ({"config": {"seed": 3}}, "prompts.config holds seed: set it beside `dataset`"),
    ],
)
def test_a_wrong_reasoning_gym_config_is_refused_with_what_there_is(values, message):
    with pytest.raises(PromptsError, match=message):
        check_prompts(gym(**values))


# files


def test_parquet_jsonl_and_datasets_folders_of_the_same_rows_are_the_same_prompts(tmp_path):
    rows = [{"question": CHAT if i % 2 else CHAT[1:], "answer": str(i), "tags": [i, i]} for i in range(6)]
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, tmp_path / "data.parquet", row_group_size=2)
    (tmp_path / "parts").mkdir()
    for part in range(3):
        pq.write_table(table.slice(2 * part, 2), tmp_path / "parts" / f"train-{part}.parquet")
    save_like_datasets(tmp_path / "saved", [table.slice(0, 4), table.slice(4)])
    write_jsonl(tmp_path / "data.jsonl", rows)
    for path in ("data.parquet", "parts", "parts/train-*.parquet", "saved", "data.jsonl"):
        settings = config(type="file", path=str(tmp_path / path), column="question", shuffle=False, epochs=1)
        source = open_prompts(settings)
        prompts = [source.next() for _ in range(6)]
        assert [p.content for p in prompts] == [row["question"] for row in rows], path
        assert [dict(p.fields) for p in prompts] == [{"answer": str(i), "tags": [i, i]} for i in range(6)], path
        assert source.next() is None
        assert set(check_prompts(settings).columns) == {"answer", "tags"}, path


def test_blank_lines_are_no_rows_and_text_keeps_its_characters(tmp_path):
    (tmp_path / "a.jsonl").write_text('\n{"prompt": "é → ü"}\n\n  \n{"prompt": "b"}')
    source = open_prompts(config(type="file", path=str(tmp_path / "a.jsonl"), shuffle=False, epochs=1))
    assert contents(source, 3) == ["é → ü", "b", None]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the data is empty"),
        ("\n \n", "the data is empty"),
        ('{"prompt": "a"}\n{"prompt": "b"\n', r"bad\.jsonl, line 2: not valid JSON"),
        ('{"prompt": "a"}\n[1]\n', r"bad\.jsonl, line 2: holds list; one object"),
        ('{"question": "a", "answer": 1}\n', r"line 1: no column 'prompt'; there are: question, answer"),
        ('{"prompt": 3}\n', r"line 1: the prompt is of type int; text, or a list of messages"),
        ('{"prompt": null}\n', r"line 1: the prompt is null"),
        ('{"prompt": " "}\n', r"line 1: the prompt is empty"),
        ('{"prompt": []}\n', r"line 1: the prompt is an empty list"),
        ('{"prompt": [{"role": "user"}]}\n', r"line 1, message 0: has no content \(keys: role\)"),
        ('{"prompt": [{"role": "user", "content": [1]}]}\n', r"message 0: content is of type list; text is needed"),
        ('{"prompt": ["hi"]}\n', r"message 0: is of type str"),
    ],
)
def test_a_broken_jsonl_file_is_refused_with_the_line(tmp_path, text, message):
    (tmp_path / "bad.jsonl").write_text(text)
    settings = config(type="file", path=str(tmp_path / "bad.jsonl"))
    for look in (check_prompts, open_prompts):
        with pytest.raises(PromptsError, match=message):
            look(settings)


def test_a_line_that_the_plan_did_not_look_at_is_refused_when_the_data_is_opened(tmp_path):
    text = '{"prompt": "a", "answer": 1}\n' * 100 + "oops\n"
    (tmp_path / "a.jsonl").write_text(text)
    settings = config(type="file", path=str(tmp_path / "a.jsonl"))
    assert check_prompts(settings).columns == ("answer",)
    with pytest.raises(PromptsError, match="line 101: not valid JSON"):
        open_prompts(settings)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"question": ["a"], "answer": ["b"]}, "no column 'prompt'; there are: question, answer"),
        ({"prompt": [1, 2]}, "column 'prompt' holds int64; text, or lists of messages"),
        ({"prompt": ["a", None]}, "row 1: the prompt is null"),
        ({"prompt": ["a", "b", " "]}, "row 2: the prompt is empty"),
        ({"prompt": [CHAT, [{"role": "user", "content": None}]]}, "row 1, message 0: has no content"),
        ({"prompt": pa.array([], pa.string())}, "the data is empty"),
    ],
)
def test_a_broken_parquet_file_is_refused_with_the_row(tmp_path, rows, message):
    pq.write_table(pa.table(rows), tmp_path / "bad.parquet")
    with pytest.raises(PromptsError, match=message):
        open_prompts(config(type="file", path=str(tmp_path / "bad.parquet")))


def test_a_path_that_means_no_data_or_several_data_is_refused_with_the_remedy(tmp_path):
    def refuse(path: Path, message: str) -> None:
        for look in (check_prompts, open_prompts):
            with pytest.raises(PromptsError, match=message):
                look(config(type="file", path=str(path)))

    refuse(tmp_path / "missing.jsonl", "no such file or folder")
    (tmp_path / "empty").mkdir()
    refuse(tmp_path / "empty", "holds no .jsonl, .parquet, .arrow file")
    (tmp_path / "notes.txt").write_text("hello")
    refuse(tmp_path / "notes.txt", "holds .txt files; one kind of .jsonl, .parquet, .arrow is needed")
    (tmp_path / "broken.parquet").write_text("hello")
    refuse(tmp_path / "broken.parquet", "cannot be read as Parquet")
    (tmp_path / "splits").mkdir()
    for split in ("train", "test"):
        write_jsonl(tmp_path / "splits" / f"{split}-0.jsonl", [{"prompt": "a"}])
    refuse(tmp_path / "splits", r"holds the splits test, train; name one by a pattern, such as .*/test\*\.jsonl")
    save_like_datasets(tmp_path / "dict" / "train", [pa.table({"prompt": ["a"]})])
    (tmp_path / "dict" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    refuse(tmp_path / "dict", "holds the splits train; name one, such as .*/dict/train")
    (tmp_path / "dict" / "train" / "data-00000-of-00001.arrow").unlink()
    refuse(tmp_path / "dict" / "train", "state.json lists data-00000-of-00001.arrow; the folder is incomplete")


# a class of the user


def test_a_sequence_of_the_user_is_shuffled_sought_and_numbered_like_a_file():
    settings = config(type=f"{HERE}:Squares", options={"size": 6}, shuffle=True, seed=2)
    source = open_prompts(settings)
    prompts = [source.next() for _ in range(6)]
    assert sorted(p.fields["answer"] for p in prompts) == [0, 1, 4, 9, 16, 25]
    assert {p.id for p in prompts} == {f"Squares/{i}" for i in range(6)}
    again = open_prompts(settings)
    again.seek(4)
    assert [again.next() for _ in range(2)] == prompts[4:]


def test_an_iterable_of_the_user_starts_anew_each_pass_and_seeks_by_reading():
    settings = config(type=f"{HERE}:Letters", epochs=3)
    assert contents(open_prompts(settings), 10) == [*"abcabcabc", None]
    source = open_prompts(settings)
    source.seek(5)
    assert (source.cursor, source.epoch) == (5, 1)
    prompt = source.next()
    assert (prompt.content, prompt.id, prompt.fields) == ("c", "letter-c", {"upper": "C"})
    with pytest.raises(PromptsError, match="cannot go on at prompt 10: this data ends after 9"):
        source.seek(10)


def test_a_generator_serves_one_pass_and_says_so_on_the_second():
    assert contents(open_prompts(config(type=f"{HERE}:once", epochs=1)), 3) == ["a", "b", None]
    source = open_prompts(config(type=f"{HERE}:once"))
    contents(source, 2)
    with pytest.raises(PromptsError, match="gave nothing on pass 2: let __iter__ start anew, or set epochs: 1"):
        source.next()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"type": "no_such_module:Thing"}, "no_such_module:Thing: there is no module 'no_such_module'"),
        ({"type": f"{HERE}:Square"}, "has no 'Square'; near: Squares"),
        ({"type": f"{HERE}:number"}, "gave int; a sequence .* or an iterable is needed"),
        ({"type": f"{HERE}:breaks"}, "(?s)breaks.*raised; options.*RuntimeError: no connection"),
        ({"type": f"{HERE}:Squares"}, "(?s)Squares.*raised.*missing 1 required positional argument: 'size'"),
        ({"type": f"{HERE}:Letters", "shuffle": True}, "shuffle needs __len__ and __getitem__"),
    ],
)
def test_a_class_of_the_user_that_is_no_source_is_refused(values, message):
    with pytest.raises(PromptsError, match=message):
        open_prompts(config(**values))


def test_an_item_of_the_wrong_type_is_named_by_its_row():
    source = open_prompts(config(type=f"{HERE}:wrong_items"))
    assert source.next().content == "fine"
    with pytest.raises(PromptsError, match="wrong_items, row 1: is int; a Prompt or a mapping"):
        source.next()


@pytest.mark.timeout(30)
def test_a_class_of_the_user_is_looked_up_without_importing_it_here():
    assert check_prompts(config(type=f"{HERE}:Squares")).columns is None
    with pytest.raises(PromptsError, match="has no 'Square'; near: Squares"):
        check_prompts(config(type=f"{HERE}:Square"))
    with pytest.raises(PromptsError, match="NOT_CALLABLE: is int, a class or a function is needed"):
        check_prompts(config(type="tests.unit.makers.reward_functions:NOT_CALLABLE"))


@pytest.mark.timeout(60)
def test_importing_prompts_and_rewards_imports_nothing_heavy():
    modules = "makers.prompts, makers.rewards.pool, makers.rewards.check, makers.reward"
    heavy = "('torch', 'ray', 'vllm', 'megatron', 'transformers', 'tokenizers', 'reasoning_gym', 'sympy', 'pyarrow')"
    probe = f"import sys, {modules}; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
