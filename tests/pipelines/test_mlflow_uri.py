"""Where MLflow is: its database, its servers, pages of its UI.

python -m pytest tests/pipelines/test_mlflow_uri.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from pyarrow._fs import _MockFileSystem

from data_prep.files import Store, open_store
from pipelines.mlflow_uri import UI, compare_link, default_uri, ui_command
from pipelines.tracking import RunHandle


def test_the_database_lies_on_a_local_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    local = f"sqlite:///{tmp_path}/mlflow.db"
    assert default_uri(open_store(tmp_path), name="demo") == (local, f"{tmp_path}/mlartifacts")
    remote = Store("s3://bucket/demo", filesystem=_MockFileSystem(), base="bucket/demo")
    home = f"{tmp_path}/home/spn_runs/demo"
    assert default_uri(remote, name="demo") == (f"sqlite:///{home}/mlflow.db", f"{home}/mlartifacts")
    assert default_uri(remote, name="demo", configured="http://h:5000") == ("http://h:5000", None)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://env:5000")
    assert default_uri(remote, name="demo") == ("http://env:5000", None)


def test_commands_and_links() -> None:
    assert ui_command("sqlite:////runs/demo/mlflow.db").startswith(
        f"{sys.executable} -m mlflow ui --backend-store-uri sqlite:////runs/demo/mlflow.db --host 127.0.0.1"
    )
    handle = RunHandle("http://h:5000/", "r1", "7")
    assert handle.link("r2") == "http://h:5000/#/experiments/7/runs/r2?workflowType=machine_learning"
    local = RunHandle("sqlite:////runs/mlflow.db", "r1", "7")
    assert local.link("r2").startswith("http://127.0.0.1:5000/#/experiments/7/")
    assert local.compare_link(["a", "b"]) == compare_link(UI, run_ids=["a", "b"], experiment_id="7")
    link = compare_link("http://127.0.0.1:5000", run_ids=["a", "b"], experiment_id="1")
    assert "/#/compare-runs?runs=%5B%22a%22%2C%22b%22%5D&experiments=%5B%221%22%5D&workflowType=" in link
