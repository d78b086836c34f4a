"""Pairs for DPO that reasoning-gym generates: a question, its answer as `chosen`, another question's as `rejected`.

A source of one's own (`type: makers.prompts.pairs:GymPairs`), and an example of one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from makers.config import ReasoningGymPrompts
from makers.prompts.gym import GymRows
from makers.prompts.rows import PromptsError


class GymPairs:
    """`dataset`, `seed` and `config` as for `type: reasoning_gym`; the same arguments give the same pairs."""

    def __init__(self, dataset: str, size: int, seed: int = 0, config: Mapping[str, Any] | None = None) -> None:
        settings = ReasoningGymPrompts(
            type="reasoning_gym", dataset=dataset, size=size, seed=seed, config=dict(config or {})
        )
        self._rows = GymRows(settings)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        prompt = self._rows.prompt(index)
        right = str(prompt.fields["answer"])
        return {"prompt": prompt.content, "chosen": right, "rejected": self._wrong(index, right)}

    def _wrong(self, index: int, right: str) -> str:
        """The answer of the next entry that has another."""
        for step in range(1, len(self)):
            answer = str(self._rows.prompt((index + step) % len(self)).fields["answer"])
            if answer != right:
                return answer
        raise PromptsError(f"all {len(self)} entries have the answer {right!r}, so no pair has a wrong one")
