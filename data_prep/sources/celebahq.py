"""`celebahq`: CelebA-HQ's 30,000 faces: numbered files of 1024 or fewer pixels, or Glow's TFRecords.

Files: one folder of 00000.jpg ... or 0.png ..., such as `data256x256/`. Splits: split=glow (named by idx),
glow_records, celeba_partition, file. TFRecords: `train-r08-s-0000-of-0120.tfrecords` and `validation-r08-...`, pixels
of 2 ** r, raw; their validation records are the test split. The literature agrees on the sizes of splits only, so the
manifest's hashes of the keys say which one a figure is about.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from data_prep.config import DataConfig
from data_prep.resize import compiled
from data_prep.sources.base import (
    HWC,
    FileEntry,
    Index,
    Item,
    Listing,
    UnusableSource,
    check_series,
    choose_side,
    splits_of,
    varint,
)

LAYOUT = """one folder of numbered images (data256x256/00001.jpg, 1024 px PNG or JPEG), with split glow, glow_records,
file or celeba_partition (needs list_eval_partition.txt, CelebA-HQ-to-CelebA-mapping.txt); or Glow's
*-r08-s-0000-of-0120.tfrecords; Hugging Face's Parquet is source hf_parquet"""
COUNT = "30,000 images: 27,000 train and 3,000 test"

_RECORDS = re.compile(r"-r(?P<log2>\d\d)-s-\d+-of-\d+\.tfrecords?$")
_NUMBERED = re.compile(r"^(?P<folder>|.*/)(?P<number>\d+)\.\w+$")
_FOLDER = re.compile(r"(?:^|/)(?:data\d+x\d+|CelebA-HQ-img|celeba[-_]?hq[^/]*)/[^/]+$", re.IGNORECASE)
_MASKS = "CelebAMask-HQ-mask-anno/"
_MAX_RECORD_BYTES = 16 << 20  # an image of 1024 pixels has 3
_POLYNOMIAL = 0x82F63B78  # CRC-32C (Castagnoli), bits reversed


def recognise(listing: Listing, config: DataConfig) -> str | None:
    found = [path for file in used(listing, config) if _MASKS not in (path := file.path)]
    is_it = found and (_RECORDS.search(found[0]) or all(map(_FOLDER.search, found)))
    return f"it has {found[0]}" if is_it else None


def used(listing: Listing, config: DataConfig) -> Iterator[FileEntry]:
    records = [file for file in listing.others if _RECORDS.search(file.path)]
    return iter(records or [f for f in listing.images if _NUMBERED.match(f.path) or _MASKS in f.path])


def index(listing: Listing, config: DataConfig) -> Index:
    matches = {file.path: match for file in listing.files if (match := _RECORDS.search(file.path))}
    if matches:
        return _index_records(listing, config, matches)
    found = Index()
    first_of: dict[int, str] = {}  # path of the first file with a number
    for file in listing.files:
        if _MASKS in file.path:
            found.skipped["mask"] += 1
            continue
        name = file.path.rpartition("/")[2]
        item = Item(name, file.path, file.bytes)
        first = first_of.setdefault(int(name.partition(".")[0]), file.path)
        if first == file.path:
            found.items.append(item)
        else:
            found.reject(item, "duplicate_name", f"{first} has the same number; it is used")
    return found


def _index_records(listing: Listing, config: DataConfig, matches: dict[str, re.Match]) -> Index:
    sides = {path: 1 << int(match["log2"]) for path, match in matches.items()}
    side = choose_side(sides, config, source="celebahq")
    found = Index()
    paths = [path for path in sorted(matches) if sides[path] == side]
    found.skipped["other_size"] = len(matches) - len(paths)
    check_series(path.rpartition(".")[0] for path in paths)
    number = {"train": 0, "test": 0, None: 0}
    for path, split in splits_of(paths, config, found).items():
        split = "test" if split == "valid" else split
        with listing.open(path) as stream:
            for offset, record in records(stream, path=path):
                key = f"{split or 'image'}/{number[split]:06d}"
                number[split] += 1
                _add_record(found, Item(key, path, 0, split=split), record, offset, side)
    return found


