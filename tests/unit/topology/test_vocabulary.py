"""Which tokenizers number tokens alike."""

from __future__ import annotations

import json
from pathlib import Path

from topology.models import resolve_model
from topology.vocabulary import difference, tokens_by_id


def folder(root: Path, name: str, vocab, added=()) -> Path:
    (root / name).mkdir()
    entries = [{"id": number, "content": token} for token, number in added]
    content = {"model": {"vocab": vocab}, "added_tokens": entries}
    (root / name / "tokenizer.json").write_text(json.dumps(content))
    return root / name


def test_the_same_tokens_in_another_file_format_are_no_difference(tmp_path: Path) -> None:
    dictionary = folder(tmp_path, "a", {"x": 0, "y": 1}, [("<end>", 2)])
    pieces = folder(tmp_path, "b", [["x", -1.0], ["y", -2.0], ["<end>", 0.0]])
    assert tokens_by_id(dictionary) == {0: "x", 1: "y", 2: "<end>"}
    assert difference(dictionary, pieces) is None
    split = tmp_path / "c"
    split.mkdir()
    (split / "vocab.json").write_text('{"x": 0, "y": 1}')
    (split / "added_tokens.json").write_text('{"<end>": 2}')
    assert difference(dictionary, split) is None


def test_ids_with_another_meaning_are_counted_and_shown(tmp_path: Path) -> None:
    policy = folder(tmp_path, "a", {"x": 0, "y": 1, "z": 2})
    other = folder(tmp_path, "b", {"y": 0, "x": 1})
    assert difference(policy, other) == (
        f"3 of 3 token ids mean something else in {other} than in {policy} "
        "(0 is 'y', not 'x', 1 is 'x', not 'y', 2 is None, not 'z')"
    )


def test_tokenizers_that_are_not_json_are_compared_as_files(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "abc"]
    for path, content in zip(folders, (b"1", b"1", b"2"), strict=True):
        path.mkdir()
        (path / "tokenizer.model").write_bytes(content)
    assert difference(folders[0], folders[1]) is None
    assert difference(folders[0], folders[2]) == f"the tokenizer files of {folders[2]} are not those of {folders[0]}"


def test_generated_models_of_every_family_share_their_vocabulary() -> None:
    assert difference(resolve_model("tiny-llama"), resolve_model("tiny-qwen3")) is None
