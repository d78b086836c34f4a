"""What may be imported where, and how light the steering side is."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = ("torch", "vllm", "megatron", "transformers", "ray")
PROBE = """
import importlib, json, sys
for name in sys.argv[2:]:
    importlib.import_module(name)
print(json.dumps([heavy for heavy in json.loads(sys.argv[1]) if heavy in sys.modules]))
"""


@pytest.mark.parametrize(
    ("modules", "allowed"),
    [
        (("topology", "topology.config", "topology.cli", "topology.plan", "topology.live", "topology.report"), ()),
        (("buffer.buffer", "buffer.table", "buffer.dispatcher", "buffer.columns"), ()),
        (("weights.manifest", "weights.store", "weights.client"), ()),
        (("makers.config", "makers.prompts", "makers.rewards"), ()),
        (("trainers.config", "trainers.trainer", "trainers.metrics", "trainers.checkpoints", "trainers.batch"), ()),
        (("topology.launch", "topology.groups"), ()),
        (("topology.supervisor", "topology.actors", "topology.handles"), ("ray",)),
    ],
)
def test_light_modules_import_nothing_heavy(modules: tuple[str, ...], allowed: tuple[str, ...]) -> None:
    command = [sys.executable, "-c", PROBE, json.dumps(HEAVY), *modules]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout)
    assert set(found) <= set(allowed)
