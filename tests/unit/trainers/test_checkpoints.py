from __future__ import annotations

import asyncio
import errno
import json
from pathlib import Path
from typing import Any

import pytest

from trainers import checkpoints
from trainers.checkpoints import Checkpoint, Checkpointer, CheckpointError, Writer, find_latest, last_whole


def save(folder: Path, step: int, keep: int = 3, writer: Writer | None = None) -> Checkpoint:
    async def fill(target: Path) -> None:
        (target / "trainer").mkdir()
        (target / "trainer" / "model.bin").write_text(f"weights of step {step}")

    meta = {"step": step, "version": step // 2}
    return asyncio.run(Checkpointer(folder, keep).save(meta, [writer or fill]))


async def full_disk(target: Path) -> None:
    (target / "model.bin").write_text("half of the we")
    raise OSError(errno.ENOSPC, "No space left on device")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_saved_checkpoint_is_found_with_its_numbers(tmp_path: Path) -> None:
    save(tmp_path / "checkpoints", 10)
    found = find_latest(tmp_path / "checkpoints")
    assert found.path == tmp_path / "checkpoints" / "step-000010"
    assert (found.step, found.version) == (10, 5)
    assert found.meta["files"] == {"trainer/model.bin": 18}
    assert find_latest(tmp_path) == found  # the run folder will do


def test_a_run_goes_back_to_the_newest_whole_checkpoint_and_says_what_is_wrong_with_a_newer_one(tmp_path: Path) -> None:
    assert last_whole(tmp_path) == (None, None)  # none was written yet
    for step in (10, 20, 30):
        save(tmp_path, step)
    (tmp_path / "latest").write_text("step-000020\n")  # the run has gone back from step 30
    assert last_whole(tmp_path) == (find_latest(tmp_path), None)
    (tmp_path / "step-000020" / "trainer" / "model.bin").write_text("half")
    whole, why = last_whole(tmp_path)
    assert whole is not None
    assert whole.step == 10
    assert "step-000020 is broken: trainer/model.bin has 4 bytes, 18 bytes were written" in str(why)
    (tmp_path / "step-000010" / "trainer" / "model.bin").unlink()
    with pytest.raises(CheckpointError, match="step-000020 is broken"):
        last_whole(tmp_path)


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        save(tmp_path, step, keep=2)
    assert names(tmp_path) == ["latest", "step-000030", "step-000040"]


def test_full_disk_leaves_the_previous_checkpoint_valid_and_no_partial_one(tmp_path: Path) -> None:
    save(tmp_path, 10, keep=1)
    with pytest.raises(
        CheckpointError, match=r"No space left on device\); the previous one, step-000010, is untouched"
    ):
        save(tmp_path, 20, keep=1, writer=full_disk)
    assert names(tmp_path) == ["latest", "step-000010"]
    assert find_latest(tmp_path).step == 10


def test_disk_that_is_full_when_the_pointer_is_written_leaves_the_previous_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 10)
    write = checkpoints._write_durably

    def fails_for_pointer(file: Path, text: str) -> None:
        if file.name.startswith("latest"):
            raise OSError(errno.ENOSPC, "No space left on device")
        write(file, text)

    monkeypatch.setattr(checkpoints, "_write_durably", fails_for_pointer)
    with pytest.raises(CheckpointError):
        save(tmp_path, 20)
    assert names(tmp_path) == ["latest", "step-000010"]


def test_cancelled_checkpoint_leaves_no_partial_one(tmp_path: Path) -> None:
    writing = asyncio.Event()

    async def forever(target: Path) -> None:
        writing.set()
        await asyncio.Event().wait()

    async def main() -> None:
        saving = asyncio.create_task(Checkpointer(tmp_path, 1).save({"step": 1, "version": 1}, [forever]))
        await writing.wait()
        assert names(tmp_path) == [".partial-step-000001"]
        saving.cancel()
        await asyncio.wait([saving])
        assert saving.cancelled()

    asyncio.run(main())
    assert names(tmp_path) == []


def test_rest_of_a_killed_save_goes_away(tmp_path: Path) -> None:
    for step in (10, 11):
        (tmp_path / f".partial-step-0000{step}").mkdir()
        (tmp_path / f".partial-step-0000{step}" / "old.bin").write_text("old")
    assert list(save(tmp_path, 10).meta["files"]) == ["trainer/model.bin"]
    assert names(tmp_path) == ["latest", "step-000010"]


def test_step_that_latest_already_names_is_not_written_again(tmp_path: Path) -> None:
    save(tmp_path, 10)
    assert save(tmp_path, 10, writer=full_disk).step == 10


def test_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no file `latest`"):
        find_latest(tmp_path)
    with pytest.raises(CheckpointError, match="is not a folder"):
        find_latest(tmp_path / "nowhere")


def test_broken_file_is_named_with_its_size_and_what_else_can_be_used(tmp_path: Path) -> None:
    save(tmp_path, 10)
    (save(tmp_path, 20).path / "trainer" / "model.bin").write_text("cut")
    expected = r"trainer/model.bin has 3 bytes, 18 bytes were written\. Complete ones there: step-000010"
    with pytest.raises(CheckpointError, match=expected):
        find_latest(tmp_path)


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ("{not json", "is broken: "),
        ("[]", "expected an object, found list"),
        ('{"format": "safetensors"}', "is not a Tandem checkpoint: meta.json has format 'safetensors'"),
        (json.dumps({"format": "tandem-checkpoint", "format_version": 9}), "format version 9, this Tandem reads 2"),
        (
            json.dumps({"format": "tandem-checkpoint", "format_version": 2, "step": "10"}),
            "step is '10', expected a number >= 0",
        ),
        (
            json.dumps(
                {"format": "tandem-checkpoint", "format_version": 2, "step": 1, "version": 1, "files": {"../x": 1}}
            ),
            "its file '../x' is outside of the checkpoint",
        ),
        (None, "is not a Tandem checkpoint: it has no meta.json"),
    ],
)
def test_foreign_or_broken_meta_is_refused_with_the_reason(tmp_path: Path, meta: Any, message: str) -> None:
    (tmp_path / "step-000010").mkdir()
    (tmp_path / "latest").write_text("step-000010\n")
    if meta is not None:
        (tmp_path / "step-000010" / "meta.json").write_text(meta)
    with pytest.raises(CheckpointError, match=message):
        find_latest(tmp_path)


@pytest.mark.parametrize("name", ["../elsewhere", "..", ".", "/tmp", "step-000099", ""])
def test_pointer_to_nothing_or_out_of_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    save(tmp_path, 10)
    (tmp_path / "latest").write_text(name)
    with pytest.raises(CheckpointError, match="which is not a folder beside it"):
        find_latest(tmp_path)
