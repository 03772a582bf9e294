"""Sampling one slice, one image and a whole chain of stages (paper section 3.4).

The embedder runs once a slice, the decoder once a pixel: in plain torch (decoding/), on a GPU as fused kernels
(gpu/fused.py). `sample_slice_slowly` is the reference. Each image's randomness follows from (seed, stage, image index
or name) alone.

B batch, H W image, h w slice, V values.
"""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spn.bitdepth import join_depth
from spn.config import DECODERS, PRECISIONS, SPNConfig
from spn.decoding.incremental import Draws, decode_slice, prepare
from spn.decoding.jacobi import JacobiDecoder
from spn.model import SPN
from spn.ordering import image_to_slices, slices_to_image


def uniforms(seed: int, *, stage: str, images: Sequence[int | str], image_size: int) -> Tensor:
    """[B, 3, H, W] float64 in [0, 1): the randomness of each image, by its index or name alone, whatever its batch.

    From NumPy's Philox, keyed by 128 bits: torch's CPU generator keeps 32 bits of a seed, so that two of 50,000 images
    would share their draws with a chance of a quarter.
    """
    rows = []
    for index in images:
        digest = hashlib.blake2b(f"{seed}/{stage}/{index}".encode(), digest_size=16).digest()
        generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
        rows.append(torch.from_numpy(generator.random((3, image_size, image_size))))
    return torch.stack(rows)


Decode = Callable[..., Tensor]  # (context, draws, *, on_row): values [B, 3, h, w] of a slice

FEW = 4  # images, which a CPU draws sooner by Jacobi iteration than one value after the other
FEW_BITS = 3  # d1 of the paper
EMBEDDED_AT_ONCE = 64  # images; enough to fill a GPU, so that its memory is left to the decoder's caches


def slice_decoder(
    model: SPN,
    batch: int,
    *,
    temperature: float = 1.0,
    top_p: float | None = None,
    precision: str = "float32",
    decoder: str = "auto",
    coded: bool = False,
) -> Decode:
    """What decodes slices of a network in batches of one size.

    decoder: fused, the kernels of spn/gpu; jacobi, many values at once (jacobi.py); plain, on any device: jacobi for a
    FEW images on a CPU, otherwise one value after the other (incremental.py); auto, on a GPU jacobi for upscaling one
    image, and for size upscaling of few bits, whose values are nearly certain; otherwise fused if the kernels cover the
    network, otherwise plain.
    precision: of weights and caches on a GPU; those of plain are the network's own. coded: for draws with a coder,
    which takes one value after the other.
    Raises ValueError for another decoder or precision, and where fused is asked for but impossible.
    """
    for name, value, allowed in (("precision", precision, PRECISIONS), ("decoder", decoder, DECODERS)):
        if value not in allowed:
            raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(allowed)}")
    on_gpu, config = next(model.parameters()).device.type == "cuda", model.config
    is_certain = config.stage == "size_upscale" and config.num_bits <= FEW_BITS
    if decoder == "auto" and on_gpu and not coded and (is_certain or (batch == 1 and model.embedder is not None)):
        decoder = "jacobi"
    if decoder == "jacobi" and on_gpu:
        from spn.gpu.jacobi import JacobiDecoder as GraphJacobiDecoder

        return GraphJacobiDecoder(model, batch, temperature=temperature, top_p=top_p, precision=precision)
    if decoder == "jacobi" or (decoder != "fused" and batch <= FEW and not on_gpu and not coded):
        return JacobiDecoder(model)
    if decoder == "fused" or (decoder == "auto" and on_gpu):
        from spn.gpu.folding import not_covered
        from spn.gpu.fused import FusedDecoder

        reason = not_covered(model) if on_gpu else "the network is not on a GPU"
        if reason is None:
            dtype = getattr(torch, precision)
            return FusedDecoder(model, batch, dtype=dtype, temperature=temperature, top_p=top_p, coded=coded)
        if decoder == "fused":
            raise ValueError(f"decoder is 'fused', but {reason}")
        logging.getLogger(__name__).warning("%s is sampled by the plain decoder: %s", config.stage, reason)
    return functools.partial(decode_slice, prepare(model))


