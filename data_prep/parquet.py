"""A dataset on disk: its columns, how shards are written and read, and everything random about the order of rows.

    <dataset>/res=<R>/bits=<B>/<split>-00000-of-00003.parquet    same rows in the same order for every R and B
    <dataset>/quarantine.parquet                                 images that could not be used, with the reason
    <dataset>/manifest.json                                      written last; without it there is no dataset

Shapes: N rows, R side of an image. Pixels are (R, R, 3) uint8, row by row; at depth B a value is x >> (8 - B).
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from data_prep.files import HashedStream, Store, open_store, printable

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
QUARANTINE = "quarantine.parquet"
ROW_GROUP_BYTES = 16_000_000  # of pixels, when the config names no number of rows

NAMES = pa.schema(  # all columns but px
    [
        pa.field("key", pa.string(), nullable=False),
        pa.field("label", pa.int32()),  # null where the source has none
        pa.field("orig_h", pa.int32(), nullable=False),  # of the whole photo, pixels
        pa.field("orig_w", pa.int32(), nullable=False),
        pa.field("flags", pa.int32(), nullable=False),  # images.CONVERSIONS, one bit each
    ]
)
QUARANTINE_SCHEMA = pa.schema(
    [
        pa.field("key", pa.string(), nullable=False),
        pa.field("source", pa.string(), nullable=False),  # file below the root
        pa.field("offset", pa.int64()),  # where the image begins in it: a byte, or a row; null for a whole file
        pa.field("size", pa.int64(), nullable=False),  # bytes
        pa.field("sha256", pa.string(), nullable=False),
        pa.field("reason", pa.string(), nullable=False),
        pa.field("message", pa.string(), nullable=False),
    ]
)


def schema(resolution: int) -> pa.Schema:
    return NAMES.append(pa.field("px", pa.binary(resolution * resolution * 3), nullable=False))


def shard_path(*, resolution: int, bits: int, split: str, index: int, num_shards: int) -> str:
    """Path below the dataset's folder."""
    return f"res={resolution}/bits={bits}/{split}-{index:05d}-of-{num_shards:05d}.parquet"


