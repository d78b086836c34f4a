"""What is refused before a run folder exists."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.command_line import TINY
from tests.unit.topology.test_shipped_configs import LAPTOP, MODELS
from topology.config import ConfigError, load_config
from topology.launch import launch
from topology.plan import make_plan
from topology.prepare import Prepared


def test_a_run_folder_in_the_temporary_copy_of_a_jobs_code_is_refused(tmp_path: Path) -> None:
    config, model = load_config(TINY), MODELS["tiny-llama"]
    prepared = Prepared(config, tmp_path, model, make_plan(config, model, LAPTOP), "head:6379")
    copy = tmp_path / "working_dir_files" / "_ray_pkg_1"
    with pytest.raises(ConfigError, match=r"temporary copy of this job's code.*TANDEM_RUNS=/shared/runs"):
        launch(prepared, copy / "runs")
    assert not copy.exists()
