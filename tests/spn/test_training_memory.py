"""GPU memory of training is counted from shapes: close to what was measured, and it follows what is kept.

python -m pytest tests/spn/test_training_memory.py
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.constant_memory import experiment
from benchmarks.race import VARIANTS
from pipelines.config import stage_model_config, stage_train_config
from pipelines.loading import load
from spn import training_memory as counting
from spn.config import SPNConfig, TrainConfig
from spn.model import SPN
from spn.optimizers import make_optimizer
from spn.training_memory import TrainingMemory, training_memory

RESULTS = Path(__file__).parents[2] / "benchmarks/results"
TRAINING = sorted((RESULTS / "train").glob("*.json"))
GROWING = json.loads((RESULTS / "constant_memory/imagenet64.json").read_text())
# Of SPNs, which differ little, the largest image. Where there is no peak memory ran out.
ROWS = [
    row for row in GROWING["rows"] if row.get("peak_gib") and (row["system"] == "baseline" or row["image_size"] == 256)
]


def counted_gib(network: SPNConfig, train: TrainConfig, batch: int) -> float:
    """One worker, one micro-batch."""
    train = dataclasses.replace(train, batch_size=batch, precision="bfloat16")
    return training_memory(network, train, num_workers=1).total(batch) / 2**30


# ---- as measured on an H200 -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", TRAINING, ids=lambda file: file.stem)
def test_counted_is_a_little_more_than_the_presets_took(file: Path) -> None:
    found = json.loads(file.read_text())
    config = load(found["config"])
    stage = found["stage"]
    counted = counted_gib(stage_model_config(config, stage), stage_train_config(config, stage), found["batch"])
    assert found["peak_gib"] <= counted < 1.08 * found["peak_gib"]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['system']}-{row['image_size']}-{row['batch']}")
def test_counted_is_a_little_more_than_others_took(row: dict[str, Any]) -> None:
    """Whole images, of 1,024 to 16,384 positions, were not compiled."""
    config = experiment(row, GROWING["config"], [])
    train = dataclasses.replace(stage_train_config(config, row["system"]), compile=row["compiled"])
    counted = counted_gib(stage_model_config(config, row["system"]), train, row["batch"])
    assert row["peak_gib"] <= counted < 1.1 * row["peak_gib"]


def test_counted_is_a_little_more_than_recipe_modern_took() -> None:
    """Its data set and its scoring are in what was measured."""
    found = json.loads((RESULTS / "race/modern-480s.json").read_text())
    raced = VARIANTS["modern"]
    train = TrainConfig(**{**raced.settings, "compile": True})
    counted = counted_gib(raced.network, train, found["images"] // found["steps"])
    assert found["peak_gib"] <= counted < 1.1 * found["peak_gib"]


# ---- what is counted ------------------------------------------------------------------------------------------------


@pytest.fixture(params=["paper", "modern"])
def network(request: pytest.FixtureRequest, tiny_config) -> SPNConfig:
    made = tiny_config("size_upscale", image_size=8, scaling_factor=2, num_bits=3)
    parts = {
        name: dataclasses.replace(getattr(made, name), recipe=request.param, num_memory_rows=8)
        for name in ("decoder", "embedder")
    }
    return dataclasses.replace(made, **parts)


def memory(network: SPNConfig, *, num_workers: int = 1, **settings: Any) -> TrainingMemory:
    return training_memory(network, TrainConfig(**{"batch_size": 64, **settings}), num_workers=num_workers)


@pytest.mark.parametrize("optimizer", ["rmsprop", "adamw", "muon"])
def test_state_is_that_of_a_real_training(network: SPNConfig, optimizer: str) -> None:
    """Weights, gradients, Polyak average and what the optimiser keeps after a step."""
    model = SPN(network)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    made = make_optimizer(model, TrainConfig(optimizer=optimizer))
    made.step()
    parts = made.optimizers if optimizer == "muon" else [made]
    kept = [x for part in parts for state in part.state.values() for x in state.values() if isinstance(x, torch.Tensor)]
    weights = sum(p.nbytes for p in model.parameters())
    alone, of_two = (memory(network, optimizer=optimizer, num_workers=n).state for n in (1, 2))
    assert alone == 3 * weights + sum(x.nbytes for x in kept)
    assert of_two == alone + weights, "gradients on their way"


def test_images_of_a_whole_step_wait_on_the_gpu(network: SPNConfig) -> None:
    assert memory(network, num_workers=4).images == 16 * 3 * 8 * 8 * 8
    given = dataclasses.replace(network, stage="depth_upscale", num_given_bits=3)
    assert memory(given, num_workers=4).images == 2 * 16 * 3 * 8 * 8 * 8


def test_passes_lie_on_a_line(network: SPNConfig) -> None:
    """Counted for one slice and for many; those between and beyond are near it, and each slice is like another."""
    model = SPN(network).to("meta")
    for p in model.parameters():
        p.grad = torch.empty_like(p)
    own = [*model.parameters(), *(p.grad for p in model.parameters()), *model.buffers()]
    found = memory(network, compile=True)  # float32: as counted
    for batch in (16, 100, 300):
        counted = counting._peak_of_passes(model, batch, "float32", own)
        assert found.first + (batch - 1) * found.further == pytest.approx(counted, rel=0.02)
    assert found.total(300) - found.total(200) == 100 * found.further


def test_little_is_kept_where_layers_run_again(network: SPNConfig) -> None:
    """Each layer's input, and the activations of the one that runs again."""
    deep = dataclasses.replace(
        network,
        decoder=dataclasses.replace(network.decoder, num_layers=5, num_attn_layers=6),
        embedder=dataclasses.replace(network.embedder, num_conv_layers=3, num_attn_layers=6),
    )
    kept, again = (memory(deep, precision="bfloat16", recompute_activations=x).further for x in (False, True))
    inputs = (
        2
        * 16
        * sum(part.num_attn_layers * part.num_attn_heads * part.attn_head_dim for part in (deep.decoder, deep.embedder))
    )
    assert inputs < again < kept / 2


