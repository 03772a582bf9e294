"""A folder belongs to one living build.  pytest tests/data_prep/test_claim.py"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import time

import pyarrow.fs as pafs
import pytest

from data_prep import files
from data_prep.claim import Claim, FolderInUse

Place = tuple[pafs.FileSystem, str]


@pytest.fixture(params=["local", "object store"])
def place(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Place:
    """SubTreeFileSystem stands for an object store: it is no LocalFileSystem, so there is no exclusive create."""
    if request.param == "local":
        return pafs.LocalFileSystem(), f"{tmp_path}/set/build.lock"
    return pafs.SubTreeFileSystem(str(tmp_path), pafs.LocalFileSystem()), "build.lock"


def claim(place: Place, **options: float) -> Claim:
    return Claim(*place, **{"heartbeat_sec": 0.02, "settle_sec": 0.0, "stale_sec": 60.0, **options})


def leave(where: Place, **changes: object) -> None:
    """What a killed build leaves."""
    claim(where, heartbeat_sec=60.0).__enter__()
    edit(where, token="other", **changes)


def edit(where: Place, **changes: object) -> None:
    files.put_bytes(*where, json.dumps({**json.loads(files.read_bytes(*where)), **changes}).encode())


def test_a_second_build_is_refused_in_one_line_that_names_the_first(place: Place):
    with claim(place):
        with pytest.raises(FolderInUse, match=f"in use by another build: process {os.getpid()} on .*, since 20") as no:
            claim(place).__enter__()
        assert "\n" not in str(no.value)
    with claim(place):
        pass
    assert not files.exists(*place)


def test_the_claim_of_a_dead_process_is_taken_over_at_once(place: Place):
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    leave(place, pid=child.pid)
    with claim(place) as held:
        held.check()


def test_a_reused_pid_keeps_no_claim(place: Place):
    leave(place, process_started=1.0)
    with claim(place) as held:
        held.check()


def test_another_machine_counts_as_dead_when_it_is_silent(place: Place):
    leave(place, place="elsewhere", pid=1)
    with claim(place, stale_sec=0.3) as held:
        held.check()


def test_a_suspended_build_keeps_its_claim(place: Place):
    leave(place)
    with pytest.raises(FolderInUse, match="suspended build"):
        claim(place, stale_sec=0.3).__enter__()


def test_an_empty_claim_is_judged_by_its_silence(place: Place):
    files.put_bytes(*place, b"")
    with claim(place, stale_sec=0.3) as held:
        held.check()


def test_a_build_that_was_overtaken_notices_and_leaves_the_new_claim(place: Place):
    with claim(place) as held:
        deadline = time.monotonic() + 10
        while held._thread.is_alive():
            edit(place, token="another")  # again: a heartbeat may have been on its way
            assert time.monotonic() < deadline
            time.sleep(0.05)
        with pytest.raises(FolderInUse, match="no longer this build's"):
            held.check()
    assert json.loads(files.read_bytes(*place))["token"] == "another"


def test_of_two_rivals_for_a_dead_claim_one_wins(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    place = pafs.LocalFileSystem(), f"{tmp_path}/build.lock"
    leave(place, process_started=1.0)
    slow, fast = claim(place), claim(place)
    rename = os.rename

    def overtaken(source: str, target: str) -> None:
        monkeypatch.setattr(os, "rename", rename)
        fast.__enter__()  # the rival finishes between the slow one's look and its rename
        rename(source, target)

    monkeypatch.setattr(os, "rename", overtaken)
    with pytest.raises(FolderInUse, match="in use"):
        slow.__enter__()
    fast.check()
    fast.__exit__()
