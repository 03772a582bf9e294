"""Triton kernels of the fused sampler (fused.py): small products, each with what surrounds it, and the draw of a value.

Sums are float32; weights, caches and what only products read are of one type, float32 or bfloat16.
Weights lie as [out, in], so that a tile is read along its contiguous axis. B batch, T positions of a slice.

With PDL (programmatic dependent launch) a kernel starts before the kernels ahead of it have finished. Until `_wait` it
may read only what no kernel of a row writes: weights, biases, uniform numbers, given values, the number of the row
(`mix` reads more, and says why it may). It prefetches what it will read afterwards into the L2 cache, which all
programs share, so it also sees what is written there later.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LAYER_NORM: tl.constexpr = tl.constexpr(1)
RMS_NORM: tl.constexpr = tl.constexpr(2)
TANH_SIGMOID: tl.constexpr = tl.constexpr(1)
SILU: tl.constexpr = tl.constexpr(2)
AT_START: tl.constexpr = tl.constexpr(1)  # PDL: when a kernel lets the next one start its launch
AFTER_WAIT: tl.constexpr = tl.constexpr(2)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _tanh(x):
    return 2.0 * _sigmoid(2.0 * x) - 1.0


@triton.jit
def _norm_scale(total, squares, count, eps, NORM: tl.constexpr):
    """What a normed row is multiplied with; the mean is taken out by the weights (folding.py, `_normed`)."""
    mean = total / count
    variance = squares / count - mean * mean if NORM == LAYER_NORM else squares / count
    return tl.rsqrt(variance + eps)


@triton.jit
def _wait(PDL: tl.constexpr):
    """Waits for the kernel before (programmatic dependent launch; 0: launches do not overlap)."""
    if PDL == AT_START:
        gdc_launch_dependents()
    if PDL != 0:
        gdc_wait()
    if PDL == AFTER_WAIT:
        gdc_launch_dependents()


@triton.jit
def _ask_line(address, here):
    """Asks for the cache line of each address into L2; nothing waits for it."""
    tl.inline_asm_elementwise(
        """{
            .reg .pred some;
            setp.ne.s32 some, $2, 0;
            @some prefetch.global.L2 [$1];
            mov.u32 $0, 0;
        }""",
        "=r,l,r", [address.to(tl.int64), here.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _ask_range(start, num_elements, LANES: tl.constexpr):
    """The same for elements in a row; LANES threads ask at once."""
    line: tl.constexpr = 1024 // start.dtype.element_ty.primitive_bitwidth  # elements of 128 bytes
    for first in range(0, num_elements, LANES * line):
        at = first + tl.arange(0, LANES) * line
        _ask_line(start + at, at < num_elements)


@triton.jit
def _ask_tile(weight, column_at, is_column, length, COLUMNS: tl.constexpr):
    """The same for `length` inputs of a tile's columns: 128 threads ask at once."""
    PIECES: tl.constexpr = 128 // COLUMNS
    line: tl.constexpr = 1024 // weight.dtype.element_ty.primitive_bitwidth
    here = is_column & (tl.program_id(0) == 0)  # once for all tiles of images
    for first in range(0, length, PIECES * line):
        at = first + tl.arange(0, PIECES)[:, None] * line
        _ask_line(weight + column_at[None, :] + at, here[None, :] & (at < length))