def _add_record(found: Index, item: Item, record: bytes, offset: int, side: int) -> None:
    try:
        parts = features(record)
        shape, (data,) = parts["shape"], parts["data"]
        begin, size = record.index(data), len(data)
    except (KeyError, ValueError, TypeError) as error:
        raise UnusableSource("corrupt_source_file", f"{item.path}: record at byte {offset}: {error!r}") from None
    label = next(iter(parts.get("label", ())), None)
    item = Item(item.key, item.path, size, offset + begin, split=item.split, label=label, layout=HWC)
    if shape != [side, side, 3] or size != side * side * 3:
        found.reject(item, "shape_mismatch", f"its shape is {shape}, its data has {size} bytes")
    else:
        found.items.append(item)


# ---- TFRecords, without TensorFlow ---------------------------------------------------------------------------------
#
#     uint64 length, masked CRC-32C of these 8 bytes, the record, masked CRC-32C of the record      (little endian)
#
# A record is a protocol buffer tf.train.Example: features, each a list of byte strings or of integers.


def records(stream: pa.NativeFile, *, path: str) -> Iterator[tuple[int, bytes]]:
    """(offset, bytes) of each record. Raises UnusableSource corrupt_source_file: cut off, or a checksum differs."""
    at, end = 0, stream.size()
    while at < end:
        head = stream.read_at(12, at)
        length = int.from_bytes(head[:8], "little")
        if len(head) < 12 or at + 16 + length > end:
            raise UnusableSource("corrupt_source_file", f"{path}: the file ends inside a record at byte {at}")
        if length > _MAX_RECORD_BYTES:
            message = f"{path}: the record at byte {at} has {length} bytes; {_MAX_RECORD_BYTES} are allowed"
            raise UnusableSource("decompression_bomb", message)
        data = stream.read_at(length + 4, at + 12)
        for part, stored in ((head[:8], head[8:]), (data[:-4], data[-4:])):
            if masked_crc32c(part) != int.from_bytes(stored, "little"):
                raise UnusableSource("corrupt_source_file", f"{path}: checksum of the record at byte {at} differs")
        yield at + 12, data[:-4]
        at += 16 + length


def features(record: bytes) -> dict[str, list[Any]]:
    """Of each feature its byte strings or integers. Raises ValueError, KeyError."""
    found: dict[str, list[Any]] = {}
    for _, entry in _fields(dict(_fields(record))[1]):  # Example.features, a map
        pair = dict(_fields(entry))
        for kind, values in _fields(pair[2]):  # Feature: bytes_list = 1, int64_list = 3
            split = _integers if kind == 3 else lambda value: [value]
            found[pair[1].decode()] = [each for _, value in _fields(values) for each in split(value)]
    return found


def _fields(data: bytes) -> Iterator[tuple[int, bytes]]:
    """(field number, its bytes) of a message; a number's bytes are its varint."""
    at = 0
    while at < len(data):
        tag, at = varint(data, at)
        if tag & 7 == 2:
            size, at = varint(data, at)
        else:
            size = {1: 8, 5: 4}.get(tag & 7) or varint(data, at)[1] - at
        if at + size > len(data):
            raise ValueError("a field ends outside of its message")
        yield tag >> 3, data[at : at + size]
        at += size


def _integers(data: bytes) -> Iterator[int]:
    at = 0
    while at < len(data):
        value, at = varint(data, at)
        yield value - (1 << 64) if value >> 63 else value


def masked_crc32c(data: bytes) -> int:
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def crc32c(data: bytes) -> int:
    return int(_crc_kernel()(np.frombuffer(data, np.uint8), _crc_table()))


@functools.cache
def _crc_table() -> np.ndarray:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, table >> 1 ^ np.uint32(_POLYNOMIAL), table >> 1)
    return table


@functools.cache
def _crc_kernel() -> Callable[[np.ndarray, np.ndarray], int]:
    """A loop over the bytes, compiled: about 100 MB per second."""
    from numba import types

    signature = types.uint32(types.Array(types.uint8, 1, "C", readonly=True), types.uint32[::1])
    return compiled(_crc, signature)


def _crc(data, table):  # noqa: ANN001
    crc = np.uint32(0xFFFFFFFF)
    for byte in data:
        crc = (crc >> np.uint32(8)) ^ table[(crc ^ byte) & np.uint32(255)]
    return crc ^ np.uint32(0xFFFFFFFF)
