"""A reward that a server gives: one POST a row, retried with backoff where trying again can help.

The request is `{"completions": [...], "prompt": ..., "fields": {...}}`, the answer `{"rewards": [...]}`, one finite number a
completion. One request a process is under way at a time, so `workers` of the maker bounds the concurrency.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

TOO_MANY, SERVER_ERRORS = 429, 500
SHOWN = 200  # characters of an answer in an error


@dataclass(frozen=True, kw_only=True)
class Http:
    """`seconds` bound each wait for the server, `attempts` counts the first try too, `backoff` seconds double after each.

    All of it has to fit the function's `timeout`. A refused connection, no answer in time, and the statuses 429 and 5xx are
    tried again; any other status, or an answer that holds no rewards, fails at once.
    """

    url: str
    seconds: float = 2.5
    attempts: int = 3
    backoff: float = 0.2
    headers: dict[str, str] | None = None
    columns = ()

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"option url: {self.url!r} does not begin with http:// or https://")
        if self.seconds <= 0 or self.attempts < 1 or self.backoff < 0:
            raise ValueError(
                f"options seconds {self.seconds}, attempts {self.attempts}, backoff {self.backoff}: more than 0, at least 1 "
                "and at least 0 are needed"
            )
        import tenacity  # noqa: F401  an installation that lacks it is refused when the function is built

    def __call__(self, completions: list[str], prompt: Any, **fields: Any) -> Any:
        from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_exponential

        body = json.dumps({"completions": completions, "prompt": prompt, "fields": fields}).encode()
        retrying = Retrying(
            retry=retry_if_exception(may_pass),
            stop=stop_after_attempt(self.attempts),
            wait=wait_exponential(self.backoff),
            reraise=True,
        )
        try:
            answer = retrying(self._post, body)
        except OSError as error:  # URLError, HTTPError and time-outs among them
            raise ValueError(f"{self.url} gave no rewards ({self.attempts} attempts at most): {error}") from error
        return self._rewards(answer)

    def _post(self, body: bytes) -> bytes:
        headers = {"Content-Type": "application/json", **(self.headers or {})}
        request = urllib.request.Request(self.url, body, headers)
        with urllib.request.urlopen(request, timeout=self.seconds) as answer:
            content: bytes = answer.read()
        return content

    def _rewards(self, answer: bytes) -> Any:
        try:
            return json.loads(answer)["rewards"]
        except (ValueError, KeyError, TypeError):
            shown = answer[:SHOWN].decode(errors="replace")
            raise ValueError(f'{self.url} answered {shown!r}: {{"rewards": [...]}} is needed') from None


def may_pass(error: BaseException) -> bool:
    """Whether trying again can help."""
    if isinstance(error, urllib.error.HTTPError):
        return error.code == TOO_MANY or error.code >= SERVER_ERRORS
    return isinstance(error, OSError)
