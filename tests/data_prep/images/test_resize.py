"""The compiled area resize against sums written out in NumPy.  pytest tests/data_prep/images/test_resize.py

That both equal TensorFlow is tested in test_images.py, on TensorFlow's own values.
"""

from __future__ import annotations

import numba
import numba.core.caching as caching
import numpy as np
import pytest

from data_prep import resize

SIZES = [(32, 32), (1, 1), (40, 17), (16, 90), (15, 16), (33, 7)]


def by_numpy(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    """One tap after another, all outputs at once."""
    y_taps, y_weights, y_scale = resize._axis(pixels.shape[0], height)
    x_taps, x_weights, x_scale = resize._axis(pixels.shape[1], width)
    rows = np.zeros((pixels.shape[0], width, 3), np.float32)
    for taps, weights in zip(x_taps, x_weights, strict=True):
        rows += pixels[:, taps].astype(np.float32) * weights[None, :, None]
    total = np.zeros((height, width, 3), np.float32)
    for taps, weights in zip(y_taps, y_weights, strict=True):
        total += rows[taps] * weights[:, None, None]
    return total * np.float32(1.0 / float(y_scale * x_scale))


# Around the number of rows that are done at once, where output rows begin in one block and end in the next.
@pytest.mark.parametrize("height", [1, 15, 16, 17, 33, 333])
@pytest.mark.parametrize("width", [1, 77])
def test_all_sizes_of_one_pass(height: int, width: int):
    pixels = np.random.default_rng(height).integers(0, 256, (height, width, 3)).astype(np.uint8)
    for size, found in zip(SIZES, resize.resize_area(pixels, SIZES), strict=True):
        assert found.shape == (*size, 3) and found.dtype == np.float32
        assert np.array_equal(found, by_numpy(pixels, *size)), size


def test_views_and_read_only_arrays():
    pixels = np.random.default_rng(0).integers(0, 256, (50, 60, 3)).astype(np.uint8)
    pixels.setflags(write=False)
    for view in (pixels, pixels[3:40, 5:50], pixels[::-1, ::2], pixels.transpose(1, 0, 2)):
        (found,) = resize.resize_area(view, [(20, 20)])
        assert np.array_equal(found, by_numpy(view, 20, 20))


def test_it_works_where_compiled_code_cannot_be_kept(monkeypatch: pytest.MonkeyPatch):
    def nowhere(self: object, function: object) -> None:
        raise RuntimeError("cannot cache function: no locator available")

    monkeypatch.setattr(caching.CacheImpl, "__init__", nowhere)
    with pytest.raises(RuntimeError, match="no locator"):
        numba.njit("int64(int64)", cache=True)(double)
    assert resize.compiled(double, "int64(int64)")(4) == 8


def double(number: int) -> int:
    return 2 * number
