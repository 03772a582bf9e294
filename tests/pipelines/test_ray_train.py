"""What a training worker is handed: its share of each batch, target slices, flips, and masks of dropout of its own.

python -m pytest tests/pipelines/test_ray_train.py
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from data_prep.files import UserError
from pipelines.nodes import ray_train
from spn.checkpoint import save_checkpoint
from spn.config import SPNConfig, TrainConfig
from spn.model import SPN
from spn.ordering import image_to_slices
from spn.training import Batch

BATCH, SIDE = 8, 4


class Shard:
    """A worker's part of the stream from `step` on, as Ray Train hands it out: two optimiser steps."""

    def __init__(self, rank: int, num_workers: int, step: int) -> None:
        share = BATCH // num_workers
        steps = range(step, step + 2)
        self.positions = [s * BATCH + rank * share + row for s in steps for row in range(share)]

    def iter_batches(self, *, batch_size: int, **_: Any) -> Iterator[pa.Table]:
        for start in range(0, len(self.positions), batch_size):
            mine = self.positions[start : start + batch_size]
            pixels = [bytes([position]) * (SIDE * SIDE * 3) for position in mine]
            columns = {
                "key": [f"photo-{position % 12}" for position in mine],
                "px": pa.array(pixels, pa.binary(SIDE * SIDE * 3)),
                "epoch": pa.array([position // 12 for position in mine], pa.int32()),
                "position": pa.array(mine, pa.int64()),
            }
            yield pa.table(columns)


@pytest.fixture
def handed_out(monkeypatch: pytest.MonkeyPatch, tiny_config: Callable[..., Any]) -> Callable[..., list[list[Batch]]]:
    """handed_out(rank, of=workers, seed=...) -> the worker's micro-batches of two images, of steps 3 and 4."""

    def build(rank: int, *, of: int, seed: int = 0, first_step: int = 3) -> list[list[Batch]]:
        settings = {
            "model": tiny_config("size_upscale", image_size=SIDE, scaling_factor=2, num_bits=8),
            "train": TrainConfig(batch_size=BATCH, micro_batch_size=2),
            "stored_bits": 8,
            "seed": seed,
        }
        monkeypatch.setattr(ray_train.ray.train, "get_dataset_shard", lambda _: Shard(rank, of, 3))
        return list(
            ray_train.micro_batches(
                settings, first_step=first_step, rank=rank, num_workers=of, device=torch.device("cpu")
            )
        )

    return build


def test_workers_share_a_batch_and_each_draws_masks_of_its_own(handed_out) -> None:
    """Rows and seeds of dropout are those of one worker alone with as large micro-batches; no two are the same."""
    alone = handed_out(0, of=1)
    for workers in (2, 4):
        shares = [handed_out(rank, of=workers) for rank in range(workers)]
        for step, expected in enumerate(alone):
            together = [batch for share in shares for batch in share[step]]
            assert [batch.seed for batch in together] == [batch.seed for batch in expected]
            assert all(torch.equal(a.image, b.image) for a, b in zip(together, expected, strict=True))
    seeds = [batch.seed for step in alone for batch in step]
    assert len(set(seeds)) == len(seeds) == 8
    assert not set(seeds) & {batch.seed for step in handed_out(0, of=1, seed=1) for batch in step}


@pytest.mark.parametrize("step", [0, 2, 3])
def test_what_is_left_to_read_is_shared_evenly_after_the_last_step_too(step: int) -> None:
    """A training may be killed between its last checkpoint and its end: its workers start once more."""
    start, num_rows = ray_train.rows_to_read(TrainConfig(num_steps=3, batch_size=BATCH), step)
    assert (start, num_rows) == (step * BATCH, max(3 - step, 1) * BATCH)


def test_rows_of_another_step_are_noticed(handed_out) -> None:
    with pytest.raises(AssertionError, match="instead of"):
        handed_out(0, of=1, first_step=2)


def checkpoint(folder: Path, config: SPNConfig) -> Path:
    model = SPN(config)
    folder.mkdir()
    save_checkpoint(folder, model=model, ema=dict(model.named_parameters()), trainer={})
    return folder


def test_weights_to_start_from_are_checked_before_a_worker_starts(
    tiny_config: Callable[..., Any], tmp_path: Path
) -> None:
    config = tiny_config("size_upscale", image_size=SIDE, scaling_factor=2)
    folder = checkpoint(tmp_path / "checkpoint", config)
    ray_train.check_start_weights(str(folder), config)
    assert ray_train.start_weights_of(str(folder), config).keys() == dict(SPN(config).named_parameters()).keys()
    other = dataclasses.replace(config, num_bits=3)
    with pytest.raises(UserError, match=f"^train.init_from: {folder}: num_bits is 3 here, 1 in the checkpoint$"):
        ray_train.check_start_weights(str(folder), other)
    (folder / "config.json").write_text("[]")
    with pytest.raises(UserError, match=f"^train.init_from: {folder}: "):
        ray_train.check_start_weights(str(folder), config)
    with pytest.raises(UserError, match="^train.init_from: /nowhere has no config.json; it must be the folder of a "):
        ray_train.check_start_weights("/nowhere", config)


@pytest.mark.parametrize(("num_valid", "message"), [(0, "no valid images"), (1, "^train.init_from: /nowhere has no ")])
def test_what_a_training_cannot_begin_with_is_the_users_mistake(
    num_valid: int, message: str, monkeypatch: pytest.MonkeyPatch, tiny_config: Callable[..., Any]
) -> None:
    images = SimpleNamespace(num_images=lambda split: num_valid if split == "valid" else 1)
    monkeypatch.setattr(ray_train, "open_dataset", lambda _: images)
    model = tiny_config("size_upscale", image_size=SIDE, scaling_factor=2)
    config = {"stage": "size_upscale", "model": model, "train": TrainConfig(init_from="/nowhere")}
    context = SimpleNamespace(config=config, options={"resources": None}, fresh=True)
    with pytest.raises(UserError, match=message):
        ray_train.fit_stage(context, dataset="set")


@pytest.fixture
def made(tiny_config: Callable[..., Any]) -> Callable[..., Batch]:
    """made(stage, epoch=..., **of TrainConfig) -> a batch of 400 random 8-bit images of that stage at S = 2."""

    def build(stage: str, *, epoch: int = 0, **train: Any) -> Batch:
        bits = {"depth_upscale": dict(num_given_bits=3, num_bits=5)}.get(stage, dict(num_bits=3))
        model = tiny_config(stage, image_size=SIDE, scaling_factor=2, **bits)
        pixels = np.random.default_rng(0).integers(0, 256, (400, SIDE, SIDE, 3), dtype=np.uint8)
        keys = [f"photo-{number}" for number in range(400)]
        rows = {"px": pixels, "key": keys, "epoch": np.full(400, epoch)}
        settings = {"model": model, "train": TrainConfig(**train), "stored_bits": 8, "seed": 0}
        return ray_train.make_batch(rows, settings, torch.device("cpu"))

    return build


@pytest.mark.parametrize("stage", ["first_slice", "size_upscale", "depth_upscale"])
def test_target_slices_are_drawn_evenly_from_all_meta_positions(stage, made) -> None:
    """An unbiased estimate needs each of the four as often: 100 of 400, four standard deviations allowed."""
    index = made(stage).index
    counts = index.bincount(minlength=4)
    assert len(counts) == 4 and (counts - 100).abs().max() < 4 * (400 * 3 / 16) ** 0.5
    assert torch.equal(index, made(stage).index)
    assert not torch.equal(index, made(stage, epoch=1).index)


def test_a_first_slice_network_trains_on_slice_0_0_alone_if_told_so(made) -> None:
    """Other stages need all slices whatever is set."""
    assert not made("first_slice", slices="first").index.any()
    assert len(made("size_upscale", slices="first").index.unique()) == 4


def test_a_network_gets_the_bits_that_it_generates_and_those_above_as_given(made) -> None:
    low, high = made("size_upscale"), made("depth_upscale")
    assert low.given is None and low.image.max() == 7 and high.image.max() == 31
    assert torch.equal(high.given, low.image)


def test_half_of_the_images_are_flipped_if_told_so(made) -> None:
    """As whole images, before they are cut into slices, and the given bits with them."""
    plain, flipped = made("depth_upscale"), made("depth_upscale", horizontal_flip=True)
    turned = torch.tensor([not torch.equal(a, b) for a, b in zip(plain.image, flipped.image, strict=True)])
    assert 160 < turned.sum() < 240
    for whole, other in ((plain.image, flipped.image), (plain.given, flipped.given)):
        assert torch.equal(other[turned], whole[turned].flip(-1))
    mirrored = image_to_slices(plain.image, 2)[turned].flip(-1)  # slice (0, 0) of the flipped image was slice (0, 1)
    assert torch.equal(image_to_slices(flipped.image, 2)[turned][:, 0], mirrored[:, 1])
