"""The sampling benchmark on a CPU, tiny: what it reports of a chain, and the memory floor by hand.

python -m pytest tests/benchmarks/test_sample.py
"""

from __future__ import annotations

import pytest
import torch

from benchmarks.sample import floor_seconds, measure, measure_chain
from pipelines.config import stage_model_config
from pipelines.loading import load
from spn.model import SPN

SMALL = ["data.root=.", "data.image_size=8", "data.resolutions=[8]", "bits=[3,8]", "scaling_factor=2"]


@pytest.mark.parametrize("slices", [None, 1])
def test_a_chain_is_measured_stage_by_stage(slices):
    config = load("debug", SMALL)
    result = measure(config, batch=2, precision="float32", slices=slices, device="cpu")
    steps = {name: stage["pixel_steps"] for name, stage in result["stages"].items()}
    assert steps == {"first_slice": 16, "size_upscale": 64, "depth_upscale": 64}
    assert result["pixel_steps"] == 144
    assert result["measured_steps"] == (144 if slices is None else 48)
    assert result["sec_a_batch"] == pytest.approx(sum(stage["sec"] for stage in result["stages"].values()))
    assert result["sec_an_image"] * result["images_per_sec"] == pytest.approx(1)
    assert result["ratio_to_floor"] is None


@pytest.mark.parametrize("decoder", ["plain", "jacobi"])
def test_a_trained_chain_is_measured_on_what_it_draws(decoder):
    names = ("first_slice", "size_upscale", "depth_upscale")
    models = {name: SPN(stage_model_config(load("debug", SMALL), name)).eval() for name in names}
    result = measure_chain(models, batch=5, precision="float32", decoder=decoder)
    assert result["sec_a_batch"] == pytest.approx(sum(stage["sec"] for stage in result["stages"].values()))
    for stage in result["stages"].values():  # a slice has 4 x 4 pixels of three values; the last pass changes none
        assert ("passes_a_slice" in stage) == (decoder == "jacobi") and 2 <= stage.get("passes_a_slice", 2) <= 49


def test_floor_is_weights_and_cache_over_bandwidth():
    network = stage_model_config(load("debug", SMALL), "size_upscale")
    with torch.device("meta"):
        weights = sum(p.numel() for p in SPN(network).decoder.parameters())
    own = network.decoder
    half_full = own.num_attn_layers * own.num_attn_heads * own.attn_head_dim * 16  # keys and values of 16 / 2 pixels
    expected = 4 * 16 * 2 * (weights + 5 * half_full) / 4.8e12  # slices, pixels, bytes
    assert floor_seconds(network, 5, "bfloat16", "NVIDIA H200") == pytest.approx(expected)
    assert floor_seconds(network, 5, "bfloat16", "another card") is None
