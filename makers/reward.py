"""The reward maker: weighs the scores of functions, each called in a killable process, and of reward models.

Guarantees: `rewards[i]` is the weighted sum over functions and models, each on its own scale, for sample i, finite; whatever a
function does (raises, returns NaN or the wrong number, prints, ends its process, never returns), the row fails as data
with the function, the row and the reason named, and the next row is scored. Imports neither torch nor vllm.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from buffer.records import DataFailure, InfraFailure, Lease, Produced
from makers.config import RewardMaker as RewardMakerConfig
from makers.config import RewardModelTerm, reward_model_stage
from makers.maker import Columns
from makers.rewards.calling import LENGTHS
from makers.rewards.pool import WorkerPool
from makers.rewards.scale import make_scale

Decode = Callable[[Sequence[int]], str]
Scores = Sequence[float] | np.ndarray  # one a sample


class RewardMaker:
    """Fills the stage `reward`: `rewards` float32 [samples] and, unweighted, `reward/NAME` float32 [samples] each.

    With a model that rewards each token also `token_rewards` float32 [response tokens], weighted; `rewards` has their sum.
    """

    stage = "reward"

    def __init__(self, config: RewardMakerConfig, *, name: str, model_path: str) -> None:
        self.slots = config.slots
        self._name = name
        self._model_path = model_path
        self.needs = ("rollout", *sorted(reward_model_stage(term.group) for term in config.models))
        self._models = config.models
        terms = [*config.functions, *config.models]
        self._weights = np.array([term.weight for term in terms])
        self._scales = [make_scale(term.normalise) for term in terms]
        workers = config.workers if config.functions else 0
        self._pool = WorkerPool(config.functions, workers=workers, start_timeout=config.start_timeout)
        self._labels = [*self._pool.labels, *(term.group for term in config.models)]
        self._decode: Decode
        self._running = 0
        self._rows = 0
        self._samples = 0
        self._seconds = 0.0

    async def start(self) -> None:
        """Load the tokenizer and start the processes, both for functions alone. Raises InfraFailure."""
        if not self._pool.labels:
            return
        try:
            self._decode = load_decoder(self._model_path)
        except Exception as error:
            raise InfraFailure(f"{self._name}: no tokenizer in {self._model_path}: {error}") from error
        await self._pool.start()

    async def make(self, lease: Lease, inputs: Mapping[str, Columns]) -> tuple[Produced, Columns]:
        """Raises DataFailure (this row cannot be scored), InfraFailure (no process could be started)."""
        self._running += 1
        try:
            return await self._score(lease, inputs)
        finally:
            self._running -= 1

    def status(self) -> dict[str, float | int | str | None]:
        """`seconds_scoring` is the time inside the functions."""
        return {
            **self._pool.status(),
            "running": self._running,
            "rows_scored": self._rows,
            "samples_scored": self._samples,
            "seconds_scoring": self._seconds,
        }

    async def close(self) -> None:
        await self._pool.close()

    async def _score(self, lease: Lease, inputs: Mapping[str, Columns]) -> tuple[Produced, Columns]:
        where = f"row {lease.row_id} (prompt {lease.prompt.id})"
        offsets = inputs["rollout"]["response_offsets"]
        values, seconds = await self._ask_functions(lease, inputs["rollout"], where)
        values += [reduced(inputs[reward_model_stage(term.group)], term, offsets) for term in self._models]
        columns = {**self._columns(values, where), **self._token_rewards(inputs)}
        samples = len(offsets) - 1
        self._rows += 1
        self._samples += samples
        self._seconds += seconds
        produced = Produced(
            samples=samples,
            tokens=0,
            nbytes=sum(column.nbytes for column in columns.values()),
            seconds=seconds,
            stats=_stats(columns),
        )
        return produced, columns

    async def _ask_functions(self, lease: Lease, rollout: Columns, where: str) -> tuple[list[Scores], float]:
        """Scores [samples] of each function, and the seconds that it took."""
        if not self._pool.labels:
            return [], 0.0
        start = time.perf_counter()
        completions = split_and_decode(self._decode, rollout["response_ids"], rollout["response_offsets"])
        decoding = time.perf_counter() - start
        fields = {**lease.prompt.fields, LENGTHS: np.diff(rollout["response_offsets"]).tolist()}
        scores = await self._pool.score(where, completions, lease.prompt.content, fields)
        return list(scores.values), decoding + sum(scores.seconds)

    def _columns(self, scores: Sequence[Scores], where: str) -> Columns:
        values = np.array(scores, dtype=np.float64)  # [functions and models, samples]
        with np.errstate(over="ignore"):  # an overflow is reported below, with its row
            weighed = [scale(row) for scale, row in zip(self._scales, values, strict=True)]
            rewards = (self._weights @ np.array(weighed)).astype(np.float32)
        if not np.isfinite(rewards).all():
            raise DataFailure(f"{where}: the weighted sum of its rewards is not finite: {rewards.tolist()}")
        columns = {"rewards": rewards}
        for label, row in zip(self._labels, values, strict=True):
            columns[f"reward/{label}"] = row.astype(np.float32)
        return columns

    def _token_rewards(self, inputs: Mapping[str, Columns]) -> Columns:
        parts = [
            term.weight * inputs[reward_model_stage(term.group)]["token_scores"].astype(np.float64)
            for term in self._models
            if term.per_token
        ]
        return {"token_rewards": np.sum(parts, axis=0).astype(np.float32)} if parts else {}


def reduced(columns: Columns, term: RewardModelTerm, offsets: np.ndarray) -> np.ndarray:
    """What a reward model says of each sample, float64 [samples]; of a model of tokens, by the term's `reduce`."""
    if "scores" in columns:
        return columns["scores"].astype(np.float64)
    tokens, starts = columns["token_scores"].astype(np.float64), offsets[:-1]
    match term.reduce:
        case "last":
            return tokens[offsets[1:] - 1]
        case "min":
            return np.minimum.reduceat(tokens, starts)
        case "mean":
            return np.add.reduceat(tokens, starts) / np.diff(offsets)
        case _:
            return np.add.reduceat(tokens, starts)


def split_and_decode(decode: Decode, ids: np.ndarray, offsets: np.ndarray) -> list[str]:
    """ids int32 [tokens], offsets int64 [samples + 1] -> the text of each sample."""
    flat, bounds = ids.tolist(), offsets.tolist()
    return [decode(flat[begin:end]) for begin, end in itertools.pairwise(bounds)]


def load_decoder(model_path: str) -> Decode:
    """Token ids -> text without special tokens. tokenizer.json is read directly; other formats through transformers."""
    file = Path(model_path) / "tokenizer.json"
    if file.is_file():
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(file))
        return lambda ids: tokenizer.decode(ids, skip_special_tokens=True)
    from transformers import AutoTokenizer

    slow = AutoTokenizer.from_pretrained(model_path, trust_remote_code=False)
    return lambda ids: str(slow.decode(list(ids), skip_special_tokens=True))


def _stats(columns: Columns) -> dict[str, float]:
    rewards = columns["rewards"].astype(np.float64)
    means = {
        name: float(values.mean(dtype=np.float64)) for name, values in columns.items() if name.startswith("reward/")
    }
    return {
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std()),  # population
        "reward_max": float(rewards.max()),
        **means,
    }
