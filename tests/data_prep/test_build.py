"""The whole build through Ray Data: splits, resume, quarantine, commit.  pytest tests/data_prep/test_build.py"""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import ray.data

from data_prep import images, ray_compat, sources
from data_prep.build import build
from data_prep.config import DataConfig
from data_prep.files import UserError
from data_prep.parquet import open_dataset, pixels
from data_prep.plan import make_plan
from data_prep.ray_compat import ExecutionCallback
from data_prep.sources import UnusableSource
from data_prep.verify import verify
from tests.data_prep import made

pytestmark = pytest.mark.usefixtures("ray_session")


@pytest.fixture
def config(tmp_path: pathlib.Path, make_photos: Callable) -> DataConfig:
    make_photos(tmp_path / "raw", 12)
    return DataConfig(
        dataset="photos",
        root=str(tmp_path / "raw"),
        image_size=16,
        resolutions=[16, 8],
        bits=[3, 8],
        num_valid_photos=2,
        num_test_photos=3,
        rows_per_shard=3,
        max_quarantine_fraction=0,
    )


def tiles(config: DataConfig, **changes: object) -> DataConfig:
    return dataclasses.replace(config, crop="tiles", tile_size=32, tile_stride=12, rows_per_shard=20, **changes)


def quiet(done: int, total: int, quarantined: int) -> None:
    pass


