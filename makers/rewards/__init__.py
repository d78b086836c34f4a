"""Reward functions: the built-in ones, the user's own, and the processes that call them.

A function of the user is called once for each row:

    def my_reward(completions: list[str], prompt, answer, **fields) -> list[float]

`completions` are the n texts of the row; `prompt` is the prompt's text or messages; every other column of the data
comes under its own name. A function gets only the arguments that it accepts, unless it takes **fields. It may be
`async`. A class is built once in each process, with the config's `options`, and its instances are called; a function
gets the options as keyword arguments of each call. `completion_tokens` is the number of tokens of each completion.
Columns of these names, and of the name `prompts`, are hidden.

Functions written for TRL (`prompts`, and every column as a list with one entry a completion) run unchanged with
`convention: trl`; of TRL's own arguments, `completion_ids`, `trainer_state` and the log functions are not provided,
and `None` ("does not apply") is not a reward.
"""
