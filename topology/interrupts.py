"""What Ctrl-C and SIGTERM do to a command.

The first one unwinds it as KeyboardInterrupt; later ones change nothing, so that nobody who cleans up, or hands the
stopping over, is interrupted in it by an impatient second signal.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def interrupt_once() -> None:
    """Install; a signal that was ignored when the process began (of a background job, say) stays ignored."""
    for number in _heeded():
        signal.signal(number, _first)


def interrupt_as_usual() -> None:
    """Ctrl-C interrupts each time, SIGTERM ends the process: for a terminal at which somebody can be asked."""
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    for number in _heeded():
        signal.signal(number, usual[number])


def interrupt_no_more() -> None:
    """Everything is done: a late signal, while the interpreter ends, must not change the exit code."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def kept_sigterm() -> Iterator[None]:
    """Around a library's call that takes SIGTERM for itself: afterwards the handler is what it was."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def _heeded() -> list[signal.Signals]:
    return [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]


def _first(number: int, frame: FrameType | None) -> None:
    for each in _heeded():
        signal.signal(each, _later)
    raise KeyboardInterrupt


def _later(number: int, frame: FrameType | None) -> None:
    """Not SIG_IGN, which the processes that we start would inherit."""
