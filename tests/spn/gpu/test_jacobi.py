"""Jacobi iteration as recorded graphs draws what the whole network draws one value after the other, bit for bit.

python -m pytest -m gpu tests/spn/gpu/test_jacobi.py
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from spn.decoding.incremental import Draws
from spn.gpu.jacobi import JacobiDecoder
from spn.model import SPN
from spn.sampling import sample_slice_slowly, uniforms

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
DECODER = dict(num_layers=3, conv_channels=32, residual_channels=96, num_attn_layers=3, num_attn_heads=2)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("recipe", ["paper", "modern"])
@torch.no_grad()
def test_an_image_is_what_its_last_graph_draws_one_value_after_the_other(
    recipe: str, precision: str, tiny_spn: Callable[..., SPN]
) -> None:
    decoder = dict(DECODER, recipe=recipe, attn_head_dim=32)
    model = tiny_spn("size_upscale", seed=1, image_size=8, scaling_factor=2, num_bits=3, decoder=decoder)
    model = model.float().cuda()
    decode = JacobiDecoder(model, 5, precision=precision)
    assert decode.widths == [5, 3, 2, 1]
    rounded = copy.deepcopy(model).to(getattr(torch, precision))
    for seed in (0, 1):  # graphs are recorded with the first and played with the second
        uniform = uniforms(seed, stage="any", images=range(5), image_size=4).cuda()
        context = torch.randn(5, 4, 4, model.config.embedder.conv_channels, device="cuda", dtype=decode.dtype)
        known = torch.randint(8, (5, 3, seed, 4), device="cuda")
        guess = torch.randint(8, (5, 3, 4, 4), device="cuda")
        draws = Draws(uniform, known=known, guess=guess)
        drawn = decode(context, draws)
        one_by_one = []
        for width in decode.widths:  # of the products, whose rounding may depend on it
            parts = []
            for rows in torch.arange(5 * width, device="cuda").remainder(5).split(width):
                own = replace(draws, uniform=uniform[rows], known=known[rows])
                parts.append(sample_slice_slowly(rounded, context[rows], own))
            one_by_one.append(torch.cat(parts)[:5])
        for image in range(5):
            assert any(torch.equal(drawn[image], slow[image]) for slow in one_by_one)
    assert len(decode.recordings) > 1
