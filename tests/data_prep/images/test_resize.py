"""The area resize against its definition, one output value at a time.  pytest tests/data_prep/images/test_resize.py

That both equal TensorFlow is tested in test_images.py, on TensorFlow's own values.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from data_prep.resize import resize_area

SIZES = [(8, 8), (1, 1), (10, 4), (4, 23), (15, 16)]


def weights(n_in: int, n_out: int, k: int) -> list[tuple[int, np.float32]]:
    """(source position, share of it) that output position k covers, in float32."""
    one, scale = np.float32(1), np.float32(n_in) / np.float32(n_out)
    begin, end = np.float32(k) * scale, (np.float32(k) + one) * scale
    found = []
    for cell in range(math.floor(begin), math.ceil(end)):
        cut_begin, cut_end = np.float32(cell) < begin, np.float32(cell) + one > end
        share = scale if cut_begin and cut_end else one
        if cut_begin != cut_end:
            share = np.float32(cell) + one - begin if cut_begin else end - np.float32(cell)
        found.append((min(cell, n_in - 1), share))
    return found


def by_definition(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    scales = np.float32(pixels.shape[0]) / np.float32(height), np.float32(pixels.shape[1]) / np.float32(width)
    out = np.zeros((height, width, 3), np.float32)
    for i in range(height):
        for j in range(width):
            for y, y_share in weights(pixels.shape[0], height, i):
                row = np.zeros(3, np.float32)
                for x, x_share in weights(pixels.shape[1], width, j):
                    row += pixels[y, x].astype(np.float32) * x_share
                out[i, j] += row * y_share
    return out * np.float32(1 / float(scales[0] * scales[1]))


@pytest.mark.parametrize("shape", [(1, 1), (2, 33), (15, 16), (37, 29)])
def test_each_value_is_the_mean_of_the_area_that_it_covers(shape: tuple[int, int]) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (*shape, 3)).astype(np.uint8)
    for size, found in zip(SIZES, resize_area(pixels, SIZES), strict=True):
        assert found.shape == (*size, 3) and found.dtype == np.float32
        assert np.array_equal(found, by_definition(pixels, *size)), size


def test_views_and_read_only_arrays() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (50, 60, 3)).astype(np.uint8)
    pixels.setflags(write=False)
    for view in (pixels, pixels[3:40, 5:50], pixels[::-1, ::2], pixels.transpose(1, 0, 2)):
        (found,) = resize_area(view, [(20, 20)])
        assert np.array_equal(found, resize_area(view.copy(), [(20, 20)])[0])


def test_an_array_of_the_right_size_stays_as_it_is() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 3)).astype(np.uint8)
    assert np.array_equal(resize_area(pixels, [(5, 7)])[0], pixels)