@torch.no_grad()
def sample_stage(
    model: SPN,
    uniform: Tensor,
    *,
    given: Tensor | None = None,
    slices: Tensor | None = None,
    rows: Tensor | None = None,
    temperature: float = 1.0,
    top_p: float | None = None,
    precision: str = "float32",
    decoder: str = "auto",
    decoders: dict[Any, Decode] | None = None,
    coder: Any = None,
    on_row: Callable[[], None] | None = None,
) -> Tensor:
    """Sample what one stage generates: an image [B, 3, H, W], or for a first_slice stage one slice [B, 3, h, w].

    uniform [B, 3, H, W]: `uniforms`, one number for each value of the image. given [B, 3, H, W]: more significant
    bits, for depth upscaling. slices [B, k, 3, h, w]: the first k slices in subscale order, kept as they are; rows
    [B, 3, k, w]: the first k rows of the first slice that is drawn, kept as they are. Both are prefixes of the order of
    generation, so what is drawn after them follows the model's exact conditional. precision, decoder: see
    `slice_decoder`; decoders: a dictionary that a caller who draws batch after batch keeps while the weights stay as
    they are, since a GPU's are recorded at their first use. coder: gives the values instead, or is given those of whole
    slices (coding.py). `on_row` is called after each row of pixels of each slice. Raises ValueError for a
    temperature, top_p, precision or decoder out of range.
    """
    assert not model.training, "dropout would draw from another network than the one at hand"
    config, batch, decoders = model.config, len(uniform), {} if decoders is None else decoders
    options: dict[str, Any] = dict(
        temperature=temperature, top_p=top_p, precision=precision, decoder=decoder, coded=coder is not None
    )
    key = (model, batch, *options.values())
    on_gpu = uniform.device.type == "cuda"
    numbers = image_to_slices(uniform, config.scaling_factor)
    given = None if given is None else image_to_slices(given, config.scaling_factor)
    size, num_known = config.slice_size, 0 if slices is None else slices.shape[1]
    known = torch.zeros((batch, config.num_slices, 3, size, size), dtype=torch.long, device=uniform.device)
    if slices is not None:
        known[:, :num_known] = slices
    todo = range(1) if config.stage == "first_slice" else range(num_known, config.num_slices)
    with torch.cuda.device_of(uniform):  # kernels run, and graphs are recorded, on the current card
        if key not in decoders:
            decoders[key] = slice_decoder(model, batch, **options)
        for number in todo:
            index = torch.full((batch,), number, device=uniform.device)
            with torch.autocast("cuda", torch.bfloat16, enabled=on_gpu and precision == "bfloat16"):
                context = _context(model, known, index, given)
            kept = coder.known() if coder is not None else rows if number == num_known else None
            beside = number - 1 if number % config.scaling_factor else number - config.scaling_factor  # one pixel away
            guess = known[:, beside] if number else None
            drawn = Draws(
                numbers[:, number], temperature=temperature, top_p=top_p, known=kept, guess=guess, coder=coder
            )
            known[:, number] = decoders[key](context, drawn, on_row=on_row)
    if config.stage == "first_slice":
        return known[:, 0]
    return slices_to_image(known, config.scaling_factor)


def _context(model: SPN, slices: Tensor, index: Tensor, given: Tensor | None) -> Tensor | None:
    """model.context, of a few images at once."""
    if model.embedder is None:
        return None
    parts = [None] * len(slices) if given is None else given.split(EMBEDDED_AT_ONCE)
    found = map(model.context, slices.split(EMBEDDED_AT_ONCE), index.split(EMBEDDED_AT_ONCE), parts)
    return torch.cat([part for part in found if part is not None])


def rows_to_sample(configs: Sequence[SPNConfig], *, num_known_slices: int = 0) -> int:
    """Rows of pixels that a chain of stages decodes for one batch: the number of `on_row` calls of `sample_chain`."""
    rows, known = 0, num_known_slices
    for config in configs:
        if config.stage == "first_slice":
            num, known = 1, 1
        elif config.num_given_bits:
            num = config.num_slices
        else:
            num = config.num_slices - known
        rows += num * config.slice_size
    return rows


def sample_chain(
    models: Mapping[str, SPN],
    *,
    seed: int,
    images: Sequence[int | str],
    temperature: Mapping[str, float] | None = None,
    top_p: Mapping[str, float | None] | None = None,
    slices: Tensor | None = None,
    rows: Tensor | None = None,
    image: Tensor | None = None,
    precision: str = "float32",
    decoder: str = "auto",
    decoders: dict[Any, Decode] | None = None,
    coder: Any = None,
    on_row: Callable[[], None] | None = None,
) -> dict[str, Tensor]:
    """Sample images through all stages in order: {stage: what is known after it}.

    first_slice gives [B, 3, h, w] of d1 bits, size_upscale (or baseline) [B, 3, H, W] of d1 bits, each depth_upscale
    the image at its depth. models are in the order of generation; images are what seeds each image's draws. A chain may
    start later, from values that are kept: `slices` [B, k, 3, h, w] or `rows` [B, 3, k, W] for a size_upscale or
    baseline that comes first (see `sample_stage`, also for precision, decoder, decoders and coder), `image`
    [B, 3, H, W] for a depth_upscale that comes first. Raises ValueError for what the chain does not take.
    """
    first = next(iter(models.values())).config
    takes = "image" if first.num_given_bits else {"size_upscale": "slices", "baseline": "rows"}.get(first.stage)
    for name, value in (("slices", slices), ("rows", rows), ("image", image)):
        if value is not None and name != takes:
            raise ValueError(f"{name} is given, but a chain that begins with {first.stage} takes {takes or 'none'}")
    for name in {**(temperature or {}), **(top_p or {})}:
        if name not in models:
            raise ValueError(f"temperature or top_p is given for {name}; the chain has {', '.join(models)}")
    known: dict[str, Tensor] = {}
    for stage, model in models.items():
        config = model.config
        device = next(model.parameters()).device
        drawn = sample_stage(
            model,
            uniforms(seed, stage=stage, images=images, image_size=config.image_size).to(device),
            given=image if config.num_given_bits else None,
            slices=slices if config.stage == "size_upscale" else None,
            rows=rows if config.stage == "baseline" else None,
            temperature=(temperature or {}).get(stage, 1.0),
            top_p=(top_p or {}).get(stage),
            precision=precision,
            decoder=decoder,
            decoders=decoders,
            coder=coder,
            on_row=on_row,
        )
        if config.stage == "first_slice":
            slices = drawn[:, None]
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
