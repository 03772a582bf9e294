"""Reads single items of a source, in any process: whole files, parts of files, rows of Parquet files.

Nothing is ever extracted to disk: a member of a tar is a range of bytes.
"""

from __future__ import annotations

from collections import OrderedDict

import pyarrow as pa

from data_prep import files
from data_prep.sources.item import Item

_MAX_OPEN = 16  # files that stay open for further items


class Reader:
    """Reads items of one source. Made where it is used; it holds open files, so it does not travel.

    Items that share a file should be read one after another.
    """

    def __init__(self, root: str) -> None:
        self._filesystem, self._folder = files.locate(root)
        self._open: OrderedDict[str, pa.NativeFile] = OrderedDict()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *error: object) -> None:
        while self._open:
            self._open.popitem()[1].close()

    def read(self, item: Item) -> bytes:
        """The item's bytes, encoded or raw as its layout says. Raises OSError when they are not there any more."""
        if item.offset is None:
            return files.read_bytes(self._filesystem, f"{self._folder}/{item.path}")
        data = self._file(item.path).read_at(item.size, item.offset)
        if len(data) != item.size:
            raise OSError(f"{item.path} ends inside {item.key}: it has changed since it was listed")
        return data

    def _file(self, path: str) -> pa.NativeFile:
        if path in self._open:
            self._open.move_to_end(path)
        else:
            if len(self._open) == _MAX_OPEN:
                self._open.popitem(last=False)[1].close()
            self._open[path] = self._filesystem.open_input_file(f"{self._folder}/{path}")
        return self._open[path]
