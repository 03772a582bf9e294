"""Builds that are killed with SIGKILL or run out of disk, and resume.  pytest tests/data_prep/test_kill.py

Every case ends with a second build that must leave exactly the files, byte for byte, of an undisturbed one, and must
not have written a finished shard again. The builds that are killed are processes of their own.
"""

from __future__ import annotations

import json
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict

import pytest

from data_prep.build import build
from data_prep.config import DataConfig
from data_prep.files import UserError, open_store
from data_prep.verify import verify

pytestmark = pytest.mark.faults
ROOT = pathlib.Path(__file__).parents[2]

# A process of its own, as a user starts it: its Ray dies with it.
DRIVER = """
import contextlib, json, os, signal, sys
import ray
from data_prep.build import build
from data_prep.config import DataConfig

config, out, pause_at, deaths = json.loads(sys.argv[1])

def fatal(descriptor, fsync=os.fsync):
    for flag in deaths:
        with contextlib.suppress(FileExistsError):
            os.mkdir(flag)
            os.kill(os.getpid(), signal.SIGKILL)
    fsync(descriptor)

hook = {"worker_process_setup_hook": lambda: setattr(os, "fsync", fatal)} if deaths else None
ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env=hook)

def progress(*counts):
    print(*counts, flush=True)
    if counts[0] == pause_at:
        sys.stdin.readline()

try:
    build(DataConfig(**config), out=out, progress=progress)
except Exception as error:
    sys.exit(f"{type(error).__name__}: {error}")
print("DONE", flush=True)
"""


class Killable:
    """A build in a process of its own, which waits for a line when `pause_at` images are done.

    For each path in `deaths`, once, a worker makes a folder there and kills itself while it writes files.
    """

    def __init__(self, config: DataConfig, out: str, *, pause_at: int | None = None, deaths: Sequence = ()) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", DRIVER, json.dumps([asdict(config), out, pause_at, deaths])],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []

    def wait_for_shards(self, number: int) -> None:
        """Until `number` shards have been reported."""
        while sum(line[0].isdigit() for line in self.lines) <= number:
            line = self.process.stdout.readline()
            assert line, self.process.communicate()[1]
            self.lines.append(line)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate()


def run_to_the_end(config: DataConfig, out: str) -> None:
    build(config, out=out, progress=lambda *_: None)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, make_photos: Callable) -> DataConfig:
    folder = tmp_path_factory.mktemp("kill")
    make_photos(folder / "raw", 130, height=300, width=400)
    return DataConfig(
        dataset="photos",
        root=str(folder / "raw"),
        image_size=32,
        resolutions=[32, 64],
        bits=[3, 8],
        num_valid_photos=10,
        rows_per_shard=10,
        row_group_rows=4,
    )


@pytest.fixture(scope="module")
def undisturbed(config: DataConfig, ray_session: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Relative path -> sha256 of every file of an undisturbed build."""
    out = tmp_path_factory.mktemp("kill") / "set"
    run_to_the_end(config, str(out))
    return contents(str(out))


def contents(out: str) -> dict[str, str]:
    store = open_store(out)
    return {entry.path: store.sha256(entry.path) for entry in store.walk()}


def finished_shards(out: str) -> dict[str, int]:
    """Relative path -> modification time of every file of a shard that has a sidecar."""
    store, times = open_store(out), {}
    for entry in store.list("_build"):
        if re.search(r"-of-\d{5}\.json$", entry.path):
            for shard in json.loads(store.read_bytes(entry.path))["files"]:
                times[shard["path"]] = store.info(shard["path"]).mtime_ns
    return times


def check_second_start(config: DataConfig, out: str, undisturbed: dict[str, str]) -> None:
    before = finished_shards(out)
    run_to_the_end(config, out)
    after = finished_shards(out)
    assert {path: after[path] for path in before} == before, "a finished shard was written again"
    assert contents(out) == undisturbed
    assert verify(out) == []


@pytest.fixture
def dice() -> random.Random:
    seed = int.from_bytes(os.urandom(4), "little")
    print(f"random.Random({seed})")  # shown when the test fails
    return random.Random(seed)


def test_driver_killed_at_random_moments(
    config: DataConfig, undisturbed: dict[str, str], tmp_path: pathlib.Path, dice: random.Random
):
    """Three times in a row, each time after more shards."""
    out = str(tmp_path / "set")
    for least in (0, 4, 8):
        killed = Killable(config, out)
        killed.wait_for_shards(least)
        time.sleep(dice.uniform(0, 0.4))  # a moment within a shard's time
        killed.kill()
        assert not open_store(out).exists("manifest.json") or contents(out) == undisturbed
    assert finished_shards(out)
    check_second_start(config, out, undisturbed)


def test_driver_killed_while_it_writes_to_an_object_store(
    config: DataConfig, undisturbed: dict[str, str], s3: Callable[[str], str], dice: random.Random
):
    out = s3("data-sets/set")
    killed = Killable(config, out)
    killed.wait_for_shards(3)
    time.sleep(dice.uniform(0, 0.4))
    killed.kill()
    assert not open_store(out).exists("manifest.json") or contents(out) == undisturbed
    assert finished_shards(out)
    check_second_start(config, out, undisturbed)


def test_worker_killed_while_it_writes_a_shard(config: DataConfig, undisturbed: dict[str, str], tmp_path: pathlib.Path):
    """Ray runs the shard again; the build ends without an error, and no file of the dead writer remains."""
    out, deaths = tmp_path / "set", [str(tmp_path / "first"), str(tmp_path / "second")]
    running = Killable(config, str(out), deaths=deaths)
    errors = running.process.communicate(timeout=120)[1]
    assert running.process.returncode == 0, errors
    assert all(map(os.path.exists, deaths))
    assert contents(str(out)) == undisturbed


def test_full_disk(config: DataConfig, undisturbed: dict[str, str], small_disk: Callable, tmp_path: pathlib.Path):
    resize = small_disk(tmp_path, "1m")
    out = str(tmp_path / "set")
    with pytest.raises(Exception, match="No space left on device"):
        run_to_the_end(config, out)
    assert not open_store(out).exists("manifest.json")
    assert not list(tmp_path.rglob("*.parquet.tmp-*")), "half files would keep the disk full"
    resize("64m")
    check_second_start(config, out, undisturbed)


@pytest.fixture
def small_disk() -> Iterator[Callable[[pathlib.Path, str], Callable[[str], None]]]:
    """small_disk(folder, "1m") mounts a file system of that size there and returns what changes its size."""
    mounted: list[pathlib.Path] = []

    def mount(folder: pathlib.Path, size: str) -> Callable[[str], None]:
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
        try:
            result = subprocess.run(command, capture_output=True, text=True)
        except FileNotFoundError:
            pytest.skip("there is no mount command here")
        if result.returncode:
            pytest.skip(f"mounting takes root's rights: {result.stderr.strip()}")
        mounted.append(folder)
        return lambda size: subprocess.run(["mount", "-o", f"remount,size={size}", str(folder)], check=True)

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_of_two_builds_in_a_folder_the_second_is_refused(
    config: DataConfig, undisturbed: dict[str, str], tmp_path: pathlib.Path
):
    out = str(tmp_path / "set")
    first = Killable(config, out, pause_at=10)
    first.wait_for_shards(1)
    with pytest.raises(UserError, match=f"^{out} is in use by process {first.process.pid} on "):
        run_to_the_end(config, out)
    first_errors = first.process.communicate("continue\n", timeout=120)[1]
    assert first.process.returncode == 0, first_errors
    assert contents(out) == undisturbed
