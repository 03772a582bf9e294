"""Hugging Face's Parquet and webdataset shards: raw bytes, labels, splits by name, missing shards.

pytest tests/data_prep/sources/test_tables_and_shards.py
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep import sources
from data_prep.sources.base import UnusableSource
from tests.data_prep.made import IMAGE, config, square_of, tar_of, write, write_parquet

# ---- hf_parquet ----------------------------------------------------------------------------------------------------


def test_rows_are_read_as_the_bytes_they_hold(tmp_path: pathlib.Path, jpegs: list, rendered: Callable):
    images, data = [image for _, image in jpegs], tmp_path / "raw" / "data"
    for i in (0, 1):
        part, name = images[3 * i : 3 * i + 3], f"train-{i:05d}-of-00002.parquet"
        write_parquet(data / name, part, label=[7, 8, 9], row_group_size=2)
    write_parquet(data / "test-00000-of-00001.parquet", images[:1], label=[-1])
    found = rendered(config(tmp_path / "raw", num_valid_photos=1, rows_per_shard=3))
    assert {split: len(part) for split, part in found.items()} == {"train": 5, "valid": 1, "test": 1}
    for key, (label, px) in (found["train"] | found["valid"]).items():
        shard, row = int(key[len("data/train-") :][:5]), int(key.rpartition("#")[2])
        assert label == 7 + row and np.array_equal(px, square_of(jpegs[3 * shard + row][1])), key
    assert [label for label, _ in found["test"].values()] == [None]


def test_imagenet_is_scored_on_validation_and_its_unlabelled_test_is_left_out(tmp_path: pathlib.Path, jpegs: list):
    images = [image for _, image in jpegs]
    for name, part in (("train", images), ("validation", images[:2]), ("test", images[:3])):
        write_parquet(tmp_path / f"{name}-00000-of-00001.parquet", part)
    imagenet, other = config(tmp_path, dataset="imagenet_area-part"), config(tmp_path)
    splits = [[item.split for item in sources.find(c).items] for c in (imagenet, other)]
    assert {s: splits[0].count(s) for s in set(splits[0])} == {"train": 6, "test": 2}
    assert {s: splits[1].count(s) for s in set(splits[1])} == {"train": 6, "valid": 2, "test": 3}
    assert sources.find(imagenet).skipped == {"unlabelled_test": 1}


def test_a_missing_file_of_a_series_is_named(tmp_path: pathlib.Path, jpegs: list):
    for i in (0, 2):
        write_parquet(tmp_path / f"train-{i:05d}-of-00003.parquet", [jpegs[i][1]])
    with pytest.raises(
        UnusableSource, match="missing_file: 1 of 3 files train-.*parquet are missing, such as number 1"
    ):
        sources.find(config(tmp_path))


def test_a_file_that_a_row_names_is_not_read(tmp_path: pathlib.Path, jpegs: list, rendered: Callable):
    rows = [{"bytes": jpegs[0][1], "path": "inside.jpg"}, {"bytes": None, "path": "inside.jpg"}, None]
    write(tmp_path / "raw" / "inside.jpg", jpegs[1][1])
    pq.write_table(pa.table({"image": pa.array(rows, IMAGE)}), tmp_path / "raw" / "train.parquet")
    found = rendered(config(tmp_path / "raw", source="hf_parquet"))
    ((key, (_, px)),) = found["train"].items()
    assert key == "train.parquet#0000000" and np.array_equal(px, square_of(jpegs[0][1]))


def test_shards_read_few_blocks(tmp_path: pathlib.Path):
    """Rows of Parquet files are shuffled by whole row groups, then within shards: reading one row means its group."""
    from data_prep.plan import make_plan

    for i in range(4):
        write_parquet(tmp_path / f"train-{i:05d}-of-00004.parquet", [b"x"] * 30, row_group_size=10)
    plan = make_plan(config(tmp_path, rows_per_shard=20), sources.find(config(tmp_path)))
    blocks = [{(row.item.path, row.item.block) for row in shard.rows} for shard in plan.shards]
    assert [len(found) for found in blocks] == [2] * 6
    keys = [row.key for shard in plan.shards for row in shard.rows]
    assert len(set(keys)) == 120 and keys != sorted(keys) and keys[:20] != sorted(keys[:20])


# ---- webdataset ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["cls", "json", "none"])
def test_samples_are_found_with_their_labels(tmp_path: pathlib.Path, jpegs: list, rendered: Callable, kind: str):
    for split, part in (("train", jpegs[:4]), ("val", jpegs[4:])):
        members = []
        for i, (_, data) in enumerate(part):
            members.append((f"./{i:06d}.jpg", data))
            if kind == "cls":
                members.append((f"./{i:06d}.cls", b"%d\n" % (10 + i)))
            elif kind == "json":
                members.append((f"./{i:06d}.json", json.dumps({"label": 10 + i, "width": 3}).encode()))
            else:
                members.append((f"./{i:06d}.txt", b"a caption"))
        write(tmp_path / "raw" / f"imagenet-{split}-000000.tar", tar_of(members))
    assert sources.find(config(tmp_path / "raw")).name == "webdataset"
    found = rendered(config(tmp_path / "raw", dataset="imagenet_area-part", num_valid_photos=1))
    assert {split: len(part) for split, part in found.items()} == {"train": 3, "valid": 1, "test": 2}
    for split, part in found.items():
        for key, (label, px) in part.items():
            i = int(key[-6:])
            assert np.array_equal(px, square_of(jpegs[i + (4 if split == "test" else 0)][1]))
            assert label == (None if kind == "none" else 10 + i)


def test_labels_of_any_kind_stop_nothing(tmp_path: pathlib.Path):
    bad = (b"[" * 200_000, b"\xff", b"9" * 5_000, b'{"label": {}}', b'{"label": 1.5}', b"99999999999")
    members = [m for i, data in enumerate(bad) for m in ((f"{i}.jpg", b"x"), (f"{i}.json", data))]
    write(tmp_path / "wds" / "t.tar", tar_of([*members, ("a.jpg", b"x"), ("a.cls", b"cat"), ("b.jpg", b"x")]))
    found = sources.find(config(tmp_path / "wds"))
    assert [item.label for item in found.items] == [None] * (len(bad) + 2) and not found.rejected
    assert found.skipped == {"label_not_a_number": len(bad) + 1}
    for name, labels in (
        ("text", ["a", "b"]),
        ("list", [[1], [2, 3]]),
        ("part", [0.5, 1.0]),
        ("large", [2**31, 2**40]),
        ("bool", [True, False]),
        ("null", [None, None]),
    ):
        write_parquet(tmp_path / name / "train.parquet", [b"x"] * 2, label=labels)
        found = sources.find(config(tmp_path / name))
        assert [item.label for item in found.items] == [None, None]
        assert found.skipped == ({} if name == "null" else {"label_not_a_number": 2})


@pytest.mark.parametrize("damage", ["cut", "noise", "empty"])
def test_a_damaged_first_shard_is_named_and_its_set_not_taken_for_a_folder(
    tmp_path: pathlib.Path, jpegs: list, damage: str
):
    for number in range(2):
        members = [(f"{i}{suffix}", jpegs[i][1]) for i in range(2) for suffix in (".jpg", ".txt")]
        write(tmp_path / f"train-{number}.tar", tar_of(members))
    first = tmp_path / "train-0.tar"
    first.write_bytes({"cut": first.read_bytes()[:1000], "noise": b"\x17" * 700, "empty": b""}[damage])
    (tmp_path / "preview.jpg").write_bytes(jpegs[0][1])
    with pytest.raises(UnusableSource, match=r"(truncated|not_an)_archive: train-0\.tar"):
        sources.find(config(tmp_path))
