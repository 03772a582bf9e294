"""Decoding one slice incrementally: one decoder step per value, nothing recomputed that does not change.

  attention   keys and values of earlier pixels are cached;
  PixelCNN    what the rows above contribute (vertical stack, and s) is computed once per row, what attention and the
              pixel to the left contribute once per pixel, what the pixel itself contributes for each of R, G and B.
Weights are read through `prepare`, caches are arguments: no module is changed. The logits equal the whole network's.

B batch, h w slice, V values, L PixelCNN layers, C conv channels, R residual channels, D attention width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spn.layers import MaskedLinear
from spn.model import SPN, Decoder
from spn.modern import STEM_COLUMNS, STEM_ROWS

BITS = 24  # a coder's frequencies sum to at most 2^BITS


@dataclass(frozen=True)
class Draws:
    """What decides the values of a slice, beside the logits. Raises ValueError for a temperature or top_p out of range.

    The same uniform numbers give the same values from the same logits, whichever decoder computes them.
    """

    uniform: Tensor  # [B, 3, h, w] float64 in [0, 1): one number for each value
    temperature: float = 1.0  # divides the logits
    top_p: float | None = None  # mass of the nucleus that values are drawn from, see `pick`; None: all of it
    known: Tensor | None = None  # [B, 3, k, w]: values of the first k rows, taken as they are
    guess: Tensor | None = None  # [B, 3, h, w]: where Jacobi iteration begins; it does not change what is drawn
    coder: Any = None  # of coding.py: gives the values in place of the numbers, and sees the known ones

    def __post_init__(self) -> None:
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"temperature is {self.temperature}; it must be above 0")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it must be above 0 and at most 1")

    @property
    def known_rows(self) -> int:
        return 0 if self.known is None else self.known.shape[2]

    def choose(self, logits: Tensor, row: int, column: int, channel: int) -> Tensor:
        """Values [B] at one place of the slice, from its logits [B, V]."""
        known = self.known[:, channel, row, column] if self.known is not None and row < self.known_rows else None
        if self.coder is not None:
            return self.coder.code(logits, known)
        if known is not None:
            return known
        return pick(logits, self.uniform[:, channel, row, column], self.temperature, self.top_p)


def pick(logits: Tensor, uniform: Tensor, temperature: float, top_p: float | None = None) -> Tensor:
    """Values [B] drawn from softmax(logits / temperature) [B, V] by inverting its distribution at uniform [B].

    top_p: only the nucleus is drawn from, its probabilities scaled up to sum to 1. The nucleus is the smallest set of
    most likely values whose probabilities, after the temperature, sum to top_p or more; of equally likely values the
    smaller comes first. In float64, summed from the most likely down: a value belongs to the nucleus while the sum
    before it is below top_p, so the most likely one always does. None and 1 draw from all values.
    """
    probabilities = torch.softmax(logits.double() / temperature, dim=-1)
    if top_p is None or top_p == 1:
        values = (probabilities.cumsum(-1) <= uniform[:, None]).sum(-1)
        return values.clamp(max=logits.shape[-1] - 1)
    ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
    inside = ordered.cumsum(-1) - ordered < top_p
    nucleus = torch.zeros_like(probabilities).scatter(-1, order, ordered * inside)
    mass = nucleus.cumsum(-1)
    values = (mass <= uniform[:, None] * mass[:, -1:]).sum(-1)
    # Rounding may put uniform * mass at the whole mass: the last value of the nucleus, not one beyond it.
    last = (mass < mass[:, -1:]).sum(-1)
    return values.minimum(last)


@dataclass(frozen=True)
class LayerWeights:
    """One PixelCNN layer, with its masks applied."""

    above: Tensor  # [6 C, 2C] vertical convolution and its 1x1 link folded into one map of two rows by three columns
    above_bias: Tensor  # [2C], with the bias of the horizontal stack
    left: Tensor  # [C, 2C]
    context: Tensor | None  # [channels of s, 2C]
    attention: Tensor  # [D, 2C]
    down: tuple[Tensor, Tensor] | None  # [R, C], bias; None in the first layer
    current: Tensor  # [C, 2C]
    up: tuple[Tensor, Tensor]  # [C, R], bias


@dataclass(frozen=True)
class DecoderWeights:
    """What decoding reads, made once from a Decoder by `prepare`."""

    decoder: Decoder
    layers: tuple[LayerWeights, ...]
    stem: Tensor | None  # [rows * columns * 24, D] of recipe modern
    direct: tuple[Tensor, Tensor] | None  # of attention [D, R] and of s [channels, R] (recipe modern)
    head: tuple[Tensor, Tensor]  # [R, 3V], bias
    size: int  # h = w


@dataclass
class DecoderCache:
    """State of decoding one batch of slices; `new_cache` makes it, the steps below advance it."""

    keys: list[Tensor]  # per attention layer [B, heads, h * w, D / heads]
    values: list[Tensor]
    above: list[Tensor]  # per PixelCNN layer [B, 2, w + 2, C]: its input in the two rows above, zero-padded
    row: list[Tensor]  # per layer [B, w + 1, C]: its input in this row, after one column of padding
    from_above: list[Tensor]  # per layer [B, w, 2C]: what rows above and s add to the gate in this row
    gate: list[Tensor]  # per layer [B, 2C]: pre-activation of this pixel, all but the pixel itself
    # Of recipe modern:
    pixels: Tensor | None  # [B, h + 3, w + 6, 24]: embedded pixels so far, zero-padded, for the stem
    surroundings: Tensor | None = None  # [B, w, D]: what s adds to the input of attention in this row
    direct_above: Tensor | None = None  # [B, w, R]: what s adds to the stream in this row
    direct: Tensor | None = None  # [B, R]: what attention and s add to the stream at this pixel


def _masked(layer: MaskedLinear) -> tuple[Tensor, Tensor]:
    """Weight [in, out] and bias."""
    return layer.masked_weight().t().contiguous(), layer.bias.clone()


@torch.no_grad()
def prepare(model: SPN) -> DecoderWeights:
    """The decoder with its PixelCNN's weights as decoding uses them, in copies."""
    decoder, own = model.decoder, model.config.decoder
    attn_width = own.num_attn_heads * own.attn_head_dim
    layers = []
    for layer in decoder.layers:
        assert layer.vertical.bias is not None
        fold = torch.einsum("og,gcyx->yxco", layer.link.weight, layer.vertical.weight).flatten(0, 2)  # [6 C, 2C]
        cond = layer.cond.weight.t()
        layers.append(
            LayerWeights(
                above=fold.contiguous(),
                above_bias=layer.link.weight @ layer.vertical.bias + layer.current.bias,
                left=layer.left.weight.t().contiguous(),
                context=cond[attn_width:].contiguous() if model.embedder is not None else None,
                attention=cond[:attn_width].contiguous(),
                down=None if layer.down is None else _masked(layer.down),
                current=layer.current.masked_weight().t().contiguous(),
                up=_masked(layer.up),
            )
        )
    stem = direct = None
    if decoder.stem is not None and decoder.direct is not None:
        stem = decoder.stem.masked_weight().permute(2, 3, 1, 0).flatten(0, 2).contiguous()
        maps = decoder.direct.weight.t()
        direct = (maps[:attn_width].contiguous(), maps[attn_width:].contiguous())
    head, size = _masked(decoder.head), model.config.slice_size
    return DecoderWeights(decoder, tuple(layers), stem, direct, head, size)


