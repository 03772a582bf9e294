"""Deliberate mistakes, one for each mask of the networks: what the proofs of causality and likelihood must notice.

Each breaks a finished network in place. The names are the mistakes; a test says which of them its case can show.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from spn.layers import channel_groups, rgb_mask
from spn.model import SPN


def mask_b_on_first_layer(model: SPN) -> None:
    """The first layer reads the current pixel's own channel."""
    layer = model.decoder.layers[0]
    half = channel_groups(layer.up.in_features)
    layer.current.mask = rgb_mask(torch.cat([half, half]), model.decoder.intensity.groups(), strict=False)


def gate_halves_not_grouped(model: SPN) -> None:
    """RGB groups run over both halves of the gate: tanh[k] and sigmoid[k] belong to two groups."""
    for layer in model.decoder.layers:
        half = channel_groups(layer.up.in_features)
        local = model.decoder.intensity.groups() if layer.is_first else half
        layer.current.mask = rgb_mask(channel_groups(2 * len(half)), local, strict=layer.is_first)


def down_not_masked(model: SPN) -> None:
    for layer in model.decoder.layers[1:]:
        layer.down.mask = torch.ones_like(layer.down.mask)


def up_not_masked(model: SPN) -> None:
    for layer in model.decoder.layers:
        layer.up.mask = torch.ones_like(layer.up.mask)


def head_not_masked(model: SPN) -> None:
    model.decoder.head.mask = torch.ones_like(model.decoder.head.mask)


def left_reads_current_pixel(model: SPN) -> None:
    """The horizontal stack is not shifted: its unmasked part reads the pixel itself."""
    for layer in model.decoder.layers:
        layer.left.register_forward_pre_hook(lambda _, args: F.pad(args[0], (0, 0, 0, 1))[:, :, 1:])


def vertical_reads_own_row(model: SPN) -> None:
    """The vertical stack is one row too low: it reads rows h - 1 and h, the pixel to the right too."""
    for layer in model.decoder.layers:
        layer.vertical.register_forward_pre_hook(lambda _, args: F.pad(args[0], (0, 0, 0, 1))[:, :, 1:])


def attention_not_shifted(model: SPN) -> None:
    """Position t of the decoder's attention is given pixel t itself."""
    seen: list[Tensor] = []

    def keep(module: object, args: object, output: Tensor) -> None:
        seen[:] = [output.flatten(1, 2)]

    model.decoder.intensity.register_forward_hook(keep)
    model.decoder.attention.register_forward_pre_hook(lambda _, args: seen[0])


def attention_not_causal(model: SPN) -> None:
    for layer in model.decoder.attention.layers:
        layer.attn.causal = False


def embedder_reads_later_slice(model: SPN) -> None:
    """A slot that should hold padding for the first slice holds the last one."""
    model.embedder.sources[0, 0] = model.embedder.sources.shape[0] - 1


def embedder_reads_target(model: SPN) -> None:
    """A slot that should hold padding for the last slice but one holds the target itself."""
    index = model.embedder.sources.shape[0] - 2
    slot = int((model.embedder.sources[index] == model.embedder.sources.shape[0]).nonzero()[0])
    model.embedder.sources[index, slot] = index


BREAKAGES = {
    function.__name__: function
    for function in (
        mask_b_on_first_layer,
        gate_halves_not_grouped,
        down_not_masked,
        up_not_masked,
        head_not_masked,
        left_reads_current_pixel,
        vertical_reads_own_row,
        attention_not_shifted,
        attention_not_causal,
        embedder_reads_later_slice,
        embedder_reads_target,
    )
}


@pytest.fixture(scope="session")
def break_mask() -> Callable[[str, SPN], SPN]:
    """break_mask(name, model) -> the same model with that mistake."""

    def apply(name: str, model: SPN) -> SPN:
        BREAKAGES[name](model)
        return model

    return apply
