"""Exact bits/dim of a stage and of a chain on held-out images (paper section 3.3).

Nats are summed over every dim of every image and divided once, by the dims of the *full* image, so that the parts of a
chain add up to its total. B batch, H W image, S scaling factor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from spn.bitdepth import stage_values
from spn.model import SPN, nll_nats
from spn.ordering import image_to_slices

EVAL_BATCH = 32  # images scored at once in a training's validation; only memory depends on it


def bits_per_dim(nats: float, *, num_images: int, image_size: int) -> float:
    """Summed nats of `num_images` images -> bits per dim of the full image (H * W * 3 dims)."""
    return nats / (num_images * image_size**2 * 3) / math.log(2)


def scored_slices(model: SPN, *, first_given: bool) -> range:
    """Slices that a stage answers for: only (0, 0) for first_slice; all but (0, 0) for a size_upscale after it."""
    if model.config.stage == "first_slice":
        return range(1)
    return range(1 if first_given else 0, model.config.num_slices)


@torch.no_grad()
def image_nats(model: SPN, image: Tensor, given: Tensor | None, *, slices: Sequence[int]) -> Tensor:
    """[B] float64: exact negative log-likelihood in nats of `slices` of each image [B, 3, H, W], summed."""
    assert not model.training, "dropout would make the likelihood of another network than the one at hand"
    total = torch.zeros(len(image), dtype=torch.float64, device=image.device)
    values = image_to_slices(image, model.config.scaling_factor)
    given = None if given is None else image_to_slices(given, model.config.scaling_factor)
    for number in slices:
        index = torch.full((len(image),), number, device=image.device)
        total += nll_nats(model(values, index, given), values[:, number]).double()
    return total


def chain_nats(models: Mapping[str, SPN], image: Tensor) -> dict[str, Tensor]:
    """{stage: [B] nats}: each part of -log P of 8-bit images [B, 3, H, W]; their sum is the whole chain's."""
    parts = {}
    for stage, model in models.items():
        config = model.config
        values, given = stage_values(image, stored_bits=8, given_bits=config.num_given_bits, num_bits=config.num_bits)
        first_given = config.stage == "size_upscale" and "first_slice" in models
        parts[stage] = image_nats(model, values, given, slices=scored_slices(model, first_given=first_given))
    return parts


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
