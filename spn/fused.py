"""Decoding slices on a GPU: the steps of decoding.py as fused kernels, one row of pixels a CUDA graph.

What differs from decoding.py is the order of the sums, not the result:
  folded      the paper's residual stream is linear between two gates, so what layer j adds to the gate of layer i is
              one map (current . down_i . up_j), and inside a pixel one small product a layer is left to wait for.
              Recipe modern norms the stream and is decoded layer by layer;
  padded      RGB groups are padded to one size, a multiple of 16 channels, so that every tile of a weight is aligned;
  normed      a norm is a factor a row, applied after the product; its gain, and its mean, are in the weights.

B batch, h w slice, V values, L PixelCNN layers, D attention width; P and R channels of one padded group of the
convolutions and of the stream, G = 6 P channels of a gate: R, G, B, of each tanh and sigmoid.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from spn.draws import Draws, pick
from spn.layers import GatedPixelCNNLayer, TransformerLayer, group_sizes
from spn.model import SPN
from spn.modern import STEM_COLUMNS, STEM_ROWS, ModernLayer

with contextlib.suppress(ModuleNotFoundError):  # it comes with torch for GPUs; weights and buffers need none
    import triton

    from spn import kernels

EPS = 1e-6  # of every norm in layers.py and modern.py
ALIGN = 16  # channels
LARGE = 128  # images a batch from which tiles are filled
BUSY = 100  # tiles that an H100's 132 multiprocessors are busy with
ATTENDING = 400  # programs of `attend` that they are busy with
PARTS = 8  # of an attention, at most; a power of two
STAGES_SMALL, STAGES_LARGE = 5, 4  # loads on their way: of small tiles, of large ones
STAGES_ATTEND, STAGES_REMEMBER = 3, 3  # of positions; of learned rows, for few images
OVERLAP_FROM = 2  # images a batch from which launches overlap: of one image that costs more than it gains
OVERLAP_LIGHT_FROM = 2  # those of `step` and `draw` alone
LAUNCH = LAUNCH_LIGHT = 1  # when the next kernel's launch may start: kernels.AT_START, AFTER_WAIT, AT_END
VECTORS = False  # products of one image without tensor cores
VECTOR_COLUMNS, VECTOR_INPUTS = 8, 512  # of their tiles
ASK = 1  # for weights, keys and values, before the kernels ahead have ended: kernels.IN_BULK, BY_LINE, 0 not at all
ASKED_BYTES = 16 * 2**20  # of keys and values of a layer: what the L2 cache has room for beside weights


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


def _normed(norm: nn.Module, weight: Tensor) -> tuple[Tensor, Tensor]:
    """W' and b with W norm(x) = (W' x) / deviation(x) + b: W' has the gain, and rows that take out the mean."""
    bias = torch.zeros_like(weight[:, 0])
    if isinstance(norm, nn.LayerNorm):
        bias = weight @ norm.bias.double()
    weight = weight * norm.weight.double()
    if isinstance(norm, nn.LayerNorm):
        weight = weight - weight.mean(1, keepdim=True)
    return weight, bias


class _Gates:
    """One PixelCNN layer in padded groups, in float64."""

    def __init__(self, layer: GatedPixelCNNLayer, conv: int, stream: int, attn_width: int) -> None:
        def double(x: Tensor) -> Tensor:
            return x.detach().double()

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


