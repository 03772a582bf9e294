"""Weights of one decoder as the fused kernels read them (fused.py): folded, padded, normed, rounded once.

  folded      the paper's residual stream is linear between two gates, so what layer j adds to the gate of layer i is
              one map (current . down_i . up_j); within a pixel, one small product per layer remains sequential.
              Recipe modern norms the stream and is decoded layer by layer;
  mixed       what an attention adds to its stream is also part of the next product: W_2 (x + W_1 a) is
              W_2 x + (W_2 W_1) a, both of which are there when the attention ends (paper; kernels.mix);
  padded      RGB groups are padded to one size, a multiple of 16 channels, so that every tile of a weight is aligned;
  normed      a norm is one factor per row, applied after the product; its gain and its mean are in the weights.

V values, L PixelCNN layers, D attention width; P and R channels of one padded group of the convolutions and of the
stream, G = 6 P channels of a gate: R, G, B, of each tanh and sigmoid.
"""

from __future__ import annotations

import dataclasses
import re
from itertools import zip_longest

import torch
from torch import Tensor, nn

from spn.gpu.training import FastDecoder
from spn.layers import GatedPixelCNNLayer, TransformerLayer, group_sizes
from spn.model import SPN, Decoder
from spn.modern import ModernLayer

ALIGN = 16  # channels


