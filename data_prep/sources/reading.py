"""Reads single items of a source, in any process: whole files, parts of files, rows of Parquet files.

Nothing is ever extracted to disk: a member of a tar is a range of bytes.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from data_prep import files
from data_prep.images import UnusableImage
from data_prep.sources.batches import read_rows
from data_prep.sources.hf_parquet import image_column
from data_prep.sources.item import Item, UnusableSource, readable
from data_prep.sources.tars import is_unsafe

_MAX_OPEN = 16  # files that stay open for further items


class Reader:
    """Reads items of one source. Made where it is used; it holds open files, so it does not travel.

    Items that share a file should be read one after another.
    """

    def __init__(self, root: str) -> None:
        self._filesystem, self._folder = files.locate(root)
        self._open: OrderedDict[str, pa.NativeFile] = OrderedDict()
        self._block: pa.ChunkedArray | np.ndarray | None = None
        self._block_place: tuple[str, int] | None = None

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *error: object) -> None:
        while self._open:
            self._open.popitem()[1].close()

    def read(self, item: Item) -> bytes:
        """The item's bytes, encoded or raw as its layout says.

        Raises UnusableSource when they are not there any more or damaged, UnusableImage missing_bytes for a row without
        any.
        """
        if item.block is not None:
            return self._row(item)
        if item.offset is None:
            with readable(item.path):
                return files.read_bytes(self._filesystem, f"{self._folder}/{item.path}")
        data = self._file(item.path).read_at(item.size, item.offset)
        if len(data) != item.size:
            message = f"{item.path} ends inside {item.key}: it has changed since it was listed"
            raise UnusableSource("corrupt_source_file", message)
        return data

    def _row(self, item: Item) -> bytes:
        """One block is held at a time: a row group of a Parquet file, or the array of a batch."""
        if self._block_place != (item.path, item.block):
            stream = self._file(item.path)
            stream.seek(0)
            self._block = None  # before the next one is read, so that two are never held
            if item.path.endswith(".parquet"):
                self._block = self._row_group(stream, item)
            else:
                self._block = read_rows(stream, path=item.path)
            self._block_place = (item.path, item.block)
        row = self._block[item.row]
        if isinstance(row, np.ndarray):
            return row.tobytes()
        image = row.as_py() or {}
        data = image.get("bytes")
        return self._beside(item, image.get("path")) if data is None else data

    def _row_group(self, stream: pa.NativeFile, item: Item) -> pa.ChunkedArray:
        try:
            file = pq.ParquetFile(stream)
            return file.read_row_group(item.block, [image_column(file.schema_arrow)]).column(0)
        except (pa.ArrowException, OSError) as error:  # damaged pages: the index reads none of this column
            if files.is_hiccup(error):
                raise
            message = f"{item.path}: row group {item.block}: {' '.join(str(error).split())}"
            raise UnusableSource("corrupt_source_file", message) from None

    def _beside(self, item: Item, path: str | None) -> bytes:
        """A row without bytes names a file, which counts only when it lies below the root."""
        if path and not is_unsafe(path):
            try:
                return files.read_bytes(self._filesystem, f"{self._folder}/{path}")
            except OSError as error:
                if files.is_hiccup(error):
                    raise
        raise UnusableImage("missing_bytes", f"the row has no bytes, and no file {path} lies below the source's root")

    def _file(self, path: str) -> pa.NativeFile:
        if path in self._open:
            self._open.move_to_end(path)
        else:
            if len(self._open) == _MAX_OPEN:
                self._open.popitem(last=False)[1].close()
            with readable(path):
                self._open[path] = self._filesystem.open_input_file(f"{self._folder}/{path}")
        return self._open[path]
