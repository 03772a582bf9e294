"""The subscale ordering: cutting and joining are exact inverses, in the paper's order.

python -m pytest tests/spn/network/test_ordering.py
"""

from __future__ import annotations

import pytest
import torch

from spn.ordering import image_to_slices, slices_to_image, slot_offsets, slot_sources

SHAPES = [(1, 1, 1), (1, 4, 6), (2, 2, 2), (2, 4, 8), (3, 9, 6), (4, 8, 8), (4, 16, 4), (8, 16, 16)]


@pytest.mark.parametrize(("scaling_factor", "height", "width"), SHAPES)
def test_cutting_and_joining_are_exact_inverses(scaling_factor, height, width, random_values):
    """Both ways round; the values' type stays."""
    image = random_values(0, 8, 2, 3, height, width).to(torch.uint8)
    slices = image_to_slices(image, scaling_factor)
    assert slices.shape == (2, scaling_factor**2, 3, height // scaling_factor, width // scaling_factor)
    assert slices.dtype == torch.uint8
    assert torch.equal(slices_to_image(slices, scaling_factor), image)

    other = random_values(1, 8, *slices.shape).to(torch.uint8)
    assert torch.equal(image_to_slices(slices_to_image(other, scaling_factor), scaling_factor), other)


def test_a_4x4_image_by_hand():
    """The paper's figure of the subscale ordering, S = 2: the step at which each pixel is generated.

    Slices in raster order of their offset, pixels of a slice in raster order.
    """
    step = torch.tensor(
        [
            [0, 4, 1, 5],
            [8, 12, 9, 13],
            [2, 6, 3, 7],
            [10, 14, 11, 15],
        ]
    )
    slices = image_to_slices(step.expand(1, 3, 4, 4), 2)
    by_hand = torch.tensor(
        [
            [[0, 1], [2, 3]],  # offset (0, 0)
            [[4, 5], [6, 7]],  # offset (0, 1)
            [[8, 9], [10, 11]],  # offset (1, 0)
            [[12, 13], [14, 15]],  # offset (1, 1)
        ]
    )
    for channel in range(3):
        assert torch.equal(slices[0, :, channel], by_hand)


@pytest.mark.parametrize(("height", "width"), [(6, 8), (8, 6), (7, 7)])
def test_an_image_that_the_factor_does_not_divide_is_refused(height, width):
    with pytest.raises(ValueError, match=f"{height}x{width}.*scaling_factor 4"):
        image_to_slices(torch.zeros(1, 3, height, width), 4)


def test_slots_of_two_by_two_by_hand():
    """S = 2: above left, above, above right, left; 4 is padding."""
    assert slot_offsets(2) == [(-1, -1), (-1, 0), (-1, 1), (0, -1)]
    assert slot_sources(2).tolist() == [
        [4, 4, 4, 4],
        [4, 4, 4, 0],
        [4, 0, 1, 4],
        [0, 1, 4, 2],
    ]
