"""What networks must beat on 8-bit pixels: a histogram of the training images, and the pixels' own entropy."""

from __future__ import annotations

import numpy as np


class Histogram:
    """Per-channel histogram of 8-bit training pixels: the simplest honest model, to be beaten.

    Counts start at 1, so every value has some probability. Low-depth and low-bit parts follow from the same
    distribution (marginal of the high bits, then low bits given them), so its parts add up too.
    """

    def __init__(self) -> None:
        self.counts = np.ones((3, 256))

    def add(self, pixels: np.ndarray) -> None:
        """Count uint8 pixels [N, H, W, 3]."""
        for channel in range(3):
            self.counts[channel] += np.bincount(pixels[..., channel].ravel(), minlength=256)

    def nats(self, pixels: np.ndarray, *, given_bits: int, num_bits: int) -> float:
        """Summed nats of bits given_bits .. given_bits + num_bits of uint8 pixels [N, H, W, 3], given those above."""
        whole = self.counts / self.counts.sum(1, keepdims=True)
        shift = 8 - given_bits - num_bits
        total = 0.0
        for channel in range(3):
            values = pixels[..., channel].ravel()
            joint = whole[channel].reshape(-1, 2**shift).sum(1)
            above = joint.reshape(-1, 2**num_bits).sum(1)
            total -= float((np.log(joint[values >> shift]) - np.log(above[values >> (8 - given_bits)])).sum())
        return total


def raw_entropy_bits(pixels: np.ndarray) -> float:
    """Bits/dim of an ideal per-channel code fitted to these very pixels [N, H, W, 3]: their zeroth-order entropy."""
    total = 0.0
    for channel in range(3):
        p = np.bincount(pixels[..., channel].ravel(), minlength=256) / pixels[..., channel].size
        total -= float((p[p > 0] * np.log2(p[p > 0])).sum())
    return total / 3
