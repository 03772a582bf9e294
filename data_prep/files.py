"""Files on local paths, NFS, S3 and GCS through pyarrow filesystems: one class, and files that are whole or absent.

Nothing here renames or links across a store: a file appears by one put (local: temporary file, fsync, rename inside the
same folder), so a reader sees all of it or none.

    store = open_store("s3://bucket/spn/imagenet128")
    store.write_bytes("nodes/a/_SUCCESS.json", b"{}")
"""

from __future__ import annotations

import errno
import functools
import hashlib
import os
import pathlib
import posixpath
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, ParamSpec, TypeVar

import pyarrow.fs as pafs
import yaml

_SCHEME = re.compile(r"^[a-z][a-z0-9+.-]+://")
_TEMPORARY = re.compile(r"\.tmp-\d+$")
_HICCUPS = {
    *(errno.EIO, errno.ESTALE, errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT, errno.EPIPE, errno.ECONNREFUSED),
    *(errno.ECONNRESET, errno.ECONNABORTED, errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ENETUNREACH, errno.ENETDOWN),
    *(errno.ENETRESET, errno.ENOTCONN),
}
# pyarrow passes on in words what an object store or the way to it said.
_HICCUP_WORDS = re.compile(
    r"AWS Error (NETWORK_CONNECTION|SLOW_DOWN|INTERNAL_FAILURE|SERVICE_UNAVAILABLE|THROTTLING|REQUEST_TIMEOUT|"
    r"REQUEST_EXPIRED|UNKNOWN \(HTTP status (429|5\d\d)\))|curlCode|Status\((UNAVAILABLE|DEADLINE_EXCEEDED|INTERNAL)|"
    r"timed? ?out|connection (reset|closed|refused)",
    re.IGNORECASE,
)
_SYNC_BYTES = 8_000_000  # written to a local file before the disk is asked to take them

SCHEMES = ("file", "s3", "gs")
MARKER = "config.yaml"  # its `name` says whose run folder this is
_CHUNK = 4 * 2**20  # bytes a read
_RETRY_SEC = (0.5, 2.0, 8.0)  # waits before the same call is tried again after a hiccup
P = ParamSpec("P")
R = TypeVar("R")


class UserError(Exception):
    """A mistake in the arguments, the config or the named data; the message is one line: what, where, what is valid."""


def is_hiccup(error: BaseException) -> bool:
    """Whether the same call on a store may work in a moment: the disk, the network or the server failed, not we.

    A missing file, a full disk or a refused permission stays what it is.
    """
    if not isinstance(error, OSError) or isinstance(error, FileNotFoundError | PermissionError):
        return False
    if isinstance(error, ConnectionError | TimeoutError) or error.errno in _HICCUPS:
        return True
    return error.errno is None and _HICCUP_WORDS.search(str(error)) is not None


def locate(uri: str) -> tuple[pafs.FileSystem, str]:
    """A local path or a URI (file, s3, gs, ...) -> its filesystem and the path on it, without a trailing slash."""
    if not _SCHEME.match(uri):
        uri = str(pathlib.Path(uri).expanduser().absolute())
    filesystem, path = pafs.FileSystem.from_uri(uri)
    return filesystem, path.rstrip("/") or "/"


def exists(filesystem: pafs.FileSystem, path: str) -> bool:
    return filesystem.get_file_info(path).type == pafs.FileType.File


def read_bytes(filesystem: pafs.FileSystem, path: str) -> bytes:
    with filesystem.open_input_stream(path) as stream:
        return stream.read()


