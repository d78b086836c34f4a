"""The environment of the TRL baseline: made once in benchmarks/.venv-trl from requirements/bench-trl.txt."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from pathlib import Path

from benchmarks.harness import ROOT, run_side, say

PINS = ROOT / "requirements" / "bench-trl.txt"
FOLDER = ROOT / "benchmarks" / ".venv-trl"
TIMEOUT = 900.0  # seconds for each of the two installs


def trl_python() -> Path:
    """The interpreter of the environment, which is made or renewed when the pins have changed. Raises SideFailed."""
    python, stamp = FOLDER / "bin" / "python", FOLDER / ".pins"
    wanted = hashlib.sha256(PINS.read_bytes()).hexdigest()
    if stamp.is_file() and stamp.read_text() == wanted:
        return python
    say(f"making {FOLDER.relative_to(ROOT)} from {PINS.relative_to(ROOT)} (a minute or two, once)")
    shutil.rmtree(FOLDER, ignore_errors=True)
    run_side([sys.executable, "-m", "venv", FOLDER], timeout=120)
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    index = os.environ.get("TORCH_INDEX")
    torch = next(line for line in PINS.read_text().splitlines() if line.startswith("torch=="))
    run_side([*pip, torch, *(["--index-url", index] if index else [])], timeout=TIMEOUT)  # with what its build needs
    run_side([*pip, "--no-deps", "-r", PINS], timeout=TIMEOUT)
    stamp.write_text(wanted)
    return python
