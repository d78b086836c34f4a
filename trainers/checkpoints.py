"""Checkpoint folders of a run: `step-000010/` with `meta.json`, and the pointer file `latest`.

Guarantees:
1. A folder named `step-*` is complete: it is written under another name and renamed when everything is on disk.
   It holds JSON, safetensors and Parquet: reading it runs no code, whoever wrote it.
2. `latest` names a complete checkpoint at every moment, also when a later one fails (full disk, dead rank): the partial
   one is removed, and the last valid one is neither touched nor pruned.
3. `keep` newest checkpoints remain.
4. Reading refuses a broken or foreign folder, and says what is wrong with it and what can be done.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORMAT = "tandem-checkpoint"
FORMAT_VERSION = 2
META = "meta.json"
LATEST = "latest"
RANKS_FOLDER = "trainer"  # what the ranks of the policy save together
CRITIC_FOLDER = "critic"  # and those of its critic
BUFFER_FOLDER = "buffer"  # the rows in flight, see `buffer.files`
_PARTIAL = ".partial-"
_NAME = r"step-\d+"
_REQUIRED = ("step", "version")

Writer = Callable[[Path], Awaitable[None]]


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or a folder holds none that can be used."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint. `meta` is everything its `meta.json` says."""

    path: Path
    step: int
    version: int  # the newest published version at that step
    meta: Mapping[str, Any]


class Checkpointer:
    """Writes checkpoints below one folder. One at a time."""

    def __init__(self, folder: Path, keep: int) -> None:
        if keep < 1:
            raise ValueError(f"checkpoint.keep is {keep}, must be at least 1")
        self.folder = Path(folder)
        self.keep = keep

    async def save(self, meta: Mapping[str, Any], writers: Sequence[Writer]) -> Checkpoint:
        """Write one checkpoint: each writer fills the folder it is given, then `meta.json` seals it.

        Saving a step that `latest` already names changes nothing. Raises CheckpointError with the cause and the
        checkpoint that remains valid.
        """
        name = f"step-{meta['step']:06d}"
        partial = self.folder / f"{_PARTIAL}{name}"
        try:
            if _pointed(self.folder) == name:
                return load(self.folder / name)
            await _in_thread(self._begin, partial)
            for write in writers:
                await write(partial)
            await _in_thread(self._commit, partial, name, meta)
        except BaseException as error:
            self._discard(partial, name)
            if not isinstance(error, Exception):
                raise
            raise CheckpointError(
                f"checkpoint {name} was not written ({type(error).__name__}: {error}); {self._remaining()}"
            ) from error
        await _in_thread(self._prune, name)
        return load(self.folder / name)

    def _begin(self, partial: Path) -> None:
        for left in self.folder.glob(f"{_PARTIAL}*"):  # by a life of the run that was killed
            shutil.rmtree(left, ignore_errors=True)
        partial.mkdir(parents=True)

    def _commit(self, partial: Path, name: str, meta: Mapping[str, Any]) -> None:
        _seal(partial, meta)
        target = self.folder / name
        if target.exists():  # left by an earlier life of the run; `latest` does not name it
            shutil.rmtree(target)
        partial.rename(target)
        _write_durably(self.folder / f"{LATEST}.new", name + "\n")
        os.replace(self.folder / f"{LATEST}.new", self.folder / LATEST)

    def _discard(self, partial: Path, name: str) -> None:
        shutil.rmtree(partial, ignore_errors=True)
        if _pointed(self.folder) != name:
            shutil.rmtree(self.folder / name, ignore_errors=True)

    def _prune(self, newest: str) -> None:
        others = [path for path in _complete(self.folder) if path.name != newest]
        others.sort(key=lambda path: path.name < newest)  # first those from which the run has gone back
        for path in others[: max(0, len(others) - self.keep + 1)]:
            shutil.rmtree(path, ignore_errors=True)  # a folder that cannot be removed costs space, not the run

    def _remaining(self) -> str:
        name = _pointed(self.folder)
        return (
            f"the previous one, {name}, is untouched: `tandem resume` goes on from it"
            if name
            else "there is no earlier one"
        )


