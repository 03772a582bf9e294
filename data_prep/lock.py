"""One process at a time in a folder: a lock file on local disks, a lease object on object stores.

The holder writes who it is (host, pid, since when) and a heartbeat every few seconds. A holder whose process is visible
from here keeps its lock for as long as it lives. A holder on another machine is judged by watching the file, because
its clock and ours may differ: while the file changes, the holder is alive; after STALE_SEC without a change it counts
as dead (WATCH_SEC suffices if its heartbeat is old as well, or for a caller that only looks).

A local lock is an exclusive create. Object stores have none: a lease is written, and read back after SETTLE_SEC, so of
two processes that start in the same second one is refused. Even two writers would harm nothing: attempts have
folders of their own, and files appear whole.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from data_prep.files import Store, UserError

HEARTBEAT_SEC = 10.0
STALE_SEC = 90.0  # several heartbeats: a busy disk must not look like a dead holder
WATCH_SEC = 25.0  # two and a half heartbeats
SETTLE_SEC = 1.0  # how long a rival may need to overwrite a lease
_LOOK_SEC = 0.25


class Lock:
    """Context manager; raises UserError (one line: who holds it, since when) when the folder is in use.

    grace_sec: how long to wait for a living holder to end before refusing, for holders that may be dying already.
    clock: the module `time`, or what a test has of it.
    """

    def __init__(self, store: Store, *, file: str = "run.lock", grace_sec: float = 0.0, clock: Any = time) -> None:
        self.store, self.file, self.grace_sec, self.clock = store, file, grace_sec, clock
        self.lost = False  # another process took the lock because this one had been silent for too long
        self.token = uuid.uuid4().hex
        self._started = clock.time()
        self._watched: tuple[dict[str, Any], float] | None = None  # the lock's content, when it was first seen so
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Lock:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def acquire(self) -> None:
        """Raises UserError if a living process holds the lock."""
        deadline = self.clock.monotonic() + self.grace_sec
        while not self._try_to_take():
            found = self._read()
            if found is not None:
                self._wait_for_death(found, deadline)
        self._thread = threading.Thread(target=self._beat, name="lock-heartbeat", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Removes the lock, unless another process has taken it over."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=5)
        if self._is_ours(self._read()):
            self.store.delete(self.file)

    def check(self) -> None:
        """Raises UserError when another process took the lock over, which can happen to one that was suspended."""
        if not self._is_ours(found := self._read()):
            raise UserError(f"{self.store.uri} was taken over by {described(found or {})}, this process stops")

    def holder(self) -> dict[str, Any] | None:
        """The living process that holds the lock, None if it is free: {"token", "host", "pid", "since": seconds, ...}.

        Takes up to WATCH_SEC where the lock is another machine's.
        """
        found = self._read()
        return None if found is None else self._living(found, within_sec=WATCH_SEC)

    # ---- taking it ----

    def _try_to_take(self) -> bool:
        path = self.store.local(self.file)
        if path is None:
            if self._read() is not None:
                return False
            self.store.write_bytes(self.file, self._content())
            self.clock.sleep(SETTLE_SEC)
            if not self._is_ours(found := self._read()):
                raise UserError(refusal_to_share(self.store, found or {}))
            return True
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            return False
        with os.fdopen(handle, "wb") as stream:
            stream.write(self._content())
        return True

    def _wait_for_death(self, found: dict[str, Any], deadline: float) -> None:
        """Returns when the lock is free, and removed; raises UserError when its holder lives past the deadline."""
        while True:
            looks_old = self.clock.time() - found.get("heartbeat", 0.0) > STALE_SEC
            living = self._living(found, within_sec=WATCH_SEC if looks_old else STALE_SEC)
            if living is None:
                return self._remove(found)
            if self.clock.monotonic() >= deadline:
                raise UserError(refusal_to_share(self.store, living))
            self.clock.sleep(_LOOK_SEC)
            now = self._read()
            if now is None:
                return None
            found = now

    def _living(self, holder: dict[str, Any], *, within_sec: float) -> dict[str, Any] | None:
        """The lock's content if its holder lives; None if not, or if the lock was removed meanwhile."""
        if holder.get("place") == _place():  # a living process keeps its lock, however long it was suspended
            return holder if _is_alive(holder) else None
        if self._watched is None or self._watched[0] != holder:
            self._watched = holder, self.clock.monotonic()
        end = self._watched[1] + within_sec
        if (left := end - self.clock.monotonic()) > 0:
            print(f"waiting up to {left:.0f} s for a heartbeat of {described(holder)}", file=sys.stderr)
        while self.clock.monotonic() < end:
            self.clock.sleep(_LOOK_SEC)
            found = self._read()
            if found != holder:
                return found
        return None

    def _remove(self, dead: dict[str, Any]) -> None:
        """Removes a dead holder's lock; locally by a rename, which succeeds for one of several rivals."""
        path = self.store.local(self.file)
        if path is None:
            if self._read() == dead:
                self.store.delete(self.file)
            return
        aside = path.with_name(f"{path.name}.{self.token}")
        try:
            os.rename(path, aside)
        except FileNotFoundError:
            return
        if _parse(aside.read_bytes()).get("token") != dead.get("token"):  # a rival's new lock: put it back
            with contextlib.suppress(FileExistsError):
                os.link(aside, path)
        aside.unlink()

    # ---- holding it ----

    def _beat(self) -> None:
        while not self._stop.wait(HEARTBEAT_SEC) and not self.lost:
            with contextlib.suppress(OSError):  # the next heartbeat tries again
                self.beat()

    def beat(self) -> None:
        """One heartbeat, or `lost` where another process holds the lock."""
        found = self._read()
        self.lost = found is not None and not self._is_ours(found)
        if not self.lost:
            self.store.write_bytes(self.file, self._content())

    # ---- its content ----

    def _is_ours(self, found: Mapping[str, Any] | None) -> bool:
        return found is not None and found.get("token") == self.token

    def _read(self) -> dict[str, Any] | None:
        """The lock's content, None where there is no lock. Nothing is known of the holder of one not written yet."""
        try:
            return _parse(self.store.read_bytes(self.file))
        except FileNotFoundError:
            return None

    def _content(self) -> bytes:
        process = psutil.Process()
        who = {"token": self.token, "host": socket.gethostname(), "place": _place(), "pid": process.pid}
        times = {"process_started": process.create_time(), "since": self._started, "heartbeat": self.clock.time()}
        return json.dumps(who | times).encode()


