"""Building blocks that know nothing of slices: RGB-masked 1x1 maps, a gated PixelCNN layer, attention stacks.

Everything is channels-last, so that 1x1 convolutions are matrix products over all positions at once.
B batch, h w slice, T = h * w positions in raster order, D attention width, C conv channels, R residual channels.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def group_sizes(num_channels: int) -> list[int]:
    """Channels of the R, G and B group: as even as possible, a group may be empty."""
    return [(num_channels + 2 - g) // 3 for g in range(3)]


def channel_groups(num_channels: int) -> Tensor:
    """[num_channels] colour group (0 R, 1 G, 2 B) of each channel: three contiguous groups."""
    cpu = torch.device("cpu")  # real numbers even while a network is built on the meta device
    return torch.repeat_interleave(torch.arange(3, device=cpu), torch.tensor(group_sizes(num_channels), device=cpu))


def rgb_mask(out_groups: Tensor, in_groups: Tensor, *, strict: bool) -> Tensor:
    """[out, in] True where an output channel may read an input channel of the *current* pixel.

    strict is PixelCNN's mask A (a group sees only earlier groups), otherwise mask B (earlier groups and its own).
    """
    out, inp = out_groups[:, None], in_groups[None, :]
    return out > inp if strict else out >= inp


def run_layer(layer: Callable[..., Any], *inputs: Any, recompute: bool) -> Any:
    """layer(*inputs); with `recompute` its activations are not kept but computed again in the backward pass."""
    if recompute and torch.is_grad_enabled():
        return checkpoint(layer, *inputs, use_reentrant=False)
    return layer(*inputs)


def weight_products(device: str) -> contextlib.AbstractContextManager:
    """Products of weights with weights, once a batch: never in half precision. (The meta device knows no autocast.)"""
    return contextlib.nullcontext() if device == "meta" else torch.autocast(device, enabled=False)


def add_product(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """x + y W^T for a wide residual stream: [..., R], [..., C], weight [R, C] -> [..., R].

    One accumulating product: compiled, the sum is kept for the backward pass instead of added up again there.
    """
    return torch.addmm(x.flatten(0, -2), y.flatten(0, -2), weight.t()).view(x.shape)


def _sum_over_positions(grad: Tensor, dtype: torch.dtype) -> Tensor:
    """[..., R] -> [R], as a matrix product.

    As a reduction it took a twentieth of a training step on a GPU, some eight times as long as reading what it sums.
    """
    rows = grad.flatten(0, -2)
    parts = math.gcd(len(rows), 512)  # so that every core of the device has one
    rows = rows.view(parts, -1, rows.shape[-1])
    return torch.bmm(rows.new_ones(parts, 1, rows.shape[1]), rows).to(dtype).sum((0, 1))


class _AddShift(torch.autograd.Function):
    """x + shift."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shift: Tensor) -> Tensor:
        ctx.shift_dtype = shift.dtype
        return x + shift.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, _sum_over_positions(grad, ctx.shift_dtype)


def add_shift(x: Tensor, shift: Tensor) -> Tensor:
    """x [..., R] + shift [R], in x's precision."""
    return _AddShift.apply(x, shift)


