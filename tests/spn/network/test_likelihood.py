"""Exact likelihoods: the probabilities of *all* images sum to 1 within 1e-9, in float64.

Every stage, every slice given the others, depth by depth and the whole chain, in both recipes. A network that peeks
hands out more or less than 1 in all: each deliberate mistake that a case can show is shown to break its sum.

    python -m pytest tests/spn/network/test_likelihood.py
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from spn.bitdepth import join_depth
from spn.model import SPN, nll_nats
from tests.spn.whole_images import all_images, logits_of, target_of

SUM_TO_ONE = 1e-9
BROKEN = 1e-4  # a sum further from 1 than this is noticed beyond doubt

# Which mistakes a sum of probabilities is shown to notice: one for each stage and recipe. test_causality.py has all.
RECIPES = {
    "paper": {},
    "modern": {part: dict(recipe="modern", num_memory_rows=10) for part in ("decoder", "embedder")},
}


@torch.no_grad()
def log_probability(model: SPN, image: Tensor, slices: range, given: Tensor | None = None) -> Tensor:
    """[B] log-probability in nats of these slices of each image, each given the slices before it."""
    total = torch.zeros(len(image), dtype=torch.float64)
    for s in slices:
        index = torch.full((len(image),), s)
        total -= nll_nats(logits_of(model, image, index, given), target_of(model, image, index))
    return total


def total_probability(model: SPN, image: Tensor, slices: range, given: Tensor | None = None) -> float:
    return log_probability(model, image, slices, given).exp().sum().item()


# ---- all images of a stage ----------------------------------------------------------------------------------------


FACTORS = {"baseline": 1, "size_upscale": 2}  # 2: four slices of one pixel, each given the ones before


def stage_network(tiny_spn, stage: str, seed: int, recipe: str) -> SPN:
    return tiny_spn(stage, seed=seed, image_size=2, scaling_factor=FACTORS[stage], num_bits=1, **RECIPES[recipe])


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("stage", FACTORS)
def test_all_images_of_a_stage_sum_to_one(stage, seed, recipe, tiny_spn):
    """4,096 images of 2x2x3 at 1 bit; and not all alike, which a dead network would also sum to 1."""
    model = stage_network(tiny_spn, stage, seed, recipe)
    log_p = log_probability(model, all_images(1, 2, 2), range(model.config.num_slices))
    assert len(log_p) == 4096
    assert abs(log_p.exp().sum().item() - 1) < SUM_TO_ONE
    assert log_p.std() > 0.5


@pytest.mark.parametrize(
    ("stage", "recipe", "mistake"),
    [
        ("baseline", "paper", "up_not_masked"),
        ("baseline", "modern", "norms_not_grouped"),
        ("size_upscale", "paper", "embedder_reads_later_slice"),
        ("size_upscale", "modern", "embedder_reads_target"),
    ],
)
def test_a_broken_stage_does_not_sum_to_one(stage, recipe, mistake, tiny_spn, break_mask):
    model = break_mask(mistake, stage_network(tiny_spn, stage, 0, recipe))
    assert abs(total_probability(model, all_images(1, 2, 2), range(model.config.num_slices)) - 1) > BROKEN


# ---- each slice given the others ----------------------------------------------------------------------------------


def images_of_one_slice(target: int, others: Tensor) -> Tensor:
    """[4096, 3, 4, 4]: one 4x4 image at 1 bit with every possible slice `target` (S = 2)."""
    image = others.repeat(4096, 1, 1, 1)
    i, j = divmod(target, 2)
    image[:, :, i::2, j::2] = all_images(1, 2, 2)
    return image


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    ("stage", "target"),  # a decoder alone does not know which slice it is given: one is enough
    [("first_slice", 0), *((stage, s) for stage in ("size_upscale", "depth_upscale") for s in range(4))],
)
def test_all_slices_sum_to_one_given_the_others(stage, target, recipe, tiny_spn, random_values):
    """4x4 images, S = 2: the 4,096 contents of one slice, given the other slices and the high bits."""
    model = tiny_spn(stage, seed=0, image_size=4, scaling_factor=2, num_bits=1, **RECIPES[recipe])
    image = images_of_one_slice(target, random_values(0, 1, 3, 4, 4))
    given = random_values(7, 1, 3, 4, 4).expand(4096, -1, -1, -1) if stage == "depth_upscale" else None
    log_p = log_probability(model, image, range(target, target + 1), given)
    assert abs(log_p.exp().sum().item() - 1) < SUM_TO_ONE
    assert log_p.std() > 0.5


@pytest.mark.parametrize(
    ("recipe", "mistake"),
    [("paper", "attention_not_causal"), ("modern", "stem_reads_current_pixel")],
)
def test_a_broken_slice_does_not_sum_to_one(recipe, mistake, tiny_spn, break_mask, random_values):
    target = 2  # the slice that `embedder_reads_target` spoils
    model = tiny_spn("size_upscale", seed=0, image_size=4, scaling_factor=2, num_bits=1, **RECIPES[recipe])
    break_mask(mistake, model)
    image = images_of_one_slice(target, random_values(0, 1, 3, 4, 4))
    assert abs(total_probability(model, image, range(target, target + 1)) - 1) > BROKEN


# ---- depth by depth -----------------------------------------------------------------------------------------------


def depth_chain(tiny_spn, seed: int) -> list[SPN]:
    """1 -> 2 -> 3 bits with S = 1: each network adds a bit to what the ones before made."""
    sizes = dict(image_size=1, scaling_factor=1, num_bits=1)
    return [
        tiny_spn("baseline", seed=3 * seed, **sizes),
        tiny_spn("depth_upscale_2", seed=3 * seed + 1, num_given_bits=1, **sizes),
        tiny_spn("depth_upscale_3", seed=3 * seed + 2, num_given_bits=2, **sizes),
    ]


def depth_chain_sums(models: list[SPN]) -> tuple[float, float]:
    """(sum of all images' probabilities, largest deviation from 1 of the sums of one image's further bits)."""
    bit = all_images(1, 1, 1)
    image, log_p, worst = bit[:1].clone(), torch.zeros(1, dtype=torch.float64), 0.0
    for model in models:
        # Every image so far with every choice of its next bit.
        low, given = bit.repeat(len(image), 1, 1, 1), image.repeat_interleave(len(bit), 0)
        step = log_probability(model, low, range(1), given if model.config.num_given_bits else None)
        worst = max(worst, (step.view(-1, len(bit)).exp().sum(1) - 1).abs().max().item())
        log_p = log_p.repeat_interleave(len(bit)) + step
        image = join_depth(given, low, num_bits=1)
    assert len(image.flatten(1).unique(dim=0)) == len(image) == 2 ** (3 * len(models))
    return log_p.exp().sum().item(), worst


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_chain_of_depths_sums_to_one(seed, tiny_spn):
    """All 512 images of 1x1x3 at 3 bits: 1 -> 2 -> 3, each bit given all bits above it."""
    total, worst = depth_chain_sums(depth_chain(tiny_spn, seed))
    assert abs(total - 1) < SUM_TO_ONE and worst < SUM_TO_ONE


@pytest.mark.parametrize("stage", range(3))
def test_a_broken_chain_of_depths_does_not_sum_to_one(stage, tiny_spn, break_mask):
    """A mistake in any one of the three networks."""
    models = depth_chain(tiny_spn, 0)
    break_mask("down_not_masked", models[stage])
    _, worst = depth_chain_sums(models)
    assert worst > BROKEN


# ---- the whole chain ----------------------------------------------------------------------------------------------


def full_chain(tiny_spn, seed: int, recipe: str = "paper") -> tuple[SPN, SPN, SPN]:
    """First slice, size upscaling at 1 bit, depth upscaling to 2 bits; 2x2 images, S = 2."""
    sizes = dict(image_size=2, scaling_factor=2, num_bits=1, **RECIPES[recipe])
    stages = ("first_slice", "size_upscale", "depth_upscale")
    first, size, depth = (tiny_spn(stage, seed=10 * seed + n, **sizes) for n, stage in enumerate(stages))
    return first, size, depth


def low_images_sum(first: SPN, size: SPN) -> float:
    """All 4,096 low-depth images: slice (0, 0) by the first-slice network, the three others by size upscaling."""
    image = all_images(1, 2, 2)
    return (log_probability(first, image, range(1)) + log_probability(size, image, range(1, 4))).exp().sum().item()


def depth_completion_sums(depth: SPN, given: Tensor) -> Tensor:
    """[n] sum over the 4,096 completions of each low-depth image given [n, 3, 2, 2]."""
    low = all_images(1, 2, 2)
    return torch.tensor([total_probability(depth, low, range(4), g.expand_as(low)) for g in given])


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_low_depth_part_of_the_chain_sums_to_one(seed, recipe, tiny_spn):
    first, size, _ = full_chain(tiny_spn, seed, recipe)
    assert abs(low_images_sum(first, size) - 1) < SUM_TO_ONE


@pytest.mark.parametrize(
    ("seed", "recipe", "chosen"),
    [(0, "paper", range(0, 16, 4)), (1, "paper", range(2, 16, 4)), (2, "modern", range(1, 16, 8))],
)
def test_the_depth_part_of_the_chain_sums_to_one(seed, recipe, chosen, tiny_spn):
    """All 4,096 completions of low-depth images spread over the 4,096 there are, four with each network of the paper
    and two with a modern one: with the part above, the probabilities of all 16,777,216 images of the chain sum to 1."""
    _, _, depth = full_chain(tiny_spn, seed, recipe)
    given = all_images(1, 2, 2)[[4095 * n // 15 for n in chosen]]
    sums = depth_completion_sums(depth, given)
    assert (sums - 1).abs().max() < SUM_TO_ONE


@pytest.mark.parametrize("mistake", ["gate_halves_not_grouped", "embedder_reads_target"])
def test_a_broken_chain_does_not_sum_to_one(mistake, tiny_spn, break_mask):
    """The mistake in each of the chain's networks in turn."""
    first, size, depth = full_chain(tiny_spn, 0)
    assert abs(low_images_sum(first, break_mask(mistake, size)) - 1) > BROKEN
    assert abs(depth_completion_sums(break_mask(mistake, depth), all_images(1, 2, 2)[2730:2731]).item() - 1) > BROKEN
    if mistake != "embedder_reads_target":
        first, size, _ = full_chain(tiny_spn, 0)
        assert abs(low_images_sum(break_mask(mistake, first), size) - 1) > BROKEN
