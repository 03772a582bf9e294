"""On an NVIDIA GPU: the fused kernels decode as the full network and the plain decoder do.

python -m pytest -m gpu tests/spn/gpu/test_fused.py
"""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import Tensor

from spn.decoding.incremental import Draws, decode_slice, prepare
from spn.gpu.folding import FoldedWeights
from spn.model import SPN
from spn.sampling import sample_chain, sample_stage, slice_decoder, uniforms
from tests.spn.whole_images import context_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

# Channels that 3 does not divide, groups wider and narrower than a tile, one layer, no attention, both recipes.
SHAPES = {
    "plain": dict(num_layers=2, conv_channels=6, residual_channels=9, num_attn_layers=2),
    "uneven": dict(num_layers=3, conv_channels=52, residual_channels=100, num_attn_layers=1, num_attn_heads=3),
    "no_attention": dict(num_layers=3, conv_channels=8, residual_channels=10, num_attn_layers=0),
    "one_layer": dict(num_layers=1, conv_channels=5, residual_channels=7, num_attn_layers=1),
    "modern": dict(num_layers=3, conv_channels=52, residual_channels=100, num_attn_layers=2, recipe="modern"),
    # Loops of more turns than a tile has buffers, attention in parts and whole, learned rows in parts.
    "wide": dict(
        num_layers=3, conv_channels=128, residual_channels=300, num_attn_layers=3,
        num_attn_heads=5, attn_head_dim=128, num_memory_rows=1280,
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def exact_convolutions(monkeypatch):
    """Of the network that is compared with: torch's default for float32 are products of 10 bits (TF32)."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def network(shape: str, tiny_config, *, stage: str = "size_upscale", size: int = 4, num_bits: int = 3) -> SPN:
    """With weights redrawn, so that no map is zero; of the wide one they stay, since sums of 640 would be too large."""
    torch.manual_seed(1)
    factor = 1 if stage == "baseline" else 2
    config = tiny_config(stage, image_size=size * factor, scaling_factor=factor, num_bits=num_bits)
    config = dataclasses.replace(config, decoder=dataclasses.replace(config.decoder, **SHAPES[shape]))
    model = SPN(config).cuda().eval()
    if shape != "wide":
        for parameter in model.parameters():
            parameter.data.normal_(std=0.3 if config.decoder.conv_channels < 16 else 0.15)
    return model


def case(model: SPN, batch: int) -> tuple[Tensor, Tensor | None, Tensor]:
    """target, its context, and the whole network's logits, computed in float64."""
    config = model.config
    size, full = config.slice_size, config.image_size
    generator = torch.Generator(device="cuda").manual_seed(2)

    def draw(*shape: int) -> Tensor:
        return torch.randint(config.num_values, shape, generator=generator, device="cuda")

    target, context = draw(batch, 3, size, size), None
    with torch.no_grad():
        if model.embedder is not None:
            context = context_of(model, draw(batch, 3, full, full), torch.full((batch,), 2, device="cuda"), None)
        exact = copy.deepcopy(model.decoder).double()
        return target, context, exact(target, None if context is None else context.double()).float()


def recorded(model: SPN, target: Tensor, context: Tensor | None, **options) -> Tensor:
    """Logits by the fused decoder, made to take the values of `target`."""
    from spn.gpu.fused import FusedDecoder

    decoder = FusedDecoder(model, len(target), record=True, **options)
    unused = torch.zeros(target.shape, dtype=torch.float64, device="cuda")
    assert torch.equal(decoder(context, Draws(unused, known=target)), target)
    return decoder.logits


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("batch", [1, 3, 130])
def test_logits_equal_the_full_network(shape, batch, tiny_config):
    """In float32, at every position and channel; one image, few, and so many that they fill tensor cores' tiles."""
    model = network(shape, tiny_config, stage="baseline" if shape == "one_layer" else "size_upscale")
    target, context, full = case(model, batch)
    assert full.abs().max() > 0.3
    assert (recorded(model, target, context) - full).abs().max() < 1e-4


def test_logits_in_bfloat16_are_those_of_a_near_distribution(tiny_config):
    for shape in ("uneven", "modern"):
        target, context, full = case(model := network(shape, tiny_config), 20)
        fast = recorded(model, target, context, dtype=torch.bfloat16)
        divergence = (full.softmax(2) * (full.log_softmax(2) - fast.log_softmax(2))).sum(2)
        assert 0 < divergence.mean() < 1e-2


def test_large_batches_in_bfloat16_are_as_exact_as_small_ones_and_repeat(tiny_config):
    """Tiles of tensor cores whose loads run ahead: none overwrites what is still being read, whatever the timing."""
    target, context, full = case(model := network("wide", tiny_config, size=6), 130)
    large = recorded(model, target, context, dtype=torch.bfloat16)
    small = recorded(model, target[:20], context[:20], dtype=torch.bfloat16)
    rounding = (small - full[:20]).abs().max()
    worst = (large - full).abs().amax((1, 2, 3, 4))  # by image
    assert 0 < rounding < 0.05 * full.abs().max()
    assert worst.max() < 3 * rounding, worst.topk(5)
    assert (large[:20] - small).abs().max() < 3 * rounding
    for _ in range(3):
        assert torch.equal(recorded(model, target, context, dtype=torch.bfloat16), large)


def test_a_wrong_fold_is_noticed(tiny_config, monkeypatch):
    """Biases of the stream left out of what later layers read."""
    right = FoldedWeights._fold
    monkeypatch.setattr(FoldedWeights, "_fold", lambda self, layers: 0 * right(self, layers))
    target, context, full = case(model := network("plain", tiny_config), 3)
    assert (recorded(model, target, context) - full).abs().max() > 1e-2


@pytest.mark.parametrize("shape", ["plain", "modern"])
@pytest.mark.parametrize("top_p", [None, 0.7])
def test_draws_equal_the_plain_decoders(shape, top_p, tiny_config):
    """The same values from the same numbers, rows given or not, recorded once and played for several slices."""
    model = network(shape, tiny_config)
    target, context, _ = case(model, 5)
    fused = slice_decoder(model, 5, temperature=0.8, top_p=top_p, decoder="fused")
    for seed, known in ((0, None), (1, target[:, :, :2]), (2, None)):
        uniform = torch.rand(target.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).cuda()
        draws = Draws(uniform, temperature=0.8, top_p=top_p, known=known)
        assert torch.equal(fused(context, draws), decode_slice(prepare(model), context, draws))


def test_launches_that_overlap_change_nothing(tiny_config):
    from spn.gpu.fused import FusedDecoder

    target, context, _ = case(model := network("plain", tiny_config), 40)
    draws = Draws(torch.rand(target.shape, dtype=torch.float64, device="cuda"))
    with_overlap, without = (FusedDecoder(model, 40, overlap=overlap)(context, draws) for overlap in (True, False))
    assert torch.equal(with_overlap, without)


def test_a_chain_draws_the_same_images_as_on_the_cpu(tiny_config):
    torch.manual_seed(0)
    size = dict(image_size=8, scaling_factor=2)
    models = {
        "first_slice": SPN(tiny_config("first_slice", num_bits=3, **size)),
        "size_upscale": SPN(tiny_config("size_upscale", num_bits=3, **size)),
        "depth_upscale": SPN(tiny_config("depth_upscale", num_bits=5, num_given_bits=3, **size)),
    }
    rows: list[int] = []
    kept: dict = {}
    on_cpu = sample_chain({name: model.eval() for name, model in models.items()}, seed=3, images=range(4))
    for model in models.values():
        model.cuda()
    for _ in range(2):  # recorded, then played
        images = sample_chain(models, seed=3, images=range(4), decoders=kept, on_row=lambda: rows.append(1))
        for stage, values in on_cpu.items():
            assert torch.equal(images[stage].cpu(), values), stage
    assert len(kept) == 3 and len(rows) == 2 * (1 + 3 + 4) * 4


def test_slices_that_are_given_stay(tiny_config):
    model = network("plain", tiny_config)
    size = model.config.image_size
    given = torch.randint(8, (4, 2, 3, 4, 4), device="cuda")
    uniform = uniforms(0, stage="size_upscale", images=range(4), image_size=size).cuda()
    drawn = sample_stage(model, uniform, slices=given, precision="bfloat16")
    for number in range(2):
        assert torch.equal(drawn[:, :, number // 2 :: 2, number % 2 :: 2], given[:, number])