class _BiasInShift(torch.autograd.Function):
    """x itself; the bias gets the gradient of x + bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        ctx.bias_dtype = bias.dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, _sum_over_positions(grad, ctx.bias_dtype)


def bias_in_shift(x: Tensor, bias: Tensor) -> Tensor:
    """x of a stream x + shift whose shift grew by `bias`, where all uses of the stream take its sum.

    Then the bias's gradient is that of x. The shift itself needs none, and no gradient is written beside the stream's.
    """
    return _BiasInShift.apply(x, bias)


class MaskedLinear(nn.Linear):
    """A 1x1 convolution whose weight is masked over RGB groups (van den Oord et al. 2016, PixelRNN section 3.4)."""

    mask: Tensor

    def __init__(self, out_groups: Tensor, in_groups: Tensor, *, strict: bool = False, bias: bool = True) -> None:
        super().__init__(len(in_groups), len(out_groups), bias=bias)
        mask = rgb_mask(out_groups, in_groups, strict=strict)
        self.num_masked = int((~mask).sum())
        self.register_buffer("mask", mask.to(self.weight.device), persistent=False)

    def masked_weight(self) -> Tensor:
        return self.weight * self.mask

    def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        """Of x + shift; shift [in] goes into the bias, so that no wide sum is made."""
        weight, bias = self.masked_weight(), self.bias
        if shift is not None:
            with weight_products(x.device.type):
                bias = bias + weight @ shift
        return F.linear(x, weight, bias)


class GatedPixelCNNLayer(nn.Module):
    """One layer of the conditional Gated PixelCNN (van den Oord et al. 2016b, equation 5), 3x3 receptive field.

    y = tanh(W_f * x + V_f * h) . sigmoid(W_g * x + V_g * h). The vertical stack reads the two rows above without any
    channel mask, the horizontal stack the pixel to the left and, masked over RGB groups, the pixel itself. The first
    layer reads the embedded pixel values (mask A) and starts the residual stream; later ones add to it (mask B).
    The stream is handed on as x and shift [R], whose sum it is: biases add up in the small one.
    """

    def __init__(
        self,
        *,
        conv_channels: int,
        residual_channels: int,
        cond_channels: int,
        first_input: Tensor | None,
        norm: nn.Module | None = None,
    ) -> None:
        """first_input: RGB groups of the embedded input channels for the first layer, None for later layers.

        norm: of what a later layer reads of the stream, within RGB groups; None as in the paper.
        """
        super().__init__()
        stream = channel_groups(residual_channels)
        half = channel_groups(conv_channels)
        # Groups are assigned within each half of the gate, so that tanh[k] and sigmoid[k] belong to one group.
        gate = torch.cat([half, half])
        self.is_first = first_input is not None
        self.norm = norm
        local = first_input if first_input is not None else half
        self.down = None if self.is_first else MaskedLinear(half, stream)
        self.vertical = nn.Conv2d(len(local), len(gate), kernel_size=(2, 3))
        # link and cond need no bias of their own: they are added to `current`, which has one.
        self.link = nn.Linear(len(gate), len(gate), bias=False)
        self.left = nn.Linear(len(local), len(gate), bias=False)
        self.current = MaskedLinear(gate, local, strict=self.is_first)
        self.cond = nn.Linear(cond_channels, len(gate), bias=False)
        self.up = MaskedLinear(stream, half)

    def forward(self, x: Tensor, shift: Tensor | None, cond: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, h, w, R], shift [R] (first layer: embedded values, None) -> the new x and shift.

        cond [B, h, w, 2C]: the conditioning's share of the gate, self.cond of it; a decoder makes all layers' at once.
        """
        if self.down is None:
            a = x
        elif self.norm is None:
            a = self.down(x, shift)  # [B, h, w, C]
        else:
            a = self.down(self.norm(add_shift(x, shift)))
        y, weight = self.gated(a, cond), self.up.masked_weight()
        if self.is_first:
            return F.linear(y, weight), self.up.bias
        return add_product(x, y, weight), shift + self.up.bias

    def gated(self, a: Tensor, cond: Tensor) -> Tensor:
        """a [B, h, w, C] (first layer: embedded values), cond [B, h, w, 2C] -> y [B, h, w, C]."""
        weight, bias = self.masked_filter()
        around = F.pad(a, (0, 0, 1, 1, 2, 0)).permute(0, 3, 1, 2)  # two rows above, a column on either side
        gate = F.conv2d(around, weight, bias).permute(0, 2, 3, 1) + cond  # [B, h, w, 2C]
        f, g = gate.chunk(2, dim=-1)
        return torch.tanh(f) * torch.sigmoid(g)

    def masked_filter(self) -> tuple[Tensor, Tensor]:
        """Both stacks as one masked 3x3 filter [2C, C, 3, 3], and its bias: they are linear up to the gate.

        Rows r-2 and r-1 hold the vertical stack with its link, row r the pixel to the left, the pixel itself (masked
        over RGB groups) and nothing to its right.
        """
        with weight_products(self.link.weight.device.type):
            above = torch.einsum("og,gcyx->ocyx", self.link.weight, self.vertical.weight)
            taps = [self.left.weight, self.current.masked_weight(), torch.zeros_like(self.left.weight)]
            weight = torch.cat([above, torch.stack(taps, dim=-1)[:, :, None]], dim=2)
            return weight, self.current.bias + self.link.weight @ self.vertical.bias


