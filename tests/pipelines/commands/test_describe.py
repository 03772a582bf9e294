"""describe: every preset builds without memory and lands on the paper's sizes; FLOPs and batches follow the config.

python -m pytest tests/pipelines/commands/test_describe.py
"""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from pipelines import cli, inspection
from pipelines.config import stage_model_config, stage_names
from pipelines.loading import load, preset_names
from spn.gpu import flops
from spn.model import SPN

TOLERANCE, ROOT = 0.12, Path(__file__).parents[3]
COUNT_ONCE = functools.cache(flops.forward_flops)


@pytest.fixture(autouse=True)
def flops_of_a_network_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes seconds for large ones, and several tests ask for the same."""
    monkeypatch.setattr(flops, "forward_flops", COUNT_ONCE)


@functools.cache
def sized(name: str, *overrides: str) -> dict[str, Any]:
    """The stages without FLOPs: counting them takes ten times as long as building the network."""
    with mock.patch("spn.gpu.flops.forward_flops", return_value=(0, 0)):
        return inspection.describe(load(name, overrides))["stages"]


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_builds_and_its_parts_add_up(name: str) -> None:
    """And its networks run forward: here with the first layers alone."""
    assert list(sized(name)) == stage_names(load(name))
    for stage, found in sized(name).items():
        network = stage_model_config(load(name), stage)
        few = dict(num_layers=2, num_attn_layers=1)
        network = dataclasses.replace(network, decoder=dataclasses.replace(network.decoder, **few))
        if network.embedder is not None:
            few = dict(num_conv_layers=1, num_attn_layers=1)
            network = dataclasses.replace(network, embedder=dataclasses.replace(network.embedder, **few))
        with torch.device("meta"):
            slices = torch.zeros(1, network.num_slices, 3, network.slice_size, network.slice_size, dtype=torch.int64)
            logits = SPN(network)(slices, slices.new_zeros(1), slices if network.num_given_bits else None)
        assert logits.shape == (1, 3, network.num_values, network.slice_size, network.slice_size)
        parts = dict(found["parameters"])
        assert parts.pop("total") == sum(parts.values())
        has_embedder = stage not in ("baseline", "first_slice")
        assert any(part.startswith("embedder") for part in parts) == has_embedder


@pytest.mark.parametrize(
    ("name", "overrides", "stage", "millions"),
    [
        ("imagenet32", (), "baseline", 150),
        ("imagenet64", (), "size_upscale", 150),
        ("imagenet64", (), "depth_upscale", 150),
        ("imagenet128", (), "size_upscale", 250),
        ("imagenet128", (), "depth_upscale", 250),
        ("imagenet256", (), "size_upscale", 250),
        ("imagenet256", (), "depth_upscale", 250),
        ("celebahq256", (), "size_upscale", 50),
        ("celebahq256", (), "depth_upscale", 50),
        ("imagenet128", (), "first_slice", 150),
        ("imagenet64", ("stages=[size_upscale]", "bits=[8]"), "size_upscale", 150),
        ("imagenet32", ("stages=[size_upscale]", "scaling_factor=2"), "size_upscale", 150),  # slices of 16x16
        ("imagenet32", ("stages=[size_upscale]", "scaling_factor=4"), "size_upscale", 150),  # slices of 8x8
        ("celebahq256", ("stages=[size_upscale]", "bits=[5]"), "size_upscale", 50),
        ("celebahq256", ("stages=[size_upscale]", "bits=[3]"), "size_upscale", 50),
    ],
)
def test_parameters_are_the_papers(name: str, overrides: tuple[str, ...], stage: str, millions: int) -> None:
    found = sized(name, *overrides)[stage]
    assert found["parameters"]["total"] == pytest.approx(millions * 1e6, rel=TOLERANCE)


def test_recipe_modern_for_one_stage_alone() -> None:
    """The stage named has the parts that only this recipe has, in numbers that follow from its sizes."""
    found = sized("debug", "per_stage.size_upscale.model.decoder.recipe=modern")
    own = load("debug").model.decoder
    width = own.num_attn_heads * own.attn_head_dim
    for stage, description in found.items():
        stem = description["parameters"].get("decoder.stem")
        assert stem == (24 * 4 * 7 * width if stage == "size_upscale" else None)
    layer = 4 * width**2 + 3 * width * own.num_memory_rows + 2 * width  # attention, feed-forward layer, norms
    attention = 25 * width + own.num_attn_layers * layer + width
    assert found["size_upscale"]["parameters"]["decoder.attention"] == attention


def test_presets_of_recipe_modern_are_what_was_raced() -> None:
    """cifar10_modern has the benchmark's network and settings; every stage of faces256 has the recipe."""
    from benchmarks.race import TOTAL_DECAY, variants

    raced = variants(32)["modern"]
    assert stage_model_config(load("cifar10_modern"), "baseline") == raced.networks[0]
    config = load("cifar10_modern").train
    for key, value in raced.settings.items():
        assert getattr(config, key) == value, key
    assert config.learning_rate * config.weight_decay * config.num_steps == pytest.approx(TOTAL_DECAY, rel=0.01)
    for parts in sized("faces256").values():
        assert "decoder.stem" in parts["parameters"] and parts["parameters"]["total"] < 50e6


