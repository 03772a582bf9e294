"""van den Oord's and Chrabaszcz's ImageNet are taken pixel by pixel, under their own ids, never resized.

pytest tests/data_prep/sources/test_downsampled_imagenet.py
"""

from __future__ import annotations

import io
import pathlib
import pickle
from collections.abc import Callable

import numpy as np
import pytest

from data_prep import sources
from data_prep.config import DataConfig
from data_prep.sources.base import UnusableSource
from tests.data_prep import made


def config(root: pathlib.Path, dataset: str, **changes: object) -> DataConfig:
    good = dict(dataset=dataset, image_size=32, resolutions=[32], bits=[5, 8], num_valid_photos=2)
    return made.config(root, **{**good, **changes})


@pytest.fixture(scope="session")
def squares(jpegs: list) -> np.ndarray:
    """(6, 32, 32, 3) uint8, made of the JPEGs."""
    return np.stack([made.square_of(data, 32) for _, data in jpegs])


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


def test_an_image_that_is_there_twice_is_used_once_and_named(tmp_path: pathlib.Path, squares: np.ndarray):
    """The tars beside the folders that were made from them; the same batches as NumPy archives and as pickles."""
    for tars in (True, False):
        write_oord(tmp_path / "oord", squares, tars=tars)
    write_box(tmp_path / "box", squares, "stored")
    write_box(tmp_path / "box", squares, "4")
    for name in ("oord", "box"):
        found = sources.find(config(tmp_path / name, f"imagenet_{name}-part"))
        keys = [item.key for item in found.items]
        assert len(set(keys)) == len(keys) == len(squares)
        assert sorted(twice.item.key for twice in found.rejected) == keys
        assert {twice.reason for twice in found.rejected} == {"duplicate_name"}
        assert {item.path for item in found.items}.isdisjoint(twice.item.path for twice in found.rejected)


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
    root.mkdir(exist_ok=True)
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


def npz(save: Callable = np.savez, **arrays: object) -> bytes:
    buffer = io.BytesIO()
    save(buffer, **arrays)
    return buffer.getvalue()


def changed(data: bytes, *places: int, to: int) -> bytes:
    return bytes(to if place in places else byte for place, byte in enumerate(data))


def test_damaged_batches_are_refused(tmp_path: pathlib.Path, squares: np.ndarray):
    write_box(tmp_path / "raw", squares, "stored")
    path = tmp_path / "raw" / "val_data.npz"
    good, deflated = path.read_bytes(), npz(np.savez_compressed, data=planar(squares[4:]))
    pixel = good.index(planar(squares[4:]).tobytes()) + 1000
    methods = 8, deflated.index(b"PK\x01\x02") + 10  # of compression: in the file's header and in the directory
    begin = 30 + deflated[26] + deflated[28]  # after the header, the name and what is extra
    large = npz(data=np.zeros((400, 768), np.uint8), labels=[1])  # its header is read before its checksum
    for data, message in (
        (changed(good, pixel, to=good[pixel] ^ 1), "corrupt_source_file: val_data.npz: Bad CRC-32"),
        (good[:-100], "corrupt_source_file"),
        (npz(labels=[1]), "shape_mismatch: val_data.npz: it has no array called data"),
        (npz(data=np.uint8(1), labels=[1]), "shape_mismatch: val_data.npz: data is uint8 ()"),
        (changed(deflated, *methods, to=99), "corrupt_source_file: val_data.npz: That compression method"),
        (changed(deflated, begin, to=255), "corrupt_source_file: val_data.npz: Error -3 while decompressing"),
        (large.replace(b"(400, 768)", b"(400, 768 "), "corrupt_source_file: val_data.npz: .*EOF in multi-line"),
    ):
        path.write_bytes(data)
        with pytest.raises(UnusableSource, match=message):
            sources.find(config(tmp_path / "raw", "imagenet_box-part"))


class Evil:
    """Pickles as a call of the function with the arguments."""

    def __init__(self, function: Callable, *arguments: object) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple:
        return self.call


@pytest.mark.parametrize(
    ("thing", "named"),
    [
        (Evil(eval, "__import__('os').mkdir('it ran')"), "builtins.eval"),
        (Evil(np.load, "/etc/hostname"), "numpy.load"),
        (Evil(np.frombuffer, b"12345678", "O"), "frombuffer"),
        (Evil(np.zeros, (1,), "O"), "zeros"),
        (np.array([None, 1], dtype=object), "'O8'"),
    ],
    ids=["eval", "load", "frombuffer", "function of numpy", "objects"],
)
def test_pickles_rebuild_arrays_of_numbers_and_call_nothing(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, thing: object, named: str
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train_data_batch_1").write_bytes(pickle.dumps({"data": thing, "labels": [1]}, protocol=4))
    with pytest.raises(UnusableSource, match=f"unsafe_pickle.*{named}"):
        sources.find(config(tmp_path, "imagenet_box-part"))
    assert not (tmp_path / "it ran").exists()
