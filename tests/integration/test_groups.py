"""The example of docs/groups.md as a user runs it, and groups on a real cluster of one machine."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(180)
REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = (REPOSITORY / "docs" / "groups.md").read_text()

ON_A_CLUSTER = """
import json
import os
import signal
import time

import ray

from topology.groups import DeviceGroup, RankError, Resources, function, groups, worker


@worker(group="pairs")
class Pair:
    @function(dispatch=lambda n, i, data: (i, n, *data))
    def __init__(self, index, workers, name="p"):
        self.name = f"{name}{index}/{workers}"

    @function()
    def who(self):
        return self.name, os.getpid()

    @function()
    def fail(self):
        if self.name.startswith("p1"):
            raise ValueError("bad text")

    @function(execute="first")
    def die(self):
        os.kill(os.getpid(), signal.SIGKILL)


def error_of(call):
    try:
        call()
    except (RankError, ValueError) as error:
        return f"{type(error).__name__}: {error} <- {type(error.__cause__).__name__}"


ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
with groups(DeviceGroup("pairs", workers=2, resources=Resources(cpus=0.5)), DeviceGroup("wide", workers=3)):
    pair = Pair()
    (first, pid), (second, other) = pair.who()
    seen = [first, second, len({pid, other, os.getpid()})]
    seen += [error_of(pair.fail), error_of(pair.die), error_of(worker(group="wide")(type("Wide", (), {})))]
while ray.available_resources().get("CPU") != 2:  # the test has a deadline
    time.sleep(0.05)
print(json.dumps(seen))
"""


def run(folder: Path, script: str, *arguments: str) -> list[str]:
    file = folder / "script.py"
    file.write_text(script)
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "RAY_USAGE_STATS_ENABLED": "0"}
    command = [sys.executable, str(file), *arguments]
    done = subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()


@pytest.mark.parametrize("arguments", [(), ("--ray",)], ids=["here", "on a cluster"])
def test_the_example_of_the_page_prints_what_the_page_says(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    example, printed = re.findall(r"^```(?:python)?\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)[:2]
    assert run(tmp_path, example, *arguments)[-2:] == printed.splitlines()


def test_a_cluster_has_an_actor_for_each_worker_with_errors_that_name_it_and_none_is_left(tmp_path: Path) -> None:
    assert json.loads(run(tmp_path, ON_A_CLUSTER)[-1]) == [
        "p0/2",
        "p1/2",
        3,
        "RankError: rank pairs/1 failed (ValueError: bad text) in fail() <- ValueError",
        "RankError: rank pairs/0 failed (ActorLost: its process died without a word (killed, or out of memory)) "
        "in die() <- ActorLost",
        "ValueError: group wide asks the cluster for 3 x 1 CPU, it has 2: lower its workers or resources, or add a node "
        "<- NoneType",
    ]
