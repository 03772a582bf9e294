"""Where files are: paths and URIs through pyarrow filesystems, and writing a file so that it is whole or absent."""

from __future__ import annotations

import hashlib
import os
import pathlib
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

import pyarrow.fs as pafs

_SCHEME = re.compile(r"^[a-z][a-z0-9+.-]+://")
_TEMPORARY = re.compile(r"\.tmp-\d+$")


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
    """A binary stream to write to that counts and hashes what passes through it."""

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

    @property
    def sha256(self) -> str:
        return self._sha.hexdigest()


@contextmanager
def whole_file(filesystem: pafs.FileSystem, path: str) -> Iterator[HashedStream]:
    """A stream to `path`, which becomes visible only when the block ends without an error.

    Locally: a temporary name beside it, fsync, rename. Object stores show an upload only when it is complete, and
    have no rename, so there the block ends with one put.
    """
    if isinstance(filesystem, pafs.LocalFileSystem):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        temporary = f"{path}.tmp-{os.getpid()}"
        try:
            with open(temporary, "wb") as stream:
                yield HashedStream(stream)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(temporary, path)
            _fsync_folder(os.path.dirname(path))
        finally:
            if os.path.exists(temporary):
                os.remove(temporary)
        return
    # An output stream that is closed by an error would publish half a file, so the bytes are complete before it opens.
    with tempfile.TemporaryDirectory(prefix="data_prep-") as folder:
        scratch = os.path.join(folder, "whole")
        with open(scratch, "wb") as stream:
            yield HashedStream(stream)
        with open(scratch, "rb") as source, filesystem.open_output_stream(path) as target:
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
