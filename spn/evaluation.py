"""Exact bits/dim of a stage and of a chain on held-out images (paper section 3.3).

Nats are summed over every dim of every image and divided once, by the dims of the *full* image, so that the parts of a
chain add up to its total. B batch, H W image, S scaling factor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from spn.bitdepth import stage_values
from spn.config import first_given
from spn.model import SPN, nll_nats
from spn.ordering import image_to_slices

Forward = Callable[[Tensor, Tensor, Tensor | None], Tensor]
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
def slice_nats(
    model: SPN, image: Tensor, given: Tensor | None, *, slices: Sequence[int], forward: Forward | None = None
) -> Tensor:
    """[B, len(slices), 3] float64: exact negative log-likelihood in nats of each slice and channel.

    forward: what is called instead of the network itself, such as its compiled form.
    """
    assert not model.training, "dropout would make the likelihood of another network than the one at hand"
    values = image_to_slices(image, model.config.scaling_factor)
    given = None if given is None else image_to_slices(given, model.config.scaling_factor)
    forward = model if forward is None else forward  # not `or`: a compiled network has no truth value
    found = []
    for number in slices:
        logits = forward(values, torch.full((len(image),), number, device=image.device), given)
        channels = [nll_nats(logits[:, c : c + 1], values[:, number, c : c + 1]).double() for c in range(3)]
        found.append(torch.stack(channels, 1))
    return torch.stack(found, 1)


def image_nats(model: SPN, image: Tensor, given: Tensor | None, *, slices: Sequence[int]) -> Tensor:
    """[B] float64: the same of `slices` of each image [B, 3, H, W], summed."""
    return slice_nats(model, image, given, slices=slices).sum((1, 2))


def stage_nats(
    model: SPN, image: Tensor, *, slices: Sequence[int], stored_bits: int = 8, forward: Forward | None = None
) -> Tensor:
    """[B, len(slices), 3] as above, of the bits that a stage generates of images of `stored_bits` bits."""
    config = model.config
    bits = {"given_bits": config.num_given_bits, "num_bits": config.num_bits}
    values, given = stage_values(image, stored_bits=stored_bits, **bits)
    return slice_nats(model, values, given, slices=slices, forward=forward)


def chain_nats(models: Mapping[str, SPN], image: Tensor) -> dict[str, Tensor]:
    """{stage: [B] nats}: each part of -log P of 8-bit images [B, 3, H, W]; their sum is the whole chain's."""
    parts = {}
    for stage, model in models.items():
        slices = scored_slices(model, first_given=first_given(model.config.stage, models))
        parts[stage] = stage_nats(model, image, slices=slices).sum((1, 2))
    return parts
