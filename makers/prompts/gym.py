"""Prompts that reasoning-gym generates, each a function of (dataset, config, seed, position)."""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any

from buffer.records import Prompt
from makers.config import ReasoningGymPrompts
from makers.prompts.rows import PromptsError


class GymRows:
    """`fields` holds the whole entry (question, answer, metadata), `dataset` (its name), `dataset_config` and, with the setting,
    `teacher_prompt`.

    The config travels along because the score of some datasets depends on it.
    """

    def __init__(self, config: ReasoningGymPrompts) -> None:
        self._config = config
        self._dataset = _create(config)

    def __len__(self) -> int:
        return self._config.size

    def prompt(self, index: int) -> Prompt:
        name = self._config.dataset
        try:
            entry = self._dataset[index]
        except Exception as error:
            raise PromptsError(
                f"reasoning-gym {name!r} could not make entry {index} (seed {self._config.seed}): "
                f"{type(error).__name__}: {error}"
            ) from error
        fields = {**entry, "dataset": name, "dataset_config": self._config.config}
        if self._config.teacher_prompt is not None:
            shown = self._config.teacher_prompt.replace("{answer}", str(entry["answer"]))
            fields["teacher_prompt"] = shown.replace("{question}", entry["question"])
        return Prompt(id=f"{name}/{index}", content=entry["question"] + self._config.suffix, fields=fields)


def _create(config: ReasoningGymPrompts) -> Any:
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError as error:
        raise PromptsError(f"reasoning-gym cannot be imported ({error}): pip install reasoning-gym") from error
    name = config.dataset
    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=3, cutoff=0.4)
        hint = f"near: {', '.join(near)}" if near else f"there are {len(DATASETS)}, such as chain_sum"
        raise PromptsError(f"reasoning-gym has no dataset {name!r}; {hint}")
    apart = sorted({"seed", "size"} & config.config.keys())
    if apart:
        raise PromptsError(f"prompts.config holds {' and '.join(apart)}: set it beside `dataset`, not in `config`")
    known = [field.name for field in dataclasses.fields(DATASETS[name][1]) if field.name not in ("seed", "size")]
    unknown = sorted(config.config.keys() - set(known))
    if unknown:
        raise PromptsError(f"reasoning-gym {name!r} has no setting {', '.join(unknown)}; it has: {', '.join(known)}")
    try:
        return create_dataset(name, seed=config.seed, size=config.size, **config.config)
    except Exception as error:
        raise PromptsError(f"reasoning-gym {name!r} refuses prompts.config {config.config}: {error}") from error
