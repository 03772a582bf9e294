"""van den Oord's and Chrabaszcz's ImageNet are taken pixel by pixel, under their own ids, never resized.

pytest tests/data_prep/sources/test_downsampled_imagenet.py
"""

from __future__ import annotations

import pathlib
import pickle
from collections.abc import Callable

import numpy as np
import pytest

from data_prep import images, sources
from data_prep.config import DataConfig
from data_prep.sources.base import UnusableSource
from tests.data_prep import made


def config(root: pathlib.Path, dataset: str, **changes: object) -> DataConfig:
    good = dict(dataset=dataset, image_size=32, resolutions=[32], bits=[5, 8], num_valid_photos=2)
    return made.config(root, **{**good, **changes})


@pytest.fixture(scope="session")
def squares(jpegs: list) -> np.ndarray:
    """(6, 32, 32, 3) uint8, made of the JPEGs."""
    whole = [images.center_crop(images.decode(data, profile="tf").pixels) for _, data in jpegs]
    return np.stack([images.resize_squares(square, [32], profile="tf")[32] for square in whole])


# ---- imagenet_oord -------------------------------------------------------------------------------------------------


def write_oord(root: pathlib.Path, squares: np.ndarray, *, tars: bool) -> None:
    for folder, part in (("train_32x32", squares[:4]), ("valid_32x32", squares[4:])):
        names = [(f"{folder}/{i:07d}.png", made.encoded(square)) for i, square in enumerate(part)]
        if not tars:
            (root / folder).mkdir(parents=True)
            for name, data in names:
                (root / name).write_bytes(data)
            continue
        root.mkdir(exist_ok=True)
        (root / f"{folder}.tar").write_bytes(made.tar_of([(folder, None), *names]))


def test_oord_tars_and_folders_are_the_same_pixels(tmp_path: pathlib.Path, squares: np.ndarray, rendered: Callable):
    found = {}
    for tars in (True, False):
        root = tmp_path / str(tars)
        write_oord(root, squares, tars=tars)
        assert sources.find(config(root, "imagenet_oord-part")).name == "imagenet_oord"
        found[tars] = rendered(config(root, "imagenet_oord-part"))
        train = found[tars]["train"] | found[tars]["valid"]
        assert len(found[tars]["valid"]) == 2
        for part, keys in ((train, "train"), (found[tars]["test"], "valid")):
            for key, (label, px) in part.items():
                number = int(key.removeprefix(f"{keys}/").removesuffix(".png"))
                assert label is None and np.array_equal(px, squares[number + (4 if keys == "valid" else 0)])
    assert {s: set(p) for s, p in found[True].items()} == {s: set(p) for s, p in found[False].items()}


def test_oord_is_not_resized_and_keeps_its_name(tmp_path: pathlib.Path, squares: np.ndarray, rendered: Callable):
    write_oord(tmp_path / "raw", squares, tars=True)
    with pytest.raises(ValueError, match=r"resolutions is \[32, 16\]; .*must be \[32\]"):
        rendered(config(tmp_path / "raw", "imagenet_oord-part", resolutions=[32, 16]))
    with pytest.raises(ValueError, match="image_size is 64; the source .* has images of 32 pixels"):
        rendered(config(tmp_path / "raw", "imagenet_oord-part", image_size=64, resolutions=[64]))
    for name in ("imagenet_area", "imagenet_box-part", "pictures"):
        with pytest.raises(ValueError, match="dataset is .*imagenet_oord makes imagenet_oord"):
            rendered(config(tmp_path / "raw", name))


# ---- imagenet_box --------------------------------------------------------------------------------------------------


def planar(squares: np.ndarray) -> np.ndarray:
    return squares.transpose(0, 3, 1, 2).reshape(len(squares), -1)


def write_box(root: pathlib.Path, squares: np.ndarray, kind: str) -> None:
    root.mkdir()
    for name, part, first in (
        ("train_data_batch_1", squares[:3], 1),
        ("train_data_batch_2", squares[3:4], 4),
        ("val_data", squares[4:], 5),
    ):
        batch = {"data": planar(part), "labels": list(range(first, first + len(part))), "mean": np.zeros(3072)}
        if kind == "stored":
            np.savez(root / f"{name}.npz", **batch)
        elif kind == "deflated":
            np.savez_compressed(root / f"{name}.npz", **batch)
        else:
            (root / name).write_bytes(pickle.dumps(batch, protocol=int(kind)))


@pytest.mark.parametrize("kind", ["stored", "deflated", "2", "4", "5"])
def test_box_batches_are_read_in_planes(tmp_path: pathlib.Path, squares: np.ndarray, rendered: Callable, kind: str):
    write_box(tmp_path / "raw", squares, kind)
    found = rendered(config(tmp_path / "raw", "imagenet_box-part"))
    assert {split: len(part) for split, part in found.items()} == {"train": 2, "valid": 2, "test": 2}
    seen = {}
    for part in found.values():
        for label, px in part.values():
            seen[label] = px
    assert sorted(seen) == list(range(6))  # the files count from 1
    assert all(np.array_equal(seen[i], squares[i]) for i in range(6))
    source = sources.find(config(tmp_path / "raw", "imagenet_box-part"))
    in_place = {item.offset is not None for item in source.items}
    assert in_place == {kind not in ("deflated", "2")}  # these two are not in the file as they are in memory


def test_damaged_batches_are_refused(tmp_path: pathlib.Path, squares: np.ndarray):
    write_box(tmp_path / "raw", squares, "stored")
    path = tmp_path / "raw" / "val_data.npz"
    good = path.read_bytes()
    at = good.index(planar(squares[4:]).tobytes()) + 1000
    path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
    with pytest.raises(UnusableSource, match="corrupt_source_file: val_data.npz: Bad CRC-32"):
        sources.find(config(tmp_path / "raw", "imagenet_box-part"))
    path.write_bytes(good[:-100])
    with pytest.raises(UnusableSource, match="corrupt_source_file"):
        sources.find(config(tmp_path / "raw", "imagenet_box-part"))
    np.savez(path, labels=[1])
    with pytest.raises(UnusableSource, match="shape_mismatch: val_data.npz: it has no array called data"):
        sources.find(config(tmp_path / "raw", "imagenet_box-part"))
    np.savez(path, data=np.uint8(1), labels=[1])
    with pytest.raises(UnusableSource, match="shape_mismatch: val_data.npz: data is uint8 ()"):
        sources.find(config(tmp_path / "raw", "imagenet_box-part"))


class Evil:
    """Pickles as a call of the function with the arguments."""

    def __init__(self, function: Callable, *arguments: object) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple:
        return self.call


@pytest.mark.parametrize(
    "thing",
    [
        Evil(eval, "1 + 1"),
        Evil(np.load, "/etc/hostname"),
        Evil(np.frombuffer, b"12345678", "O"),
        Evil(np.zeros, (1,), "O"),
        np.array([None, 1], dtype=object),
    ],
    ids=["eval", "load", "frombuffer", "function of numpy", "objects"],
)
def test_pickles_rebuild_arrays_of_numbers_and_call_nothing(tmp_path: pathlib.Path, thing: object):
    (tmp_path / "train_data_batch_1").write_bytes(pickle.dumps({"data": thing, "labels": [1]}, protocol=4))
    with pytest.raises(UnusableSource, match="unsafe_pickle"):
        sources.find(config(tmp_path, "imagenet_box-part"))
