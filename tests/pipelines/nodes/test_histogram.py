"""The histogram that every network must beat has parts that add up, and raw entropy is that of the pixels.

python -m pytest tests/pipelines/nodes/test_histogram.py
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from pipelines.nodes.histogram import count_values, histogram_nats, raw_entropy_bits


def skewed_pixels(seed: int, num_images: int) -> np.ndarray:
    """uint8 [N, 6, 5, 3]: each channel its own skewed distribution."""
    generator = np.random.default_rng(seed)
    draws = generator.gamma(shape=(2.0, 4.0, 8.0), scale=(8.0, 9.0, 10.0), size=(num_images, 6, 5, 3))
    return np.clip(draws, 0, 255).astype(np.uint8)


def test_histogram_by_hand():
    """Two pixels seen, each count starting at 1: probabilities 2/258 where seen, 1/258 elsewhere."""
    seen = np.array([[[[10, 20, 30]], [[11, 20, 255]]]], dtype=np.uint8)
    made = 1 + count_values(seen)
    pixel = np.array([[[[10, 20, 0]]]], dtype=np.uint8)
    expected = -math.log(2 / 258) - math.log(3 / 258) - math.log(1 / 258)
    assert histogram_nats(made, count_values(pixel), given_bits=0, num_bits=8) == pytest.approx(expected, rel=1e-12)
    # 3 high bits: red 10, 11 and 30 others below 32; green 20, 20 and 30 others; blue 30 and 31 others.
    expected = -math.log(34 / 258) - math.log(34 / 258) - math.log(33 / 258)
    assert histogram_nats(made, count_values(pixel), given_bits=0, num_bits=3) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("cuts", [(3, 8), (1, 3, 8), (1, 2, 3, 4, 5, 6, 7, 8), (5, 8), (7, 8)])
def test_histogram_parts_add_up(cuts):
    """Any cascade of depths sums to the 8-bit figure, on pixels it has not seen too."""
    made, held_out = 1 + count_values(skewed_pixels(1, 5)), skewed_pixels(2, 4)
    whole = histogram_nats(made, count_values(held_out), given_bits=0, num_bits=8)
    parts = [
        histogram_nats(made, count_values(held_out), given_bits=given, num_bits=total - given)
        for given, total in zip((0, *cuts), cuts, strict=False)
    ]
    assert sum(parts) == pytest.approx(whole, rel=1e-12)
    assert min(parts) > 0


def test_raw_entropy_by_hand():
    """Channels of 0, 1 and 8 bits; then random pixels against numpy's own counts."""
    pixels = np.zeros((1, 16, 16, 3), dtype=np.uint8)
    pixels[0, :8, :, 1] = 200
    pixels[0, :, :, 2] = np.arange(256).reshape(16, 16)
    assert raw_entropy_bits(count_values(pixels)) == pytest.approx((0 + 1 + 8) / 3, rel=1e-12)
    assert raw_entropy_bits(count_values(pixels[..., [0, 0, 0]])) == 0
    drawn = skewed_pixels(6, 7)
    expected = 0.0
    for channel in range(3):
        _, counts = np.unique(drawn[..., channel], return_counts=True)
        p = counts / counts.sum()
        expected += -(p * np.log2(p)).sum() / 3
    assert raw_entropy_bits(count_values(drawn)) == pytest.approx(expected, rel=1e-12)
