"""`hf_parquet`: Hugging Face's Parquet files with encoded images, column `image: struct<bytes, path>`, maybe `label`.

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
from data_prep.sources.base import UNUSED, Index, Item, Listing, SourceFile, UnusableSource, check_series, split_of

LAYOUT = "train-00000-of-00294.parquet, ... with column image (bytes and path of a file) and maybe label"
COUNT = "any"

IMAGE_COLUMNS = ("image", "img")


def recognise(listing: Listing, config: DataConfig, *, column: str = "image") -> str | None:
    first = next(used(listing, config), None)
    if first is None:
        return None
    try:
        with _damage_named(first.path), listing.open(first.path) as stream:
            found = image_column(_open(stream, first.path).schema_arrow)
    except UnusableSource as error:
        if error.reason != "corrupt_source_file":
            raise
        return f"it has {first.path}" if column == "image" else None  # damaged: said when it is read
    return f"{first.path} has the column {column}" if found == column else None


def used(listing: Listing, config: DataConfig) -> Iterator[SourceFile]:
    return (file for file in listing.files if file.path.endswith(".parquet"))


def index(listing: Listing, config: DataConfig) -> Index:
    found = Index()
    paths = [file.path for file in listing.files]
    check_series(paths)
    for path in paths:
        split = split_of(path, config)
        if split == UNUSED:
            found.num_skipped += 1
            continue
        with _damage_named(path), listing.open(path) as stream, _open(stream, path) as file:
            _add_rows(found, file, path, split)
    return found


def _add_rows(found: Index, file: pq.ParquetFile, path: str, split: str | None) -> None:
    if image_column(file.schema_arrow) is None:
        message = f"{path} has no column {' or '.join(IMAGE_COLUMNS)} of bytes and path"
        raise UnusableSource("missing_column", message)
    has_label = "label" in file.schema_arrow.names
    number = 0
    for block in range(file.num_row_groups):
        num_rows = file.metadata.row_group(block).num_rows
        labels = file.read_row_group(block, ["label"]).column(0).to_pylist() if has_label else [None] * num_rows
        for row, label in enumerate(labels):
            key = f"{path}#{number:07d}"
            item = Item(key, path, 0, block=block, row=row, label=None if label == -1 else label, split=split)
            found.items.append(item)
            number += 1


def read_block(stream: pa.NativeFile, item: Item) -> pa.ChunkedArray:
    """The image column of the item's row group."""
    with _damage_named(f"{item.path}: row group {item.block}"):  # its pages: the index reads none of this column
        file = _open(stream, item.path)
        return file.read_row_group(item.block, [image_column(file.schema_arrow)]).column(0)


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


def image_column(schema: pa.Schema) -> str | None:
    for name in IMAGE_COLUMNS:
        field = schema.field(name) if name in schema.names else None
        if field is not None and pa.types.is_struct(field.type) and field.type.get_field_index("bytes") >= 0:
            kind = field.type.field("bytes").type
            if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
                return name
    return None