def test_faces256_is_the_papers_chain_in_minutes_of_one_gpu() -> None:
    config, ours = load("faces256"), inspection.describe(load("faces256"))
    paper = load("celebahq256")
    for key in ("scaling_factor", "bits", "stages"):
        assert getattr(config, key) == getattr(paper, key)
    assert config.data.image_size == paper.data.image_size
    assert all(found["num_workers"] == 1 for found in ours["stages"].values())
    assert ours["gpu_hours"] < 0.5


def test_flops_of_a_decoder_are_the_sum_of_its_matrices() -> None:
    """Dense: every weight that a position is multiplied with counts 2, attention 4 * keys * width a position."""
    config = load("debug")
    own, positions = config.model.decoder, 8 * 8
    width, stream, conv = own.num_attn_heads * own.attn_head_dim, own.residual_channels, own.conv_channels
    attention = 24 * width + own.num_attn_layers * (  # queries, keys, values, output; the same less keys and values
        4 * width**2 + 2 * width**2 + 2 * width * (positions + own.num_memory_rows)
    )

    def layer(inputs: int) -> int:
        """2x3 (with the link folded in) and 1x2 kernels, the conditioning, the way back into the stream."""
        return (2 * 3 + 1 * 2) * inputs * 2 * conv + width * 2 * conv + conv * stream

    later_layers = (own.num_layers - 1) * (stream * conv + layer(conv))
    weights = attention + layer(24) + later_layers + stream * 3 * 2**3
    found = inspection.describe_stage(config, "first_slice")
    assert found["flops_per_slice"] == 2 * positions * weights


def test_gpu_hours_are_flops_over_what_a_gpu_is_assumed_to_reach() -> None:
    whole = inspection.describe(load("imagenet128"))
    for stage, found in whole["stages"].items():
        train = load("imagenet128").per_stage[stage].train
        training = 3 * found["flops_per_slice"] * train.batch_size * train.num_steps
        assert found["gpu_hours"] * 3600 * 0.5 * 790e12 == pytest.approx(training)
    assert whole["gpu_hours"] == pytest.approx(sum(found["gpu_hours"] for found in whole["stages"].values()))
    first, size, depth = (found["flops_per_slice"] for found in whole["stages"].values())
    per_image = first + 16 * size + 16 * depth
    assert whole["scoring_gpu_hours"] * 3600 == pytest.approx(1000 * per_image / (0.5 * 790e12)), "the same share"
    half = inspection.describe(load("imagenet128", ["train.num_steps=100_000", "resources.num_workers=4"]))
    assert half["gpu_hours"] == pytest.approx(whole["gpu_hours"] / 2)


def test_costs_on_the_page_about_clusters_are_those_described() -> None:
    page = (ROOT / "docs/cluster.md").read_text()
    stages = inspection.describe(load("imagenet128"))["stages"]
    training = {stage: found["training_flops"] for stage, found in stages.items()}
    hours = {stage: found["gpu_hours"] for stage, found in stages.items()}
    for stage, found in stages.items():
        row = [stage, f"{found['parameters']['total'] / 1e6:.0f}M", f"{training[stage]:.2e}".replace("e+", "e")]
        row += [f"{hours[stage]:.0f}", f"{hours[stage] / 8:.0f} h"]
        assert f"| {' | '.join(row)} |" in page
    total = sum(hours.values())
    row = ["all", "", f"{sum(training.values()):.2e}".replace("e+", "e"), f"{total:,.0f}"]
    row += [f"{total / 8:.0f} h one after another, {max(hours.values()) / 8:.0f} h side by side on 24"]
    assert f"| {' | '.join(row)} |".replace("|  |", "| |") in page


def test_json_and_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--config", "debug", "--json", "bits=[1,3,8]"], prog="describe.py") == 0
    stages = json.loads(capsys.readouterr().out)["stages"]
    assert list(stages) == ["first_slice", "size_upscale", "depth_upscale_3", "depth_upscale_8"]
    assert all(found["parameters"]["total"] > 0 and found["flops_per_slice"] > 0 for found in stages.values())
    assert cli.main(["--config", "imagenet128"], prog="describe.py") == 0
    text = capsys.readouterr().out
    whole = inspection.describe(load("imagenet128"))
    assert f"size_upscale: {whole['stages']['size_upscale']['parameters']['total']:,} parameters\n" in text
    assert "batch of 2,048 slices on 8 workers" in text
    last = text.splitlines()[-1]
    assert "50% of 790 TFLOP/s (assumed)" in last and f"{whole['gpu_hours']:,.2f} GPU-hours of an H100" in last
