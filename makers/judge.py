"""The generative judge: a frozen model that writes a verdict on each sample, from which a score is read.

Guarantees: one verdict and one finite score a sample, in their order; a completion is plain text to the judge, so special
tokens written in it end no turn; an answer without a score fails the row, or gets the score that is set for it, and is counted.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np

from buffer.columns import Columns
from buffer.records import DataFailure, InfraFailure, Lease
from makers.config import JudgeMaker as JudgeConfig
from makers.engines.engine import GroupRequest
from makers.engines.vllm import InProcessVllm
from makers.frozen import FrozenMaker
from makers.judging.template import as_text, fill
from makers.judging.verdict import Verdicts
from makers.prompt_ids import TextEncoder
from makers.reward import load_decoder, split_and_decode

SHOWN = 200  # characters of an answer in a message


class JudgeMaker(FrozenMaker):
    """Fills the stage `reward/GROUP`: `scores` float32 [samples]. `policy_path`: the folder whose tokenizer made the rows."""

    def __init__(
        self, config: JudgeConfig, *, name: str, stage: str, model_path: str, policy_path: str, sleeps: bool
    ) -> None:
        super().__init__(name=name, model_path=model_path, slots=config.slots)
        self.stage = stage
        self._config = config
        self._policy_path = policy_path
        self._engine = InProcessVllm(
            config.engine, model_path, threads=config.resources.threads(config.engine.threads), seed=0, recompute=False,
            version=0, sleeps=sleeps,
        )  # fmt: skip
        self._unparsed = 0

    async def start(self) -> None:
        """Load the model, both tokenizers and the parser. Raises InfraFailure."""
        await self._engine.start()
        await asyncio.to_thread(self._prepare)

    def _prepare(self) -> None:
        try:
            self._template = self._config.template_text()
            self._verdicts = Verdicts(self._config.parser)
            self._encoder = TextEncoder(self._model_path, self._config.system)
            self._read_verdict = load_decoder(self._model_path)
            self._read_row = load_decoder(self._policy_path)
        except Exception as error:
            raise InfraFailure(f"{self._name}: the judge cannot be asked: {error}") from error

    async def score(self, lease: Lease, rollout: Columns) -> tuple[Columns, float]:
        began = time.perf_counter()
        texts = split_and_decode(self._read_row, rollout["response_ids"], rollout["response_offsets"])
        questions = [self._question(lease, text, sample) for sample, text in enumerate(texts)]
        # All samples are asked before one is read: a row that fails leaves nothing in the engine.
        answers = await asyncio.gather(*(self._ask(lease, ids, i) for i, ids in enumerate(questions)))
        scores = np.array([self._score(answer, sample) for sample, answer in enumerate(answers)], np.float32)
        return {"scores": scores}, time.perf_counter() - began

    def status(self) -> dict[str, float | int | str | None]:
        """`verdicts_unparsed`: answers that held no score."""
        engine = self._engine.status()
        return {
            "state": engine["state"],
            "running": engine["running"],
            "rows_scored": self._rows,
            "tokens_scored": self._tokens,
            "verdicts_unparsed": self._unparsed,
            "seconds_forward": engine["seconds_generating"],
        }

    async def leave_device(self) -> None:
        await self._engine.sleep(1)

    async def take_device(self) -> None:
        await self._engine.wake()

    async def close(self) -> None:
        await self._engine.close()
        self._awake.set()

    def _question(self, lease: Lease, completion: str, sample: int) -> list[int]:
        values: dict[str, Any] = {
            **lease.prompt.fields, "prompt": as_text(lease.prompt.content), "completion": completion,
        }  # fmt: skip
        try:
            ids = self._encoder.encode(fill(self._template, values))
        except KeyError as error:
            raise DataFailure(f"the template names {{{error.args[0]}}}, which the row does not have") from error
        room = self._engine.max_model_len - self._config.max_tokens
        if len(ids) > room:
            raise DataFailure(
                f"sample {sample}: the judge's prompt has {len(ids)} tokens, but there is room for {room} (engine.max_model_len "
                f"{self._engine.max_model_len}, less max_tokens {self._config.max_tokens} of the verdict)"
            )
        return ids

    async def _ask(self, lease: Lease, ids: list[int], sample: int) -> str:
        seed = (lease.seed + sample) % 2**63
        request = GroupRequest(
            ids, seeds=[seed], temperature=self._config.temperature, max_tokens=self._config.max_tokens
        )
        try:
            [verdict] = await self._engine.generate(request)
        except ValueError as error:
            raise DataFailure(f"sample {sample}: refused by the engine: {error}") from error
        return self._read_verdict(verdict.token_ids.tolist())

    def _score(self, answer: str, sample: int) -> float:
        try:
            score = self._verdicts.score(answer)
        except Exception as error:  # whatever a parser of one's own raises
            raise DataFailure(f"sample {sample}: the parser failed on {answer[:SHOWN]!r}: {error!r}") from error
        if score is not None:
            return score
        self._unparsed += 1
        if self._config.unparsed == "fail":
            raise DataFailure(
                f"sample {sample}: no score ({self._config.parser.type}) in the judge's answer {answer[:SHOWN]!r}: make the "
                "template ask for one plainly, raise max_tokens, or set `unparsed` to a score"
            )
        return float(self._config.unparsed)
