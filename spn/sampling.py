"""Sampling one slice, one image and a whole chain of stages, without recomputing what does not change (paper 3.4).

One slice costs one pass of the embedder and one decoder step a pixel:
  attention   keys and values of earlier pixels are cached;
  PixelCNN    what the rows above contribute (vertical stack, and s) is computed once a row, what the pixel to the left
              and the attention contribute once a pixel;
  R, G, B     each computes only its own group of channels, since masks are block-triangular over groups.
Weights are read through `prepare`, caches are arguments: no module is changed. `sample_slice_slowly` is the reference.

B batch, H W image, h w slice, V values, L PixelCNN layers, C conv channels, R residual channels, D attention width.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from spn.bitdepth import join_depth
from spn.layers import TransformerLayer, channel_groups
from spn.model import SPN, Decoder
from spn.ordering import image_to_slices, slices_to_image

Choose = Callable[[Tensor, int, int, int], Tensor]  # (logits [B, V], row, column, channel) -> values [B]


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
    down: tuple[tuple[Tensor, Tensor], ...]  # per group: weight [groups up to it of R, group of C], bias; () if first
    current: tuple[Tensor, ...]  # per group: [groups it may see of C, group of 2C]
    up: tuple[tuple[Tensor, Tensor], ...]  # per group: [groups up to it of C, group of R], bias


@dataclass(frozen=True)
class DecoderWeights:
    """What decoding reads, made once from a Decoder by `prepare`."""

    decoder: Decoder
    layers: tuple[LayerWeights, ...]
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
    streams: list[Tensor]  # after each layer [B, R]: a later group reads what earlier groups were at *that* depth


def _ends(num_channels: int) -> tuple[int, ...]:
    return tuple(torch.bincount(channel_groups(num_channels), minlength=3).cumsum(0).tolist())


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
    return DecoderWeights(decoder, tuple(layers), heads, conv, stream, size, size)


def new_cache(weights: DecoderWeights, batch: int) -> DecoderCache:
    """An empty cache for a batch of slices, of the weights' type and device."""
    like = weights.layers[0].left
    attention = weights.decoder.attention
    length = weights.height * weights.width

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=like.dtype, device=like.device)

    heads = [layer.attn.num_heads for layer in attention.layers]
    width = attention.project.out_features
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


def end_row(cache: DecoderCache) -> None:
    """This row becomes the row above."""
    for above, row in zip(cache.above, cache.row, strict=True):
        above[:, 0] = above[:, 1]
        above[:, 1, 1:-1] = row[:, 1:]


def start_pixel(weights: DecoderWeights, cache: DecoderCache, previous: Tensor, row: int, column: int) -> None:
    """Attention at this pixel, and every gate's input from it, from the left and from above.

    previous [B, 24]: embedded pixel before this one in raster order, zeros for the first.
    """
    attention = weights.decoder.attention
    position = row * weights.width + column
    x = attention.project(previous) + attention.timing[position].to(previous.dtype)
    for layer, keys, values in zip(attention.layers, cache.keys, cache.values, strict=True):
        x = _attend(layer, x, keys, values, position)
    x = attention.norm(x)
    for i, layer in enumerate(weights.layers):
        gate = cache.from_above[i][:, column] + x @ layer.attention
        cache.gate[i] = torch.addmm(gate, cache.row[i][:, column], layer.left)


def channel_logits(weights: DecoderWeights, cache: DecoderCache, column: int, channel: int) -> Tensor:
    """Logits [B, V] of one channel of the current pixel; earlier channels must be in the first layer's `row`."""
    lo, hi = (0, *weights.conv_ends)[channel], weights.conv_ends[channel]
    seen = weights.stream_ends[channel]
    own = slice((0, *weights.stream_ends)[channel], seen)
    for i, layer in enumerate(weights.layers):
        a = cache.row[i][:, column + 1]  # [B, C]
        if layer.down:
            weight, bias = layer.down[channel]
            a[:, lo:hi] = torch.addmm(bias, cache.streams[i - 1][:, :seen], weight)
        current = layer.current[channel]
        gate = cache.gate[i][:, 2 * lo : 2 * hi]
        if current.shape[0]:
            gate = torch.addmm(gate, a[:, : current.shape[0]], current)
        f, g = gate.chunk(2, dim=1)
        cache.hidden[i][:, lo:hi] = torch.tanh(f) * torch.sigmoid(g)
        weight, bias = layer.up[channel]
        change = torch.addmm(bias, cache.hidden[i][:, :hi], weight)
        cache.streams[i][:, own] = change + cache.streams[i - 1][:, own] if layer.down else change
    weight, bias = weights.head[channel]
    return torch.addmm(bias, F.relu(cache.streams[-1][:, :seen]), weight)


@torch.no_grad()
def decode_slice(
    weights: DecoderWeights,
    batch: int,
    context: Tensor | None,
    choose: Choose,
    *,
    on_row: Callable[[], None] | None = None,
) -> Tensor:
    """Decode slices pixel by pixel, each value picked by `choose`; context s [B, h, w, channels] -> [B, 3, h, w]."""
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
                value = choose(logits, row, column, channel)
                target[:, channel, row, column] = value
                pixel[:, channel * units : (channel + 1) * units] = table(value + channel * values)
            previous = pixel
        end_row(cache)
        if on_row is not None:
            on_row()
    return target


def incremental_logits(model: SPN, target: Tensor, context: Tensor | None) -> Tensor:
    """Logits [B, 3, V, h, w] of a given slice, the incremental way; equal to model.decoder(target, context)."""
    logits = target.new_zeros((*target.shape[:2], model.config.num_values, *target.shape[2:]), dtype=torch.float64)

    def record(step: Tensor, row: int, column: int, channel: int) -> Tensor:
        logits[:, channel, :, row, column] = step.to(logits.dtype)
        return target[:, channel, row, column].long()

    decode_slice(prepare(model), len(target), context, record)
    return logits


