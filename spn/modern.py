"""Blocks of `recipe: modern`: the same factorisation, masks and conditioning with parts of present-day transformers.

RMS norms, also on queries and keys; rotary positions over rows and columns; a gated feed-forward layer in place of
parameter attention; a convolution before attention, in the decoder a masked one; output maps that start at zero. The
paper's blocks are in layers.py.
B batch, T positions of a slice in raster order (h * w), D attention width, C embedded channels.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spn.config import DecoderConfig, EmbedderConfig
from spn.layers import rms_norm

STEM_ROWS, STEM_COLUMNS = 4, 7  # what the decoder's stem sees: this row and three above, three columns on either side


def rotary_cos_sin(height: int, width: int, head_dim: int) -> Tensor:
    """[2, T, head_dim / 2] cosine and sine of each position's angles: the first half grows with the row, the second
    with the column. In float32, made once: on a GPU they would cost more than the rotation itself.
    """
    assert head_dim % 4 == 0, head_dim
    quarter = head_dim // 4
    # From a full turn in two pixels down to one over a few hundred.
    speed = torch.pi / 2 ** torch.linspace(0, 8, quarter)
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    angles = torch.cat([rows.reshape(-1, 1) * speed, columns.reshape(-1, 1) * speed], dim=1).float()
    return torch.stack([angles.cos(), angles.sin()])


def rotate(x: Tensor, cos_sin: Tensor) -> Tensor:
    """x [..., T, head_dim], cos_sin [2, T, head_dim / 2] -> pairs (k, k + head_dim / 2) rotated by their angle."""
    cos, sin = cos_sin.to(x.dtype).unbind(0)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class ModernLayer(nn.Module):
    """Pre-norm residual attention, then a pre-norm residual gated feed-forward layer."""

    stacked: ClassVar = {"qkv": 3, "ffn_in": 2}  # maps that stand one below the other in a weight

    def __init__(self, own: DecoderConfig | EmbedderConfig, *, causal: bool) -> None:
        super().__init__()
        self.num_heads, self.causal = own.num_attn_heads, causal
        width, hidden = own.num_attn_heads * own.attn_head_dim, own.num_memory_rows
        self.attn_norm = nn.RMSNorm(width, eps=1e-6)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.attn_out = nn.Linear(width, width, bias=False)
        self.ffn_norm = nn.RMSNorm(width, eps=1e-6)
        self.ffn_in = nn.Linear(width, 2 * hidden, bias=False)
        self.ffn_out = nn.Linear(hidden, width, bias=False)
        self.dropout = nn.Dropout(own.dropout)

    def queries_keys_values(self, x: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, T, D], cos_sin [2, T, head_dim / 2] of its positions -> three times [B, heads, T, head_dim]."""
        qkv = self.qkv(self.attn_norm(x)).unflatten(-1, (3 * self.num_heads, -1))  # [B, T, 3 heads, head_dim]
        q, k, v = (part.transpose(1, 2) for part in qkv.chunk(3, dim=2))  # [B, heads, T, head_dim] each
        return rotate(rms_norm(q), cos_sin), rotate(rms_norm(k), cos_sin), v

    def after_attention(self, x: Tensor, attended: Tensor) -> Tensor:
        """Residual x [B, T, D] and attended values [B, heads, T, head_dim] -> output of the layer."""
        x = x + self.dropout(self.attn_out(attended.transpose(1, 2).reshape(x.shape)))  # [B, T, D]
        gate, value = self.ffn_in(self.ffn_norm(x)).chunk(2, dim=-1)  # [B, T, hidden] each
        return x + self.dropout(self.ffn_out(F.silu(gate) * value))

    def forward(self, x: Tensor, cos_sin: Tensor) -> Tensor:
        q, k, v = self.queries_keys_values(x, cos_sin)
        return self.after_attention(x, F.scaled_dot_product_attention(q, k, v, is_causal=self.causal))


class CausalStem(nn.Module):
    """Embedded pixels -> attention width: a masked convolution that sees only pixels before the one at hand.

    Rows h - 3 .. h and columns w - 3 .. w + 3, of the own row only those to the left (mask A over whole pixels). It is
    added to the pixel before in raster order: at the start of a row that one is out of the window's reach.
    """

    mask: Tensor

    def __init__(self, *, in_channels: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, in_channels, STEM_ROWS, STEM_COLUMNS))
        mask = torch.ones(STEM_ROWS, STEM_COLUMNS)
        mask[-1, STEM_COLUMNS // 2 :] = 0
        self.register_buffer("mask", mask, persistent=False)

    def masked_weight(self) -> Tensor:
        return self.weight * self.mask

    def forward(self, pixels: Tensor) -> Tensor:
        """[B, h, w, C] -> [B, h * w, D]."""
        side = STEM_COLUMNS // 2
        around = F.pad(pixels, (0, 0, side, side, STEM_ROWS - 1, 0)).permute(0, 3, 1, 2)  # [B, C, h + 3, w + 6]
        return F.conv2d(around, self.masked_weight()).flatten(2).transpose(1, 2)  # [B, h * w, D]