def described(holder: Mapping[str, Any]) -> str:
    """Who holds a lock, and since when."""
    if "pid" not in holder:
        return "another process"
    since = datetime.fromtimestamp(holder.get("since", 0.0), tz=UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return f"process {holder['pid']} on {holder.get('host', 'an unknown host')} since {since}"


def refusal_to_share(store: Store, holder: Mapping[str, Any]) -> str:
    return f"{store.uri} is in use by {described(holder)}; wait for it to end, or stop it"


def _parse(content: bytes) -> dict[str, Any]:
    try:
        return dict(json.loads(content))
    except (ValueError, TypeError):
        return {}


def _place() -> str:
    """Names the set of processes that a pid belongs to: containers may share a host name and not their pids."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()  # hosts may share a name, too
        return f"{socket.gethostname()}/{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return socket.gethostname()


def _is_alive(holder: Mapping[str, Any]) -> bool:
    """Whether a holder in this place lives. One that does not say its pid and start time counts as dead."""
    try:
        process = psutil.Process(holder["pid"])
        same = abs(process.create_time() - holder["process_started"]) < 2.0  # else the pid was reused
        return same and process.status() != psutil.STATUS_ZOMBIE
    except (KeyError, ValueError, psutil.NoSuchProcess):
        return False
    except psutil.AccessDenied:
        return True
