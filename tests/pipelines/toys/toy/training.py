"""Starts of one stage's training as a user makes them, in processes of their own, and what they leave on storage."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from data_prep.files import join, open_store

ROOT = Path(__file__).parents[4]
NODE, NUM_STEPS = "train_size_upscale", 240
STEPS = [f"train.num_steps={NUM_STEPS}", "train.eval_every_steps=20", "train.checkpoint_every_steps=20"]


def environment(**more: str) -> dict[str, str]:
    """That of a user's shell: nothing that the tests set for Ray and MLflow."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "MLFLOW_", "SPN_"))} | more


def launch(storage: Path | str, *arguments: str, script: str = "train_stage.py", **env: str) -> subprocess.Popen[str]:
    """Training of the stage with config debug; its own group of processes, as a shell gives it one."""
    command = [sys.executable, str(ROOT / "pipelines" / script), "--config", "debug", f"storage={storage}"]
    command += ["--stage", "size_upscale"] if script == "train_stage.py" else []
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([*command, *STEPS, *arguments], env=environment(**env), process_group=0, **pipe)


def finish(process: subprocess.Popen[str], *, code: int = 0, timeout_sec: float = 900) -> str:
    """What it printed until its end, which must be with this exit code."""
    try:
        output, _ = process.communicate(timeout=timeout_sec)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
    assert process.returncode == code, output[-4000:]
    return output


def attempts(storage: Path) -> list[Path]:
    return sorted((storage / "debug/nodes" / NODE).glob("*/*"))


def committed(storage: Path | str) -> int:
    """Step of the newest committed checkpoint, 0 without one."""
    store = open_store(join(str(storage), f"debug/nodes/{NODE}"))
    steps = [0]
    for file in store.walk():
        if file.path.endswith("checkpoint_manager_snapshot.json"):
            try:
                latest = json.loads(store.read_bytes(file.path))["latest_checkpoint_result"]
            except (ValueError, FileNotFoundError):  # being written
                continue
            steps.append(int(latest["checkpoint_dir_name"].rsplit("-", 1)[1]) if latest else 0)
    return max(steps)


def wait_for(condition: Callable[[], object], what: str, process: subprocess.Popen[str], *, sec: float = 900) -> None:
    deadline = time.monotonic() + sec
    while not condition():
        assert process.poll() is None, process.communicate()[0][-4000:]
        if time.monotonic() > deadline:
            process.kill()
            raise AssertionError(f"{what} did not come: {process.communicate()[0][-4000:]}")
        time.sleep(0.1)


def wait_for_step(storage: Path | str, step: int, process: subprocess.Popen[str]) -> None:
    wait_for(lambda: committed(storage) >= step, f"checkpoint of step {step}", process)


def train_workers(parent: int) -> list[psutil.Process]:
    """Ray Train workers among the descendants of a process."""
    return [process for process in psutil.Process(parent).children(recursive=True) if is_worker(process)]


def is_worker(process: psutil.Process) -> bool:
    try:
        return "RayTrainWorker" in " ".join(process.cmdline())
    except psutil.Error:  # gone meanwhile
        return False


@contextlib.contextmanager
def held(workers: list[psutil.Process]) -> Iterator[None]:
    """A training's workers stand still: what happens inside happens in its middle, on a busy machine."""
    assert workers, "no training to be held"
    for worker in workers:
        with contextlib.suppress(psutil.Error):
            worker.suspend()
    try:
        yield
    finally:
        for worker in workers:
            with contextlib.suppress(psutil.Error):
                worker.resume()


def weights(attempt: Path) -> str:
    """Digest of the raw and averaged weights of an attempt's last checkpoint."""
    last = max(attempt.glob("size_upscale-*/step-*"))
    assert last.name.endswith(str(NUM_STEPS))
    content = (last / "model.safetensors").read_bytes() + (last / "ema.safetensors").read_bytes()
    return hashlib.sha256(content).hexdigest()


def copy_data(source: Path, target: Path) -> None:
    """A run folder that has the dataset of another one and nothing else."""
    shutil.copytree(source / "debug/nodes/prepare_data", target / "debug/nodes/prepare_data")
    shutil.copy(source / "debug/config.yaml", target / "debug/config.yaml")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@dataclass
class MlflowServer:
    """An MLflow server over HTTP on a SQL database in `folder`; it can be stopped and started again."""

    folder: Path
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, *, wait: bool = True) -> MlflowServer:
        self.folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", f"sqlite:///{self.folder}/db"]
        command += ["--artifacts-destination", str(self.folder / "artifacts")]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--workers", "1"]
        more = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
        with open(self.folder / "log.txt", "a") as log:
            self.process = subprocess.Popen(
                command, env=environment(**more), stdout=log, stderr=log, start_new_session=True
            )
        if wait:
            self.wait()
        return self

    def wait(self) -> None:
        deadline = time.monotonic() + 120
        while True:
            try:
                with urllib.request.urlopen(f"{self.uri}/health", timeout=5):
                    return
            except OSError:
                assert time.monotonic() < deadline and self.process.poll() is None, (
                    self.folder / "log.txt"
                ).read_text()
            time.sleep(0.1)

    def kill(self) -> None:
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None
