"""Copies of training images are found as such, mirrored ones too, among images that are no copies.

python -m pytest tests/benchmarks/test_nearest.py
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from benchmarks import nearest


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """Six training images in two row groups."""
    images = np.random.default_rng(0).integers(0, 256, (6, 16, 16, 3)).astype(np.uint8)

    def groups(dataset: Any, size: int, split: str) -> Iterator[tuple[list[str], np.ndarray]]:
        assert (size, split) == (16, "train")
        for begin in (0, 4):
            part = images[begin : begin + 4]
            yield [f"photo{begin + i}" for i in range(len(part))], part

    monkeypatch.setattr(nearest, "groups", groups)
    return images


def test_the_nearest_is_found_upright_or_mirrored(train: np.ndarray) -> None:
    noisy = np.clip(train[2].astype(int) + 3, 0, 255).astype(np.uint8)
    found, pictures = nearest.nearest(np.stack([train[5], train[1][:, ::-1], noisy]), None)  # type: ignore[arg-type]
    assert [(one.key, one.mirrored) for one in found] == [("photo5", False), ("photo1", True), ("photo2", False)]
    assert found[0].distance == found[1].distance == 0 and 2 < found[2].distance <= 3
    assert np.array_equal(pictures[1], train[1][:, ::-1]), "shown as it was compared"


def test_distances_are_those_of_the_pixels(train: np.ndarray) -> None:
    other = np.random.default_rng(1).integers(0, 256, (16, 16, 3)).astype(np.uint8)
    (found,), _ = nearest.nearest(other[None], None)  # type: ignore[arg-type]
    both = np.concatenate([train, train[:, :, ::-1]]).astype(float)
    distances = np.sqrt(((both - other) ** 2).mean(axis=(1, 2, 3)))
    assert found.distance == pytest.approx(distances.min())
    assert found.key == f"photo{distances.argmin() % 6}"
