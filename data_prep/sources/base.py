"""What every source consists of, and what the readers of all layouts share: names, the listing, reading single items.

A file lies below the source's root. An item is one image, a whole file or a part of one. A layout is a module of this
package that finds the items in a listing; modules are imported by name, so that a build imports one of them.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import pyarrow as pa

from data_prep.config import DataConfig
from data_prep.files import FileEntry as FileEntry
from data_prep.files import UserError, is_transient, open_store, parent, printable
from data_prep.images import IMAGE_SUFFIXES as IMAGE_SUFFIXES
from data_prep.images import Unusable, UnusableImage, damage_named
from data_prep.images import is_hidden as is_hidden
from data_prep.images import is_image_name as is_image_name

ENCODED, HWC, CHW = "encoded", "hwc", "chw"  # an image file; raw uint8 of a square, interleaved or in planes

PARTITION = "list_eval_partition.txt"  # of CelebA
MAPPINGS: tuple[str, ...] = ("CelebA-HQ-to-CelebA-mapping.txt", "image_list.txt")  # the first that exists counts

_MAX_OPEN = 16  # files that stay open for further items
MAX_FILE_BYTES = 320 << 20  # of one image: a BMP of images.MAX_PIXELS is smaller
MAX_UNFOLDED_BYTES = 320 << 20  # of what is read at once, unless it is also large as it is stored
_MAX_UNFOLDING = 8  # images and pixels of images hardly shrink when they are compressed
_WORDS = dict(train="train", training="train", val="valid", valid="valid", validation="valid", dev="valid")
_WORDS |= dict(test="test", testing="test", eval="test", evaluation="test")
_WORD = re.compile("train|val|dev|test", re.IGNORECASE)  # in each of them
# Hugging Face adds a hash for each file: train-00000-of-00002-2f8f6bfa852eac4b.parquet.
_SERIES = re.compile(r"^(?P<series>.*)-(?P<index>\d+)-of-(?P<count>\d+)(?:-[0-9a-f]{6,})?(?P<rest>[^/]*)$")
MAX_LOSS = 0.01  # of the images, that a reader which was not asked for may leave out


class UnusableSource(Unusable, ValueError):
    """A source that must not be built from: damaged archives, wrong counts, unsafe files."""


class Unplannable(ValueError):
    """The configuration does not fit the source; one line that begins with the field's name says how."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


# ---- what a source consists of -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Item:
    """One image of a source, and where its bytes are. Small on purpose: a source has up to millions."""

    key: str  # unique in the source; the same for the same image in tars and in folders
    path: str  # file below the root
    size: int  # bytes; 0 where only reading tells (rows of a Parquet file)
    offset: int | None = None  # first byte in the file; None: the whole file, or a row of a block
    block: int | None = None  # of files that are read in blocks: row group of a Parquet file, member of an archive
    row: int | None = None  # within the block
    label: Any = None  # whatever the source has; `find` keeps whole numbers of 32 bits
    split: str | None = None  # train, valid or test where the source itself says so
    layout: str = ENCODED
    column: str | None = None  # of a table


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
    files: tuple[FileEntry, ...]  # sorted by path
    num_hidden: int

    @functools.cached_property
    def images(self) -> list[FileEntry]:
        return [file for file in self.files if is_image_name(file.path)]

    @functools.cached_property
    def others(self) -> list[FileEntry]:
        return [file for file in self.files if not is_image_name(file.path)]

    def open(self, path: str) -> pa.NativeFile:
        """A listed file for reading at any position. Raises UnusableSource when it is gone or may not be read."""
        with readable(path):
            return open_store(self.root).open(path)

    def read(self, path: str) -> bytes:
        with readable(path):
            return open_store(self.root).read_bytes(path)


@dataclass
class Index:
    """The items that a layout finds in a listing; it is filled file by file."""

    items: list[Item] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)
    side: int | None = None  # pixels, where the images are finished ones that must not be resized
    skipped: Counter[str] = field(default_factory=Counter)  # what is left out of the layout's files, by reason
    note: str = ""  # for people: what was chosen among several images of a sample

    def with_images(self, has_images: dict[str, bool]) -> list[str]:
        """Paths of the archives that hold images. The others are left out and named, unless none holds any."""
        kept = [path for path, has in has_images.items() if has]
        if kept and (others := [path for path, has in has_images.items() if not has]):
            self.skipped["other_archive"] += len(others)
            self.note += f"; no images in {', '.join(others[:3])}"
        return kept or list(has_images)

    def reject(self, item: Item, reason: str, message: str) -> None:
        self.rejected.append(Rejected(item, reason, message))


