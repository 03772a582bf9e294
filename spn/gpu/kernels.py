"""Triton kernel of a training step: the gradient of the intensity tables (training.py).

The sampler's kernels are apart (sampling_kernels.py), so that a change of those trains nothing again.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_PARTS = 512  # of the rows, each summed by one program: more than a GPU runs at once


@triton.jit
def _sums_by_value(
    grad, values, out, num_rows,
    NUM_VALUES: tl.constexpr, UNITS: tl.constexpr,
    BLOCK_VALUES: tl.constexpr, BLOCK_UNITS: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """out [parts, 3, V, units] float32: sums of a part's rows of grad [N, 3, units] by values [N, 3]."""
    colour, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    value, unit = tl.arange(0, BLOCK_VALUES), tl.arange(0, BLOCK_UNITS)
    is_unit = unit < UNITS
    sums = tl.zeros((BLOCK_VALUES, BLOCK_UNITS), tl.float32)
    for start in range(part * BLOCK_ROWS, num_rows, parts * BLOCK_ROWS):
        row = start + tl.arange(0, BLOCK_ROWS)
        is_row = row < num_rows
        at = row.to(tl.int64) * 3 + colour
        chosen = tl.load(values + at, mask=is_row, other=0).to(tl.int32)[None, :] == value[:, None]
        rows = tl.load(grad + at[:, None] * UNITS + unit[None, :], mask=is_row[:, None] & is_unit[None, :], other=0.0)
        sums = tl.dot(chosen.to(rows.dtype), rows, sums)
    at = ((part * 3 + colour) * NUM_VALUES + value)[:, None] * UNITS + unit[None, :]
    tl.store(out + at, sums, mask=(value < NUM_VALUES)[:, None] & is_unit[None, :])


def table_gradient(grad: Tensor, values: Tensor, num_values: int) -> Tensor:
    """grad [N, 3, units] bfloat16, values [N, 3] uint8, both contiguous -> [3, V, units] float32.

    What is read is read once; sums are float32 and always in the same order.
    """
    num_rows, _, units = grad.shape
    block = 256 if num_values <= 32 else 64
    parts = max(1, min(MAX_PARTS, triton.cdiv(num_rows, block)))
    out = torch.empty(parts, 3, num_values, units, dtype=torch.float32, device=grad.device)
    _sums_by_value[(3, parts)](
        grad,
        values,
        out,
        num_rows,
        NUM_VALUES=num_values,
        UNITS=units,
        BLOCK_VALUES=max(16, triton.next_power_of_2(num_values)),
        BLOCK_UNITS=max(16, triton.next_power_of_2(units)),
        BLOCK_ROWS=block,
        num_warps=4,
        num_stages=3,
    )
    return out.sum(0)
