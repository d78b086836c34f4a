"""Select, count, write: the pure parts of a job, and the collector on a buffer that is a list."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyarrow import parquet

from buffer.buffer import EndOfData
from buffer.records import Prompt, SampledRow
from trainers.collecting.collector import Collector
from trainers.collecting.config import BestOfN, CollectConfig, PassConfig, Rejection, SelectAll
from trainers.collecting.parts import Parts
from trainers.collecting.select import select
from trainers.collecting.tally import pass_at_k
from trainers.ports import Deadlines
from trainers.recorder import Recorder

SCORES = np.array([0.5, 1.0, 0.0, 1.0])


@pytest.mark.parametrize(
    ("config", "kept"),
    [
        (SelectAll(), [0, 1, 2, 3]),
        (BestOfN(type="best_of_n", keep=1), [1]),
        (BestOfN(type="best_of_n", keep=3), [0, 1, 3]),
        (Rejection(type="rejection", threshold=0.5), [0, 1, 3]),
        (Rejection(type="rejection", threshold=0.5, keep=2), [1, 3]),
        (Rejection(type="rejection", threshold=1.5), []),
    ],
)
def test_the_best_are_kept_in_the_order_of_the_samples(config: Any, kept: list[int]) -> None:
    assert select(config, SCORES).tolist() == kept


@pytest.mark.parametrize("right", range(6))
@pytest.mark.parametrize("k", [1, 2, 5])
def test_pass_at_k_is_the_share_of_draws_with_a_right_sample(right: int, k: int) -> None:
    draws = list(combinations(range(5), k))
    assert pass_at_k(5, right, k) == pytest.approx(sum(min(draw) < right for draw in draws) / len(draws))


def row(row_id: int) -> SampledRow:
    """Two samples: one of a token with reward 0, one of two tokens with reward `row_id % 2`."""
    rollout = {
        "prompt_ids": np.array([1, 2]),
        "response_ids": np.array([3, 4, 5]),
        "response_offsets": np.array([0, 1, 3]),
        "behaviour_logprobs": np.array([-1.0, -2.0, -3.0], dtype=np.float32),
        "finish_reasons": np.array([0, 1]),
    }
    reward = {"rewards": np.array([0.0, row_id % 2], dtype=np.float32)}
    steps = {"rewards": np.array([1.0, 0.0], dtype=np.float32), "token_scores": np.array([0.1, 0.2, 0.3])}
    columns = {"rollout": rollout, "reward": reward, "steps": steps}
    return SampledRow(
        row_id, Prompt(f"p{row_id}", "text", {"answer": 4}), columns, {}, 0, {"rollout": "maker/rollout/0"}
    )


class Rows:
    """A buffer with all its rows complete; those of `told` are done with."""

    def __init__(self, count: int, stop_after: int | None = None) -> None:
        self.left = {number: row(number) for number in range(count)}
        self.told: list[int] = []
        self.tellings = 0
        self.stop_after = stop_after

    async def published(self, version: int, step: int) -> None:
        assert (version, step) == (0, 0)

    async def sample(self, groups: int, timeout: float) -> list[SampledRow]:
        if len(self.left) < groups:
            raise EndOfData("too few")
        return list(self.left.values())[:groups]

    async def fetch(self, reference: Any) -> Any:
        return reference

    async def status(self) -> dict[str, Any]:
        return {"ledger": {"rows": {"in_flight": len(self.left)}}}

    async def dropped(self, row_ids: Sequence[int], reason: str) -> None:
        if self.tellings == self.stop_after:
            raise ConnectionError("killed")
        self.tellings += 1
        self.told += row_ids
        for row_id in row_ids:
            del self.left[row_id]


def collector(folder: Path, rows: Any, **settings: Any) -> Collector:
    config = CollectConfig(rows_per_part=2, **settings)
    return Collector(
        config,
        stages=("rollout", "reward", "steps"),
        rows=rows,
        parts=Parts(folder, config.jsonl),
        decode=str,
        recorder=Recorder(folder.parent),
        deadlines=Deadlines(batch=5, step=5, call=5),
        report=folder / "report.json",
    )


def collected(folder: Path) -> list[dict[str, Any]]:
    return [record for file in sorted(folder.glob("*.parquet")) for record in parquet.read_table(file).to_pylist()]


def test_every_row_is_in_one_part_and_the_last_part_has_what_is_left(tmp_path: Path) -> None:
    rows, folder = Rows(5), tmp_path / "collected"
    assert asyncio.run(collector(folder, rows).run()) == "done"
    assert [file.name for file in sorted(folder.glob("*.parquet"))] == [f"part-00000{n}.parquet" for n in (1, 2, 3)]
    assert [(record["row_id"], record["sample"]) for record in collected(folder)] == [
        (row_id, sample) for row_id in range(5) for sample in range(2)
    ]
    assert rows.told == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("part", [0, 1, 2])
def test_a_kill_between_the_file_and_the_telling_costs_no_row_and_doubles_none(tmp_path: Path, part: int) -> None:
    rows, folder = Rows(5, stop_after=part), tmp_path / "collected"
    with pytest.raises(ConnectionError):
        asyncio.run(collector(folder, rows).run())
    rows.stop_after = None
    again = collector(folder, rows)
    assert asyncio.run(again.run()) == "done"
    assert [record["row_id"] for record in collected(folder)] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert again.status()["collected"]["rows"] == 5


def test_a_part_of_which_nothing_was_kept_has_columns_and_accounts_for_its_rows(tmp_path: Path) -> None:
    folder = tmp_path / "collected"
    one = collector(folder, Rows(2), select=Rejection(type="rejection", threshold=2.0))
    asyncio.run(one.run())
    (file,) = folder.glob("*.parquet")
    assert parquet.read_table(file).num_rows == 0
    assert "response_ids" in parquet.read_schema(file).names
    assert [count.row_id for count in Parts(folder, False).counts()] == [0, 1]


def test_json_lines_say_the_same_as_parquet(tmp_path: Path) -> None:
    folder = tmp_path / "collected"
    asyncio.run(collector(folder, Rows(3), jsonl=True).run())
    lines = [json.loads(line) for file in sorted(folder.glob("*.jsonl")) for line in file.read_text().splitlines()]
    assert lines == collected(folder)


def test_the_report_has_pass_at_k_and_the_mean_score_also_after_a_restart(tmp_path: Path) -> None:
    folder = tmp_path / "collected"
    rows = Rows(4, stop_after=1)
    report = PassConfig(pass_at=(1, 2))
    with pytest.raises(ConnectionError):
        asyncio.run(collector(folder, rows, report=report).run())
    rows.stop_after = None
    asyncio.run(collector(folder, rows, report=report).run())
    found = json.loads((folder / "report.json").read_text())
    assert (found["pass@1"], found["pass@2"], found["score"]) == (0.25, 0.5, 0.25)
    assert (found["rows"], found["samples"], found["tokens"]) == (4, 8, 12)


def test_scores_of_several_stages_are_added_and_all_of_them_are_in_the_record(tmp_path: Path) -> None:
    folder = tmp_path / "collected"
    asyncio.run(collector(folder, Rows(2), scores={"reward": 1.0, "steps": 0.5}).run())
    first, second = [record for record in collected(folder) if record["row_id"] == 1]
    assert (first["score"], second["score"]) == (0.5, 1.0)
    assert (second["reward_rewards"], second["steps_rewards"]) == (1.0, 0.0)
    assert (first["steps_token_scores"], second["steps_token_scores"]) == ([0.1], [0.2, 0.3])


def test_a_stop_is_heeded_while_rows_are_waited_for(tmp_path: Path) -> None:
    class Never(Rows):
        async def sample(self, groups: int, timeout: float) -> list[SampledRow]:
            await asyncio.Event().wait()
            raise AssertionError

    async def stopped() -> str:
        one = collector(tmp_path / "collected", Never(1))
        running = asyncio.ensure_future(one.run())
        await asyncio.sleep(0.01)
        await asyncio.wait_for(one.stop(), 1)
        return await running

    assert asyncio.run(stopped()) == "stopped"
