from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest

from topology.keeper import ADDRESS, Keeper
from topology.runs import RunFolder, read_json, wait_for_file, write_json

HEAD = """
import pathlib, sys, time
tries, address = map(pathlib.Path, sys.argv[1:])
tries.open("a").write("x")
if len(tries.read_text()) == 1:
    sys.exit(1)
time.sleep(0.2)
address.write_text("10.0.0.1:2")
time.sleep(60)
"""


@pytest.mark.timeout(60)
def test_a_head_that_gives_up_while_it_starts_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("signal.signal", lambda *_: None)  # the keeper runs in a thread here
    monkeypatch.setattr("topology.keeper.GRACE", 0.0)
    folder = RunFolder(tmp_path / "run")
    folder.create()
    keeper = Keeper(folder, 1, None, 1)
    tries = tmp_path / "tries"
    keeper.command = [sys.executable, "-c", HEAD, str(tries), str(keeper.temporary / ADDRESS)]
    thread = threading.Thread(target=keeper.run)
    thread.start()
    cluster = wait_for_file(folder.cluster_file, 30, thread.is_alive, "the cluster")
    assert cluster["address"] == "10.0.0.1:2"
    write_json(folder.status_file, {"state": "done"})
    thread.join(timeout=30)
    assert not thread.is_alive()
    assert tries.read_text() == "xx"
    assert read_json(folder.status_file) == {"state": "done"}
    assert not keeper.temporary.exists()
