"""Fast forms of a network for training on a GPU. Parameters, state dict and results stay those of the plain forms.

  shifts      a bias that is added to the wide residual stream is added to a small vector instead: the stream is
              x + shift, and no bias costs a pass over it, forward or backward;
  groups      five PixelCNN layers read and write the wide stream once (`run_group`);
  filters     both stacks of a PixelCNN layer are one masked 3x3 filter, and the conditioning of all layers one product;
  slots       the embedder's input is never made: each slice is embedded once and meets the columns of its slot;
  tables      the gradient of the intensity tables is summed by a Triton kernel;
  compiling   torch.compile with settings for these networks.

B batch, h w slice, D attention width, C conv channels, R residual channels, V values.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spn.layers import GatedPixelCNNLayer, IntensityEmbedding, ParameterAttention, ResidualBlock, run_layer
from spn.model import META_UNITS, Decoder, SliceEmbedder
from spn.ordering import target_slices

LAYERS_A_GROUP = 5  # PixelCNN layers between two updates of the wide stream
MEMORY_PARTS = 16  # of the positions that attend to learned rows, so that the backward pass fills a GPU

# Where a graph has convolutions, the compiler by default lays out all tensors of four axes as images, channels last:
# here also the heads of attention and the streams [B, h, w, C], whose last axis it takes for a width. All of them were
# transposed before and after each use. The convolutions need no help: what they read lies channels last already.
OPTIONS = {"layout_optimization": False}
# The compiler keeps whole graphs on the disk only if it knows that nothing outside of them decides what their functions
# do, which holds for these. Otherwise it keeps no more than the kernels, and each start traces all gradients again.
CACHEABLE: dict[str, Any] = {
    "unsafe_marked_cacheable_functions": {
        "torch.ops.higher_order.autograd_function_apply": "",
        "torch.amp.autocast_mode._enter_autocast": "",
        "torch.amp.autocast_mode._exit_autocast": "",
    }
}


def speed_up(model: nn.Module, *, compiled: bool = False) -> Callable[..., Tensor]:
    """Gives the network its fast forms, in place, and returns what a training step calls instead of it.

    compiled: the network through torch.compile, compiled at the first call for each shape of a batch.
    """
    for module in model.modules():
        module.__class__ = FAST_FORMS.get(type(module), type(module))
    if not compiled:
        return model
    from torch._inductor import config

    kept = {name: value for name, value in CACHEABLE.items() if hasattr(config, name)}  # not in older versions
    return torch.compile(model, options={**OPTIONS, **kept})


# ---- sums ---------------------------------------------------------------------------------------------------------


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


class _Shifted(torch.autograd.Function):
    """x + shift, or x itself where others add the shift; the shift gets the gradient of the sum either way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shift: Tensor, added: bool) -> Tensor:
        ctx.shift_dtype = shift.dtype
        return x + shift.to(x.dtype) if added else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return grad, _sum_over_positions(grad, ctx.shift_dtype), None


def add_shift(x: Tensor, shift: Tensor) -> Tensor:
    """x [..., R] + shift [R], in x's precision."""
    return _Shifted.apply(x, shift, True)


def bias_in_shift(x: Tensor, bias: Tensor) -> Tensor:
    """x of a stream x + shift whose shift grew by `bias`, where all uses of the stream take its sum.

    Then the bias's gradient is that of x. The shift itself needs none, and no gradient is written beside the stream's.
    """
    return _Shifted.apply(x, bias, False)


# ---- PixelCNN -----------------------------------------------------------------------------------------------------


def masked_filter(layer: GatedPixelCNNLayer) -> tuple[Tensor, Tensor]:
    """Both stacks as one masked 3x3 filter [2C, C, 3, 3], and its bias: they are linear up to the gate.

    Rows r-2 and r-1 hold the vertical stack with its link, row r the pixel to the left, the pixel itself (masked over
    RGB groups) and nothing to its right.
    """
    with weight_products(layer.link.weight.device.type):
        above = torch.einsum("og,gcyx->ocyx", layer.link.weight, layer.vertical.weight)
        taps = [layer.left.weight, layer.current.masked_weight(), torch.zeros_like(layer.left.weight)]
        assert layer.vertical.bias is not None
        weight = torch.cat([above, torch.stack(taps, dim=-1)[:, :, None]], dim=2)
        return weight, layer.current.bias + layer.link.weight @ layer.vertical.bias


