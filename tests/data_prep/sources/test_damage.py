"""Files that went away or may not be read are named; storage that fails for a moment is nobody's mistake.

pytest tests/data_prep/sources/test_damage.py
"""

from __future__ import annotations

import errno
import pathlib

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep import sources
from data_prep.files import Store
from data_prep.sources import UnusableSource
from tests.data_prep.made import config


def test_files_that_went_away_or_may_not_be_read_are_named(
    tmp_path: pathlib.Path, jpegs: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in (0, 1):
        (tmp_path / f"{i}.jpg").write_bytes(jpegs[i][1])
    found = sources.find(config(tmp_path, source="folder"))
    (tmp_path / "0.jpg").unlink()
    with sources.Reader("folder", str(tmp_path)) as reader:
        with pytest.raises(UnusableSource, match="missing_file: 0.jpg was there"):
            reader.read(found.items[0])

        def refused(*_: object) -> bytes:  # permissions do not bind root, who may run this
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(Store, "read_bytes", refused)
        with pytest.raises(UnusableSource, match="unreadable_file: 1.jpg may not be read"):
            reader.read(found.items[1])


def test_storage_that_is_away_for_a_moment_is_nobodys_mistake(
    tmp_path: pathlib.Path, jpegs: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the folder's nor an image's: the same read may work the next time."""
    (tmp_path / "photo.jpg").write_bytes(jpegs[0][1])
    pq.write_table(pa.table({"image": [jpegs[0][1]]}), tmp_path / "part.parquet")
    (item,) = sources.find(config(tmp_path, source="folder")).items

    def away(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with sources.Reader("folder", str(tmp_path)) as reader, monkeypatch.context() as patch:
        assert reader.read(item) == jpegs[0][1]
        patch.setattr(Store, "read_bytes", away)
        with pytest.raises(OSError, match="Input/output error"):
            reader.read(item)
    for name in ("open", "info"):
        with monkeypatch.context() as patch:
            patch.setattr(Store, name, away)
            with pytest.raises(OSError, match="Input/output error"):
                sources.identify(config(tmp_path))
