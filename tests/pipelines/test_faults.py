"""Faults: which errors count as the infrastructure's, and a training that meets one after another.

python -m pytest tests/pipelines/test_faults.py
"""

from __future__ import annotations

import errno
import json
import os
import pickle
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
from ray.data.exceptions import UserCodeException
from ray.exceptions import ActorDiedError, NodeDiedError, OutOfMemoryError, RayTaskError, WorkerCrashedError
from ray.train import ControllerError, WorkerGroupError
from ray.train.v2._internal.exceptions import WorkerGroupStartupTimeoutError, WorkerHealthCheckFailedError
from toy import training
from toy.training import MlflowServer

from data_prep.files import UserError
from pipelines.dag.faults import is_infrastructure, root_cause


def from_task(error: Exception) -> Exception:
    """As it arrives from a Ray task."""
    return pickle.loads(
        pickle.dumps(RayTaskError("f", f"{type(error).__name__}: {error}", error))
    ).as_instanceof_cause()


DEAD = WorkerHealthCheckFailedError("no answer", ActorDiedError())
PEER = RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4711")
S3 = "When uploading part for key 'a' in bucket 'b': AWS Error "
LOST = {
    "process": WorkerCrashedError(),
    "machine": NodeDiedError("node died"),
    "memory": OutOfMemoryError("task was killed"),
    "actor": ActorDiedError(),
    "disk": OSError(errno.EIO, "input/output error"),
    "nfs": OSError(errno.ESTALE, "stale file handle"),
    "network": ConnectionResetError("reset"),
    "object store": OSError(S3 + "NETWORK_CONNECTION during UploadPart operation: curlCode: 7, Could not connect"),
    "object store busy": OSError(S3 + "SLOW_DOWN during UploadPart operation: reduce your rate"),
    "in a task": from_task(OSError(errno.EIO, "input/output error")),
    "training worker": WorkerGroupError("x", {0: RuntimeError("other"), 1: DEAD}),
    "peer of a training worker": WorkerGroupError("x", {0: PEER}),
    "training worker and its peers": WorkerGroupError("x", {0: PEER, 1: DEAD, 2: PEER}),
    "memory of a training worker": WorkerGroupError("x", {0: WorkerHealthCheckFailedError("", OutOfMemoryError("x"))}),
    "training group": ControllerError(WorkerGroupStartupTimeoutError(2)),
    "reading": from_task(UserCodeException("OSError: " + S3 + "NETWORK_CONNECTION")),
}
OWN = {
    "value": ValueError("loss is nan"),
    "user": UserError("no such folder"),
    "missing": FileNotFoundError(errno.ENOENT, "no such file"),
    "permission": PermissionError(errno.EACCES, "permission denied"),
    "full disk": OSError(errno.ENOSPC, "no space left on device"),
    "access": OSError(S3 + "ACCESS_DENIED during UploadPart operation: access denied"),
    "bucket": OSError(S3 + "NO_SUCH_BUCKET during UploadPart operation: it does not exist"),
    "in a task": from_task(KeyError("x")),
    "training worker": WorkerGroupError("x", {0: ValueError("nan"), 1: ValueError("nan")}),
    "one of the training workers": WorkerGroupError("x", {0: PEER, 1: ValueError("nan")}),
    "bad image": from_task(UserCodeException("ValueError: photo.jpg is no image")),
}


@pytest.mark.parametrize("error", LOST.values(), ids=LOST)
def test_lost(error: Exception) -> None:
    assert is_infrastructure(error)


@pytest.mark.parametrize("error", OWN.values(), ids=OWN)
def test_own(error: Exception) -> None:
    assert not is_infrastructure(error)


def test_the_cause_is_told_and_not_what_follows_from_it() -> None:
    own = ValueError("nan")
    assert root_cause(WorkerGroupError("x", {0: PEER, 1: own})) is own
    assert type(root_cause(WorkerGroupError("x", {0: PEER, 1: own, 2: DEAD}))) is ActorDiedError
    assert root_cause(WorkerGroupError("x", {0: PEER, 1: PEER})) is PEER


def test_an_error_that_the_code_made_of_another_is_its_own() -> None:
    try:
        try:
            raise ConnectionResetError("reset")
        except ConnectionResetError as error:
            raise ValueError("photo.jpg cannot be read") from error
    except ValueError as error:
        assert not is_infrastructure(error)


OUT_OF_MEMORY = """
import os, sys
from pathlib import Path
os.environ["RAY_memory_usage_threshold"] = "0"  # Ray's monitor finds the machine out of memory whatever is used
from data_prep import files as storage
from pipelines import cluster
from pipelines.dag import progress
from pipelines.dag.node import Node
from pipelines.dag.plan import plan as make_plan
from pipelines.dag.run import run
from pipelines.ledger import silent_ledger
session = cluster.connect(num_cpus=1, python_path=(Path(sys.argv[1]),))
node = Node("a", "toy.nodes:wait_for_ever", options={"place": sys.argv[2]}, max_failures=1)
plan = make_plan([node], storage.open_store(sys.argv[2]), packages=("toy",), root=Path(sys.argv[1]))
report = run(plan, cluster=session, ledger=silent_ledger(), display=progress.PlainDisplay())
print("END", report.nodes["a"].state, report.nodes["a"].error)
"""


@pytest.mark.slow
def test_a_node_killed_for_want_of_memory_is_tried_again(tmp_path: Path) -> None:
    toys = Path(__file__).parent / "toys"
    command = [sys.executable, "-c", OUT_OF_MEMORY, str(toys), str(tmp_path)]
    done = subprocess.run(command, env=training.environment(), capture_output=True, text=True, timeout=120)
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
    _, alive = psutil.wait_procs(processes, timeout=30)
    assert not alive, f"left behind: {alive}"


@pytest.mark.slow
def test_a_training_that_meets_every_fault_ends_as_if_there_had_been_none(
    unbroken: Path, tmp_path: Path, mlflow_server: MlflowServer
) -> None:
    """Killed worker, MLflow away, Ctrl-C, killed driver: one attempt, one MLflow run, the very same weights."""
    training.copy_data(unbroken, tmp_path)
    options = [f"tracking.uri={mlflow_server.uri}", "resources.retry_wait_sec=0.5"]

    run = training.launch(tmp_path, *options)
    training.wait_for_step(tmp_path, 20, run)
    for worker in training.train_workers(run.pid):
        worker.kill()
    training.wait_for_step(tmp_path, 60, run)  # it went on from a checkpoint
    mlflow_server.kill()
    training.wait_for_step(tmp_path, 100, run)  # MLflow is away: training does not care
    mlflow_server.start()
    processes = family(run)
    os.killpg(run.pid, signal.SIGINT)  # as a terminal sends Ctrl-C: to the whole group
    output = training.finish(run, code=130)
    assert "lost (" in output and "starts: try 2 of 4" in output
    assert "interrupted; the same command goes on from here" in output and "Traceback" not in output
    assert_all_end(processes)
    assert not (tmp_path / "debug/run.lock").exists()
    client = MlflowClient(mlflow_server.uri)
    (interrupted,) = runs_of(client, training.NODE)
    assert interrupted.info.status == "KILLED"

    run = training.launch(tmp_path, *options)
    stopped_at = training.committed(tmp_path)
    training.wait_for_step(tmp_path, stopped_at + 20, run)
    processes = family(run)
    run.kill()
    run.wait()
    assert_all_end(processes)

    output = training.finish(training.launch(tmp_path, *options))
    assert re.search(r"train_size_upscale +run +attempt \S+ was interrupted; continues it", output), output
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
