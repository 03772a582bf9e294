"""One start at a time: held, stale and rival locks.  python -m pytest tests/pipelines/test_lock.py"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from pyarrow._fs import _MockFileSystem

from data_prep.files import Store, UserError, open_store
from data_prep.lock import STALE_SEC, WATCH_SEC, Lock


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


class Passing:
    """Time that passes only when the lock waits for it; `what(seconds so far)` happens after each wait."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds, self.what = 0.0, lambda seconds: None
        # The lock's alone: threads of other packages sleep, too.
        clock = SimpleNamespace(time=time.time, monotonic=lambda: self.seconds, sleep=self.sleep)
        monkeypatch.setattr("data_prep.lock.time", clock)

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds
        self.what(self.seconds)


@pytest.fixture
def passing(monkeypatch: pytest.MonkeyPatch) -> Passing:
    return Passing(monkeypatch)


def held_elsewhere(store: Store, *, clock: float) -> float:
    """The lock of another machine, whose clock is so many seconds ahead of this one's; the time of its heartbeat."""
    lock(store).acquire()
    beat = time.time() + clock
    edit(store, token="other", place="elsewhere", host="elsewhere", since=beat, heartbeat=beat)
    return beat


CLOCKS = [0, 3600, -3600]


@pytest.mark.parametrize("clock", CLOCKS)
def test_another_machine_that_gives_a_sign_keeps_its_lock_whatever_its_clock_says(
    store: Store, clock: float, passing: Passing, capsys: pytest.CaptureFixture[str]
) -> None:
    beat = held_elsewhere(store, clock=clock)
    for try_it in (lambda: Lock(store).holder(), lambda: Lock(store, settle_sec=0.0).acquire()):
        passing.seconds, passing.what = 0.0, lambda seconds: edit(store, heartbeat=beat + seconds // 10 * 10)
        edit(store, heartbeat=beat)
        try:
            assert (try_it() or {})["host"] == "elsewhere"
        except UserError as refusal:
            assert "on elsewhere since" in str(refusal)
        assert 0 < passing.seconds <= 10
        assert capsys.readouterr().err.startswith("looking for a sign of life of process ")


@pytest.mark.parametrize("clock", CLOCKS)
def test_another_machine_that_gives_no_sign_is_dead_whatever_its_clock_says(
    store: Store, clock: float, passing: Passing, capsys: pytest.CaptureFixture[str]
) -> None:
    held_elsewhere(store, clock=clock)
    rival = Lock(store, settle_sec=0.0)
    assert rival.holder() is None
    assert passing.seconds == WATCH_SEC
    assert capsys.readouterr().err.endswith(f": up to {WATCH_SEC:.0f} s\n")
    with rival:  # what it has seen so far counts
        assert passing.seconds == (WATCH_SEC if clock < 0 else STALE_SEC)
        assert json.loads(store.read_bytes("run.lock"))["token"] == rival.token
    told = capsys.readouterr().err  # each wait says how long it may take
    assert told == "" if clock < 0 else told.endswith(f": up to {STALE_SEC - WATCH_SEC:.0f} s\n")


def test_a_lock_that_is_given_back_while_it_is_watched_is_free(store: Store, passing: Passing) -> None:
    def give_back(_: float) -> None:
        if (Lock(store)._read() or {}).get("token") == "other":
            store.delete("run.lock")

    passing.what = give_back
    held_elsewhere(store, clock=0)
    assert Lock(store).holder() is None and passing.seconds < 10
    held_elsewhere(store, clock=0)
    with Lock(store, settle_sec=0.0):
        assert passing.seconds < 10


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


def test_a_half_written_lock_file_is_watched_too(tmp_path: Path, passing: Passing) -> None:
    """Its writer died just then, or is about to go on."""
    store = open_store(tmp_path)
    (tmp_path / "run.lock").touch()
    with lock(store, watch_sec=5.0, stale_sec=9.0):
        assert passing.seconds == 9.0
    (tmp_path / "run.lock").touch()
    os.utime(tmp_path / "run.lock", (1, 1))
    with lock(store, watch_sec=5.0, stale_sec=9.0):
        assert passing.seconds == 9.0 + 5.0
    (tmp_path / "run.lock").touch()
    passing.what = lambda seconds: (tmp_path / "run.lock").write_text('{"token": "other", "host": "elsewhere"}')
    with pytest.raises(UserError, match="in use by another start"):
        lock(store, watch_sec=5.0).acquire()


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
    assert json.loads((tmp_path / "run.lock").read_bytes())["token"] == fast.token


def test_a_lease_overwritten_by_a_rival_is_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store("s3://bucket/run", filesystem=_MockFileSystem(), base="bucket/run")
    monkeypatch.setattr("data_prep.lock.time.sleep", lambda _: edit(store, token="rival", host="rival"))
    with pytest.raises(UserError, match="on rival since"):
        lock(store).acquire()
