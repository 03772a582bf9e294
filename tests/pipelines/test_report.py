"""The report's commands work as they stand there.

python -m pytest tests/pipelines/test_report.py
"""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelines.config import PRESETS, load
from pipelines.node import NodeContext
from pipelines.nodes.report import _rerun_section
from pipelines.pipeline import nodes
from pipelines.progress import Reporter
from pipelines.tracking import RunHandle


@pytest.mark.parametrize(("name", "shown"), [("debug", "debug"), ("my_photos", "FILE.yaml")])
def test_commands_name_a_preset_or_leave_room_for_the_users_file(tmp_path: Path, name: str, shown: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text((PRESETS / "debug.yaml").read_text().replace("name: debug", f"name: {name}"))
    report = nodes(load(str(file)))[-1]
    context = NodeContext(
        "report", "f", "a", report.config, {}, {}, str(tmp_path), RunHandle(), Reporter("report"), True
    )
    section = _rerun_section(context, report.config["stages"])
    assert section.count(f"full_multidim.py --config {shown}") == 3
    assert "key=value settings of this start" in section
