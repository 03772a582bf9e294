"""One start at a time: held, stale and rival locks.  python -m pytest tests/pipelines/test_lock.py"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pyarrow._fs import _MockFileSystem

from pipelines.errors import UserError
from pipelines.lock import Lock
from pipelines.storage import Store, open_store


@pytest.fixture(params=["local", "object store"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "local":
        return open_store(tmp_path / "run")
    return Store("s3://bucket/run", filesystem=_MockFileSystem(), base="bucket/run")


def lock(store: Store, **options: float) -> Lock:
    return Lock(store, **{"settle_sec": 0.0, "heartbeat_sec": 60.0, "watch_sec": 0.0, **options})


def edit(store: Store, **changes: object) -> None:
    holder = json.loads(store.read_bytes("run.lock"))
    store.write_bytes("run.lock", json.dumps({**holder, **changes}).encode())


def test_a_second_start_is_refused_in_one_line(store: Store) -> None:
    with lock(store):
        with pytest.raises(UserError) as refusal:
            lock(store).acquire()
        assert f"process {os.getpid()} on " in str(refusal.value) and " since 20" in str(refusal.value)
        assert "\n" not in str(refusal.value)
    with lock(store):
        pass
    assert not store.exists("run.lock")


def test_the_lock_of_a_dead_process_is_taken_over(store: Store) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    lock(store).acquire()
    edit(store, pid=child.pid, token="other")
    with lock(store):
        assert json.loads(store.read_bytes("run.lock"))["pid"] == os.getpid()


def test_a_reused_pid_does_not_keep_a_lock(store: Store) -> None:
    lock(store).acquire()
    edit(store, token="other", process_started=1.0)
    lock(store).acquire()


def test_a_living_process_keeps_its_lock_without_heartbeats(store: Store) -> None:
    lock(store).acquire()
    edit(store, token="other", heartbeat=0.0)
    with pytest.raises(UserError, match="in use"):
        lock(store).acquire()


def test_another_machine_counts_as_dead_only_without_heartbeats(store: Store) -> None:
    lock(store).acquire()
    edit(store, token="other", place="elsewhere", host="elsewhere", heartbeat=time.time() - 30)
    with pytest.raises(UserError, match="on elsewhere since"):
        lock(store, stale_sec=60).acquire()
    edit(store, heartbeat=time.time() - 90)
    lock(store, stale_sec=60).acquire()


def test_another_machine_whose_clock_is_behind_keeps_its_lock(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its heartbeats look old from here, but they go on."""
    lock(store).acquire()
    an_hour_ago = time.time() - 3600
    edit(store, token="other", place="elsewhere", host="elsewhere", heartbeat=an_hour_ago)
    monkeypatch.setattr("pipelines.lock.time.sleep", lambda _: edit(store, heartbeat=an_hour_ago + 10))
    with pytest.raises(UserError, match="on elsewhere since"):
        lock(store, watch_sec=60).acquire()


def test_heartbeats_go_on(store: Store) -> None:
    with lock(store, heartbeat_sec=0.01):
        first = json.loads(store.read_bytes("run.lock"))["heartbeat"]
        deadline = time.monotonic() + 10
        while json.loads(store.read_bytes("run.lock"))["heartbeat"] == first:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_holder_that_was_overtaken_notices_and_leaves_the_new_lock(store: Store) -> None:
    with lock(store, heartbeat_sec=0.01) as held:
        deadline = time.monotonic() + 10
        while not held.lost:
            edit(store, token="another start")  # again: a heartbeat may have been on its way
            assert time.monotonic() < deadline
            time.sleep(0.02)
    assert json.loads(store.read_bytes("run.lock"))["token"] == "another start"


def test_a_half_written_lock_file_is_judged_by_its_age(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    (tmp_path / "run.lock").touch()
    with pytest.raises(UserError, match="in use by another start"):
        lock(store).acquire()
    os.utime(tmp_path / "run.lock", (1, 1))
    lock(store).acquire()


def test_of_two_rivals_for_a_stale_lock_one_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path)
    lock(store).acquire()
    edit(store, token="dead", process_started=1.0)
    slow, fast = lock(store), lock(store)
    rename = os.rename

    def overtaken(source: Path, target: Path) -> None:
        monkeypatch.setattr(os, "rename", rename)
        fast.acquire()  # the rival finishes between the slow one's look and its rename
        rename(source, target)

    monkeypatch.setattr(os, "rename", overtaken)
    with pytest.raises(UserError, match="in use"):
        slow.acquire()
    assert json.loads((tmp_path / "run.lock").read_bytes())["token"] == fast._token


def test_a_lease_overwritten_by_a_rival_is_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store("s3://bucket/run", filesystem=_MockFileSystem(), base="bucket/run")
    monkeypatch.setattr("pipelines.lock.time.sleep", lambda _: edit(store, token="rival", host="rival"))
    with pytest.raises(UserError, match="on rival since"):
        lock(store).acquire()
