"""Records of a TFRecord file and the features in them, without TensorFlow.

    uint64 length, masked CRC-32C of these 8 bytes, the record, masked CRC-32C of the record      (little endian)

A record is a protocol buffer tf.train.Example: features, each a list of byte strings or of integers.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from data_prep.sources.item import UnusableSource

_POLYNOMIAL = 0x82F63B78  # CRC-32C (Castagnoli), bits reversed


def records(stream: pa.NativeFile, *, path: str) -> Iterator[tuple[int, bytes]]:
    """(offset, bytes) of each record. Raises UnusableSource corrupt_source_file: cut off, or a checksum differs."""
    at, end = 0, stream.size()
    while at < end:
        head = stream.read_at(12, at)
        length = int.from_bytes(head[:8], "little")
        if len(head) < 12 or at + 16 + length > end:
            raise UnusableSource("corrupt_source_file", f"{path}: the file ends inside a record at byte {at}")
        data = stream.read_at(length + 4, at + 12)
        for part, stored in ((head[:8], head[8:]), (data[:-4], data[-4:])):
            if masked_crc32c(part) != int.from_bytes(stored, "little"):
                raise UnusableSource("corrupt_source_file", f"{path}: checksum of the record at byte {at} differs")
        yield at + 12, data[:-4]
        at += 16 + length


def features(record: bytes) -> dict[str, list[int] | list[tuple[int, int]]]:
    """Feature name -> its integers, or (offset in the record, size) of its byte strings. Raises ValueError."""
    found: dict[str, list] = {}
    for number, begin, end in _fields(record, 0, len(record)):
        if number != 1:  # Example.features
            continue
        for _, entry, entry_end in _fields(record, begin, end):  # Features.feature: a map
            name, value = "", []
            for part, b, e in _fields(record, entry, entry_end):
                if part == 1:
                    name = record[b:e].decode()
                elif part == 2:
                    value = _values(record, b, e)
            found[name] = value
    return found


def _values(record: bytes, begin: int, end: int) -> list:
    values: list = []
    for kind, b, e in _fields(record, begin, end):  # Feature: bytes_list = 1, int64_list = 3
        for number, vb, ve in _fields(record, b, e, bare_numbers=kind == 3):
            if number != 1:
                continue
            if kind == 1:
                values.append((vb, ve - vb))
            elif kind == 3:
                while vb < ve:
                    value, vb = _varint(record, vb)
                    values.append(value - (1 << 64) if value >> 63 else value)
    return values


def _fields(data: bytes, at: int, end: int, *, bare_numbers: bool = False) -> Iterator[tuple[int, int, int]]:
    """(field number, begin, end of its bytes) of a message; a number's bytes are its varint."""
    while at < end:
        tag, at = _varint(data, at)
        wire = tag & 7
        if wire == 2:
            size, at = _varint(data, at)
        elif wire == 0:
            size = _varint(data, at)[1] - at
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise ValueError(f"field of wire type {wire}")
        if at + size > end:
            raise ValueError("a field ends outside of its message")
        if wire == 2 or bare_numbers:
            yield tag >> 3, at, at + size
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise ValueError("a number ends outside of its message")
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value & (1 << 64) - 1, at


def masked_crc32c(data: bytes) -> int:
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def crc32c(data: bytes) -> int:
    """CRC-32C in NumPy: the data in many pieces of the same length, all at once, then joined pairwise.

    A CRC is linear: that of two pieces is the first one's, moved on over the second's length, xor the second's.
    """
    crc, at = 0xFFFFFFFF, 0
    for num_pieces in (1024, 32):
        num_words = (len(data) - at) // (4 * num_pieces)
        if num_words:
            size = 4 * num_words * num_pieces
            crc = _crc_of_pieces(np.frombuffer(data, "<u4", size // 4, at).reshape(num_pieces, num_words), crc)
            at += size
    table = _byte_table()
    for byte in data[at:]:
        crc = crc >> 8 ^ int(table[(crc ^ byte) & 255])
    return crc ^ 0xFFFFFFFF


def _crc_of_pieces(pieces: np.ndarray, crc: int) -> int:
    """`pieces`: (num_pieces, words) uint32, num_pieces a power of two."""
    low, high = _word_tables()
    crcs = np.zeros(len(pieces), np.uint32)
    crcs[0] = crc
    for words in np.ascontiguousarray(pieces.T):
        crcs ^= words
        crcs = low[crcs & 0xFFFF] ^ high[crcs >> 16]
    length = 4 * pieces.shape[1]
    while crcs.size > 1:
        crcs = _apply(_zeros_operator(length), crcs[::2]) ^ crcs[1::2]
        length *= 2
    return int(crcs[0])


@functools.cache
def _byte_table() -> np.ndarray:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, table >> 1 ^ np.uint32(_POLYNOMIAL), table >> 1)
    return table


@functools.cache
def _word_tables() -> tuple[np.ndarray, np.ndarray]:
    """What four bytes make of the low and of the high half of a CRC."""
    table = _byte_table()
    half = np.arange(1 << 16, dtype=np.uint32)
    moved = []
    for value in (half, half << 16):
        for _ in range(4):
            value = value >> 8 ^ table[value & 255]
        moved.append(value)
    return moved[0], moved[1]


@functools.lru_cache(maxsize=256)
def _zeros_operator(length: int) -> np.ndarray:
    """(32,) what becomes of each single bit of a CRC after `length` zero bytes."""
    columns = np.uint32(1) << np.arange(32, dtype=np.uint32)
    if length == 1:
        return columns >> 8 ^ _byte_table()[columns & 255]
    half = _zeros_operator(length // 2)
    columns = _apply(half, half)
    return _apply(_zeros_operator(1), columns) if length % 2 else columns


def _apply(operator: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The linear operator, given by what it makes of single bits, on many CRCs."""
    moved = np.zeros_like(values)
    for bit in range(32):
        moved ^= np.where(values >> bit & 1, operator[bit], np.uint32(0))
    return moved
