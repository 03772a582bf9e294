"""Files on local paths, NFS, S3 and GCS behind one small class, and the name that owns a run folder.

Everything goes through pyarrow filesystems. Nothing here renames or links across a store: a file appears by one put
(local: temporary file, fsync, rename inside the same folder), so a reader sees all of a small file or none of it.

    store = open_store("s3://bucket/spn/imagenet128")
    store.write_bytes("nodes/a/_SUCCESS.json", b"{}")
"""

from __future__ import annotations

import functools
import hashlib
import os
import posixpath
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, ParamSpec, TypeVar

import pyarrow.fs as pafs
import yaml

from data_prep.files import is_hiccup
from pipelines.errors import UserError

SCHEMES = ("file", "s3", "gs")
MARKER = "config.yaml"  # its `name` says whose run folder this is
_CHUNK = 4 * 2**20  # bytes a read
_RETRY_SEC = (0.5, 2.0, 8.0)  # waits before the same call is tried again after a hiccup
P = ParamSpec("P")
R = TypeVar("R")


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
