"""One build at a time in a folder: a claim file that names its holder, whose modification time is the sign of life.

The holder touches (object stores: puts again) the file every few seconds. Whoever finds a claim watches it: a holder
that died here loses it at once, one elsewhere when the file stays as it is for `stale_sec`, so that clocks need not
agree. Locally a claim is an exclusive create. Object stores have none: there two builds that start in the same second
are told apart by reading the claim back after `settle_sec`. Files appear whole and with the same bytes from either
(data_prep.files), so even a build that lost its claim harms nothing; it stops before it commits.
"""

from __future__ import annotations

import json
import os
import threading
import time
import uuid
from datetime import UTC, datetime

import pyarrow.fs as pafs

from data_prep import files, holder

HEARTBEAT_SEC = 2.0
STALE_SEC = 60.0  # many heartbeats: a busy store must not look like death
SETTLE_SEC = 1.0  # object stores: how long a rival may need to overwrite our claim
_LOOK_SEC = 0.25
_NUM_SIGNS = 2  # heartbeats seen before a claim is respected: a process that is being killed may still give one


class FolderInUse(Exception):
    """Another build holds the folder, or took it over; one line says who, and since when."""


class Claim:
    """Context manager; raises FolderInUse after a few seconds when another living build holds the claim."""

    def __init__(
        self,
        filesystem: pafs.FileSystem,
        path: str,
        *,
        heartbeat_sec: float = HEARTBEAT_SEC,
        stale_sec: float = STALE_SEC,
        settle_sec: float = SETTLE_SEC,
    ) -> None:
        self._filesystem, self._path = filesystem, path
        self._is_local = isinstance(filesystem, pafs.LocalFileSystem)
        self._heartbeat_sec, self._stale_sec, self._settle_sec = heartbeat_sec, stale_sec, settle_sec
        self._token = uuid.uuid4().hex
        self._content = _describe(self._token)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="data-set-claim", daemon=True)

    def __enter__(self) -> Claim:
        while not self._try_to_take():
            self._wait_for_death()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        if _token(self._read()) == self._token:
            self._filesystem.delete_file(self._path)

    def check(self) -> None:
        """Raises FolderInUse when another build took the folder over, which happens to one that was suspended."""
        found = self._read()
        if _token(found) != self._token:
            raise FolderInUse(f"{self._path} is no longer this build's: {_who(found)}")

    def _try_to_take(self) -> bool:
        if not self._is_local:
            if self._read() is not None:
                return False
            files.put_bytes(self._filesystem, self._path, self._content)
            time.sleep(self._settle_sec)
            return _token(self._read()) == self._token
        os.makedirs(os.path.dirname(self._path), exist_ok=True)
        try:
            handle = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            return False
        with os.fdopen(handle, "wb") as stream:
            stream.write(self._content)
        return True

    def _wait_for_death(self) -> None:
        """Returns when the claim that is there is gone, removed if need be; raises FolderInUse if its holder lives."""
        signs, changed = set(), time.monotonic()
        known: dict = {}  # what was last read whole: a claim that is just being put again may be found empty
        while True:
            found, sign = self._read(), self._sign()
            if found is None or sign is None:
                return
            known = found or known
            if (found.get("token"), sign) not in signs:
                signs.add((found.get("token"), sign))
                changed = time.monotonic()
            if len(signs) > _NUM_SIGNS:
                raise FolderInUse(f"{os.path.dirname(self._path)} is in use by another build: {_who(known)}")
            silent = time.monotonic() - changed > self._stale_sec
            here = holder.is_here(found)
            if here and holder.is_alive(found) and silent:  # suspended, not dead: it may go on at any moment
                raise FolderInUse(f"{os.path.dirname(self._path)} is in use by a suspended build: {_who(found)}")
            if silent or (here and not holder.is_alive(found)):
                self._remove(found)
                return
            time.sleep(_LOOK_SEC)

    def _remove(self, dead: dict) -> None:
        if not self._is_local:
            self._filesystem.delete_file(self._path)
            return
        # Renaming lets only one of several rivals remove it, and shows whether it was still the dead one's.
        aside = f"{self._path}.{self._token}"
        try:
            os.rename(self._path, aside)
        except FileNotFoundError:
            return
        with open(aside, "rb") as stream:
            moved = _parse(stream.read())
        if moved.get("token") != dead.get("token"):
            try:
                os.link(aside, self._path)  # a rival was faster and this is its claim: it gets it back
            except FileExistsError:
                pass
        os.unlink(aside)

    def _beat(self) -> None:
        while not self._stop.wait(self._heartbeat_sec):
            try:
                found = self._read()
                if found is not None and _token(found) != self._token:
                    return  # `check` says so to the build
                if self._is_local:
                    os.utime(self._path)
                else:
                    files.put_bytes(self._filesystem, self._path, self._content)
            except OSError:
                continue  # a store that is away for a moment: the next beat tries again

    def _read(self) -> dict | None:
        try:
            return _parse(files.read_bytes(self._filesystem, self._path))
        except FileNotFoundError:
            return None

    def _sign(self) -> int | None:
        return self._filesystem.get_file_info(self._path).mtime_ns


def _describe(token: str) -> bytes:
    since = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return json.dumps({"token": token, **holder.describe(), "since": since}).encode()


def _parse(content: bytes) -> dict:
    """Empty for a claim whose writer died between creating and writing it: only silence tells that it is dead."""
    try:
        return json.loads(content)
    except ValueError:
        return {}


def _token(found: dict | None) -> str | None:
    return None if found is None else found.get("token")


def _who(found: dict | None) -> str:
    if not found:
        return "its holder is not known"
    return f"process {found['pid']} on {found['host']}, since {found['since']}"
