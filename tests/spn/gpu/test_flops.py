"""FLOPs of a slice: a hand count of the useful products, and no cost that a batch pays once.

python -m pytest tests/spn/gpu/test_flops.py
"""

from __future__ import annotations

from spn.gpu.flops import forward_flops, training_flops
from spn.layers import MaskedLinear
from spn.model import SPN


def test_useful_leaves_out_masked_weights_and_half_of_causal_attention(tiny_config):
    config = tiny_config("baseline", image_size=4, scaling_factor=1)
    dense, useful = forward_flops(config)
    masked = sum(int((~m.mask).sum()) for m in SPN(config).modules() if isinstance(m, MaskedLinear))
    assert masked > 0
    width = config.decoder.num_attn_heads * config.decoder.attn_head_dim
    causal = config.decoder.num_attn_layers * 2 * 16 * 16 * width
    assert dense - useful == 2 * 16 * masked + causal
    assert training_flops(config) == (3 * dense, 3 * useful)


def test_more_slices_cost_their_projection(tiny_config):
    """The same networks on more slices: only the embedder's first map grows, by 24 channels a slice."""
    small = tiny_config("size_upscale", image_size=8, scaling_factor=2)
    large = tiny_config("size_upscale", image_size=16, scaling_factor=4)
    width = small.embedder.num_attn_heads * small.embedder.attn_head_dim
    more = forward_flops(large)[0] - forward_flops(small)[0]
    assert more == 2 * 16 * (16 - 4) * 24 * width
