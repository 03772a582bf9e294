"""Files in a folder on a local disk, NFS, S3 or GCS, through pyarrow filesystems.

A file is written in one way: it becomes visible whole or not at all. Locally that is a temporary file in the same
folder, fsync and a rename; object stores show an upload only when it is complete, so there it is one put. Nothing is
renamed or linked across a store. Calls that may be repeated are repeated after a transient error.

    store = open_store("s3://bucket/spn/imagenet128")
    store.write_bytes("nodes/a/_SUCCESS.json", b"{}")
"""

from __future__ import annotations

import errno
import functools
import hashlib
import os
import posixpath
import re
import secrets
import shutil
import tempfile
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, ParamSpec, TypeVar

import pyarrow as pa
import pyarrow.fs as pafs

_TEMPORARY = re.compile(r"\.tmp-[0-9a-f]{8}-\d+$")  # random, then the writer's pid
_TRANSIENT = {
    *(errno.EIO, errno.ESTALE, errno.EAGAIN, errno.EINTR, errno.EHOSTUNREACH, errno.EHOSTDOWN),
    *(errno.ENETUNREACH, errno.ENETDOWN, errno.ENETRESET, errno.ENOTCONN),
}  # beside those that Python makes a ConnectionError or TimeoutError of
# pyarrow reports errors of object stores and of the network as text.
_TRANSIENT_WORDS = re.compile(
    r"AWS Error (NETWORK_CONNECTION|SLOW_DOWN|INTERNAL_FAILURE|SERVICE_UNAVAILABLE|THROTTLING|REQUEST_TIMEOUT|"
    r"REQUEST_EXPIRED|UNKNOWN \(HTTP status (429|5\d\d)\))|curlCode|Status\((UNAVAILABLE|DEADLINE_EXCEEDED|INTERNAL)|"
    r"timed? ?out|connection (reset|closed|refused)",
    re.IGNORECASE,
)
FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
_RETRY_SEC = (0.5, 2.0, 8.0)  # waits before a call is repeated after a transient error
_CHUNK = 4 * 2**20  # bytes per read
P = ParamSpec("P")
R = TypeVar("R")


def printable(text: str) -> str:
    """The text on one line, with terminal escapes and other characters that cannot be printed written as escapes."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class UserError(Exception):
    """A mistake in the arguments, the config or the named data; the message is one line: what, where, what is valid."""


def is_transient(error: BaseException) -> bool:
    """Whether the same call on a store may succeed in a moment: the disk, the network or the server failed.

    A missing file, a full disk and a refused permission are not transient.
    """
    if not isinstance(error, OSError) or isinstance(error, FileNotFoundError | PermissionError):
        return False
    if isinstance(error, ConnectionError | TimeoutError) or error.errno in _TRANSIENT:
        return True
    return error.errno is None and _TRANSIENT_WORDS.search(str(error)) is not None


def retried(call: Callable[P, R]) -> Callable[P, R]:
    """Repeats the call after a transient error; for calls that may be made twice."""

    @functools.wraps(call)
    def repeated(*args: P.args, **kwargs: P.kwargs) -> R:
        for wait_sec in _RETRY_SEC:
            try:
                return call(*args, **kwargs)
            except OSError as error:
                if not is_transient(error):
                    raise
            time.sleep(wait_sec)
        return call(*args, **kwargs)

    return repeated


@contextmanager
def naming_full_disk(place: str | os.PathLike[str]) -> Iterator[None]:
    """A full disk is an OSError that names `place`, where the block writes: of itself only a failed open names a path,
    and torch and safetensors raise errors of their own."""
    try:
        yield
    except Exception as error:
        is_full = os.path.isdir(place) and shutil.disk_usage(place).free < 2**20
        number = error.errno if isinstance(error, OSError) else errno.ENOSPC if is_full else None
        if number not in FULL_DISK or getattr(error, "filename", None) is not None:
            raise
        raise OSError(number, os.strerror(number), os.fspath(place)) from error


class HashedStream:
    """A binary stream for writing that counts and hashes its bytes."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream, self._sha = stream, hashlib.sha256()
        self.num_bytes = 0
        self.closed = False

    def write(self, data: bytes | memoryview) -> int:
        self._sha.update(data)
        self.num_bytes += len(data)
        return self._stream.write(data)

    def flush(self) -> None:
        self._stream.flush()

    def sync(self) -> None:
        """Returns when all of a local file is on the disk."""
        self._stream.flush()
        os.fsync(self._stream.fileno())

    @property
    def sha256(self) -> str:
        return self._sha.hexdigest()


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file or a folder below a store; `path` is relative to the store's root."""

    path: str
    bytes: int
    is_folder: bool
    mtime_ns: int = 0  # 0 where the filesystem has none
    is_special: bool = False  # a pipe, a socket or a device


