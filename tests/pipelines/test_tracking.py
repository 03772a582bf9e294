"""MLflow as a mirror: one curve per node, killed drivers, an unreachable server.

python -m pytest tests/pipelines/test_tracking.py
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_prep.files import open_store
from pipelines import tracking
from pipelines.ledger import Ledger, silent_ledger
from pipelines.mlflow_uri import LOGIN, default_uri, ui_command
from pipelines.tracking import PARENT_TAG, NullRun, RunHandle


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One database for the module: making the schema takes seconds."""
    return tmp_path_factory.mktemp("mlflow")


def make_ledger(place: Path, *, run_folder: str = "/runs/demo", experiment: str = "demo") -> Ledger:
    uri, artifacts = default_uri(open_store(place), name="demo")
    ledger = Ledger(uri, experiment=experiment, run_folder=run_folder, artifacts=artifacts)
    ledger.start_pipeline(tags={"git_commit": "abc"}, params={"seed": 1}, files={"config.yaml": "name: demo\n"})
    return ledger


def client(ledger: Ledger) -> Any:
    return tracking.make_client(ledger.uri)


def history(ledger: Ledger, handle: RunHandle, key: str) -> list[tuple[int, float]]:
    return [(m.step, m.value) for m in client(ledger).get_metric_history(handle.run_id, key)]


def test_a_node_run_holds_what_was_logged(place: Path) -> None:
    ledger = make_ledger(place)
    config = {"model": {"width": 8, "sizes": (1, 2)}, "long": "x" * 600, **{f"key{i}": i for i in range(150)}}
    handle = ledger.start_node("train_a", tags={"stage": "a", "fingerprint": "f"}, params=config)
    handle = pickle.loads(pickle.dumps(handle))
    with handle.open() as run:
        run.log_metrics({"valid/bits_per_dim": 3.5, "train/lr": 0.1}, step=10)
        run.log_metrics({"valid/bits_per_dim": 3.0}, step=20)
        run.log_image(np.zeros((4, 4, 3), np.uint8), key="samples", step=20)
        run.log_text("text", "notes/text.txt")
        run.set_tags({"more": "tag"})
    ledger.finish(handle, "FINISHED", metrics={"valid/bits_per_dim": 9.9, "images_seen": 100.0})
    ledger.close("FINISHED")
    found = client(ledger).get_run(handle.run_id)
    assert found.info.run_name == "train_a" and found.info.status == "FINISHED"
    assert found.data.params["model.width"] == "8" and found.data.params["key149"] == "149"
    assert len(found.data.params["long"]) == 500
    assert found.data.tags["node"] == "train_a" and found.data.tags["stage"] == "a"
    assert found.data.tags[PARENT_TAG] == ledger.parent_id and found.data.tags["more"] == "tag"
    assert history(ledger, handle, "valid/bits_per_dim") == [(10, 3.5), (20, 3.0)]  # the result adds no point
    assert history(ledger, handle, "images_seen") == [(0, 100.0)]
    names = {f.path for f in client(ledger).list_artifacts(handle.run_id)}
    assert {"images", "notes"} <= names
    parent = client(ledger).get_run(ledger.parent_id)
    assert parent.info.status == "FINISHED" and parent.data.params == {"seed": "1"}
    assert [f.path for f in client(ledger).list_artifacts(ledger.parent_id)] == ["config.yaml"]
    assert (place / "mlartifacts").is_dir()


def test_history_sent_again_adds_only_what_is_missing(place: Path) -> None:
    ledger = make_ledger(place)
    handle = ledger.start_node("train_a", tags={}, params={})
    points = [{"step": step, "time_ms": 1000 + step, "loss": 2.0 / step, "lr": 0.1} for step in range(1, 2000)]
    with handle.open() as run:
        for point in points[:3]:
            metrics = {key: value for key, value in point.items() if key not in ("step", "time_ms")}
            run.log_metrics(metrics, step=point["step"], time_ms=point["time_ms"])
    for _ in range(2):
        with handle.open() as run:
            run.log_history(points)
    ledger.close("FINISHED")
    assert history(ledger, handle, "loss") == [(point["step"], point["loss"]) for point in points]


