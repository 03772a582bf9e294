"""`ray job submit` runs the pipeline on a cluster of its own, from an upload, with its progress in the job's log.

Other Rays on the machine neither see this one nor are touched: every port is free beforehand, everything temporary has
its own folder, and what is stopped at the end is what was started here.

    python -m pytest tests/pipelines/cluster/test_job_submit.py
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from mlflow.tracking import MlflowClient
from toy import training

from pipelines import cli

ROOT = Path(__file__).parents[3]
RAY = str(Path(sys.executable).with_name("ray"))
# A chain of one network: all stages train in nodes/test_end_to_end.py.
NODES = ("prepare_data", "train_size_upscale", "evaluate", "sample", "report")
CONFIG = ["--config", "debug", "stages=[size_upscale]", "bits=[8]"]
STEPS = ["train.num_steps=300", "train.eval_every_steps=50", "train.checkpoint_every_steps=50"]

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Job:
    """A job that has ended: SUCCEEDED or FAILED, the exit code of its command, what `ray job submit` showed."""

    status: str
    exit_code: int | None
    log: str


@dataclass(frozen=True)
class Head:
    """A running Ray head: where its Jobs API listens, its folder, and the environment of its clients."""

    url: str
    folder: Path
    env: dict[str, str]

    def submit(self, *command: str, timeout_sec: float) -> Job:
        """`ray job submit` of this checkout; returns when the job has ended."""
        name = f"job-{uuid.uuid4().hex[:8]}"
        line = [RAY, "job", "submit", "--address", self.url, "--submission-id", name, "--working-dir", ".", "--"]
        done = subprocess.run(
            [*line, *command],
            cwd=ROOT,
            env=self.env,
            timeout=timeout_sec,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        info = self.info(name)
        # The command's own exit code says only whether the job failed.
        assert (done.returncode == 0) == (info["status"] == "SUCCEEDED"), done.stdout
        return Job(status=info["status"], exit_code=info["driver_exit_code"], log=done.stdout)

    def start(self, *command: str) -> str:
        """`ray job submit` without waiting for the end; returns the job's name."""
        name = f"job-{uuid.uuid4().hex[:8]}"
        self.ray("submit", "--submission-id", name, "--no-wait", "--working-dir", ".", "--", *command)
        return name

    def stop(self, name: str) -> None:
        """What `ray job stop` sends, at once: its program takes seconds to start, in which a training may end."""
        with urllib.request.urlopen(urllib.request.Request(f"{self.url}/api/jobs/{name}/stop", method="POST")):
            pass

    def info(self, name: str) -> dict[str, Any]:
        """What the Jobs API says of a job: status, driver_exit_code, ..."""
        with urllib.request.urlopen(f"{self.url}/api/jobs/{name}") as reply:
            return json.load(reply)

    def ray(self, verb: str, *arguments: str) -> str:
        """What `ray job VERB` prints."""
        line = [RAY, "job", verb, "--address", self.url, *arguments]
        return subprocess.run(
            line, cwd=ROOT, env=self.env, check=True, timeout=120, text=True, capture_output=True
        ).stdout


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def processes_with(mark: str) -> list[psutil.Process]:
    """Every process that inherited the environment variable SPN_TEST_RAY=mark."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("SPN_TEST_RAY") == mark:
                found.append(process)
        except psutil.Error:  # gone meanwhile, or another user's
            continue
    return found


def trainers(head: Head) -> list[psutil.Process]:
    return [process for process in processes_with(str(head.folder)) if training.is_worker(process)]


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    folder = Path(tempfile.mkdtemp(prefix="ray"))  # not tmp_path: paths of sockets below it may have 107 characters
    drop = ("RAY_", "SPN_", "MLFLOW_", "PYTEST_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(drop)} | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",  # the job's `python` is this one
        "PYTHONUNBUFFERED": "1",
        "RAY_TMPDIR": str(folder),  # else the file by which others find a running cluster would name this one
        "RAY_AUTH_MODE": "disabled",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # Ray's own ports listen on 127.0.0.1 only
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DATA_USE_DATASOURCE_V2": "0",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "RAY_JOB_STOP_WAIT_TIME_S": "60",  # until SIGKILL; on busy cores MLflow needs more than 3
        "SPN_TEST_RAY": str(folder),
    }
    flags = ["--dashboard-port", "--ray-client-server-port", "--dashboard-agent-listen-port", "--metrics-export-port"]
    ports = free_ports(len(flags))
    options = [f"{flag}={port}" for flag, port in zip(flags, ports, strict=True)]
    options += ["--port=0", "--min-worker-port=0", "--max-worker-port=0"]  # 0: the first free one that Ray finds
    options += ["--node-ip-address=127.0.0.1", "--dashboard-host=127.0.0.1"]
    options += ["--num-cpus=2", f"--object-store-memory={300 * 2**20}", f"--temp-dir={folder}", "--block"]
    url = f"http://127.0.0.1:{ports[0]}"
    with open(folder / "start.log", "w") as log:
        starter = subprocess.Popen([RAY, "start", "--head", *options], env=env, stdout=log, stderr=subprocess.STDOUT)
    try:
        wait_for(url, starter, log=folder / "start.log", timeout_sec=180)
        yield Head(url=url, folder=folder, env=env)
    finally:
        stop(starter, mark=str(folder))
        shutil.rmtree(folder, ignore_errors=True)


def wait_for(url: str, starter: subprocess.Popen, *, log: Path, timeout_sec: float) -> None:
    """Returns once the Jobs API answers."""
    deadline = time.monotonic() + timeout_sec
    while True:
        try:
            with urllib.request.urlopen(f"{url}/api/jobs/", timeout=5):
                return
        except OSError as error:
            if starter.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"Ray did not start: {error}\n{log.read_text()}") from error
        time.sleep(0.5)


def stop(starter: subprocess.Popen, *, mark: str) -> None:
    """Ends `ray start --block` and all that it started. Never `ray stop`, which ends every Ray of the machine."""
    starter.kill()
    starter.wait()
    while left := processes_with(mark):  # one of them may have started another meanwhile
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=10)


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all jobs: what the first one prepared, the others skip."""
    return tmp_path_factory.mktemp("storage") / "runs"


