"""Causality and coverage: each logit reads exactly the values generated before its own, none later and all earlier.

Every value is perturbed alone, in float64, and every logit of every slice is watched: a matrix of influences. It must
be zero for values that come at or after a logit's own (no peeking) and not zero for all that come before (no blind
spot). The order is written out here, without the code under test. Deliberate mistakes must make the same check fail.

    python -m pytest tests/spn/network/test_causality.py
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from spn.bitdepth import stage_values
from spn.model import SPN
from tests.spn.whole_images import logits_of

LEAK = 1e-11  # above: one value reads another; rounding stays far below
SEEN = 1e-8  # below: one value does not read another

Coordinate = tuple[int, int, int]  # row, column, colour


def generation_order(image_size: int, scaling_factor: int) -> list[Coordinate]:
    """Slices by offset (i, j), within a slice by row and column, within a pixel R, G, B (equation 2)."""
    offsets, steps = range(scaling_factor), range(image_size // scaling_factor)
    return [
        (i + scaling_factor * h, j + scaling_factor * w, colour)
        for i, j, h, w, colour in itertools.product(offsets, offsets, steps, steps, range(3))
    ]


def logits_in_order(model: SPN, image: Tensor, given: Tensor | None) -> Tensor:
    """[B, N, V]: the logits of every value of the image in generation order, slice by slice."""
    parts = []
    for s in range(model.config.num_slices):
        logits = logits_of(model, image, torch.full((len(image),), s), given)  # [B, 3, V, h, w]
        parts.append(logits.permute(0, 3, 4, 1, 2).flatten(1, 3))
    return torch.cat(parts, dim=1)


def perturbed(image: Tensor, order: list[Coordinate], num_values: int, generator: torch.Generator) -> Tensor:
    """[N, 3, H, W]: image [3, H, W] with one value changed, to any other one, in generation order."""
    images = image.repeat(len(order), 1, 1, 1)
    for n, (row, column, colour) in enumerate(order):
        shift = torch.randint(1, num_values, (), generator=generator)
        images[n, colour, row, column] = (images[n, colour, row, column] + shift) % num_values
    return images


@torch.no_grad()
def influence(model: SPN, seed: int, *, of_given: bool = False) -> Tensor:
    """[N, N]: how much a change of value k (of the image, or of the given high bits) moves the logits of value t."""
    config, generator = model.config, torch.Generator().manual_seed(seed)
    shape, order = (3, config.image_size, config.image_size), generation_order(config.image_size, config.scaling_factor)
    image = torch.randint(config.num_values, shape, generator=generator)
    num_given = 2**config.num_given_bits
    given = torch.randint(num_given, shape, generator=generator) if config.num_given_bits else None
    before = logits_in_order(model, image[None], None if given is None else given[None])
    if of_given:
        image, given = image.expand(len(order), *shape), perturbed(given, order, num_given, generator)
    else:
        given = None if given is None else given.expand(len(order), *shape)
        image = perturbed(image, order, config.num_values, generator)
    return (logits_in_order(model, image, given) - before).abs().amax(2)


def leaks(matrix: Tensor) -> bool:
    """True when a value, or one generated after it, moves its logits."""
    return bool((matrix.tril() > LEAK).any())


def has_blind_spot(matrix: Tensor) -> bool:
    """True when some earlier value does not move a later value's logits."""
    earlier = torch.ones_like(matrix, dtype=torch.bool).triu(1)
    return bool((matrix[earlier] < SEEN).any())


def slice_blocks(matrix: Tensor, num_slices: int) -> list[Tensor]:
    """A slice's influence on itself, for each slice."""
    size = len(matrix) // num_slices
    return [matrix[s * size : (s + 1) * size, s * size : (s + 1) * size] for s in range(num_slices)]


MODERN = {part: dict(recipe="modern", num_memory_rows=12) for part in ("decoder", "embedder")}
CASES = {
    "baseline": ("baseline", dict(image_size=5, scaling_factor=1, num_bits=2)),
    "first_slice": ("first_slice", dict(image_size=8, scaling_factor=2, num_bits=2)),
    "size_upscale, S=1": ("size_upscale", dict(image_size=4, scaling_factor=1, num_bits=2)),
    "size_upscale, S=2": ("size_upscale", dict(image_size=8, scaling_factor=2, num_bits=2)),
    "size_upscale, S=4": ("size_upscale", dict(image_size=8, scaling_factor=4, num_bits=2)),
    "depth_upscale, S=1": ("depth_upscale", dict(image_size=4, scaling_factor=1, num_bits=2, num_given_bits=1)),
    "depth_upscale, S=2": ("depth_upscale", dict(image_size=6, scaling_factor=2, num_bits=1, num_given_bits=2)),
    "depth_upscale, S=4": ("depth_upscale", dict(image_size=8, scaling_factor=4, num_bits=2, num_given_bits=2)),
    # 9 rows and columns: more than the stem of recipe modern sees
    "modern baseline": ("baseline", dict(image_size=9, scaling_factor=1, num_bits=2, **MODERN)),
    "modern size_upscale": ("size_upscale", dict(image_size=8, scaling_factor=2, num_bits=2, **MODERN)),
    "depth_upscale, modern": (
        "depth_upscale",
        dict(image_size=8, scaling_factor=2, num_bits=2, num_given_bits=2, **MODERN),
    ),
}


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("case", CASES)
def test_each_value_reads_all_earlier_values_and_no_later_one(case, seed, tiny_spn):
    """Every pair of values of the image, across slices, within a slice and within a pixel; the first pixel included."""
    stage, sizes = CASES[case]
    matrix = influence(tiny_spn(stage, seed=seed, **sizes), seed)
    if stage == "first_slice":  # a decoder alone: each slice by itself, nothing of the others
        blocks = slice_blocks(matrix, 4)
        assert not any(leaks(block) or has_blind_spot(block) for block in blocks)
        for block in blocks:
            block.zero_()  # a view: what is left is between slices
        assert matrix.max() < LEAK
    else:
        assert not leaks(matrix)
        assert not has_blind_spot(matrix)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("case", [c for c in CASES if c.startswith("depth")])
