"""Area resize, equal bit for bit to TensorFlow's ResizeArea(align_corners=False).

All in float32: weighted pixels are summed along x first, then along y, each from left to right, then one product with
the reciprocal of the area. Each tap is a product and a sum of NumPy's over all outputs at once: separate calls, which
no processor fuses, while compiled loops and sparse-matrix libraries may fuse a product with a sum or reorder sums.

Shapes: H W of the source, h w of an output. A tap is a source position that an output position reads.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np


def resize_area(pixels: np.ndarray, sizes: Sequence[tuple[int, int]]) -> list[np.ndarray]:
    """(H, W, 3) uint8 -> for each (h, w) in `sizes` an array (h, w, 3) float32."""
    assert pixels.dtype == np.uint8 and pixels.shape[2:] == (3,), f"{pixels.dtype} {pixels.shape}"
    columns = pixels.transpose(1, 0, 2).reshape(pixels.shape[1], -1)  # (W, H * 3), once for all sizes
    found = []
    for height, width in sizes:
        y, y_weights, y_scale = _taps(pixels.shape[0], height)
        x, x_weights, x_scale = _taps(pixels.shape[1], width)
        rows = _sums(columns, x, x_weights).reshape(width, -1, 3).transpose(1, 0, 2).reshape(len(pixels), -1)
        area = np.float32(1.0 / float(y_scale * x_scale))
        found.append((_sums(rows, y, y_weights) * area).reshape(height, width, 3))
    return found


def _sums(lines: np.ndarray, taps: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """(n_in, length) -> (n_out, length) float32: the weighted lines at each output position's taps, added in order.

    taps and weights: (num_taps, n_out).
    """
    total = np.zeros((taps.shape[1], lines.shape[1]), np.float32)
    for tap, weight in zip(taps, weights, strict=True):
        total += lines[tap] * weight[:, None]
    return total


@functools.lru_cache(maxsize=256)
def _taps(n_in: int, n_out: int) -> tuple[np.ndarray, np.ndarray, np.float32]:
    """Source positions and float32 weights of each output position, (num_taps, n_out) each, and the scale."""
    one = np.float32(1)
    scale = np.float32(n_in) / np.float32(n_out)
    k = np.arange(n_out, dtype=np.float32)
    begin, end = k * scale, (k + one) * scale
    first, last = np.floor(begin).astype(np.int64), np.ceil(end).astype(np.int64)
    taps = first + np.arange(int((last - first).max()))[:, None]
    cell = taps.astype(np.float32)
    cut_begin, cut_end = cell < begin, cell + one > end
    weights = np.where(cut_begin, np.where(cut_end, scale, cell + one - begin), np.where(cut_end, end - cell, one))
    weights = np.where(taps < last, weights, 0).astype(np.float32)
    return np.minimum(taps, n_in - 1), weights, scale  # rounding may make the last tap one too far
