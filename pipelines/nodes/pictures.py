"""Samples as people look at them: PNGs, grids, an animation of one image in its order of generation, and grids of a
network while it trains.

N images, H W image, h w slice, S scaling factor. Arrays are uint8 (N, H, W, 3), values of some number of bits until
`display` spreads them over 0 .. 255.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from spn.bitdepth import join_depth, stage_values, to_display
from spn.config import SPNConfig
from spn.model import SPN
from spn.ordering import image_to_slices
from spn.sampling import sample_stage, uniforms

MARGIN = 2  # pixels between images of a grid
UNKNOWN = 128  # gray of what is not generated yet
NUM_FRAMES = 96  # of an animation, at most
FRAME_MS, LAST_FRAME_MS = 60, 2500
ANIMATION_SIDE = 256  # pixels; smaller images are enlarged by repeating pixels


def depth_after(config: SPNConfig) -> int:
    """Bits of the pixels once this stage has run."""
    return config.num_given_bits + config.num_bits


def display(values: np.ndarray, *, num_bits: int) -> np.ndarray:
    """Values of `num_bits` bits spread over 0 .. 255; the same array at 8 bits."""
    return to_display(torch.from_numpy(values), num_bits=num_bits).to(torch.uint8).numpy()


def after_stages(values: np.ndarray, configs: Mapping[str, SPNConfig]) -> dict[str, np.ndarray]:
    """{stage: pictures of what was known after it} from whole images of the last stage's depth.

    Nothing else has to be kept of a chain: each stage's outcome is what the final image holds in its high bits.
    """
    final = depth_after(list(configs.values())[-1])
    pictures = {}
    for stage, config in configs.items():
        known = values >> (final - depth_after(config))
        step = config.scaling_factor if config.stage == "first_slice" else 1
        pictures[stage] = display(known[:, ::step, ::step].copy(), num_bits=depth_after(config))
    return pictures


def grid(images: np.ndarray, *, columns: int | None = None) -> np.ndarray:
    """uint8 [N, h, w, 3] -> one picture with a white margin between images, row after row; columns None: a square."""
    num, height, width, _ = images.shape
    columns = columns or max(1, round(num**0.5 + 0.49))
    rows = -(-num // columns)
    canvas = np.full((rows * (height + MARGIN) - MARGIN, columns * (width + MARGIN) - MARGIN, 3), 255, np.uint8)
    for i, image in enumerate(images):
        top, left = (i // columns) * (height + MARGIN), (i % columns) * (width + MARGIN)
        canvas[top : top + height, left : left + width] = image
    return canvas


def side_by_side(columns: Sequence[np.ndarray]) -> np.ndarray:
    """One row per image, one column per array; smaller ones are enlarged by repeating pixels."""
    side = max(images.shape[1] for images in columns)
    ordered = np.stack([enlarge(images, side // images.shape[1]) for images in columns], axis=1)
    return grid(ordered.reshape(-1, side, side, 3), columns=len(columns))


def enlarge(images: np.ndarray, factor: int) -> np.ndarray:
    """[N, h, w, 3] -> [N, factor h, factor w, 3] by repeating pixels."""
    return images.repeat(factor, 1).repeat(factor, 2)


def generation_frames(
    image: np.ndarray, configs: Sequence[SPNConfig], *, given_bits: np.ndarray | None = None
) -> list[np.ndarray]:
    """Frames [H, W, 3] of one image [H, W, 3] being generated: slices in subscale order, row by row, then depth.

    configs: the stages that were run, in order; the image has the last one's depth. given_bits [H, W]: how many bits of
    each pixel were given; None: none were. The first frame is what was given, the last the whole image.
    """
    final, size = depth_after(configs[-1]), image.shape[0]
    start = np.zeros((size, size), np.int64) if given_bits is None else given_bits.astype(np.int64)
    steps, bits = [], start.copy()  # steps: (depth, row of the image, columns of it) of each row of each slice
    for config in configs:
        factor, depth = config.scaling_factor, depth_after(config)
        for number in range(1 if config.stage == "first_slice" else config.num_slices):
            i, j = divmod(number, factor)
            for row in range(i, size, factor):
                here = bits[row, j::factor]  # a view
                if (here < depth).any():  # else it was given, or an earlier stage's
                    np.maximum(here, depth, out=here)
                    steps.append((depth, row, slice(j, None, factor)))
    shown = set(np.linspace(0, len(steps), min(NUM_FRAMES, len(steps) + 1)).round().astype(int).tolist())
    frames, bits = [_frame(image, start, final)], start
    for done, (depth, row, columns) in enumerate(steps, start=1):
        bits[row, columns] = np.maximum(bits[row, columns], depth)
        if done in shown:
            frames.append(_frame(image, bits, final))
    return frames


def _frame(image: np.ndarray, bits: np.ndarray, final: int) -> np.ndarray:
    """The image as far as the first `bits` [H, W] bits of its pixels are known."""
    frame = np.full(image.shape, UNKNOWN, np.uint8)
    for depth in np.unique(bits):
        if depth:
            here = bits == depth
            frame[here] = display(image[here] >> (final - int(depth)), num_bits=int(depth))
    return frame


def animation(frames: Sequence[np.ndarray]) -> bytes:
    """Lossless animated WebP that loops and rests on its last frame."""
    factor = max(1, ANIMATION_SIDE // frames[0].shape[0])
    pictures = [Image.fromarray(enlarged) for enlarged in enlarge(np.stack(frames), factor)]
    buffer = io.BytesIO()
    durations = [FRAME_MS] * (len(pictures) - 1) + [LAST_FRAME_MS]
    pictures[0].save(
        buffer, format="WEBP", save_all=True, append_images=pictures[1:], duration=durations, loop=0, lossless=True
    )
    return buffer.getvalue()


def png(image: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, format="PNG")
    return buffer.getvalue()


# ---- while a network trains ----------------------------------------------------------------------------------------


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

        One stage alone: what upscaling is given comes from validation images, not from stages that may not be trained
        yet. One row per image: what the network is given, what it draws, the image itself; where it is given nothing, a
        square of what it draws. Always from the same random numbers; torch's random state stays as it is.
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
        depth = depth_after(config)
        return side_by_side([*columns, _shown(drawn, depth), _shown(values, depth)])


def _shown(values: Tensor, num_bits: int) -> np.ndarray:
    """[N, 3, h, w] values of num_bits bits -> uint8 [N, h, w, 3]."""
    return display(values.permute(0, 2, 3, 1).cpu().numpy(), num_bits=num_bits)
