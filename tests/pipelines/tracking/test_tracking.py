"""MLflow as a mirror: addresses, one curve per node, killed drivers, a server that does not answer.

python -m pytest tests/pipelines/tracking/test_tracking.py
"""

from __future__ import annotations

import contextlib
import getpass
import io
import json
import logging
import os
import pickle
import socket
import sqlite3
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import requests
from PIL import Image

from data_prep.files import UserError, open_store
from pipelines import tracking
from pipelines.dag.node import Picture
from pipelines.tracking import LOGIN, PARENT_TAG, Ledger, RunHandle, default_uri
from tests.data_prep.made import object_store

SPLITS = ("valid", "train", "test")


@pytest.fixture(scope="module")
def place(mlflow_place: Path) -> Path:
    return mlflow_place


@pytest.fixture(autouse=True)
def fresh_servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No test knows of another one's failures, and a dead server costs no pause."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    tracking._server.cache_clear()
    yield
    tracking._server.cache_clear()


def make_ledger(place: Path, *, run_folder: str = "/runs/demo", experiment: str = "demo") -> Ledger:
    uri = default_uri(open_store(place), name="demo")
    ledger = Ledger(uri, experiment=experiment, run_folder=run_folder)
    tags = {"git_commit": "abc-dirty", tracking.NAME: "demo seed=1"}
    ledger.start_pipeline(tags=tags, params={"seed": 1}, config="name: demo\n")
    return ledger


def client(ledger: Ledger) -> Any:
    return tracking.make_client(ledger.uri)


def history(ledger: Ledger, run_id: str | None, key: str) -> list[tuple[int, float]]:
    return [(m.step, m.value) for m in client(ledger).get_metric_history(run_id, key)]


def points(*steps: int, key: str = "loss") -> list[dict[str, float]]:
    """A recorded history."""
    return [{"step": step, "time_ms": 1000 + step, key: 1.0 / step, "lr": 0.1} for step in steps]


def test_the_database_lies_on_a_local_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    local = f"sqlite:///{tmp_path}/mlflow.db"
    assert default_uri(open_store(tmp_path), name="demo") == local
    remote = object_store("bucket/demo")
    assert default_uri(remote, name="demo") == f"sqlite:///{tmp_path}/home/spn_runs/demo/mlflow.db"
    odd = open_store(f"{tmp_path}/50%25 a?b#c")
    assert default_uri(odd, name="demo") == f"sqlite:///{tmp_path}/50%2525 a%3Fb#c/mlflow.db"
    assert default_uri(remote, name="demo", configured="http://h:5000") == "http://h:5000"
    with pytest.raises(UserError, match="is htp://h:5000; nearest: http"):
        default_uri(remote, name="demo", configured="htp://h:5000")
    with pytest.raises(UserError, match=r"is sqlite:///a.db\?timeout=5; SQLite takes no options here"):
        default_uri(remote, name="demo", configured="sqlite:///a.db?timeout=5")
    monkeypatch.setattr(tracking, "entry_points", lambda *, group: [SimpleNamespace(name="azureml")])
    assert default_uri(remote, name="demo", configured="azureml://place") == "azureml://place", "a plugin's"
    monkeypatch.chdir(tmp_path)
    assert default_uri(remote, name="demo", configured="sqlite:///shared.db") == f"sqlite:///{tmp_path}/shared.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://env:5000")
    assert default_uri(remote, name="demo") == "http://env:5000"