def _padded(num_channels: int) -> int:
    """Channels of one group, padded."""
    return -(-max(group_sizes(num_channels)) // ALIGN) * ALIGN


def _spread(x: Tensor, dim: int, padded: int) -> Tensor:
    """Axis `dim` from channels to three padded groups, filled with zeros."""
    sizes = group_sizes(x.shape[dim])
    shape = list(x.shape)
    shape[dim] = 3 * padded
    out = x.new_zeros(shape)
    for group, part in enumerate(x.split(sizes, dim)):
        out.narrow(dim, group * padded, sizes[group]).copy_(part)
    return out


def _spread_gate(x: Tensor, padded: int) -> Tensor:
    """[2C, …] tanh and sigmoid halves -> [3 groups, tanh and sigmoid, P, …] as one axis."""
    halves = [_spread(half, 0, padded).unflatten(0, (3, padded)) for half in x.chunk(2)]
    return torch.stack(halves, dim=1).flatten(0, 2)


def _normed(norm: nn.LayerNorm | nn.RMSNorm, weight: Tensor) -> tuple[Tensor, Tensor]:
    """W' and b with W norm(x) = (W' x) / deviation(x) + b: W' has the gain, and rows that take out the mean."""
    bias = torch.zeros_like(weight[:, 0])
    if isinstance(norm, nn.LayerNorm):
        bias = weight @ norm.bias.double()
    weight = weight * norm.weight.double()
    if isinstance(norm, nn.LayerNorm):
        weight = weight - weight.mean(1, keepdim=True)
    return weight, bias


# The parameters that are read here: a decoder with any other one is not covered.
READ = re.compile(
    r"(intensity\.table|stem|surroundings|direct)\.weight|norm\.gain|(head|attention\.(project|norm))\.(weight|bias)"
    r"|attention\.layers\.\d+\.((attn|memory|ffn)_norm\.(weight|bias)|(attn\.qkv|attn\.out|memory\.query|memory\.out"
    r"|qkv|attn_out|ffn_in|ffn_out)\.weight|memory\.(keys|values))"
    r"|layers\.\d+\.(norm\.gain|(down|vertical|current|up)\.(weight|bias)|(link|left|cond)\.weight)"
)

# The settings that are heeded here: a network that departs from the default of any other one is not covered.
HEEDED = {
    *("num_layers", "conv_channels", "residual_channels", "num_attn_layers", "num_attn_heads", "attn_head_dim"),
    *("num_memory_rows", "dropout", "recipe"),
}


def not_covered(model: SPN) -> str | None:
    """Why the fused kernels cannot decode this network; None if they can."""
    decoder, own = model.decoder, model.config.decoder
    for field in dataclasses.fields(own):
        if field.name not in HEEDED and getattr(own, field.name) != field.default:
            return f"the fused kernels do not know decoder.{field.name}"
    if type(decoder) not in (Decoder, FastDecoder):
        return f"the fused kernels do not know the decoder {type(decoder).__name__}"
    for module in decoder.modules():
        if not type(module).__module__.startswith(("spn.", "torch.")):
            return f"the fused kernels do not know the decoder's {type(module).__name__}"
    unread = [name for name, _ in decoder.named_parameters() if not READ.fullmatch(name)]
    return f"the fused kernels do not read the decoder's {unread[0]}" if unread else None


class _Gates:
    """One PixelCNN layer in padded groups, in float64."""

    def __init__(self, layer: GatedPixelCNNLayer, conv: int, stream: int, attn_width: int) -> None:
        def double(x: Tensor) -> Tensor:
            return x.detach().double()

        assert layer.vertical.bias is not None
        link = double(layer.link.weight)
        vertical = torch.einsum("og,gcyx->oyxc", link, double(layer.vertical.weight))
        self.above = _spread(_spread_gate(vertical, conv), 3, conv)  # [G, 2, 3, 3 P]
        self.bias = _spread_gate(double(layer.current.bias) + link @ double(layer.vertical.bias), conv)  # [G]
        self.left = _spread(_spread_gate(double(layer.left.weight), conv), 1, conv)  # [G, 3 P]
        self.current = _spread(_spread_gate(double(layer.current.masked_weight()), conv), 1, conv)
        cond = _spread_gate(double(layer.cond.weight), conv)
        self.attention, self.context = cond[:, :attn_width], cond[:, attn_width:]
        self.up = _spread(_spread(double(layer.up.masked_weight()), 0, stream), 1, conv)  # [3 R, 3 P]
        self.up_bias = _spread(double(layer.up.bias), 0, stream)
        if layer.down is not None:
            down = double(layer.down.masked_weight())
            if layer.norm is not None:
                down = down * double(layer.norm.gain)
            self.down = _spread(_spread(down, 0, conv), 1, stream)  # [3 P, 3 R]
            self.down_bias = _spread(double(layer.down.bias), 0, conv)


class FoldedWeights:
    """Copies of a decoder's weights, of `dtype`, on its device. What is added to sums, such as biases, is float32."""

    def __init__(self, model: SPN, dtype: torch.dtype) -> None:
        config, decoder = model.config.decoder, model.decoder
        attention = decoder.attention
        self.dtype, self.num_values = dtype, decoder.num_values
        self.num_layers = len(decoder.layers)
        self.conv, self.stream = _padded(config.conv_channels), _padded(config.residual_channels)
        self.stream_sizes = group_sizes(config.residual_channels)
        self.inputs, self.gate = 3 * self.conv, 6 * self.conv
        self.width = config.num_attn_heads * config.attn_head_dim
        self.modern = decoder.stem is not None
        self.table = decoder.intensity.table.weight.detach().float().contiguous()
        self.project = self._own(attention.project.weight)
        self.project_bias = attention.project.bias.detach().float().contiguous()
        self.stem = self.surroundings = None
        if decoder.stem is not None:
            self.stem = self._own(decoder.stem.masked_weight().permute(0, 2, 3, 1).flatten(1))
            if decoder.surroundings is not None:
                self.surroundings = self._own(decoder.surroundings.weight.t())
        self.timing = self.cos_sin = None
        if attention.cos_sin is not None:
            self.cos_sin = attention.cos_sin.float().contiguous()
            self.attention = [self._pack_modern_attention(layer) for layer in attention.layers]
        else:
            assert attention.timing is not None
            self.timing = attention.timing.float().contiguous()
            pairs = zip_longest(attention.layers, attention.layers[1:])
            self.attention = [self._pack_attention(layer, after) for layer, after in pairs]
            if attention.layers:
                self.first_qkv = self._own(self._normed_qkv(attention.layers[0])[0])
        layers = [_Gates(layer, self.conv, self.stream, self.width) for layer in decoder.layers]
        maps, shift = _normed(attention.norm, torch.cat([layer.attention for layer in layers]))
        self.gate_attention = self._own(maps)  # [L G, D]
        self.gate_left = self._own(torch.cat([layer.left for layer in layers]))  # [L G, 3 P]
        self.gate_above = self._own(torch.stack([layer.above.flatten(1).t() for layer in layers]))  # [L, 18 P, G]
        self.gate_context = self._own(torch.cat([layer.context for layer in layers]).t())  # [channels of s, L G]
        bias = torch.stack([layer.bias for layer in layers]) + shift.view(self.num_layers, self.gate)
        head = decoder.head.masked_weight().detach().double()
        if decoder.direct is not None and decoder.norm is not None:
            self._pack_layers(layers)
            head = head * decoder.norm.gain.detach().double()
            maps, shift = _normed(attention.norm, decoder.direct.weight.detach().double()[:, : self.width])
            self.direct_attention = self._own(_spread(maps, 0, self.stream))
            self.direct_bias = _spread(shift, 0, self.stream).float()
            context = decoder.direct.weight.detach()[:, self.width :]
            self.direct_context = self._own(_spread(context, 0, self.stream).t())
        else:
            bias = bias + self._fold(layers)
        self.gate_bias = bias.float()[:, None]  # [L, 1, G]
        self.head = self._own(_spread(head, 1, self.stream).view(3, self.num_values, -1))
        self.head_bias = decoder.head.bias.detach().float().view(3, -1).contiguous()

    def _own(self, x: Tensor) -> Tensor:
        return x.detach().to(self.dtype).contiguous()

    def _pack_attention(self, layer: TransformerLayer, after: TransformerLayer | None) -> dict[str, Tensor]:
        query, query_bias = _normed(layer.memory_norm, layer.memory.query.weight.detach().double())
        memory_out = layer.memory.out.weight
        if after is not None:
            memory_out = self._mixed(memory_out, self._normed_qkv(after)[0])
        return {
            "qkv_bias": self._normed_qkv(layer)[1].float(),
            "out": self._mixed(layer.attn.out.weight, query),
            "query_bias": query_bias.float(),
            "memory": self._own(torch.stack([layer.memory.keys, layer.memory.values])),  # [2, heads, rows, d]
            "memory_out": self._own(memory_out),
        }

    def _normed_qkv(self, layer: TransformerLayer) -> tuple[Tensor, Tensor]:
        return _normed(layer.attn_norm, layer.attn.qkv.weight.detach().double())

    def _mixed(self, out: Tensor, following: Tensor) -> Tensor:
        """Weights of kernels.mix, flat: W_1 = out [D, D], then [n, 2 D]: W_2 W_1 and W_2, of the product that follows.

        Made in float64 and rounded once.
        """
        first = out.detach().double()
        both = torch.cat([following @ first, following], dim=1)
        return self._own(torch.cat([first.flatten(), both.flatten()]))

    def _pack_modern_attention(self, layer: ModernLayer) -> dict[str, Tensor]:
        qkv, _ = _normed(layer.attn_norm, layer.qkv.weight.detach().double())
        ffn_in, _ = _normed(layer.ffn_norm, layer.ffn_in.weight.detach().double())
        return {
            "qkv": self._own(qkv),
            "out": self._own(layer.attn_out.weight),
            "ffn_in": self._own(ffn_in),
            "ffn_out": self._own(layer.ffn_out.weight),
        }

    def _pack_layers(self, layers: list[_Gates]) -> None:
        self.current = [self._own(layer.current) for layer in layers]
        self.up = [self._own(layer.up) for layer in layers]
        self.up_bias = [layer.up_bias.float() for layer in layers]
        self.down = [self._own(layer.down) for layer in layers[1:]]
        self.down_bias = [layer.down_bias.float() for layer in layers[1:]]

    def _fold(self, layers: list[_Gates]) -> Tensor:
        """The paper's layers as maps from all gated activations of the pixel, and what their biases add to the gates.

        A pixel's activations are [3 groups, 1 + L, P]: its own embedding in front, then what each layer made. The maps
        are made in float64 and rounded once.
        """
        n, conv, stream = self.num_layers, self.conv, self.stream
        ups = torch.cat([layer.up for layer in layers], dim=1)  # [3 R, L * 3 P]
        biases = torch.stack([layer.up_bias for layer in layers]).cumsum(0)  # [L, 3 R]
        shape = (3, n + 1, conv)  # of the activations that a map reads
        current = ups.new_zeros(n, self.gate, *shape)
        inputs = ups.new_zeros(n, self.inputs, *shape)
        inputs_bias = ups.new_zeros(n, self.inputs)
        for i, layer in enumerate(layers):
            if i == 0:
                current[0, :, :, 0] = layer.current.view(self.gate, 3, conv)
                inputs[0, :, :, 0] = torch.eye(self.inputs, dtype=ups.dtype, device=ups.device).view(-1, 3, conv)
                continue
            reads = layer.down @ ups[:, : i * self.inputs]  # [3 P, i * 3 P]
            inputs[i, :, :, 1 : i + 1] = reads.view(self.inputs, i, 3, conv).transpose(1, 2)
            current[i, :, :, 1 : i + 1] = (layer.current @ reads).view(self.gate, i, 3, conv).transpose(1, 2)
            inputs_bias[i] = layer.down @ biases[i - 1] + layer.down_bias
        self.fold_inputs = self._own(inputs.flatten(2))  # [L, 3 P, 3 (1 + L) P]
        self.fold_inputs_bias = inputs_bias.float().contiguous()
        to_stream = ups.new_zeros(3 * stream, *shape)
        to_stream[:, :, 1:] = ups.view(3 * stream, n, 3, conv).transpose(1, 2)
        current, to_stream = current.view(n, 3, 2 * conv, *shape), to_stream.view(3, stream, *shape)

        def steps(group: int, source: int) -> Tensor:
            """Rows of all that one activation adds to, in the order of kernels.step: [rows, P]."""
            if source == 0:
                return current[:1, group + 1 :, :, group, 0].flatten(0, 2)
            gates = current[source:, group:, :, group, source].flatten(0, 2)
            return torch.cat([gates, to_stream[group:, :, group, source].flatten(0, 1)])

        self.fold_steps = [[self._own(steps(group, source)) for source in range(n + 1)] for group in range(3)]
        self.fold_stream_bias = biases[-1].float().view(3, stream).contiguous()
        return torch.stack([layer.current @ inputs_bias[i] for i, layer in enumerate(layers)])
