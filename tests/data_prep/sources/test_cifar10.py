"""CIFAR-10 in each of its layouts is the same images with the same labels.

pytest tests/data_prep/sources/test_cifar10.py
"""

from __future__ import annotations

import functools
import pathlib
import pickle
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep import sources
from data_prep.sources.base import UnusableSource
from tests.data_prep import made

config = functools.partial(made.config, dataset="cifar10-part", image_size=32, resolutions=[32], bits=[3, 8])


@pytest.fixture
def originals() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Split -> ((N, 32, 32, 3) pixels, labels)."""
    rng = np.random.default_rng(0)
    return {
        split: (rng.integers(0, 256, (n, 32, 32, 3)).astype(np.uint8), rng.integers(0, 10, n).astype(np.uint8))
        for split, n in (("train", 40), ("test", 20))
    }


def write(root: pathlib.Path, originals: dict, layout: str) -> None:
    root.mkdir()
    for split, (pixels, labels) in originals.items():
        planes = pixels.transpose(0, 3, 1, 2).reshape(len(pixels), -1)
        name = "data_batch_1" if split == "train" else "test_batch"
        if layout == "binary":
            (root / f"{name}.bin").write_bytes(np.hstack([labels[:, None], planes]).astype(np.uint8).tobytes())
        elif layout == "python":
            batch = {b"data": planes, b"labels": labels.tolist(), b"batch_label": b"batch 1 of 5"}
            (root / name).write_bytes(pickle.dumps(batch, protocol=2))
        elif layout == "png":
            for i, (square, label) in enumerate(zip(pixels, labels, strict=True)):
                path = root / split / f"class_{label}" / f"{i:04d}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(made.encoded(square))
        else:
            rows = made.image_column(map(made.encoded, pixels))
            table = pa.table({"img": rows, "label": pa.array(labels.tolist(), pa.int64())})
            pq.write_table(table, root / f"{split}-00000-of-00001.parquet")


@pytest.mark.parametrize("layout", ["binary", "python", "png", "parquet"])
def test_layouts(tmp_path: pathlib.Path, originals: dict, rendered: Callable, layout: str):
    write(tmp_path / "raw", originals, layout)
    name = {"parquet": "hf_parquet", "png": "folder"}.get(layout, "cifar10")
    assert sources.find(config(tmp_path / "raw")).name == name
    found = rendered(config(tmp_path / "raw", num_valid_photos=5))
    assert {split: len(part) for split, part in found.items()} == {"train": 35, "valid": 5, "test": 20}
    for split, part in (("train", found["train"] | found["valid"]), ("test", found["test"])):
        pixels, labels = originals[split]
        labels = np.full(len(labels), -1) if layout == "png" else labels  # the folder reader gives none
        expected = sorted((int(label), square.tobytes()) for square, label in zip(pixels, labels, strict=True))
        assert sorted((-1 if label is None else label, px.tobytes()) for label, px in part.values()) == expected


def test_official_files_give_the_official_pixels(shared: pathlib.Path, rendered: Callable):
    """The first 100 records of the official binary files, and the same images as folders and as Parquet."""
    folder = shared / "data" / "cifar10" / "layout-samples"
    sizes = {}
    for layout, number in (("cifar-10-batches-bin", (100, 100)), ("png", (200, 100)), ("parquet", (200, 100))):
        found = rendered(config(folder / layout))
        sizes[layout] = len(found["train"]), len(found["test"])
        assert sizes[layout] == number
        if layout == "cifar-10-batches-bin":
            label, px = found["train"]["data_batch_1#00000"]
            assert label == 6 and px[0, 0].tolist() == [59, 62, 63]
            label, px = found["test"]["test_batch#00000"]
            assert label == 3 and px[0, 0].tolist() == [158, 112, 49]


def test_damage_is_named(tmp_path: pathlib.Path, originals: dict):
    write(tmp_path / "raw", originals, "binary")
    path = tmp_path / "raw" / "data_batch_1.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UnusableSource, match="corrupt_source_file: data_batch_1.bin: 122919 bytes"):
        sources.find(config(tmp_path / "raw"))
