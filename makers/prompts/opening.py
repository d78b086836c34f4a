"""Config -> source. The one place that knows all kinds of prompts."""

from __future__ import annotations

from buffer.records import Prompt
from makers.config import CustomPrompts, FilePrompts, PromptsConfig, ReasoningGymPrompts
from makers.dotted import check_dotted
from makers.prompts.files import check_files, open_files
from makers.prompts.rows import PromptsError, PromptsSummary, Rows
from makers.prompts.source import IndexedPrompts, StreamedPrompts


def open_prompts(config: PromptsConfig) -> IndexedPrompts | StreamedPrompts:
    """The source that `config` describes, at cursor 0. Raises PromptsError (a ValueError)."""
    match config:
        case ReasoningGymPrompts():
            from makers.prompts.gym import GymRows

            rows: Rows = GymRows(config)
        case FilePrompts():
            rows = open_files(config)
        case CustomPrompts():
            from makers.prompts.custom import open_custom

            return open_custom(config)
    return IndexedPrompts(rows, seed=config.seed, shuffle=config.shuffle, epochs=config.epochs)


def check_prompts(config: PromptsConfig) -> PromptsSummary:
    """What a plan can know cheaply: that the data exists and has the form needed, its rows and columns.

    Files: schemas, or the first lines; reasoning-gym: one entry is made; your own: imported in a process of its own.
    Raises PromptsError.
    """
    match config:
        case ReasoningGymPrompts():
            from makers.prompts.gym import GymRows

            first = GymRows(config).prompt(0)
            return PromptsSummary(rows=config.size, columns=tuple(first.fields))
        case FilePrompts():
            return check_files(config)
        case CustomPrompts():
            try:
                check_dotted(config.type)
            except ValueError as error:
                raise PromptsError(str(error)) from error
            return PromptsSummary(rows=None, columns=None)


def take(config: PromptsConfig, n: int) -> list[Prompt]:
    """The first n prompts of the source's first pass. Raises PromptsError when it has fewer."""
    source = open_prompts(config.model_copy(update={"epochs": 1}))
    prompts: list[Prompt] = []
    while len(prompts) < n:
        prompt = source.next()
        if prompt is None:
            raise PromptsError(f"{n} prompts are wanted, the data has {len(prompts)}: ask for fewer, or add data")
        prompts.append(prompt)
    return prompts