def test_a_stopped_job_leaves_a_run_folder_that_can_be_resumed(
    head: Head, storage: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [*CONFIG, *STEPS, f"storage={storage}"]
    name = head.start("python", "pipelines/full_multidim.py", *options)
    deadline = time.monotonic() + 300
    while training.committed(storage) < 50:
        assert time.monotonic() < deadline, head.ray("logs", name)
        assert head.info(name)["status"] in ("PENDING", "RUNNING"), head.ray("logs", name)
        time.sleep(0.1)
    with training.held(trainers(head)):
        head.stop(name)
    while head.info(name)["status"] == "RUNNING":
        assert time.monotonic() < deadline, head.ray("logs", name)
        time.sleep(0.2)
    assert head.info(name)["status"] == "STOPPED"

    assert not (storage / "debug" / "run.lock").exists()
    deadline = time.monotonic() + 30
    while left := trainers(head):
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.2)
    client = MlflowClient(f"sqlite:///{storage}/debug/mlflow.db")
    experiment = client.get_experiment_by_name("debug")
    newest = client.search_runs([experiment.experiment_id], order_by=["attributes.start_time DESC"])
    assert [run.info.status for run in newest if run.info.status != "FINISHED"] == ["KILLED", "KILLED"]
    (attempt,) = training.attempts(storage)
    assert cli.main([*options, "--dry-run"]) == 0
    assert f"attempt {attempt.name} was interrupted; continues it" in capsys.readouterr().out


def test_the_pipeline_runs_as_a_job(head: Head, storage: Path) -> None:
    """To its end from where the job before was stopped, in the same attempt."""
    job = head.submit("python", "pipelines/full_multidim.py", *CONFIG, *STEPS, f"storage={storage}", timeout_sec=900)

    assert (job.status, job.exit_code) == ("SUCCEEDED", 0), job.log
    for node in NODES:
        assert re.search(rf"\b{node}\b", job.log), f"{node} is not in the job's log:\n{job.log}"
        assert list((storage / "debug" / "nodes" / node).rglob("_SUCCESS.json")), f"{node} left no _SUCCESS.json"
    assert len(training.attempts(storage)) == 1
    assert (storage / "debug" / "report.html").is_file()
    # Progress in lines that a log can hold.
    assert re.search(r"^\[train_size_upscale\] [\d_]+/2_400 slices\b", job.log, flags=re.MULTILINE), job.log


def test_what_fails_in_a_job_fails_the_job(head: Head, storage: Path) -> None:
    """The job's folder is a copy that goes away with the cluster, so no run folder may lie there; and a failed node."""
    overrides = f"storage={storage} train.init_from=/nowhere/step-00000001 resources.max_failures=0"
    train = f"python pipelines/train_stage.py {' '.join(CONFIG)} --stage size_upscale {overrides}"
    refused = "python pipelines/full_multidim.py --config debug storage=runs"
    job = head.submit("sh", "-c", f"{refused}; echo EXIT=$?; {train}", timeout_sec=300)
    assert (job.status, job.exit_code) == ("FAILED", 2), job.log
    assert re.search(r"^error: storage.*\nEXIT=2$", job.log, flags=re.MULTILINE), job.log
    assert "Traceback" not in job.log
    message = "train.init_from: /nowhere/step-00000001 has no config.json; it must be the folder of a checkpoint"
    assert f"\nerror: train_size_upscale: {message} (" in job.log
    assert message in Path(re.search(r"see (\S+error.txt)", job.log)[1]).read_text()