class HashedStream:
    """A binary stream to write to that counts and hashes what passes through it.

    `syncs`: writes the local file behind `stream` to the disk from there while more is written, so that the end, which
    has to wait for the disk, has little left to wait for.
    """

    def __init__(self, stream: BinaryIO, *, syncs: ThreadPoolExecutor | None = None) -> None:
        self._stream, self._sha = stream, hashlib.sha256()
        self._syncs, self._sync_bytes = syncs, 0
        self._sync: Future | None = None
        self.num_bytes = 0
        self.closed = False

    def write(self, data: bytes | memoryview) -> int:
        self._sha.update(data)
        self.num_bytes += len(data)
        written = self._stream.write(data)
        if self._syncs is not None and self.num_bytes - self._sync_bytes >= _SYNC_BYTES and self._is_settled():
            self._sync, self._sync_bytes = self._syncs.submit(os.fsync, self._stream.fileno()), self.num_bytes
        return written

    def flush(self) -> None:
        self._stream.flush()

    def to_disk(self) -> None:
        """Returns when all of a local file is on the disk."""
        if self._sync is not None:
            self._sync.result()  # the kernel tells of an error once: the fsync below would not
        self._stream.flush()
        os.fsync(self._stream.fileno())

    def _is_settled(self) -> bool:
        if self._sync is not None and self._sync.done():
            self._sync.result()
        return self._sync is None or self._sync.done()

    @property
    def sha256(self) -> str:
        return self._sha.hexdigest()


@contextmanager
def whole_file(filesystem: pafs.FileSystem, path: str) -> Iterator[HashedStream]:
    """A stream to `path`, which becomes visible only when the block ends without an error; see `whole_files`."""
    with whole_files(filesystem, [path]) as streams:
        yield streams[path]


@contextmanager
def whole_files(filesystem: pafs.FileSystem, paths: list[str]) -> Iterator[dict[str, HashedStream]]:
    """path -> a stream to it. The files become visible only when the block ends without an error, each of them whole.

    Locally: temporary names beside them, all on the disk before the first is renamed. Object stores show an upload only
    when it is complete, and have no rename, so there the block ends with one put for each.
    """
    if isinstance(filesystem, pafs.LocalFileSystem):
        folders = sorted({os.path.dirname(path) for path in paths})
        temporaries = {path: f"{path}.tmp-{os.getpid()}" for path in paths}
        for folder in folders:
            os.makedirs(folder, exist_ok=True)
        try:
            with ThreadPoolExecutor(1, "sync") as syncs, ExitStack() as stack:
                streams = {
                    path: HashedStream(stack.enter_context(open(temporary, "wb")), syncs=syncs)
                    for path, temporary in temporaries.items()
                }
                yield streams
                for stream in streams.values():
                    stream.to_disk()
            for path, temporary in temporaries.items():
                os.replace(temporary, path)
            for folder in folders:
                _fsync_folder(folder)
        finally:
            for temporary in temporaries.values():
                if os.path.exists(temporary):
                    os.remove(temporary)
        return
    # An output stream that is closed by an error would publish half a file, so the bytes are complete before it opens.
    with tempfile.TemporaryDirectory(prefix="data_prep-") as folder:
        scratch = {path: os.path.join(folder, str(i)) for i, path in enumerate(paths)}
        with ExitStack() as stack:
            yield {path: HashedStream(stack.enter_context(open(place, "wb"))) for path, place in scratch.items()}
        for path, place in scratch.items():
            with open(place, "rb") as source, filesystem.open_output_stream(path) as target:
                while chunk := source.read(1 << 24):
                    target.write(chunk)


def remove_temporaries(filesystem: pafs.FileSystem, folder: str) -> None:
    """Deletes what killed writers of `whole_file` left below a local folder."""
    if isinstance(filesystem, pafs.LocalFileSystem):
        for path in pathlib.Path(folder).rglob("*.tmp-*"):
            if _TEMPORARY.search(path.name):
                path.unlink(missing_ok=True)


def put_bytes(filesystem: pafs.FileSystem, path: str, data: bytes) -> None:
    with whole_file(filesystem, path) as stream:
        stream.write(data)


def digest(filesystem: pafs.FileSystem, path: str) -> tuple[int, str]:
    """(bytes, sha256 in hex) of a file, read in pieces."""
    sha, size = hashlib.sha256(), 0
    with filesystem.open_input_stream(path) as stream:
        while chunk := stream.read(1 << 22):
            sha.update(chunk)
            size += len(chunk)
    return size, sha.hexdigest()


