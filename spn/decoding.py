"""Decoding one slice incrementally: one decoder step a pixel, nothing recomputed that does not change.

  attention   keys and values of earlier pixels are cached;
  PixelCNN    what the rows above contribute (vertical stack, and s) is computed once a row, what the pixel to the left
              and the attention contribute once a pixel;
  R, G, B     each computes only its own group of channels, since masks are block-triangular over groups.
Weights are read through `prepare`, caches are arguments: no module is changed. The logits equal the whole network's.

B batch, h w slice, V values, L PixelCNN layers, C conv channels, R residual channels, D attention width.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from spn.layers import TransformerLayer, group_sizes
from spn.model import SPN, ModernDecoder, PaperDecoder
from spn.modern import STEM_COLUMNS, STEM_ROWS, ModernLayer, rms_norm


@dataclass(frozen=True)
class Draws:
    """What decides the values of a slice, beside the logits. Raises ValueError for a temperature or top_p out of range.

    The same uniform numbers give the same values from the same logits, whichever decoder computes them.
    """

    uniform: Tensor  # [B, 3, h, w] float64 in [0, 1): one number for each value
    temperature: float = 1.0  # divides the logits
    top_p: float | None = None  # mass of the nucleus that values are drawn from, see `pick`; None: all of it
    known: Tensor | None = None  # [B, 3, k, w]: values of the first k rows, taken as they are

    def __post_init__(self) -> None:
        check_temperature(self.temperature)
        check_top_p(self.top_p)

    @property
    def known_rows(self) -> int:
        return 0 if self.known is None else self.known.shape[2]

    def choose(self, logits: Tensor, row: int, column: int, channel: int) -> Tensor:
        """Values [B] at one place of the slice, from its logits [B, V]."""
        if self.known is not None and row < self.known_rows:
            return self.known[:, channel, row, column]
        return pick(logits, self.uniform[:, channel, row, column], self.temperature, self.top_p)


def check_temperature(temperature: float) -> None:
    if not 0 < temperature < float("inf"):
        raise ValueError(f"temperature is {temperature}; it must be above 0")


def check_top_p(top_p: float | None) -> None:
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p is {top_p}; it must be above 0 and at most 1")


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


Observe = Callable[[Tensor, int, int, int], None]  # (logits [B, V], row, column, channel)


@dataclass(frozen=True)
class LayerWeights:
    """One PixelCNN layer with its masked matrices cut into the blocks of each RGB group.

    Gate channels are reordered to (tanh R, sigmoid R, tanh G, sigmoid G, tanh B, sigmoid B), so a group is one range.
    """

    above: Tensor  # [6 C, 2C] vertical convolution and its 1x1 link folded into one map of two rows by three columns
    above_bias: Tensor  # [2C], with the bias of the horizontal stack
    left: Tensor  # [C, 2C]
    context: Tensor | None  # [channels of s, 2C]
    attention: Tensor  # [D, 2C]
    gain: Tensor | None  # [R] of the norm within RGB groups (recipe modern)
    down: tuple[tuple[Tensor, Tensor], ...]  # per group: weight [groups up to it of R, group of C], bias; () if first
    current: tuple[Tensor, ...]  # per group: [groups it may see of C, group of 2C]
    up: tuple[tuple[Tensor, Tensor], ...]  # per group: [groups up to it of C, group of R], bias


@dataclass(frozen=True)
class DecoderWeights:
    """What decoding reads, made once from a Decoder by `prepare`."""

    decoder: PaperDecoder | ModernDecoder
    layers: tuple[LayerWeights, ...]
    stem: Tensor | None  # [rows * columns * 24, D] of recipe modern
    surroundings: Tensor | None  # [channels of s, D]: what attention reads of s (recipe modern)
    direct: tuple[Tensor, Tensor] | None  # of attention [D, R] and of s [channels, R] (recipe modern)
    gain: Tensor | None  # [R] of the norm before the head (recipe modern)
    head: tuple[tuple[Tensor, Tensor], ...]  # per group: [groups up to it of R, V], bias
    conv_ends: tuple[int, ...]  # end of each group in C
    stream_ends: tuple[int, ...]  # end of each group in R
    height: int
    width: int


@dataclass
class DecoderCache:
    """State of decoding one batch of slices; `new_cache` makes it, the steps below advance it."""

    keys: list[Tensor]  # per attention layer [B, heads, h * w, D / heads]
    values: list[Tensor]
    above: list[Tensor]  # per PixelCNN layer [B, 2, w + 2, C]: its input in the two rows above, zero-padded
    row: list[Tensor]  # per layer [B, w + 1, C]: its input in this row, after one column of padding
    from_above: list[Tensor]  # per layer [B, w, 2C]: what rows above and s add to the gate in this row
    gate: list[Tensor]  # per layer [B, 2C]: pre-activation of this pixel, all but the pixel itself
    hidden: list[Tensor]  # per layer [B, C]: gated activations of this pixel
    surroundings: Tensor | None  # [B, w, D]: what s adds to the input of attention in this row (recipe modern)
    direct_above: Tensor | None  # [B, w, R]: what s adds to the stream in this row (recipe modern)
    direct: Tensor | None  # [B, R]: what attention and s add to the stream at this pixel (recipe modern)
    pixels: Tensor | None  # [B, h + 3, w + 6, 24]: embedded pixels so far, zero-padded, for the stem of recipe modern
    normed: list[Tensor]  # per layer with a norm: the stream before it, normed [B, R]
    features: Tensor  # [B, R]: the normed stream that the head reads (recipe modern)
    streams: list[Tensor]  # after each layer [B, R]: a later group reads what earlier groups were at *that* depth


def _ends(num_channels: int) -> tuple[int, ...]:
    return tuple(itertools.accumulate(group_sizes(num_channels)))


@torch.no_grad()
def prepare(model: SPN) -> DecoderWeights:
    """Cut the decoder's masked weights into the blocks that decoding uses; copies, never changes them."""
    decoder, own = model.decoder, model.config.decoder
    conv, stream = _ends(own.conv_channels), _ends(own.residual_channels)
    starts = (0, *conv[:-1])
    attn_width = own.num_attn_heads * own.attn_head_dim
    order = torch.cat(
        [
            torch.cat([torch.arange(lo, hi), torch.arange(lo, hi) + own.conv_channels])
            for lo, hi in zip(starts, conv, strict=True)
        ]
    )
    layers = []
    for layer in decoder.layers:
        local = _ends(24) if layer.is_first else conv
        link = layer.link.weight[order]
        assert layer.vertical.bias is not None
        fold = torch.einsum("og,gcyx->yxco", link, layer.vertical.weight).flatten(0, 2)  # [6 C, 2C]
        cond = layer.cond.weight[order].t()
        current, up, down = layer.current.masked_weight()[order], layer.up.masked_weight(), []
        blocks, ups = [], []
        for group in range(3):
            lo, hi = starts[group], conv[group]
            # The first layer (mask A) sees only earlier groups of the pixel, later layers (mask B) also their own.
            seen = (0, *local)[group] if layer.is_first else local[group]
            blocks.append(current[2 * lo : 2 * hi, :seen].t().contiguous())
            rows = slice((0, *stream)[group], stream[group])
            ups.append((up[rows, :hi].t().contiguous(), layer.up.bias[rows].clone()))
            if layer.down is not None:
                weight = layer.down.masked_weight()[lo:hi, : stream[group]]
                down.append((weight.t().contiguous(), layer.down.bias[lo:hi].clone()))
        layers.append(
            LayerWeights(
                above=fold.contiguous(),
                above_bias=link @ layer.vertical.bias + layer.current.bias[order],
                left=layer.left.weight[order].t().contiguous(),
                context=cond[attn_width:].contiguous() if model.embedder is not None else None,
                attention=cond[:attn_width].contiguous(),
                gain=None if layer.norm is None else layer.norm.gain.clone(),
                down=tuple(down),
                current=tuple(blocks),
                up=tuple(ups),
            )
        )
    values, head = decoder.num_values, decoder.head.masked_weight()
    heads = tuple(
        (
            head[g * values : (g + 1) * values, : stream[g]].t().contiguous(),
            decoder.head.bias[g * values : (g + 1) * values].clone(),
        )
        for g in range(3)
    )
    size = model.config.slice_size
    stem = surroundings = direct = gain = None
    if isinstance(decoder, ModernDecoder):
        stem = decoder.stem.masked_weight().permute(2, 3, 1, 0).flatten(0, 2).contiguous()
        if decoder.surroundings is not None:
            surroundings = decoder.surroundings.weight.t().contiguous()
        maps = decoder.direct.weight.t()
        direct = (maps[:attn_width].contiguous(), maps[attn_width:].contiguous())
        gain = decoder.norm.gain.clone()
    return DecoderWeights(decoder, tuple(layers), stem, surroundings, direct, gain, heads, conv, stream, size, size)