class FusedDecoder:
    """Decodes batches of slices of one network in its own copies of the weights, of `dtype`.

    Everything that one row of pixels takes is recorded once as a CUDA graph and played h times a slice. On the CPU it
    runs under Triton's interpreter, step by step.
    """

    def __init__(
        self,
        model: SPN,
        batch: int,
        *,
        dtype: torch.dtype = torch.float32,
        temperature: float = 1.0,
        top_p: float | None = None,
        record: bool = False,
        overlap: bool = True,
    ) -> None:
        """record: keep the logits of each slice in `logits` [B, 3, V, h, w]."""
        config, decoder = model.config, model.decoder
        self.batch, self.dtype, self.temperature, self.top_p = batch, dtype, temperature, top_p
        self.device = next(model.parameters()).device
        self.size, self.num_values = config.slice_size, decoder.num_values
        self.num_layers = len(decoder.layers)
        self.conv = _padded(config.decoder.conv_channels)
        self.stream = _padded(config.decoder.residual_channels)
        self.stream_sizes = group_sizes(config.decoder.residual_channels)
        self.inputs, self.gate = 3 * self.conv, 6 * self.conv
        self.units = decoder.intensity.table.embedding_dim
        self.heads, self.head_dim = config.decoder.num_attn_heads, config.decoder.attn_head_dim
        self.width = self.heads * self.head_dim
        self.modern = config.decoder.recipe == "modern"
        self.graph: torch.cuda.CUDAGraph | None = None
        self.compiling = False
        self.overlap = overlap and self.device.type == "cuda"  # a kernel's launch with the end of the one before
        with torch.no_grad():
            self._pack(model)
        self._allocate(record)

    # ---- weights ----------------------------------------------------------------------------------------------

    def _own(self, x: Tensor) -> Tensor:
        return x.detach().to(self.dtype).contiguous()

    def _pack(self, model: SPN) -> None:
        decoder = model.decoder
        attention = decoder.attention
        self.table = decoder.intensity.table.weight.detach().float().contiguous()
        self.project = self._own(attention.project.weight)
        self.project_bias = attention.project.bias.detach().float().contiguous()
        self.timing = None if self.modern else attention.timing.float().contiguous()
        self.turns = attention.turns.float().contiguous() if self.modern else None
        self.stem = None
        if decoder.stem is not None:
            self.stem = self._own(decoder.stem.masked_weight().permute(0, 2, 3, 1).flatten(1))
        self.surroundings = None if decoder.surroundings is None else self._own(decoder.surroundings.weight.t())
        pack = self._pack_modern_attention if self.modern else self._pack_attention
        self.attention = [pack(layer) for layer in attention.layers]
        layers = [_Gates(layer, self.conv, self.stream, self.width) for layer in decoder.layers]
        maps, shift = _normed(attention.norm, torch.cat([layer.attention for layer in layers]))
        self.gate_attention = self._own(maps)  # [L G, D]
        self.gate_left = self._own(torch.cat([layer.left for layer in layers]))  # [L G, 3 P]
        self.gate_above = self._own(torch.stack([layer.above.flatten(1).t() for layer in layers]))  # [L, 18 P, G]
        self.gate_context = self._own(torch.cat([layer.context for layer in layers]).t())  # [channels of s, L G]
        bias = torch.stack([layer.bias for layer in layers]) + shift.view(self.num_layers, self.gate)
        head = decoder.head.masked_weight().detach().double()
        if self.modern:
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

    def _pack_attention(self, layer: TransformerLayer) -> dict[str, Tensor]:
        qkv, qkv_bias = _normed(layer.attn_norm, layer.attn.qkv.weight.detach().double())
        query, query_bias = _normed(layer.memory_norm, layer.memory.query.weight.detach().double())
        return {
            "qkv": self._own(qkv),
            "qkv_bias": qkv_bias.float(),
            "out": self._own(layer.attn.out.weight),
            "query": self._own(query),
            "query_bias": query_bias.float(),
            "rows": self._own(layer.memory.keys),  # [heads, rows, d]
            "values": self._own(layer.memory.values),
            "memory_out": self._own(layer.memory.out.weight),
        }

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

    # ---- buffers ----------------------------------------------------------------------------------------------

    def resize(self, batch: int) -> None:
        """Caches and states for another batch, empty; nothing is recorded then."""
        self.batch, self.graph = batch, None
        self._allocate(record=self.logits is not None)

    def _allocate(self, record: bool) -> None:
        batch, size, layers = self.batch, self.size, self.num_layers

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        def own(*shape: int) -> Tensor:
            return zeros(*shape, dtype=self.dtype)

        self.row = zeros(1, dtype=torch.long)
        self.known_rows = zeros(1, dtype=torch.int32)
        place = (batch, 3, size, size)
        self.uniform, self.known = zeros(*place, dtype=torch.float64), zeros(*place, dtype=torch.int32)
        self.target = zeros(*place, dtype=torch.long)
        self.logits = zeros(batch, 3, self.num_values, size, size) if record else None
        self.context = own(batch, size, size, self.gate_context.shape[0])
        self.previous = own(batch, 3 * self.units)
        window = (size + STEM_ROWS - 1, size + STEM_COLUMNS - 1, 3 * self.units) if self.modern else (1, 1, 1)
        self.window = own(batch, *window)
        cache = (len(self.attention), batch, self.heads, size * size, self.head_dim)
        self.keys, self.values = own(*cache), own(*cache)
        self.from_context = None if self.surroundings is None else zeros(batch, size, self.width)
        self.x, self.attended = zeros(batch, self.width), own(batch, self.width)
        self.qkv, self.half = zeros(batch, 3 * self.width), own(batch, self.width)
        # Of attention in parts: by program of `attend`, or by tile of images and head of `remember`.
        self.block_d = max(16, 1 << (self.head_dim - 1).bit_length())  # the next power of two
        self.parts = zeros(-(-batch // 64) * 64 * self.heads * PARTS * (self.block_d + 2))
        self.counters = zeros(batch * self.heads, dtype=torch.int32)
        self.above = own(batch, 2, size + 2, layers, self.inputs)
        self.rows = own(batch, size, layers, self.inputs)  # what each layer reads at each pixel of this row
        self.from_above = zeros(batch, size, layers, self.gate)
        streams = 0 if self.modern else 3 * self.stream
        self.sums = zeros(batch, layers * self.gate + streams)  # of a pixel's gates, then of its stream
        self.base = self.sums[:, : layers * self.gate].view(batch, layers, self.gate)
        self.scores = zeros(batch, self.num_values)
        if self.modern:
            self.hidden = own(batch, layers, self.inputs)
            self.streams = zeros(layers, batch, 3 * self.stream)
            self.direct, self.direct_above = zeros(batch, 3 * self.stream), zeros(batch, size, 3 * self.stream)
            units = self.attention[0]["ffn_out"].shape[1] if self.attention else 0
            self.ffn = own(batch, units)
        else:
            self.activations = own(batch, 3, layers + 1, self.conv)
            self.features = own(batch, 3 * self.stream)
            self.query = own(batch, self.width)

    # ---- kernels ----------------------------------------------------------------------------------------------

    def _run(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        """Launches a kernel; while compiling, only has it compiled."""
        if self.compiling:
            kernel.warmup(*arguments, grid=grid, **options)
        else:
            kernel[grid](*arguments, **options)

    def _launch(self, *, light: bool = False) -> dict[str, Any]:
        """light: of a kernel of few and small programs, which leave room for those of the next one."""
        overlap_from = min(OVERLAP_FROM, OVERLAP_LIGHT_FROM) if light else OVERLAP_FROM
        if not self.overlap or self.batch < overlap_from:
            return dict(PDL=0)
        return dict(PDL=LAUNCH_LIGHT if light else LAUNCH, launch_pdl=True)

    def _ahead(self) -> dict[str, Any]:
        """Of kernels that ask for what they will read, too."""
        launch = self._launch()
        return dict(ASK=int(ASK) if launch["PDL"] else 0, **launch)

    def _tiles(self, n: int, *, stacks: int = 1, halves: int = 1) -> tuple[tuple[int, int, int], dict[str, Any]]:
        """Grid and tile of a product with n outputs of one or two halves: the largest that keeps the GPU busy."""
        if VECTORS and self.batch == 1:
            block_n = VECTOR_COLUMNS * (1 if stacks == 1 else 2) * halves
            blocks = dict(BLOCK_M=1, BLOCK_N=block_n, BLOCK_K=VECTOR_INPUTS, SPLIT=0)
            grid = (1, triton.cdiv(n * halves, block_n), stacks)
            return grid, {**blocks, "num_warps": 4, **self._ahead()}
        # Many images fill the tiles that tensor cores like; for few, four warps share the inputs of a small one.
        large = self.batch >= LARGE
        few = ((32, 64), (32, 32), (16, 64), (16, 32), (16, 16 * halves))
        for block_m, block_n in ((64, 64), (64, 32), (64, 16 * halves)) if large else few:
            tiles_m, tiles_n = triton.cdiv(self.batch, block_m), triton.cdiv(n * halves, block_n)
            if tiles_m * tiles_n * stacks >= BUSY and (tiles_m > 1 or block_m == 16):
                break
        split = 1 if large else 4
        inputs = 64 if self.dtype == torch.float32 else 128 if block_m * block_n > 512 else 256  # at once
        blocks = dict(BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=inputs // split, SPLIT=split)
        stages = STAGES_SMALL if block_m * block_n <= 512 else STAGES_LARGE
        return (tiles_m, tiles_n, stacks), {**blocks, "num_warps": 4, "num_stages": stages, **self._ahead()}

    def _product(
        self,
        x: Tensor,
        weight: Tensor,
        out: Tensor,
        n: int,
        *,
        length: int,
        bias: Tensor | None = None,
        base: Tensor | None = None,
        norm: int = 0,
        counts: list[int] | None = None,
        segments: int = 1,
        gate: int = 0,
        copy: Tensor | None = None,
    ) -> None:
        """kernels.product on views: rows are images, their last axes contiguous; segments lie `length` apart."""
        grid, blocks = self._tiles(n, halves=2 if gate else 1)
        counts = (counts or []) + [1, 1, 1]
        self._run(
            kernels.product, grid[:2],
            x, x.stride(0), length, weight, weight.stride(0), length, bias, base, 0 if base is None else base.stride(0),
            out, out.stride(0), copy, self.batch, n, length, *counts[:3], EPS,
            SEGMENTS=segments, NORM=norm, GATE=gate,
            HAS_BIAS=bias is not None, HAS_BASE=base is not None, HAS_COPY=copy is not None, **blocks,
        )  # fmt: skip

    def start_row(self) -> None:
        """What the two rows above, and s of this row, add to every gate of the row to come."""
        batch, size, layers = self.batch, self.size, self.num_layers
        windows = torch.stack([self.above[:, r, c : c + size] for r in range(2) for c in range(3)], dim=3)
        windows = windows.permute(2, 0, 1, 3, 4).reshape(layers, batch * size, -1)
        gates = torch.bmm(windows, self.gate_above).float() + self.gate_bias  # [L, B w, G]
        self.from_above.copy_(gates.view(layers, batch, size, -1).permute(1, 2, 0, 3))
        context = self.context.index_select(1, self.row)[:, 0]  # [B, w, channels of s]
        if context.shape[-1]:
            self.from_above += (context @ self.gate_context).view(batch, size, layers, -1)
        if self.surroundings is not None:
            self.from_context.copy_(context @ self.surroundings)
        if self.modern:
            self.direct_above.copy_(self.direct_bias.expand_as(self.direct_above))
            if context.shape[-1]:
                self.direct_above += context @ self.direct_context

    def _end_row(self) -> None:
        self.above[:, 0] = self.above[:, 1]
        self.above[:, 1, 1:-1] = self.rows
        self.row += 1

    def _attend(self, number: int, column: int) -> None:
        turns = self.turns if self.modern else self.x
        programs = self.batch * self.heads
        # Programs of which each has much on its way; else more of them, each with a part of the positions.
        parts = min(PARTS, triton.next_power_of_2(triton.cdiv(ATTENDING, programs)))
        asked = ASKED_BYTES // (2 * programs * parts * self.head_dim * self.keys.element_size())
        self._run(
            kernels.attend, (programs, parts),
            self.qkv, self.keys[number], self.values[number], turns, self.attended, self.parts, self.counters,
            self.row, column, self.size, self.heads, self.head_dim, self.size * self.size, self.head_dim**-0.5, EPS,
            asked, ROTARY=self.modern, STAGES=STAGES_ATTEND, PARTS=parts, BLOCK_T=32, BLOCK_D=self.block_d,
            num_warps=4, **self._ahead(),
        )  # fmt: skip

    def _attention_layer(self, number: int, column: int) -> None:
        weights, width, x, half = self.attention[number], self.width, self.x, self.half
        norm = int(kernels.RMS_NORM if self.modern else kernels.LAYER_NORM)
        normed: dict[str, Any] = dict(length=width, norm=norm, counts=[width])
        self._product(half, weights["qkv"], self.qkv, 3 * width, bias=weights.get("qkv_bias"), **normed)
        self._attend(number, column)
        self._product(self.attended, weights["out"], x, width, length=width, base=x, copy=half)
        if self.modern:
            units = self.ffn.shape[1]
            self._product(half, weights["ffn_in"], self.ffn, units, gate=int(kernels.SILU), **normed)
            self._product(self.ffn, weights["ffn_out"], x, width, length=units, base=x, copy=half)
            return
        self._product(half, weights["query"], self.query, width, bias=weights["query_bias"], **normed)
        block_m = 64 if self.batch >= LARGE else 16
        tiles, rows = triton.cdiv(self.batch, block_m), weights["rows"].shape[1]
        block_r = 64 if self.dtype == torch.bfloat16 else 16
        blocks, wanted = triton.cdiv(rows, block_r), triton.cdiv(BUSY, tiles * self.heads)
        parts = min(PARTS, triton.next_power_of_2(blocks), triton.next_power_of_2(wanted))
        self._run(
            kernels.remember, (tiles, self.heads, parts),
            self.query, weights["rows"], weights["values"], self.attended, self.parts, self.counters,
            self.batch, self.heads, self.head_dim, rows, PARTS=parts, BLOCK_M=block_m, BLOCK_R=block_r,
            BLOCK_D=self.block_d, num_warps=4, num_stages=STAGES_REMEMBER if block_m == 16 else 2, **self._ahead(),
        )  # fmt: skip
        self._product(self.attended, weights["memory_out"], x, width, length=width, base=x, copy=half)

    def _start_pixel(self, column: int) -> None:
        grid, blocks = self._tiles(self.width)
        modern, window = self.modern, self.window
        units = 3 * self.units
        base = None if self.from_context is None else self.from_context[:, column]
        self._run(
            kernels.begin_pixel, grid[:2],
            self.previous, self.project, self.project_bias, self.x if modern else self.timing, window,
            self.stem if modern else self.x, base, 0 if base is None else base.stride(0), self.x, self.half,
            self.row, column, self.size,
            self.batch, self.width, units, window.stride(0), window.stride(1), STEM_COLUMNS * units, STEM_ROWS,
            TIMING=not modern, STEM=modern, HAS_BASE=base is not None, **blocks,
        )  # fmt: skip
        for number in range(len(self.attention)):
            self._attention_layer(number, column)
        grid, blocks = self._tiles(self.gate, stacks=self.num_layers)
        norm = int(kernels.RMS_NORM if modern else kernels.LAYER_NORM)
        left, above = self.rows[:, max(column - 1, 0)], self.from_above[:, column]
        self._run(
            kernels.gates, grid,
            self.half, self.gate_attention, left, left.stride(0), self.gate_left, above, above.stride(0), self.base,
            self.base.stride(0), self.batch, self.width, self.inputs, self.gate, EPS,
            NORM=norm, HAS_LEFT=column > 0, **blocks,
        )  # fmt: skip
        if modern:
            self._product(
                self.half, self.direct_attention, self.direct, 3 * self.stream, base=self.direct_above[:, column],
                length=self.width, norm=norm, counts=[self.width],
            )  # fmt: skip

    def _channel(self, column: int, channel: int) -> None:
        (self._channel_by_layer if self.modern else self._channel_folded)(column, channel)
        if self.top_p is not None and self.top_p < 1:
            row = self.uniform.index_select(2, self.row)[:, channel, 0, column]
            self._draw(pick(self.scores, row, self.temperature, self.top_p), column, channel)
        else:
            self._draw(self.scores, column, channel)

    def _channel_folded(self, column: int, channel: int) -> None:
        """The paper's layers: each adds to all that is still to come, and the one after it can be squashed."""
        layers, stream, activations = self.num_layers, self.stream, self.activations
        for i in range(layers):
            # The first layer waits for the channel before it, a later one for the layer before.
            source = (channel, i) if i else (channel - 1, 0) if channel else None
            num_blocks = 1 if source is None else (3 - channel) * (layers - i if i else 1)
            self._step(source, activations[:, channel, i + 1], first=i, low=channel, num_blocks=num_blocks)
        features = self.features[:, channel * stream :]
        self._step((channel, layers), features, first=layers, low=channel, num_blocks=0)
        self._product(
            self.features, self.head[channel], self.scores, self.num_values,
            length=(channel + 1) * stream, bias=self.head_bias[channel],
        )  # fmt: skip

    def _step(self, source: tuple[int, int] | None, out: Tensor, *, first: int, low: int, num_blocks: int) -> None:
        """kernels.step from the activation `source` (group, number); None: there is nothing to add, only to squash."""
        conv, stream, batch = self.conv, self.stream, self.batch
        group, number = source or (0, 0)
        x, length = self.activations[:, group, number], conv if source else 0
        weight, bias = self.fold_steps[group][number], self.fold_stream_bias[low]
        # Not 64 images: for those Triton takes wgmma, and as the sums are read between the operands' way into shared
        # memory and the product, its fence comes after the barrier, too late for what other warps have written.
        block_m, block_n = (32, 64 if conv % 32 == 0 else 32) if batch >= LARGE else (16, 32)
        if VECTORS and batch == 1:
            block_m = 1
        tiles = num_blocks * triton.cdiv(conv, block_n // 2)
        if number:
            tiles += (3 - low) * triton.cdiv(stream, block_n)
        self._run(
            kernels.step, (triton.cdiv(batch, block_m), tiles),
            x, x.stride(0), weight, self.sums, self.sums.stride(0), bias, out, out.stride(0),
            batch, length, conv, stream, self.num_layers * self.gate, num_blocks, 3 - low, first, low,
            LAST=num_blocks == 0, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=triton.next_power_of_2(conv),
            num_warps=4, num_stages=1, **self._launch(light=True),
        )  # fmt: skip

    def _channel_by_layer(self, column: int, channel: int) -> None:
        """Layers of recipe modern, whose norms stand between them."""
        conv, stream = self.conv, self.stream
        own, rows = slice(channel * stream, (channel + 1) * stream), slice(channel * conv, (channel + 1) * conv)
        normed: dict[str, Any] = dict(
            length=stream, segments=channel + 1, norm=int(kernels.RMS_NORM), counts=self.stream_sizes
        )
        for i in range(self.num_layers):
            reads, before = self.rows[:, column, i], self.direct if i == 0 else self.streams[i - 1]
            if i:
                self._product(
                    before, self.down[i - 1][rows], reads[:, rows], conv, bias=self.down_bias[i - 1][rows], **normed
                )
            self._product(
                reads, self.current[i][2 * channel * conv :], self.hidden[:, i, rows], conv,
                length=(channel + (i > 0)) * conv, base=self.base[:, i, 2 * channel * conv :],
                gate=int(kernels.TANH_SIGMOID),
            )  # fmt: skip
            self._product(
                self.hidden[:, i], self.up[i][own], self.streams[i][:, own], stream,
                length=(channel + 1) * conv, bias=self.up_bias[i][own], base=before[:, own],
            )  # fmt: skip
        self._product(
            self.streams[-1], self.head[channel], self.scores, self.num_values, bias=self.head_bias[channel], **normed
        )

    def _draw(self, logits: Tensor, column: int, channel: int) -> None:
        pixel = self.rows[:, column, 0, channel * self.conv :] if self.modern else self.activations[:, channel, 0]
        window = self.window
        self._run(
            kernels.draw, (self.batch,),
            logits, self.uniform, self.known, self.known_rows, self.table, self.target, pixel, pixel.stride(0),
            self.previous, window, self.target if self.logits is None else self.logits,
            self.row, column, self.size, self.size, channel, self.num_values, self.units, self.temperature,
            window.stride(0), window.stride(1), STEM_ROWS, STEM_COLUMNS // 2,
            STEM=self.modern, CHOSEN=logits is not self.scores, RECORD=self.logits is not None,
            BLOCK_V=triton.next_power_of_2(self.num_values), BLOCK_UNITS=triton.next_power_of_2(self.units),
            num_warps=1, **self._launch(light=True),
        )  # fmt: skip

    def _end_pixel(self, column: int) -> None:
        """What each layer reads at this pixel, for the pixels to its right and below."""
        if self.modern:
            return  # written on the way
        weight, out = self.fold_inputs, self.rows[:, column]
        grid, blocks = self._tiles(self.inputs, stacks=self.num_layers)
        self._run(
            kernels.stacked, grid,
            self.activations, self.activations.stride(0), self.activations.stride(1),
            weight, weight.stride(1), (self.num_layers + 1) * self.conv, weight.stride(0), self.fold_inputs_bias,
            out, out.stride(0), out.stride(1), self.batch, self.inputs, self.conv, SEGMENTS=3, **blocks,
        )  # fmt: skip

    def _decode_pixel(self, column: int) -> None:
        self._start_pixel(column)
        for channel in range(3):
            self._channel(column, channel)
        self._end_pixel(column)

    def _decode_row(self) -> None:
        self.start_row()
        for column in range(self.size):
            self._decode_pixel(column)
        self._end_row()

    # ---- slices -----------------------------------------------------------------------------------------------

    def _compile(self) -> None:
        """All kernels of a row side by side: one after the other takes most of the time until the first slice."""
        self.compiling = True
        try:
            with ThreadPoolExecutor() as threads, triton.AsyncCompileMode(threads):
                for column in range(min(2, self.size)):  # of the first one nothing is to the left
                    self._decode_pixel(column)
        finally:
            self.compiling = False

    def _record_graph(self) -> None:
        """Compiles the kernels of a row, runs it once for what torch prepares, then records it."""
        if hasattr(triton, "AsyncCompileMode"):  # Triton 3.4 and later
            self._compile()
        self._reset()
        self._decode_row()
        torch.cuda.synchronize(self.device)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._decode_row()

    def _reset(self) -> None:
        for state in (self.row, self.above, self.previous, self.window):
            state.zero_()
        if not self.modern:
            self.sums[:, self.num_layers * self.gate :] = self.fold_stream_bias.flatten()

    @torch.no_grad()
    def __call__(self, context: Tensor | None, draws: Draws, *, on_row: Callable[[], None] | None = None) -> Tensor:
        """Context s [B, h, w, channels] -> values [B, 3, h, w], chosen by `draws`; on_row after each row."""
        assert (draws.temperature, draws.top_p) == (self.temperature, self.top_p), "recorded for other draws"
        assert len(draws.uniform) == self.batch, (draws.uniform.shape, self.batch)
        if self.device.type == "cuda" and self.graph is None:
            self._record_graph()
        self._reset()
        self.uniform.copy_(draws.uniform)
        self.known_rows.fill_(draws.known_rows)
        if draws.known is not None:
            self.known[:, :, : draws.known_rows].copy_(draws.known)
        if context is not None:
            self.context.copy_(context)
        for _ in range(self.size):
            if self.graph is None:
                self._decode_row()
            else:
                self.graph.replay()
            if on_row is not None:
                if self.device.type == "cuda":
                    torch.cuda.synchronize(self.device)
                on_row()
        return self.target.clone()
