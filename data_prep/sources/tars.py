"""Members of tar archives as ranges of bytes. An archive is read through once; nothing is extracted to disk.

Tars inside tars are ranges too, so a member of an inner archive is found by its place in the outer file.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import pyarrow as pa

from data_prep.sources.base import Index, Item, UnusableSource, is_hidden, is_unsafe

# One read takes headers and all that lies between: a million small requests would take hours on an object store or a
# slow disk, reading through takes minutes.
_BUFFER_BYTES = 1 << 23
_BLOCK = 512
_MAX_WANTED = 1 << 20


@dataclass(frozen=True, slots=True)
class Member:
    name: str
    offset: int  # of its bytes, in the file that holds the archive
    size: int
    is_regular: bool  # no link, device or sparse file
    data: bytes | None = None  # of members that the caller wants to read at once


def members(
    stream: pa.NativeFile,
    *,
    path: str,
    begin: int = 0,
    size: int | None = None,
    wants: Callable[[str], bool] = lambda name: False,
) -> Iterator[Member]:
    """All members but folders, in their order. `begin` and `size`: where an inner archive lies in the stream.

    `wants` says by name of which small members the bytes are given too.

    Raises UnusableSource (`path` is its name for people): not_an_archive; truncated_archive when it ends inside a
    member or without the zero blocks that end a tar, so that a short download never passes for a whole set.
    """
    size = stream.size() - begin if size is None else size
    window: Any = _Buffered(_Window(stream, begin, size), _BUFFER_BYTES)
    try:
        archive: Any = tarfile.open(fileobj=window, mode="r:")
    except tarfile.TarError as error:
        what = "compressed; unpack it first (its members have no place in the file)" if _is_gzip(window) else str(error)
        raise UnusableSource("not_an_archive", f"{path}: {what}") from None
    try:
        while (member := archive.next()) is not None:
            archive.members.clear()  # else a million headers stay in memory
            if not member.isdir():
                is_regular = member.isreg() and not member.issparse()
                data = None
                if is_regular and member.size <= _MAX_WANTED and wants(member.name):
                    window.seek(member.offset_data)
                    data = window.read(member.size)
                yield Member(member.name, begin + member.offset_data, member.size, is_regular, data)
        window.seek(archive.offset)
        end = window.read(_BLOCK)
    except tarfile.TarError as error:
        raise UnusableSource("truncated_archive", f"{path}: {error}") from None
    if end != bytes(_BLOCK):
        raise UnusableSource("truncated_archive", f"{path}: it has no end mark after {archive.offset} bytes")


def add_member(found: Index, member: Member, item: Item, problem: tuple[str, str] | None = None) -> None:
    """Puts an image of an archive into the index, or among the rejected: not_a_regular_file, unsafe_path, or with a
    problem (reason, message) of the caller's."""
    if not member.is_regular:
        found.reject(item, "not_a_regular_file", f"{member.name} is a link, a device or a sparse file")
    elif is_unsafe(member.name):
        found.reject(item, "unsafe_path", f"the name {member.name!r} points outside of the archive")
    elif problem is not None:
        found.reject(item, *problem)
    else:
        found.items.append(item)


def is_side_file(name: str) -> bool:
    return is_hidden(name.removeprefix("./"))


def _is_gzip(window: BinaryIO) -> bool:
    window.seek(0)
    return window.read(2) == b"\x1f\x8b"


class _Buffered(io.BufferedReader):
    """Reads no more at once than a header or a small member has: extended headers are read whole."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or not 0 <= size <= _MAX_WANTED:
            raise tarfile.ReadError(f"a header of {size} bytes; {_MAX_WANTED} are allowed")
        return super().read(size)


class _Window(io.RawIOBase):
    """Part of a stream as a file of its own."""

    def __init__(self, stream: pa.NativeFile, begin: int, size: int) -> None:
        self._stream, self._begin, self._size, self._at = stream, begin, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        wanted = max(0, min(len(buffer), self._size - self._at))
        data = self._stream.read_at(wanted, self._begin + self._at) if wanted else b""
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)
