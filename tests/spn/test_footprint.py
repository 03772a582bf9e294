"""GPU memory of sampling is counted from shapes: what is counted is what is made, and the largest batch is the largest.

python -m pytest tests/spn/test_footprint.py
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from pipelines.config import stage_model_config
from pipelines.loading import load
from spn import footprint
from spn.config import SPNConfig
from spn.footprint import MOST, TILE, batch_bytes, decoder_bytes, largest_batch
from spn.gpu.fused import FusedDecoder
from spn.meta import CODE_BYTES, KEPT_BACK
from spn.model import SPN
from spn.sampling import EMBEDDED_AT_ONCE, sample_stage, uniforms

MEASURED = sorted((Path(__file__).parents[2] / "benchmarks/results/sample").glob("*.json"))


@pytest.fixture(params=["paper", "modern"])
def config(request: pytest.FixtureRequest, tiny_config) -> SPNConfig:
    """A size-upscaling network of 8 x 8 images."""
    made = tiny_config("size_upscale", image_size=8, scaling_factor=2, num_bits=3)
    return dataclasses.replace(made, decoder=dataclasses.replace(made.decoder, recipe=request.param))


def networks_of(name: str, *stages: str) -> list[SPNConfig]:
    config = load(name, ["data.root=unused"])
    return [stage_model_config(config, stage) for stage in stages]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch", [1, 16, 130])
def test_counted_are_the_bytes_of_real_weights_caches_and_states(config, dtype, batch):
    real = FusedDecoder(SPN(config).eval(), batch, dtype=dtype)
    with torch.device("meta"):
        counted = FusedDecoder(SPN(config).eval(), 2, dtype=dtype)
    assert decoder_bytes(counted) != decoder_bytes(real)
    counted.resize(batch)
    assert decoder_bytes(counted) == decoder_bytes(real)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_batch_takes_at_least_its_networks_decoders_and_images(config, precision):
    model = SPN(config).eval()
    weights = sum(p.nbytes for p in model.parameters())
    decoder = decoder_bytes(FusedDecoder(model, 20, dtype=getattr(torch, precision)))
    images = 20 * 3 * 8 * 8 * 8
    assert batch_bytes([config], 20, precision=precision) > weights + decoder + images
    two = batch_bytes([config, config], 20, precision=precision)
    assert two > 2 * (weights + decoder) + images, "all stages' decoders are kept"


@pytest.mark.parametrize("path", MEASURED, ids=lambda path: path.stem)
def test_counted_is_a_little_more_than_was_measured(path):
    """On an H200 (benchmarks/sample.py, stage after stage, each freed before the next one).

    A gibibyte more for what is made while weights are folded.
    """
    measured = json.loads(path.read_text())
    networks = networks_of(measured["config"], *measured["stages"])
    alone = [batch_bytes([network], measured["batch"], precision=measured["precision"]) for network in networks]
    assert measured["peak_gib"] < max(alone) / 2**30 < 1.2 * measured["peak_gib"] + 1


def test_the_largest_batch_fits_and_one_tile_more_does_not():
    networks = networks_of("celebahq256", "first_slice", "size_upscale", "depth_upscale")
    memory = 22 * 2**30
    found, available = largest_batch(networks, memory, precision="bfloat16"), memory * (1 - KEPT_BACK) - CODE_BYTES
    assert found % TILE == 0 and found > 0
    assert batch_bytes(networks, found, precision="bfloat16") <= available
    assert batch_bytes(networks, found + TILE, precision="bfloat16") > available
    assert 0 < largest_batch(networks, memory, precision="float32") < found


def test_small_and_large_memories(config):
    assert largest_batch([config], 2**20, precision="float32") == 0
    assert largest_batch([config], 80 * 2**30, precision="float32") == MOST
    assert largest_batch([config], 80 * 2**30, precision="float32", most=37) == 37, "as asked for, no whole tile"
    alone = batch_bytes([config], 5, precision="float32") + CODE_BYTES
    assert largest_batch([config], int(alone / (1 - KEPT_BACK)) + 8, precision="float32") == 5


def test_memory_of_the_embedder_is_bounded():
    """It works on a few images at once, so that a larger batch takes no more of it."""
    (network,) = networks_of("celebahq256", "size_upscale")
    made = footprint._Network(network, "bfloat16")
    one, most = made._embedding(1), made._embedding(EMBEDDED_AT_ONCE)
    assert 10 * one < most
    assert made.passes(4 * EMBEDDED_AT_ONCE) == most


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_attention_weights_are_not_counted(config, precision):
    """Kernels of a GPU never make them, of no position and no learned row."""
    heads, positions = 2, 32**2
    wide = dataclasses.replace(config.embedder, num_attn_heads=heads, attn_head_dim=8, recipe=config.decoder.recipe)
    network = dataclasses.replace(config, image_size=64, embedder=wide)
    assert network.slice_size**2 == positions
    weights = 16 * heads * positions**2 * (4 if precision == "float32" else 2)
    assert footprint._Network(network, precision)._embedding(16) < weights
    if config.decoder.recipe == "paper":
        many = dataclasses.replace(network, embedder=dataclasses.replace(wide, num_memory_rows=4096))
        assert footprint._Network(many, precision)._embedding(16) < weights


def test_in_half_precision_about_half_passes(config):
    single, half = (footprint._Network(config, precision)._embedding(64) for precision in ("float32", "bfloat16"))
    assert 0.4 * single < half < 0.75 * single, "norms stay in float32"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["celebahq256", "imagenet64_modern"])
def test_a_gpu_allocates_no_more_than_was_counted(name, precision):
    """Nor less than half of it: one slice of 70 images, more than are embedded at once."""
    (network,) = networks_of(name, "size_upscale")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    model = SPN(network).cuda().eval()
    size, side = network.image_size, network.slice_size
    uniform = uniforms(0, stage="size_upscale", images=range(70), image_size=size).cuda()
    known = torch.randint(network.num_values, (70, network.num_slices - 1, 3, side, side), device="cuda")
    sample_stage(model, uniform, slices=known, precision=precision)
    taken = torch.cuda.max_memory_allocated() - before
    counted = batch_bytes([network], 70, precision=precision)
    assert counted / 2 < taken <= counted
