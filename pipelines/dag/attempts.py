"""Attempts of a node on storage: <run folder>/nodes/<node>/<fingerprint>/<attempt>/, and what they say of themselves.

_SUCCESS.json is written last, in one put; without it, or when a file it lists is missing, an attempt counts as
unfinished, whatever else lies there. _STARTED.json only helps to explain and to continue an unfinished attempt.
"""

from __future__ import annotations

import contextlib
import fnmatch
import json
import posixpath
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from data_prep.files import Store
from pipelines.dag.fingerprint import digest
from pipelines.dag.node import NodeOutput

SUCCESS = "_SUCCESS.json"
STARTED = "_STARTED.json"
ERROR = "error.txt"
LOG = "log.txt"
_TIME = "%Y%m%dT%H%M%S"
_ID = re.compile(r"/\d{8}T\d{6}-[0-9a-f]{6}$")  # at the end of an attempt's folder


@dataclass(frozen=True)
class Success:
    """Content of _SUCCESS.json."""

    node: str
    fingerprint: str
    attempt: str
    started: str  # ISO time, UTC
    finished: str
    outputs: Mapping[str, Mapping[str, Any]]  # relative path -> {"bytes": int, "sha256": str}
    named: Mapping[str, str]
    upstream: Mapping[str, str]  # node -> attempt
    ingredients: Mapping[str, Any]
    metrics: Mapping[str, float]
    mlflow_run_id: str | None
    git_commit: str
    adopted: Mapping[str, str] | None = None  # --keep: {"fingerprint": where the files lie, "when", "in_spite_of"}

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self), indent=1, sort_keys=True).encode()

    @staticmethod
    def from_bytes(content: bytes) -> Success:
        """Raises ValueError when it is not a _SUCCESS.json of ours."""
        try:
            return Success(**json.loads(content))
        except TypeError as error:
            raise ValueError(f"{SUCCESS}: {error}") from error

    @property
    def folder(self) -> str:
        """Where the files lie: an adopted output stays in the folder of the fingerprint that made it."""
        made_by = self.adopted["fingerprint"] if self.adopted else self.fingerprint
        return attempt_folder(self.node, made_by, self.attempt)

    def output(self, store: Store) -> NodeOutput:
        return NodeOutput(
            uri=store.uri_of(self.folder),
            named=dict(self.named),
            attempt=self.attempt,
            mlflow_run_id=self.mlflow_run_id,
        )


@dataclass(frozen=True)
class Attempt:
    """What was found of one attempt."""

    node: str
    fingerprint: str
    attempt: str
    success: Success | None  # None: not finished, or damaged
    damage: str = ""  # why a finished attempt cannot be used
    started: Mapping[str, Any] = field(default_factory=dict)  # content of _STARTED.json, {} when unreadable
    failed: bool = False  # it left an error.txt

    @property
    def folder(self) -> str:
        return attempt_folder(self.node, self.fingerprint, self.attempt)

    @property
    def state(self) -> str:
        """How it ended, as far as it says so itself."""
        return "finished" if self.success else "damaged" if self.damage else "failed" if self.failed else "interrupted"

    @property
    def age(self) -> str:
        """How long ago it finished, or was started last."""
        return age(self.success.finished if self.success else self.started.get("starts", [""])[-1])

    @property
    def ingredients(self) -> Mapping[str, Any]:
        return self.success.ingredients if self.success else self.started.get("ingredients", {})


def attempt_folder(node: str, fingerprint: str, attempt: str) -> str:
    return posixpath.join("nodes", node, fingerprint, attempt)


def new_attempt_id(store: Store, node: str, *, now: datetime | None = None) -> str:
    """UTC time and six random hex digits; sorts after all ids that the node has, even if a clock went back."""
    moment = (now or datetime.now(tz=UTC)).replace(microsecond=0, tzinfo=UTC)
    newest = max((attempt.attempt for attempt in history(store, node)), default="")[: len("20000101T000000")]
    if newest and newest >= moment.strftime(_TIME):
        moment = datetime.strptime(newest, _TIME).replace(tzinfo=UTC) + timedelta(seconds=1)
    return f"{moment.strftime(_TIME)}-{secrets.token_hex(3)}"