@dataclass(frozen=True)
class Source:
    name: str  # the layout, one of data_prep.config.SOURCES
    why: str  # what the folder was recognised by
    root: str  # path or URI, as in the config
    items: list[Item]  # sorted by key
    rejected: list[Rejected]
    skipped: dict[str, int]  # what is left out, counted by reason
    listing_hash: str  # hex; changes when a file appears, disappears or changes
    side: int | None = None  # pixels, where the images are finished ones that must not be resized
    split_like: str | None = None  # a name that may mean a split and was not taken for one


class Layout(Protocol):
    """The names that a layout's module has. Only layouts whose items are rows of blocks need `read_block`, and only
    those that not just any file of theirs proves need `recognise`."""

    LAYOUT: str  # for people
    COUNT: str  # for people: how many images

    def recognise(self, listing: Listing, config: DataConfig) -> str | None:
        """Why the folder is taken for this layout, or None."""

    def used(self, listing: Listing, config: DataConfig) -> Iterator[FileEntry]:
        """The files that the layout explains: those that it reads, and those that it leaves out for a known reason."""

    def index(self, listing: Listing, config: DataConfig) -> Index:
        """The items in a listing of these files alone; there is at least one."""

    def read_block(self, stream: pa.NativeFile, item: Item) -> Sequence[Any]:
        """The rows of the item's block: bytes, or {"bytes": ..., "path": ...}. Raises UnusableSource."""


def layout(name: str) -> Layout:
    return cast(Layout, importlib.import_module(f"data_prep.sources.{name}"))


# ---- names ---------------------------------------------------------------------------------------------------------


def is_unsafe(name: str) -> bool:
    """Whether a name inside an archive or a table leads out of its folder."""
    return name.startswith(("/", "\\")) or ".." in name.replace("\\", "/").split("/")


def splits_of(
    paths: Collection[str], config: DataConfig, found: Index, *, listed: Callable[[], dict[str, str]] = dict
) -> dict[str, str | None]:
    """{path: its split, None where it has none} of what is read; the rest is counted in `found.skipped`.

    The folders, or the files, of one level name the splits: train with another one, or all of them alike. Images whose
    own names do so count only when every one of them does. Where no names do, `listed` gives {path: split} by lists.
    ImageNet is scored on its validation images; its test images have no labels and are in no result. Raises
    Unplannable when too many are in none of the splits.
    """
    named = _named_splits(paths) or listed()
    if re.match("imagenet(?![a-z])", config.dataset):
        named = {path: {"train": "train", "valid": "test"}.get(split, "") for path, split in named.items()}
    outside = [path for path in paths if path not in named] if named and config.split == "auto" else []
    refuse_loss(outside, len(paths), what="files are in no split of the source", choice="split=by_photo or split=file")
    unlabelled = [path for path, split in named.items() if not split]
    found.skipped += Counter(in_no_split=len(outside), unlabelled_test=len(unlabelled))
    left_out = {*outside, *unlabelled}
    return {path: named.get(path) for path in paths if path not in left_out}


def _named_splits(paths: Collection[str]) -> dict[str, str]:
    parts = {path: path.split("/") for path in paths} if any(map(_WORD.search, paths)) else {}
    for depth in range(max(map(len, parts.values()), default=0)):
        words = {path: split_words("".join(part[depth : depth + 1])) for path, part in parts.items()}
        named = {path: next(iter(word)) for path, word in words.items() if len(word) == 1}
        is_whole = len(named) == len(parts)
        splits = {named[p] for p in named if is_whole or depth + 1 < len(parts[p]) or not is_image_name(p)}
        if "train" in splits and (is_whole or len(splits) > 1):
            return named
        if is_whole and not any(map(is_image_name, named)):
            return named  # shards of one split
    return {}