def test_commands_and_links() -> None:
    handle = RunHandle("http://h:5000/", "r1", "7")
    assert handle.link("r2") == "http://h:5000/#/experiments/7/runs/r2?workflowType=machine_learning"
    local = RunHandle("sqlite:////a b/mlflow.db", "r1", "7")
    command = f"{sys.executable} -m mlflow ui --backend-store-uri 'sqlite:////a b/mlflow.db' --host 127.0.0.1"
    assert local.links()["MLflow"].startswith(command), "quoted for a shell"
    assert local.link("r2").startswith("http://127.0.0.1:5000/#/experiments/7/")
    assert list(local.links()) == ["MLflow", "run", "curves"]
    server = handle.links()
    assert server["run"] == handle.link("r1") and list(server) == ["run", "curves"]
    view = "viewStateShareKey=stages&compareRunsMode=CHART&workflowType=machine_learning"
    assert server["curves"] == f"http://h:5000/#/experiments/7/runs?{view}"
    assert list(RunHandle("http://h:5000").links()) == [], "the server did not answer: there is no run"


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
    png = io.BytesIO()
    Image.new("RGB", (4, 4)).save(png, "PNG")
    ledger.show("train_a", Picture("a.png", "of_the_driver", step=3), png.getvalue())
    assert (
        ledger.finish("train_a", "FINISHED", metrics={"lr": 9.9, "images_seen": 100.0}, history=points(1))
        == handle.run_id
    )
    ledger.close("FINISHED")
    found = client(ledger).get_run(handle.run_id)
    assert found.info.run_name == "train_a" and found.info.status == "FINISHED"
    assert found.data.params["model.width"] == "8" and found.data.params["key149"] == "149"
    assert len(found.data.params["long"]) == 500
    assert found.data.tags["node"] == "train_a" and found.data.tags["stage"] == "a"
    assert found.data.tags[PARENT_TAG] == ledger.parent.run_id and found.data.tags["more"] == "tag"
    assert history(ledger, handle.run_id, "valid/bits_per_dim") == [(10, 3.5), (20, 3.0)]
    assert history(ledger, handle.run_id, "lr") == [(1, 0.1)], "the result adds no point to a curve"
    assert history(ledger, handle.run_id, "images_seen") == [(0, 100.0)]
    assert {"images", "notes"} <= {f.path for f in client(ledger).list_artifacts(handle.run_id)}
    shown = [f.path for f in client(ledger).list_artifacts(handle.run_id, "images")]
    assert any("samples" in path for path in shown) and any("of_the_driver" in path for path in shown)
    parent = client(ledger).get_run(ledger.parent.run_id)
    assert parent.info.status == "FINISHED" and parent.data.params == {"seed": "1"}
    assert parent.info.run_name == "demo seed=1" and parent.data.tags["node"] == "pipeline"
    for run in (parent, found):
        assert run.info.user_id == run.data.tags["mlflow.user"] == getpass.getuser()
        assert run.data.tags["mlflow.source.name"] == sys.argv[0]
    assert parent.data.tags["mlflow.source.git.commit"] == "abc-dirty"
    assert [f.path for f in client(ledger).list_artifacts(ledger.parent.run_id)] == ["config.yaml"]
    assert (place / "mlartifacts").is_dir()


def test_a_history_adds_only_the_points_that_are_missing(place: Path) -> None:
    ledger = make_ledger(place)
    handle = ledger.start_node("train_a", tags={}, params={})
    recorded = points(*range(1, 700))
    with handle.open() as run:
        run.log_metrics({"loss": 1.0, "lr": 0.1}, step=1, time_ms=1001)
        run.log_history(recorded)  # as a worker that resumes does
    ledger.finish("train_a", "FINISHED", history=recorded)
    ledger.close("FINISHED")
    assert history(ledger, handle.run_id, "loss") == [(p["step"], p["loss"]) for p in recorded]


def test_datasets_of_a_run_are_named_once(place: Path) -> None:
    dataset: Any = SimpleNamespace(
        uri="s3://key:secret@bucket/data?region=eu&session_token=secret",
        manifest=SimpleNamespace(dataset="photos"),
        split_digest=lambda **_: "d" * 32,
        num_images=lambda split: 5,
    )
    ledger = make_ledger(place)
    handle = ledger.start_node("train_a", tags={}, params={})
    for _ in range(2):  # once more after a restart
        with handle.open() as run:
            run.log_dataset(dataset, resolution=8, bits=3, split="train", context="training")
    (found,) = client(ledger).get_run(handle.run_id).inputs.dataset_inputs
    assert (found.dataset.name, found.dataset.digest) == ("photos-8px-3bit-train", "d" * 32)
    assert found.dataset.source == '{"uri": "s3://bucket/data"}' and found.dataset.source_type == "s3"
    assert json.loads(found.dataset.profile) == {"num_rows": 5, "bits": 3}
    assert [(tag.key, tag.value) for tag in found.tags] == [("mlflow.data.context", "training")]
    ledger.close("FINISHED")


