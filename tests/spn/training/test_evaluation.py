"""Evaluation: uniform networks score what arithmetic says, parts add up to the total, batches do not matter.

python -m pytest tests/spn/training/test_evaluation.py
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from spn.evaluation import bits_per_dim, chain_nats, image_nats, slice_nats
from spn.model import SPN
from tests.spn.whole_images import logits_of


def make_uniform(model: SPN) -> None:
    nn.init.zeros_(model.decoder.head.weight)
    nn.init.zeros_(model.decoder.head.bias)


def chain_bits(models: dict[str, SPN], image: Tensor) -> dict[str, float]:
    size = image.shape[-1]
    return {
        stage: bits_per_dim(float(nats.sum()), num_images=len(image), image_size=size)
        for stage, nats in chain_nats(models, image).items()
    }


# ---- uniform logits ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bits", "first", "expected"),
    [
        ((3, 8), "first_slice", {"first_slice": 3 / 4, "size_upscale": 9 / 4, "depth_upscale": 5}),
        ((3, 8), None, {"size_upscale": 3, "depth_upscale": 5}),
        (
            (1, 3, 8),
            "first_slice",
            {"first_slice": 1 / 4, "size_upscale": 3 / 4, "depth_upscale_3": 2, "depth_upscale_8": 5},
        ),
        ((3, 8), "baseline", {"baseline": 3, "depth_upscale": 5}),
    ],
    ids=str,
)
def test_uniform_networks_score_their_bits(bits, first, expected, tiny_chain, random_values):
    """All slices count where no first_slice network answers for (0, 0); each depth stage scores its own bits."""
    models = tiny_chain(*bits, first=first)
    for model in models.values():
        make_uniform(model)
    parts = chain_bits(models, random_values(1, 8, 2, 3, 4, 4))
    assert list(parts) == list(models)
    assert parts == pytest.approx(expected, abs=1e-12)


# ---- sums ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["first_slice", None])
def test_parts_are_those_of_their_own_slices_and_bits(first, tiny_chain, random_values):
    """Each part by hand: the log-softmax of the network's forward at the values it answers for, and at no others."""
    models = tiny_chain(3, 8, first=first)
    image = random_values(2, 8, 3, 3, 4, 4)
    parts = chain_nats(models, image)
    for stage, model in models.items():
        values = image & 31 if stage == "depth_upscale" else image >> 5
        given = image >> 5 if stage == "depth_upscale" else None
        numbers = {"first_slice": [0], "size_upscale": [1, 2, 3] if first else [0, 1, 2, 3]}.get(stage, [0, 1, 2, 3])
        expected = torch.zeros(3, dtype=torch.float64)
        for number in numbers:
            with torch.no_grad():
                log_p = torch.log_softmax(logits_of(model, values, torch.full((3,), number), given), dim=2)
            own = values[:, :, number // 2 :: 2, number % 2 :: 2]
            expected -= log_p.gather(2, own[:, :, None]).sum((1, 2, 3, 4))
        torch.testing.assert_close(parts[stage], expected, rtol=1e-12, atol=1e-12)
        assert parts[stage].dtype == torch.float64


def test_batch_size_does_not_matter_and_a_short_last_batch_counts(tiny_chain, random_values):
    """Seven images at once, one by one, and as 3 + 3 + 1: the same nats for each image, the same bits/dim."""
    models = tiny_chain(3, 8)
    image = random_values(3, 8, 7, 3, 4, 4)
    whole = chain_nats(models, image)
    for size in (1, 3):
        pieces = [chain_nats(models, part) for part in image.split(size)]
        for stage, nats in whole.items():
            together = torch.cat([piece[stage] for piece in pieces])
            torch.testing.assert_close(together, nats, rtol=1e-12, atol=1e-12)
    # Dropping the short batch, or taking the mean of batch means, would give another figure.
    total = sum(whole.values())
    means = torch.stack([part.mean() for part in total.split(3)]).mean()
    assert abs(means - total.mean()) > 1e-3 and abs(total[:6].mean() - total.mean()) > 1e-3


def test_slices_add_up(tiny_spn, random_values):
    """Scored together or one at a time, an image's slices give the same sum."""
    model = tiny_spn("size_upscale", seed=4, image_size=4, scaling_factor=2, num_bits=3)
    image = random_values(4, 3, 2, 3, 4, 4)
    alone = sum(image_nats(model, image, None, slices=[number]) for number in range(4))
    torch.testing.assert_close(image_nats(model, image, None, slices=range(4)), alone)

    class Compiled:
        """As torch.compile's networks, it can be called but has no truth value."""

        __call__ = model.forward

        def __bool__(self) -> bool:
            raise TypeError

    for forward in (None, Compiled()):
        parts = slice_nats(model, image, None, slices=range(4), forward=forward)
        torch.testing.assert_close(parts.sum((1, 2)), alone)
    assert parts.shape == (len(image), 4, 3) and (parts > 0).all()
    assert image_nats(model, image, None, slices=range(4)).requires_grad is False