@functools.lru_cache(4096)  # many files lie in few folders
def split_words(name: str) -> frozenset[str]:
    """The splits that a name speaks of: train.X1, trainA, val2017, DIV2K_valid_HR, test-00000-of-00001.parquet."""
    if not _WORD.search(name):  # of a million file names few go on
        return frozenset()
    words = (word.lower() for word in re.findall("[A-Z]?[a-z]+|[A-Z]+", name))
    return frozenset(_WORDS[word] for word in words if word in _WORDS)


def refuse_loss(left_out: Sequence[str], num_images: int, *, what: str, choice: str) -> None:
    """Raises Unplannable when that many images would be left out by a guess; `choice`: settings that decide it."""
    if len(left_out) > MAX_LOSS * num_images:
        counts, key = f"{len(left_out)} of {num_images} {what}, such as {left_out[0]}", choice.partition("=")[0]
        raise Unplannable(f"{key} is 'auto'; {counts}: set {choice.replace(f'{key}=', f'data.{key}=')}")


def check_series(paths: Iterable[str]) -> None:
    """Names such as train-00003-of-00128.parquet say how many there must be. Raises UnusableSource missing_file."""
    series: dict[tuple[str, str, int], list[int]] = {}
    for path in paths:
        if match := _SERIES.match(path):
            series.setdefault((match["series"], match["rest"], int(match["count"])), []).append(int(match["index"]))
    for (name, rest, count), found in series.items():
        where = f"{name}-*-of-*{rest}"
        if twice := [index for index, times in Counter(found).items() if times > 1]:
            raise UnusableSource("duplicate_file", f"number {twice[0]} of {where} is there more than once: keep one")
        expected = set(range(1, count + 1)) if count in found else set(range(count))
        if missing := sorted(expected - set(found)):
            message = f"{len(missing)} of {count} files {where} are missing, such as number {missing[0]}"
            raise UnusableSource("missing_file", message)


def choose_side(found: dict[str, int], config: DataConfig, *, source: str) -> int:
    """`found`: {file: side of its images}, of finished images that are never resized.

    Raises Unplannable when none has image_size.
    """
    if config.image_size not in found.values():
        sides = ", ".join(map(str, sorted(set(found.values()))))
        raise Unplannable(f"image_size is {config.image_size}; the source ({source}) has images of {sides} pixels")
    return config.image_size


def refuse_bomb(unfolded: int, *, stored: int, where: str) -> None:
    """Raises UnusableSource when that many bytes come from so few `stored` ones."""
    if unfolded > max(MAX_UNFOLDED_BYTES, _MAX_UNFOLDING * stored):
        message = f"{where}: {stored} bytes unfold to at least {unfolded}; {MAX_UNFOLDED_BYTES} are allowed"
        raise UnusableSource("decompression_bomb", message)


def varint(data: bytes, at: int) -> tuple[int, int]:
    """(a number of at most 64 bits, its end) as protocol buffers and Thrift write it. Raises ArrowInvalid."""
    value = shift = 0
    while at < len(data) and shift < 64:
        value |= (data[at] & 127) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 128:
            return value & (1 << 64) - 1, at
    raise pa.ArrowInvalid("a number ends outside of its message")


# ---- the listing ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def readable(path: str) -> Iterator[None]:
    """Raises UnusableSource, with the file's name, when a listed file has gone or may not be read.

    Other errors of the storage pass: the same read may succeed in a moment.
    """
    try:
        yield
    except FileNotFoundError:
        raise UnusableSource("missing_file", f"{path} was there when the folder was listed, and is gone") from None
    except PermissionError:
        raise UnusableSource("unreadable_file", f"{path} may not be read by this user") from None


def list_files(root: str) -> Listing:
    """Raises Unplannable when the folder is missing, cannot be opened, or holds a broken link or an unusable name.

    Raises OSError after a transient error of the storage: the same listing may succeed in a moment.
    """
    try:
        store = open_store(root)
        folder = store.info()
        is_folder = folder is not None and folder.is_folder
        problem = store.bad_link() if is_folder else None
        found = store.select(recursive=True) if is_folder and problem is None else []
    except UnicodeDecodeError as error:
        raise Unplannable(f"root is {root!r}; {error.object!r} is not a name in UTF-8: rename it") from None
    except (OSError, ValueError, UserError) as error:  # pyarrow's errors for bad URIs and stores derive from these
        if is_transient(error):
            raise
        raise Unplannable(f"root is {root!r}; it cannot be opened: {' '.join(str(error).split())}") from None
    if not is_folder:
        what = "there is no such folder; name the one with the raw images"
        raise Unplannable(f"root is {root!r}; {what if folder is None else 'it is a file; name the folder'}")
    if problem is not None:
        raise Unplannable(f"root is {root!r}; {problem}")
    files = [entry for entry in found if not entry.is_folder]
    listed = [file for file in files if not (is_hidden(file.path) or file.is_special)]
    return Listing(root, tuple(listed), len(files) - len(listed))


