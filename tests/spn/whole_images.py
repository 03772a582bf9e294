"""A network's functions on whole images, which they are given in slices."""

from __future__ import annotations

from torch import Tensor

from spn.model import SPN
from spn.ordering import image_to_slices, target_slices


def _slices(model: SPN, image: Tensor | None) -> Tensor | None:
    return None if image is None else image_to_slices(image, model.config.scaling_factor)


def logits_of(model: SPN, image: Tensor, index: Tensor, given: Tensor | None = None) -> Tensor:
    return model(_slices(model, image), index, _slices(model, given))


def context_of(model: SPN, image: Tensor, index: Tensor, given: Tensor | None) -> Tensor | None:
    return model.context(_slices(model, image), index, _slices(model, given))


def target_of(model: SPN, image: Tensor, index: Tensor) -> Tensor:
    return target_slices(_slices(model, image), index)
