"""The channel between a reward maker and its worker processes: length-prefixed messages on one socket pair.

Requests are pickled (they hold the columns of the user's data); answers are JSON, so nothing that a worker sends is
executed. The socket's end of file is how each side learns of the other's death.
"""

from __future__ import annotations

import json
import os
import pickle
import socket
import struct
import subprocess
import sys
from typing import Any

from makers.dotted import child_environment

HEADER = struct.Struct("!Q")  # bytes that follow


def frame(payload: bytes) -> bytes:
    return HEADER.pack(len(payload)) + payload


def encode_request(message: Any) -> bytes:
    return frame(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))


def encode_answer(message: dict[str, Any]) -> bytes:
    return frame(json.dumps(message).encode())


def decode_answer(payload: bytes) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(payload)
    return answer


def receive(channel: socket.socket) -> bytes | None:
    """One payload; None at the end of file. Blocks, within the socket's own timeout."""
    header = _receive_exactly(channel, HEADER.size)
    return None if header is None else _receive_exactly(channel, HEADER.unpack(header)[0])


def _receive_exactly(channel: socket.socket, count: int) -> bytes | None:
    data = bytearray()
    while len(data) < count:
        chunk = channel.recv(min(count - len(data), 1 << 20))
        if not chunk:
            return None
        data += chunk
    return bytes(data)


def start_worker() -> tuple[subprocess.Popen[bytes], socket.socket]:
    """A fresh interpreter in a session of its own, and our end of its channel.

    The calling thread must live as long as the worker should: on Linux the worker dies with it.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-P", "-m", "makers.rewards.worker", str(theirs.fileno()), str(os.getpid())]
        process = subprocess.Popen(
            command,
            env=child_environment(),
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=2,  # what a function prints goes to the log, together with its errors
            start_new_session=True,  # no Ctrl-C of a terminal; one signal reaches the children it starts, too
        )
    return process, ours
