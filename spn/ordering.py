"""The subscale ordering (paper section 2.2, equation 2): an image as S * S interleaved slices, and back.

Slices are numbered in raster order of their meta-position (i, j): number = i * S + j. The paper counts meta-positions
from 1, this code from 0.

B batch, C channels, H W image, S scaling factor, h w slice (h = H/S, w = W/S).
"""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor


def image_to_slices(image: Tensor, scaling_factor: int) -> Tensor:
    """[B, C, H, W] -> [B, S*S, C, h, w] with slice[i * S + j] = image[..., i::S, j::S]; inverse of slices_to_image."""
    height, width = image.shape[-2:]
    if height % scaling_factor or width % scaling_factor:
        raise ValueError(f"image of {height}x{width} cannot be cut by scaling_factor {scaling_factor}")
    return rearrange(image, "b c (h i) (w j) -> b (i j) c h w", i=scaling_factor, j=scaling_factor)


def slices_to_image(slices: Tensor, scaling_factor: int) -> Tensor:
    """[B, S*S, C, h, w] -> [B, C, H, W]; inverse of image_to_slices."""
    assert slices.shape[1] == scaling_factor**2, slices.shape
    return rearrange(slices, "b (i j) c h w -> b c (h i) (w j)", i=scaling_factor, j=scaling_factor)


def target_slices(slices: Tensor, index: Tensor) -> Tensor:
    """Slice index[b] of each image: [B, S*S, ...], [B] -> [B, ...]."""
    return slices[torch.arange(len(index), device=slices.device), index]


def slot_offsets(scaling_factor: int) -> list[tuple[int, int]]:
    """Offsets (di, dj) of the slots of the embedder's input: the slices that can precede a target, seen from it.

    A slot holds the slice at the same *relative* meta-position for every target ("the slice directly above" is always
    the same slot); this is what makes the embedder equivariant (section 3.2). There are 2 S (S - 1) of them.
    """
    reach = scaling_factor - 1
    above = [(di, dj) for di in range(-reach, 0) for dj in range(-reach, reach + 1)]
    left = [(0, dj) for dj in range(-reach, 0)]
    return above + left


def slot_sources(scaling_factor: int) -> Tensor:
    """[S*S, slots] number of the slice that fills each slot for each target; S*S where the slot holds padding."""
    table = []
    for i in range(scaling_factor):
        for j in range(scaling_factor):
            row = []
            for di, dj in slot_offsets(scaling_factor):
                inside = 0 <= i + di < scaling_factor and 0 <= j + dj < scaling_factor
                row.append((i + di) * scaling_factor + j + dj if inside else scaling_factor**2)
            table.append(row)
    return torch.tensor(table, dtype=torch.long).reshape(scaling_factor**2, -1)
