"""Floating-point operations of one slice: what speed is measured against.

Dense: every product with the activations of a slice, as torch's counter sees the uncompiled network, each PixelCNN
layer by itself. Useful: without products with masked weights, and with causal attention at half. Empty slots of the
embedder are in neither. The backward pass costs twice the forward.
"""

from __future__ import annotations

import functools

import torch
from torch.utils.flop_counter import FlopCounterMode

from spn.config import SPNConfig
from spn.gpu.training import FastDecoder, speed_up
from spn.layers import GatedPixelCNNLayer, MaskedLinear
from spn.model import SPN

# bfloat16 products that large matrices reach in torch; data sheets say up to a quarter more.
PEAK_FLOPS = {"H100": 790e12, "H200": 790e12}


def peak_flops(card: str) -> float | None:
    """FLOP/s that utilisation is measured against, by the card's name; None for a card that was not measured."""
    return next((flops for name, flops in PEAK_FLOPS.items() if name in card), None)


@functools.cache
def forward_flops(config: SPNConfig) -> tuple[int, int]:
    """(dense, useful) FLOPs of one slice's forward pass."""
    with torch.device("meta"):
        model = SPN(config)
    speed_up(model)  # empty slots of the embedder cost nothing
    if isinstance(model.decoder, FastDecoder):
        model.decoder.layers_a_group = 1  # products between a group's layers save memory traffic: not work of its own
    # A second slice costs what a slice costs; the first also the products of weights with weights, once a batch.
    dense = _counted(model, 2) - _counted(model, 1)
    positions = config.slice_size**2
    if model.embedder is not None:  # choosing the slots' weights is no product with activations
        num_slots, width = model.embedder.sources.shape[1], model.embedder.attention.project.out_features
        dense -= 2 * config.num_slices * num_slots * 24 * width
    masked = 0
    for module in model.modules():
        if isinstance(module, GatedPixelCNNLayer):  # the filter's tap to the right of the pixel is empty: not a FLOP
            dense -= 2 * positions * module.left.weight.numel()
        if isinstance(module, MaskedLinear):
            masked += 2 * positions * module.num_masked
    own = config.decoder
    # Scores and weighted values: 2 products of T x T x width, half of them above the diagonal.
    causal = own.num_attn_layers * 2 * positions**2 * own.num_attn_heads * own.attn_head_dim
    return dense, dense - masked - causal


def training_flops(config: SPNConfig) -> tuple[int, int]:
    """(dense, useful) FLOPs of forward and backward of one slice."""
    dense, useful = forward_flops(config)
    return 3 * dense, 3 * useful


def _counted(model: SPN, batch: int) -> int:
    size = model.config.slice_size
    slices = torch.zeros(batch, model.config.num_slices, 3, size, size, dtype=torch.int64, device="meta")
    index = torch.zeros(batch, dtype=torch.int64, device="meta")
    with FlopCounterMode(display=False) as counter:
        model(slices, index, slices if model.config.num_given_bits else None)
    return counter.get_total_flops()
