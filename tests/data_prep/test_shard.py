"""One shard without Ray: squares, refused sizes, records of the quarantine.

pytest tests/data_prep/test_shard.py
"""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from data_prep import images
from data_prep.config import DataConfig
from data_prep.parquet import QUARANTINE_SCHEMA, draws
from data_prep.plan import with_exif
from data_prep.resize import resize_area
from data_prep.sources import Reader
from tests.data_prep import made

GOOD = made.encoded(np.full((20, 20, 3), 9, np.uint8))


@pytest.fixture
def config(tmp_path: pathlib.Path, make_photos: Callable) -> DataConfig:
    make_photos(tmp_path / "raw", 4)
    make_photos(tmp_path / "raw" / "tall", 4, height=90, width=40)
    return DataConfig(dataset="photos", root=str(tmp_path / "raw"), image_size=16, resolutions=[16, 8], bits=[8])


def whole(config: DataConfig, key: str) -> np.ndarray:
    return images.decode((pathlib.Path(config.root) / key).read_bytes(), profile="tf").pixels


def test_squash_keeps_all_of_a_photo(config: DataConfig, rendered: Callable):
    for key, (_, px) in rendered(dataclasses.replace(config, crop="squash"))["train"].items():
        assert np.array_equal(px, resize_area(whole(config, key), [(16, 16)])[0].astype(np.uint8)), key


def test_random_squares_lie_where_seed_and_key_say(config: DataConfig, rendered: Callable):
    places = set()
    for key, (_, px) in rendered(dataclasses.replace(config, crop="random", seed=3))["train"].items():
        pixels = whole(config, key)
        longer, side = max(pixels.shape[:2]), min(pixels.shape[:2])
        (place,) = draws(3, [key], [0], purpose="crop", high=longer - side + 1)
        square = pixels[place:, :][:side] if key.startswith("tall/") else pixels[:, place:][:, :side]
        assert np.array_equal(px, images.resize_squares(square, [16], profile="tf")[16]), key
        places.add(int(place))
    assert len(places) > 4


def test_rounding_and_dct_are_separate_choices(config: DataConfig, rendered: Callable):
    mixed = dataclasses.replace(config, dct="accurate", rounding="truncate")
    for key, (_, px) in rendered(mixed)["train"].items():
        data = (pathlib.Path(config.root) / key).read_bytes()
        assert np.array_equal(px, made.square_of(data, dct="accurate")), key


@pytest.mark.parametrize(
    ("dataset", "source", "exif"),
    [("photos", "folder", "apply"), ("celebahq-mine", "folder", "ignore"), ("photos", "webdataset", "ignore")],
)
def test_only_folders_of_ones_own_photos_are_turned_upright(
    dataset: str, source: str, exif: str, config: DataConfig
) -> None:
    config = dataclasses.replace(config, dataset=dataset)
    assert with_exif(config, source).exif == exif
    assert with_exif(dataclasses.replace(config, exif="ignore"), source).exif == "ignore"


def test_a_turned_photo_is_upright(tmp_path: pathlib.Path, rendered: Callable):
    exif = Image.Exif()
    exif[0x0112] = 3
    stored = np.arange(16 * 16 * 3, dtype=np.uint8).reshape(16, 16, 3)
    made.write(tmp_path / "raw" / "a.png", made.encoded(stored, exif=exif))
    assert np.array_equal(rendered(made.config(tmp_path / "raw"))["train"]["a.png"][1], stored[::-1, ::-1])


def test_small_photos_are_scaled_up_or_refused_by_min_side(
    tmp_path: pathlib.Path, make_photos: Callable, written: Callable
):
    make_photos(tmp_path / "raw", 2, height=10, width=20)
    (scaled,) = written(made.config(tmp_path / "raw"), tmp_path / "set")[1]
    assert scaled["conversions"] == {"upscaled": 2} and not scaled["quarantine"]
    (refused,) = written(made.config(tmp_path / "raw", min_side=16), tmp_path / "other")[1]
    assert [record["reason"] for record in refused["quarantine"]] == ["too_small"] * 2


def test_strict_jpeg_quarantines_damage_that_is_accepted_otherwise(tmp_path: pathlib.Path, written: Callable):
    made.write(tmp_path / "raw" / "a.jpg", made.damaged_jpeg())
    for strict, reasons in ((False, []), (True, ["corrupt_data"])):
        (found,) = written(made.config(tmp_path / "raw", strict_jpeg=strict), tmp_path / str(strict))[1]
        assert [record["reason"] for record in found["quarantine"]] == reasons


def test_any_error_of_reading_a_row_quarantines_it_by_name(
    tmp_path: pathlib.Path, written: Callable, monkeypatch: pytest.MonkeyPatch
):
    """An error that nobody expects, beside a good row."""
    row = Reader._row
    monkeypatch.setattr(Reader, "_row", lambda self, item, block: row(self, item, block) if item.row == 0 else 1 / 0)
    (tmp_path / "raw").mkdir()
    pq.write_table(pa.table({"image": [GOOD] * 2}), tmp_path / "raw" / "a.parquet")
    (sidecar,) = written(made.config(tmp_path / "raw"), tmp_path / "set")[1]
    assert sidecar["num_rows"] == 1
    assert [(r["key"], r["reason"]) for r in sidecar["quarantine"]] == [("a.parquet#0000001", "corrupt_data")]


def test_quarantine_says_where_the_bytes_are(tmp_path: pathlib.Path, written: Callable):
    archive = made.tar_of([("n1/a.png", GOOD), ("n1/b.png", b"no image"), ("n1/a.png", b"again")])
    made.write(tmp_path / "raw" / "ILSVRC2012_img_train.tar", archive)
    plan, (sidecar,) = written(made.config(tmp_path / "raw"), tmp_path / "set")
    (twice,), (broken,) = plan.rejected, sidecar["quarantine"]
    assert (twice["key"], twice["reason"]) == ("train/n1/a.png", "duplicate_name")
    assert (broken["key"], broken["reason"]) == ("train/n1/b.png", "not_an_image")
    for record, data in ((twice, b"again"), (broken, b"no image")):
        assert record["source"] == "ILSVRC2012_img_train.tar" and record["sha256"] == hashlib.sha256(data).hexdigest()
        assert archive[record["offset"] :][: record["size"]] == data
    assert pa.Table.from_pylist([twice, broken], schema=QUARANTINE_SCHEMA).num_rows == 2