def run_group(
    layers: Sequence[GatedPixelCNNLayer], x: Tensor, shift: Tensor | None, conds: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Layers without norm one after another, over one reading and one writing of the wide stream.

    x, shift as of one layer, conds one for each. Between the stream and a layer stands a linear map, so what a layer
    adds reaches a later one of the group through the product of its map up and the other's map down, both masked: C
    channels wide instead of R.
    """
    with weight_products(x.device.type):
        up = torch.cat([layer.up.masked_weight() for layer in layers], dim=1)  # [R, group * C]
        downs = [None if layer.down is None else layer.down.masked_weight() for layer in layers]
        sums = [torch.zeros_like(layers[0].up.bias) if shift is None else shift]  # the shift before each layer
        for layer in layers:
            sums.append(sums[-1] + layer.up.bias)
        biases = [
            None if down is None else layer.down.bias + down @ before
            for layer, down, before in zip(layers, downs, sums[:-1], strict=True)
        ]
    narrow = None if shift is None else F.linear(x, torch.cat(downs), torch.cat(biases)).chunk(len(layers), dim=-1)
    found: list[Tensor] = []  # y of the layers so far
    for number, layer in enumerate(layers):
        if layer.is_first:
            a = x
        elif number == 0:
            a = narrow[0]
        else:
            y = torch.cat(found, dim=-1)
            with weight_products(x.device.type):
                reach = downs[number] @ up[:, : y.shape[-1]]
            a = F.linear(y, reach, biases[number]) if narrow is None else add_product(narrow[number], y, reach)
        found.append(layer.gated(a, conds[number]))
    y = torch.cat(found, dim=-1)
    return (F.linear(y, up) if shift is None else add_product(x, y, up)), sums[-1]


def timing_signal(length: int, width: int) -> Tensor:
    """[T, D] sinusoidal timing signal of Tensor2Tensor: sines, then cosines, of geometric timescales 1 .. 10,000."""
    assert width % 2 == 0, width
    position = torch.arange(length, dtype=torch.float64)
    num = width // 2
    step = math.log(10_000.0) / max(num - 1, 1)
    inverse = torch.exp(-step * torch.arange(num, dtype=torch.float64))
    angle = position[:, None] * inverse[None, :]
    return torch.cat([angle.sin(), angle.cos()], dim=1).to(torch.float32)


class SelfAttention(nn.Module):
    """Multi-head dot-product attention without biases; causal: position t reads positions up to and with t."""

    def __init__(self, *, width: int, num_heads: int, causal: bool, dropout: float) -> None:
        super().__init__()
        self.num_heads, self.causal, self.dropout = num_heads, causal, dropout
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        # Cut along the heads: compiled, these views reach the kernel as they are; of an axis of three it makes copies.
        qkv = self.qkv(x).view(batch, length, 3 * self.num_heads, -1)
        q, k, v = (part.transpose(1, 2) for part in qkv.chunk(3, dim=2))  # [B, heads, T, d]
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, dropout_p=dropout)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


MEMORY_PARTS = 16


class ParameterAttention(nn.Module):
    """Tensor2Tensor's `parameter_attention`: each position attends to learned key/value rows, in place of an MLP.

    No mask, no scaling of the logits, no biases. Position-wise, so it cannot leak.
    """

    def __init__(self, *, width: int, num_heads: int, num_rows: int, dropout: float) -> None:
        super().__init__()
        self.num_heads, self.dropout = num_heads, dropout
        self.query = nn.Linear(width, width, bias=False)
        self.keys = nn.Parameter(torch.empty(num_heads, num_rows, width // num_heads))
        self.values = nn.Parameter(torch.empty(num_heads, num_rows, width // num_heads))
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        q = self.query(x).view(-1, self.num_heads, self.keys.shape[-1])  # [positions, heads, d]
        values = self.values
        if self.training and self.dropout > 0:  # whole memory rows, one decision for all positions
            values = values * F.dropout(torch.ones_like(values[..., :1]), self.dropout)
        # Positions in a few parts: the backward pass works on blocks of rows, too few in one part to fill a GPU.
        parts = math.gcd(len(q), MEMORY_PARTS) if q.is_cuda else 1
        keys, values = (rows.to(q.dtype).expand(parts, -1, -1, -1) for rows in (self.keys, values))
        y = F.scaled_dot_product_attention(q.unflatten(0, (parts, -1)).transpose(1, 2), keys, values, scale=1.0)
        return self.out(y.transpose(1, 2).reshape(x.shape))


class TransformerLayer(nn.Module):
    """Pre-norm residual self-attention, then pre-norm residual parameter attention (Tensor2Tensor's order)."""

    def __init__(self, *, width: int, num_heads: int, num_rows: int, causal: bool, dropout: float) -> None:
        super().__init__()
        self.attn_norm = nn.LayerNorm(width, eps=1e-6)
        self.attn = SelfAttention(width=width, num_heads=num_heads, causal=causal, dropout=dropout)
        self.memory_norm = nn.LayerNorm(width, eps=1e-6)
        self.memory = ParameterAttention(width=width, num_heads=num_heads, num_rows=num_rows, dropout=dropout)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attn(self.attn_norm(x)))
        return x + self.dropout(self.memory(self.memory_norm(x)))


class AttentionStack(nn.Module):
    """1D attention over a slice in raster order: timing signal, layers, final norm; [B, T, in] -> [B, T, D]."""

    timing: Tensor

    def __init__(
        self,
        *,
        in_channels: int,
        length: int,
        num_layers: int,
        num_heads: int,
        head_dim: int,
        num_rows: int,
        causal: bool,
        dropout: float,
    ) -> None:
        super().__init__()
        width = num_heads * head_dim
        self.project = nn.Linear(in_channels, width)
        timing = timing_signal(length, width).to(self.project.weight.device)
        self.register_buffer("timing", timing, persistent=False)
        self.layers = nn.ModuleList(
            TransformerLayer(width=width, num_heads=num_heads, num_rows=num_rows, causal=causal, dropout=dropout)
            for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.recompute = False

    def forward(self, x: Tensor) -> Tensor:
        return self.after_project(self.project(x))

    def after_project(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        x = x + self.timing.to(x.dtype)
        for layer in self.layers:
            x = run_layer(layer, x, recompute=self.recompute)
        return self.norm(x)


class ResidualBlock(nn.Module):
    """Bottleneck of the slice embedder: R -> C (1x1) -> C (3x3) -> R (1x1), a ReLU before each, added to its input.

    The stream is x + shift, as in the decoder; gradients reach the biases in shift by x (bias_in_shift).
    """

    def __init__(self, *, residual_channels: int, conv_channels: int) -> None:
        super().__init__()
        self.down = nn.Linear(residual_channels, conv_channels)
        self.conv = nn.Conv2d(conv_channels, conv_channels, kernel_size=3, padding=1)
        self.up = nn.Linear(conv_channels, residual_channels)

    def forward(self, x: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, h, w, R], shift [R] -> the new x and shift."""
        y = F.relu(self.down(F.relu(x + shift.to(x.dtype)))).permute(0, 3, 1, 2)  # [B, C, h, w]
        y = F.relu(self.conv(y)).permute(0, 2, 3, 1)
        bias = self.up.bias
        return bias_in_shift(add_product(x, y, self.up.weight), bias), shift + bias.detach()


@torch.library.custom_op("spn::table_gradient", mutates_args=())
def table_gradient(grad: Tensor, values: Tensor, num_values: int) -> Tensor:
    """Each value's sum of rows: grad [N, 3, units], values [N, 3] uint8, both contiguous -> [3, V, units].

    At least float32.
    """
    if grad.is_cuda and grad.dtype == torch.bfloat16:
        from spn.gpu import table_kernel  # needs Triton, which only a GPU's torch brings

        return table_kernel.table_gradient(grad, values, num_values)
    # Two tiny sides and one of millions: cut into parts, so that every core of the device has one.
    rows = grad.unflatten(0, (math.gcd(len(grad), 512), -1)).transpose(1, 2)  # [parts, 3, rows, units]
    numbers = torch.arange(num_values, device=values.device)
    chosen = values.view(rows.shape[0], -1, 3).transpose(1, 2)[..., None] == numbers  # [parts, 3, rows, V]
    sums = torch.bmm(chosen.to(grad.dtype).flatten(0, 1).transpose(1, 2), rows.flatten(0, 1))
    dtype = torch.promote_types(grad.dtype, torch.float32)
    return sums.view(-1, 3, num_values, grad.shape[-1]).sum(0, dtype=dtype)


@table_gradient.register_fake
def _(grad: Tensor, values: Tensor, num_values: int) -> Tensor:
    return grad.new_empty(3, num_values, grad.shape[-1], dtype=torch.promote_types(grad.dtype, torch.float32))


class _TableLookup(torch.autograd.Function):
    """Rows of three small tables, by value, in the type `dtype`; the tables' gradient is table_gradient.

    The gradient of an ordinary embedding adds up millions of rows into a few dozen with atomic operations: at the 112
    slots of S = 8 that was a tenth of a training step on a GPU.
    """

    @staticmethod
    def forward(ctx: Any, tables: Tensor, values: Tensor, dtype: torch.dtype) -> Tensor:
        """tables [3, V, units], values [..., 3] -> [..., 3, units]."""
        ctx.save_for_backward(values.to(torch.uint8))
        ctx.num_values, ctx.dtype = tables.shape[1], tables.dtype
        offset = torch.arange(3, device=values.device) * tables.shape[1]
        return F.embedding(values + offset, tables.flatten(0, 1).to(dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (values,) = ctx.saved_tensors
        rows = grad.reshape(-1, 3, grad.shape[-1]).contiguous()
        return table_gradient(rows, values.reshape(-1, 3).contiguous(), ctx.num_values).to(ctx.dtype), None, None


class IntensityEmbedding(nn.Module):
    """Each intensity embedded in `units` numbers, one table for each colour channel: [..., 3] -> [..., 3 * units]."""

    offset: Tensor

    def __init__(self, *, num_values: int, units: int = 8) -> None:
        super().__init__()
        self.table = nn.Embedding(3 * num_values, units)
        offset = torch.arange(3, device=self.table.weight.device) * num_values
        self.register_buffer("offset", offset, persistent=False)

    def forward(self, values: Tensor) -> Tensor:
        if not values.is_cuda:
            return self.table(values.long() + self.offset).flatten(-2)
        weight = self.table.weight
        dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else weight.dtype
        return _TableLookup.apply(weight.view(3, -1, weight.shape[1]), values.long(), dtype).flatten(-2)

    def groups(self) -> Tensor:
        """RGB group of each embedded channel."""
        return channel_groups(3 * self.table.embedding_dim)
