"""The building blocks against plain formulas in float64.

python -m pytest tests/spn/network/test_layers.py
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from spn.config import DecoderConfig
from spn.layers import (
    GatedPixelCNNLayer,
    IntensityEmbedding,
    MaskedLinear,
    ParameterAttention,
    ResidualBlock,
    SelfAttention,
    TransformerLayer,
    channel_groups,
    timing_signal,
)
from spn.model import AttentionStack


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


# ---- RGB groups and masks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_channels", [3, 4, 5, 6, 24, 128, 256, 384, 1280])
def test_channel_groups_are_contiguous_and_even(num_channels):
    """Three runs in the order R, G, B whose sizes differ by one at most, also where 3 does not divide the number."""
    groups = channel_groups(num_channels)
    assert len(groups) == num_channels
    assert torch.equal(groups, groups.sort().values)
    sizes = groups.bincount(minlength=3)
    assert sizes.max() - sizes.min() <= 1
    assert torch.equal(sizes, sizes.sort(descending=True).values), "R first: saved weights depend on it"


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(("num_out", "num_in"), [(6, 9), (7, 24), (8, 5)])
def test_masked_linear_reads_only_allowed_colours(strict, num_out, num_in, randomised):
    """Which inputs move which outputs is exactly the mask; where it is open the map is an ordinary linear one."""
    out_groups, in_groups = channel_groups(num_out), channel_groups(num_in)
    layer = randomised(MaskedLinear(out_groups, in_groups, strict=strict), 0)
    jacobian = torch.autograd.functional.jacobian(layer, normal(1, num_in))
    allowed = torch.tensor([[i < o if strict else i <= o for i in in_groups.tolist()] for o in out_groups.tolist()])
    assert torch.equal(jacobian != 0, allowed)
    assert torch.equal(jacobian[allowed], layer.weight[allowed])


# ---- Gated PixelCNN -----------------------------------------------------------------------------------------------


def pixelcnn_layer_by_loops(layer: GatedPixelCNNLayer, x: Tensor, cond: Tensor) -> Tensor:
    """Equation 5 for one image, pixel by pixel and tap by tap: x [h, w, in], cond [h, w, K] -> [h, w, R]."""
    height, width, _ = x.shape
    half = channel_groups(layer.up.in_features)
    stream = channel_groups(layer.up.out_features)
    gate = torch.cat([half, half])
    if layer.is_first:
        a, allowed = x, gate[:, None] > layer_input_groups(x)[None]
    else:
        down = layer.down.weight * (half[:, None] >= stream[None])
        a = torch.stack([torch.stack([down @ x[r, c] + layer.down.bias for c in range(width)]) for r in range(height)])
        allowed = gate[:, None] >= half[None]
    out = torch.empty(height, width, len(stream), dtype=x.dtype)
    for r in range(height):
        for c in range(width):
            vertical = layer.vertical.bias.clone()
            for row, dy in enumerate((-2, -1)):
                for column, dx in enumerate((-1, 0, 1)):
                    if r + dy >= 0 and 0 <= c + dx < width:
                        vertical += layer.vertical.weight[:, :, row, column] @ a[r + dy, c + dx]
            z = (layer.current.weight * allowed) @ a[r, c] + layer.current.bias
            if c > 0:
                z = z + layer.left.weight @ a[r, c - 1]
            z = z + layer.link.weight @ vertical + layer.cond.weight @ cond[r, c]
            y = torch.tanh(z[: len(half)]) * torch.sigmoid(z[len(half) :])
            y = (layer.up.weight * (stream[:, None] >= half[None])) @ y + layer.up.bias
            out[r, c] = y if layer.is_first else x[r, c] + y
    return out


def layer_input_groups(x: Tensor) -> Tensor:
    """The first layer reads embedded values: equal shares of R, G, B."""
    return torch.arange(3).repeat_interleave(x.shape[-1] // 3)


def make_pixelcnn_layer(randomised, seed: int, *, first: bool, conv: int = 5, residual: int = 7) -> GatedPixelCNNLayer:
    groups = channel_groups(24) if first else None
    own = DecoderConfig(conv_channels=conv, residual_channels=residual)
    layer = GatedPixelCNNLayer(own, cond_channels=4, first_input=groups)
    return randomised(layer, seed)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(("height", "width"), [(1, 1), (1, 3), (3, 1), (4, 5)])
def test_gated_pixelcnn_layer_is_equation_5(first, height, width, randomised):
    """Both kinds of layer against loops over pixels and taps, channel numbers that 3 does not divide."""
    layer = make_pixelcnn_layer(randomised, 0, first=first)
    x, cond = normal(1, 2, height, width, 24 if first else 7), normal(2, 2, height, width, 4)
    with torch.no_grad():
        actual = layer(x, cond)
        for b in range(2):
            close(actual[b], pixelcnn_layer_by_loops(layer, x[b], cond[b]))


# ---- attention ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "width"), [(1, 2), (16, 8), (9, 2), (1024, 1280)])
def test_timing_signal_is_tensor2tensors(length, width):
    """signal[t] = sin(t / s_k) for all k, then cos; timescales s_k geometric from 1 to 10,000."""
    signal = timing_signal(length, width)
    assert signal.shape == (length, width) and signal.dtype == torch.float32
    num = width // 2
    for k in {0, num // 2, num - 1}:
        timescale = 10_000.0 ** (k / max(num - 1, 1))
        for t in {0, length // 2, length - 1}:
            assert signal[t, k].item() == pytest.approx(math.sin(t / timescale), abs=1e-6)
            assert signal[t, num + k].item() == pytest.approx(math.cos(t / timescale), abs=1e-6)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("length", [1, 7])
def test_self_attention_is_the_formula(causal, length, randomised):
    """softmax(q k^T / sqrt(head channels)) v by head, no biases; causal: softmax over positions up to the own one."""
    heads, dim = 3, 4
    layer = randomised(SelfAttention(width=heads * dim, num_heads=heads, causal=causal, dropout=0.0), 0)
    assert layer.qkv.bias is None and layer.out.bias is None
    x = normal(1, 2, length, heads * dim)
    with torch.no_grad():
        actual = layer(x)
        q_map, k_map, v_map = layer.qkv.weight.chunk(3)
        expected = torch.empty_like(x)
        for b in range(2):
            for t in range(length):
                seen = x[b, : t + 1] if causal else x[b]
                read = []
                for h in range(heads):
                    rows = slice(h * dim, (h + 1) * dim)
                    logits = (seen @ k_map[rows].T) @ (q_map[rows] @ x[b, t]) / math.sqrt(dim)
                    read.append(logits.softmax(0) @ (seen @ v_map[rows].T))
                expected[b, t] = layer.out.weight @ torch.cat(read)
    close(actual, expected)


@pytest.mark.parametrize("rows", [1, 6])
def test_parameter_attention_is_the_formula(rows, randomised):
    """A_h = softmax over the memory rows of q_h K_h^T, without scaling; y = concat(A_h V_h) W_o; any leading axes."""
    heads, dim = 3, 4
    layer = randomised(ParameterAttention(width=heads * dim, num_heads=heads, num_rows=rows, dropout=0.0), 0)
    assert layer.query.bias is None and layer.out.bias is None
    assert layer.keys.shape == layer.values.shape == (heads, rows, dim)
    x = normal(1, 2, 5, heads * dim)
    with torch.no_grad():
        q = (x @ layer.query.weight.T).unflatten(-1, (heads, dim))  # [2, 5, heads, d]
        weights = torch.einsum("bthd,hrd->bthr", q, layer.keys).softmax(-1)
        expected = torch.einsum("bthr,hrd->bthd", weights, layer.values).flatten(-2) @ layer.out.weight.T
        close(layer(x), expected)
        close(layer(x[0]), expected[0])


def test_parameter_attention_drops_whole_memory_rows(randomised):
    """In training a memory row of a head is gone or scaled by 1 / (1 - rate), the same for every position and image.

    With an identity output map, uniform attention and one-hot rows the output tells which rows were dropped: row r of a
    head shows in its channels r and rows + r.
    """
    heads, rows, rate = 2, 8, 0.25
    width = heads * 2 * rows
    layer = randomised(ParameterAttention(width=width, num_heads=heads, num_rows=rows, dropout=rate), 0)
    with torch.no_grad():
        layer.keys.zero_()  # uniform attention
        layer.out.weight.copy_(torch.eye(width))
        layer.values.copy_(torch.eye(rows).repeat(1, 2).expand(heads, rows, 2 * rows))
    x = normal(1, 3, 5, width)
    with torch.no_grad():
        close(layer(x), torch.full_like(x, 1 / rows))  # evaluation: nothing dropped
        layer.train()
        torch.manual_seed(0)
        outputs = torch.stack([layer(x) for _ in range(200)])
    assert (outputs == outputs[:, :1, :1]).all(), "one decision for all images and positions"
    y = outputs[:, 0, 0].view(200, heads, 2, rows)
    assert torch.equal(y[:, :, 0], y[:, :, 1]), "a row is dropped whole"
    kept = y[:, :, 0] > 0
    close(y[:, :, 0], kept.double() / (rows * (1 - rate)))
    assert kept.double().mean().item() == pytest.approx(1 - rate, abs=0.03)
    assert len(kept[:, 0].unique(dim=0)) > 50, "rows are dropped one by one"
    assert (kept[:, 0] != kept[:, 1]).any(), "heads are dropped apart"


SIZES = DecoderConfig(num_attn_layers=2, num_attn_heads=2, attn_head_dim=4, num_memory_rows=5)


def test_transformer_layer_is_pre_norm_residual(randomised):
    """x + attention(norm(x)), then x + parameter attention(norm(x)); layer norms with epsilon 1e-6, scale and bias."""
    layer = randomised(TransformerLayer(SIZES, causal=True), 0)

    def norm(x: Tensor, by: nn.LayerNorm) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt() * by.weight + by.bias

    x = 1e-3 * normal(1, 2, 6, 8)  # so small that the epsilon counts
    with torch.no_grad():
        middle = x + layer.attn(norm(x, layer.attn_norm))
        close(layer(x), middle + layer.memory(norm(middle, layer.memory_norm)))


@pytest.mark.parametrize("causal", [True, False])
def test_attention_stack(causal, randomised):
    """A map to the attention width, the timing signal once, the layers, a final norm with epsilon 1e-6."""
    stack = randomised(AttentionStack(SIZES, in_channels=5, slice_size=3, causal=causal), 0)
    x = normal(1, 2, 9, 5)
    with torch.no_grad():
        y = x @ stack.project.weight.T + stack.project.bias + timing_signal(9, 8).double()
        for layer in stack.layers:
            y = layer(y)
        assert all(layer.attn.causal == causal for layer in stack.layers)
        y = y - y.mean(-1, keepdim=True)
        y = y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt() * stack.norm.weight + stack.norm.bias
        close(stack(stack.project(x)), y)


# ---- the rest -----------------------------------------------------------------------------------------------------


def test_residual_block_is_the_formula(randomised):
    """x + up(relu(3x3(relu(down(relu(x)))))), the 3x3 zero padded."""
    block = randomised(ResidualBlock(residual_channels=6, conv_channels=4), 0)
    x = normal(1, 2, 3, 4, 6)
    with torch.no_grad():
        hidden = (x.relu() @ block.down.weight.T + block.down.bias).relu()
        padded = torch.zeros(2, 5, 6, 4, dtype=torch.float64)
        padded[:, 1:-1, 1:-1] = hidden
        conv = block.conv.bias.expand(2, 3, 4, 4).clone()
        for dy in range(3):
            for dx in range(3):
                conv += padded[:, dy : dy + 3, dx : dx + 4] @ block.conv.weight[:, :, dy, dx].T
        close(block(x), x + conv.relu() @ block.up.weight.T + block.up.bias)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64])
def test_intensity_embedding_has_a_table_for_each_colour(dtype, randomised):
    """Value v of colour c becomes row v of table c; channels in groups R, G, B of eight. 8 bits do not overflow."""
    layer = randomised(IntensityEmbedding(num_values=256), 0)
    values = torch.tensor([[0, 0, 0], [255, 255, 255], [7, 200, 31]]).to(dtype)
    tables = layer.table.weight.view(3, 256, 8)
    out = layer(values)
    assert out.shape == (3, 24)
    for row in range(3):
        for colour in range(3):
            assert torch.equal(out[row, colour * 8 : colour * 8 + 8], tables[colour, int(values[row, colour])])
    assert layer.groups().tolist() == [0] * 8 + [1] * 8 + [2] * 8
