"""Names of files reach people as text, whatever they hold.  pytest tests/pipelines/commands/test_names.py"""

from __future__ import annotations

import csv
import io
import json
import types
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from data_prep.files import UserError, open_store
from data_prep.images import UnusableImage
from data_prep.parquet import QUARANTINE, QUARANTINE_SCHEMA, Manifest, Shard
from pipelines import inspection, start
from pipelines.cli import run_guarded
from pipelines.config import UserImages
from pipelines.dag.task import one_line
from pipelines.nodes import images, report
from pipelines.tracking import RunHandle

NAME = '=1+1,"\x1b[2J\n<b>[/red]\u202e.png'
ESCAPED = '=1+1,"\\x1b[2J\\n<b>[/red]\\u202e.png'


def manifest() -> Manifest:
    source = {"name": "folder", "recognised_by": f"it has {NAME}", "splits": "", "skipped": {}}
    config = {"resolutions": [4], "bits": [8]}
    return Manifest(NAME, "", config, source, {"train": 1}, {}, {NAME: 1}, "", {}, [], {})


def write(folder: Path, made: Manifest) -> None:
    pq.write_table(QUARANTINE_SCHEMA.empty_table(), folder / QUARANTINE)
    (folder / "manifest.json").write_text(made.to_json())


def summary(folder: Path) -> None:
    (folder / "dataset").mkdir()
    write(folder / "dataset", manifest())
    node = types.SimpleNamespace(uri=str(folder))
    start.print_summary({"prepare_data": node}, open_store(folder), RunHandle().open())


def verify(folder: Path) -> None:
    shard = Shard(f"res=4/{NAME}", "train", 0, 4, 8, 0, "", [1])
    write(folder, Manifest(**{**vars(manifest()), "shards": [shard]}))
    assert inspection.verify_dataset(str(folder)) == inspection.DAMAGED


def refusal(folder: Path) -> None:
    def fail() -> int:
        raise UserError(f"images: {NAME} is 4x4")

    run_guarded(fail)


def quarantine(folder: Path) -> None:
    print(UnusableImage("missing_bytes", f"no file {NAME}"))


def failed_node(folder: Path) -> None:
    print(one_line(UserError(" ".join(NAME.splitlines()))), one_line(ValueError(NAME)))


@pytest.mark.parametrize("sink", [summary, verify, refusal, quarantine, failed_node], ids=lambda sink: sink.__name__)
def test_the_terminal_gets_no_control_characters(sink: Callable, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    sink(tmp_path)
    shown = "".join(capsys.readouterr())
    assert all(line.isprintable() for line in shown.split("\n"))
    assert "\\x1b[2J" in shown


def test_the_report_shows_names_as_text() -> None:
    page = report._data_section(manifest())
    assert "<b>" not in page and page.count("&lt;b&gt;") == 2


def test_a_table_for_spreadsheets_has_one_cell_and_no_formula_per_name() -> None:
    names = [NAME, "@SUM(1)", "a-1.png"]
    buffer = io.BytesIO()
    pyarrow.csv.write_csv(pa.table({"key": [images.csv_text(name) for name in names], "total": [1, 2, 3]}), buffer)
    rows = list(csv.reader(io.StringIO(buffer.getvalue().decode())))
    assert rows[1:] == [[f"'{ESCAPED}", "1"], ["'@SUM(1)", "2"], ["a-1.png", "3"]]


def test_records_escape_names() -> None:
    user = UserImages("score_images", (NAME,), np.zeros((1, 8, 8, 3), np.uint8), 8, ("baseline",))
    text = json.dumps(user.digests)
    assert text.isprintable() and list(json.loads(text)) == [NAME]