def _fsync_folder(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _patient(call: Callable[P, R]) -> Callable[P, R]:
    """Tries again after a hiccup; for calls that may be made twice."""

    @functools.wraps(call)
    def patient(*args: P.args, **kwargs: P.kwargs) -> R:
        for wait_sec in _RETRY_SEC:
            try:
                return call(*args, **kwargs)
            except OSError as error:
                if not is_hiccup(error):
                    raise
            time.sleep(wait_sec)
        return call(*args, **kwargs)

    return patient


@dataclass(frozen=True)
class FileEntry:
    """A file or a folder below a store; path is relative to where it was listed from the store's root."""

    path: str
    bytes: int
    is_folder: bool


class Store:
    """A folder on some filesystem. Paths given to methods are relative, with forward slashes; "" is the folder."""

    def __init__(self, uri: str, *, filesystem: pafs.FileSystem, base: str) -> None:
        self.uri = uri
        self.filesystem = filesystem
        self.base = base.rstrip("/") or "/"
        self.is_local = isinstance(filesystem, pafs.LocalFileSystem)

    def __repr__(self) -> str:
        return f"Store({self.uri!r})"

    def __getstate__(self) -> str:
        return self.uri

    def __setstate__(self, uri: str) -> None:
        self.__dict__.update(open_store(uri).__dict__)

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

    @_patient
    def info(self, relative: str) -> FileEntry | None:
        """What lies there, None if nothing does."""
        found = self.filesystem.get_file_info(self.path(relative))
        return None if found.type == pafs.FileType.NotFound else self._entry(found)

    def exists(self, relative: str) -> bool:
        return self.info(relative) is not None

    def list(self, relative: str = "") -> list[FileEntry]:
        """Files and folders directly below, by name; empty where there is no such folder."""
        return self._select(relative, recursive=False)

    def walk(self, relative: str = "") -> list[FileEntry]:
        """All files below, by path."""
        return [entry for entry in self._select(relative, recursive=True) if not entry.is_folder]

    @_patient
    def read_bytes(self, relative: str) -> bytes:
        """Raises FileNotFoundError."""
        with self.filesystem.open_input_stream(self.path(relative)) as stream:
            return stream.read()

    def chunks(self, relative: str) -> Iterator[bytes]:
        """The file's bytes, a few MiB at a time."""
        with self.filesystem.open_input_stream(self.path(relative)) as stream:
            while chunk := stream.read(_CHUNK):
                yield chunk

    @_patient
    def write_bytes(self, relative: str, data: bytes) -> None:
        """Puts the whole file in one step and makes folders as needed; replaces what was there."""
        target = self.local(relative)
        if target is not None:
            _write_local(target, data)
            return
        with self._output(relative) as stream:
            stream.write(data)

    def write_text(self, relative: str, text: str) -> None:
        self.write_bytes(relative, text.encode())

    @_patient
    def sha256(self, relative: str) -> str:
        """Hex digest of a file's content."""
        digest = hashlib.sha256()
        for chunk in self.chunks(relative):
            digest.update(chunk)
        return digest.hexdigest()

    def upload(self, source: Path | str, relative: str) -> None:
        """Copies a local file, or all files below a local folder, to `relative`."""
        source = Path(source)
        if source.is_file():
            self._put_file(source, relative)
            return
        for file in sorted(p for p in source.rglob("*") if p.is_file()):
            self._put_file(file, posixpath.join(relative, file.relative_to(source).as_posix()))

    def download(self, relative: str, target: Path | str) -> None:
        """Copies a file, or all files below a folder, to a local path. Raises FileNotFoundError."""
        target, entry = Path(target), self.info(relative)
        if entry is None:
            raise FileNotFoundError(f"{self.uri_of(relative)} does not exist")
        files = self.walk(relative) if entry.is_folder else [entry]
        for file in files:
            inside = posixpath.relpath(file.path, relative) if entry.is_folder and relative else file.path
            self._get_file(file.path, target / inside if entry.is_folder else target)

    @_patient
    def delete(self, relative: str) -> None:
        """Removes a file or a folder with all below; nothing happens if it is not there."""
        entry = self.info(relative)
        if entry is not None and entry.is_folder:
            self.filesystem.delete_dir(self.path(relative))
        elif entry is not None:
            self.filesystem.delete_file(self.path(relative))

    @_patient
    def _get_file(self, relative: str, place: Path) -> None:
        place.parent.mkdir(parents=True, exist_ok=True)
        with place.open("wb") as out:
            for chunk in self.chunks(relative):
                out.write(chunk)

    @_patient
    def _put_file(self, source: Path, relative: str) -> None:
        target = self.local(relative)
        if target is not None:
            target.parent.mkdir(parents=True, exist_ok=True)
            with source.open("rb") as reader, _replacing(target) as writer:
                shutil.copyfileobj(reader, writer, _CHUNK)
            return
        with source.open("rb") as reader, self._output(relative) as writer:
            shutil.copyfileobj(reader, writer, _CHUNK)

    def _output(self, relative: str) -> BinaryIO:
        path = self.path(relative)
        try:  # object stores have no folders; only stores that do need them made
            return self.filesystem.open_output_stream(path)
        except FileNotFoundError:
            self.filesystem.create_dir(posixpath.dirname(path), recursive=True)
            return self.filesystem.open_output_stream(path)

    @_patient
    def _select(self, relative: str, *, recursive: bool) -> list[FileEntry]:
        selector = pafs.FileSelector(self.path(relative), recursive=recursive, allow_not_found=True)
        entries = (self._entry(found) for found in self.filesystem.get_file_info(selector))
        return sorted(entries, key=lambda entry: entry.path)

    def _entry(self, found: pafs.FileInfo) -> FileEntry:
        relative = posixpath.relpath(found.path, self.base)
        is_folder = found.type == pafs.FileType.Directory
        return FileEntry(path=relative, bytes=0 if is_folder else found.size, is_folder=is_folder)


def open_store(uri: str | os.PathLike[str]) -> Store:
    """Opens a local path, file://, s3:// or gs:// folder; it need not exist yet.

    Raises UserError for other schemes and for URIs that pyarrow cannot read.
    """
    text = os.fspath(uri)
    scheme = text.split("://", 1)[0] if "://" in text else ""
    if scheme in ("", "file"):
        path = os.path.abspath(os.path.expanduser(text.removeprefix("file://")))
        return Store(path, filesystem=pafs.LocalFileSystem(), base=path)
    if scheme not in SCHEMES:
        raise UserError(f"storage {text!r}: scheme {scheme!r} is not known; use a local path, file://, s3:// or gs://")
    try:
        filesystem, base = pafs.FileSystem.from_uri(text)
    except (OSError, ValueError) as error:
        raise UserError(f"storage {text!r} cannot be opened: {str(error).splitlines()[0]}") from error
    return Store(text.rstrip("/"), filesystem=filesystem, base=base)


def join(uri: str, relative: str) -> str:
    """Path or URI of something below a folder; options after "?" (region, endpoint) stay at the end."""
    head, mark, options = uri.partition("?") if "://" in uri else (uri, "", "")
    return posixpath.join(head.rstrip("/") or "/", relative).rstrip("/") + mark + options


def check_run_folder(store: Store, *, name: str) -> None:
    """Raises UserError when the run folder was made by a config of another name."""
    owner = run_folder_owner(store)
    if owner is not None and owner != name:
        raise UserError(f"{store.uri} is the run folder of config {owner!r}, not of {name!r}; choose another storage")


def claim_run_folder(store: Store, *, name: str, config_yaml: str) -> None:
    """Checks the run folder's owner and writes its config.yaml, which must hold `name`."""
    check_run_folder(store, name=name)
    store.write_text(MARKER, config_yaml)
    assert run_folder_owner(store) == name, f"{MARKER} must hold name: {name}"


def run_folder_owner(store: Store) -> str | None:
    """The config name that a run folder belongs to, None for a new one. Raises UserError if config.yaml is not ours."""
    try:
        content = yaml.safe_load(store.read_bytes(MARKER))
    except FileNotFoundError:
        return None
    except (yaml.YAMLError, UnicodeDecodeError):
        content = None
    if not isinstance(content, dict) or not isinstance(content.get("name"), str):
        raise UserError(f"{store.uri_of(MARKER)} has no config name: {store.uri} does not look like a run folder")
    return content["name"]


def _write_local(target: Path, data: bytes) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with _replacing(target) as stream:
        stream.write(data)


@contextmanager
def _replacing(target: Path) -> Iterator[BinaryIO]:
    """Writes a temporary file beside `target` and renames it on success, so that no half file is ever seen."""
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as stream:
            os.fchmod(stream.fileno(), 0o666 & ~_umask())  # mkstemp makes private files; shared folders stay readable
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
