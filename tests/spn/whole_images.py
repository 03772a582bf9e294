"""A network's functions on whole images, which they are given in slices; and every image of a tiny size."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

from spn.decoding.incremental import Draws, decode_slice, prepare
from spn.model import SPN
from spn.ordering import image_to_slices, target_slices


def all_images(num_bits: int, height: int, width: int) -> Tensor:
    """[V ** dims, 3, H, W]: every image there is. The first value counts ones in an image's number, the next one V."""
    dims = 3 * height * width
    number = torch.arange(2 ** (num_bits * dims))[:, None]
    values = number >> (num_bits * torch.arange(dims)) & (2**num_bits - 1)
    return values.view(-1, 3, height, width)


def _slices(model: SPN, image: Tensor | None) -> Tensor | None:
    return None if image is None else image_to_slices(image, model.config.scaling_factor)


def logits_of(model: SPN, image: Tensor, index: Tensor, given: Tensor | None = None) -> Tensor:
    return model(_slices(model, image), index, _slices(model, given))


def context_of(model: SPN, image: Tensor, index: Tensor, given: Tensor | None) -> Tensor | None:
    return model.context(_slices(model, image), index, _slices(model, given))


def target_of(model: SPN, image: Tensor, index: Tensor) -> Tensor:
    return target_slices(_slices(model, image), index)


def incremental_logits(model: SPN, target: Tensor, context: Tensor | None) -> Tensor:
    """Logits [B, 3, V, h, w] of a given slice, the incremental way; equal to model.decoder(target, context)."""
    seen: list[Tensor] = []
    coder = SimpleNamespace(code=lambda logits, known: (seen.append(logits.double()), known)[1])
    unused = torch.zeros(target.shape, dtype=torch.float64, device=target.device)
    decode_slice(prepare(model), context, Draws(unused, known=target.long(), coder=coder))
    return torch.stack(seen).unflatten(0, (*target.shape[2:], 3)).permute(3, 2, 4, 0, 1)  # of [h, w, 3, B, V]
