"""MLflow over HTTP: a server that dies and comes back, and one behind a login.

python -m pytest tests/pipelines/tracking/test_tracking_server.py
"""

from __future__ import annotations

import base64
import dataclasses
import http.server
import logging
import os
import pickle
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from toy.training import MlflowServer

from data_prep.files import open_store
from pipelines import tracking
from pipelines.nodes.registry import CANDIDATE, CHAMPION, StageModel, register
from pipelines.tracking import LOGIN, Ledger, default_uri

pytestmark = pytest.mark.faults
USER, PASSWORD = "anna", "hunter2secret"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowServer]:
    """Not started."""
    made = MlflowServer(tmp_path_factory.mktemp("server"))
    yield made
    made.kill()


@pytest.fixture(scope="module")
def door(server: MlflowServer) -> Iterator[str]:
    """Address of a proxy that lets in who logs in (HTTP Basic, what MLflow's own login asks for)."""
    wanted = "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
    if server.process is None:
        server.start()

    class Door(http.server.BaseHTTPRequestHandler):
        def _pass_on(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if self.headers.get("Authorization") != wanted:
                return self._answer(401, b"who are you?", "text/plain")
            kept = {k: v for k, v in self.headers.items() if k.lower() in ("content-type", "accept")}
            request = urllib.request.Request(server.uri + self.path, body or None, kept, method=self.command)
            try:
                with urllib.request.urlopen(request, timeout=30) as reply:
                    self._answer(reply.status, reply.read(), reply.headers["Content-Type"])
            except urllib.error.HTTPError as error:
                self._answer(error.code, error.read(), error.headers["Content-Type"])

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _pass_on

        def _answer(self, status: int, body: bytes, kind: str | None) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind or "application/octet-stream")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    proxy = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Door)
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{proxy.server_port}"
    proxy.shutdown()


