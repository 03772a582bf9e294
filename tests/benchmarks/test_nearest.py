"""Copies of training images are found as such, mirrored ones too, among images that are no copies.

python -m pytest tests/benchmarks/test_nearest.py
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from benchmarks import nearest
from data_prep.parquet import pixel_column

TRAIN = np.random.default_rng(0).integers(0, 256, (6, 16, 16, 3)).astype(np.uint8)


class Dataset:
    """Six training images in two row groups."""

    def tables(self, **which: Any) -> Iterator[pa.Table]:
        assert which == {"resolution": 16, "bits": 8, "split": "train", "columns": ["key", "px"]}
        table = pa.table({"key": [f"photo{i}" for i in range(6)], "px": pixel_column(TRAIN)})
        yield from (table.slice(0, 4), table.slice(4))


def test_the_nearest_is_found_upright_or_mirrored() -> None:
    noisy = np.clip(TRAIN[2].astype(int) + 3, 0, 255).astype(np.uint8)
    found, pictures = nearest.nearest(np.stack([TRAIN[5], TRAIN[1][:, ::-1], noisy]), Dataset())
    assert [(one.key, one.mirrored) for one in found] == [("photo5", False), ("photo1", True), ("photo2", False)]
    assert found[0].distance == found[1].distance == 0 and 2 < found[2].distance <= 3
    assert np.array_equal(pictures[1], TRAIN[1][:, ::-1]), "shown as it was compared"


def test_distances_are_those_of_the_pixels() -> None:
    other = np.random.default_rng(1).integers(0, 256, (16, 16, 3)).astype(np.uint8)
    (found,), _ = nearest.nearest(other[None], Dataset())
    both = np.concatenate([TRAIN, TRAIN[:, :, ::-1]]).astype(float)
    distances = np.sqrt(((both - other) ** 2).mean(axis=(1, 2, 3)))
    assert found.distance == pytest.approx(distances.min())
    assert found.key == f"photo{distances.argmin() % 6}"
