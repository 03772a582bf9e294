"""Pictures of samples: what a stage knew is read off the final image, and the animation shows the order of generation.

python -m pytest tests/pipelines/nodes/test_pictures.py
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable

import numpy as np
import pytest
import torch
from PIL import Image

from pipelines.loading import load
from pipelines.nodes.pictures import (
    MARGIN,
    UNKNOWN,
    TrainingSamples,
    after_stages,
    animation,
    display,
    enlarge,
    generation_frames,
    grid,
    side_by_side,
)
from pipelines.pipeline import nodes
from spn.bitdepth import to_display
from spn.config import SPNConfig
from spn.model import SPN
from spn.sampling import sample_chain


@pytest.fixture
def configs(tiny_config) -> Callable[..., dict[str, SPNConfig]]:
    """configs(*stages) -> a chain at 6 x 6, S = 2, bits [3, 8]."""

    def build(*stages: str) -> dict[str, SPNConfig]:
        depth = {"depth_upscale": {"num_bits": 5, "num_given_bits": 3}}
        return {
            stage: tiny_config(stage, image_size=6, scaling_factor=2, **depth.get(stage, {"num_bits": 3}))
            for stage in stages
        }

    return build


CHAIN = ("first_slice", "size_upscale", "depth_upscale")


def values(num_bits: int, size: int = 6) -> np.ndarray:
    return np.random.default_rng(num_bits).integers(0, 2**num_bits, (size, size, 3), dtype=np.uint8)


def test_what_each_stage_made_is_in_the_final_image(tiny_spn):
    common = dict(image_size=4, scaling_factor=2)
    models = {
        "first_slice": tiny_spn("first_slice", seed=1, num_bits=3, **common),
        "size_upscale": tiny_spn("size_upscale", seed=2, num_bits=3, **common),
        "depth_upscale": tiny_spn("depth_upscale", seed=3, num_bits=4, num_given_bits=3, **common),
    }
    known = sample_chain(models, seed=0, images=range(3))
    final = known["depth_upscale"].permute(0, 2, 3, 1).to(torch.uint8).numpy()
    pictures = after_stages(final, {stage: model.config for stage, model in models.items()})
    assert list(pictures) == list(models)
    for (stage, picture), bits in zip(pictures.items(), (3, 3, 7), strict=True):
        assert np.array_equal(picture, to_display(known[stage], num_bits=bits).permute(0, 2, 3, 1).numpy())


def test_frames_follow_the_subscale_order_then_depth(configs):
    """Replayed step by step: 3 rows in each of 4 slices for the high bits, as many again for the low ones."""
    image, chain = values(8), list(configs(*CHAIN).values())
    frames = generation_frames(image, chain)
    assert len(frames) == 1 + 12 + 12
    expected = np.full((6, 6, 3), UNKNOWN, np.uint8)
    assert np.array_equal(frames[0], expected)
    step = 0
    for picture in (display(image >> 5, num_bits=3), image):
        for i, j in ((0, 0), (0, 1), (1, 0), (1, 1)):
            for row in range(3):
                step += 1
                expected[i + 2 * row, j::2] = picture[i + 2 * row, j::2]
                assert np.array_equal(frames[step], expected), step
    assert np.array_equal(frames[-1], image)


def test_frames_start_from_what_was_given(configs):
    image, given = values(8), np.zeros((6, 6), np.int64)
    given[::2, ::2] = given[::2, 1::2] = 3
    frames = generation_frames(image, list(configs(*CHAIN[1:]).values()), given_bits=given)
    assert len(frames) == 1 + 6 + 12
    known = given > 0
    assert np.array_equal(frames[0][known], display(image >> 5, num_bits=3)[known])
    assert (frames[0][~known] == UNKNOWN).all()
    assert np.array_equal(frames[-1], image)


def test_a_long_generation_is_shown_in_few_frames(tiny_config):
    config = tiny_config("size_upscale", image_size=64, scaling_factor=4, num_bits=5)
    image = values(5, 64)
    frames = generation_frames(image, [config])
    assert 90 <= len(frames) <= 96
    assert np.array_equal(frames[-1], display(image, num_bits=5))


def test_the_animation_holds_every_frame_unchanged(configs):
    frames = generation_frames(values(8), list(configs(*CHAIN).values()))
    with Image.open(io.BytesIO(animation(frames))) as film:
        assert film.n_frames == len(frames)
        for number, frame in enumerate(frames):
            film.seek(number)
            shown = np.asarray(film.convert("RGB"))
            assert np.array_equal(shown, frame.repeat(42, 0).repeat(42, 1))


def test_grids_hold_every_image_once():
    images = np.stack([np.full((4, 4, 3), n, np.uint8) for n in range(5)])
    picture = grid(images)
    assert picture.shape == (2 * 4 + 2, 3 * 4 + 2 * 2, 3)
    assert [int((picture == n).all(-1).sum()) for n in range(5)] == [16] * 5
    rows = side_by_side([images[:, ::2, ::2], images])
    assert rows.shape == (5 * 4 + 4 * 2, 2 * 4 + 2, 3)
    assert [int((rows == n).all(-1).sum()) for n in range(5)] == [32] * 5


# ---- grids of a network in training --------------------------------------------------------------------------------

SIDE, NUM = 8, 3
SAMPLES = TrainingSamples(every_steps=10, num_images=NUM, first_given=True, seed=5)


def cells_of(model: SPN, samples: TrainingSamples = SAMPLES, *, of: int = 0) -> tuple[np.ndarray, np.ndarray]:
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
    cells, image = cells_of(SPN(tiny_config("size_upscale", image_size=SIDE, scaling_factor=2, num_bits=3)))
    real = spread(image >> 5, 3)
    assert cells.shape[:2] == (NUM, 3)
    assert np.array_equal(cells[:, 2], real)
    assert np.array_equal(cells[:, 0], enlarge(real[:, ::2, ::2], 2))
    assert np.array_equal(cells[:, 1, ::2, ::2], real[:, ::2, ::2]), "the given slice stays"
    assert not np.array_equal(cells[:, 1], real)


def test_depth_upscaling_keeps_the_high_bits(tiny_config) -> None:
    config = tiny_config("depth_upscale", image_size=SIDE, scaling_factor=2, num_bits=5, num_given_bits=3)
    cells, image = cells_of(SPN(config))
    assert np.array_equal(cells[:, 0], spread(image >> 5, 3))
    assert np.array_equal(cells[:, 1] >> 5, image >> 5) and not np.array_equal(cells[:, 1], image)
    assert np.array_equal(cells[:, 2], image)


@pytest.mark.parametrize("stage", ["first_slice", "size_upscale", "baseline"])
def test_a_stage_that_is_given_nothing_draws_a_square(stage: str, tiny_config) -> None:
    """The same at every call, whatever images there are."""
    factor = 1 if stage == "baseline" else 2
    model = SPN(tiny_config(stage, image_size=SIDE, scaling_factor=factor, num_bits=3))
    alone = dataclasses.replace(SAMPLES, first_given=False)
    cells, _ = cells_of(model, alone)
    assert cells.shape[:2] == (2, 2) and (cells[1, 1] == 255).all(), "three images and an empty place"
    assert np.array_equal(cells, cells_of(model, alone, of=1)[0])


def test_the_training_goes_on_as_if_nothing_had_been_drawn(tiny_config) -> None:
    model = SPN(tiny_config("size_upscale", image_size=SIDE, scaling_factor=2, num_bits=3))
    weights, state = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    cells_of(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("every", "expected"), [(10, [12, 20, 32, 40, 50]), (4, [*range(4, 50, 4), 50]), (30, [32, 50]), (1000, [50])]
)
def test_grids_come_at_the_next_validation_and_at_the_last(every: int, expected: list[int]) -> None:
    samples = dataclasses.replace(SAMPLES, every_steps=every)
    validations = (*range(4, 50, 4), 50)
    assert [step for step in validations if samples.due(step, eval_every_steps=4, num_steps=50)] == expected


def test_grids_are_drawn_if_asked() -> None:
    plain, drawing = (
        {node.name: node.config for node in nodes(load("debug", settings), listed=False)}
        for settings in ((), ("tracking.sample_every_steps=6", "tracking.num_sample_images=2"))
    )
    assert plain["train_first_slice"].samples is None
    assert drawing["train_size_upscale"].samples == TrainingSamples(6, 2, first_given=True, seed=0)
