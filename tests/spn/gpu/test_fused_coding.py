"""On an NVIDIA GPU: the fused kernels code losslessly, at the size that the likelihood says.

python -m pytest -m gpu tests/spn/gpu/test_fused_coding.py

The first test, of the draw's kernel alone, also runs in Triton's interpreter: TRITON_INTERPRET=1, without a GPU.
"""

from __future__ import annotations

import importlib.util
import math
import os

import pytest
import torch
from torch import Tensor

from spn.decoding import coding
from spn.decoding.coding import BITS, LOWEST, Decoder, Encoder, decode, encode, frequencies, interval, slices_in_order
from spn.decoding.incremental import Draws
from spn.evaluation import chain_nats
from spn.model import SPN
from spn.sampling import sample_chain

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not (ON_GPU or INTERPRETED), reason="needs an NVIDIA GPU")]
whole_networks = pytest.mark.skipif(not ON_GPU, reason="needs an NVIDIA GPU")

BATCH = 5
RECIPES = ("paper", "modern")


@pytest.fixture(autouse=True)
def fused(monkeypatch):
    monkeypatch.setattr(coding, "DECODER", "fused")
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


# ---- the kernel alone ----------------------------------------------------------------------------------------------


def of_given_logits(logits: Tensor, tiny_config):
    """A fused decoder of slices [B, 3, h, w] whose logits are given, [h, w, 3, B, V], instead of computed."""
    from spn.gpu.fused import FusedDecoder

    class Given(FusedDecoder):
        def _decode_pixel(self, column: int) -> None:
            own = logits.index_select(0, self.row)[0, column]
            for channel in range(3):
                if not self.compiling:
                    self.scores.copy_(own[channel])
                self._draw(self.scores, column, channel)

    size, _, _, batch, num_values = logits.shape
    num_bits = num_values.bit_length() - 1
    config = tiny_config("baseline", image_size=size, scaling_factor=1, num_bits=num_bits)
    return Given(SPN(config).to(DEVICE), batch, coded=True)


def intervals_of(encoder: Encoder) -> tuple[Tensor, Tensor]:
    """Starts and sizes, int64 [values of an image, B]."""
    return torch.cat(encoder._intervals, 1).long().unbind()


@pytest.mark.parametrize("num_values", [2, 8, 256])
def test_the_kernel_codes_as_the_plain_coder_does(num_values, tiny_config):
    """Flat and sharp distributions, values likely and not: what it encodes it decodes, with the plain coder's shares.

    Two sums of float64 may differ in their last bit, a share therefore by one.
    """
    generator, size, batch = torch.Generator().manual_seed(0), 3, 4
    logits = torch.randn((size, size, 3, batch, num_values), generator=generator)
    logits *= torch.tensor([0.0, 1.0, 8.0, 1000.0])[:, None]
    values = torch.randint(num_values, (batch, 3, size, size), generator=generator)
    values[:, :, 1:] = logits[1:].argmax(-1).permute(3, 2, 0, 1)
    logits, values = logits.to(DEVICE), values.to(DEVICE)
    unused = torch.zeros(values.shape, dtype=torch.float64, device=DEVICE)
    fused = of_given_logits(logits, tiny_config)
    encoder, ends = Encoder(), [LOWEST, 2 * LOWEST - 1, LOWEST + 5, LOWEST + 6]
    assert torch.equal(fused(None, Draws(unused, known=values, coder=encoder)), values)
    starts, sizes = intervals_of(encoder)
    for t, (own, value) in enumerate(zip(logits.flatten(0, 2), values.permute(2, 3, 1, 0).flatten(0, 2), strict=True)):
        start, share = interval(frequencies(own), value)
        assert (sizes[t] - share).abs().max() <= 1 and (starts[t] - start).abs().max() <= num_values
    assert sizes.min() >= 1 and (starts + sizes).max() <= 2**BITS
    streams = encoder.streams(ends)
    for _ in range(2):  # recorded, then played
        decoder = Decoder(streams, DEVICE)
        assert torch.equal(fused(None, Draws(unused, coder=decoder)), values)
        assert decoder.ends() == ends


