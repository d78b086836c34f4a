"""Where prompts come from: reasoning-gym, files, or a class of the user.

Guarantees:
1. The same config gives the same prompts in the same order, everywhere; shuffled, each pass has an order of its own.
2. `cursor` counts the prompts handed out; `seek(cursor)` on a fresh source goes on exactly there.
3. A prompt's id is its position in the data: the same in every pass (`source.epoch` says which pass it is).
4. What is wrong with the data is a PromptsError that names the file and the row.

Importing this package imports none of reasoning-gym, pyarrow, torch, vllm and ray.
"""

from __future__ import annotations

from makers.prompts.opening import check_prompts, open_prompts, take
from makers.prompts.rows import PromptsError, PromptsSummary

__all__ = ["PromptsError", "PromptsSummary", "check_prompts", "open_prompts", "take"]
