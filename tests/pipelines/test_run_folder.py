"""A run folder belongs to one config name.  pytest tests/pipelines/test_run_folder.py"""

from __future__ import annotations

from pathlib import Path

import pytest
from pyarrow._fs import _MockFileSystem

from data_prep.files import Store, UserError, open_store
from pipelines.start import check_run_folder


@pytest.mark.parametrize("place", ["local", "object store"])
def test_run_folder_of_another_config_is_refused(place: str, tmp_path: Path) -> None:
    remote = Store("s3://bucket/run", filesystem=_MockFileSystem(), base="bucket/run")
    store = open_store(tmp_path) if place == "local" else remote
    assert check_run_folder(store, name="demo") == {}
    store.write_text("config.yaml", "name: demo\nseed: 2\n")
    assert check_run_folder(store, name="demo") == {"name": "demo", "seed": 2}
    with pytest.raises(UserError, match="run folder of config 'demo', not of 'debug'"):
        check_run_folder(store, name="debug")


@pytest.mark.parametrize("content", ["just text", "seed: 1", "name: [1, 2", "\x00"])
def test_a_folder_with_a_foreign_config_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.yaml").write_text(content)
    with pytest.raises(UserError, match="does not look like a run folder"):
        check_run_folder(open_store(tmp_path), name="demo")