def hash_of(root: str, files: Iterable[FileEntry], config: DataConfig) -> str:
    """Hash of paths, sizes and times, and of the contents of the files that decide the splits.

    By content, where times say nothing: files that come with this package.
    """
    store, sha = open_store(root), hashlib.sha256()
    for file in files:
        third = f'"{store.sha256(file.path)}"' if config.root is None else file.mtime_ns
        sha.update(f"[{json.dumps(file.path)}, {file.bytes}, {third}]\n".encode())  # JSON, faster
    for data in split_files(config, root):
        sha.update(hashlib.sha256(data).digest())
    return sha.hexdigest()


def split_files(config: DataConfig, root: str) -> list[bytes]:
    """Contents of the files that decide the splits: below the root, or anywhere by path or URI. Raises Unplannable."""
    names = [(PARTITION,), MAPPINGS] if config.split == "celeba_partition" else []
    names += [(config.split_file,)] if config.split_file else []
    return [_first_file(config, root, each) for each in names]


def _first_file(config: DataConfig, root: str, names: tuple[str, ...]) -> bytes:
    for name in names:
        anywhere = "://" in name or name.startswith(("/", "~"))
        folder, file = parent(name) if anywhere else (root, name)
        store = open_store(folder)
        if (info := store.info(file)) is not None and not info.is_folder:
            with readable(name):
                return store.read_bytes(file)
    raise Unplannable(f"split is {config.split!r}; there is no file {names[0]} (a name counts from {root})")


# ---- reading -------------------------------------------------------------------------------------------------------


class Reader:
    """Reads items of one source: whole files, parts of files, rows of blocks. Nothing is ever extracted to disk.

    Made where it is used; it holds open files, so it cannot be pickled. Items that share a file should be read one
    after another.
    """

    def __init__(self, source: str, root: str) -> None:
        self._layout, self._store = layout(source), open_store(root)
        self._file = functools.lru_cache(_MAX_OPEN)(self._opened)  # a file that leaves it is closed
        self._block: Sequence[Any] = ()  # one block is held at a time
        self._block_place: tuple[str, int] | None = None

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.cache_clear()

    @damage_named()
    def read(self, item: Item) -> bytes:
        """The item's bytes, encoded or raw as its layout says.

        Raises UnusableSource when they are gone or damaged, UnusableImage missing_bytes for a row without any and
        too_large above MAX_FILE_BYTES.
        """
        _refuse_large(item.size)
        if item.block is not None:
            return self._row(item, item.block)
        if item.offset is None:
            with readable(item.path):
                return self._store.read_bytes(item.path)
        data = self._file(item.path).read_at(item.size, item.offset)
        if len(data) != item.size:
            message = f"{item.path} ends inside {item.key}: it has changed since it was listed"
            raise UnusableSource("corrupt_source_file", message)
        return data

    def _row(self, item: Item, block: int) -> bytes:
        if self._block_place != (item.path, block):
            stream = self._file(item.path)
            stream.seek(0)
            self._block = ()  # before the next one is read, so that two are never held
            self._block = self._layout.read_block(stream, item)
            self._block_place = (item.path, block)
        assert item.row is not None
        row = self._block[item.row]
        if not isinstance(row, pa.Scalar):
            return bytes(row)
        image = row.as_py()
        data = image["bytes"] if isinstance(image, dict) else image
        if data is None:
            raise UnusableImage("missing_bytes", "the row has no bytes; a file that it may name is not read")
        _refuse_large(len(data))
        return data

    def _opened(self, path: str) -> pa.NativeFile:
        with readable(path):
            return self._store.open(path)


def _refuse_large(num_bytes: int) -> None:
    if num_bytes > MAX_FILE_BYTES:
        raise UnusableImage("too_large", f"it has {num_bytes} bytes; {MAX_FILE_BYTES} are allowed")