def test_the_machine_is_watched_until_the_run_is_closed(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.05")
    ledger = make_ledger(place)
    handle = ledger.start_node("train_a", tags={}, params={})
    with handle.open() as run, handle.open() as other:
        run.watch_machine()
        other.watch_machine(name="node_1")
        deadline = time.monotonic() + 120
        wanted = {"system/system_memory_usage_megabytes", "system/node_1/cpu_utilization_percentage"}
        while not wanted <= set(client(ledger).get_run(handle.run_id).data.metrics):
            assert time.monotonic() < deadline
    assert not [thread for thread in threading.enumerate() if thread.name == "SystemMetricsMonitor"]
    ledger.close("FINISHED")


def test_nothing_secret_reaches_the_records(
    place: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    secret = "hunter2secret"
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", f"{secret}-of-aws")
    uri = default_uri(open_store(place), name="demo")
    storage = f"s3://me:{secret}@bucket/demo?session_token={secret}"
    ledger = Ledger(uri, experiment="demo", run_folder=storage)
    config = {"storage": storage, "note": f"the key is {secret}-of-aws"}
    ledger.start_pipeline(tags={"where": storage}, params=config, config=f"storage: {storage}\n")
    handle = ledger.start_node("train_a", tags={"where": storage}, params=config)
    with handle.open() as run:
        run.set_tags({"more": storage})
        run.log_text(f"{secret}-of-aws", "note.txt")
    ledger.close("FINISHED")
    Ledger(uri, experiment="demo", run_folder=storage).start_pipeline(tags={}, params={}, config="")
    assert client(ledger).get_run(handle.run_id).info.status == "KILLED", "the masked folder is still one's own"
    recorded = []
    for run_id in (ledger.parent.run_id, handle.run_id):
        found = client(ledger).get_run(run_id)
        recorded.append(str(found.to_dictionary()))
        for file in Path(found.info.artifact_uri.removeprefix("file://")).rglob("*.*"):
            recorded.append(file.read_text())
    assert len(recorded) == 4 and "bucket/demo" in recorded[0] and "***" in recorded[1]
    assert secret not in "".join(recorded)
    database = RunHandle(f"postgresql://me:{secret}@127.0.0.1:1/mlflow", "r1")
    assert secret not in repr(database) and "r1" in repr(database)
    tracking._server(database.uri).failed(f"no answer from {database.uri}", pause=False)
    assert "no answer" in caplog.text and secret not in caplog.text


def test_a_servers_login_stays_out_of_its_address_and_travels_unseen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=r"\*@h:5000/mlflow holds a login; set MLFLOW_TRACKING_USERNAME and "):
        default_uri(open_store(tmp_path), name="demo", configured="https://anna:p%40ss-word@h:5000/mlflow")
    uri, login = "https://h:5000/mlflow", dict(zip(LOGIN, ("anna", "p@ss-word", "token"), strict=True))
    for name, value in login.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(tracking, "make_client", lambda uri: Refusing())
    handle = pickle.loads(pickle.dumps(Ledger(uri).start_node("a", tags={}, params={}, continue_id="r1")))
    assert "p@ss-word" not in repr(handle) and handle.at("r2").login == handle.login
    for name in LOGIN:
        monkeypatch.delenv(name, raising=False)
    handle.open().close()
    assert {name: os.environ[name] for name in LOGIN} == login


def test_a_skipped_node_points_to_the_run_it_reuses(place: Path) -> None:
    ledger = make_ledger(place)
    ledger.reuse_node("train_a", tags={"fingerprint": "f"}, reused_run="run7")
    found = client(ledger).get_run(ledger._ids["train_a"])
    assert found.info.status == "FINISHED" and found.data.tags["reused_run"] == "run7"
    assert found.data.metrics == {}
    page = f"#/experiments/{ledger.experiment_id}/runs/run7"
    assert f"({page}/model-metrics?workflowType=machine_learning)" in found.data.tags[tracking.NOTE]


def test_the_experiment_has_a_view_of_the_stages_that_people_may_change(place: Path) -> None:
    ledger = make_ledger(place)
    for node in ("train_a", "train_b", "evaluate"):
        ledger.start_node(node, tags={}, params={})
    ledger.reuse_node("train_c", tags={}, reused_run="run7")
    experiment = client(ledger).get_experiment(ledger.experiment_id)
    view = json.loads(json.loads(experiment.tags["mlflow.sharedViewState.stages"])["state"])
    charts = [(chart["type"], chart["metricKey"]) for chart in view["compareRunCharts"]]
    assert charts == [
        (kind, f"{split}/bits_per_dim") for kind, split in zip(("LINE", "LINE", "BAR"), SPLITS, strict=True)
    ]
    shown = client(ledger).search_runs(
        [ledger.experiment_id],
        f"{view['searchFilter']} and tags.run_folder = '{ledger.run_folder}'",
        order_by=[view["orderByKey"] + " DESC"],
        max_results=2,
    )
    assert [run.info.run_name for run in shown] == ["train_b", "train_a"]
    client(ledger).set_experiment_tag(ledger.experiment_id, "mlflow.note.content", "mine")
    assert client(ledger).get_experiment(make_ledger(place).experiment_id).tags["mlflow.note.content"] == "mine"


def test_a_launch_killed_while_the_tables_are_made_breaks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A database appears with all its tables; MLflow could not complete some of them."""
    (file := tmp_path / "mlflow.db").touch()
    with contextlib.closing(sqlite3.connect(f"{file}.new")) as left:
        left.execute("CREATE TABLE spans (x INTEGER)")
    empty, replace = [], Path.replace
    monkeypatch.setattr(
        Path, "replace", lambda new, target: empty.append(not file.stat().st_size) or replace(new, target)
    )
    found = tracking.make_client(f"sqlite:///{file}").search_experiments()
    assert empty == [True] and [experiment.name for experiment in found] == ["Default"]


def test_runs_of_a_killed_driver_are_closed_and_the_unfinished_one_continues(
    place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    killed = make_ledger(place)
    handle = killed.start_node("train_a", tags={"attempt": "1"}, params={"a": 1})
    with handle.open() as run:
        run.log_metrics({"x": 1.0}, step=1)
    made = killed.start_node("train_b", tags={}, params={})  # its output was finished, its run was not
    neighbour = make_ledger(place, run_folder="/runs/other")
    ledger = make_ledger(place)
    status = {run_id: client(ledger).get_run(run_id).info.status for run_id in (handle.run_id, killed.parent.run_id)}
    assert set(status.values()) == {"KILLED"}
    assert client(ledger).get_run(neighbour.parent.run_id).info.status == "RUNNING"
    again = ledger.start_node("train_a", tags={"attempt": "1"}, params={"a": 1}, continue_id=handle.run_id)
    with again.open() as run:
        run.log_metrics({"x": 2.0}, step=2)
    retried = ledger.start_node("train_a", tags={"attempt": "1"}, params={"a": 1})
    assert retried.run_id == again.run_id == handle.run_id
    found = client(ledger).get_run(handle.run_id)
    assert found.info.status == "RUNNING" and found.data.tags[PARENT_TAG] == ledger.parent.run_id
    ledger.finish("train_a", "FINISHED")
    assert history(ledger, again.run_id, "x") == [(1, 1.0), (2, 2.0)]
    assert client(ledger).get_run(made.run_id).info.status == "KILLED"
    ledger.reuse_node("train_b", tags={}, reused_run=made.run_id)
    ledger.reuse_node("train_c", tags={}, reused_run="of a database that is gone")
    assert client(ledger).get_run(made.run_id).info.status == "FINISHED" and not caplog.records
    for left in (ledger, neighbour):
        left.close("FINISHED")


def test_a_run_that_the_database_does_not_know_is_made_anew(place: Path) -> None:
    ledger = make_ledger(place)
    handle = ledger.start_node("train_a", tags={}, params={"x": 1}, continue_id="0" * 32)
    assert handle.run_id and handle.run_id != "0" * 32
    assert client(ledger).get_run(handle.run_id).data.params == {"x": "1"}
    ledger.close("FINISHED")


def test_without_mlflow_nothing_is_recorded_and_nothing_fails() -> None:
    ledger = Ledger()
    ledger.start_pipeline(tags={}, params={}, config="b")
    handle = ledger.start_node("a", tags={}, params={})
    with handle.open() as run, handle.at("r7").open() as other:
        for each in (run, other):
            log_everything(each)
    assert ledger.finish("a", "FINISHED", metrics={"a": 1.0}, history=points(1)) is None
    ledger.close("FINISHED")


def log_everything(run: tracking.NodeRun) -> None:
    run.watch_machine()
    run.log_metrics({"a": 1.0}, step=1)
    run.log_history(points(1))
    run.log_image(np.zeros((2, 2, 3), np.uint8), key="x")
    run.log_text("text", "file")
    run.set_tags({"a": "b"})


@pytest.fixture(params=["refuses connections", "never answers"])
def dead_server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if request.param == "never answers":
            listener.listen(100)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_a_server_that_never_answers_is_one_warning_and_metrics_do_not_ask_it(
    dead_server: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def request(*arguments: Any, **options: Any) -> Any:
        asked.append(threading.current_thread().name)
        return send(*arguments, **options)

    asked, send = list[str](), requests.Session.request
    monkeypatch.setattr(requests.Session, "request", request)
    monkeypatch.setattr(tracking, "CLOSE_SEC", 3)
    handle = RunHandle(dead_server, f"run-{dead_server[-5:]}", "1")
    with handle.open() as run:
        for step in range(20):  # goes through MLflow's queue, which fails
            run.log_metrics({"a": 1.0}, step=step)
        assert all(name.startswith("MLflow") for name in asked), "its queue's threads"
    ledger = Ledger(dead_server, experiment="demo", run_folder="x")
    ledger.start_pipeline(tags={}, params={}, config="")
    node = ledger.start_node("a", tags={}, params={})
    with node.open() as silent, handle.open() as run:
        log_everything(silent)
        log_everything(run)
    assert ledger.finish("a", "FINISHED", metrics={"a": 1.0}, history=points(1)) is None
    ledger.close("FINISHED")
    ours = [name for name in asked if not name.startswith("MLflow")]
    assert len(ours) == 1, "the end of the launch asks once more; nothing else asks a server that has failed"
    (warning,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert dead_server in warning.getMessage() and "the work continues" in warning.getMessage()
    assert "ERROR" not in capfd.readouterr().err, "MLflow's own line per batch"


def test_a_stopped_launch_waits_for_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, answers, answered = threading.Event(), threading.Event(), threading.Event()

    def make_client(uri: str) -> None:
        asked.set()
        answers.wait(60)
        answered.set()

    monkeypatch.setattr(tracking, "make_client", make_client)
    ledger = Ledger("http://hangs", experiment="demo", run_folder="x")
    ledger._ids["a"] = "run-a"
    ledger.finish("a", "KILLED")
    ledger.close("KILLED")
    assert asked.wait(60) and not answered.is_set()
    answers.set()


def test_a_server_that_is_away_at_the_start_has_everything_in_the_end(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs that could not be opened: the parent, a node that ends meanwhile, one that is skipped, one that ends later
    and is started twice."""
    make_client, away = tracking.make_client, True

    def client_if_there(uri: str) -> Any:
        if away:
            raise ConnectionError("away")
        return make_client(uri)

    left_open = make_ledger(place, run_folder="/runs/late")
    tracking._server.cache_clear()
    monkeypatch.setattr(tracking, "make_client", client_if_there)
    before = int(time.time() * 1000)
    ledger = make_ledger(place, run_folder="/runs/late")
    handles = {node: ledger.start_node(node, tags={"stage": node}, params={"x": 1}) for node in ("a", "b")}
    ledger.reuse_node("c", tags={}, reused_run="run7")
    with handles["a"].open() as run:
        run.log_metrics({"loss": 1.0}, step=1)
    assert ledger.finish("a", "FINISHED", metrics={"valid": 3.0, "loss": 9.0}, history=points(1, 2)) is None
    after = int(time.time() * 1000)
    away = False
    handles["b"] = ledger.start_node("b", tags={"stage": "b"}, params={"x": 1})
    assert handles["b"].run_id is None, "a server that has failed is left alone for a while"
    ledger.finish("b", "FAILED")
    ledger.close("FAILED")
    runs = client(ledger).search_runs([ledger.experiment_id], "tags.run_folder = '/runs/late'")
    found = {run.info.run_name: run for run in runs if run.info.run_id != left_open.parent.run_id}
    status = {"demo seed=1": "FAILED", "a": "FINISHED", "b": "FAILED", "c": "FINISHED"}
    assert len(runs) == 5 and {node: run.info.status for node, run in found.items()} == status
    assert all(found[node].data.tags[PARENT_TAG] == ledger.parent.run_id for node in "abc")
    assert found["a"].data.params == {"x": "1"} and found["a"].data.metrics == {"valid": 3.0, "loss": 0.5, "lr": 0.1}
    assert history(ledger, found["a"].info.run_id, "loss") == [(1, 1.0), (2, 0.5)]
    assert before <= found["a"].info.start_time <= found["a"].info.end_time <= after
    assert found["c"].data.tags["reused_run"] == "run7" and found["demo seed=1"].data.params == {"seed": "1"}
    assert f"experiments/{ledger.experiment_id}/runs/run7" in found["c"].data.tags[tracking.NOTE]
    assert [f.path for f in client(ledger).list_artifacts(ledger.parent.run_id)] == ["config.yaml"]
    # What an earlier driver left open is closed before runs of this launch are opened, and only that.
    assert client(ledger).get_run(left_open.parent.run_id).info.status == "KILLED"


def test_a_missing_database_file_is_not_created_by_a_worker(tmp_path: Path) -> None:
    with RunHandle(f"sqlite:///{tmp_path}/mlflow.db", "r1").open() as run:
        run.log_metrics({"a": 1.0})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("harm", ["locked", "no database"])
def test_a_database_that_cannot_be_used_is_one_warning_and_mlflow_is_not_asked(
    harm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """MLflow would try again for minutes, in each process."""
    file = tmp_path / "mlflow.db"
    monkeypatch.setattr(tracking, "LOCKED_SEC", 0.0)
    monkeypatch.setattr(tracking, "make_client", lambda uri: pytest.fail("MLflow was asked"))
    with contextlib.closing(sqlite3.connect(file)) as database:
        if harm == "locked":
            database.execute("BEGIN EXCLUSIVE")
        else:
            file.write_bytes(b"no database" * 100)
        ledger = make_ledger(tmp_path)
        ledger.start_node("a", tags={}, params={})
        with RunHandle(ledger.uri, "run", "1").open() as run:
            log_everything(run)
        ledger.finish("a", "FINISHED", metrics={"a": 1.0})
        ledger.close("FINISHED")
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert str(file) in warning and ("database is locked" if harm == "locked" else "not a database") in warning


def test_of_two_first_starts_one_makes_the_tables_of_a_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside, together = list[int](), threading.Event()

    class Client:
        def __init__(self, tracking_uri: str) -> None:
            inside.append(1)
            if len(inside) > 1:
                together.set()
            together.wait(0.1)
            inside.pop()

    monkeypatch.setattr("mlflow.tracking.MlflowClient", Client)
    monkeypatch.setattr(tracking, "_follow_move", lambda file: None)
    (tmp_path / "mlflow.db").touch()
    starts = [
        threading.Thread(target=tracking.make_client, args=(f"sqlite:///{tmp_path}/mlflow.db",)) for _ in range(2)
    ]
    for each in starts:
        each.start()
    for each in starts:
        each.join()
    assert not together.is_set()


class Refusing:
    """A server that answers and refuses one call."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error or ValueError("MLflow does not like it")
        self.texts: list[str] = []
        self.refused = 0

    def log_text(self, run_id: str, text: str, file: str) -> None:
        if text == "refused":
            self.refused += 1
            raise self.error
        self.texts.append(text)


@pytest.mark.parametrize("error", [ValueError("invalid name"), PermissionError("artifact folder")])
def test_a_call_that_mlflow_refuses_stops_no_other(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Refusing(error)
    monkeypatch.setattr(tracking, "make_client", lambda uri: fake)
    with RunHandle("http://fake", "r").open() as run:
        run.log_text("refused", "1")
        run.log_text("taken", "2")
    assert fake.texts == ["taken"] and fake.refused == 1
