"""One start at a time on a run folder: a lock file locally, a lease object on object stores.

A holder writes who it is and, every few seconds, that it is still alive. The lock of a process of this machine is that
process's as long as it lives. A holder on another machine is told from a dead one by watching: its clock and ours need
not agree, so times in the lock prove nothing. One that changes is held. One that stays as it is for `watch_sec` counts
as free for who only looks; it is taken over then if its last sign of life is old by its own time too, else after
`stale_sec`. On an object store there is no exclusive create, so two starts in the same second are told apart by reading
the lease back after a moment; attempt ids keep even two writers harmless.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import uuid
from datetime import UTC, datetime

from data_prep.files import Store, UserError
from data_prep.holder import describe, is_alive, is_here

HEARTBEAT_SEC = 10.0
STALE_SEC = 90.0  # several heartbeats: a busy disk must not look like death
WATCH_SEC = 25.0  # two heartbeats and a half
_LOOK_SEC = 0.5
SETTLE_SEC = 1.0  # object stores: how long a rival start may need to overwrite our lease


class Lock:
    """Context manager; raises UserError (one line: who holds it, since when) when the run folder is in use."""

    def __init__(
        self,
        store: Store,
        *,
        file: str = "run.lock",
        stale_sec: float = STALE_SEC,
        heartbeat_sec: float = HEARTBEAT_SEC,
        watch_sec: float = WATCH_SEC,
        settle_sec: float = SETTLE_SEC,
    ) -> None:
        self.store, self.file = store, file
        self.stale_sec, self.heartbeat_sec = stale_sec, heartbeat_sec
        self.watch_sec, self.settle_sec = watch_sec, settle_sec
        self.lost = False  # another start took the lock over: this one was silent for too long
        self.token = uuid.uuid4().hex
        self._started = time.time()
        self._watched: tuple[dict, float] | None = None  # another machine's lock, monotonic time when it was so first
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Lock:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def acquire(self) -> None:
        """Raises UserError if another living start holds the lock."""
        if self.store.is_local:
            self._create_file()
        else:
            self._take_lease()
        self._thread = threading.Thread(target=self._beat, name="run-lock", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Gives the lock back, unless another start has taken it over meanwhile."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=5)
        holder = self._read()
        if holder is not None and holder.get("token") == self.token:
            self.store.delete(self.file)

    def holder(self) -> dict | None:
        """The living start that holds the lock, None if it is free: {"token", "host", "pid", "since": seconds, ...}.

        Takes up to `watch_sec` where the lock is of another machine.
        """
        found = self._read()
        return None if found is None else self._living(found, within_sec=self.watch_sec)

    def _create_file(self) -> None:
        path = self.store.local(self.file)
        path.parent.mkdir(parents=True, exist_ok=True)
        for _ in range(3):
            try:
                handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
            except FileExistsError:
                self._evict_if_stale()
                continue
            with os.fdopen(handle, "wb") as stream:
                stream.write(self._content())
            return
        raise UserError(refusal_to_share(self.store, self._read() or {}))

    def _evict_if_stale(self) -> None:
        """Removes a dead start's lock file, or raises UserError. Only one of several rivals gets to remove it."""
        holder = self._read()
        if holder is None:
            return
        self._refuse_to_share_with_the_living(holder)
        path = self.store.local(self.file)
        aside = path.with_name(f"{path.name}.{self.token}")
        try:
            os.rename(path, aside)
        except FileNotFoundError:
            return
        moved = _parse(aside.read_bytes())
        if moved.get("token") != holder.get("token"):  # a rival was faster: that is its fresh lock, give it back
            try:
                os.link(aside, path)
            except FileExistsError:
                pass
        aside.unlink()

    def _take_lease(self) -> None:
        holder = self._read()
        if holder is not None:
            self._refuse_to_share_with_the_living(holder)
        self.store.write_bytes(self.file, self._content())
        time.sleep(self.settle_sec)
        holder = self._read() or {}
        if holder.get("token") != self.token:
            raise UserError(refusal_to_share(self.store, holder))

    def _beat(self) -> None:
        while not self._stop.wait(self.heartbeat_sec):
            try:
                holder = self._read()
                if holder is not None and holder.get("token") != self.token:
                    self.lost = True
                    return
                self.store.write_bytes(self.file, self._content())
            except OSError:
                continue  # a store that is away for a moment: the next beat tries again

    def _refuse_to_share_with_the_living(self, holder: dict) -> None:
        looks_old = time.time() - holder.get("heartbeat", 0.0) > self.stale_sec
        living = self._living(holder, within_sec=self.watch_sec if looks_old else self.stale_sec)
        if living is not None:
            raise UserError(refusal_to_share(self.store, living))

    def _living(self, holder: dict, *, within_sec: float) -> dict | None:
        """The lock's content if its holder lives; None if not, or if it was given back meanwhile."""
        if is_here(holder):  # a living process keeps it, however long it was suspended
            return holder if is_alive(holder) else None
        if self._watched is None or self._watched[0] != holder:
            self._watched = holder, time.monotonic()
        left = self._watched[1] + within_sec - time.monotonic()
        if left > 0:
            print(f"looking for a sign of life of {described(holder)}: up to {left:.0f} s", file=sys.stderr)
        while time.monotonic() < self._watched[1] + within_sec:
            time.sleep(_LOOK_SEC)
            found = self._read()
            if found != holder:
                return found
        return None

    def _read(self) -> dict | None:
        try:
            content = self.store.read_bytes(self.file)
        except FileNotFoundError:
            return None
        holder = _parse(content)
        if not holder and self.store.is_local:
            # Created but not written yet, or its writer died between the two: judge by the file's age.
            try:
                return {"heartbeat": os.path.getmtime(self.store.path(self.file))}
            except FileNotFoundError:
                return None
        return holder

    def _content(self) -> bytes:
        times = {"since": self._started, "heartbeat": time.time()}
        return json.dumps({"token": self.token, **describe(), **times}).encode()


def _parse(content: bytes) -> dict:
    try:
        holder = json.loads(content)
    except ValueError:
        return {}
    return holder if isinstance(holder, dict) else {}


def described(holder: dict) -> str:
    """Who holds a lock, and since when."""
    if "pid" not in holder:
        return "another start"
    since = datetime.fromtimestamp(holder.get("since", 0.0), tz=UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return f"process {holder['pid']} on {holder.get('host', 'an unknown host')} since {since}"


def refusal_to_share(store: Store, holder: dict) -> str:
    return f"{store.uri} is in use by {described(holder)}; wait for it to end, or stop it"