Entries = list[FileEntry]


class Store:
    """A folder on some filesystem. Paths given to methods are relative, with forward slashes; "" is the folder itself.

    A store can be pickled; it is opened again by its URI.
    """

    def __init__(self, uri: str, *, filesystem: pafs.FileSystem, base: str) -> None:
        self.uri = uri
        self.filesystem = filesystem
        self.base = base.rstrip("/") or "/"
        self.is_local = isinstance(filesystem, pafs.LocalFileSystem)

    def __repr__(self) -> str:
        return f"Store({self.uri!r})"

    # Pickled as it is, an S3 filesystem would retry in another way, and keep the endpoint of the machine it comes from.
    def __reduce__(self) -> tuple:
        return open_store, (self.uri,)

    # ---- places ----

    def path(self, relative: str = "") -> str:
        """The path that self.filesystem understands, e.g. "bucket/folder/file"."""
        clean = posixpath.normpath(relative) if relative else ""
        assert not clean.startswith(("/", "..")), f"{relative!r} leads out of {self.uri}"
        return self.base if clean in ("", ".") else posixpath.join(self.base, clean)

    def uri_of(self, relative: str) -> str:
        """Absolute path (local) or URI of a file or folder below; `open_store` understands it."""
        return join(self.uri, relative)

    def local(self, relative: str = "") -> Path | None:
        """The path on this machine's disk, None on an object store."""
        return Path(self.path(relative)) if self.is_local else None

    def sub(self, relative: str) -> Store:
        """The store rooted at a folder below."""
        return Store(self.uri_of(relative), filesystem=self.filesystem, base=self.path(relative))

    # ---- what is there ----

    @retried
    def info(self, relative: str = "") -> FileEntry | None:
        """What is there, None if nothing is."""
        found = self.filesystem.get_file_info(self.path(relative))
        return None if found.type == pafs.FileType.NotFound else self._entry(found)

    def exists(self, relative: str) -> bool:
        return self.info(relative) is not None

    def list(self, relative: str = "") -> Entries:
        """Files and folders directly below, by name; empty where there is no such folder."""
        return self.select(relative, recursive=False)

    def walk(self, relative: str = "") -> Entries:
        """All files below, by path."""
        return [entry for entry in self.select(relative, recursive=True) if not entry.is_folder]

    @retried
    def select(self, relative: str = "", *, recursive: bool) -> Entries:
        selector = pafs.FileSelector(self.path(relative), recursive=recursive, allow_not_found=True)
        entries = (self._entry(found) for found in self.filesystem.get_file_info(selector))
        return sorted(entries, key=lambda entry: entry.path)

    def bad_link(self) -> str | None:
        """What is wrong with the first bad link below a local folder: pyarrow's listing leaves out links to nothing and
        follows a loop through all its turns."""
        return _bad_link(self.base) if self.is_local else None

    def _entry(self, found: pafs.FileInfo) -> FileEntry:
        is_folder = found.type == pafs.FileType.Directory
        return FileEntry(
            path=found.path.removeprefix(self.base.rstrip("/") + "/") if found.path != self.base else ".",
            bytes=0 if is_folder else found.size or 0,
            is_folder=is_folder,
            mtime_ns=found.mtime_ns or 0,
            is_special=found.type == pafs.FileType.Unknown,
        )

    # ---- reading ----

    @retried
    def open(self, relative: str) -> pa.NativeFile:
        """A file for reading at any position. Raises FileNotFoundError."""
        return self.filesystem.open_input_file(self.path(relative))

    @retried
    def read_bytes(self, relative: str) -> bytes:
        """Raises FileNotFoundError."""
        with self.filesystem.open_input_stream(self.path(relative)) as stream:
            return stream.read()

    @retried
    def sha256(self, relative: str) -> str:
        """Hex digest of a file's content."""
        digest = hashlib.sha256()
        with self.filesystem.open_input_stream(self.path(relative)) as stream:
            while chunk := stream.read(_CHUNK):
                digest.update(chunk)
        return digest.hexdigest()

    def checksums(self) -> dict[str, dict[str, Any]]:
        """{path: {"bytes": size, "sha256": hex digest}} of all files below."""
        return {entry.path: {"bytes": entry.bytes, "sha256": self.sha256(entry.path)} for entry in self.walk()}

    def problems(self, files: Mapping[str, Mapping[str, Any]], *, hashed: bool = False) -> Sequence[str]:
        """Which of these files, as `checksums` lists them, are missing or have another size or, if hashed, content."""
        present = {entry.path: entry.bytes for entry in self.walk()}
        wrong = []
        for path, expected in files.items():
            if path not in present:
                wrong.append(f"{path} is missing")
            elif present[path] != expected.get("bytes", present[path]):
                wrong.append(f"{path} has {present[path]} bytes instead of {expected['bytes']}")
            elif hashed and self.sha256(path) != expected["sha256"]:
                wrong.append(f"{path} does not match its checksum")
        return wrong

    @retried
    def download(self, relative: str, target: Path | str) -> None:
        """Copies a file to a local path. Raises FileNotFoundError."""
        with self.filesystem.open_input_stream(self.path(relative)) as stream, open(target, "wb") as out:
            shutil.copyfileobj(stream, out, _CHUNK)

    # ---- writing ----

    def write_bytes(self, relative: str, data: bytes) -> None:
        """Replaces the file in one step and makes folders as needed."""
        self._put(relative, lambda stream: stream.write(data))

    def write_text(self, relative: str, text: str) -> None:
        self.write_bytes(relative, text.encode())

    def upload(self, source: Path | str, relative: str) -> None:
        """Copies a local file."""

        def fill(stream: BinaryIO | HashedStream) -> None:
            with open(source, "rb") as reader:
                shutil.copyfileobj(reader, stream, _CHUNK)

        self._put(relative, fill)

    @contextmanager
    def writing(self, relatives: Sequence[str]) -> Iterator[dict[str, HashedStream]]:
        """{path: stream}. The files become visible when the block ends without an error, each of them whole.

        Locally all of them are on the disk before the first is renamed.
        """
        if self.is_local:
            yield from self._writing_locally(relatives)
            return
        # An output stream that an error closes would publish half a file, so the bytes are complete before it opens.
        with tempfile.TemporaryDirectory(prefix="data_prep-") as folder:
            scratch = {relative: Path(folder, str(i)) for i, relative in enumerate(relatives)}
            with ExitStack() as stack:
                yield {relative: HashedStream(stack.enter_context(p.open("wb"))) for relative, p in scratch.items()}
            for relative, place in scratch.items():
                self.upload(place, relative)

    def _writing_locally(self, relatives: Sequence[str]) -> Iterator[dict[str, HashedStream]]:
        suffix = f".tmp-{secrets.token_hex(4)}-{os.getpid()}"
        targets = {relative: self.path(relative) for relative in relatives}
        folders = sorted({os.path.dirname(path) for path in targets.values()})
        for folder in folders:
            os.makedirs(folder, exist_ok=True)
        try:
            with naming_full_disk(folders[0]), ExitStack() as stack:
                opened = {r: stack.enter_context(open(path + suffix, "wb")) for r, path in targets.items()}
                streams = {relative: HashedStream(stream) for relative, stream in opened.items()}
                yield streams
                for stream in streams.values():
                    stream.sync()
            for path in targets.values():
                os.replace(path + suffix, path)
            for folder in folders:
                _sync_folder(folder)
        finally:
            for path in targets.values():
                if os.path.exists(path + suffix):
                    os.remove(path + suffix)

    @retried
    def _put(self, relative: str, fill: Callable[[BinaryIO | HashedStream], object]) -> None:
        """Writes one file; `fill` writes its bytes to a stream and may be called again."""
        if self.is_local:
            with self.writing([relative]) as streams:
                fill(streams[relative])
            return
        path = self.path(relative)
        try:  # object stores have no folders; only filesystems that have them need them made
            stream = self.filesystem.open_output_stream(path)
        except FileNotFoundError:
            self.filesystem.create_dir(posixpath.dirname(path), recursive=True)
            stream = self.filesystem.open_output_stream(path)
        with stream:
            fill(stream)

    # ---- deleting ----

    @retried
    def delete(self, relative: str = "") -> None:
        """Removes a file, or a folder with all below it; does nothing where neither exists."""
        entry = self.info(relative)
        if entry is not None and entry.is_folder:
            self.filesystem.delete_dir(self.path(relative))
        elif entry is not None:
            self.filesystem.delete_file(self.path(relative))

    def remove_temporaries(self) -> None:
        """Deletes what killed writers left below a local folder."""
        for path in Path(self.base).rglob("*.tmp-*") if self.is_local else ():
            if _TEMPORARY.search(path.name):
                path.unlink(missing_ok=True)


