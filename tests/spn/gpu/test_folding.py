"""The folded maps of the fused sampler are the network: a first pixel decoded from them in plain torch, without Triton.

What the kernels do with them is tested on a GPU (test_fused.py). python -m pytest tests/spn/gpu/test_folding.py
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor
from torch.nn import Module

from spn.gpu.folding import FoldedWeights
from spn.gpu.fused import EPS
from spn.model import SPN
from tests.spn.whole_images import incremental_logits


def first_pixel(decoder: FoldedWeights, model: SPN, values: Tensor) -> Tensor:
    """Logits [B, 3, V] of pixel (0, 0), which takes `values` [B, 3]: nothing is above, to the left or before it."""
    batch, layers, conv, stream, gate = len(values), decoder.num_layers, decoder.conv, decoder.stream, decoder.gate
    attention = model.decoder.attention
    x = attention.project.bias + attention.timing[0]
    scale = torch.rsqrt(x.var(unbiased=False) + EPS)
    base = decoder.gate_attention.float() @ x.float() * scale + decoder.gate_bias.flatten()
    gates = base.view(1, layers, 3, 2 * conv).repeat(batch, 1, 1, 1)
    streams = decoder.fold_stream_bias.repeat(batch, 1, 1)
    activations = torch.zeros(batch, 3, layers + 1, conv)
    features, logits = torch.zeros(batch, 3 * stream), []

    def step(group: int, source: int) -> None:
        """kernels.step: rows are gates of all groups from one on, of all layers from one on, then the stream."""
        low, until = (group, layers) if source else (group + 1, 1)
        added = activations[:, group, source] @ decoder.fold_steps[group][source].t()
        size = (until - source) * (3 - low) * 2 * conv
        gates[:, source:until, low:] += added[:, :size].view(batch, until - source, 3 - low, 2 * conv)
        if source:
            streams[:, low:] += added[:, size:].view(batch, 3 - low, stream)
        else:
            assert added.shape[1] == size

    assert gates.shape[2] * 2 * conv == gate
    for channel in range(3):
        if channel:
            step(channel - 1, 0)
        for i in range(layers):
            if i:
                step(channel, i)
            f, g = gates[:, i, channel].chunk(2, dim=-1)
            activations[:, channel, i + 1] = torch.tanh(f) * torch.sigmoid(g)
        step(channel, layers)
        features[:, channel * stream : (channel + 1) * stream] = streams[:, channel].relu()
        seen = (channel + 1) * stream
        logits.append(features[:, :seen] @ decoder.head[channel][:, :seen].t() + decoder.head_bias[channel])
        table = model.decoder.intensity.table
        activations[:, channel, 0, : table.embedding_dim] = table(values[:, channel] + channel * decoder.num_values)
    return torch.stack(logits, dim=1)


@pytest.mark.parametrize("num_layers, conv, stream", [(1, 5, 7), (2, 6, 9), (4, 52, 100)])
def test_a_pixel_by_folded_maps_has_the_networks_logits(num_layers, conv, stream, tiny_config, randomised):
    config = tiny_config("baseline", image_size=4, scaling_factor=1, num_bits=3)
    changes = dict(num_layers=num_layers, conv_channels=conv, residual_channels=stream, num_attn_layers=0)
    config = dataclasses.replace(config, decoder=dataclasses.replace(config.decoder, **changes))
    model = randomised(SPN(config), 3).float()
    target = torch.randint(8, (5, 3, 4, 4), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = incremental_logits(model, target, None)[..., 0, 0].float()
        found = first_pixel(FoldedWeights(model, torch.float32), model, target[..., 0, 0])
    assert expected.std() > 0.05 and expected[:, 2].std(0).min() > 1e-3, "weights and values count"
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()


def test_what_follows_an_attention_is_made_of_the_stream_before_it(tiny_config, randomised):
    """kernels.mix: W_1 of the attention's output; W_2 W_1 and W_2 make W_2 of the stream with that added."""
    config = tiny_config("baseline", image_size=4, scaling_factor=1, num_bits=3)
    config = dataclasses.replace(config, decoder=dataclasses.replace(config.decoder, num_attn_layers=2))
    model = randomised(SPN(config), 3).float()
    decoder, layers = FoldedWeights(model, torch.float32), model.decoder.attention.layers
    width = decoder.width
    attended, stream = torch.randn(2, 5, width, generator=torch.Generator().manual_seed(0))

    def check(weight: Tensor, bias: Tensor, out: Module, norm: Module, following: Module) -> None:
        first, both = weight.split([width**2, len(weight) - width**2])
        after = stream + attended @ first.view(width, width).t()
        assert torch.allclose(after, stream + out(attended), atol=1e-5)
        mixed = torch.cat([attended, stream], dim=1) @ both.view(-1, 2 * width).t()
        factor = torch.rsqrt(after.var(1, unbiased=False, keepdim=True) + EPS)
        assert torch.allclose(mixed * factor + bias, following(norm(after)), atol=1e-4)

    with torch.no_grad():
        for number, layer in enumerate(layers):
            weights = decoder.attention[number]
            check(weights["out"], weights["query_bias"], layer.attn.out, layer.memory_norm, layer.memory.query)
            if number + 1 < len(layers):
                after, bias = layers[number + 1], decoder.attention[number + 1]["qkv_bias"]
                check(weights["memory_out"], bias, layer.memory.out, after.attn_norm, after.attn.qkv)
