"""Damage in a finished dataset is seen and named.  pytest tests/data_prep/dataset/test_verify.py"""

from __future__ import annotations

import dataclasses
import pathlib

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep.files import open_store
from data_prep.parquet import QUARANTINE, Dataset, pixel_column, pixels, schema
from data_prep.verify import verify

PATH = "res=8/bits=3/train-00001-of-00002.parquet"


@pytest.fixture
def dataset(tiny: tuple) -> Dataset:
    return tiny[0]


def change(dataset: Dataset, **fields: object) -> list[str]:
    """Writes another manifest and verifies."""
    path = pathlib.Path(dataset.uri) / "manifest.json"
    path.write_text(dataclasses.replace(dataset.manifest, **fields).to_json())
    return verify(dataset.uri)


def forge(dataset: Dataset, path: str, table: pa.Table, *, row_group_size: int = 10) -> list[str]:
    """Replaces a file by one that is intact in itself, with a manifest that fits its checksum, and verifies."""
    pq.write_table(table, pathlib.Path(dataset.uri) / path, row_group_size=row_group_size)
    store = open_store(dataset.uri)
    sums = dict(bytes=store.info(path).bytes, sha256=store.sha256(path))
    shards = [dataclasses.replace(s, **sums) if s.path == path else s for s in dataset.manifest.shards]
    return change(dataset, shards=shards)


def test_intact(dataset: Dataset):
    calls: list[tuple[int, int]] = []
    assert verify(dataset.uri, progress=lambda *call: calls.append(call)) == []
    assert calls == [(23, 46), (46, 46)]
    (pathlib.Path(dataset.uri) / "res=8/bits=3/train-00002-of-00003.parquet").write_bytes(b"junk: it is not listed")
    assert verify(dataset.uri) == []


def test_flipped_bit_and_lost_file_are_named_and_hide_nothing_else(dataset: Dataset):
    path = pathlib.Path(dataset.uri) / PATH
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    other = "res=4/bits=8/train-00000-of-00002.parquet"
    (path.parents[2] / other).unlink()
    (path.parents[2] / QUARANTINE).write_bytes(b"")
    assert verify(dataset.uri) == [
        f"{QUARANTINE} does not match its checksum",
        f"{other} is missing",
        f"{PATH} does not match its checksum",
    ]


def test_files_that_do_not_belong_together(dataset: Dataset):
    good = pq.read_table(pathlib.Path(dataset.uri) / PATH)
    assert forge(dataset, PATH, good) == []
    changed = pixels(good).copy()
    changed[[5, 15], 2, 2, 1] ^= 1  # in two row groups, named once
    pixel = good.set_column(5, schema(8).field("px"), pixel_column(changed))
    assert forge(dataset, PATH, pixel) == [f"{PATH}: pixels are not the 8-bit ones >> 5"]
    keys = good.set_column(0, schema(8).field("key"), good.column("key").take(list(range(23))[::-1]))
    differs = f"{PATH}: keys, labels, sizes or flags differ from res=4/bits=8/train-00001-of-00002.parquet"
    assert forge(dataset, PATH, keys) == [differs]
    labels = good.set_column(1, schema(8).field("label"), pa.array([7] * 23, pa.int32()))
    assert forge(dataset, PATH, labels) == [differs]
    assert forge(dataset, PATH, good.slice(1))[0] == differs
    (problem,) = forge(dataset, PATH, good.drop_columns(["label"]))
    assert "columns are ['key', 'orig_h'" in problem


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        (dict(num_images={"train": 47}), "train: 46 rows, 47 in the manifest"),
        (dict(split_hashes={"train": "0"}), "train: the keys are not those of the manifest"),
        (dict(conversions={}), "conversions: the flags say {'gray_to_rgb': 46}, the manifest {}"),
    ],
)
def test_counts_of_the_manifest(dataset: Dataset, fields: dict, problem: str):
    assert change(dataset, **fields) == [problem]


def test_manifest_without_a_file(dataset: Dataset):
    shards = [shard for shard in dataset.manifest.shards if shard.path != PATH]
    assert change(dataset, shards=shards) == ["train 1: the manifest has no file of resolution=8, bits=3"]
