"""`hf_parquet`: Hugging Face's Parquet files with encoded images, column `image: struct<bytes, path>`, maybe `label`.
Of several columns of images, `image_field` is used, or `image` or `img`.

The raw bytes are read, not what a decoder of theirs makes of them (it applies EXIF rotation). A key is file and row.
Label -1 (test images without labels) becomes null. The split is that of the file's name; of ImageNet, validation is
the test split and the unlabelled test images are left out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.parquet as pq

from data_prep.config import DataConfig
from data_prep.files import is_transient
from data_prep.parquet import UnsafeTable, open_parquet
from data_prep.sources.base import (
    FileEntry,
    Index,
    Item,
    Listing,
    Unplannable,
    UnusableSource,
    check_series,
    refuse_bomb,
    splits_of,
    varint,
)

LAYOUT = "train-00000-of-00294.parquet, ... with column image (bytes and path of a file) and maybe label"
COUNT = "any"

_USUAL = ("image", "img")  # columns that are used although there are others

_BATCH_BYTES = 64 << 20
_MIN_ROW_BYTES = 8  # of the file for each row; the smallest image has more


def recognise(listing: Listing, config: DataConfig) -> str | None:
    """The first table with a column of images, or a damaged one, which is named when it is read."""
    for file in used(listing, config):
        try:
            with _damage_named(file.path), listing.open(file.path) as stream:
                if columns := image_columns(_open(stream, file.path).schema_arrow):
                    return f"{file.path} has the column {', '.join(columns)}"
        except UnusableSource as error:
            if error.reason != "corrupt_source_file":
                raise
            return f"it has {file.path}"
    return None


def used(listing: Listing, config: DataConfig) -> Iterator[FileEntry]:
    return (file for file in listing.others if file.path.lower().endswith(".parquet"))


def index(listing: Listing, config: DataConfig) -> Index:
    found, has_images = Index(), {}
    check_series(file.path for file in listing.files)
    for path in (file.path for file in listing.files):
        with _damage_named(path), listing.open(path) as stream:
            has_images[path] = bool(image_columns(_open(stream, path).schema_arrow))
    for path, split in splits_of(found.with_images(has_images), config, found).items():
        with _damage_named(path), listing.open(path) as stream, _open(stream, path) as file:
            _refuse_rows(file, stream.size(), path)
            _add_rows(found, file, stream, path, split, _chosen(file.schema_arrow, path, config, found))
    return found


def _chosen(schema: pa.Schema, path: str, config: DataConfig, found: Index) -> str:
    """The column that is used. Raises UnusableSource, Unplannable."""
    columns = image_columns(schema)
    if not columns:
        message = f"{path} has no column of images (bytes, or bytes and path) among {', '.join(schema.names)}"
        raise UnusableSource("missing_column", message)
    usual = [name for name in _USUAL if name in columns]
    chosen = config.image_field or (usual or columns)[0]
    if chosen not in columns or (len(columns) > 1 and not usual and config.image_field is None):
        what = f"{path} has the images {', '.join(columns)}"
        raise Unplannable(f"image_field is {config.image_field!r}; {what}: set image_field to one of them")
    if len(columns) > 1:
        found.note = f"; of the columns {', '.join(columns)}, {chosen} is used"
    return chosen


def _add_rows(
    found: Index, file: pq.ParquetFile, stream: pa.NativeFile, path: str, split: str | None, column: str
) -> None:
    has_label = "label" in file.schema_arrow.names
    number = 0
    for block in range(file.num_row_groups):
        num_rows = file.metadata.row_group(block).num_rows
        labels = _column(file, stream, block, "label", path).to_pylist() if has_label else [None] * num_rows
        for row, label in enumerate(labels):
            key, label = f"{path}#{number:07d}", None if label == -1 else label
            found.items.append(Item(key, path, 0, block=block, row=row, label=label, split=split, column=column))
            number += 1


def read_block(stream: pa.NativeFile, item: Item) -> pa.ChunkedArray:
    """The image column of the item's row group."""
    with _damage_named(f"{item.path}: row group {item.block}"):  # its pages: the index reads none of this column
        file = _open(stream, item.path)
        assert item.column is not None and item.block is not None
        is_struct = pa.types.is_struct(file.schema_arrow.field(item.column).type)
        return _column(file, stream, item.block, item.column + (".bytes" if is_struct else ""), item.path)


