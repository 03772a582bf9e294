"""Where files are: paths and URIs through pyarrow filesystems, and writing a file so that it is whole or absent."""

from __future__ import annotations

import errno
import hashlib
import os
import pathlib
import re
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import BinaryIO

import pyarrow.fs as pafs

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
