"""Jacobi iteration as recorded graphs draws what the whole network draws one value after the other, bit for bit.

python -m pytest -m gpu tests/spn/gpu/test_jacobi.py
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from spn.decoding.incremental import Draws
from spn.decoding.jacobi import JacobiDecoder
from spn.model import SPN
from spn.sampling import sample_slice_slowly, uniforms

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
DECODER = dict(num_layers=3, conv_channels=32, residual_channels=96, num_attn_layers=3, num_attn_heads=2)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("recipe", ["paper", "modern"])
@torch.no_grad()
def test_a_recorded_pass_draws_what_is_drawn_one_by_one(
    recipe: str, precision: str, tiny_spn: Callable[..., SPN]
) -> None:
    decoder = dict(DECODER, recipe=recipe, attn_head_dim=32)
    model = tiny_spn("size_upscale", seed=1, image_size=32, scaling_factor=2, num_bits=3, decoder=decoder)
    model = model.float().cuda()
    decode = JacobiDecoder(model, 4, precision=precision)
    for seed in (0, 1):  # the graph is recorded with the first and played with the second
        uniform = uniforms(seed, stage="any", images=range(4), image_size=16).cuda()
        context = torch.randn(4, 16, 16, model.config.embedder.conv_channels, device="cuda")
        known = torch.randint(8, (4, 3, 2 * seed, 16), device="cuda")
        guess = torch.randint(8, (4, 3, 16, 16), device="cuda")
        draws = Draws(uniform, known=known, guess=guess)
        with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bfloat16", cache_enabled=False):
            slow = sample_slice_slowly(model, context, draws)
        assert torch.equal(decode(context, draws), slow)