def open_store(uri: str | os.PathLike[str]) -> Store:
    """Opens a local path, file://, s3:// or gs:// folder; it need not exist yet.

    Raises UserError for other schemes and for URIs that pyarrow cannot read.
    """
    text = os.fspath(uri)
    scheme = text.split("://", 1)[0] if "://" in text else ""
    if scheme in ("", "file"):
        path = urllib.parse.unquote(text.removeprefix("file://")) if scheme else text
        if scheme and not path.startswith("/"):
            raise UserError(f"{text!r} cannot be opened: a file:// URI has three slashes before a path of this machine")
        path = os.path.abspath(os.path.expanduser(path))
        return Store(path, filesystem=pafs.LocalFileSystem(), base=path)
    if scheme not in ("s3", "gs"):
        raise UserError(f"{text!r} cannot be opened: use a local path, file://, s3:// or gs://, not {scheme}://")
    try:
        filesystem, base = pafs.FileSystem.from_uri(text)
    except (OSError, ValueError) as error:
        raise UserError(f"{text!r} cannot be opened: {str(error).splitlines()[0]}") from error
    return Store(text.rstrip("/"), filesystem=filesystem, base=base)


def join(uri: str, relative: str) -> str:
    """Path or URI of something below a folder; options after "?" (region, endpoint) stay at the end."""
    head, mark, options = uri.partition("?") if "://" in uri else (uri, "", "")
    return posixpath.join(head.rstrip("/") or "/", relative).rstrip("/") + mark + options


def parent(uri: str) -> tuple[str, str]:
    """A file's path or URI -> (its folder's, its name); the inverse of `join`."""
    if uri.startswith("file://"):
        uri = urllib.parse.unquote(uri.removeprefix("file://"))
    head, mark, options = uri.partition("?") if "://" in uri else (uri, "", "")
    folder, slash, name = head.rpartition("/")
    return (folder or slash or ".") + mark + options, name


def _bad_link(folder: str, above: tuple[str, ...] = ()) -> str | None:
    above = (*above, os.path.realpath(folder))
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if entry.is_symlink() and not os.path.exists(entry.path) and not entry.name.startswith("."):
                return f"{entry.path} is a link to a file that is not there: mend or remove it"
            if not entry.is_dir():
                continue
            target = os.path.join(os.path.realpath(entry.path), "") if entry.is_symlink() else None
            if target and any(os.path.join(each, "").startswith(target) for each in above):
                return f"{entry.path} is a link to a folder that it lies in, a loop without end: remove it"
            if problem := _bad_link(entry.path, above):
                return problem
    return None


def _sync_folder(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
