"""The report's commands work as they stand there.

python -m pytest tests/pipelines/nodes/test_report.py
"""

from __future__ import annotations

from pathlib import Path

import pytest
from toy.context import context

from pipelines.dag.node import NodeOutput
from pipelines.loading import PRESETS, load
from pipelines.nodes.report import _rerun_section
from pipelines.pipeline import nodes


@pytest.mark.parametrize("name", ["debug", "my_photos"])
def test_commands_name_a_preset_or_the_run_folders_own_config(tmp_path: Path, name: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(f"name: {name}\n" + (PRESETS / "debug.yaml").read_text())
    report = nodes(load(str(file)), listed=False)[-1]
    inputs = {node: NodeOutput(str(tmp_path), {}, "a") for node in report.needs}
    made = context("report", report.config, tmp_path / "my_photos/nodes/report/0/a", inputs)
    section = _rerun_section(made, report.config.stages)
    shown = name if name == "debug" else f"{tmp_path}/my_photos/config.yaml"
    assert section.count(f"full_multidim.py --config {shown}") == 3
    assert ("key=value settings of this launch" in section) == (name == "debug"), "the file has them"
