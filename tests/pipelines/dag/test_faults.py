"""Faults: a node that runs out of memory, and a training that meets one fault after another.

python -m pytest tests/pipelines/dag/test_faults.py
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from mlflow.entities import Run
from mlflow.tracking import MlflowClient
from toy import training
from toy.diamond import TOYS
from toy.training import MlflowServer

pytestmark = pytest.mark.faults

OUT_OF_MEMORY = """
import os, sys
os.environ["RAY_memory_usage_threshold"] = "0"  # Ray's monitor finds the machine out of memory whatever is used
from data_prep import files as storage
from pipelines import cluster
from pipelines.dag.node import Node
from pipelines.dag.progress import Display
from pipelines.dag.run import run
from toy.diamond import decided
from toy.nodes import Toy
from toy.silent import SilentTracker
session = cluster.connect(num_cpus=1)
node = Node("a", "toy.nodes:wait_for_ever", config=Toy(place=sys.argv[1]), max_failures=1)
plan = decided(storage.open_store(sys.argv[1]), [node])
report = run(plan, tracker=SilentTracker(), display=Display(), capacity=session.capacity)
print("END", report["a"].state, report["a"].error)
"""


def test_a_node_killed_for_running_out_of_memory_is_retried(tmp_path: Path) -> None:
    command = [sys.executable, "-c", OUT_OF_MEMORY, str(tmp_path)]
    done = subprocess.run(
        command,
        env=training.environment(PYTHONPATH=f"{training.ROOT}:{TOYS}"),
        capture_output=True,
        text=True,
        timeout=120,
    )
    lost = [line for line in done.stdout.splitlines() if "lost (OutOfMemoryError" in line]
    assert len(lost) == 1 and "[a] starts: try 2 of 2" in done.stdout, done.stdout + done.stderr
    assert "END failed OutOfMemoryError" in done.stdout


@pytest.fixture
def mlflow_server(tmp_path: Path) -> Iterator[MlflowServer]:
    server = MlflowServer(tmp_path / "mlflow").start()
    yield server
    server.kill()


def family(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def assert_all_end(processes: list[psutil.Process]) -> None:
    """After a killed driver, Ray's agents look for the control store for a minute before they end."""
    _, alive = psutil.wait_procs(processes, timeout=100)
    assert not alive, f"left behind: {alive}"


def test_a_training_that_meets_every_fault_ends_as_if_there_had_been_none(
    unbroken: Path, tmp_path: Path, mlflow_server: MlflowServer
) -> None:
    """Killed worker, MLflow away, Ctrl-C, killed driver, a flipped bit: one attempt, one MLflow run, equal weights."""
    training.copy_data(unbroken, tmp_path)
    options = [f"tracking.uri={mlflow_server.uri}", "resources.retry_wait_sec=0.5"]

    run = training.launch(tmp_path, *options)
    training.wait_for_step(tmp_path, 20, run)
    for worker in training.train_workers(run.pid):
        worker.kill()
    training.wait_for_step(tmp_path, 60, run)  # it went on from a checkpoint
    mlflow_server.kill()
    training.wait_for_step(tmp_path, 100, run)  # MLflow is away: training does not care
    with training.held(training.train_workers(run.pid)):  # the server takes seconds to start
        mlflow_server.start()
        processes = family(run)
        os.killpg(run.pid, signal.SIGINT)  # as a terminal sends Ctrl-C: to the whole group
    output = training.finish(run, code=130)
    assert "lost (" in output and "starts: try 2 of 4" in output
    assert "interrupted; the same command resumes from here" in output and "Traceback" not in output
    assert_all_end(processes)
    assert not (tmp_path / "debug/run.lock").exists()
    client = MlflowClient(mlflow_server.uri)
    (interrupted,) = runs_of(client, training.NODE)
    assert interrupted.info.status == "KILLED"

    run = training.launch(tmp_path, *options)
    training.wait_for(
        lambda: training.train_workers(run.pid), "a train worker", run
    )  # after what lies there is counted
    training.wait_for_step(tmp_path, training.committed(tmp_path) + 20, run)
    with training.held(training.train_workers(run.pid)):
        processes = family(run)
        run.kill()
        run.wait()
    assert_all_end(processes)
    (attempt,) = training.attempts(tmp_path)
    newest = max(file.parent for file in attempt.glob("size_upscale-*/step-*/checksums.json"))  # one that is whole
    weights = bytearray((newest / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (newest / "model.safetensors").write_bytes(weights)

    output = training.finish(training.launch(tmp_path, *options))
    assert re.search(r"train_size_upscale +run +attempt \S+ was interrupted; continues it", output), output
    assert f"{newest.name} is damaged (model.safetensors does not match its checksum)" in output, output
    assert re.search(r"prepare_data +- +not selected; up to date", output)
    (attempt,) = training.attempts(tmp_path)
    assert training.weights(attempt) == training.weights(*training.attempts(unbroken))
    (done,) = runs_of(client, training.NODE)
    assert done.info.run_id == interrupted.info.run_id and done.info.status == "FINISHED"
    assert done.data.tags["restarts"] == "3"
    marks = client.get_metric_history(done.info.run_id, "restarts")
    assert [mark.value for mark in marks] == [1, 2, 3] and sorted(mark.step for mark in marks) == [
        m.step for m in marks
    ]
    assert loss_curve(client, done) == reference_curve(unbroken)

    again = training.finish(training.launch(tmp_path, *options, "--dry-run"))
    assert re.search(r"train_size_upscale +skip +up to date", again)


def runs_of(client: MlflowClient, node: str) -> list[Run]:
    """The node's runs that did some work."""
    experiment = client.get_experiment_by_name("debug")
    found = client.search_runs([experiment.experiment_id], f"tags.node = '{node}'")
    return [run for run in found if "reused_run" not in run.data.tags]


def loss_curve(client: MlflowClient, run: Run) -> list[tuple[int, float]]:
    """Steps done twice, before and after an interruption, must have given the same number."""
    points = client.get_metric_history(run.info.run_id, "train/bits_per_dim")
    return sorted({(point.step, point.value) for point in points})


def reference_curve(storage: Path) -> list[tuple[int, float]]:
    (attempt,) = training.attempts(storage)
    history = json.loads((attempt / "history.json").read_text())
    return [(entry["step"], entry["train/bits_per_dim"]) for entry in history if "train/bits_per_dim" in entry]
