"""Rewards of a real server on this machine, well-behaved and otherwise."""

from __future__ import annotations

import json
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from makers.rewards.builtin import build_builtin
from makers.rewards.calling import FunctionSpec, RewardError, build_call

GOOD = b'{"rewards": [0.5, 2]}'


@contextmanager
def server(*answers):
    """Gives `answers` one after another (status, body), the last one for ever; status 0: none for half a minute."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            status, body = answers[min(len(asked), len(answers)) - 1]
            if status == 0:
                stop.wait(30.0)
                return
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments):
            pass

    stop = threading.Event()
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{http.server_port}/score", asked
        finally:
            stop.set()
            http.shutdown()
            thread.join()


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def score(url: str, **options):
    call = build_call(FunctionSpec("http", "http", None, {"url": url, "backoff": 0.01, "seconds": 20.0, **options}))
    return call(["a", "b"], "p", {"answer": "x", "completion_tokens": [1, 2]}, None)


def test_the_server_gets_completions_prompt_and_columns_and_its_rewards_are_taken():
    with server((200, GOOD)) as (url, asked):
        assert score(url) == [0.5, 2.0]
    fields = {"answer": "x", "completion_tokens": [1, 2]}
    assert asked == [{"completions": ["a", "b"], "prompt": "p", "fields": fields}]


@pytest.mark.parametrize("status", [500, 503, 429])
def test_a_server_that_is_overloaded_or_fails_once_is_asked_again(status):
    with server((status, b""), (200, GOOD)) as (url, asked):
        assert score(url) == [0.5, 2.0]
    assert len(asked) == 2


def test_a_server_that_goes_on_failing_is_given_up_after_the_attempts_with_its_status():
    with server((500, b"")) as (url, asked), pytest.raises(RewardError, match=r"/score gave no rewards .* Error 500"):
        score(url, attempts=3)
    assert len(asked) == 3


def test_a_server_that_hangs_is_left_after_its_seconds():
    with server((0, b"")) as (url, asked):
        start = time.monotonic()
        with pytest.raises(RewardError, match="gave no rewards .*timed out"):
            score(url, attempts=2, seconds=0.2)
        assert time.monotonic() - start < 20  # the server would take 30
        while len(asked) < 2 and time.monotonic() - start < 20:
            time.sleep(0.01)  # on a busy machine it reads the second request late
        assert len(asked) == 2


def test_a_request_that_is_refused_is_not_repeated():
    with server((404, b"")) as (url, asked), pytest.raises(RewardError, match="HTTP Error 404"):
        score(url)
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"<html>", r"answered '<html>': \{\"rewards\": \[...\]\} is needed"),
        (b"[1, 2]", r"answered '\[1, 2\]'"),
        (b'{"rewards": [1]}', "returned 1 values for 2 completions"),
        (b'{"rewards": [1, NaN]}', "returned nan for completion 1: a finite float32"),
    ],
)
def test_an_answer_that_holds_no_rewards_fails_at_once_and_is_shown(body, message):
    with server((200, body)) as (url, asked), pytest.raises(RewardError, match=message):
        score(url)
    assert len(asked) == 1


def test_nobody_at_the_address_is_told_with_it():
    with server((200, GOOD)) as (url, _):
        pass
    with pytest.raises(RewardError, match=f"{url} gave no rewards .*refused"):
        score(url)


@pytest.mark.parametrize(
    "options", [{"url": "h:1"}, {"url": "http://h", "attempts": 0}, {"url": "http://h", "seconds": 0}]
)
def test_options_that_cannot_work_are_refused_before_the_start(options):
    with pytest.raises(ValueError, match="option"):
        build_builtin("http", options)
