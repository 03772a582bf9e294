"""What networks must beat on 8-bit pixels: a histogram of the training images, and the pixels' own entropy."""

from __future__ import annotations

import numpy as np


def count_values(pixels: np.ndarray) -> np.ndarray:
    """[3, 256]: how often each channel of uint8 pixels [..., 3] has each value."""
    return np.stack([np.bincount(pixels[..., channel].ravel(), minlength=256) for channel in range(3)])


def histogram_nats(histogram: np.ndarray, counts: np.ndarray, *, given_bits: int, num_bits: int) -> float:
    """Summed nats of bits given_bits .. given_bits + num_bits, given those above, of pixels with these counts [3, 256].

    histogram: [3, 256], one more than the counts of the training pixels, so that every value has some probability: the
    simplest honest model, to be beaten. Low-depth and low-bit parts follow from the same distribution (marginal of the
    high bits, then low bits given them), so its parts add up too.
    """
    whole = histogram / histogram.sum(1, keepdims=True)
    joint = whole.reshape(3, 2 ** (given_bits + num_bits), -1).sum(2)
    above = joint.reshape(3, 2**given_bits, -1).sum(2)
    seen = counts.reshape(3, 2 ** (given_bits + num_bits), -1).sum(2)
    return float((seen * (np.log(above).repeat(2**num_bits, axis=1) - np.log(joint))).sum())


def raw_entropy_bits(counts: np.ndarray) -> float:
    """Bits/dim of an ideal per-channel code fitted to the very pixels of these counts: their zeroth-order entropy."""
    p = counts / counts.sum(1, keepdims=True)
    return -float((p * np.log2(p, where=p > 0, out=np.zeros_like(p))).sum()) / 3