def test_every_given_high_bit_is_read_by_every_value(case, seed, tiny_spn):
    """Depth upscaling conditions on the whole low-depth image, whatever comes later in the order."""
    stage, sizes = CASES[case]
    matrix = influence(tiny_spn(stage, seed=seed, **sizes), seed, of_given=True)
    assert matrix.min() > SEEN


@pytest.mark.parametrize("seed", [0, 1])
def test_causality_of_the_chain_across_bit_depths(seed, tiny_spn, random_values):
    """Three stages of a 1 -> 2 -> 4 bit chain on one image: every bit group reads all before it in the order
    (depth, slice, pixel, colour), and none after. The stages get their values as training and evaluation do."""
    sizes = dict(image_size=4, scaling_factor=2)
    models = [
        tiny_spn("size_upscale", seed=3 * seed, num_bits=1, **sizes),
        tiny_spn("depth_upscale_2", seed=3 * seed + 1, num_bits=1, num_given_bits=1, **sizes),
        tiny_spn("depth_upscale_4", seed=3 * seed + 2, num_bits=2, num_given_bits=2, **sizes),
    ]
    order = generation_order(4, 2)

    def chain_logits(images: Tensor) -> list[Tensor]:
        parts = []
        for model in models:
            given_bits, num_bits = model.config.num_given_bits, model.config.num_bits
            values, given = stage_values(images, stored_bits=4, given_bits=given_bits, num_bits=num_bits)
            parts.append(logits_in_order(model, values, given))
        return parts

    image = random_values(seed, 4, 3, 4, 4)
    images = []
    for flip in (0b1000, 0b0100, 0b0011):  # the bits that each stage generates
        for row, column, colour in order:
            images.append(image.clone())
            images[-1][colour, row, column] ^= flip
    with torch.no_grad():
        before, after = chain_logits(image[None]), chain_logits(torch.stack(images))
    matrix = torch.cat([(a - b).abs().amax(2) for a, b in zip(after, before, strict=True)], dim=1)
    assert matrix.shape == (3 * len(order), 3 * len(order))
    assert not leaks(matrix)
    assert not has_blind_spot(matrix)


# ---- the checks themselves ----------------------------------------------------------------------------------------

DECODER_MISTAKES = [
    "mask_b_on_first_layer",
    "gate_halves_not_grouped",
    "down_not_masked",
    "up_not_masked",
    "head_not_masked",
    "left_reads_current_pixel",
    "vertical_reads_own_row",
    "attention_not_shifted",
    "attention_not_causal",
]
MODERN_MISTAKES = ["stem_reads_current_pixel", "norms_not_grouped"]
EMBEDDER_MISTAKES = ["embedder_reads_later_slice", "embedder_reads_target"]


@pytest.mark.parametrize(
    ("case", "mistake"),
    [
        *(("depth_upscale, S=2", mistake) for mistake in DECODER_MISTAKES),
        *(("depth_upscale, modern", mistake) for mistake in DECODER_MISTAKES + MODERN_MISTAKES),
        ("baseline", "attention_not_causal"),
        ("first_slice", "vertical_reads_own_row"),
        ("size_upscale, S=2", "head_not_masked"),
    ],
)
def test_a_broken_mask_of_the_decoder_is_noticed(case, mistake, tiny_spn, break_mask):
    """Each mask of either recipe, broken alone, fails the check of causality; the same decoder serves every stage."""
    stage, sizes = CASES[case]
    sizes = sizes | dict(image_size=3 * sizes["scaling_factor"])
    model = break_mask(mistake, tiny_spn(stage, seed=0, **sizes))
    blocks = slice_blocks(influence(model, seed=0), model.config.num_slices)
    assert all(leaks(block) for block in blocks)


@pytest.mark.parametrize("mistake", EMBEDDER_MISTAKES)
@pytest.mark.parametrize(
    "case", ["size_upscale, S=2", "size_upscale, S=4", "depth_upscale, S=2", "modern size_upscale"]
)
def test_an_embedder_that_reads_too_far_is_noticed(case, mistake, tiny_spn, break_mask):
    stage, sizes = CASES[case]
    model = break_mask(mistake, tiny_spn(stage, seed=0, **sizes))
    assert leaks(influence(model, seed=0))


def test_a_blind_spot_is_noticed(tiny_spn):
    """A decoder without attention layers does not see the far upper right; an embedder without one slot not that slice.

    The PixelCNN's vertical part reads the layer's own stream, one column to each side for each row up: a cone. (One
    pixel more arrives from the shifted input.) The masked attention is what covers the whole slice.
    """
    decoder = dict(num_attn_layers=0, num_layers=8)
    model = tiny_spn("baseline", seed=0, image_size=5, scaling_factor=1, num_bits=2, decoder=decoder)
    matrix = influence(model, seed=0)
    assert not leaks(matrix)
    assert has_blind_spot(matrix)
    upper_right = generation_order(5, 1).index((0, 3, 0))
    second_row = generation_order(5, 1).index((1, 1, 0))
    assert matrix[upper_right, second_row] < SEEN

    model = tiny_spn("size_upscale", seed=0, image_size=4, scaling_factor=2, num_bits=2)
    model.embedder.sources[3, 1] = 4  # the last slice does not get the one directly above
    matrix = influence(model, seed=0)
    assert not leaks(matrix)
    assert has_blind_spot(matrix)
