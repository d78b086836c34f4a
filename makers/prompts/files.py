"""Which files a `path` means: one file, a pattern, a folder saved by `datasets`, or a folder of files of one kind."""

from __future__ import annotations

import glob
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from makers.config import FilePrompts
from makers.prompts.rows import PromptsError, PromptsSummary, Rows

KINDS = (".jsonl", ".parquet", ".arrow")
SPLIT = re.compile(r"^(train|test|validation|valid|val|dev|eval)(?=[-_.])")


def open_files(config: FilePrompts) -> Rows:
    """Raises PromptsError."""
    files = find_files(config.path)
    name = Path(config.path).stem or config.path
    if files[0].suffix == ".jsonl":
        from makers.prompts.jsonl import JsonlRows

        rows: Rows = JsonlRows(files, column=config.column, name=name)
    else:
        from makers.prompts.arrow import ArrowRows

        rows = ArrowRows(files, column=config.column, name=name)
    if len(rows) == 0:
        raise PromptsError(f"{config.path}: the data is empty: at least one row is needed")
    return rows


def check_files(config: FilePrompts) -> PromptsSummary:
    """What can be known without reading all rows. Raises PromptsError."""
    files = find_files(config.path)
    if files[0].suffix == ".jsonl":
        from makers.prompts.jsonl import check_jsonl

        return check_jsonl(files, config.column)
    from makers.prompts.arrow import check_arrow

    return check_arrow(files, config.column)


def find_files(path: str) -> list[Path]:
    """The data files of `path`, in order, all of one kind. Raises PromptsError."""
    place = Path(path).expanduser()
    if place.is_dir():
        return _in_folder(place)
    if place.is_file():
        return _of_one_kind([place], path)
    matches = sorted(Path(match) for match in glob.glob(str(place)))
    if not matches:
        raise PromptsError(f"{path}: no such file or folder (looked from {Path.cwd()})")
    return _of_one_kind(matches, path)


def _in_folder(folder: Path) -> list[Path]:
    if (folder / "dataset_dict.json").is_file():
        splits = _read_json(folder / "dataset_dict.json").get("splits") or ["train"]
        raise PromptsError(f"{folder}: holds the splits {', '.join(splits)}; name one, such as {folder / splits[0]}")
    if (folder / "state.json").is_file():
        names = [entry["filename"] for entry in _read_json(folder / "state.json").get("_data_files", [])]
        missing = [name for name in names if not (folder / name).is_file()]
        if missing or not names:
            raise PromptsError(
                f"{folder}: state.json lists {', '.join(missing) or 'no file'}; the folder is incomplete"
            )
        return [folder / name for name in names]
    files = sorted(file for file in folder.iterdir() if file.is_file() and file.suffix in KINDS)
    if not files:
        raise PromptsError(f"{folder}: holds no {', '.join(KINDS)} file and was not saved by `datasets`")
    splits = sorted({match.group(1) for file in files if (match := SPLIT.match(file.name))})
    if len(splits) > 1:
        pattern = folder / f"{splits[0]}*{files[0].suffix}"
        raise PromptsError(f"{folder}: holds the splits {', '.join(splits)}; name one by a pattern, such as {pattern}")
    return _of_one_kind(files, str(folder))


def _of_one_kind(files: Sequence[Path], path: str) -> list[Path]:
    kinds = sorted({file.suffix for file in files})
    if len(kinds) > 1 or kinds[0] not in KINDS:
        raise PromptsError(f"{path}: holds {', '.join(kinds)} files; one kind of {', '.join(KINDS)} is needed")
    return list(files)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(file.read_text())
        return content
    except ValueError as error:
        raise PromptsError(f"{file}: not valid JSON ({error})") from error