def pixels(table: pa.Table) -> np.ndarray:
    """The px column as (N, R, R, 3) uint8 without a copy where the column is one chunk."""
    chunks = table.column("px")
    column = chunks.chunk(0) if chunks.num_chunks == 1 else chunks.combine_chunks()
    width = column.type.byte_width
    side = round((width // 3) ** 0.5)
    assert side * side * 3 == width, f"px holds {width} bytes, which is not a square of RGB pixels"
    if len(column) == 0:
        return np.empty((0, side, side, 3), np.uint8)
    flat = np.frombuffer(column.buffers()[1], np.uint8, count=len(column) * width, offset=column.offset * width)
    return flat.reshape(len(column), side, side, 3)


def pixel_column(array: np.ndarray) -> pa.FixedSizeBinaryArray:
    """(N, R, R, 3) uint8 -> the px column, without a copy where the array is contiguous."""
    width = int(np.prod(array.shape[1:]))
    data = pa.py_buffer(np.ascontiguousarray(array))
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(width), len(array), [None, data])


def low_depth(pixels: np.ndarray, bits: int) -> np.ndarray:
    """The `bits` most significant bits of uint8 values: 0 .. 2**bits - 1, still uint8. All 8: the same array."""
    if not 1 <= bits <= 8:
        raise ValueError(f"bits is {bits}; it must be within 1 and 8")
    return pixels if bits == 8 else pixels >> np.uint8(8 - bits)


@dataclass(frozen=True)
class Shard:
    """One Parquet file of a dataset."""

    path: str  # below the dataset's folder
    split: str
    index: int
    resolution: int
    bits: int
    bytes: int
    sha256: str
    row_group_rows: list[int]  # rows of each row group

    @property
    def num_rows(self) -> int:
        return sum(self.row_group_rows)


def write_files(
    store: Store,
    parts: Iterable[tuple[pa.Table, dict[int, np.ndarray]]],
    *,
    split: str,
    index: int,
    num_shards: int,
    resolutions: list[int],
    bits: list[int],
    row_group_rows: int | None,
) -> list[Shard]:
    """Writes the rows of one shard at every resolution and depth; the files appear when all of them are written.

    A part is (all columns but px, resolution -> (N, R, R, 3) uint8 of 8 bits); the next one may use its memory again.
    Whole row groups are written straight from a part; only what is left over is copied, to wait for more.
    """
    paths = {
        (r, b): shard_path(resolution=r, bits=b, split=split, index=index, num_shards=num_shards)
        for r in resolutions
        for b in bits
    }
    group_rows = {r: row_group_rows or max(1, ROW_GROUP_BYTES // (r * r * 3)) for r in resolutions}
    waiting: dict[int, list[tuple[pa.Table, np.ndarray]]] = {r: [] for r in resolutions}
    written: dict[int, list[int]] = {r: [] for r in resolutions}  # rows of each row group
    with store.writing(list(paths.values())) as streams, ExitStack() as stack:
        writers = {key: stack.enter_context(_writer(streams[path], key[0])) for key, path in paths.items()}

        def write_group(resolution: int, rows: list[tuple[pa.Table, np.ndarray]]) -> None:
            names = pa.concat_tables([part for part, _ in rows]).combine_chunks()
            array = rows[0][1] if len(rows) == 1 else np.concatenate([part for _, part in rows])
            field = schema(resolution).field("px")
            for depth in bits:
                table = names.append_column(field, pixel_column(low_depth(array, depth)))
                writers[resolution, depth].write_table(table, row_group_size=table.num_rows)
            written[resolution].append(len(array))

        for names, squares in parts:
            for resolution, array in squares.items():
                begin = 0
                while begin < len(array):
                    wanted = group_rows[resolution] - sum(len(part) for _, part in waiting[resolution])
                    rows = names.slice(begin, wanted), array[begin : begin + wanted]
                    begin += wanted
                    if len(rows[1]) < wanted:
                        waiting[resolution].append((rows[0], rows[1].copy()))
                    else:
                        write_group(resolution, [*waiting[resolution], rows])
                        waiting[resolution].clear()
        for resolution, rest in waiting.items():
            if rest:
                write_group(resolution, rest)
    return [
        Shard(path, split, index, r, b, streams[path].num_bytes, streams[path].sha256, written[r])
        for (r, b), path in paths.items()
    ]


def _writer(stream: HashedStream, resolution: int) -> pq.ParquetWriter:
    return pq.ParquetWriter(
        stream,
        schema(resolution),
        compression="zstd",
        compression_level=1,
        use_dictionary=False,
        write_page_checksum=True,
        write_statistics=["key"],  # of px they would put whole images into the footer
    )


@dataclass(frozen=True)
class Manifest:
    """What a finished dataset is. Files that it does not list do not belong to it."""

    dataset: str
    plan_hash: str  # of config, source listing and libraries
    config: dict  # DataConfig without root
    source: dict  # name, recognised_by, splits, built_in, listing_hash, skipped {reason: files}
    num_images: dict[str, int]  # by split
    split_hashes: dict[str, str]  # sha256 of the split's keys, sorted, one a line
    quarantine: dict[str, int]  # photos by reason; details in quarantine.parquet
    quarantine_sha256: str
    conversions: dict[str, int]  # images by conversion
    shards: list[Shard]
    versions: dict[str, str]  # of the libraries that decide the bytes
    schema_version: int = SCHEMA_VERSION

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, sort_keys=True) + "\n"

    @staticmethod
    def from_json(text: str) -> Manifest:
        fields = json.loads(text)
        if fields["schema_version"] > SCHEMA_VERSION:
            raise ValueError(f"schema_version is {fields['schema_version']}; this version reads up to {SCHEMA_VERSION}")
        own = {name: fields[name] for name in Manifest.__dataclass_fields__}  # earlier code wrote more
        return Manifest(**{**own, "shards": [Shard(**shard) for shard in fields["shards"]]})


def keys_hash(keys: Iterable[str]) -> str:
    sha = hashlib.sha256()
    for key in sorted(keys):
        sha.update(key.encode() + b"\n")
    return sha.hexdigest()


class Dataset:
    """Read side of a finished dataset; holds only its address and manifest, so it travels between processes."""

    def __init__(self, uri: str, manifest: Manifest) -> None:
        self.uri = uri
        self.manifest = manifest

    def num_images(self, split: str) -> int:
        self._check("split", split, self.manifest.num_images)
        return self.manifest.num_images[split]

    def shards(self, *, resolution: int, bits: int, split: str) -> list[Shard]:
        """In row order. Raises ValueError naming what the dataset has instead."""
        self._check("resolution", resolution, self.manifest.config["resolutions"])
        self._check("bits", bits, self.manifest.config["bits"])
        self._check("split", split, self.manifest.num_images)
        wanted = [s for s in self.manifest.shards if (s.resolution, s.bits, s.split) == (resolution, bits, split)]
        return sorted(wanted, key=lambda shard: shard.index)

    def tables(
        self, *, resolution: int, bits: int, split: str, columns: list[str] | None = None, rows: range | None = None
    ) -> Iterator[pa.Table]:
        """The split's rows in order, or those of them in `rows`: a table per row group that has some.

        Raises ValueError naming what the dataset has instead, once the first is asked for.
        """
        begin, rows = 0, range(self.num_images(split)) if rows is None else rows
        for shard in self.shards(resolution=resolution, bits=bits, split=split):
            for group, length in enumerate(shard.row_group_rows):
                first, end = max(rows.start - begin, 0), min(rows.stop - begin, length)
                if first < end:
                    table = read_shard(self.uri, shard, row_group=group, columns=columns)
                    yield table.slice(first, end - first)
                begin += length

    def read(self, *, resolution: int, bits: int, split: str, columns: list[str] | None = None) -> pa.Table:
        """The whole split in row order."""
        tables = self.tables(resolution=resolution, bits=bits, split=split, columns=columns)
        return pa.concat_tables(tables).combine_chunks()

    def split_digest(self, *, resolution: int, bits: int, split: str) -> str:
        """Of the checksums of a split's shards, in order: equal exactly when all files are equal, byte for byte."""
        shards = self.shards(resolution=resolution, bits=bits, split=split)
        return hashlib.sha256("\n".join(shard.sha256 for shard in shards).encode()).hexdigest()[:32]

    def _check(self, name: str, value: object, allowed: Iterable) -> None:
        if value not in allowed:
            raise ValueError(f"{name} is {value!r}; {self.uri} has {', '.join(map(str, allowed))}")


def open_dataset(uri: str) -> Dataset:
    """Raises ValueError when the folder holds no finished dataset."""
    try:
        text = open_store(uri).read_bytes(MANIFEST).decode()
    except FileNotFoundError:
        raise ValueError(f"{uri} is not a finished dataset: it has no {MANIFEST}") from None
    return Dataset(uri, Manifest.from_json(text))


def read_shard(uri: str, shard: Shard, *, row_group: int | None = None, columns: list[str] | None = None) -> pa.Table:
    """One row group of a shard, or all of it. Page checksums are verified. Raises ValueError for other columns."""
    with open_store(uri).open(shard.path) as stream:
        parquet = open_parquet(stream, name=shard.path, page_checksum_verification=True)
        if not parquet.schema_arrow.equals(schema(shard.resolution)):
            raise ValueError(f"{shard.path}: columns are {parquet.schema_arrow.names} of other types than a shard has")
        if row_group is None:
            return parquet.read(columns=columns, use_threads=False)
        return parquet.read_row_group(row_group, columns=columns, use_threads=False)


# ---- order and draws -----------------------------------------------------------------------------------------------
#
# Pure functions of numbers and names: the same on every machine, in every process. Only NumPy's raw bit streams are
# used, which are fixed for ever; its `permutation` and `integers` may change by version.


def permutation(n: int, *entropy: int) -> np.ndarray:
    """A permutation of range(n) as int64, decided by the numbers in `entropy` (each at least 0)."""
    stream = np.random.PCG64(np.random.SeedSequence(list(entropy)))
    return np.argsort(stream.random_raw(n), kind="stable")


def draws(seed: int, keys: Sequence[str], epochs: Sequence[int], *, purpose: str, high: int) -> np.ndarray:
    """One integer in [0, high) for each image of a batch, decided by (seed, key, epoch, purpose) alone.

    The same image gets the same draw wherever it lies in a batch, on whichever worker. int64, (B,). `purpose` keeps
    draws apart that must be independent (target_slice, flip). Multiplying 64 random bits by `high` and keeping the
    upper part leaves a bias below high / 2**64.
    """
    if high < 1:
        raise ValueError(f"high is {high}; it must be at least 1")
    out = np.empty(len(keys), np.int64)
    start = f"{seed}\0{purpose}\0".encode()
    for i, (key, epoch) in enumerate(zip(keys, epochs, strict=True)):
        word = hashlib.blake2b(start + f"{int(epoch)}\0{key}".encode(), digest_size=8).digest()
        out[i] = (int.from_bytes(word, "little") * high) >> 64
    return out


# ---- Parquet files of others ---------------------------------------------------------------------------------------
#
# Arrow gives values of an extension type to the class that is registered for its name, and Ray registers one that
# unpickles them. So a file with such a type anywhere is refused, before Arrow has seen its schema, an IPC message in
# base64 in the footer.

_EXTENSION = b"ARROW:extension:name"
_MAX_FOOTER_BYTES = 1 << 28


class UnsafeTable(ValueError):
    """A Parquet file with an extension type; the message names the file."""


def open_parquet(stream: pa.NativeFile, *, name: str, page_checksum_verification: bool = False) -> pq.ParquetFile:
    """Raises UnsafeTable for a file with an extension type, also nested, also in a column that nobody reads.

    And Arrow's errors for what is not an intact Parquet file. `name` is the file's name for people.
    """
    footer = _footer(stream)
    if any(pattern in footer for pattern in _in_base64(_EXTENSION)):
        raise UnsafeTable(f"{printable(name)}: a column has an extension type, which may run code: make it a plain one")
    return pq.ParquetFile(stream, page_checksum_verification=page_checksum_verification)


def _footer(stream: pa.NativeFile) -> bytes:
    size = stream.size()
    tail = stream.read_at(8, size - 8) if size >= 12 else b""
    length = int.from_bytes(tail[:4], "little")
    if tail[4:] != b"PAR1" or length > min(size - 12, _MAX_FOOTER_BYTES):
        raise pa.ArrowInvalid("it is not a Parquet file (a pointer of Git LFS?), or its end is missing")
    return stream.read_at(length, size - 8 - length)


def _in_base64(text: bytes) -> Iterator[bytes]:
    """What the text looks like inside of base64, for each of the three places that it may begin at."""
    for before in range(3):
        encoded = base64.b64encode(bytes(before) + text)
        yield encoded[-(-8 * before // 6) : 8 * (before + len(text)) // 6]