def test_an_ending_that_the_server_missed_is_told_later(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = make_ledger(place)
    handle = ledger.start_node("train_a", tags={}, params={})
    away = True

    def set_terminated(run_id: str, status: str) -> None:
        if away:
            raise ConnectionError("away")
        terminated(run_id, status)

    terminated = ledger._client.set_terminated
    monkeypatch.setattr(ledger._client, "set_terminated", set_terminated)
    ledger.finish(handle, "FINISHED")
    assert client(ledger).get_run(handle.run_id).info.status == "RUNNING"
    away = False
    ledger.close("FINISHED")
    ended = [client(ledger).get_run(run_id).info.status for run_id in (handle.run_id, ledger.parent_id)]
    assert ended == ["FINISHED", "FINISHED"]


def test_a_run_that_was_opened_although_the_answer_got_lost_is_not_opened_twice(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking, "RETRY_SEC", (0.05,))
    ledger = make_ledger(place, experiment="slow")
    create_run, late = ledger._client.create_run, []

    def answer_too_late(*arguments: Any, **options: Any) -> Any:
        made = create_run(*arguments, **options)
        late.append(made.info.run_id)
        if len(late) == 1:
            raise TimeoutError("no answer")
        return made

    monkeypatch.setattr(ledger._client, "create_run", answer_too_late)
    handle = ledger.start_node("train_a", tags={}, params={"x": 1})
    ledger.finish(handle, "FINISHED")
    ledger.close("FINISHED")
    (found,) = client(ledger).search_runs([ledger.experiment_id], "tags.node = 'train_a'")
    assert [found.info.run_id] == late == [handle.known().run_id]
    assert found.info.status == "FINISHED" and found.data.params == {"x": "1"}


def test_data_sets_of_a_run_are_named_once(place: Path) -> None:
    ledger = make_ledger(place)
    handle = ledger.start_node("train_a", tags={}, params={})
    for _ in range(2):  # once more after a restart
        with handle.open() as run:
            run.log_dataset(
                name="photos-train",
                digest="d" * 32,
                uri="s3://key:secret@bucket/data?region=eu&session_token=secret",
                context="training",
                shape=(-1, 8, 8, 3),
                profile={"num_rows": 5},
            )
    (found,) = client(ledger).get_run(handle.run_id).inputs.dataset_inputs
    assert (found.dataset.name, found.dataset.digest) == ("photos-train", "d" * 32)
    assert found.dataset.source == '{"uri": "s3://bucket/data"}' and found.dataset.source_type == "s3"
    assert [(tag.key, tag.value) for tag in found.tags] == [("mlflow.data.context", "training")]
    from mlflow.data.schema import TensorDatasetSchema  # MLflow reads what was written by hand

    schema = TensorDatasetSchema.from_dict(json.loads(found.dataset.schema))
    assert schema.features.inputs[0].shape == (-1, 8, 8, 3)
    ledger.close("FINISHED")


def test_the_machine_is_watched_until_the_run_is_closed(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.05")
    ledger = make_ledger(place)
    handle = ledger.start_node("train_a", tags={}, params={})
    before = {thread.name for thread in threading.enumerate()}
    with handle.open() as run, handle.open() as other:
        run.watch_machine(lambda: 7)
        other.watch_machine(lambda: 8, name="node_1")
        deadline = time.monotonic() + 20
        while not history(ledger, handle, "system/cpu_utilization_percentage"):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert {thread.name for thread in threading.enumerate() if thread.name == "mlflow-system"} <= before
    memory = history(ledger, handle, "system/system_memory_usage_megabytes")
    assert {step for step, _ in memory} == {7} and all(value > 0 for _, value in memory)
    assert {step for step, _ in history(ledger, handle, "system/node_1/cpu_utilization_percentage")} == {8}
    ledger.close("FINISHED")


def test_nothing_secret_reaches_the_records(
    place: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    secret = "hunter2secret"
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", f"{secret}-of-aws")
    uri, artifacts = default_uri(open_store(place), name="demo")
    storage = f"s3://me:{secret}@bucket/demo?session_token={secret}"
    ledger = Ledger(uri, experiment="demo", run_folder=storage, artifacts=artifacts)
    config = {"storage": storage, "note": f"the key is {secret}-of-aws"}
    ledger.start_pipeline(tags={"where": storage}, params=config, files={"config.yaml": f"storage: {storage}\n"})
    handle = ledger.start_node("train_a", tags={"where": storage}, params=config)
    with handle.open() as run:
        run.set_tags({"more": storage})
        run.log_text(f"{secret}-of-aws", "note.txt")
    ledger.close("FINISHED")
    assert ledger.reconcile() == [handle.run_id], "the masked folder is still one's own"
    recorded = []
    for run_id in (ledger.parent_id, handle.run_id):
        found = client(ledger).get_run(run_id)
        recorded.append(str(found.to_dictionary()))
        for file in Path(found.info.artifact_uri.removeprefix("file://")).rglob("*.*"):
            recorded.append(file.read_text())
    assert len(recorded) == 4 and "bucket/demo" in recorded[0] and "***" in recorded[1]
    assert secret not in "".join(recorded)
    database = RunHandle(f"postgresql://me:{secret}@127.0.0.1:1/mlflow", "r1")
    assert secret not in repr(database) and "127.0.0.1" in repr(database)
    monkeypatch.setattr(tracking, "_warned", set())
    tracking.warn_once(database.uri, ConnectionError(f"no answer from {database.uri}"))
    assert "no answer" in caplog.text and secret not in caplog.text


def test_a_servers_login_leaves_its_address_and_travels_unseen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LOGIN:
        monkeypatch.setenv(name, "")  # so that what is set below goes away again
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://anna:p%40ss-word@h:5000/mlflow")
    uri, _ = default_uri(open_store(tmp_path), name="demo")
    assert uri == "https://h:5000/mlflow" and ui_command(uri).startswith("https://h:5000/mlflow/#/experiments?")
    ledger = silent_ledger()
    ledger.uri = uri
    handle = pickle.loads(pickle.dumps(ledger.handle("r1")))
    assert "p@ss-word" not in repr(handle) and handle.at("r2").login == handle.login
    for name in LOGIN:
        monkeypatch.delenv(name)
    monkeypatch.setattr(tracking, "make_client", lambda uri: FakeClient())
    handle.open().close()
    assert (os.environ["MLFLOW_TRACKING_USERNAME"], os.environ["MLFLOW_TRACKING_PASSWORD"]) == ("anna", "p@ss-word")


def test_a_skipped_node_points_to_the_run_it_reuses(place: Path) -> None:
    ledger = make_ledger(place)
    handle = ledger.reuse_node("train_a", tags={"fingerprint": "f"}, reused_run="run7")
    found = client(ledger).get_run(handle.run_id)
    assert found.info.status == "FINISHED" and found.data.tags["reused_run"] == "run7"
    assert found.data.metrics == {}


def test_runs_of_a_killed_driver_are_closed_and_the_unfinished_one_goes_on(place: Path) -> None:
    killed = make_ledger(place)
    handle = killed.start_node("train_a", tags={"attempt": "1"}, params={"a": 1})
    with handle.open() as run:
        run.log_metrics({"x": 1.0}, step=1)
    neighbour = make_ledger(place, run_folder="/runs/other")
    ledger = make_ledger(place)
    status = {run_id: client(ledger).get_run(run_id).info.status for run_id in (handle.run_id, killed.parent_id)}
    assert set(status.values()) == {"KILLED"}
    assert client(ledger).get_run(neighbour.parent_id).info.status == "RUNNING"
    again = ledger.start_node("train_a", tags={"attempt": "1"}, params={"a": 1}, continue_id=handle.run_id)
    assert again.run_id == handle.run_id
    with again.open() as run:
        run.log_metrics({"x": 2.0}, step=2)
    assert client(ledger).get_run(handle.run_id).info.status == "RUNNING"
    assert client(ledger).get_run(handle.run_id).data.tags[PARENT_TAG] == ledger.parent_id
    ledger.finish(again, "FINISHED")
    assert history(ledger, again, "x") == [(1, 1.0), (2, 2.0)]
    for left in (ledger, neighbour):
        left.close("FINISHED")


def test_a_run_that_the_database_does_not_know_is_made_anew(place: Path) -> None:
    ledger = make_ledger(place)
    handle = ledger.start_node("train_a", tags={}, params={}, continue_id="0" * 32)
    assert handle.run_id and handle.run_id != "0" * 32
    ledger.close("FINISHED")


def test_a_second_driver_and_a_worker_process_open_the_same_database(place: Path) -> None:
    ledger = make_ledger(place)
    handle = ledger.start_node("train_a", tags={}, params={})
    code = (
        "import pickle, sys\n"
        "handle = pickle.loads(bytes.fromhex(sys.argv[1]))\n"
        "run = handle.open()\n"
        "run.log_metrics({'from_worker': 1.0}, step=5)\n"  # not closed: leaving the process sends it
    )
    second = make_ledger(place)
    subprocess.run([sys.executable, "-c", code, pickle.dumps(handle).hex()], check=True, timeout=120)
    assert history(ledger, handle, "from_worker") == [(5, 1.0)]
    assert second.experiment_id == ledger.experiment_id


def test_without_mlflow_nothing_is_recorded_and_nothing_fails() -> None:
    run = RunHandle().open()
    assert isinstance(run, NullRun)
    with run:
        run.log_metrics({"a": 1.0}, step=1)
        run.log_image(np.zeros((2, 2, 3), np.uint8), key="x")
        run.set_tags({"a": "b"})
    ledger = silent_ledger()
    ledger.start_pipeline(tags={}, params={}, files={})
    handle = ledger.start_node("a", tags={}, params={})
    ledger.finish(handle, "FINISHED", metrics={"a": 1.0})
    ledger.close("FINISHED")
    assert handle == RunHandle() and ledger.reconcile() == []


def test_an_unreachable_server_warns_once_and_the_run_goes_on(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking, "_warned", set())
    uri = "http://127.0.0.1:1"
    with caplog.at_level(logging.WARNING, logger="pipelines.tracking"):
        ledger = Ledger(uri, experiment="demo", run_folder="x")
        ledger.start_pipeline(tags={}, params={}, files={})
        handle = ledger.start_node("a", tags={}, params={})
        assert handle.run_id is None and handle.known() == handle
    assert len([r for r in caplog.records if uri in r.getMessage()]) == 1


def test_a_server_that_is_away_at_the_start_gets_everything_later(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that could not be opened: parent, a node that ends meanwhile, one that goes on, and one that was skipped."""
    monkeypatch.setattr(tracking, "RETRY_SEC", (0.05,))
    monkeypatch.setattr(tracking, "CLOSE_SEC", 0.3)
    left_open = make_ledger(place, run_folder="/runs/late")
    away, make_client = threading.Event(), tracking.make_client
    away.set()

    def client_if_there(uri: str) -> Any:
        if away.is_set():
            raise ConnectionError("away")
        return make_client(uri)

    monkeypatch.setattr(tracking, "make_client", client_if_there)
    ledger = make_ledger(place, run_folder="/runs/late")
    handles = {node: ledger.start_node(node, tags={"stage": node}, params={"x": 1}) for node in ("a", "b")}
    handles["c"] = ledger.reuse_node("c", tags={}, reused_run="run7")
    assert ledger.parent_id is None and not any(handle.run_id for handle in handles.values())
    ledger.finish(handles["a"], "FINISHED", metrics={"valid": 3.0})
    run = pickle.loads(pickle.dumps(handles["b"])).open()  # as a worker does
    run.log_metrics({"loss": 2.0}, step=1)
    assert not run.flush(timeout_sec=0.2) and handles["b"].known().run_id is None
    away.clear()
    assert run.flush(timeout_sec=20)
    run.log_metrics({"loss": 1.0}, step=2)
    run.close()
    ledger.finish(handles["b"], "FAILED")
    ledger.close("FAILED")
    opened = {node: handle.known() for node, handle in handles.items()}
    found = {node: client(ledger).get_run(handle.run_id) for node, handle in opened.items()}
    assert {node: run.info.status for node, run in found.items()} == {"a": "FINISHED", "b": "FAILED", "c": "FINISHED"}
    assert all(run.data.tags[PARENT_TAG] == ledger.parent_id for run in found.values())
    assert found["a"].data.metrics == {"valid": 3.0} and found["a"].data.params == {"x": "1"}
    assert history(ledger, opened["b"], "loss") == [(1, 2.0), (2, 1.0)]
    assert found["c"].data.tags["reused_run"] == "run7"
    parent = client(ledger).get_run(ledger.parent_id)
    assert parent.info.status == "FAILED" and parent.data.params == {"seed": "1"}
    assert [f.path for f in client(ledger).list_artifacts(ledger.parent_id)] == ["config.yaml"]
    # What an earlier driver left open is closed before runs of this start are opened, and only that.
    assert client(ledger).get_run(left_open.parent_id).info.status == "KILLED"
    # The next start goes on in a run that this one knew only by its key.
    after = make_ledger(place, run_folder="/runs/late")
    again = after.start_node("b", tags={}, params={}, continue_id=handles["b"].reference)
    assert again.run_id == opened["b"].run_id
    after.close("FINISHED")


def test_a_missing_database_file_is_not_created_by_a_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "CLOSE_SEC", 0.1)
    run = RunHandle(f"sqlite:///{tmp_path}/mlflow.db", "r1").open()
    run.log_metrics({"a": 1.0})
    assert not run.flush(timeout_sec=0.3)
    run.close()
    assert list(tmp_path.iterdir()) == []


class FakeClient:
    """Fails while `away` is set; notes what it got."""

    def __init__(self) -> None:
        self.away = threading.Event()
        self.steps: list[int] = []
        self.refused = 0

    def log_batch(self, run_id: str, metrics: list[Any] = (), **_: Any) -> None:
        if self.away.is_set():
            raise ConnectionError("away")
        if metrics[0].key == "refused":
            self.refused += 1
            raise ValueError("MLflow does not like it")
        self.steps.append(metrics[0].step)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeClient:
    made = FakeClient()
    monkeypatch.setattr(tracking, "make_client", lambda uri: made)
    monkeypatch.setattr(tracking, "RETRY_SEC", (0.01,))
    return made


def test_metrics_wait_for_a_server_that_comes_back_in_order(fake: FakeClient) -> None:
    fake.away.set()
    run = RunHandle("http://fake", "r").open()
    for step in range(5):
        run.log_metrics({"a": 0.0}, step=step)
    assert not run.flush(timeout_sec=0.1) and fake.steps == []
    fake.away.clear()
    run.close()
    assert fake.steps == [0, 1, 2, 3, 4]


def test_what_mlflow_refuses_is_not_tried_again(fake: FakeClient) -> None:
    with RunHandle("http://fake", "r").open() as run:
        run.log_metrics({"refused": 0.0}, step=1)
        run.log_metrics({"a": 0.0}, step=2)
    assert fake.steps == [2] and fake.refused == 1


def test_waiting_metrics_are_bounded_and_the_newest_stay(fake: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "_MAX_WAITING", 3)
    fake.away.set()
    run = RunHandle("http://fake", "r").open()
    for step in range(10):
        run.log_metrics({"a": 0.0}, step=step)
    fake.away.clear()
    run.close()
    assert fake.steps[-2:] == [8, 9] and len(fake.steps) <= 4