def history(store: Store, node: str) -> list[Attempt]:
    """All attempts of a node under any fingerprint, newest first."""
    found = []
    for made_by in store.list(posixpath.join("nodes", node)):
        if made_by.is_folder:
            attempts = (entry for entry in store.list(made_by.path) if entry.is_folder and _ID.search(entry.path))
            found += [_read(store, node, posixpath.basename(made_by.path), entry.path) for entry in attempts]
    # Of an adopted output and its original, which share an id, the original comes first.
    return sorted(found, key=lambda a: (a.attempt, not (a.success and a.success.adopted)), reverse=True)


def problems(store: Store, success: Success) -> Sequence[str]:
    """Files that are missing or have another size than _SUCCESS.json says."""
    return store.sub(success.folder).problems(success.outputs)


def intact(store: Store, past: Iterable[Attempt]) -> Iterator[Success]:
    """Outputs of these attempts that are finished and whole, in their order."""
    return (a.success for a in past if a.success is not None and not problems(store, a.success))


def measure(attempt: Store, named: Mapping[str, str], known: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Size and checksum of every file that `named` covers; `known` are checksums that need not be computed again.

    Raises ValueError when a named output is not there or an empty folder.
    """
    outputs: dict[str, dict[str, Any]] = {}
    for name, relative in named.items():
        entry = attempt.info(relative)
        files = [] if entry is None else attempt.walk(entry.path) if entry.is_folder else [entry]
        if not files:
            raise ValueError(f"output {name!r}: there is no file at {relative!r}")
        for file in files:
            if file.path not in (SUCCESS, STARTED, ERROR, LOG):  # the engine's own, and still growing
                checksum = known.get(file.path) or attempt.sha256(file.path)
                outputs[file.path] = {"bytes": file.bytes, "sha256": checksum}
    return dict(sorted(outputs.items()))


def content(success: Success, patterns: Sequence[str] = ("*",)) -> str:
    """Digest of an output's files that match: their checksums, and their names as "<output's name>/<path inside>".

    Where an attempt lies does not matter, so two attempts that made equal files have equal contents. A pattern that
    matches nothing must not hide a change: then all files count.
    """
    files = {}
    for name, relative in success.named.items():
        for path, entry in success.outputs.items():
            inside = posixpath.relpath(path, relative)
            if not inside.startswith(".."):
                files[posixpath.normpath(posixpath.join(name, inside))] = entry["sha256"]
    matches = [{file for file in files if fnmatch.fnmatchcase(file, pattern)} for pattern in patterns]
    chosen = set().union(*matches) if all(matches) else set(files)
    return digest({file: files[file] for file in chosen})[:16]


def age(moment: str, *, now: datetime | None = None) -> str:
    """ "2 h ago" for an ISO time."""
    try:
        seconds = ((now or datetime.now(tz=UTC)) - datetime.fromisoformat(moment)).total_seconds()
    except (ValueError, TypeError):
        return "at an unknown time"
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{int(seconds // size)} {unit} ago"
    return "less than a minute ago"


def utc_now() -> str:
    return datetime.now(tz=UTC).isoformat(timespec="seconds")


def _read(store: Store, node: str, fingerprint: str, folder: str) -> Attempt:
    attempt = posixpath.basename(folder)
    names = {posixpath.basename(entry.path) for entry in store.list(folder)}
    started: dict[str, Any] = {}
    if STARTED in names:
        with contextlib.suppress(ValueError):  # only an aid; the attempt itself is judged by its files
            started = json.loads(store.read_bytes(posixpath.join(folder, STARTED)))
    success, damage = None, ""
    if SUCCESS in names:
        try:
            success = Success.from_bytes(store.read_bytes(posixpath.join(folder, SUCCESS)))
        except ValueError:
            damage = f"{SUCCESS} is not readable"
    return Attempt(node, fingerprint, attempt, success, damage, started, ERROR in names)
