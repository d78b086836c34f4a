from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from topology.interrupts import SIGNALS, interrupt_as_usual, interrupt_once, kept_sigterm


@pytest.fixture(autouse=True)
def handlers_are_put_back() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_unwinds_the_command_and_the_later_ones_change_nothing(number: signal.Signals) -> None:
    interrupt_once()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(number)
    for later in (*SIGNALS, *SIGNALS):
        signal.raise_signal(later)
    assert signal.getsignal(number) is not signal.SIG_IGN  # which what we start would inherit


def test_a_signal_that_a_background_job_ignores_stays_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    interrupt_once()
    signal.raise_signal(signal.SIGINT)
    interrupt_as_usual()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_at_a_terminal_each_ctrl_c_interrupts_and_sigterm_ends_the_process() -> None:
    interrupt_once()
    interrupt_as_usual()
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_library_that_takes_sigterm_has_it_only_while_it_is_called() -> None:
    interrupt_once()
    with kept_sigterm():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)