def _column(file: pq.ParquetFile, stream: pa.NativeFile, block: int, name: str, path: str) -> pa.ChunkedArray:
    """One column of a row group, or a field of one, read in small batches: a value that is stored once may be in every
    row. Raises UnusableSource decompression_bomb."""
    where = f"{path}: row group {block}"
    group = file.metadata.row_group(block)
    chunks = [chunk for i in range(group.num_columns) if (chunk := group.column(i)).path_in_schema == name]
    stored = min(stream.size(), sum(chunk.total_compressed_size for chunk in chunks))
    unfolded = sum(_unfolded(stream, chunk) for chunk in chunks)
    refuse_bomb(unfolded, stored=stored, where=where)
    rows = min(65_536, max(1, _BATCH_BYTES // max(1, unfolded)))  # no value is larger than all that is stored
    columns, num_bytes = [], 0
    for batch in file.iter_batches(rows, row_groups=[block], columns=[name], use_threads=False):
        columns.append(batch.column(0))
        num_bytes += batch.nbytes
        refuse_bomb(num_bytes, stored=stored, where=where)
    return pa.chunked_array(columns, columns[0].type if columns else file.schema_arrow.field(name).type)


def _unfolded(stream: pa.NativeFile, chunk: pq.ColumnChunkMetaData) -> int:
    """Bytes of a column chunk's pages by their own headers, which the reader goes by; a footer may say less."""
    if chunk.compression == "UNCOMPRESSED":
        return chunk.total_compressed_size
    at = min(chunk.dictionary_page_offset or chunk.data_page_offset, chunk.data_page_offset)
    end, total = min(stream.size(), at + chunk.total_compressed_size), 0
    while at < end:
        header, size = _page_header(stream, at, end)
        total += header.get(2, 0)
        at += size + max(0, header.get(3, 0))
    return total


def _page_header(stream: pa.NativeFile, at: int, end: int) -> tuple[dict[int, int], int]:
    """(numbers by field: 2 is the unfolded size, 3 the stored one; bytes of the header)."""
    for num_bytes in (1 << 12, 1 << 24):  # its statistics may hold whole values
        try:
            return _thrift_struct(stream.read_at(min(num_bytes, end - at), at), 0)
        except (IndexError, RecursionError, pa.ArrowInvalid):
            continue
    raise pa.ArrowInvalid("a page's header is damaged")


def _thrift_struct(data: bytes, at: int) -> tuple[dict[int, int], int]:
    """(integers by field, end) of a structure in Thrift's compact protocol, without lists, as in page headers."""
    found: dict[int, int] = {}
    number = 0
    while head := data[at]:
        kind, step, at = head & 15, head >> 4, at + 1
        if not step:
            step, at = varint(data, at)
            step, number = step >> 1, 0
        number += step
        if kind in (4, 5, 6):
            value, at = varint(data, at)
            found[number] = (value >> 1) ^ -(value & 1)
        elif kind == 8:
            size, at = varint(data, at)
            at += size
        elif kind == 12:
            at = _thrift_struct(data, at)[1]
        elif kind in (3, 7):
            at += 1 if kind == 3 else 8
        elif kind not in (1, 2):
            raise pa.ArrowInvalid("a page's header is damaged")
    return found, at + 1


def _refuse_rows(file: pq.ParquetFile, num_bytes: int, path: str) -> None:
    """Rows may be repeated by a count alone, and each becomes an item in memory."""
    if file.metadata.num_rows > num_bytes // _MIN_ROW_BYTES:
        message = f"{path}: {file.metadata.num_rows} rows in a file of {num_bytes} bytes"
        raise UnusableSource("decompression_bomb", message)


@contextlib.contextmanager
def _damage_named(where: str) -> Iterator[None]:
    """Raises UnusableSource for Arrow's errors about damaged files; those of the storage pass."""
    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        if is_transient(error):
            raise
        raise UnusableSource("corrupt_source_file", f"{where}: {' '.join(str(error).split())}") from None


def _open(stream: pa.NativeFile, path: str) -> pq.ParquetFile:
    try:
        return open_parquet(stream, name=path)
    except UnsafeTable as error:
        raise UnusableSource("unsafe_column", str(error)) from None


def image_columns(schema: pa.Schema) -> list[str]:
    """Structs with bytes; where there are none, columns of bytes."""
    by_depth: dict[bool, list[str]] = {True: [], False: []}
    for field in schema:
        kind, is_struct = field.type, pa.types.is_struct(field.type)
        if is_struct and kind.get_field_index("bytes") >= 0:
            kind = kind.field("bytes").type
        if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
            by_depth[is_struct].append(field.name)
    return by_depth[True] or by_depth[False]
