"""Lossless coding: every image comes back bit for bit, its stream is as long as its likelihood says, damage is found.

python -m pytest tests/spn/sampling/test_coding.py
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import pytest
import torch

from spn.decoding.coding import BITS, LOWEST, Decoder, Encoder, decode, encode, frequencies, interval
from spn.evaluation import chain_nats
from spn.model import SPN
from spn.sampling import sample_chain

SYSTEMS = {
    "baseline": ("baseline", 8),
    "spn": (None, 8),
    "size": ("first_slice", 8),
    "depth": (None, 3, 8),
    "all three": ("first_slice", 1, 3, 8),
    "few bits": ("first_slice", 3),
}


@pytest.fixture(scope="module")
def chain(tiny_chain):
    def build(system: str, *, recipe: str = "paper") -> dict[str, SPN]:
        first, *bits = SYSTEMS[system]
        models = tiny_chain(*bits, first=first, decoder={"recipe": recipe}, embedder={"recipe": recipe})
        return {stage: model.float() for stage, model in models.items()}

    return build


def same(decoded: Iterable[torch.Tensor | None], images: torch.Tensor) -> bool:
    """Whether all come back."""
    return all(
        own is not None and torch.equal(own, image.to(torch.uint8)) for own, image in zip(decoded, images, strict=True)
    )


def bytes_of(models: dict[str, SPN], images: torch.Tensor) -> torch.Tensor:
    """Of each image's likelihood."""
    return sum(chain_nats(models, images).values()) / math.log(2) / 8


# ---- the coder alone -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_values", [2, 8, 256])
@pytest.mark.parametrize("sharpness", [0.0, 1.0, 8.0, 1000.0])
def test_what_is_pushed_is_decoded(num_values, sharpness):
    """Values likely and unlikely, drawn from each distribution and against it; the last state is the one given."""
    draw = torch.Generator().manual_seed(0)
    logits = sharpness * torch.randn((60, 7, num_values), generator=draw)
    values = torch.distributions.Categorical(logits=logits).sample()
    values[::3] = torch.randint(num_values, values[::3].shape, generator=draw)
    encoder, ends = Encoder(), [LOWEST, 2 * LOWEST - 1, *range(LOWEST + 5, LOWEST + 10)]
    for own, value in zip(logits, values, strict=True):
        encoder.code(own, value)
    streams = encoder.streams(ends)
    decoder, ideal = Decoder(streams, torch.device("cpu")), torch.zeros(7)
    for own, value in zip(logits, values, strict=True):
        assert torch.equal(decoder.code(own), value)
        ideal += BITS - interval(frequencies(own), value)[1].log2()
    assert decoder.ends() == ends
    assert all(len(stream) < bits / 8 + 8 for stream, bits in zip(streams, ideal.tolist(), strict=True))


def test_every_value_has_a_share_and_costs_what_its_probability_says():
    logits = torch.tensor([[0.0] * 256, [1e4] + [0.0] * 255, [0.0, 5.0, -5.0, 12.0] * 64], dtype=torch.float64)
    sizes = frequencies(logits)
    assert sizes.min() >= 1 and sizes.sum(1).max() <= 2**BITS
    lost = torch.log_softmax(logits, -1) / math.log(2) - (sizes.double().log2() - BITS)
    assert lost.max() < 2.3e-5 and (BITS - sizes.double().log2()).max() <= BITS


# ---- images --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("system", "recipe"), [*((name, "paper") for name in SYSTEMS), ("all three", "modern")])
def test_images_come_back_bit_for_bit_at_the_size_of_their_likelihood(system, recipe, chain, random_values):
    """Two images of random values in a batch of four, one of zeros, and one that the chain itself would draw."""
    models = chain(system, recipe=recipe)
    bits = SYSTEMS[system][-1]
    images = torch.cat([random_values(1, bits, 2, 3, 4, 4), torch.zeros((1, 3, 4, 4), dtype=torch.long)])
    images = torch.cat([images, sample_chain(models, seed=0, images=[0])[list(models)[-1]]])
    streams = list(encode(models, images, batch=3))
    assert same(decode(models, streams, batch=3), images)
    if bits == 8:
        needed = bytes_of(models, images)
        for stream, ideal in zip(streams, needed.tolist(), strict=True):
            assert len(stream) < 1.002 * ideal + 12
        assert sum(map(len, streams)) > 0.998 * float(needed.sum())


@torch.no_grad()
def test_an_image_that_the_model_finds_impossible_costs_at_most_24_bits_a_value(chain, random_values):
    models = chain("baseline")
    models["baseline"].decoder.head.weight.mul_(1e4)
    images = random_values(5, 8, 2, 3, 4, 4)
    assert bytes_of(models, images).min() > 1000
    streams = list(encode(models, images, batch=2))
    assert same(decode(models, streams, batch=2), images)
    assert max(map(len, streams)) <= 48 * BITS / 8 + 12


def test_damage_stays_in_its_image(chain, random_values):
    """Any flipped bit, a missing end, a longer one, no stream at all: that image is known to be wrong, no other is."""
    models = chain("all three")
    images = random_values(6, 8, 8, 3, 4, 4)
    streams = list(encode(models, images, batch=8))
    streams[1] = bytes([streams[1][0] ^ 1]) + streams[1][1:]
    streams[2] = streams[2][:-1] + bytes([streams[2][-1] ^ 128])
    streams[3], streams[4], streams[5] = streams[3][:-4], streams[4] + b"\0\0\0\0", streams[5][:3]
    streams[6] = b"\xff" * len(streams[6])
    back = list(decode(models, streams, batch=8))
    assert back[1:7] == [None] * 6 and same([back[0], back[7]], images[[0, 7]])


def test_another_network_decodes_nothing(chain, random_values):
    images = random_values(7, 8, 3, 3, 4, 4)
    streams = list(encode(chain("spn"), images, batch=3))
    assert list(decode(chain("spn", recipe="modern"), streams, batch=3)) == [None] * 3
