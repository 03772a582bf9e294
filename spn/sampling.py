"""Sampling one slice, one image and a whole chain of stages (paper section 3.4).

The embedder runs once a slice, the decoder once a pixel (decoding.py); `sample_slice_slowly` is the reference. Each
image's randomness follows from (seed, stage, image index) alone.

B batch, H W image, h w slice, V values.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from spn.bitdepth import join_depth
from spn.decoding import decode_slice, prepare
from spn.draws import Draws
from spn.model import SPN
from spn.ordering import image_to_slices, slices_to_image


def uniforms(seed: int, *, stage: str, images: Sequence[int], image_size: int) -> Tensor:
    """[B, 3, H, W] float64 in [0, 1): the randomness of each image, by its index alone, whatever batch it is drawn in.

    From NumPy's Philox, keyed by 128 bits: torch's CPU generator keeps 32 bits of a seed, so that two of 50,000 images
    would share their draws with a chance of a quarter.
    """
    rows = []
    for index in images:
        digest = hashlib.blake2b(f"{seed}/{stage}/{index}".encode(), digest_size=16).digest()
        generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
        rows.append(torch.from_numpy(generator.random((3, image_size, image_size))))
    return torch.stack(rows)


@torch.no_grad()
def sample_stage(
    model: SPN,
    uniform: Tensor,
    *,
    given: Tensor | None = None,
    first_slice: Tensor | None = None,
    temperature: float = 1.0,
    on_row: Callable[[], None] | None = None,
) -> Tensor:
    """Sample what one stage generates: an image [B, 3, H, W], or for a first_slice stage one slice [B, 3, h, w].

    uniform [B, 3, H, W]: `uniforms`, one number for each value of the image. given [B, 3, H, W]: more significant
    bits, for depth upscaling. first_slice [B, 3, h, w]: slice (0, 0), kept as it is, for size upscaling. `on_row` is
    called after each row of pixels of each slice.
    """
    assert not model.training, "dropout would draw from another network than the one at hand"
    config, weights, batch = model.config, prepare(model), len(uniform)
    numbers = image_to_slices(uniform, config.scaling_factor)
    size = config.slice_size
    slices = torch.zeros((batch, config.num_slices, 3, size, size), dtype=torch.long, device=uniform.device)
    todo = range(config.num_slices)
    if first_slice is not None:
        slices[:, 0], todo = first_slice, todo[1:]
    elif config.stage == "first_slice":
        todo = todo[:1]
    for number in todo:
        index = torch.full((batch,), number, device=uniform.device)
        context = model.context(slices_to_image(slices, config.scaling_factor), index, given)
        draws = Draws(numbers[:, number], temperature=temperature)
        slices[:, number] = decode_slice(weights, context, draws, on_row=on_row)
    if config.stage == "first_slice":
        return slices[:, 0]
    return slices_to_image(slices, config.scaling_factor)


def rows_to_sample(models: Mapping[str, SPN]) -> int:
    """Rows of pixels that a chain decodes for one batch: the number of `on_row` calls of `sample_chain`."""
    rows = 0
    for model in models.values():
        num = 1 if model.config.stage == "first_slice" else model.config.num_slices
        if model.config.stage == "size_upscale" and "first_slice" in models:
            num -= 1
        rows += num * model.config.slice_size
    return rows


def sample_chain(
    models: Mapping[str, SPN],
    *,
    seed: int,
    images: Sequence[int],
    temperature: Mapping[str, float] | None = None,
    on_row: Callable[[], None] | None = None,
) -> dict[str, Tensor]:
    """Sample images through all stages in order: {stage: what is known after it}.

    first_slice gives [B, 3, h, w] of d1 bits, size_upscale (or baseline) [B, 3, H, W] of d1 bits, each depth_upscale
    the image at its depth. models are in the order of generation; images are the indices that seed each image's draws.
    """
    known: dict[str, Tensor] = {}
    first_slice: Tensor | None = None
    image: Tensor | None = None
    for stage, model in models.items():
        config = model.config
        device = next(model.parameters()).device
        uniform = uniforms(seed, stage=stage, images=images, image_size=config.image_size).to(device)
        drawn = sample_stage(
            model,
            uniform,
            given=image if config.num_given_bits else None,
            first_slice=first_slice if config.stage == "size_upscale" else None,
            temperature=(temperature or {}).get(stage, 1.0),
            on_row=on_row,
        )
        if config.stage == "first_slice":
            first_slice = drawn
        elif config.num_given_bits:
            assert image is not None, f"{stage} needs an image of more significant bits"
            image = drawn = join_depth(image, drawn, num_bits=config.num_bits)
        else:
            image = drawn
        known[stage] = drawn
    return known


@torch.no_grad()
def sample_slice_slowly(model: SPN, context: Tensor | None, draws: Draws) -> Tensor:
    """Reference: one whole forward for each value of a slice -> [B, 3, h, w]."""
    batch, _, height, width = draws.uniform.shape
    target = torch.zeros((batch, 3, height, width), dtype=torch.long, device=draws.uniform.device)
    for row in range(height):
        for column in range(width):
            for channel in range(3):
                logits = model.decoder(target, context)[:, channel, :, row, column]
                target[:, channel, row, column] = draws.choose(logits, row, column, channel)
    return target