@pytest.fixture(autouse=True)
def no_login(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LOGIN:
        monkeypatch.setenv(name, "")  # registered with monkeypatch, so that what a test sets goes away
        monkeypatch.delenv(name)
    tracking._server.cache_clear()


def opened(uri: str, tmp_path: Path, experiment: str) -> Ledger:
    uri = default_uri(open_store(tmp_path), name=experiment, configured=uri)
    ledger = Ledger(uri, experiment=experiment, run_folder=str(tmp_path))
    ledger.start_pipeline(tags={}, params={"seed": 1}, config="name: x\n")
    return ledger


def test_a_server_that_is_dead_at_the_start_and_in_the_middle_has_every_point_in_the_end(
    server: MlflowServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    monkeypatch.setattr(tracking, "PAUSE_SEC", 0.0)  # what a launch of hours does is done in seconds here
    monkeypatch.setattr(tracking, "CLOSE_SEC", 5.0)

    def trained(ledger: Ledger, node: str) -> list[dict[str, float]]:
        """Logs a curve with a picture, and returns the recorded history. Kills the server of node b in the middle."""
        handle = ledger.start_node(node, tags={"stage": node}, params={"lr": 0.1})
        recorded = []
        with handle.open() as run:
            for step in range(1, 21):
                recorded.append({"step": step, "time_ms": int(time.time() * 1000), "loss": 1.0 / step})
                run.log_metrics({"loss": 1.0 / step}, step=step, time_ms=recorded[-1]["time_ms"])
                if step % 10 == 0:
                    run.log_image(np.zeros((4, 4, 3), np.uint8), key="samples", step=step)
                if node == "b" and step == 10:
                    run.close()
                    server.kill()
        if node == "b":
            server.start()
        ledger.finish(node, "FINISHED", metrics={"valid": 3.0}, history=recorded)
        return recorded

    assert server.process is None
    ledger = opened(server.uri, tmp_path, "dies")
    histories = {"a": trained(ledger, "a")}
    server.start()
    histories["b"] = trained(ledger, "b")
    histories["c"] = trained(ledger, "c")
    ledger.close("FINISHED")
    client = tracking.make_client(server.uri)
    runs = client.search_runs([ledger.experiment_id])
    found = {run.info.run_name: run for run in runs}
    assert len(runs) == 4 and {run.info.status for run in runs} == {"FINISHED"}
    for node, recorded in histories.items():
        curve = [(m.step, m.timestamp, m.value) for m in client.get_metric_history(found[node].info.run_id, "loss")]
        assert sorted(curve) == [(entry["step"], entry["time_ms"], entry["loss"]) for entry in recorded], node
        assert found[node].data.params == {"lr": "0.1"} and found[node].data.metrics["valid"] == 3.0
    assert len([record for record in caplog.records if record.name == "pipelines.tracking"]) == 1


def test_everything_is_recorded_behind_a_login(
    door: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", USER)
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", PASSWORD)
    ledger = opened(door, tmp_path, "login")
    handle = ledger.start_node("train_a", tags={"stage": "a"}, params={"lr": 0.1})
    # Another machine: a process without the login in its environment, which gets it with the handle.
    code = (
        "import pickle, sys\n"
        "handle = pickle.loads(sys.stdin.buffer.read())\n"
        "print(handle)\n"
        "with handle.open() as run:\n"
        "    run.log_metrics({'valid/bits_per_dim': 1.5}, step=3)\n"
    )
    env = {key: value for key, value in os.environ.items() if key not in LOGIN}
    worker = subprocess.run(
        [sys.executable, "-c", code], input=pickle.dumps(handle), env=env, capture_output=True, timeout=120, check=True
    )
    for bits in (1.5, 1.4):
        pq.write_table(pa.table({"key": ["x", "y"], "a": [bits] * 2}), tmp_path / f"{bits}.parquet")
    scores = str(tmp_path / "1.5.parquet")
    model = StageModel("a", str(tmp_path / "step-00000003"), "1", 1.5, 0.1, "digest", "dims", scores)
    better = {"test_bits_per_dim": 1.4, "scores": str(tmp_path / "1.4.parquet")}
    with handle.open() as run:
        run.log_image(np.zeros((4, 4, 3), np.uint8), key="samples", step=3)
        register(run, model)
        register(run, dataclasses.replace(model, attempt="2", checkpoint="s3://bucket/step-4", **better))
    ledger.finish("train_a", "FINISHED")
    ledger.close("FINISHED")

    client = tracking.make_client(ledger.uri)
    found = client.get_run(handle.run_id)
    assert found.data.metrics["valid/bits_per_dim"] == 1.5 and found.data.params == {"lr": "0.1"}
    assert [file.path for file in client.list_artifacts(ledger.parent.run_id)] == ["config.yaml"]
    aliases = client.get_registered_model("login.a").aliases
    assert {alias: str(version) for alias, version in aliases.items()} == {CANDIDATE: "2", CHAMPION: "2"}
    # A server takes no local path as a model's source: a note that says where it is lies among the run's artifacts.
    local, remote = (client.get_model_version("login.a", version) for version in ("1", "2"))
    assert local.tags["checkpoint"] == str(tmp_path / "step-00000003")
    assert local.source == f"runs:/{handle.run_id}/checkpoint"
    assert [file.path for file in client.list_artifacts(handle.run_id, "checkpoint")] == ["checkpoint/location.json"]
    assert remote.source == "s3://bucket/step-4"
    shown = caplog.text + worker.stdout.decode() + worker.stderr.decode() + repr(handle)
    assert PASSWORD not in shown and PASSWORD not in str(found.to_dictionary())


def test_a_wrong_password_is_one_warning_without_it(
    door: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", USER)
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", f"wrong{PASSWORD}")
    with caplog.at_level(logging.WARNING):
        ledger = opened(door, tmp_path, "wrong")
        handle = ledger.start_node("a", tags={}, params={})
        ledger.finish("a", "FINISHED", metrics={"a": 1.0})
        ledger.close("FINISHED")
    assert handle.run_id is None
    ours = [record.getMessage() for record in caplog.records if record.name == "pipelines.tracking"]
    assert len(ours) == 1 and "the work continues" in ours[0] and "401" in ours[0]
    assert PASSWORD not in caplog.text
