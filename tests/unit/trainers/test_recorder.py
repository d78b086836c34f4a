from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.fakes_trainer import make_row
from trainers.config import MetricsConfig, WandbConfig
from trainers.recorder import MissingExtra, Recorder, append_event, open_recorder
from trainers.rows_writer import RowsWriter, load_decoder


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


class FakeCharts:
    def __init__(self) -> None:
        self.drawn: list[tuple[int, dict[str, float]]] = []
        self.closed = False

    def scalars(self, step: int, values: Any) -> None:
        self.drawn.append((step, dict(values)))

    def close(self) -> None:
        self.closed = True


def test_metrics_are_on_disk_when_the_call_returns_and_not_finite_is_null(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    recorder.metrics({"step": 1, "loss": float("nan"), "kl": np.float32(0.5), "bound_by": "maker", "rows": np.int64(3)})
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": None, "kl": 0.5, "bound_by": "maker", "rows": 3}]


def test_events_carry_their_time_and_kind(tmp_path: Path) -> None:
    Recorder(tmp_path, wall_clock=lambda: 12.5).event("checkpoint", step=3, folder=Path("a/b"))
    append_event(tmp_path / "events.jsonl", "death", wall_time=13.0, actor="maker/rollout/0")
    assert lines(tmp_path / "events.jsonl") == [
        {"time": 12.5, "event": "checkpoint", "step": 3, "folder": "a/b"},
        {"time": 13.0, "event": "death", "actor": "maker/rollout/0"},
    ]


def test_second_life_of_a_run_appends(tmp_path: Path) -> None:
    for step in (1, 2):
        recorder = Recorder(tmp_path)
        recorder.metrics({"step": step})
        recorder.close()
    assert [row["step"] for row in lines(tmp_path / "metrics.jsonl")] == [1, 2]


def test_charts_get_the_finite_numbers_of_a_step(tmp_path: Path) -> None:
    charts = FakeCharts()
    recorder = Recorder(tmp_path, [charts])
    recorder.metrics({"step": 4, "loss": 0.5, "kl": None, "bad": float("inf"), "bound_by": "maker"})
    recorder.close()
    assert charts.drawn == [(4, {"loss": 0.5})]
    assert charts.closed


def test_tensorboard_files_hold_the_values(tmp_path: Path) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    recorder = open_recorder(tmp_path, MetricsConfig(tensorboard=True), name="run", run_config={})
    recorder.metrics({"step": 1, "reward/mean": 0.25})
    recorder.metrics({"step": 2, "reward/mean": 0.5})
    recorder.close()
    found = reader.EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert [(point.step, point.value) for point in found.Scalars("reward/mean")] == [(1, 0.25), (2, 0.5)]


@pytest.mark.parametrize(
    ("config", "package", "extra"),
    [
        (MetricsConfig(tensorboard=True), "tensorboard", "tensorboard"),
        (MetricsConfig(wandb=WandbConfig(project="p")), "wandb", "wandb"),
    ],
)
def test_missing_package_is_an_error_that_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: MetricsConfig, package: str, extra: str
) -> None:
    for name in [package, *(loaded for loaded in sys.modules if loaded.startswith(f"{package}."))]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtra, match=rf"metrics.{package} needs the package {package}: .*tandem-rl\[{extra}\]"):
        open_recorder(tmp_path, config, name="run", run_config={})


def decode(ids: Any) -> str:
    return " ".join(map(str, ids))


def test_rows_file_has_one_record_a_sample_with_maker_text_tokens_rewards_and_versions(tmp_path: Path) -> None:
    rows = [make_row(5, version=2, lengths=(3, 2), finish=(0, 1)), make_row(6, version=3)]

    async def main() -> None:
        writer = RowsWriter(tmp_path / "rows", every=1, decode=decode)
        columns = [dict(row.columns) for row in rows]
        columns[0]["reward"] = {
            **columns[0]["reward"],
            "token_rewards": np.ones(5, np.float32),
        }  # in the reward already
        await writer.write(1, rows, columns)
        await writer.finish()

    asyncio.run(main())
    assert [file.name for file in (tmp_path / "rows").iterdir()] == ["step-000001.parquet"]
    records = pq.read_table(tmp_path / "rows" / "step-000001.parquet").to_pylist()
    assert len(records) == 4
    assert records[1] == {
        "step": 1,
        "row_id": 5,
        "sample": 1,
        "maker": "maker/rollout/0",
        "prompt_id": "p5",
        "prompt": "prompt 5",
        "completion": "13 14",
        "finish_reason": "length",
        "age": 0,
        "reward": 1.0,
        "reward/exact_match": 1.0,
        "prompt_ids": [1, 2],
        "response_ids": [13, 14],
        "behaviour_logprobs": [-0.5, -0.5],
        "policy_versions": [2, 2],
    }


def test_rows_are_wanted_in_the_first_step_and_every_k_steps(tmp_path: Path) -> None:
    writer = RowsWriter(tmp_path, every=3, decode=decode)
    assert [step for step in range(1, 8) if writer.wants(step)] == [1, 3, 6]


def test_rows_file_that_failed_raises_at_the_next_and_leaves_nothing(tmp_path: Path) -> None:
    def broken(_: Any) -> str:
        raise OSError(28, "No space left on device")

    async def main() -> None:
        writer = RowsWriter(tmp_path / "rows", every=1, decode=broken)
        row = make_row(0)
        await writer.write(1, [row], [dict(row.columns)])
        with pytest.raises(OSError, match="No space left"):
            await writer.finish()
        await writer.finish()

    asyncio.run(main())
    assert list((tmp_path / "rows").iterdir()) == []


def test_decoder_reads_the_tokenizer_of_the_model_folder(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({"one": 0, "two": 1, "[UNK]": 2}, unk_token="[UNK]")
    tokenizers.Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    assert load_decoder(tmp_path)([1, 0]) == "two one"
    with pytest.raises(FileNotFoundError, match="tokenizer.json is missing"):
        load_decoder(tmp_path / "nowhere")


def test_weights_and_biases_offline_writes_below_the_run_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    recorder = open_recorder(tmp_path, MetricsConfig(wandb=WandbConfig(project="p")), name="run", run_config={"a": 1})
    recorder.metrics({"step": 1, "reward/mean": 0.25})
    recorder.close()
    assert len(list(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))) == 1