def find_latest(folder: Path) -> Checkpoint:
    """The checkpoint that `latest` names below `folder` (a `checkpoints/` folder, or a run folder that has one).

    Raises CheckpointError with the reason and the remedy.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder: give the folder of a run")
    if not (folder / LATEST).exists() and (folder / "checkpoints").is_dir():
        folder = folder / "checkpoints"
    name = _pointed(folder)
    if name is None:
        raise CheckpointError(f"{folder} has no file `{LATEST}`: no checkpoint was written there. {_choices(folder)}")
    if not re.fullmatch(_NAME, name) or not (folder / name).is_dir():
        raise CheckpointError(f"{folder / LATEST} names {name!r}, which is not a folder beside it. {_choices(folder)}")
    try:
        return load(folder / name)
    except CheckpointError as error:
        raise CheckpointError(f"{error}. {_choices(folder, without=name)}") from error


def last_whole(folder: Path) -> tuple[Checkpoint | None, str | None]:
    """What a run goes back to: the checkpoint that `latest` names, or if that is broken the newest whole one before it, and
    what is wrong. None: no checkpoint was written yet. Raises CheckpointError if all are broken."""
    name = _pointed(folder)
    if name is None:
        return None, None
    try:
        return find_latest(folder), None
    except CheckpointError as error:
        broken = error
    for path in reversed(_complete(folder)):
        if path.name < name:
            with suppress(CheckpointError):
                return load(path), str(broken)
    raise broken


def load(path: Path) -> Checkpoint:
    """The checkpoint in `path` after checking its meta data, and that every file is there in its full size."""
    meta = _read_meta(path / META)
    if meta.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not a Tandem checkpoint: {META} has format {meta.get('format')!r}")
    if meta.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has checkpoint format version {meta.get('format_version')!r}, this Tandem reads {FORMAT_VERSION}"
        )
    for key in _REQUIRED:
        if type(meta.get(key)) is not int or meta[key] < 0:
            raise CheckpointError(f"{path / META} is broken: {key} is {meta.get(key)!r}, expected a number >= 0")
    if not isinstance(meta.get("files", {}), dict):
        raise CheckpointError(f"{path / META} is broken: files is {meta['files']!r}, expected an object")
    for name, nbytes in meta.get("files", {}).items():
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise CheckpointError(f"{path / META} is broken: its file {name!r} is outside of the checkpoint")
        file = path / name
        found = file.stat().st_size if file.is_file() else None
        if found != nbytes:
            state = "is missing" if found is None else f"has {found} bytes"
            raise CheckpointError(f"{path} is broken: {name} {state}, {nbytes} bytes were written")
    return Checkpoint(path, meta["step"], meta["version"], meta)


def _read_meta(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise CheckpointError(f"{file.parent} is not a Tandem checkpoint: it has no {META}")
    try:
        meta = json.loads(file.read_text())
    except ValueError as error:
        raise CheckpointError(f"{file} is broken: {error}") from error
    if not isinstance(meta, dict):
        raise CheckpointError(f"{file} is broken: expected an object, found {type(meta).__name__}")
    return meta


def _seal(partial: Path, meta: Mapping[str, Any]) -> None:
    files = {
        str(file.relative_to(partial)): file.stat().st_size for file in sorted(partial.rglob("*")) if file.is_file()
    }
    sealed = {"format": FORMAT, "format_version": FORMAT_VERSION, **meta, "files": files}
    _write_durably(partial / META, json.dumps(sealed, indent=1))


async def _in_thread(work: Callable[..., None], *args: Any) -> None:
    """Training goes on while a disk is slow. What was begun is finished, also for who is cancelled."""
    working = asyncio.ensure_future(asyncio.to_thread(work, *args))
    try:
        await asyncio.shield(working)
    except asyncio.CancelledError:
        await asyncio.wait({working})
        raise


def _write_durably(file: Path, text: str) -> None:
    with file.open("w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def _pointed(folder: Path) -> str | None:
    file = folder / LATEST
    return file.read_text().strip() if file.is_file() else None


def _complete(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted((path for path in folder.glob("step-*") if (path / META).is_file()), key=lambda path: path.name)


def _choices(folder: Path, without: str = "") -> str:
    names = [path.name for path in _complete(folder) if path.name != without]
    if not names:
        return "No other checkpoint is there: start a new run"
    return f"Complete ones there: {', '.join(names)}; write one of these names into {folder / LATEST} to go on from it"
