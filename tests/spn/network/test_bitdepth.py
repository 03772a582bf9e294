"""Bit depth: splitting and joining are exact inverses, and the high bits are the most significant ones.

python -m pytest tests/spn/network/test_bitdepth.py
"""

from __future__ import annotations

import itertools

import pytest
import torch

from spn.bitdepth import join_depth, reduce_depth, split_depth, stage_values, to_display


def test_splitting_and_joining_are_exact_inverses():
    """Over every split of up to eight bits, every value and, the other way, every pair of high and low bits."""
    splits = [(given, num) for given in range(8) for num in range(1, 9 - given)]
    for (given_bits, num_bits), dtype in itertools.product(splits, (torch.uint8, torch.int64)):
        case = f"{given_bits} given and {num_bits} generated bits, {dtype}"
        values = torch.arange(2 ** (given_bits + num_bits)).to(dtype)
        given, low = split_depth(values, num_bits=num_bits)
        assert given.dtype == low.dtype == dtype, case
        assert given.max() == 2**given_bits - 1 and low.max() == 2**num_bits - 1, case
        assert torch.equal(join_depth(given, low, num_bits=num_bits), values), case

        pairs = torch.cartesian_prod(torch.arange(2**given_bits), torch.arange(2**num_bits)).to(dtype)
        joined = join_depth(pairs[:, 0], pairs[:, 1], num_bits=num_bits)
        assert joined.unique().numel() == 2 ** (given_bits + num_bits), case
        again = split_depth(joined, num_bits=num_bits)
        assert torch.equal(torch.stack(again, 1), pairs), case


@pytest.mark.parametrize("to_bits", range(9))
def test_low_depth_image_is_the_most_significant_bits(to_bits):
    """x >> (8 - d): what integer division by 2 ** (8 - d) gives."""
    values = torch.arange(256, dtype=torch.uint8)
    reduced = reduce_depth(values, from_bits=8, to_bits=to_bits)
    assert reduced.dtype == torch.uint8
    assert reduced.tolist() == [v // 2 ** (8 - to_bits) for v in range(256)]


@pytest.mark.parametrize(
    ("stored_bits", "bits"),
    [(8, [8]), (8, [3]), (3, [3]), (8, [3, 8]), (8, [1, 3, 8]), (8, [1, 2, 3]), (3, [1, 2, 3]), (8, list(range(1, 9)))],
)
def test_the_stages_of_a_chain_make_up_the_image(stored_bits, bits):
    """Each stage is given what the stages before it generate; joined, they are the image at the chain's last depth."""
    image = torch.arange(2**stored_bits, dtype=torch.uint8).view(1, 1, -1, 2)
    so_far = None
    for given_bits, depth in zip([0, *bits], bits, strict=False):
        num_bits = depth - given_bits
        values, given = stage_values(image, stored_bits=stored_bits, given_bits=given_bits, num_bits=num_bits)
        assert values.max() == 2**num_bits - 1
        assert given is None if so_far is None else torch.equal(given, so_far)
        so_far = values if given is None else join_depth(given, values, num_bits=num_bits)
        assert torch.equal(so_far, reduce_depth(image, from_bits=stored_bits, to_bits=depth))


def test_more_bits_than_stored_are_refused():
    with pytest.raises(ValueError, match="stored at 3 bits.*3 \\+ 5 bits"):
        stage_values(torch.zeros(1, 3, 2, 2, dtype=torch.uint8), stored_bits=3, given_bits=3, num_bits=5)


@pytest.mark.parametrize("num_bits", range(1, 9))
def test_display_spreads_over_the_whole_range(num_bits):
    """Black stays black, white becomes white, order is kept; at 8 bits nothing changes. uint8 does not overflow."""
    values = torch.arange(2**num_bits, dtype=torch.uint8)
    shown = to_display(values, num_bits=num_bits)
    assert shown[0] == 0 and shown[-1] == 255
    assert (shown.diff() > 0).all()
    if num_bits == 8:
        assert torch.equal(shown, values.long())
