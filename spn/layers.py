"""Building blocks that know nothing of slices: RGB-masked 1x1 maps, a gated PixelCNN layer, attention layers.

Everything is channels-last, so that 1x1 convolutions are matrix products over all positions at once.
B batch, h w slice, T = h * w positions in raster order, D attention width, C conv channels, R residual channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from spn.config import DecoderConfig, EmbedderConfig


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


Block = TypeVar("Block", bound=nn.Module)


def module_list(modules: Iterable[Block]) -> Sequence[Block]:
    """An nn.ModuleList whose items keep their type."""
    return cast("Sequence[Block]", nn.ModuleList(modules))


def run_layer(layer: Callable[..., Any], *inputs: Any, recompute: bool) -> Any:
    """layer(*inputs); with `recompute` its activations are not kept but computed again in the backward pass."""
    if recompute and torch.is_grad_enabled():
        return checkpoint(layer, *inputs, use_reentrant=False)
    return layer(*inputs)


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

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.masked_weight(), self.bias)


def rms_norm(x: Tensor) -> Tensor:
    """Unit mean square over the last axis, without parameters."""
    return F.rms_norm(x, (x.shape[-1],), eps=1e-6)


class GroupRMSNorm(nn.Module):
    """RMS norm of each RGB group of a stream by itself, with a gain: no group learns anything of another one."""

    def __init__(self, num_channels: int) -> None:
        super().__init__()
        self.sizes = group_sizes(num_channels)
        self.gain = nn.Parameter(torch.empty(num_channels))

    def forward(self, x: Tensor) -> Tensor:
        """[..., R] -> [..., R]."""
        groups = [rms_norm(part) if part.shape[-1] else part for part in x.split(self.sizes, dim=-1)]
        return torch.cat(groups, dim=-1) * self.gain


class GatedPixelCNNLayer(nn.Module):
    """One layer of the conditional Gated PixelCNN (van den Oord et al. 2016b, equation 5), 3x3 receptive field.

    y = tanh(W_f * x + V_f * h) . sigmoid(W_g * x + V_g * h). The vertical stack reads the two rows above without any
    channel mask, the horizontal stack the pixel to the left and, masked over RGB groups, the pixel itself. The first
    layer reads the embedded pixel values (mask A) and starts the residual stream; later ones add to it (mask B), and in
    recipe modern norm what they read of it.
    """

    def __init__(self, own: DecoderConfig, *, cond_channels: int, first_input: Tensor | None) -> None:
        """first_input: RGB groups of the embedded input channels for the first layer, None for later layers."""
        super().__init__()
        stream = channel_groups(own.residual_channels)
        half = channel_groups(own.conv_channels)
        # Groups are assigned within each half of the gate, so that tanh[k] and sigmoid[k] belong to one group.
        gate = torch.cat([half, half])
        self.is_first = first_input is not None
        self.norm = None if self.is_first or own.recipe == "paper" else GroupRMSNorm(own.residual_channels)
        local = first_input if first_input is not None else half
        self.down = None if self.is_first else MaskedLinear(half, stream)
        self.vertical = nn.Conv2d(len(local), len(gate), kernel_size=(2, 3))
        # link and cond need no bias of their own: they are added to `current`, which has one.
        self.link = nn.Linear(len(gate), len(gate), bias=False)
        self.left = nn.Linear(len(local), len(gate), bias=False)
        self.current = MaskedLinear(gate, local, strict=self.is_first)
        self.cond = nn.Linear(cond_channels, len(gate), bias=False)
        self.up = MaskedLinear(stream, half)

    def forward(self, x: Tensor, cond: Tensor) -> Tensor:
        """x [B, h, w, R] (first layer: embedded pixels [B, h, w, 24]), cond [B, h, w, channels] -> [B, h, w, R]."""
        if self.down is None:
            a = x
        else:
            a = self.down(x if self.norm is None else self.norm(x))  # [B, h, w, C]
        # Row r of the convolution reads rows r - 2 and r - 1: two rows of padding above, the last row cut off.
        above = self.vertical(F.pad(a.permute(0, 3, 1, 2), (1, 1, 2, -1)))  # [B, 2C, h, w]
        left = F.pad(a, (0, 0, 1, -1))  # [B, h, w, C]: the pixel to the left
        gate = self.link(above.permute(0, 2, 3, 1)) + self.left(left) + self.current(a) + self.cond(cond)
        f, g = gate.chunk(2, dim=-1)  # [B, h, w, C] each
        y = self.up(torch.tanh(f) * torch.sigmoid(g))  # [B, h, w, R]
        return y if self.is_first else x + y


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

    stacked: ClassVar = {"qkv": 3}  # maps that stand one below the other in a weight: each learns by itself

    def __init__(self, *, width: int, num_heads: int, causal: bool, dropout: float) -> None:
        super().__init__()
        self.num_heads, self.causal, self.dropout = num_heads, causal, dropout
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def queries_keys_values(self, x: Tensor) -> Iterable[Tensor]:
        """[B, T, D] -> three times [B, heads, T, d]."""
        qkv = self.qkv(x).unflatten(-1, (3 * self.num_heads, -1))  # [B, T, 3 heads, d]
        return (part.transpose(1, 2) for part in qkv.chunk(3, dim=2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.queries_keys_values(x)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, dropout_p=dropout)  # [B, heads, T, d]
        return self.out(y.transpose(1, 2).reshape(x.shape))  # [B, T, D]


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
        q = self.query(x).view(1, -1, self.num_heads, self.keys.shape[-1]).transpose(1, 2)  # [1, heads, positions, d]
        keys, values = self.keys.to(q.dtype)[None], self.dropped_values().to(q.dtype)[None]  # [1, heads, rows, d]
        y = F.scaled_dot_product_attention(q, keys, values, scale=1.0)  # [1, heads, positions, d]
        return self.out(y.transpose(1, 2).reshape(x.shape))

    def dropped_values(self) -> Tensor:
        """The values; in training dropout takes whole memory rows, one decision for all positions."""
        if not self.training or self.dropout == 0:
            return self.values
        return self.values * F.dropout(torch.ones_like(self.values[..., :1]), self.dropout)


class TransformerLayer(nn.Module):
    """Pre-norm residual self-attention, then pre-norm residual parameter attention (Tensor2Tensor's order)."""

    def __init__(self, own: DecoderConfig | EmbedderConfig, *, causal: bool) -> None:
        super().__init__()
        heads, width, dropout = own.num_attn_heads, own.num_attn_heads * own.attn_head_dim, own.dropout
        self.attn_norm = nn.LayerNorm(width, eps=1e-6)
        self.attn = SelfAttention(width=width, num_heads=heads, causal=causal, dropout=dropout)
        self.memory_norm = nn.LayerNorm(width, eps=1e-6)
        self.memory = ParameterAttention(width=width, num_heads=heads, num_rows=own.num_memory_rows, dropout=dropout)
        self.dropout = nn.Dropout(dropout)

    def queries_keys_values(self, x: Tensor, cos_sin: None = None) -> Iterable[Tensor]:
        """x [B, T, D] -> three times [B, heads, T, d]. cos_sin: of recipe modern's layers alone."""
        return self.attn.queries_keys_values(self.attn_norm(x))

    def after_attention(self, x: Tensor, attended: Tensor) -> Tensor:
        """Decoding's: x [B, T, D] and attended values [B, heads, T, d] -> output of the layer."""
        x = x + self.attn.out(attended.transpose(1, 2).reshape(x.shape))
        return x + self.memory(self.memory_norm(x))

    def forward(self, x: Tensor, cos_sin: None = None) -> Tensor:
        x = x + self.dropout(self.attn(self.attn_norm(x)))
        return x + self.dropout(self.memory(self.memory_norm(x)))


class ResidualBlock(nn.Module):
    """Bottleneck of the slice embedder: R -> C (1x1) -> C (3x3) -> R (1x1), a ReLU before each, added to its input."""

    def __init__(self, *, residual_channels: int, conv_channels: int) -> None:
        super().__init__()
        self.down = nn.Linear(residual_channels, conv_channels)
        self.conv = nn.Conv2d(conv_channels, conv_channels, kernel_size=3, padding=1)
        self.up = nn.Linear(conv_channels, residual_channels)

    def forward(self, x: Tensor) -> Tensor:
        """[B, h, w, R] -> [B, h, w, R]."""
        y = F.relu(self.down(F.relu(x))).permute(0, 3, 1, 2)  # [B, C, h, w]
        y = F.relu(self.conv(y)).permute(0, 2, 3, 1)  # [B, h, w, C]
        return x + self.up(y)


class IntensityEmbedding(nn.Module):
    """Each intensity embedded in `units` numbers, one table for each colour channel: [..., 3] -> [..., 3 * units]."""

    offset: Tensor

    def __init__(self, *, num_values: int, units: int = 8) -> None:
        super().__init__()
        self.table = nn.Embedding(3 * num_values, units)
        self.register_buffer("offset", torch.arange(3) * num_values, persistent=False)

    def forward(self, values: Tensor) -> Tensor:
        return self.table(values.long() + self.offset).flatten(-2)

    def groups(self) -> Tensor:
        """RGB group of each embedded channel."""
        return channel_groups(3 * self.table.embedding_dim)