def new_cache(weights: DecoderWeights, batch: int) -> DecoderCache:
    """An empty cache for a batch of slices, of the weights' type and device."""
    zeros, size, attention = weights.layers[0].left.new_zeros, weights.size, weights.decoder.attention
    heads, width = attention.num_heads, attention.project.out_features
    rows, columns = size + STEM_ROWS - 1, size + STEM_COLUMNS - 1
    inputs = [layer.left.shape[0] for layer in weights.layers]
    gates = [layer.left.shape[1] for layer in weights.layers]
    return DecoderCache(
        keys=[zeros(batch, heads, size**2, width // heads) for _ in attention.layers],
        values=[zeros(batch, heads, size**2, width // heads) for _ in attention.layers],
        above=[zeros(batch, 2, size + 2, c) for c in inputs],
        row=[zeros(batch, size + 1, c) for c in inputs],
        from_above=[zeros(batch, size, g) for g in gates],
        gate=[zeros(batch, g) for g in gates],
        pixels=None if weights.stem is None else zeros(batch, rows, columns, inputs[0]),
    )


def _attend(layer: Any, x: Tensor, keys: Tensor, values: Tensor, position: int, cos_sin: Tensor | None) -> Tensor:
    """One position of one attention layer: x [B, D] -> [B, D]; its key and value enter the cache."""
    here, seen = slice(position, position + 1), slice(0, position + 1)
    q, k, v = layer.queries_keys_values(x[:, None], cos_sin)
    keys[:, :, here] = k
    values[:, :, here] = v
    attended = F.scaled_dot_product_attention(q, keys[:, :, seen], values[:, :, seen])
    return layer.after_attention(x[:, None], attended)[:, 0]


def start_row(weights: DecoderWeights, cache: DecoderCache, context: Tensor | None) -> None:
    """What the two rows above (and s of this row, [B, w, channels]) add to every gate of the row to come."""
    for i, layer in enumerate(weights.layers):
        above = cache.above[i]  # [B, 2, w + 2, C]
        windows = above.unfold(2, 3, 1).permute(0, 2, 1, 4, 3)  # [B, w, 2 rows, 3 columns, C]
        total = windows.flatten(2) @ layer.above + layer.above_bias
        if layer.context is not None:
            assert context is not None
            total = total + context @ layer.context
        cache.from_above[i] = total
    if weights.direct is not None and context is not None:
        cache.direct_above = context @ weights.direct[1]
    if weights.decoder.surroundings is not None:
        cache.surroundings = weights.decoder.surroundings(context)


def end_row(cache: DecoderCache) -> None:
    """This row becomes the row above."""
    for above, row in zip(cache.above, cache.row, strict=True):
        above[:, 0] = above[:, 1]
        above[:, 1, 1:-1] = row[:, 1:]


def start_pixel(weights: DecoderWeights, cache: DecoderCache, previous: Tensor, row: int, column: int) -> None:
    """Attention at this pixel, and every gate's input from it, from the left and from above.

    previous [B, 24]: embedded pixel before this one in raster order, zeros for the first.
    """
    stack, position = weights.decoder.attention, row * weights.size + column
    x = stack.project(previous)
    if weights.stem is not None:
        assert cache.pixels is not None
        window = cache.pixels[:, row : row + STEM_ROWS, column : column + STEM_COLUMNS]
        x = x + window.flatten(1) @ weights.stem
        if cache.surroundings is not None:
            x = x + cache.surroundings[:, column]
    x, cos_sin = stack.encode_positions(x, slice(position, position + 1))
    for attention, keys, values in zip(stack.layers, cache.keys, cache.values, strict=True):
        x = _attend(attention, x, keys, values, position, cos_sin)
    x = stack.norm(x)
    for i, layer in enumerate(weights.layers):
        gate = cache.from_above[i][:, column] + x @ layer.attention
        cache.gate[i] = torch.addmm(gate, cache.row[i][:, column], layer.left)
    if weights.direct is not None:
        cache.direct = x @ weights.direct[0]
        if cache.direct_above is not None:
            cache.direct = cache.direct + cache.direct_above[:, column]


def channel_logits(weights: DecoderWeights, cache: DecoderCache, column: int, channel: int) -> Tensor:
    """Logits [B, V] of one channel of the current pixel; earlier channels must be in the first layer's `row`.

    All channels of the layers are computed. Those that read what is not known yet do not reach these logits, for the
    masks are in the weights; the last of the three calls leaves every one as it should be.
    """
    x = cache.direct  # [B, R]: nothing yet, but in recipe modern
    decoder = weights.decoder
    for layer, own, row, gate in zip(weights.layers, decoder.layers, cache.row, cache.gate, strict=True):
        a = row[:, column + 1]  # [B, C]
        if layer.down is not None:
            assert x is not None
            a[:] = torch.addmm(layer.down[1], x if own.norm is None else own.norm(x), layer.down[0])
        f, g = torch.addmm(gate, a, layer.current).chunk(2, dim=1)
        change = torch.addmm(layer.up[1], torch.tanh(f) * torch.sigmoid(g), layer.up[0])
        x = change if x is None else x + change
    assert x is not None
    x = F.relu(x) if decoder.norm is None else decoder.norm(x)
    rows = slice(channel * decoder.num_values, (channel + 1) * decoder.num_values)
    return torch.addmm(weights.head[1][rows], x, weights.head[0][:, rows])


@torch.no_grad()
def decode_slice(
    weights: DecoderWeights,
    context: Tensor | None,
    draws: Draws,
    *,
    on_row: Callable[[], None] | None = None,
) -> Tensor:
    """Slices pixel by pixel: s [B, h, w, channels] -> values [B, 3, h, w], chosen by `draws`; on_row after each row."""
    batch = len(draws.uniform)
    cache = new_cache(weights, batch)
    table, values = weights.decoder.intensity.table, weights.decoder.num_values
    units = table.embedding_dim
    previous = torch.zeros_like(cache.row[0][:, 0])
    target = torch.zeros((batch, 3, weights.size, weights.size), dtype=torch.long, device=previous.device)
    for row in range(weights.size):
        start_row(weights, cache, None if context is None else context[:, row].to(previous.dtype))
        for column in range(weights.size):
            start_pixel(weights, cache, previous, row, column)
            pixel = cache.row[0][:, column + 1]
            for channel in range(3):
                logits = channel_logits(weights, cache, column, channel)
                value = draws.choose(logits, row, column, channel)
                target[:, channel, row, column] = value
                pixel[:, channel * units : (channel + 1) * units] = table(value + channel * values)
            previous = pixel
            if cache.pixels is not None:
                cache.pixels[:, row + STEM_ROWS - 1, column + STEM_COLUMNS // 2] = pixel
        end_row(cache)
        if on_row is not None:
            on_row()
    return target
