"""The closing ledger: where every row, and every token of a row, is.

Invariant, for rows and for tokens, at every moment: admitted = trained + dropped (by reason) + in flight.
The four sides are counted apart, so that `check` finds a row that was lost or counted twice. A row is admitted once, when
it enters the table; its tokens are admitted when a stage that made them is committed. Where columns are lost (`lost`) or made
again for their age (`stale`), tokens are dropped and the row is not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(slots=True)
class Account:
    """One quantity: what came in, and where it is now."""

    admitted: int = 0
    trained: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    in_flight: int = 0

    def admit(self, amount: int) -> None:
        self.admitted += amount
        self.in_flight += amount

    def train(self, amount: int) -> None:
        self.in_flight -= amount
        self.trained += amount

    def drop(self, amount: int, reason: str) -> None:
        if not amount:
            return
        self.in_flight -= amount
        self.dropped[reason] = self.dropped.get(reason, 0) + amount

    @property
    def closes(self) -> bool:
        return self.admitted == self.trained + sum(self.dropped.values()) + self.in_flight and self.in_flight >= 0


@dataclass(slots=True)
class Ledger:
    rows: Account = field(default_factory=Account)
    tokens: Account = field(default_factory=Account)

    def train(self, tokens: int) -> None:
        """One row with so many tokens was trained."""
        self.rows.train(1)
        self.tokens.train(tokens)

    def rewind(self, rows: int, tokens: int) -> None:
        """So many rows that were trained count as dropped: the trainer went back to a step before."""
        for account, amount in ((self.rows, rows), (self.tokens, tokens)):
            account.in_flight += amount
            account.trained -= amount
            account.drop(amount, "rewound")

    def drop(self, tokens: int, reason: str) -> None:
        """One row with so many tokens was dropped."""
        self.rows.drop(1, reason)
        self.tokens.drop(tokens, reason)

    def check(self, rows: int, tokens: int) -> None:
        """Raises RuntimeError unless the ledger closes over `rows` rows and `tokens` tokens in flight."""
        counted = (self.rows.in_flight, self.tokens.in_flight)
        if not (self.rows.closes and self.tokens.closes and counted == (rows, tokens)):
            raise RuntimeError(
                f"the ledger does not close: {self.as_dict()}; the table holds {rows} rows, {tokens} tokens"
            )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Ledger:
        return cls(rows=Account(**state["rows"]), tokens=Account(**state["tokens"]))
