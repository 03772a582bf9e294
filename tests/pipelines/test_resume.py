"""A training that is killed goes on from its last checkpoint, and ends with the very weights of an unbroken run.

python -m pytest tests/pipelines/test_resume.py
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
STEPS = ["train.num_steps=120", "train.eval_every_steps=20", "train.checkpoint_every_steps=20"]
pytestmark = pytest.mark.slow


def launch(storage: Path, *arguments: str) -> subprocess.Popen[str]:
    script = str(ROOT / "pipelines" / "train_stage.py")
    command = [sys.executable, script, "--config", "debug", "--stage", "size_upscale", f"storage={storage}"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "MLFLOW_", "SPN_"))}
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([*command, *STEPS, *arguments], env=environment, **pipe)


def finish(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output[-3000:]
    return output


def committed(storage: Path) -> int:
    """Step of the newest committed checkpoint of the running attempt, 0 without one."""
    snapshots = list((storage / "debug/nodes/train_size_upscale").glob("*/*/*/checkpoint_manager_snapshot.json"))
    steps = [0]
    for snapshot in snapshots:
        try:
            latest = json.loads(snapshot.read_text())["latest_checkpoint_result"]
        except ValueError:  # being written
            continue
        steps.append(int(latest["checkpoint_dir_name"].rsplit("-", 1)[1]) if latest else 0)
    return max(steps)


def wait_for_step(storage: Path, step: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 240
    while committed(storage) < step:
        assert process.poll() is None, process.communicate()[0][-3000:]
        assert time.monotonic() < deadline, "no checkpoint appeared"
        time.sleep(0.05)


def train_workers(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return [
        p for p in psutil.Process(process.pid).children(recursive=True) if "RayTrainWorker" in " ".join(p.cmdline())
    ]


def weights(storage: Path) -> dict[str, str]:
    """{attempt: digest of the raw and averaged weights of its last checkpoint}."""
    found = {}
    for attempt in (storage / "debug/nodes/train_size_upscale").glob("*/*"):
        last = max(attempt.glob("size_upscale-*/step-*"))
        assert last.name.endswith("120")
        content = (last / "model.safetensors").read_bytes() + (last / "ema.safetensors").read_bytes()
        found[attempt.name] = hashlib.sha256(content).hexdigest()
    return found


def test_killed_worker_and_killed_driver(tmp_path: Path) -> None:
    data = subprocess.run(
        [sys.executable, str(ROOT / "pipelines/prepare_data.py"), "--config", "debug", f"storage={tmp_path}"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert data.returncode == 0, data.stdout[-2000:] + data.stderr[-2000:]

    run = launch(tmp_path)
    wait_for_step(tmp_path, 20, run)
    for worker in train_workers(run):
        worker.kill()
    wait_for_step(tmp_path, 60, run)  # Ray Train started a new worker, which went on from a checkpoint
    workers = train_workers(run)
    run.send_signal(signal.SIGKILL)
    run.wait()
    _, alive = psutil.wait_procs(workers, timeout=60)
    assert not alive, "without its driver a session ends by itself"

    resumed = finish(launch(tmp_path))
    assert "was interrupted; continues it" in resumed
    attempts = list((tmp_path / "debug/nodes/train_size_upscale").glob("*/*"))
    assert len(attempts) == 1, "the same attempt went on"
    history = json.loads((attempts[0] / "history.json").read_text())
    seen = [entry["step"] for entry in history if "train/bits_per_dim" in entry]
    assert seen == sorted(set(seen)) and seen[-1] == 120, "one unbroken curve"

    finish(launch(tmp_path, "--rerun", "train_size_upscale"))
    digests = weights(tmp_path)
    assert len(digests) == 2
    assert len(set(digests.values())) == 1, "resumed twice = never interrupted, bit for bit"
