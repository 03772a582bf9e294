"""What a source consists of: items (one image each), files, and what was turned away. Plain data, no reading.

Words: a file lies below the source's root; an item is one image, a whole file or a part of one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

ENCODED, HWC, CHW = "encoded", "hwc", "chw"  # an image file; raw uint8 of a square, interleaved or in planes


class UnusableSource(ValueError):
    """A source that must not be built from: damaged archives, wrong counts, unsafe files. `reason` is a stable code."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason = reason
        self.message = message

    def __reduce__(self) -> tuple:
        return UnusableSource, (self.reason, self.message)


class Unplannable(ValueError):
    """The configuration does not go with the source; one line that begins with the field's name says how."""


@contextlib.contextmanager
def readable(path: str) -> Iterator[None]:
    """A listed file that is not there any more or may not be read is the source's fault and named: UnusableSource.

    Other errors of the storage stay what they are: the same read may work in a moment.
    """
    try:
        yield
    except FileNotFoundError:
        raise UnusableSource("missing_file", f"{path} was there when the folder was listed, and is gone") from None
    except PermissionError:
        raise UnusableSource("unreadable_file", f"{path} may not be read by this user") from None


def as_text(data: bytes, *, path: str) -> str:
    """Raises UnusableSource."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UnusableSource("corrupt_source_file", f"{path} is no text in UTF-8, from byte {error.start} on") from None


@dataclass(frozen=True, slots=True)
class SourceFile:
    path: str  # below the root, forward slashes
    size: int  # bytes
    mtime_ns: int  # 0 where the filesystem has none


@dataclass(frozen=True, slots=True)
class Item:
    """One image of a source, and where its bytes are. Small on purpose: a source has up to millions."""

    key: str  # unique in the source; the same for the same image in tars and in folders
    path: str  # file below the root
    size: int  # bytes; 0 where only reading tells (rows of a Parquet file)
    offset: int | None = None  # first byte in the file; None: the whole file, or a row of a block
    block: int | None = None  # of files that are read in blocks: row group of a Parquet file, member of an archive
    row: int | None = None  # within the block
    label: int | None = None
    split: str | None = None  # train, valid or test where the source itself says so
    layout: str = ENCODED


@dataclass(frozen=True, slots=True)
class Rejected:
    """An item that goes to quarantine before anything is decoded. Its bytes, if any, are where the item says."""

    item: Item
    reason: str
    message: str


@dataclass(frozen=True)
class Listing:
    """The files below a root, without the hidden ones and the system's."""

    root: str  # path or URI, as in the config
    files: tuple[SourceFile, ...]  # sorted by path
    num_hidden: int


@dataclass
class Index:
    """What a reader finds in a listing; it is filled file by file."""

    items: list[Item] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)
    side: int | None = None  # pixels, where the images are finished ones that must not be resized
    num_skipped: int = 0  # files and archive members that are no data: read-me files, label lists

    def reject(self, item: Item, reason: str, message: str) -> None:
        self.rejected.append(Rejected(item, reason, message))


@dataclass(frozen=True)
class Source:
    name: str  # the reader, one of data_prep.config.SOURCES
    why: str  # what the folder was recognised by
    root: str  # path or URI, as in the config
    items: list[Item]  # sorted by key
    rejected: list[Rejected]
    skipped: dict[str, int]  # files that are no data, counted by reason
    listing_hash: str  # hex; changes when a file comes, goes or changes
    side: int | None = None  # pixels, where the images are finished ones that must not be resized