def contents(folder: pathlib.Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_center_crops_are_decoded_cropped_resized_and_shifted(config: DataConfig, tmp_path: pathlib.Path):
    calls: list[tuple[int, int, int]] = []
    manifest = build(config, out=str(tmp_path / "set"), progress=lambda *call: calls.append(call))
    assert manifest.num_images == {"train": 7, "valid": 2, "test": 3} and verify(str(tmp_path / "set")) == []
    assert calls[0] == (0, 12, 0) and calls[-1] == (12, 12, 0) and len(calls) == 1 + 3 + 1 + 1  # as shards finish
    dataset = open_dataset(str(tmp_path / "set"))
    assert dataset.manifest == manifest
    found = set()
    for split in manifest.num_images:
        table = dataset.read(resolution=8, bits=3, split=split)
        for key, height, width, px in zip(
            *(table.column(c).to_pylist() for c in ("key", "orig_h", "orig_w")), pixels(table), strict=True
        ):
            assert (height, width) == (60, 80)
            assert np.array_equal(px, made.square_of((tmp_path / "raw" / key).read_bytes(), 8) >> 5), key
            found.add(key)
    assert found == {path.name for path in (tmp_path / "raw").iterdir()}
    assert "photos" in (tmp_path / "set" / "README.md").read_text()


class FirstStep(ExecutionCallback):
    """Notes how many cores a job's share has, and how many tasks run, after its first step."""

    seen: list[tuple[float, int]] = []

    def before_execution_starts(self, executor: Any) -> None:
        self.is_first = True

    def on_execution_step(self, executor: Any) -> None:
        if self.is_first:
            tasks = sum(operator.num_active_tasks() for operator in executor._topology)
            self.seen.append((executor._resource_manager.get_global_limits().cpu, tasks))
            self.is_first = False


def test_shards_are_begun_on_all_cores_at_once(
    config: DataConfig, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    build(config, out=str(tmp_path / "first"), progress=quiet)  # whoever hands out the cores has started after it
    FirstStep.seen.clear()
    monkeypatch.setattr(ray_compat, "_ANSWER_SEC", 60.0)
    context = ray.data.DataContext.get_current()
    monkeypatch.setattr(context, "custom_execution_callback_classes", [FirstStep])
    build(config, out=str(tmp_path / "set"), progress=quiet)
    assert FirstStep.seen == [(2, 2)]
    assert context.custom_execution_callback_classes == [FirstStep], "other jobs of the process are as they were"


def test_tiles_split_by_photo_and_held_out_ones_do_not_overlap(config: DataConfig, tmp_path: pathlib.Path):
    config = tiles(config)
    build(config, out=str(tmp_path / "set"), progress=quiet)
    dataset = open_dataset(str(tmp_path / "set"))
    photos = {}
    for split in ("train", "valid", "test"):
        table = dataset.read(resolution=16, bits=8, split=split)
        keys = table.column("key").to_pylist()
        photos[split] = {key.split("#")[0] for key in keys}
        assert len(keys) == len(photos[split]) * (3 * 5 if split == "train" else 1 * 2) == len(set(keys))
        for key, px in zip(keys[:10], pixels(table), strict=False):
            photo, place = key.split("#")
            top, left = (int(number[1:]) for number in place.split("_"))
            whole = images.decode((tmp_path / "raw" / photo).read_bytes(), profile="tf").pixels
            tile = whole[top : top + 32, left : left + 32]
            assert np.array_equal(px, images.resize_squares(tile, [16], profile="tf")[16]), key
    assert {split: len(found) for split, found in photos.items()} == {"train": 7, "valid": 2, "test": 3}
    assert not set.intersection(photos["train"], photos["valid"] | photos["test"])
    assert not photos["valid"] & photos["test"]


def test_only_deleted_and_damaged_shards_are_written_again(config: DataConfig, tmp_path: pathlib.Path):
    out = tmp_path / "set"
    build(config, out=str(out), progress=quiet)
    before = contents(out)
    lost = out / "res=8" / "bits=3" / "train-00001-of-00003.parquet"
    lost.unlink()
    flipped = out / "res=16" / "bits=8" / "test-00000-of-00001.parquet"
    data = bytearray(flipped.read_bytes())
    data[len(data) // 2] ^= 1
    flipped.write_bytes(data)
    (out / "manifest.json").unlink()
    (out / "res=8" / "bits=3" / "train-00001-of-00003.parquet.tmp-0123abcd-1").write_bytes(b"half a shard")
    times = {path: path.stat().st_mtime_ns for path in out.rglob("*.parquet") if "quarantine" not in path.name}
    build(config, out=str(out), progress=quiet)
    assert contents(out) == before
    rewritten = {path.name for path, time in times.items() if path.stat().st_mtime_ns != time}
    assert rewritten == {lost.name, flipped.name}  # in their other resolutions and depths
    assert verify(str(out)) == []


def test_file_that_changed_size_under_the_build_stops_the_commit(config: DataConfig, tmp_path: pathlib.Path):
    victim = tmp_path / "set" / "res=8" / "bits=3" / "valid-00000-of-00001.parquet"

    def progress(done: int, total: int, quarantined: int) -> None:
        if victim.exists():
            victim.write_bytes(b"another writer's")

    with pytest.raises(OSError, match="valid-00000-of-00001.parquet has 16 bytes"):
        build(config, out=str(tmp_path / "set"), progress=progress)
    with pytest.raises(ValueError, match="not a finished dataset"):
        open_dataset(str(tmp_path / "set"))
    (tmp_path / "set" / "_build" / "mine").touch()  # a build with another plan would clear this folder
    build(dataclasses.replace(config, max_quarantine_fraction=0.1), out=str(tmp_path / "set"), progress=quiet)
    assert (tmp_path / "set" / "_build" / "mine").exists() and open_dataset(str(tmp_path / "set")).num_images("train")


def test_another_plan_never_mixes_with_what_is_there(config: DataConfig, tmp_path: pathlib.Path):
    out = tmp_path / "set"
    build(config, out=str(out), progress=quiet)
    other = dataclasses.replace(config, resolutions=[16, 4], rows_per_shard=5)
    with pytest.raises(UserError, match="another plan.*--rerun prepare_data"):
        build(other, out=str(out), progress=quiet)
    (out / "manifest.json").unlink()  # unfinished: what it left is cleared
    manifest = build(other, out=str(out), progress=quiet)
    listed = {shard.path for shard in manifest.shards}
    assert {name for name in contents(out) if name.startswith("res=")} == listed


@pytest.mark.parametrize("crop", ["center", "tiles"])
def test_bad_photo_is_named_and_counted(config: DataConfig, tmp_path: pathlib.Path, crop: str):
    config = dataclasses.replace(config, max_quarantine_fraction=0.2)
    config = tiles(config) if crop == "tiles" else config
    shards = make_plan(config, sources.find(config)).shards
    train = [row.item.key for shard in shards if shard.split == "train" for row in shard.rows]
    cut = tmp_path / "raw" / next(key for key in train if key.endswith("jpg"))  # its header is whole
    cut.write_bytes(cut.read_bytes()[:-200])
    (tmp_path / "raw" / next(key for key in train if key.endswith("png"))).write_text("no image")
    manifest = build(config, out=str(tmp_path / "set"), progress=quiet)
    assert manifest.quarantine == {"not_an_image": 1, "truncated": 1}
    assert verify(str(tmp_path / "set")) == []
    records = {record["key"]: record for record in pq.read_table(tmp_path / "set" / "quarantine.parquet").to_pylist()}
    assert len(records) == 2
    assert records[cut.name]["reason"] == "truncated" and records[cut.name]["size"] == cut.stat().st_size
    assert records[cut.name]["sha256"] == hashlib.sha256(cut.read_bytes()).hexdigest()
    assert records[cut.name]["source"] == cut.name


def test_too_many_bad_photos_stop_the_build(config: DataConfig, tmp_path: pathlib.Path):
    (tmp_path / "raw" / "photo_03.png").write_bytes(b"")
    with pytest.raises(UnusableSource, match=r"too_many_unusable: 1 of 12 photos .* 1 empty .*photo_03.png"):
        build(config, out=str(tmp_path / "set"), progress=quiet)
    with pytest.raises(ValueError, match="not a finished dataset"):
        open_dataset(str(tmp_path / "set"))
    assert pq.read_table(tmp_path / "set" / "quarantine.parquet").column("key").to_pylist() == ["photo_03.png"]


def test_plan_depends_on_config_and_source_but_not_on_the_place(config: DataConfig, tmp_path: pathlib.Path):
    plan = make_plan(config, sources.find(config))
    assert make_plan(config, sources.find(config)) == plan
    (tmp_path / "raw").rename(tmp_path / "moved")
    moved = dataclasses.replace(config, root=str(tmp_path / "moved"))
    assert make_plan(moved, sources.find(moved)).hash == plan.hash
    seeded = dataclasses.replace(moved, seed=1)
    assert make_plan(seeded, sources.find(seeded)).hash != plan.hash
    split_of = [
        {row.item.key: shard.split for shard in each.shards for row in shard.rows}
        for each in (make_plan(seeded, sources.find(seeded)), plan)
    ]
    assert split_of[0].keys() == split_of[1].keys() and split_of[0] != split_of[1]
    (tmp_path / "moved" / "photo_00.jpg").unlink()
    assert make_plan(moved, sources.find(moved)).hash != plan.hash


def test_archives_are_built_like_folders_and_nothing_is_lost(config: DataConfig, tmp_path: pathlib.Path):
    """A duplicate shares its key with an image that is used; both are in the books."""
    root, photos = tmp_path / "tars", [(path.name, path.read_bytes()) for path in sorted((tmp_path / "raw").iterdir())]
    train = [(f"n0{len(data) % 2}000000/{name}", data) for name, data in [*photos, photos[0]]]
    made.write(root / "ILSVRC2012_img_train.tar", made.tar_of([*train, ("n00000000/empty.JPEG", b"")]))
    val = [(f"ILSVRC2012_val_{i:08d}.JPEG", photos[i][1]) for i in (1, 2)]
    made.write(root / "ILSVRC2012_img_val.tar", made.tar_of(val))
    config = dataclasses.replace(config, root=str(root), num_test_photos=0, max_quarantine_fraction=0.2)
    out = tmp_path / "set"
    manifest = build(config, out=str(out), progress=quiet)
    assert manifest.num_images == {"train": 10, "valid": 2, "test": 2} and verify(str(out)) == []
    assert manifest.quarantine == {"duplicate_name": 1, "empty": 1}
    assert manifest.conversions["wrong_extension"] == 1  # a PNG as ILSVRC2012_val_00000001.JPEG
    source = manifest.source
    assert (source["name"], source["recognised_by"]) == ("ilsvrc_tar", "it has ILSVRC2012_img_train.tar")
    records = pq.read_table(out / "quarantine.parquet").to_pylist()
    assert [record["reason"] for record in records] == ["empty", "duplicate_name"]
    labels = open_dataset(str(out)).read(resolution=8, bits=3, split="train", columns=["label"]).column(0)
    assert set(labels.to_pylist()) == {0, 1}
    with pytest.raises(UnusableSource, match="1 of 16 photos .* 1 duplicate_name"):
        build(dataclasses.replace(config, max_quarantine_fraction=None), out=str(tmp_path / "no"), progress=quiet)


def test_the_build_ends_with_what_a_shard_found(tmp_path: pathlib.Path, jpegs: list):
    """The file's index is sound; its pages of images are not."""
    path = tmp_path / "raw" / "part.parquet"
    made.write_parquet(path, (data for _, data in jpegs))
    data = bytearray(path.read_bytes())
    data[100:300] = bytes(200)
    path.write_bytes(data)
    with pytest.raises(UnusableSource, match="^corrupt_source_file: part.parquet: row group 0: "):
        build(made.config(path.parent), out=str(tmp_path / "set"), progress=quiet)