def gated(layer: GatedPixelCNNLayer, a: Tensor, cond: Tensor) -> Tensor:
    """a [B, h, w, C] (first layer: embedded pixels), cond [B, h, w, 2C]: layer.cond(…) -> y [B, h, w, C]."""
    weight, bias = masked_filter(layer)
    around = F.pad(a, (0, 0, 1, 1, 2, 0)).permute(0, 3, 1, 2)  # two rows above, a column on either side
    gate = F.conv2d(around, weight, bias).permute(0, 2, 3, 1) + cond  # [B, h, w, 2C]
    f, g = gate.chunk(2, dim=-1)
    return torch.tanh(f) * torch.sigmoid(g)


def run_group(
    layers: Sequence[GatedPixelCNNLayer], x: Tensor, shift: Tensor | None, conds: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Layers without norm one after another, over one reading and one writing of the wide stream.

    x [B, h, w, R], shift [R] (first layer: embedded pixels, None), conds one for each layer -> the new x and shift.
    Between the stream and a layer stands a linear map, so what a layer adds reaches a later one of the group through
    the product of its map up and the other's map down, both masked: C channels wide instead of R.
    """
    with weight_products(x.device.type):
        up = torch.cat([layer.up.masked_weight() for layer in layers], dim=1)  # [R, group * C]
        downs: list[Any] = [None if layer.down is None else layer.down.masked_weight() for layer in layers]
        sums = [torch.zeros_like(layers[0].up.bias) if shift is None else shift]  # the shift before each layer
        for layer in layers:
            sums.append(sums[-1] + layer.up.bias)
        biases: list[Any] = [
            None if layer.down is None else layer.down.bias + down @ before
            for layer, down, before in zip(layers, downs, sums[:-1], strict=True)
        ]
    narrow: Any = None if shift is None else F.linear(x, torch.cat(downs), torch.cat(biases)).chunk(len(layers), dim=-1)
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
        found.append(gated(layer, a, conds[number]))
    y = torch.cat(found, dim=-1)
    return (F.linear(y, up) if shift is None else add_product(x, y, up)), sums[-1]


def run_normed(layer: GatedPixelCNNLayer, x: Tensor, shift: Tensor | None, cond: Tensor) -> tuple[Tensor, Tensor]:
    """One layer of recipe modern, whose norm reads the whole stream; arguments as of `run_group`."""
    if shift is None:
        return F.linear(gated(layer, x, cond), layer.up.masked_weight()), layer.up.bias
    assert layer.down is not None and layer.norm is not None
    y = gated(layer, layer.down(layer.norm(add_shift(x, shift))), cond)
    return add_product(x, y, layer.up.masked_weight()), shift + layer.up.bias


def conditioning(layers: Sequence[GatedPixelCNNLayer], attended: Tensor, context: Tensor | None) -> tuple[Tensor, Any]:
    """attended [B, h, w, D], s [B, h, w, channels] -> both as one, and each layer's map of it [B, h, w, 2C]."""
    cond = attended if context is None else torch.cat([attended, context.to(attended.dtype)], dim=-1)
    return cond, F.linear(cond, torch.cat([layer.cond.weight for layer in layers])).chunk(len(layers), dim=-1)


class FastDecoder(Decoder):
    """PixelCNN layers in groups; in recipe modern one by one, since norms stand between them."""

    layers_a_group = LAYERS_A_GROUP

    def forward(self, target: Tensor, context: Tensor | None) -> Tensor:
        pixels = self.intensity(target.permute(0, 2, 3, 1))  # [B, h, w, 24]
        attended = self.attention(self.attention_input(pixels, context))
        layers = list(self.layers)
        cond, conds = conditioning(layers, attended.unflatten(1, target.shape[2:]), context)
        x, shift = pixels, cast("Tensor", None)  # the first layer starts both
        if self.direct is None:
            # torch.compile cannot recompute what several layers of a group share
            size = 1 if self.recompute else self.layers_a_group
            for start in range(0, len(layers), size):
                group = slice(start, start + size)
                x, shift = run_layer(run_group, layers[group], x, shift, conds[group], recompute=self.recompute)
        else:
            for layer, own in zip(layers, conds, strict=True):
                x, shift = run_layer(run_normed, layer, x, shift, own, recompute=self.recompute)
                if layer.is_first:
                    x = add_product(x, cond, self.direct.weight)
        return self.logits(add_shift(x, shift))


# ---- embedder -----------------------------------------------------------------------------------------------------


def run_block(block: ResidualBlock, x: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    """x [B, h, w, R], shift [R] -> the new x and shift; gradients reach the biases in shift by x."""
    y = F.relu(block.down(F.relu(x + shift.to(x.dtype)))).permute(0, 3, 1, 2)  # [B, C, h, w]
    y = F.relu(block.conv(y)).permute(0, 2, 3, 1)
    bias = block.up.bias
    return bias_in_shift(add_product(x, y, block.up.weight), bias), shift + bias.detach()


class FastSliceEmbedder(SliceEmbedder):
    """Each slice embedded once, empty slots left out, biases of the stream in a shift."""

    def forward(self, slices: Tensor, index: Tensor, given: Tensor | None) -> Tensor:
        x = self.projected(slices, index, given)
        if self.stem is not None:
            x = x + self.stem(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        x = self.attention(x.flatten(1, 2)).view(x.shape)
        x, shift = bias_in_shift(F.linear(x, self.widen.weight), self.widen.bias), self.widen.bias.detach()
        for block in self.blocks:
            x, shift = run_layer(run_block, block, x, shift, recompute=self.recompute)
        return self.out(F.relu(x + shift.to(x.dtype)))

    def projected(self, slices: Tensor, index: Tensor, given: Tensor | None) -> Tensor:
        """project(slots(…)): of the map's columns each target gets those of the slots that its slices fill."""
        batch, num_slices, _, height, width = slices.shape
        num_slots, project = self.sources.shape[1], self.attention.project
        sizes = [num_slots * 24, META_UNITS] + ([num_slices * 24, 24] if self.given_intensity is not None else [])
        columns = project.weight.split(sizes, dim=1)
        fills = self.sources[index, None] == torch.arange(num_slices, device=index.device)[:, None]  # [B, S*S, slots]
        by_slot = columns[0].unflatten(1, (num_slots, 24)).permute(1, 2, 0).flatten(1)  # [slots, 24 * D]
        weight = (fills.to(by_slot.dtype) @ by_slot).view(batch, num_slices * 24, -1)
        seen = self.intensity(slices.permute(0, 3, 4, 1, 2)).flatten(3)  # [B, h, w, S*S * 24]
        x = (seen.flatten(1, 2) @ weight).view(batch, height, width, -1)
        x = x + F.linear(self.meta_position(index), columns[1], project.bias)[:, None, None]
        if self.given_intensity is None:
            return x
        assert given is not None
        own = target_slices(given, index)
        x = x + F.linear(self.given_intensity(given.permute(0, 3, 4, 1, 2)).flatten(3), columns[2])
        return x + F.linear(self.given_intensity(own.permute(0, 2, 3, 1)), columns[3])


# ---- attention to learned rows ------------------------------------------------------------------------------------


class FastParameterAttention(ParameterAttention):
    """Positions in a few parts: the backward pass works on blocks of rows, too few in one part to fill a GPU."""

    def forward(self, x: Tensor) -> Tensor:
        q = self.query(x).view(-1, self.num_heads, self.keys.shape[-1])  # [positions, heads, d]
        values = self.dropped_values()
        parts = math.gcd(len(q), MEMORY_PARTS) if q.is_cuda else 1
        keys, values = (rows.to(q.dtype).expand(parts, -1, -1, -1) for rows in (self.keys, values))
        y = F.scaled_dot_product_attention(q.unflatten(0, (parts, -1)).transpose(1, 2), keys, values, scale=1.0)
        return self.out(y.transpose(1, 2).reshape(x.shape))


# ---- tables of intensities ----------------------------------------------------------------------------------------


@torch.library.custom_op("spn::table_gradient", mutates_args=())
def table_gradient(grad: Tensor, values: Tensor, num_values: int) -> Tensor:
    """Each value's sum of rows: grad [N, 3, units], values [N, 3] uint8, both contiguous -> [3, V, units].

    At least float32.
    """
    if grad.is_cuda and grad.dtype == torch.bfloat16:
        from spn.gpu import kernels  # needs Triton, which only a GPU's torch brings

        return kernels.table_gradient(grad, values, num_values)
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


class TableLookup(torch.autograd.Function):
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


class FastIntensityEmbedding(IntensityEmbedding):
    """On a GPU looked up by TableLookup, in autocast's type."""

    def forward(self, values: Tensor) -> Tensor:
        if not values.is_cuda:
            return super().forward(values)
        weight = self.table.weight
        dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else weight.dtype
        return TableLookup.apply(weight.view(3, -1, weight.shape[1]), values.long(), dtype).flatten(-2)


FAST_FORMS: dict[type[nn.Module], type[nn.Module]] = {
    Decoder: FastDecoder,
    SliceEmbedder: FastSliceEmbedder,
    ParameterAttention: FastParameterAttention,
    IntensityEmbedding: FastIntensityEmbedding,
}
