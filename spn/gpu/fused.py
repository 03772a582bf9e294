"""Decoding slices on a GPU: the steps of incremental.py as fused kernels, one row of pixels a CUDA graph.

What differs from incremental.py is the order of the sums, not the result: weights are folded before (folding.py).

B batch, h w slice; V, L, D, P, R and G as in folding.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from spn.decoding.incremental import BITS, Draws, pick
from spn.gpu.folding import FoldedWeights
from spn.model import SPN
from spn.modern import STEM_COLUMNS, STEM_ROWS

with contextlib.suppress(ModuleNotFoundError):  # it comes with torch for GPUs; weights and buffers need none
    import triton

    from spn.gpu import sampling_kernels as kernels

EPS = 1e-6  # of every norm in layers.py and modern.py
LARGE = 128  # images per batch from which tiles are filled
BUSY = 70  # tiles that an H100's 132 multiprocessors are busy with
ATTENDING = 200  # programs of `attend` that they are busy with
PARTS = 8  # of an attention, at most; a power of two
STAGES_SMALL, STAGES_LARGE = 5, 4  # loads on their way: of small tiles, of large ones
WIDEST_SPLIT = 1024  # outputs of a tile whose inputs warps share: of larger ones the registers do not hold the sums
ROWS_ONE = 128  # learned rows of a program, for one image
STAGES_ATTEND, STAGES_REMEMBER = 3, 2  # of positions; of learned rows
VECTOR_COLUMNS, VECTOR_INPUTS = 4, 512  # of a tile of one image's products
ASKED_BYTES = 16 * 2**20  # of keys and values of a layer: what the L2 cache has room for beside weights


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
        coded: bool = False,
        record: bool = False,
        overlap: bool = True,
    ) -> None:
        """coded: for draws with a coder. record: keep the logits of each slice in `logits` [B, 3, V, h, w]."""
        assert not coded or top_p in (None, 1), "a coder's frequencies are those of all values"
        config, decoder = model.config, model.decoder
        self.batch, self.dtype, self.temperature, self.top_p = batch, dtype, temperature, top_p
        self.device = next(model.parameters()).device
        with torch.no_grad():
            self.weights = weights = FoldedWeights(model, dtype)
        self.size, self.num_values = config.slice_size, weights.num_values
        self.num_layers, self.conv, self.stream = weights.num_layers, weights.conv, weights.stream
        self.inputs, self.gate, self.width, self.modern = weights.inputs, weights.gate, weights.width, weights.modern
        self.units = decoder.intensity.table.embedding_dim
        self.heads, self.head_dim = config.decoder.num_attn_heads, config.decoder.attn_head_dim
        self.graph: torch.cuda.CUDAGraph | None = None
        self.compiling = False
        self.overlap = overlap and self.device.type == "cuda"  # a kernel's launch with the end of the one before
        self._allocate(record, coded)

    # ---- buffers ----------------------------------------------------------------------------------------------

    def _allocate(self, record: bool, coded: bool) -> None:
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
        self.coding: tuple[Tensor, ...] | None = None  # states, numbers of words read, words, intervals
        if coded:
            ints = [zeros(batch, n, dtype=torch.long) for n in (1, 1, 3 * size * size)]
            self.coding = (*ints, zeros(2, *place, dtype=torch.int32))
        self.context = own(batch, size, size, self.weights.gate_context.shape[0])
        self.previous = own(batch, 3 * self.units)
        window = (size + STEM_ROWS - 1, size + STEM_COLUMNS - 1, 3 * self.units) if self.modern else (1, 1, 1)
        self.window = own(batch, *window)
        cache = (len(self.weights.attention), batch, self.heads, size * size, self.head_dim)
        self.keys, self.values = own(*cache), own(*cache)
        self.from_context = None if self.weights.surroundings is None else zeros(batch, size, self.width)
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
            units = self.weights.attention[0]["ffn_out"].shape[1] if self.weights.attention else 0
            self.ffn = own(batch, units)
        else:
            self.activations = own(batch, 3, layers + 1, self.conv)
            self.features = own(batch, 3 * self.stream)
            self.query, self.next_half = zeros(batch, self.width), own(batch, self.width)
            tiles = 1 << (-(-self.width // VECTOR_COLUMNS)).bit_length()  # at most
            self.qkv_stats, self.query_stats = zeros(2 * batch * tiles), zeros(2 * batch * tiles)

    # ---- kernels ----------------------------------------------------------------------------------------------

    def _run(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        """Launches a kernel; while compiling, only has it compiled."""
        if self.compiling:
            kernel.warmup(*arguments, grid=grid, **options)
        else:
            kernel[grid](*arguments, **options)

    def _launch(self, *, light: bool = False) -> dict[str, Any]:
        """light: of a kernel of few and small programs, which leave room for those of the next two; never an attention,
        while which `mix` reads what was written before."""
        if not self.overlap:
            return dict(PDL=0)
        return dict(PDL=int(kernels.AT_START if light else kernels.AFTER_WAIT), launch_pdl=True)

    def _ahead(self) -> dict[str, Any]:
        """Of kernels that ask for what they will read, too."""
        launch = self._launch()
        return dict(ASK=launch["PDL"] > 0, **launch)

    def _tiles(self, n: int, *, stacks: int = 1, halves: int = 1) -> tuple[tuple[int, int, int], dict[str, Any]]:
        """Grid and tile of a product with n outputs of one or two halves: the largest that keeps the GPU busy."""
        if self.batch == 1:  # without tensor cores
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
        split = 1 if large or block_m * block_n > WIDEST_SPLIT else 4
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
        weights, batch, size, layers = self.weights, self.batch, self.size, self.num_layers
        windows = torch.stack([self.above[:, r, c : c + size] for r in range(2) for c in range(3)], dim=3)
        windows = windows.permute(2, 0, 1, 3, 4).reshape(layers, batch * size, -1)
        gates = torch.bmm(windows, weights.gate_above).float() + weights.gate_bias  # [L, B w, G]
        self.from_above.copy_(gates.view(layers, batch, size, -1).permute(1, 2, 0, 3))
        context = self.context.index_select(1, self.row)[:, 0]  # [B, w, channels of s]
        if context.shape[-1]:
            self.from_above += (context @ weights.gate_context).view(batch, size, layers, -1)
        if weights.surroundings is not None:
            assert self.from_context is not None
            self.from_context.copy_(context @ weights.surroundings)
        if self.modern:
            self.direct_above.copy_(weights.direct_bias.expand_as(self.direct_above))
            if context.shape[-1]:
                self.direct_above += context @ weights.direct_context

    def _end_row(self) -> None:
        self.above[:, 0] = self.above[:, 1]
        self.above[:, 1, 1:-1] = self.rows
        self.row += 1

    def _mix(
        self, weight: Tensor, halves: tuple[Tensor, Tensor], out: Tensor, stats: Tensor, *, ahead: Tensor | None = None
    ) -> None:
        """kernels.mix, from one of `halves` to the other."""
        n, (half, next_half) = out.shape[1], halves
        grid, blocks = self._tiles(self.width + n)
        rest = 0
        if self.batch == 1:  # all inputs at once, in blocks of a power of two
            blocks["BLOCK_K"] = 1 << (self.width.bit_length() - 1)
            left = self.width - blocks["BLOCK_K"]
            rest = triton.next_power_of_2(left) if left else 0
        tiles = triton.cdiv(self.width, blocks["BLOCK_N"])
        self._run(
            kernels.mix, (grid[0], tiles + triton.cdiv(n, blocks["BLOCK_N"])),
            self.attended, half, self.x, weight, next_half, out, stats, weight if ahead is None else ahead,
            self.batch, self.width, n, 0 if ahead is None else ahead.numel(),
            BLOCK_TILES=self._block_tiles(n), BLOCK_REST=rest, **blocks,
        )  # fmt: skip

    def _block_tiles(self, n: int) -> int:
        """BLOCK_TILES of what `_mix` wrote beside n outputs."""
        _, blocks = self._tiles(self.width + n)
        return triton.next_power_of_2(triton.cdiv(self.width, blocks["BLOCK_N"]))

    def _attend(self, number: int, column: int, *, normed: bool = True) -> None:
        bias = self.weights.attention[number].get("qkv_bias")
        cos_sin, stats = (self.weights.cos_sin, self.x) if self.modern else (self.x, self.qkv_stats)
        programs = self.batch * self.heads
        # Programs of which each has much on its way; else more of them, each with a part of the positions.
        parts = min(PARTS, triton.next_power_of_2(triton.cdiv(ATTENDING, programs)))
        asked = ASKED_BYTES // (2 * programs * parts * self.head_dim * self.keys.element_size())
        self._run(
            kernels.attend, (programs, parts),
            self.qkv, bias, stats, self.keys[number], self.values[number], cos_sin, self.attended, self.parts,
            self.counters, self.row, column, self.size, self.batch, self.heads, self.head_dim, self.size * self.size,
            self.head_dim**-0.5, EPS, asked, NORMED=normed,
            BLOCK_TILES=1 if normed else self._block_tiles(3 * self.width), ROTARY=self.modern, STAGES=STAGES_ATTEND,
            PARTS=parts, BLOCK_T=32, BLOCK_D=self.block_d, num_warps=4, **self._ahead(),
        )  # fmt: skip

    def _remember(self, layer: dict[str, Tensor]) -> None:
        keys, values = layer["memory"]
        rows, width = keys.shape[1], (self.heads, self.head_dim)
        reads = (self.query, layer["query_bias"], self.query_stats, keys, values)
        writes = (self.attended, self.parts, self.counters)
        blocks = dict(BLOCK_TILES=self._block_tiles(self.width), BLOCK_D=self.block_d)
        if self.batch == 1:
            block_r = min(ROWS_ONE, triton.next_power_of_2(rows))
            parts = triton.cdiv(rows, block_r)
            self._run(
                kernels.remember_one, (self.heads, parts), *reads, *writes, *width, rows, EPS,
                PARTS=parts, BLOCK_R=block_r, num_warps=8, **blocks, **self._launch(),
            )  # fmt: skip
            return
        block_m = 64 if self.batch >= LARGE else 16
        tiles = triton.cdiv(self.batch, block_m)
        block_r = 64 if self.dtype == torch.bfloat16 else 16
        wanted = triton.cdiv(BUSY, tiles * self.heads)
        parts = min(PARTS, triton.next_power_of_2(triton.cdiv(rows, block_r)), triton.next_power_of_2(wanted))
        self._run(
            kernels.remember, (tiles, self.heads, parts), *reads, *writes, self.batch, *width, rows, EPS,
            PARTS=parts, BLOCK_M=block_m, BLOCK_R=block_r, num_warps=4,
            num_stages=STAGES_REMEMBER, **blocks, **self._launch(),
        )  # fmt: skip

    def _normed_product(self, weight: Tensor, out: Tensor, n: int, **options: Any) -> None:
        """A product of the attention layers' stream, normed."""
        norm = int(kernels.RMS_NORM if self.modern else kernels.LAYER_NORM)
        self._product(self.half, weight, out, n, length=self.width, norm=norm, counts=[self.width], **options)

    def _attention(self, column: int) -> None:
        """The paper's layers: between two attentions one kernel, the norm left to the second one."""
        last = len(self.weights.attention) - 1
        halves, back = (self.half, self.next_half), (self.next_half, self.half)
        for number, layer in enumerate(self.weights.attention):
            if number == 0:
                self._normed_product(self.weights.first_qkv, self.qkv, 3 * self.width, bias=layer["qkv_bias"])
            self._attend(number, column, normed=number == 0)
            self._mix(layer["out"], halves, self.query, self.query_stats, ahead=layer["memory"])
            self._remember(layer)
            if number < last:
                self._mix(layer["memory_out"], back, self.qkv, self.qkv_stats)
            else:
                self._add(self.attended, layer["memory_out"])

    def _modern_attention(self, column: int) -> None:
        for number, layer in enumerate(self.weights.attention):
            self._normed_product(layer["qkv"], self.qkv, 3 * self.width)
            self._attend(number, column)
            self._add(self.attended, layer["out"])
            self._normed_product(layer["ffn_in"], self.ffn, self.ffn.shape[1], gate=int(kernels.SILU))
            self._add(self.ffn, layer["ffn_out"])

    def _add(self, x: Tensor, weight: Tensor) -> None:
        """A product of x, added to the attention layers' stream."""
        self._product(x, weight, self.x, self.width, length=x.shape[1], base=self.x, copy=self.half)

    def _start_pixel(self, column: int) -> None:
        grid, blocks = self._tiles(self.width)
        weights, modern, window = self.weights, self.modern, self.window
        units = 3 * self.units
        base = None if self.from_context is None else self.from_context[:, column]
        self._run(
            kernels.begin_pixel, grid[:2],
            self.previous, weights.project, weights.project_bias, self.x if modern else weights.timing, window,
            weights.stem if modern else self.x, base, 0 if base is None else base.stride(0), self.x, self.half,
            self.row, column, self.size,
            self.batch, self.width, units, window.stride(0), window.stride(1), STEM_COLUMNS * units, STEM_ROWS,
            TIMING=not modern, STEM=modern, HAS_BASE=base is not None, **blocks,
        )  # fmt: skip
        (self._modern_attention if modern else self._attention)(column)
        grid, blocks = self._tiles(self.gate, stacks=self.num_layers)
        norm = int(kernels.RMS_NORM if modern else kernels.LAYER_NORM)
        left, above = self.rows[:, max(column - 1, 0)], self.from_above[:, column]
        self._run(
            kernels.gates, grid,
            self.half, weights.gate_attention, left, left.stride(0), weights.gate_left, above, above.stride(0),
            self.base, self.base.stride(0), self.batch, self.width, self.inputs, self.gate, EPS,
            NORM=norm, HAS_LEFT=column > 0, **blocks,
        )  # fmt: skip
        if modern:
            self._product(
                self.half, weights.direct_attention, self.direct, 3 * self.stream, base=self.direct_above[:, column],
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
            self.features, self.weights.head[channel], self.scores, self.num_values,
            length=(channel + 1) * stream, bias=self.weights.head_bias[channel],
        )  # fmt: skip

    def _step(self, source: tuple[int, int] | None, out: Tensor, *, first: int, low: int, num_blocks: int) -> None:
        """kernels.step from the activation `source` (group, number); None: there is nothing to add, only to squash."""
        conv, stream, batch = self.conv, self.stream, self.batch
        group, number = source or (0, 0)
        x, length = self.activations[:, group, number], conv if source else 0
        weight, bias = self.weights.fold_steps[group][number], self.weights.fold_stream_bias[low]
        # Not 64 images: for those Triton takes wgmma, and as the sums are read between the operands' way into shared
        # memory and the product, its fence comes after the barrier, too late for what other warps have written.
        block_m, block_n = (32, 64 if conv % 32 == 0 else 32) if batch >= LARGE else (16, 32)
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
            length=stream, segments=channel + 1, norm=int(kernels.RMS_NORM), counts=self.weights.stream_sizes
        )
        for i in range(self.num_layers):
            reads, before = self.rows[:, column, i], self.direct if i == 0 else self.streams[i - 1]
            if i:
                self._product(
                    before,
                    self.weights.down[i - 1][rows],
                    reads[:, rows],
                    conv,
                    bias=self.weights.down_bias[i - 1][rows],
                    **normed,
                )
            self._product(
                reads, self.weights.current[i][2 * channel * conv :], self.hidden[:, i, rows], conv,
                length=(channel + (i > 0)) * conv, base=self.base[:, i, 2 * channel * conv :],
                gate=int(kernels.TANH_SIGMOID),
            )  # fmt: skip
            self._product(
                self.hidden[:, i], self.weights.up[i][own], self.streams[i][:, own], stream,
                length=(channel + 1) * conv, bias=self.weights.up_bias[i][own], base=before[:, own],
            )  # fmt: skip
        self._product(
            self.streams[-1],
            self.weights.head[channel],
            self.scores,
            self.num_values,
            bias=self.weights.head_bias[channel],
            **normed,
        )

    def _draw(self, logits: Tensor, column: int, channel: int) -> None:
        pixel = self.rows[:, column, 0, channel * self.conv :] if self.modern else self.activations[:, channel, 0]
        window = self.window
        self._run(
            kernels.draw, (self.batch,),
            logits, self.uniform, self.known, self.known_rows, self.weights.table, self.target, pixel, pixel.stride(0),
            self.previous, window, self.target if self.logits is None else self.logits,
            self.row, column, self.size, self.size, channel, self.num_values, self.units, self.temperature,
            window.stride(0), window.stride(1), STEM_ROWS, STEM_COLUMNS // 2, *(self.coding or [None] * 4),
            BITS=BITS if self.coding else 0, STEM=self.modern, CHOSEN=logits is not self.scores,
            RECORD=self.logits is not None,
            BLOCK_V=triton.next_power_of_2(self.num_values), BLOCK_UNITS=triton.next_power_of_2(self.units),
            num_warps=1, **self._launch(light=True),
        )  # fmt: skip

    def _end_pixel(self, column: int) -> None:
        """What each layer reads at this pixel, for the pixels to its right and below."""
        if self.modern:
            return  # written on the way
        weight, bias, out = self.weights.fold_inputs, self.weights.fold_inputs_bias, self.rows[:, column]
        grid, blocks = self._tiles(self.inputs, stacks=self.num_layers)
        self._run(
            kernels.stacked, grid,
            self.activations, self.activations.stride(0), self.activations.stride(1),
            weight, weight.stride(1), (self.num_layers + 1) * self.conv, weight.stride(0), bias,
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
        self.graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(self.device)  # torch keeps its own on one card
        with torch.cuda.graph(self.graph, stream=stream):
            self._decode_row()

    def _reset(self) -> None:
        for state in (self.row, self.above, self.previous, self.window):
            state.zero_()
        if not self.modern:
            self.sums[:, self.num_layers * self.gate :] = self.weights.fold_stream_bias.flatten()

    @torch.no_grad()
    def __call__(self, context: Tensor | None, draws: Draws, *, on_row: Callable[[], None] | None = None) -> Tensor:
        """Context s [B, h, w, channels] -> values [B, 3, h, w], chosen by `draws`; on_row after each row."""
        assert (draws.temperature, draws.top_p) == (self.temperature, self.top_p), "recorded for other draws"
        assert (draws.coder is None) == (self.coding is None), "a coder has a decoder of its own"
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
        if self.coding:
            draws.coder.lend(*self.coding[:3])
        for _ in range(self.size):
            if self.graph is None:
                self._decode_row()
            else:
                self.graph.replay()
            if on_row is not None:
                if self.device.type == "cuda":
                    torch.cuda.synchronize(self.device)
                on_row()
        if self.coding:
            states, read, _, intervals = self.coding
            draws.coder.take_back(states, read, intervals)
        return self.target.clone()
