"""The node prepare_data: what it refuses is reported in one line, for the user to change.

python -m pytest tests/pipelines/nodes/test_prepare_data.py
"""

from __future__ import annotations

import dataclasses
import errno
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image
from toy.context import context

from data_prep.config import DataConfig
from data_prep.files import UserError
from data_prep.sources import identify
from pipelines.config import PrepareDataNodeConfig
from pipelines.dag.node import NodeContext
from pipelines.dag.task import execute
from pipelines.nodes import prepare_data

GOOD = DataConfig(dataset="pictures", image_size=8, resolutions=[8], bits=[8], max_quarantine_fraction=0.0)


def photos(root: Path, number: int = 4) -> None:
    for i in range(number):
        Image.new("RGB", (12, 12), (i, 2 * i, 3 * i)).save(root / f"{i}.png")


def split_of_others(root: Path) -> None:
    photos(root)
    (root / "splits.txt").write_text("0.png train\nother.png test\n")


CASES: dict[str, tuple[Callable[[Path], None], dict, str]] = {
    "split file": (
        split_of_others,
        {"split": "file", "split_file": "splits.txt"},
        "data.root: split_mismatch: splits.txt names 2 images, ",
    ),
    "glow": (photos, {"split": "glow"}, "data.split is 'glow'; it takes 3000 images for test, "),
}


def context_of(folder: Path, **changes: object) -> NodeContext:
    """Of a build of the photos in folder/raw."""
    data = dataclasses.replace(GOOD, root=str(folder / "raw"), **changes)
    config = PrepareDataNodeConfig(data=data, listing_hash=identify(data)[1], num_cpus=1.0)
    return context("prepare_data", config, folder / "out")


@pytest.mark.parametrize(("make", "changes", "message"), CASES.values(), ids=CASES)
def test_an_unusable_source_is_reported_in_one_line(
    make: Callable[[Path], None], changes: dict, message: str, tmp_path: Path
) -> None:
    """None of these needs Ray: they are found before the first task."""
    (tmp_path / "raw").mkdir()
    make(tmp_path / "raw")
    made = context_of(tmp_path, **changes)
    with pytest.raises(UserError) as mistake:
        prepare_data.run(made)
    assert str(mistake.value).startswith(message) and "\n" not in str(mistake.value)
    outcome = execute("pipelines.nodes.prepare_data:run", made, {}, "unknown")
    assert outcome.is_user_error and outcome.error == str(mistake.value) and not outcome.is_fault


def test_other_photos_than_those_of_the_launch_are_refused(tmp_path: Path) -> None:
    """On another machine, or changed since: the fingerprint is that of the photos that the launch listed."""
    (tmp_path / "raw").mkdir()
    photos(tmp_path / "raw")
    made = context_of(tmp_path)
    photos(tmp_path / "raw", 5)
    with pytest.raises(UserError, match=r"^data.root is .* are not those that the launch listed: start again, or "):
        prepare_data.run(made)


@pytest.mark.parametrize(
    ("error", "lost"), [(ValueError("a bug"), False), (OSError(errno.EIO, "Input/output error"), True)], ids=str
)
def test_other_errors_are_not_reported_as_the_users(
    error: Exception, lost: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault of the program keeps its kind; storage that is away makes the node start again."""

    def fails(*_: object) -> None:
        raise error

    (tmp_path / "raw").mkdir()
    photos(tmp_path / "raw")
    made = context_of(tmp_path)
    monkeypatch.setattr("data_prep.sources.base.open_store" if lost else "data_prep.build.make_plan", fails)
    outcome = execute("pipelines.nodes.prepare_data:run", made, {}, "unknown")
    assert (outcome.is_user_error, outcome.is_fault) == (False, lost) and str(error) in outcome.error
