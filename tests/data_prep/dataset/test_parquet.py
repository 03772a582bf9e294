"""What is written is what is read, and damage is seen.  pytest tests/data_prep/dataset/test_parquet.py"""

from __future__ import annotations

import pathlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep import parquet
from data_prep.files import open_store
from data_prep.parquet import open_dataset, pixel_column, pixels, schema, shard_path, write_files


def test_round_trip_at_every_resolution_and_depth(tiny: tuple):
    dataset, names, squares = tiny
    assert dataset.num_images("train") == 46
    for side in (8, 4):
        for bits in (3, 8):
            table = dataset.read(resolution=side, bits=bits, split="train")
            assert table.schema.equals(schema(side))
            assert table.drop_columns("px").equals(names)
            assert np.array_equal(pixels(table), parquet.low_depth(squares[side], bits))
            for shard in dataset.shards(resolution=side, bits=bits, split="train"):
                assert shard.row_group_rows == [10, 10, 3]
    only_keys = dataset.read(resolution=8, bits=8, split="train", columns=["key"])
    assert only_keys.column_names == ["key"]


@pytest.mark.parametrize(
    ("rows", "sizes"),
    [(range(46), [10, 10, 3] * 2), (range(12, 25), [8, 3, 2]), (range(40, 99), [3, 3]), (range(0), [])],
)
def test_rows_are_read_by_row_groups(tiny: tuple, rows: range, sizes: list[int]):
    dataset, names, _ = tiny
    tables = list(dataset.tables(resolution=8, bits=8, split="train", columns=["key"], rows=rows))
    assert [table.num_rows for table in tables] == sizes
    keys = [key for table in tables for key in table.column("key").to_pylist()]
    assert keys == names.column("key").to_pylist()[rows.start : rows.stop]


def test_file_has_zstd_checksums_and_no_images_in_its_footer(tiny: tuple, tmp_path: pathlib.Path):
    path = tmp_path / shard_path(resolution=8, bits=8, split="train", index=0, num_shards=2)
    group = pq.read_metadata(path).row_group(0)
    by_name = {group.column(i).path_in_schema: group.column(i) for i in range(group.num_columns)}
    assert by_name["px"].compression == "ZSTD" and by_name["key"].is_stats_set and not by_name["px"].is_stats_set
    assert by_name["px"].dictionary_page_offset is None
    data = bytearray(path.read_bytes())
    data[by_name["px"].data_page_offset + 200] ^= 1
    path.write_bytes(data)
    with pytest.raises(OSError, match="CRC"):
        tiny[0].read(resolution=8, bits=8, split="train")


def test_pixels_are_not_copied():
    array = np.random.default_rng(0).integers(0, 256, (5, 4, 4, 3)).astype(np.uint8)
    table = pa.table({"px": pixel_column(array)})
    assert np.shares_memory(pixels(table), array)
    assert np.array_equal(pixels(table.slice(2, 2)), array[2:4]) and np.shares_memory(pixels(table.slice(2)), array)
    assert pixels(table.slice(0, 0)).shape == (0, 4, 4, 3)


def test_unfinished_or_newer_data_set_is_refused_and_an_older_one_is_read(tiny: tuple, tmp_path: pathlib.Path):
    manifest = tmp_path / "manifest.json"
    manifest.write_text(manifest.read_text().replace("{", '{"num_of_something": 5, ', 1))  # written by earlier code
    assert open_dataset(str(tmp_path)).manifest == tiny[0].manifest
    manifest.write_text(manifest.read_text().replace('"schema_version": 1', '"schema_version": 99'))
    with pytest.raises(ValueError, match="99"):
        open_dataset(str(tmp_path))
    manifest.unlink()
    with pytest.raises(ValueError, match="no manifest.json"):
        open_dataset(str(tmp_path))


def test_asking_for_what_is_not_there_names_what_is(tiny: tuple):
    dataset, _, _ = tiny
    with pytest.raises(ValueError, match=r"resolution is 16; .* has 8, 4"):
        dataset.shards(resolution=16, bits=8, split="train")
    with pytest.raises(ValueError, match=r"bits is 5; .* has 3, 8"):
        dataset.shards(resolution=8, bits=5, split="train")
    with pytest.raises(ValueError, match=r"split is 'test'; .* has train"):
        dataset.read(resolution=8, bits=8, split="test")


@pytest.mark.parametrize("when", ["open", "append", "close"])
def test_failure_in_one_file_leaves_none(
    tiny: tuple, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, when: str
):
    _, names, squares = tiny
    opened = []

    class Full(pq.ParquetWriter):
        def __init__(self, *arguments: object, **options: object) -> None:
            opened.append(self)
            if when == "open" and len(opened) == 3:
                raise OSError("disk full")
            super().__init__(*arguments, **options)

        def write_table(self, table: pa.Table, **options: object) -> None:
            if self is opened[2] and (when == "append" or table.num_rows < 10):  # the last ones when the block ends
                raise OSError("disk full")
            super().write_table(table, **options)

    monkeypatch.setattr(pq, "ParquetWriter", Full)
    options = dict(split="train", index=0, num_shards=1, resolutions=[8, 4], bits=[3, 8], row_group_rows=10)
    with pytest.raises(OSError, match="disk full"):
        write_files(open_store(tmp_path / "set"), [(names, squares)], **options)
    assert [path for path in (tmp_path / "set").rglob("*") if path.is_file()] == []