def pick(logits: Tensor, uniform: Tensor, temperature: float) -> Tensor:
    """Values [B] drawn from softmax(logits / temperature) [B, V] by inverting its distribution at uniform [B]."""
    probabilities = torch.softmax(logits.double() / temperature, dim=-1)
    values = (probabilities.cumsum(-1) <= uniform[:, None]).sum(-1)
    return values.clamp(max=logits.shape[-1] - 1)


def uniforms(seed: int, *, stage: str, images: Sequence[int], image_size: int) -> Tensor:
    """[B, 3, H, W] float64 in [0, 1): the randomness of each image, by its index alone, whatever batch it is drawn in.

    From NumPy's Philox, keyed by 128 bits: torch's CPU generator keeps 32 bits of a seed, so that two of 50,000 images
    would share their draws with a chance of a quarter.
    """
    rows = []
    for index in images:
        digest = hashlib.blake2b(f"{seed}/{stage}/{index}".encode(), digest_size=16).digest()
        generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
        rows.append(torch.from_numpy(generator.random((3, image_size, image_size))))
    return torch.stack(rows)


@torch.no_grad()
def sample_stage(
    model: SPN,
    uniform: Tensor,
    *,
    given: Tensor | None = None,
    first_slice: Tensor | None = None,
    temperature: float = 1.0,
    on_row: Callable[[], None] | None = None,
) -> Tensor:
    """Sample what one stage generates: an image [B, 3, H, W], or for a first_slice stage one slice [B, 3, h, w].

    uniform [B, 3, H, W]: `uniforms`, one number for each value of the image. given [B, 3, H, W]: more significant
    bits, for depth upscaling. first_slice [B, 3, h, w]: slice (0, 0), kept as it is, for size upscaling. `on_row` is
    called after each row of pixels of each slice.
    """
    assert not model.training, "dropout would draw from another network than the one at hand"
    if temperature <= 0:
        raise ValueError(f"temperature is {temperature}; it must be above 0")
    config, weights, batch = model.config, prepare(model), len(uniform)
    numbers = image_to_slices(uniform, config.scaling_factor)
    size = config.slice_size
    slices = torch.zeros((batch, config.num_slices, 3, size, size), dtype=torch.long, device=uniform.device)
    todo = range(config.num_slices)
    if first_slice is not None:
        slices[:, 0], todo = first_slice, todo[1:]
    elif config.stage == "first_slice":
        todo = todo[:1]
    for number in todo:
        index = torch.full((batch,), number, device=uniform.device)
        context = model.context(slices_to_image(slices, config.scaling_factor), index, given)

        def choose(logits: Tensor, row: int, column: int, channel: int, own: Tensor = numbers[:, number]) -> Tensor:
            return pick(logits, own[:, channel, row, column], temperature)

        slices[:, number] = decode_slice(weights, batch, context, choose, on_row=on_row)
    if config.stage == "first_slice":
        return slices[:, 0]
    return slices_to_image(slices, config.scaling_factor)


def rows_to_sample(models: Mapping[str, SPN]) -> int:
    """Rows of pixels that a chain decodes for one batch: the number of `on_row` calls of `sample_chain`."""
    rows = 0
    for model in models.values():
        num = 1 if model.config.stage == "first_slice" else model.config.num_slices
        if model.config.stage == "size_upscale" and "first_slice" in models:
            num -= 1
        rows += num * model.config.slice_size
    return rows


def sample_chain(
    models: Mapping[str, SPN],
    *,
    seed: int,
    images: Sequence[int],
    temperature: Mapping[str, float] | None = None,
    on_row: Callable[[], None] | None = None,
) -> dict[str, Tensor]:
    """Sample images through all stages in order: {stage: what is known after it}.

    first_slice gives [B, 3, h, w] of d1 bits, size_upscale (or baseline) [B, 3, H, W] of d1 bits, each depth_upscale
    the image at its depth. models are in the order of generation; images are the indices that seed each image's draws.
    """
    known: dict[str, Tensor] = {}
    first_slice: Tensor | None = None
    image: Tensor | None = None
    for stage, model in models.items():
        config = model.config
        device = next(model.parameters()).device
        uniform = uniforms(seed, stage=stage, images=images, image_size=config.image_size).to(device)
        drawn = sample_stage(
            model,
            uniform,
            given=image if config.num_given_bits else None,
            first_slice=first_slice if config.stage == "size_upscale" else None,
            temperature=(temperature or {}).get(stage, 1.0),
            on_row=on_row,
        )
        if config.stage == "first_slice":
            first_slice = drawn
        elif config.num_given_bits:
            assert image is not None, f"{stage} needs an image of more significant bits"
            image = drawn = join_depth(image, drawn, num_bits=config.num_bits)
        else:
            image = drawn
        known[stage] = drawn
    return known


@torch.no_grad()
def sample_slice_slowly(model: SPN, context: Tensor | None, uniform: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Reference: one whole forward for each value; uniform [B, 3, h, w] -> [B, 3, h, w]."""
    batch, _, height, width = uniform.shape
    target = torch.zeros((batch, 3, height, width), dtype=torch.long, device=uniform.device)
    for row in range(height):
        for column in range(width):
            for channel in range(3):
                logits = model.decoder(target, context)[:, channel, :, row, column]
                target[:, channel, row, column] = pick(logits, uniform[:, channel, row, column], temperature)
    return target
