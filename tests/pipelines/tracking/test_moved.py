"""A run folder that was moved or copied works where it is now.

python -m pytest tests/pipelines/tracking/test_moved.py
"""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from mlflow.tracking import MlflowClient

from data_prep.files import UserError, open_store
from pipelines import tracking
from pipelines.loading import PRESETS, load
from pipelines.nodes.registry import CHAMPION, StageModel, register
from pipelines.tracking import Ledger, default_uri


def record(folder: Path, *, attempt: str) -> Ledger:
    """A launch with one training, which is scored and registered. In `folder` alone."""
    checkpoint, scores = folder / "nodes/train" / attempt / "step-1", folder / "nodes/evaluate" / attempt
    for each in (checkpoint, scores):
        each.mkdir(parents=True)
    (checkpoint / "config.json").write_text(attempt)
    bits = {"1": 2.0, "2": 1.0}[attempt]
    pq.write_table(pa.table({"key": ["a", "b"], "size_upscale": [bits, bits]}), scores / "per_image.parquet")
    uri = default_uri(open_store(folder), name="debug")
    ledger = Ledger(uri, experiment="debug", run_folder=str(folder))
    ledger.start_pipeline(tags={}, params={}, config="name: debug\n")
    with ledger.start_node("train_size_upscale", tags={}, params={}).open() as run:
        run.log_text(attempt, "note.txt")
        run.log_image(np.zeros((4, 4, 3), np.uint8), key="samples")
        register(
            run,
            StageModel(
                "size_upscale", str(checkpoint), attempt, bits, 0, "test", "16px", f"{scores}/per_image.parquet"
            ),
        )
    return ledger  # not closed: as if it had been killed


def seen(folder: Path) -> tuple[set[str], str]:
    """The training runs' notes and the champion's file, as anybody reads them with MLflow alone."""
    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    runs = client.search_runs([client.get_experiment_by_name("debug").experiment_id], "tags.node LIKE 'train_%'")
    for run in runs:
        assert {file.path for file in client.list_artifacts(run.info.run_id)} == {"note.txt", "images"}
    notes = {Path(client.download_artifacts(run.info.run_id, "note.txt")).read_text() for run in runs}
    version = client.get_model_version_by_alias("debug.size_upscale", CHAMPION)
    assert version.tags["checkpoint"] == version.source and Path(version.tags["scores"]).is_file()
    champion = client.get_model_version_download_uri(version.name, version.version)
    return notes, (Path(champion) / "config.json").read_text()


@pytest.fixture
def recorded(tmp_path: Path, mlflow_place: Path) -> Path:
    """Its name has what URIs and SQL must escape. The database is a copy of the one that tests share."""
    folder = tmp_path / "old é 50%" / "debug"
    folder.mkdir(parents=True)
    tracking.make_client(f"sqlite:///{mlflow_place}/mlflow.db")
    shutil.copy(mlflow_place / "mlflow.db", folder)
    record(folder, attempt="1")
    return folder


def test_a_moved_folder_is_read_and_written_where_it_is_now(recorded: Path, tmp_path: Path) -> None:
    new = tmp_path / "new" / "debug"
    shutil.move(recorded.parent, new.parent)
    ledger = record(new, attempt="2")  # the next command
    assert seen(new) == ({"1", "2"}, "2"), "the champion of old was compared, and lost"
    assert not recorded.parent.exists()
    client = MlflowClient(ledger.uri)
    statuses = [run.info.status for run in client.search_runs([ledger.experiment_id])]
    assert sorted(statuses) == ["KILLED", "KILLED", "RUNNING", "RUNNING"], "it knows what the killed command left"
    with sqlite3.connect(new / "mlflow.db") as database:
        assert recorded.parent.name not in unquote("".join(database.iterdump()))


def test_a_copy_and_its_original_go_separate_ways(recorded: Path, tmp_path: Path) -> None:
    copy, link = tmp_path / "copy" / "debug", tmp_path / "link"
    shutil.copytree(recorded, copy)
    before = {path: path.read_bytes() for path in recorded.rglob("*") if path.is_file()}
    record(copy, attempt="2")
    assert seen(copy) == ({"1", "2"}, "2")
    link.symlink_to(recorded)
    tracking.make_client(f"sqlite:///{link}/mlflow.db")  # another way to the same folder is no move
    assert before == {path: path.read_bytes() for path in recorded.rglob("*") if path.is_file()}
    assert seen(recorded) == ({"1"}, "1")


def test_experiments_of_others_in_a_shared_database_are_left_alone(recorded: Path) -> None:
    client = MlflowClient(f"sqlite:///{recorded}/mlflow.db")
    other = client.create_experiment("theirs", artifact_location="file:///elsewhere/mlartifacts")
    client.create_run(other)
    tracking.make_client(client.tracking_uri)
    assert client.get_experiment(other).artifact_location == "file:///elsewhere/mlartifacts"


def test_the_saved_config_of_a_moved_folder_stores_there(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "debug"
    (folder / "nodes").mkdir(parents=True)
    (folder / "config.yaml").write_text((PRESETS / "debug.yaml").read_text() + "\nname: debug\nstorage: /old\n")
    assert load(str(folder / "config.yaml")).storage == str(folder.parent)
    assert load(str(folder / "config.yaml"), ["storage=/chosen"]).storage == "/chosen"
    folder.rename(folder.with_name("debug2"))
    with pytest.raises(UserError, match="debug2 is a run folder of config 'debug'"):
        load(str(folder.with_name("debug2") / "config.yaml"))