def test_the_kernels_shares_tile_the_range(tiny_config):
    """As many images as values, all with the same logits: one's interval begins where that of the value before ends."""
    num_values = 8
    logits = torch.randn((1, 1, 3, 1, num_values), generator=torch.Generator().manual_seed(1))
    fused = of_given_logits(logits.expand(1, 1, 3, num_values, num_values).contiguous().to(DEVICE), tiny_config)
    values = torch.arange(num_values, device=DEVICE)[:, None, None, None].expand(num_values, 3, 1, 1)
    encoder = Encoder()
    fused(None, Draws(torch.zeros(values.shape, dtype=torch.float64, device=DEVICE), known=values, coder=encoder))
    starts, sizes = intervals_of(encoder)
    assert torch.equal(starts, sizes.cumsum(1) - sizes)
    assert ((2**BITS - num_values < sizes.sum(1)) & (sizes.sum(1) <= 2**BITS)).all()


# ---- whole chains --------------------------------------------------------------------------------------------------


def chain(system: str, recipe: str, tiny_chain) -> dict[str, SPN]:
    """Float32 networks of 8 bits at 8 x 8, on the GPU."""
    parts = dict(image_size=8, decoder={"recipe": recipe}, embedder={"recipe": recipe})
    models = tiny_chain(8, first="baseline", **parts) if system == "baseline" else tiny_chain(3, 8, **parts)
    return {stage: model.float().cuda() for stage, model in models.items()}


def images_for(models: dict[str, SPN], random_values) -> Tensor:
    """Five of random values, one of zeros, one that the chain itself draws: more than one batch, less than two."""
    drawn = list(sample_chain(models, seed=0, images=[0]).values())[-1]
    zeros = torch.zeros((1, 3, 8, 8), dtype=torch.long, device=DEVICE)
    return torch.cat([random_values(1, 8, BATCH, 3, 8, 8).to(DEVICE), zeros, drawn])


@whole_networks
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("system", ["baseline", "all three"])
def test_images_come_back_at_the_size_of_their_likelihood(system, recipe, precision, tiny_chain, random_values):
    models = chain(system, recipe, tiny_chain)
    images = images_for(models, random_values)
    streams = list(encode(models, images, batch=BATCH, precision=precision, decoders={}))
    found = decode(models, streams, batch=BATCH, precision=precision, decoders={})  # others, recorded anew
    for own, image in zip(found, images.to(torch.uint8).cpu(), strict=True):
        assert own is not None and torch.equal(own, image)
    with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bfloat16"):
        needed = sum(chain_nats(models, images).values()) / math.log(2) / 8
    assert all(len(stream) < 1.002 * own + 12 for stream, own in zip(streams, needed.tolist(), strict=True))
    assert sum(map(len, streams)) > 0.998 * float(needed.sum())


@whole_networks
@pytest.mark.parametrize("recipe", RECIPES)
def test_shares_are_nearly_the_plain_decoders(recipe, tiny_chain, random_values, monkeypatch):
    """In float32, of every value: relative to the share, and to the precision of shares."""
    models = chain("all three", recipe, tiny_chain)
    images, found = random_values(2, 8, BATCH, 3, 8, 8).to(DEVICE), []
    for decoder in ("fused", "plain"):
        monkeypatch.setattr(coding, "DECODER", decoder)
        encoder = Encoder(slices_in_order(models, images))
        coding._sample(models, encoder, BATCH, {})
        found.append(intervals_of(encoder)[1])
    assert ((found[0] - found[1]).abs() <= 2 + 1e-3 * found[1]).all()


@whole_networks
def test_damage_stays_in_its_image(tiny_chain, random_values):
    """A flipped bit, a missing end, a longer one, no stream, one of ones: known to be wrong; no other image is."""
    models = chain("baseline", "paper", tiny_chain)
    images, kept = random_values(3, 8, 7, 3, 8, 8).to(DEVICE), {}
    streams = list(encode(models, images, batch=7, decoders=kept))
    streams[1] = bytes([streams[1][0] ^ 1]) + streams[1][1:]
    streams[2], streams[3], streams[4] = streams[2][:-4], streams[3] + b"\0\0\0\0", b""
    streams[5] = b"\xff" * len(streams[5])
    back = list(decode(models, streams, batch=7, decoders=kept))
    assert back[1:6] == [None] * 5
    for number in (0, 6):
        assert back[number] is not None and torch.equal(back[number], images[number].to(torch.uint8).cpu())
    sample_chain(models, seed=0, images=range(7), decoder="fused", decoders=kept)  # no coder: a decoder of its own
    assert len(kept) == 2
