"""One process at a time in a folder: held, dead and rival locks.  pytest tests/data_prep/store/test_lock.py"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data_prep import lock as module
from data_prep.files import Store, UserError, open_store
from data_prep.lock import STALE_SEC, WATCH_SEC, Lock
from tests.data_prep.made import object_store


@pytest.fixture(autouse=True)
def leases_settle_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SETTLE_SEC", 0.0)


class Clock:
    """Seconds pass only when the lock sleeps; `then(seconds so far)` happens after each sleep."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.then: Callable[[float], object] = lambda seconds: None

    def time(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds
        self.then(self.seconds)


def lock(store: Store, clock: Clock | None = None, **options: Any) -> Lock:
    return Lock(store, clock=clock or Clock(), **options)


def held(store: Store, **changes: object) -> None:
    """Another process's lock: a copy of ours with these changes."""
    lock(store).acquire()
    edit(store, token="other", **changes)


def edit(store: Store, **changes: object) -> None:
    found = json.loads(store.read_bytes("run.lock"))
    store.write_bytes("run.lock", json.dumps({**found, **changes}).encode())


def token(store: Store) -> str:
    return json.loads(store.read_bytes("run.lock"))["token"]


# ---- holders that this machine can see -----------------------------------------------------------------------------


def test_a_second_process_is_refused_in_one_line_that_names_the_first(store: Store) -> None:
    with lock(store) as first:
        with pytest.raises(UserError) as refusal:
            lock(store).acquire()
        assert f"in use by process {os.getpid()} on " in str(refusal.value) and " since 20" in str(refusal.value)
        assert "\n" not in str(refusal.value) and token(store) == first.token
        first.check()
    with lock(store):
        pass
    assert not store.exists("run.lock")


def test_the_lock_of_a_dead_process_is_taken_over_at_once(store: Store) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    held(store, pid=child.pid)
    clock = Clock()
    with lock(store, clock) as taken:
        taken.check()
    assert clock.seconds == 0


def test_a_reused_pid_does_not_keep_a_lock(store: Store) -> None:
    held(store, process_started=1.0)
    with lock(store) as taken:
        taken.check()


def test_a_suspended_process_keeps_its_lock(store: Store) -> None:
    held(store, heartbeat=0.0)
    with pytest.raises(UserError, match="in use"):
        lock(store).acquire()


def test_a_dying_process_gets_some_time_to_end(store: Store) -> None:
    """A task whose driver was killed ends within seconds."""
    clock = Clock()
    held(store)
    clock.then = lambda seconds: edit(store, process_started=1.0) if seconds >= 3 else None
    with lock(store, clock, grace_sec=5.0) as taken:
        taken.check()
    assert 3 <= clock.seconds < 5
    held(store)
    clock.then = lambda seconds: None
    with pytest.raises(UserError, match="in use"):
        lock(store, clock, grace_sec=5.0).acquire()
    assert clock.seconds < 9


# ---- holders on other machines -------------------------------------------------------------------------------------

CLOCKS = [0, 3600, -3600]


def held_elsewhere(store: Store, *, ahead: float) -> float:
    """The lock of another machine, whose clock is so many seconds ahead of ours; the time of its heartbeat."""
    beat = time.time() + ahead
    held(store, place="elsewhere", host="elsewhere", since=beat, heartbeat=beat)
    return beat


@pytest.mark.parametrize("ahead", CLOCKS)
def test_another_machine_that_gives_heartbeats_keeps_its_lock_whatever_its_clock_says(
    store: Store, ahead: float, capsys: pytest.CaptureFixture[str]
) -> None:
    beat = held_elsewhere(store, ahead=ahead)
    for look in (True, False):
        clock = Clock()
        clock.then = lambda seconds: edit(store, heartbeat=beat + seconds // 10 * 10)
        edit(store, heartbeat=beat)
        if look:
            assert (lock(store, clock).holder() or {})["host"] == "elsewhere"
        else:
            with pytest.raises(UserError, match="on elsewhere since"):
                lock(store, clock).acquire()
        assert 0 < clock.seconds <= 10
        assert "s for a heartbeat of process " in capsys.readouterr().err


@pytest.mark.parametrize("ahead", CLOCKS)
def test_another_machine_without_heartbeats_is_dead_whatever_its_clock_says(
    store: Store, ahead: float, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock()
    held_elsewhere(store, ahead=ahead)
    rival = lock(store, clock)
    assert rival.holder() is None and clock.seconds == WATCH_SEC
    assert capsys.readouterr().err.startswith(f"waiting up to {WATCH_SEC:.0f} s for ")
    with rival:  # what it has seen so far counts
        assert clock.seconds == (WATCH_SEC if ahead < 0 else STALE_SEC)
        rival.check()
    printed = capsys.readouterr().err  # each wait says how long it may take
    assert printed == "" if ahead < 0 else printed.startswith(f"waiting up to {STALE_SEC - WATCH_SEC:.0f} s for ")


def test_machines_of_one_name_are_places_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """As clones of one image are: the first set of pids has the same number on each of them."""
    here = module._place()
    monkeypatch.setattr(Path, "read_text", lambda self: "another machine's boot")
    assert module._place() != here


def test_a_lock_that_is_released_while_it_is_watched_is_free(store: Store) -> None:
    clock = Clock()
    clock.then = lambda _: store.delete("run.lock") if token(store) == "other" else None
    held_elsewhere(store, ahead=0)
    assert lock(store, clock).holder() is None and clock.seconds < 10
    held_elsewhere(store, ahead=0)
    lock(store, clock).acquire()
    assert clock.seconds < 10


def test_a_half_written_lock_file_is_watched_too(tmp_path: Path) -> None:
    """Its writer died just then, or is about to write the rest."""
    store, file, clock = open_store(tmp_path), tmp_path / "run.lock", Clock()
    file.touch()
    with lock(store, clock):
        assert clock.seconds == WATCH_SEC
    file.touch()
    clock.then = lambda seconds: file.write_text('{"token": "other", "host": "elsewhere"}')
    with pytest.raises(UserError, match="in use by another process"):
        lock(store, clock).acquire()


# ---- holding it ----------------------------------------------------------------------------------------------------


def test_a_heartbeat_changes_the_lock_and_a_thread_gives_it(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HEARTBEAT_SEC", 0.001)
    with lock(store) as taken:
        first = store.read_bytes("run.lock")
        deadline = time.monotonic() + 10
        while store.read_bytes("run.lock") == first:
            assert time.monotonic() < deadline
        taken.check()


def test_a_holder_that_was_overtaken_notices_and_leaves_the_new_lock(store: Store) -> None:
    with lock(store) as taken:
        edit(store, token="another")
        taken.beat()
        assert taken.lost
        with pytest.raises(UserError, match="was taken over by process "):
            taken.check()
    assert token(store) == "another"


def test_of_two_rivals_for_a_dead_lock_one_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path)
    held(store, process_started=1.0)
    slow, fast = lock(store), lock(store)
    rename = os.rename

    def overtaken(source: Path, target: Path) -> None:
        monkeypatch.setattr(os, "rename", rename)
        fast.acquire()  # the rival finishes between the slow one's look and its rename
        rename(source, target)

    monkeypatch.setattr(os, "rename", overtaken)
    with pytest.raises(UserError, match="in use"):
        slow.acquire()
    fast.check()


def test_a_lease_overwritten_by_a_rival_is_not_held() -> None:
    store = object_store()
    clock = Clock()
    clock.then = lambda _: edit(store, token="rival", host="rival")
    with pytest.raises(UserError, match="on rival since"):
        lock(store, clock).acquire()
