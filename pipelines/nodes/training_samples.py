"""Samples of a network while it trains: a grid at some of its validations, under one key, for the slider in MLflow.

One stage alone: what upscaling is given comes from validation images, not from stages that may not be trained yet.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from pipelines.nodes.pictures import display, grid, side_by_side
from spn.bitdepth import join_depth, stage_values
from spn.model import SPN
from spn.ordering import image_to_slices
from spn.sampling import sample_stage, uniforms


@dataclass(frozen=True)
class TrainingSamples:
    """When and what to draw. Picklable; training does not depend on it."""

    every_steps: int
    num_images: int
    first_given: bool  # a first_slice stage draws slice (0, 0): size_upscale is given it
    seed: int

    def due(self, step: int, *, eval_every_steps: int, num_steps: int) -> bool:
        """At the first validation at or after each multiple of every_steps, and at the last one."""
        before = step - 1 - (step - 1) % eval_every_steps  # the step of the validation before
        return step == num_steps or step // self.every_steps > before // self.every_steps

    def picture(self, model: SPN, image: Tensor, *, stored_bits: int, precision: str) -> np.ndarray:
        """Images [N, 3, H, W] of stored_bits bits, on the network's device -> uint8 [h, w, 3].

        A row for each image: what the network is given, what it draws, the image itself; a square of what it draws
        where it is given nothing. Always from the same random numbers. Torch's own random state is left alone.
        """
        config = model.config
        values, given = stage_values(
            image, stored_bits=stored_bits, given_bits=config.num_given_bits, num_bits=config.num_bits
        )
        uniform = uniforms(self.seed, stage=config.stage, images=range(len(image)), image_size=config.image_size)
        first = None
        if config.stage == "size_upscale" and self.first_given:
            first = image_to_slices(values, config.scaling_factor)[:, :1]
        drawn = sample_stage(model, uniform.to(image.device), given=given, slices=first, precision=precision)
        if given is not None:
            columns = [_shown(given, config.num_given_bits)]
            drawn, values = (join_depth(given, low, num_bits=config.num_bits) for low in (drawn, values))
        elif first is not None:
            columns = [_shown(first[:, 0], config.num_bits)]
        else:
            return grid(_shown(drawn, config.num_bits))
        depth = config.num_given_bits + config.num_bits
        return side_by_side([*columns, _shown(drawn, depth), _shown(values, depth)])


def _shown(values: Tensor, num_bits: int) -> np.ndarray:
    """[N, 3, h, w] values of num_bits bits -> uint8 [N, h, w, 3]."""
    return display(values.permute(0, 2, 3, 1).cpu().numpy(), num_bits=num_bits)
