"""Bit depth: an intensity as its most significant bits and the bits below them, and back (paper section 2.4).

All functions act on integer tensors of any shape and dtype.
"""

from __future__ import annotations

from torch import Tensor


def reduce_depth(values: Tensor, *, from_bits: int, to_bits: int) -> Tensor:
    """The `to_bits` most significant bits of values of `from_bits` bits: the paper's low-depth image x^{:d}."""
    assert 0 <= to_bits <= from_bits <= 8, (from_bits, to_bits)
    return values >> (from_bits - to_bits)


def split_depth(values: Tensor, *, num_bits: int) -> tuple[Tensor, Tensor]:
    """Values -> (their high bits, `num_bits` low bits); inverse of join_depth."""
    return values >> num_bits, values & ((1 << num_bits) - 1)


def join_depth(given: Tensor, low: Tensor, *, num_bits: int) -> Tensor:
    """(high bits, `num_bits` low bits) -> values; inverse of split_depth."""
    return (given << num_bits) | low


def stage_values(image: Tensor, *, stored_bits: int, given_bits: int, num_bits: int) -> tuple[Tensor, Tensor | None]:
    """An image stored at `stored_bits` -> (values the stage generates, values it is given; None if given_bits is 0).

    Section 2.4: a stage of depth upscaling generates bits given_bits .. given_bits + num_bits of every channel.
    """
    if given_bits + num_bits > stored_bits:
        raise ValueError(f"images stored at {stored_bits} bits cannot give a stage of {given_bits} + {num_bits} bits")
    values = reduce_depth(image, from_bits=stored_bits, to_bits=given_bits + num_bits)
    if given_bits == 0:
        return values, None
    given, low = split_depth(values, num_bits=num_bits)
    return low, given


def to_display(values: Tensor, *, num_bits: int) -> Tensor:
    """Values of `num_bits` bits spread over 0 .. 255 for the eye (uint8 range); exact identity at 8 bits."""
    return (values.long() * 255) // ((1 << num_bits) - 1)
