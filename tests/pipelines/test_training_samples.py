"""Grids of a network in training: when they are drawn, and what they hold.

python -m pytest tests/pipelines/test_training_samples.py
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from pipelines.loading import load
from pipelines.nodes.pictures import MARGIN, enlarge
from pipelines.nodes.training_samples import TrainingSamples
from pipelines.pipeline import nodes
from spn.model import SPN

SIDE, NUM = 8, 3
SAMPLES = TrainingSamples(every_steps=10, num_images=NUM, first_given=True, seed=5)


def pictures(model: SPN, samples: TrainingSamples = SAMPLES, *, of: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """The grid's cells [rows, columns, side, side, 3], and the 8-bit images [N, H, W, 3] it was made for."""
    image = torch.randint(256, (NUM, 3, SIDE, SIDE), generator=torch.Generator().manual_seed(of))
    grid = samples.picture(model.eval(), image, stored_bits=8, precision="float32")
    side = model.config.slice_size if model.config.stage == "first_slice" else SIDE
    rows, columns = ((length + MARGIN) // (side + MARGIN) for length in grid.shape[:2])
    cells = [
        [grid[r * (side + MARGIN) :, c * (side + MARGIN) :][:side, :side] for c in range(columns)] for r in range(rows)
    ]
    return np.array(cells), image.permute(0, 2, 3, 1).numpy()


def spread(values: np.ndarray, num_bits: int) -> np.ndarray:
    return (values * 255 // (2**num_bits - 1)).astype(np.uint8)


def test_size_upscaling_shows_its_slice_its_drawing_and_the_image(tiny_config) -> None:
    cells, image = pictures(SPN(tiny_config("size_upscale", image_size=SIDE, scaling_factor=2, num_bits=3)))
    real = spread(image >> 5, 3)
    assert cells.shape[:2] == (NUM, 3)
    assert np.array_equal(cells[:, 2], real)
    assert np.array_equal(cells[:, 0], enlarge(real[:, ::2, ::2], 2))
    assert np.array_equal(cells[:, 1, ::2, ::2], real[:, ::2, ::2]), "the given slice stays"
    assert not np.array_equal(cells[:, 1], real)


def test_depth_upscaling_keeps_the_high_bits(tiny_config) -> None:
    config = tiny_config("depth_upscale", image_size=SIDE, scaling_factor=2, num_bits=5, num_given_bits=3)
    cells, image = pictures(SPN(config))
    assert np.array_equal(cells[:, 0], spread(image >> 5, 3))
    assert np.array_equal(cells[:, 1] >> 5, image >> 5) and not np.array_equal(cells[:, 1], image)
    assert np.array_equal(cells[:, 2], image)


@pytest.mark.parametrize("stage", ["first_slice", "size_upscale", "baseline"])
def test_a_stage_that_is_given_nothing_draws_a_square(stage: str, tiny_config) -> None:
    """The same at every call, whatever images there are."""
    factor = 1 if stage == "baseline" else 2
    model = SPN(tiny_config(stage, image_size=SIDE, scaling_factor=factor, num_bits=3))
    alone = dataclasses.replace(SAMPLES, first_given=False)
    cells, _ = pictures(model, alone)
    assert cells.shape[:2] == (2, 2) and (cells[1, 1] == 255).all(), "three images and an empty place"
    assert np.array_equal(cells, pictures(model, alone, of=1)[0])


def test_the_training_goes_on_as_if_nothing_had_been_drawn(tiny_config) -> None:
    model = SPN(tiny_config("size_upscale", image_size=SIDE, scaling_factor=2, num_bits=3))
    weights, state = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    pictures(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("every", "expected"), [(10, [12, 20, 32, 40, 50]), (4, [*range(4, 50, 4), 50]), (30, [32, 50]), (1000, [50])]
)
def test_grids_come_at_the_next_validation_and_at_the_last(every: int, expected: list[int]) -> None:
    samples = dataclasses.replace(SAMPLES, every_steps=every)
    validations = (*range(4, 50, 4), 50)
    assert [step for step in validations if samples.due(step, eval_every_steps=4, num_steps=50)] == expected


def test_drawing_is_no_reason_to_train_again() -> None:
    plain, drawing = (
        {node.name: node for node in nodes(load("debug", settings))}
        for settings in ((), ("tracking.sample_every_steps=6", "tracking.num_sample_images=2"))
    )
    assert {name: node.config for name, node in plain.items()} == {name: node.config for name, node in drawing.items()}
    assert plain["train_first_slice"].options["samples"] is None
    assert drawing["train_size_upscale"].options["samples"] == TrainingSamples(6, 2, first_given=True, seed=0)