def new_cache(weights: DecoderWeights, batch: int) -> DecoderCache:
    """An empty cache for a batch of slices, of the weights' type and device."""
    like = weights.layers[0].left
    attention = weights.decoder.attention
    length = weights.height * weights.width

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=like.dtype, device=like.device)

    heads = [layer.num_heads if isinstance(layer, ModernLayer) else layer.attn.num_heads for layer in attention.layers]
    width = attention.norm.weight.shape[0]
    rows, columns = weights.height + STEM_ROWS - 1, weights.width + STEM_COLUMNS - 1
    inputs = [layer.left.shape[0] for layer in weights.layers]
    gates = [layer.left.shape[1] for layer in weights.layers]
    return DecoderCache(
        keys=[zeros(batch, n, length, width // n) for n in heads],
        values=[zeros(batch, n, length, width // n) for n in heads],
        above=[zeros(batch, 2, weights.width + 2, c) for c in inputs],
        row=[zeros(batch, weights.width + 1, c) for c in inputs],
        from_above=[zeros(batch, weights.width, g) for g in gates],
        gate=[zeros(batch, g) for g in gates],
        hidden=[zeros(batch, weights.conv_ends[-1]) for _ in gates],
        surroundings=None,
        direct_above=None,
        direct=None,
        pixels=None if weights.stem is None else zeros(batch, rows, columns, weights.layers[0].left.shape[0]),
        normed=[zeros(batch, weights.stream_ends[-1] if layer.gain is not None else 0) for layer in weights.layers],
        features=zeros(batch, weights.stream_ends[-1] if weights.gain is not None else 0),
        streams=[zeros(batch, weights.stream_ends[-1]) for _ in gates],
    )


def _attend(layer: TransformerLayer, x: Tensor, keys: Tensor, values: Tensor, position: int) -> Tensor:
    """One position of one attention layer: x [B, D] -> [B, D]; its key and value enter the cache."""
    batch, heads, _, head_dim = keys.shape
    q, k, v = layer.attn.qkv(layer.attn_norm(x)).view(batch, 3, heads, head_dim).unbind(1)
    keys[:, :, position] = k
    values[:, :, position] = v
    seen = slice(0, position + 1)
    y = F.scaled_dot_product_attention(q[:, :, None], keys[:, :, seen], values[:, :, seen])
    x = x + layer.attn.out(y.reshape(batch, -1))
    return x + layer.memory(layer.memory_norm(x))


def _attend_modern(layer: ModernLayer, x: Tensor, keys: Tensor, values: Tensor, position: int, turns: Tensor) -> Tensor:
    """The same for a layer of recipe modern."""
    here, seen = slice(position, position + 1), slice(0, position + 1)
    q, k, v = layer.queries_keys_values(x[:, None], turns[:, here])
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
    if weights.surroundings is not None:
        assert context is not None
        cache.surroundings = context @ weights.surroundings


def end_row(cache: DecoderCache) -> None:
    """This row becomes the row above."""
    for above, row in zip(cache.above, cache.row, strict=True):
        above[:, 0] = above[:, 1]
        above[:, 1, 1:-1] = row[:, 1:]


def start_pixel(weights: DecoderWeights, cache: DecoderCache, previous: Tensor, row: int, column: int) -> None:
    """Attention at this pixel, and every gate's input from it, from the left and from above.

    previous [B, 24]: embedded pixel before this one in raster order, zeros for the first.
    """
    decoder, position = weights.decoder, row * weights.width + column
    x = decoder.attention.project(previous)
    if isinstance(decoder, ModernDecoder):
        assert cache.pixels is not None and weights.stem is not None
        window = cache.pixels[:, row : row + STEM_ROWS, column : column + STEM_COLUMNS]
        x = x + window.flatten(1) @ weights.stem
        if cache.surroundings is not None:
            x = x + cache.surroundings[:, column]
        for modern, keys, values in zip(decoder.attention.layers, cache.keys, cache.values, strict=True):
            x = _attend_modern(modern, x, keys, values, position, decoder.attention.turns)
    else:
        x = x + decoder.attention.timing[position].to(x.dtype)
        for paper, keys, values in zip(decoder.attention.layers, cache.keys, cache.values, strict=True):
            x = _attend(paper, x, keys, values, position)
    x = decoder.attention.norm(x)
    for i, layer in enumerate(weights.layers):
        gate = cache.from_above[i][:, column] + x @ layer.attention
        cache.gate[i] = torch.addmm(gate, cache.row[i][:, column], layer.left)
    if weights.direct is not None:
        cache.direct = x @ weights.direct[0]
        if cache.direct_above is not None:
            cache.direct = cache.direct + cache.direct_above[:, column]


def channel_logits(weights: DecoderWeights, cache: DecoderCache, column: int, channel: int) -> Tensor:
    """Logits [B, V] of one channel of the current pixel; earlier channels must be in the first layer's `row`."""
    lo, hi = (0, *weights.conv_ends)[channel], weights.conv_ends[channel]
    seen = weights.stream_ends[channel]
    own = slice((0, *weights.stream_ends)[channel], seen)
    for i, layer in enumerate(weights.layers):
        a = cache.row[i][:, column + 1]  # [B, C]
        if layer.down:
            weight, bias = layer.down[channel]
            before = cache.streams[i - 1]
            if layer.gain is not None:
                cache.normed[i][:, own] = rms_norm(before[:, own]) * layer.gain[own]
                before = cache.normed[i]
            a[:, lo:hi] = torch.addmm(bias, before[:, :seen], weight)
        current = layer.current[channel]
        gate = cache.gate[i][:, 2 * lo : 2 * hi]
        if current.shape[0]:
            gate = torch.addmm(gate, a[:, : current.shape[0]], current)
        f, g = gate.chunk(2, dim=1)
        cache.hidden[i][:, lo:hi] = torch.tanh(f) * torch.sigmoid(g)
        weight, bias = layer.up[channel]
        change = torch.addmm(bias, cache.hidden[i][:, :hi], weight)
        if layer.down:
            change = change + cache.streams[i - 1][:, own]
        elif cache.direct is not None:
            change = change + cache.direct[:, own]
        cache.streams[i][:, own] = change
    weight, bias = weights.head[channel]
    stream = cache.streams[-1]
    if weights.gain is None:
        return torch.addmm(bias, F.relu(stream[:, :seen]), weight)
    cache.features[:, own] = rms_norm(stream[:, own]) * weights.gain[own]
    return torch.addmm(bias, cache.features[:, :seen], weight)


@torch.no_grad()
def decode_slice(
    weights: DecoderWeights,
    context: Tensor | None,
    draws: Draws,
    *,
    on_row: Callable[[], None] | None = None,
    on_logits: Observe | None = None,
) -> Tensor:
    """Decode slices pixel by pixel: context s [B, h, w, channels] -> values [B, 3, h, w], chosen by `draws`.

    on_row is called after each row, on_logits with what each value was chosen from.
    """
    batch = len(draws.uniform)
    cache = new_cache(weights, batch)
    table, values = weights.decoder.intensity.table, weights.decoder.num_values
    units = table.embedding_dim
    target = torch.zeros((batch, 3, weights.height, weights.width), dtype=torch.long, device=cache.streams[0].device)
    previous = torch.zeros_like(cache.row[0][:, 0])
    for row in range(weights.height):
        start_row(weights, cache, None if context is None else context[:, row].to(cache.streams[0].dtype))
        for column in range(weights.width):
            start_pixel(weights, cache, previous, row, column)
            pixel = cache.row[0][:, column + 1]
            for channel in range(3):
                logits = channel_logits(weights, cache, column, channel)
                if on_logits is not None:
                    on_logits(logits, row, column, channel)
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
