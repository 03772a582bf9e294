"""`hf_parquet`: Hugging Face's Parquet files with encoded images, column `image: struct<bytes, path>`, maybe `label`.
Of several columns of images, `image_field` is used, or `image` or `img`.

The raw bytes are read, not what a decoder of theirs makes of them (it applies EXIF rotation). A key is file and row.
Label -1 (test images without labels) becomes null. The split is that of the file's name; of ImageNet, validation is
the test split and the unlabelled test images are left out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

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
)

LAYOUT = "train-00000-of-00294.parquet, ... with column image (bytes and path of a file) and maybe label"
COUNT = "any"

_USUAL = ("image", "img")  # columns that are used although there are others

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
    is_number = has_label and pa.types.is_primitive(file.schema_arrow.field("label").type)
    number = 0
    for block in range(file.num_row_groups):
        num_rows = file.metadata.row_group(block).num_rows
        labels: list[Any] = [None] * num_rows
        if has_label:
            labels = _column(file, stream, block, "label", path, rows_at_once=65_536 if is_number else 1)
        for row, label in enumerate(labels):
            key, label = f"{path}#{number:07d}", None if label == -1 else label
            found.items.append(Item(key, path, 0, block=block, row=row, label=label, split=split, column=column))
            number += 1


def read_block(stream: pa.NativeFile, item: Item) -> list[bytes | None]:
    """The images of the item's row group."""
    with _damage_named(f"{item.path}: row group {item.block}"):  # its pages: the index reads none of this column
        file = _open(stream, item.path)
        assert item.column is not None and item.block is not None
        if not pa.types.is_struct(file.schema_arrow.field(item.column).type):
            return _column(file, stream, item.block, item.column, item.path)
        structs = _column(file, stream, item.block, f"{item.column}.bytes", item.path)
        return [struct and struct["bytes"] for struct in structs]


def _column(
    file: pq.ParquetFile, stream: pa.NativeFile, block: int, name: str, path: str, *, rows_at_once: int = 1
) -> list[Any]:
    """The values of one column of a row group, or of a field of one. Raises UnusableSource decompression_bomb.

    Row by row: a large value that is stored once may be in every row, and the footer need not say so.
    """
    where = f"{path}: row group {block}"
    group = file.metadata.row_group(block)
    chunks = [chunk for i in range(group.num_columns) if (chunk := group.column(i)).path_in_schema == name]
    stored = min(stream.size(), sum(chunk.total_compressed_size for chunk in chunks))
    refuse_bomb(sum(chunk.total_uncompressed_size for chunk in chunks), stored=stored, where=where)
    values, num_bytes = list[Any](), 0
    for batch in file.iter_batches(rows_at_once, row_groups=[block], columns=[name], use_threads=False):
        num_bytes += batch.nbytes
        refuse_bomb(num_bytes, stored=stored, where=where)
        values += batch.column(0).to_pylist()
    return values


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
