"""Floating-point operations of training one slice: what speed is measured against.

Dense: every product that forward and backward compute, as torch's counter sees the uncompiled network. Useful: without
products with masked weights, and with causal attention at half. Backward costs twice the forward.
"""

from __future__ import annotations

import torch
from torch.utils.flop_counter import FlopCounterMode

from spn.layers import MaskedLinear
from spn.model import SPN, SPNConfig


def forward_flops(config: SPNConfig) -> tuple[int, int]:
    """(dense, useful) FLOPs of one slice's forward pass."""
    with torch.device("meta"):
        model = SPN(config)
        image = torch.zeros(1, 3, config.image_size, config.image_size, dtype=torch.int64)
        index = torch.zeros(1, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model(image, index, image if config.num_given_bits else None)
    dense = counter.get_total_flops()
    positions = config.slice_size**2
    masked = 0
    for module in model.modules():
        if isinstance(module, MaskedLinear):
            masked += 2 * module.num_masked * positions
    own = config.decoder
    # Scores and weighted values: 2 products of T x T x width, half of them above the diagonal.
    causal = own.num_attn_layers * 2 * positions**2 * own.num_attn_heads * own.attn_head_dim
    return dense, dense - masked - causal


def training_flops(config: SPNConfig) -> tuple[int, int]:
    """(dense, useful) FLOPs of forward and backward of one slice."""
    dense, useful = forward_flops(config)
    return 3 * dense, 3 * useful