@triton.jit
def _multiply(
    x, row_at, is_row, weight, column_at, is_column, length, acc, squares, total,
    SUMS: tl.constexpr, SPLIT: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """acc [M, N] += x W^T over `length` inputs; squares and total [M]: sums of x^2 and x.

    Where tiles are small, each of SPLIT warps has a part of the inputs: one chain of products would be the delay.
    SPLIT 0: one image, without tensor cores: a thread multiplies what it has read, and sums meet at the end.
    """
    if SPLIT == 0:
        parts = tl.zeros([acc.shape[1], BLOCK_K], tl.float32)
        part_squares = tl.zeros([1, BLOCK_K], tl.float32)
        part_total = tl.zeros([1, BLOCK_K], tl.float32)
        for start in tl.range(0, length, BLOCK_K, num_stages=4):  # loads ahead have to be asked for without tl.dot
            k = start + tl.arange(0, BLOCK_K)
            is_k = k < length
            a = tl.load(x + row_at[:, None] + k[None, :], mask=is_row[:, None] & is_k[None, :], other=0.0)
            w = tl.load(weight + column_at[:, None] + k[None, :], mask=is_column[:, None] & is_k[None, :], other=0.0)
            wide = a.to(tl.float32)
            if SUMS:
                part_squares += wide * wide
                part_total += wide
            parts += wide * w.to(tl.float32)
        acc += tl.sum(parts, axis=1)[None, :]
        if SUMS:
            squares += tl.sum(part_squares, axis=1)
            total += tl.sum(part_total, axis=1)
    elif SPLIT == 1:
        for start in range(0, length, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            is_k = k < length
            a = tl.load(x + row_at[:, None] + k[None, :], mask=is_row[:, None] & is_k[None, :], other=0.0)
            w = tl.load(weight + column_at[:, None] + k[None, :], mask=is_column[:, None] & is_k[None, :], other=0.0)
            if SUMS:
                wide = a.to(tl.float32)
                squares += tl.sum(wide * wide, axis=1)
                total += tl.sum(wide, axis=1)
            acc = tl.dot(a.to(w.dtype), tl.trans(w), acc, input_precision="ieee")
            if SUMS:
                # Always true, but it has each turn wait for its wgmma. Triton (3.6) keeps one buffer too few for a tile
                # that is summed and multiplied: a load ahead would overwrite what wgmma is still reading.
                acc = tl.where(start < length, acc, 0.0)
    else:
        inner = tl.arange(0, SPLIT)[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
        parts = tl.zeros([SPLIT, acc.shape[0], acc.shape[1]], tl.float32)
        part_squares = tl.zeros([SPLIT, acc.shape[0]], tl.float32)
        part_total = tl.zeros([SPLIT, acc.shape[0]], tl.float32)
        for start in range(0, length, SPLIT * BLOCK_K):
            k = start + inner
            is_k = k < length
            a = tl.load(
                x + row_at[None, :, None] + k[:, None, :], mask=is_row[None, :, None] & is_k[:, None, :], other=0.0
            )
            w = tl.load(
                weight + column_at[None, :, None] + k[:, None, :],
                mask=is_column[None, :, None] & is_k[:, None, :],
                other=0.0,
            )
            if SUMS:
                wide = a.to(tl.float32)
                part_squares += tl.sum(wide * wide, axis=2)
                part_total += tl.sum(wide, axis=2)
            parts = tl.dot(a.to(w.dtype), tl.permute(w, (0, 2, 1)), parts, input_precision="ieee")
        acc += tl.sum(parts, axis=0)
        squares += tl.sum(part_squares, axis=0)
        total += tl.sum(part_total, axis=0)
    return acc, squares, total


@triton.jit
def product(
    x, x_stride, x_segment, weight, weight_stride, weight_segment, bias, base, base_stride, out, out_stride, copy,
    batch, n, length, count_0, count_1, count_2, eps,
    SEGMENTS: tl.constexpr, NORM: tl.constexpr, GATE: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_BASE: tl.constexpr, HAS_COPY: tl.constexpr, PDL: tl.constexpr, ASK: tl.constexpr,
    SPLIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out [B, n] = base + norm(x) W^T + bias; or, gated, one half of that squashed by the other.

    x and W are read in SEGMENTS pieces of `length`, each normed by itself (RGB groups of recipe modern). A gate's tile
    has BLOCK_N / 2 columns of either half. copy: the same in the type that the next product reads.
    """
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    lane = tl.arange(0, BLOCK_N)
    if GATE != 0:
        place = tl.program_id(1) * (BLOCK_N // 2) + lane % (BLOCK_N // 2)
        columns = place + n * (lane // (BLOCK_N // 2))
    else:
        place = tl.program_id(1) * BLOCK_N + lane
        columns = place
    is_row, is_column = rows < batch, place < n
    rows_64, columns_64 = rows.to(tl.int64), columns.to(tl.int64)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if ASK:
        for segment in tl.static_range(SEGMENTS):
            _ask_tile(weight + segment * weight_segment, columns_64 * weight_stride, is_column, length, BLOCK_N)
    if HAS_BIAS:
        acc += tl.load(bias + columns, mask=is_column, other=0.0)[None, :]
    _wait(PDL)
    for segment in tl.static_range(SEGMENTS):
        part = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        squares = tl.zeros([BLOCK_M], tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        part, squares, total = _multiply(
            x + segment * x_segment, rows_64 * x_stride, is_row,
            weight + segment * weight_segment, columns_64 * weight_stride, is_column,
            length, part, squares, total, NORM != 0, SPLIT, BLOCK_K,
        )  # fmt: skip
        if NORM != 0:
            count = count_0
            if segment == 1:
                count = count_1
            if segment == 2:
                count = count_2
            scale = _norm_scale(total, squares, count, eps, NORM)
            part *= scale[:, None]
        acc += part
    if HAS_BASE:
        at = rows_64[:, None] * base_stride + columns[None, :]
        acc += tl.load(base + at, mask=is_row[:, None] & is_column[None, :], other=0.0).to(tl.float32)
    if GATE != 0:
        halves = tl.permute(tl.reshape(acc, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1))
        first, second = tl.split(halves)
        acc = _tanh(first) * _sigmoid(second) if GATE == TANH_SIGMOID else first * _sigmoid(first) * second
        place = tl.program_id(1) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    here = is_row[:, None] & (place < n)[None, :]
    at = rows_64[:, None] * out_stride + place[None, :]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=here)
    if HAS_COPY:
        tl.store(copy + at, acc.to(copy.dtype.element_ty), mask=here)


@triton.jit
def _sum_products(w, x):
    return tl.sum(w.to(tl.float32) * x.to(tl.float32)[None, :], axis=1)


@triton.jit
def mix(
    attended, half, x, weight, next_half, out, stats, ahead, batch, width, n, ahead_length,
    BLOCK_TILES: tl.constexpr, PDL: tl.constexpr, ASK: tl.constexpr,
    SPLIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """Adds an attention to the stream x [B, D], and makes ready what the next one reads of the sum, before its norm:

        x += W_1 attended;    out [B, n] = W_2 x + (W_2 W_1) attended, with x and half as they were.

    weight: W_1 [D, D], then [n, 2 D] of attended and half. half, next_half: x in the type that products read. stats
    [2, B, BLOCK_TILES]: sums of x and of x^2 by tile, of which the next kernel makes the norm's factor; where there is
    no tile, zeros stay. ahead: ahead_length weights that the next kernel reads.
    """
    # The kernel just before is an attention, which lets this one start AFTER_WAIT: all ahead of it have ended, and what
    # they wrote, such as `half`, can be read while it still works (from L2: .cg).
    tl.static_assert(PDL != AT_START)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    tile, tiles = tl.program_id(1), tl.cdiv(width, BLOCK_N)
    is_first = tile < tiles
    columns = tl.where(is_first, tile, tile - tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_column = rows < batch, columns < tl.where(is_first, width, n)
    rows_64, columns_64 = rows.to(tl.int64), columns.to(tl.int64)
    column_at = tl.where(is_first, columns_64 * width, (width + 2 * columns_64) * width)
    more = tl.where(is_first, 0, width)
    if SPLIT == 0:
        # One image: all weights of a tile, [BLOCK_N, BLOCK_K + BLOCK_REST], are there when the attention ends.
        k = tl.arange(0, BLOCK_K)
        w = tl.load(weight + column_at[:, None] + k[None, :], mask=is_column[:, None], other=0.0)
        if BLOCK_REST:
            rest = BLOCK_K + tl.arange(0, BLOCK_REST)
            is_w = is_column[:, None] & (rest < width)[None, :]
            w_rest = tl.load(weight + column_at[:, None] + rest[None, :], mask=is_w, other=0.0)
    elif ASK:
        _ask_tile(weight, column_at, is_column, width + more, BLOCK_N)
    if ASK:
        share = tl.cdiv(tl.cdiv(ahead_length, tl.num_programs(1)), 64) * 64
        if tl.program_id(0) == 0:
            _ask_range(ahead + tile * share, tl.minimum(share, ahead_length - tile * share), 128)
    if SPLIT == 0:
        is_w = is_column[:, None] & (k < more)[None, :]
        w_half = tl.load(weight + width + column_at[:, None] + k[None, :], mask=is_w, other=0.0)
        acc = _sum_products(w_half, tl.load(half + k, cache_modifier=".cg"))
        if BLOCK_REST:
            is_w = is_column[:, None] & (rest < more)[None, :]
            w_half = tl.load(weight + width + column_at[:, None] + rest[None, :], mask=is_w, other=0.0)
            acc += _sum_products(w_half, tl.load(half + rest, mask=rest < width, other=0.0, cache_modifier=".cg"))
        _wait(PDL)
        acc += _sum_products(w, tl.load(attended + k))
        if BLOCK_REST:
            acc += _sum_products(w_rest, tl.load(attended + rest, mask=rest < width, other=0.0))
        acc = acc[None, :]
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        unused = tl.zeros([BLOCK_M], tl.float32)
        acc, _, _ = _multiply(
            half, rows_64 * width, is_row, weight + width, column_at, is_column, more,
            acc, unused, unused, False, SPLIT, BLOCK_K,
        )  # fmt: skip
        _wait(PDL)
        acc, _, _ = _multiply(
            attended, rows_64 * width, is_row, weight, column_at, is_column, width,
            acc, unused, unused, False, SPLIT, BLOCK_K,
        )  # fmt: skip
    here = is_row[:, None] & is_column[None, :]
    if is_first:
        at_x = rows_64[:, None] * width + columns[None, :]
        acc += tl.load(x + at_x, mask=here, other=0.0)
        tl.store(x + at_x, acc, mask=here)
        tl.store(next_half + at_x, acc.to(next_half.dtype.element_ty), mask=here)
        at_stats = stats + rows * BLOCK_TILES + tile
        tl.store(at_stats, tl.sum(acc, axis=1), mask=is_row)
        tl.store(at_stats + batch * BLOCK_TILES, tl.sum(acc * acc, axis=1), mask=is_row)
    else:
        tl.store(out + rows_64[:, None] * n + columns[None, :], acc, mask=here)


@triton.jit
def _factor(stats, image, batch, count, eps, BLOCK_TILES: tl.constexpr):
    """The factor of one row's layer norm from the sums that `mix` wrote."""
    at = stats + image * BLOCK_TILES + tl.arange(0, BLOCK_TILES)
    total, squares = tl.sum(tl.load(at), axis=0), tl.sum(tl.load(at + batch * BLOCK_TILES), axis=0)
    return _norm_scale(total, squares, count, eps, LAYER_NORM)


@triton.jit(do_not_specialize=["num_blocks", "groups", "first", "low"])
def step(
    x, x_stride, weight, sums, sums_stride, bias, out, out_stride,
    batch, length, conv, stream, streams_at, num_blocks, groups, first, low,
    LAST: tl.constexpr, PDL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """What one layer's activations of a pixel (or the embedded value), x [B, P], add to all that is still to come.

    sums [B, ...]: gates [L, 3 groups, 2 P], then at `streams_at` the stream [3, R]. The rows of `weight` are num_blocks
    gates of 2 P, from layer `first` on, of `groups` groups each from `low` on; then the stream's groups from `low` on.
    The first of them waited for nothing else and is finished: a gate is squashed into out [B, P]; LAST (no gates are
    left) the stream is rectified into out [B, R], and its sum starts anew from `bias` for the next pixel.
    """
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    tile, lane, half = tl.program_id(1), tl.arange(0, BLOCK_N), BLOCK_N // 2
    tiles = tl.cdiv(conv, half)  # of a gate: `half` columns of its tanh and of its sigmoid
    if tile < num_blocks * tiles:
        block = tile // tiles
        place = tile % tiles * half + lane % half
        is_column = place < conv
        inside = place + lane // half * conv
        columns = block * 2 * conv + inside
        target = ((first + block // groups) * 3 + low + block % groups) * 2 * conv + inside
    else:
        number = tile - num_blocks * tiles
        group, place = number // tl.cdiv(stream, BLOCK_N), number % tl.cdiv(stream, BLOCK_N) * BLOCK_N + lane
        is_column = place < stream
        columns = num_blocks * 2 * conv + group * stream + place
        target = streams_at + (low + group) * stream + place
    k = tl.arange(0, BLOCK_K)
    is_row, is_k = rows < batch, k < length
    rows_64, here = rows.to(tl.int64), is_row[:, None] & is_column[None, :]
    w = tl.load(weight + columns[:, None] * length + k[None, :], mask=is_column[:, None] & is_k[None, :], other=0.0)
    _wait(PDL)
    a = tl.load(x + rows_64[:, None] * x_stride + k[None, :], mask=is_row[:, None] & is_k[None, :], other=0.0)
    at = sums + rows_64[:, None] * sums_stride + target[None, :]
    acc = tl.load(at, mask=here, other=0.0)
    acc = tl.dot(a.to(w.dtype), tl.trans(w), acc, input_precision="ieee")
    if LAST:
        if tile < tl.cdiv(stream, BLOCK_N):
            tl.store(
                out + rows_64[:, None] * out_stride + place[None, :],
                tl.maximum(acc, 0.0).to(out.dtype.element_ty), mask=here,
            )  # fmt: skip
            acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32) + tl.load(bias + place, mask=is_column, other=0.0)[None, :]
        tl.store(at, acc, mask=here)
    elif tile < tiles:
        first_half, second_half = tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1)))
        own = tile * half + tl.arange(0, BLOCK_N // 2)
        tl.store(
            out + rows_64[:, None] * out_stride + own[None, :],
            (_tanh(first_half) * _sigmoid(second_half)).to(out.dtype.element_ty),
            mask=is_row[:, None] & (own < conv)[None, :],
        )  # fmt: skip
    else:
        tl.store(at, acc, mask=here)


@triton.jit
def stacked(
    x, x_stride, x_segment, weight, weight_stride, weight_segment, weight_stack, bias, out, out_stride, out_stack,
    batch, n, length,
    SEGMENTS: tl.constexpr, PDL: tl.constexpr, ASK: tl.constexpr,
    SPLIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Many products at once, z = 0, 1, …: out_z = x W_z^T + bias_z, over the first (z + 1) * `length` inputs of each
    segment."""
    z = tl.program_id(2)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_column = rows < batch, columns < n
    rows_64, columns_64 = rows.to(tl.int64), columns.to(tl.int64)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    unused = tl.zeros([BLOCK_M], tl.float32)
    weight += z.to(tl.int64) * weight_stack
    length *= z + 1
    if ASK:
        for segment in tl.static_range(SEGMENTS):
            _ask_tile(weight + segment * weight_segment, columns_64 * weight_stride, is_column, length, BLOCK_N)
    acc += tl.load(bias + z * n + columns, mask=is_column, other=0.0)[None, :]
    _wait(PDL)
    for segment in tl.static_range(SEGMENTS):
        acc, _, _ = _multiply(
            x + segment * x_segment, rows_64 * x_stride, is_row,
            weight + segment * weight_segment, columns_64 * weight_stride, is_column,
            length, acc, unused, unused, False, SPLIT, BLOCK_K,
        )  # fmt: skip
    at = out + rows_64[:, None] * out_stride + z * out_stack + columns[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@triton.jit(do_not_specialize=["column"])
def begin_pixel(
    previous, weight, bias, timing, window, stem, base, base_stride, out, copy, row, column, slice_width,
    batch, width, units, window_stride, window_row, window_row_length, stem_rows,
    TIMING: tl.constexpr, STEM: tl.constexpr, HAS_BASE: tl.constexpr, PDL: tl.constexpr, ASK: tl.constexpr,
    SPLIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Input of the attention layers [B, D] at one pixel: the pixel before it, its position or its surroundings.

    base: what s adds to it, [B, D].
    """
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_column = rows < batch, columns < width
    rows_64 = rows.to(tl.int64)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    unused = tl.zeros([BLOCK_M], tl.float32)
    at_row = tl.load(row)
    if ASK:
        _ask_tile(weight, columns * units, is_column, units, BLOCK_N)
        if STEM:
            size = window_row_length * stem_rows
            _ask_tile(stem, columns * size, is_column, size, BLOCK_N)
    acc += tl.load(bias + columns, mask=is_column, other=0.0)[None, :]
    if TIMING:
        position = at_row * slice_width + column
        acc += tl.load(timing + position * width + columns, mask=is_column, other=0.0)[None, :]
    _wait(PDL)
    acc, _, _ = _multiply(
        previous, rows * units, is_row, weight, columns * units, is_column, units,
        acc, unused, unused, False, SPLIT, BLOCK_K,
    )  # fmt: skip
    if STEM:
        for r in range(stem_rows):
            acc, _, _ = _multiply(
                window + (at_row + r) * window_row + column * units, rows_64 * window_stride, is_row,
                stem + r * window_row_length, columns * window_row_length * stem_rows, is_column, window_row_length,
                acc, unused, unused, False, SPLIT, BLOCK_K,
            )  # fmt: skip
    at, here = rows_64[:, None] * width + columns[None, :], is_row[:, None] & is_column[None, :]
    if HAS_BASE:
        acc += tl.load(base + rows_64[:, None] * base_stride + columns[None, :], mask=here, other=0.0)
    tl.store(out + at, acc, mask=here)
    tl.store(copy + at, acc.to(copy.dtype.element_ty), mask=here)


@triton.jit
def _is_last(counter, PARTS: tl.constexpr):
    """True in the program that is the last of PARTS to arrive; it then sees what the others wrote."""
    tl.debug_barrier()
    arrived = tl.atomic_add(counter, 1, sem="acq_rel")
    tl.debug_barrier()
    if arrived == PARTS - 1:
        tl.atomic_xchg(counter, 0)
    return arrived == PARTS - 1


@triton.jit(do_not_specialize=["column"])
def attend(
    qkv, bias, stats, keys, values, cos_sin, out, parts, counters,
    row, column, slice_width, batch, heads, head_dim, length, scale, eps, asked,
    NORMED: tl.constexpr, BLOCK_TILES: tl.constexpr, ROTARY: tl.constexpr, PDL: tl.constexpr, ASK: tl.constexpr,
    STAGES: tl.constexpr, PARTS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Causal attention of one position; its key and value enter the cache.

    A program has one head of one image, or one of PARTS of its earlier positions: the last to end adds up. Every lane
    of BLOCK_T keeps a running softmax of its own, so that lanes meet only once, at the end. asked: positions of a
    program that are asked for ahead. NORMED False: qkv waits for its norm's factor, from `stats` (mix), and for `bias`.
    """
    pid = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    head = pid % heads
    position = tl.load(row) * slice_width + column
    keys += pid * length * head_dim
    values += pid * length * head_dim
    share = tl.cdiv(tl.cdiv(position, PARTS), BLOCK_T) * BLOCK_T
    end = tl.minimum(position, (part + 1) * share)
    if ASK:
        ahead = tl.minimum(end - part * share, asked).to(tl.int32) * head_dim
        _ask_range(keys + part * share * head_dim, ahead, 128)
        _ask_range(values + part * share * head_dim, ahead, 128)
    width = heads * head_dim
    d = tl.arange(0, BLOCK_D)
    is_d = d < head_dim
    if not NORMED:
        at_bias = bias + head * head_dim + d
        q_bias = tl.load(at_bias, mask=is_d, other=0.0)
        k_bias = tl.load(at_bias + width, mask=is_d, other=0.0)
        v_bias = tl.load(at_bias + 2 * width, mask=is_d, other=0.0)
    _wait(PDL)
    at = qkv + (pid // heads) * 3 * width + head * head_dim
    q = tl.load(at + d, mask=is_d, other=0.0)
    k = tl.load(at + width + d, mask=is_d, other=0.0)
    v = tl.load(at + 2 * width + d, mask=is_d, other=0.0)
    if not NORMED:
        factor = _factor(stats, pid // heads, batch, width, eps, BLOCK_TILES)
        q, k, v = q * factor + q_bias, k * factor + k_bias, v * factor + v_bias
    if ROTARY:
        half = head_dim // 2
        other, pair = (d + half) % head_dim, d % half
        cos = tl.load(cos_sin + position * half + pair, mask=is_d, other=0.0)
        sin = tl.load(cos_sin + (length + position) * half + pair, mask=is_d, other=0.0)
        sin = tl.where(d < half, -sin, sin)
        q_scale = tl.rsqrt(tl.sum(q * q) / head_dim + eps)
        k_scale = tl.rsqrt(tl.sum(k * k) / head_dim + eps)
        q = (q * cos + tl.load(at + other, mask=is_d, other=0.0) * sin) * q_scale
        k = (k * cos + tl.load(at + width + other, mask=is_d, other=0.0) * sin) * k_scale
    k, v = k.to(keys.dtype.element_ty), v.to(values.dtype.element_ty)
    if part == 0:
        tl.store(keys + position * head_dim + d, k, mask=is_d)
        tl.store(values + position * head_dim + d, v, mask=is_d)
    q *= scale
    own = tl.sum(q * k.to(tl.float32))
    best = tl.full([BLOCK_T], -1e30, tl.float32)
    mass = tl.zeros([BLOCK_T], tl.float32)
    acc = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    for start in tl.range(part * share, end, BLOCK_T, num_stages=STAGES):
        t = start + tl.arange(0, BLOCK_T)
        is_t = t < end
        offset = t[:, None] * head_dim + d[None, :]
        k_t = tl.load(keys + offset, mask=is_t[:, None] & is_d[None, :], other=0.0).to(tl.float32)
        v_t = tl.load(values + offset, mask=is_t[:, None] & is_d[None, :], other=0.0).to(tl.float32)
        s = tl.where(is_t, tl.sum(k_t * q[None, :], axis=1), -1e30)
        new = tl.maximum(best, s)
        fade = tl.exp(best - new)
        p = tl.where(is_t, tl.exp(s - new), 0.0)
        mass = mass * fade + p
        acc = acc * fade[:, None] + p[:, None] * v_t
        best = new
    top = tl.max(best, axis=0)
    if part == 0:
        top = tl.maximum(top, own)
    lane = tl.exp(best - top)
    total = tl.sum(mass * lane, axis=0)
    y = tl.sum(acc * lane[:, None], axis=0)
    if part == 0:
        own = tl.exp(own - top)
        total += own
        y += v.to(tl.float32) * own
    _join(y, top, total, out + (pid // heads) * width + head * head_dim, parts, counters, pid, part, d, is_d, PARTS)


@triton.jit
def _join(y, top, total, out, parts, counters, number, part, d, is_d, PARTS: tl.constexpr):
    """Writes an attention's output, y / total; of PARTS of one, the last to end adds up what they wrote."""
    if PARTS == 1:
        tl.store(out + d, (y / total).to(out.dtype.element_ty), mask=is_d)
    else:
        BLOCK_D: tl.constexpr = y.shape[0]
        BLOCK_PARTS: tl.constexpr = triton.next_power_of_2(PARTS)
        step: tl.constexpr = BLOCK_D + 2  # of each part: weighted values, largest score, mass
        at = parts + (number * PARTS + part) * step
        tl.store(at + d, y)
        tl.store(at + BLOCK_D, top)
        tl.store(at + BLOCK_D + 1, total)
        if _is_last(counters + number, PARTS):
            some = tl.arange(0, BLOCK_PARTS)
            is_part = some < PARTS
            of_part = parts + (number * PARTS + some) * step  # all parts are read at once
            ys = tl.load(of_part[:, None] + d[None, :], mask=is_part[:, None], other=0.0, cache_modifier=".cg")
            tops = tl.load(of_part + BLOCK_D, mask=is_part, other=-1e30, cache_modifier=".cg")
            masses = tl.load(of_part + BLOCK_D + 1, mask=is_part, other=0.0, cache_modifier=".cg")
            weight = tl.exp(tops - tl.max(tops, axis=0))
            total = tl.sum(masses * weight, axis=0)
            y = tl.sum(ys * weight[:, None], axis=0)
            tl.store(out + d, (y / total).to(out.dtype.element_ty), mask=is_d)


@triton.jit
def remember_one(
    query, bias, stats, keys, values, out, parts, counters, heads, head_dim, num_rows, eps,
    PARTS: tl.constexpr, BLOCK_TILES: tl.constexpr, PDL: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """`remember` of one image, without tensor cores: a program has read its BLOCK_R rows before the query is there."""
    head, part = tl.program_id(0), tl.program_id(1)
    d, r = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_R)
    is_d, is_r = d < head_dim, part * BLOCK_R + r < num_rows
    at = (head * num_rows + part * BLOCK_R + r)[:, None] * head_dim + d[None, :]
    here = is_r[:, None] & is_d[None, :]
    k = tl.load(keys + at, mask=here, other=0.0)
    v = tl.load(values + at, mask=here, other=0.0)
    q_bias = tl.load(bias + head * head_dim + d, mask=is_d, other=0.0)
    _wait(PDL)
    q = tl.load(query + head * head_dim + d, mask=is_d, other=0.0)
    q = q * _factor(stats, 0, 1, heads * head_dim, eps, BLOCK_TILES) + q_bias
    s = tl.where(is_r, tl.sum(k.to(tl.float32) * q[None, :], axis=1), -1e30)
    top = tl.max(s, axis=0)
    p = tl.where(is_r, tl.exp(s - top), 0.0)
    y = tl.sum(p[:, None] * v.to(tl.float32), axis=0)
    _join(y, top, tl.sum(p, axis=0), out + head * head_dim, parts, counters, head, part, d, is_d, PARTS)


@triton.jit
def remember(
    query, bias, stats, keys, values, out, parts, counters, batch, heads, head_dim, num_rows, eps,
    BLOCK_TILES: tl.constexpr, PDL: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Parameter attention: softmax over learned rows, keys and values [heads, rows, d]; query and out [B, D].

    The query waits for its norm's factor, from `stats` (mix), and for `bias`. A program has BLOCK_M images, one head
    and one of PARTS of the rows: the last to end adds up.
    """
    tile, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    is_row, is_d = rows < batch, d < head_dim
    at = rows[:, None] * heads * head_dim + head * head_dim + d[None, :]
    here = is_row[:, None] & is_d[None, :]
    keys += head * num_rows * head_dim
    values += head * num_rows * head_dim
    share = tl.cdiv(tl.cdiv(num_rows, PARTS), 16) * 16
    end = tl.minimum(num_rows, (part + 1) * share)
    best = tl.full([BLOCK_M], -1e30, tl.float32)
    mass = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    q_bias = tl.load(bias + head * head_dim + d, mask=is_d, other=0.0)
    _wait(PDL)
    at_stats = stats + rows[:, None] * BLOCK_TILES + tl.arange(0, BLOCK_TILES)[None, :]
    total = tl.sum(tl.load(at_stats, mask=is_row[:, None], other=0.0), axis=1)
    squares = tl.sum(tl.load(at_stats + batch * BLOCK_TILES, mask=is_row[:, None], other=0.0), axis=1)
    q = tl.load(query + at, mask=here, other=0.0)
    q = q * _norm_scale(total, squares, heads * head_dim, eps, LAYER_NORM)[:, None] + q_bias[None, :]
    q = q.to(keys.dtype.element_ty)
    for start in range(part * share, end, BLOCK_R):
        r = start + tl.arange(0, BLOCK_R)
        is_r = r < end
        offset = r[:, None] * head_dim + d[None, :]
        k = tl.load(keys + offset, mask=is_r[:, None] & is_d[None, :], other=0.0)
        v = tl.load(values + offset, mask=is_r[:, None] & is_d[None, :], other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        s = tl.where(is_r[None, :], s, -1e30)
        new = tl.maximum(best, tl.max(s, axis=1))
        fade = tl.exp(best - new)
        p = tl.where(is_r[None, :], tl.exp(s - new[:, None]), 0.0)
        mass = mass * fade + tl.sum(p, axis=1)
        acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
        best = new
    if PARTS == 1:
        tl.store(out + at, (acc / mass[:, None]).to(out.dtype.element_ty), mask=here)
    else:
        m = tl.arange(0, BLOCK_M)
        group = tile * heads + head
        step = BLOCK_M * (BLOCK_D + 2)  # of each part: weighted values, largest scores, masses
        to = parts + (group * PARTS + part) * step
        inside = m[:, None] * BLOCK_D + d[None, :]
        tl.store(to + inside, acc, mask=is_row[:, None])
        tl.store(to + BLOCK_M * BLOCK_D + m, best, mask=is_row)
        tl.store(to + BLOCK_M * (BLOCK_D + 1) + m, mass, mask=is_row)
        if _is_last(counters + group, PARTS):
            to = parts + group * PARTS * step
            all_best = to + tl.arange(0, PARTS)[:, None] * step + BLOCK_M * BLOCK_D + m[None, :]
            tops = tl.load(all_best, mask=is_row[None, :], other=0.0, cache_modifier=".cg")
            masses = tl.load(all_best + BLOCK_M, mask=is_row[None, :], other=1.0, cache_modifier=".cg")
            best = tl.max(tops, axis=0)
            mass = tl.sum(masses * tl.exp(tops - best[None, :]), axis=0)
            acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
            UNROLL: tl.constexpr = PARTS if BLOCK_M <= 16 else 1  # few images: no load waits for another
            for i in tl.range(PARTS, loop_unroll_factor=UNROLL, num_stages=1):
                at_part = to + i * step
                top = tl.load(at_part + BLOCK_M * BLOCK_D + m, mask=is_row, other=0.0, cache_modifier=".cg")
                ys = tl.load(at_part + inside, mask=is_row[:, None], other=0.0, cache_modifier=".cg")
                acc += ys * tl.exp(top - best)[:, None]
            tl.store(out + at, (acc / mass[:, None]).to(out.dtype.element_ty), mask=here)


@triton.jit
def gates(
    x, weight, pixel, pixel_stride, left, above, above_stride, out, out_stride, batch, width, inputs, gate, eps,
    NORM: tl.constexpr, HAS_LEFT: tl.constexpr, PDL: tl.constexpr, ASK: tl.constexpr,
    SPLIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Every layer's gate but for the pixel itself [B, L, gate]: attention, the pixel to the left, what is above."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    layer = tl.program_id(2)
    is_row, is_column = rows < batch, columns < gate
    rows_64, number = rows.to(tl.int64), (layer * gate + columns).to(tl.int64)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    squares = tl.zeros([BLOCK_M], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if ASK:
        _ask_tile(weight, number * width, is_column, width, BLOCK_N)
        if HAS_LEFT:
            _ask_tile(left, number * inputs, is_column, inputs, BLOCK_N)
    _wait(PDL)
    acc, squares, total = _multiply(
        x, rows_64 * width, is_row, weight, number * width, is_column, width,
        acc, squares, total, True, SPLIT, BLOCK_K,
    )  # fmt: skip
    acc *= _norm_scale(total, squares, width, eps, NORM)[:, None]
    if HAS_LEFT:
        acc, _, _ = _multiply(
            pixel + layer * inputs, rows_64 * pixel_stride, is_row, left, number * inputs, is_column, inputs,
            acc, squares, total, False, SPLIT, BLOCK_K,
        )  # fmt: skip
    here = is_row[:, None] & is_column[None, :]
    acc += tl.load(above + rows_64[:, None] * above_stride + number[None, :], mask=here, other=0.0)
    tl.store(out + rows_64[:, None] * out_stride + number[None, :], acc, mask=here)


@triton.jit(do_not_specialize=["column", "channel"])
def draw(
    logits, uniform, known, known_rows, table, target, pixel, pixel_stride, previous, window, record,
    row, column, height, slice_width, channel, num_values, units, temperature,
    window_stride, window_row, stem_rows, stem_side, states, read, words, intervals,
    BITS: tl.constexpr, STEM: tl.constexpr, CHOSEN: tl.constexpr, RECORD: tl.constexpr, PDL: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_UNITS: tl.constexpr,
):  # fmt: skip
    """Chooses one value of each image as `draws.pick` does, in float64, and writes it and its embedding.

    CHOSEN: `logits` holds values that were chosen elsewhere. Known rows are taken as they are.

    BITS (not 0) of a coder's frequencies: the image's state [B] chooses, as in coding.py, and takes in `words`
    [B, 3 h w], of which `read` [B] are read; known values leave both as they are. Coding and decoding are one variant,
    since two might round differently. intervals [2, B, 3, h, w]: start and size of each value.
    """
    image = tl.program_id(0).to(tl.int64)
    at_row = tl.load(row)
    is_known = at_row < tl.load(known_rows)
    place = ((image * 3 + channel) * height + at_row) * slice_width + column
    number = tl.load(uniform + place)
    given = tl.load(known + place).to(tl.int32)
    _wait(PDL)
    if BITS:
        places = 3 * height * slice_width
        state, num_read = tl.load(states + image), tl.load(read + image)
        word = tl.load(words + image * places + num_read)
    if CHOSEN:
        value = tl.load(logits + image).to(tl.int32)
    else:
        v = tl.arange(0, BLOCK_V)
        is_v = v < num_values
        x = tl.load(logits + image * num_values + v, mask=is_v, other=float("-inf"))
        if RECORD:
            step = height * slice_width
            at = ((image * 3 + channel) * num_values + v) * step + at_row * slice_width + column
            tl.store(record + at, x, mask=is_v)
        x = x.to(tl.float64) / temperature
        mass = tl.exp(x - tl.max(x, axis=0))
        mass = mass / tl.sum(mass, axis=0)
        if BITS:
            mass = tl.where(is_v, (mass * ((1 << BITS) - num_values)).to(tl.int32) + 1, 0)
            number = (state & ((1 << BITS) - 1)).to(tl.int32)
        below = (tl.cumsum(mass, axis=0) <= number) & is_v
        value = tl.minimum(tl.sum(below.to(tl.int32), axis=0), num_values - 1)
    value = tl.where(is_known, given, value)
    tl.store(target + place, value.to(tl.int64))
    u = tl.arange(0, BLOCK_UNITS)
    is_u = u < units
    embedded = tl.load(table + (channel * num_values + value) * units + u, mask=is_u, other=0.0).to(tl.float32)
    tl.store(pixel + image * pixel_stride + u, embedded.to(pixel.dtype.element_ty), mask=is_u)
    tl.store(previous + (image * 3 + channel) * units + u, embedded.to(previous.dtype.element_ty), mask=is_u)
    if STEM:
        at = window + image * window_stride + (at_row + stem_rows - 1) * window_row
        at += ((column + stem_side) * 3 + channel) * units
        tl.store(at + u, embedded.to(window.dtype.element_ty), mask=is_u)
    if BITS:
        start = tl.sum(tl.where(v < value, mass, 0), axis=0)
        size = tl.sum(tl.where(v == value, mass, 0), axis=0)
        tl.store(intervals + place, start)
        tl.store(intervals + tl.num_programs(0) * places + place, size)
        state = size * (state >> BITS) + (number - start)
        renewed = state < 2**31
        is_drawn = is_known == 0
        tl.store(states + image, tl.where(renewed, (state << 32) | word, state), mask=is_drawn)
        tl.store(read + image, num_read + renewed.to(tl.int64), mask=is_drawn)