def test_precision_and_compiling_count(network: SPNConfig) -> None:
    single, half, compiled = (
        memory(network, precision=precision, compile=compile).further
        for precision, compile in (("float32", False), ("bfloat16", False), ("bfloat16", True))
    )
    assert compiled < half < 0.8 * single


def test_dropout_keeps_a_byte_an_element(network: SPNConfig) -> None:
    dropping = dataclasses.replace(network, decoder=dataclasses.replace(network.decoder, dropout=0.1))
    own = network.decoder
    elements = 16 * own.num_attn_heads * own.attn_head_dim * 2 * own.num_attn_layers  # after each of two sublayers
    more = memory(dropping, compile=True).further - memory(network, compile=True).further
    assert 0 < more < 6 * elements, "the mask, and what is scaled; not a mask of four bytes"


def test_attention_weights_are_not_counted(network: SPNConfig) -> None:
    if network.decoder.recipe == "paper":
        few, many = (
            memory(dataclasses.replace(network, decoder=dataclasses.replace(network.decoder, num_memory_rows=rows)))
            for rows in (8, 4096)
        )
        assert many.further - few.further < 4096 * 16 * network.decoder.num_attn_heads * 4
    large = dataclasses.replace(network, image_size=64)
    assert memory(large).further < 1024 * 1024 * network.decoder.num_attn_heads * 4


def test_small_micro_batches_leave_room_for_the_rest(network: SPNConfig) -> None:
    """Whatever the micro-batch: the optimiser's step, 32 images in validation, the images of the next step."""
    found = memory(network, batch_size=2048)
    assert found.passes(1) == found.beside >= found.images
    assert memory(network, batch_size=2).beside > memory(network, batch_size=2).first
