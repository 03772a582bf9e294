"""The Subscale Pixel Network: slice embedder and masked decoder (paper section 3.2, figure 4, table 4).

B batch, H W image, S scaling factor (S * S slices), h w slice (h = H/S), V values (2 ** num_bits).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from spn.config import DecoderConfig, EmbedderConfig, SPNConfig
from spn.layers import (
    GatedPixelCNNLayer,
    GroupRMSNorm,
    IntensityEmbedding,
    MaskedLinear,
    ParameterAttention,
    ResidualBlock,
    SelfAttention,
    TransformerLayer,
    channel_groups,
    group_sizes,
    module_list,
    run_layer,
    timing_signal,
)
from spn.modern import CausalStem, ModernLayer, rotary_cos_sin
from spn.ordering import slot_sources, target_slices

META_UNITS = 8  # units of the meta-position embedding (section 3.2)
HEAD_SCALE = 0.3  # recipe modern: of the slowest cosine in the first logits


class AttentionStack(nn.Module):
    """1D attention over a slice in raster order: positions, layers, final norm. Its owner applies `project`."""

    timing: Tensor | None  # [T, D] of recipe paper, added to the input
    cos_sin: Tensor | None  # [2, T, head_dim / 2] of recipe modern, by which every layer rotates queries and keys

    def __init__(self, own: DecoderConfig | EmbedderConfig, *, in_channels: int, slice_size: int, causal: bool) -> None:
        super().__init__()
        width, modern = own.num_attn_heads * own.attn_head_dim, own.recipe == "modern"
        layer, norm = (ModernLayer, nn.RMSNorm) if modern else (TransformerLayer, nn.LayerNorm)
        self.num_heads = own.num_attn_heads
        self.project = nn.Linear(in_channels, width)
        self.layers: Sequence[Any] = module_list(layer(own, causal=causal) for _ in range(own.num_attn_layers))
        self.norm: nn.LayerNorm | nn.RMSNorm = norm(width, eps=1e-6)
        timing = None if modern else timing_signal(slice_size**2, width)
        cos_sin = rotary_cos_sin(slice_size, slice_size, own.attn_head_dim) if modern else None
        self.register_buffer("timing", timing, persistent=False)
        self.register_buffer("cos_sin", cos_sin, persistent=False)
        self.recompute = False

    def encode_positions(self, x: Tensor, here: slice = slice(None)) -> tuple[Tensor, Tensor | None]:
        """x [B, positions, D] at positions `here` -> input of the first layer, and cos_sin for every layer."""
        if self.timing is not None:
            x = x + self.timing[here].to(x.dtype)
        return x, None if self.cos_sin is None else self.cos_sin[:, here]

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        x, cos_sin = self.encode_positions(x)
        for layer in self.layers:
            x = run_layer(layer, x, cos_sin, recompute=self.recompute)
        return self.norm(x)


class SliceEmbedder(nn.Module):
    """The preceding slices, by position relative to the target, as one feature map s of slice size (figure 4a)."""

    sources: Tensor

    def __init__(self, config: SPNConfig) -> None:
        super().__init__()
        assert config.embedder is not None
        own, num_slices = config.embedder, config.num_slices
        self.intensity = IntensityEmbedding(num_values=config.num_values)
        self.given_intensity = None
        channels = slot_sources(config.scaling_factor).shape[1] * 24 + META_UNITS
        if config.num_given_bits:
            self.given_intensity = IntensityEmbedding(num_values=2**config.num_given_bits)
            # All high-bit slices in absolute order, and the target's own once more in channels of its own.
            channels += (num_slices + 1) * 24
        self.meta_position = nn.Embedding(num_slices, META_UNITS)
        self.register_buffer("sources", slot_sources(config.scaling_factor), persistent=False)
        self.attention = AttentionStack(own, in_channels=channels, slice_size=config.slice_size, causal=False)
        attn_width = own.num_attn_heads * own.attn_head_dim
        # Recipe modern: the image's pixels around a target pixel are spread over slices and neighbouring positions.
        self.stem = nn.Conv2d(attn_width, attn_width, 3, padding=1, bias=False) if own.recipe == "modern" else None
        self.widen = nn.Linear(attn_width, own.residual_channels)
        self.blocks = module_list(
            ResidualBlock(residual_channels=own.residual_channels, conv_channels=own.conv_channels)
            for _ in range(own.num_conv_layers)
        )
        self.out = nn.Linear(own.residual_channels, own.conv_channels)
        self.recompute = False

    def forward(self, slices: Tensor, index: Tensor, given: Tensor | None) -> Tensor:
        """slices, given [B, S*S, 3, h, w], targets index [B] -> s [B, h, w, conv_channels].

        Slices from the target on are never read.
        """
        x = self.attention.project(self.slots(slices, index, given))  # [B, h, w, D]
        if self.stem is not None:
            x = x + self.stem(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        x = self.attention(x.flatten(1, 2)).view(x.shape)
        x = self.widen(x)  # [B, h, w, R]
        for block in self.blocks:
            x = run_layer(block, x, recompute=self.recompute)
        return self.out(F.relu(x))  # [B, h, w, conv_channels]

    def slots(self, slices: Tensor, index: Tensor, given: Tensor | None) -> Tensor:
        """The embedder's input [B, h, w, channels]: 24 channels for each slot, zeros where no slice fills it; the
        meta-position; for depth upscaling 24 for each high-bit slice, and for the target's own.
        """
        seen = self.intensity(slices.permute(0, 1, 3, 4, 2))  # [B, S*S, h, w, 24]
        seen = F.pad(seen, (0, 0, 0, 0, 0, 0, 0, 1))  # slice number S*S is empty
        seen = seen[torch.arange(len(index), device=index.device)[:, None], self.sources[index]]  # [B, slots, h, w, 24]
        parts = [rearrange(seen, "b slots h w c -> b h w (slots c)")]
        parts.append(self.meta_position(index)[:, None, None].expand(*parts[0].shape[:3], -1))
        if self.given_intensity is not None:
            assert given is not None
            high = self.given_intensity(given.permute(0, 1, 3, 4, 2))  # [B, S*S, h, w, 24]
            parts += [rearrange(high, "b slices h w c -> b h w (slices c)"), target_slices(high, index)]
        return torch.cat(parts, dim=-1)


def shift_one_pixel(pixels: Tensor) -> Tensor:
    """[B, h, w, 24] -> [B, h*w, 24]: at each position the pixel before it in raster order, zeros at the first.

    So attention position t reads pixels before t, and needs no RGB mask.
    """
    return F.pad(pixels.flatten(1, 2)[:, :-1], (0, 0, 1, 0))


class Decoder(nn.Module):
    """Masked 1D self-attention over the target slice, then a Gated PixelCNN conditioned on it and on s (figure 4b).

    Recipe modern (modern.py) adds connections: attention also reads s and the pixels around, what it found enters the
    stream past the gates (`direct`), and the stream is normed for the head.
    """

    def __init__(self, config: SPNConfig) -> None:
        super().__init__()
        own, modern = config.decoder, config.decoder.recipe == "modern"
        attn_width = own.num_attn_heads * own.attn_head_dim
        context = 0 if config.embedder is None else config.embedder.conv_channels
        self.num_values = config.num_values
        self.intensity = IntensityEmbedding(num_values=config.num_values)
        self.stem = CausalStem(in_channels=24, width=attn_width) if modern else None
        self.attention = AttentionStack(own, in_channels=24, slice_size=config.slice_size, causal=True)
        self.surroundings = nn.Linear(context, attn_width, bias=False) if modern and context else None
        pixels, cond = self.intensity.groups(), attn_width + context
        self.layers = module_list(
            GatedPixelCNNLayer(own, cond_channels=cond, first_input=None if i else pixels)
            for i in range(own.num_layers)
        )
        self.direct = nn.Linear(cond, own.residual_channels, bias=False) if modern else None
        self.norm = GroupRMSNorm(own.residual_channels) if modern else None
        self.head = MaskedLinear(channel_groups(3 * config.num_values), channel_groups(own.residual_channels))
        self.recompute = False

    def forward(self, target: Tensor, context: Tensor | None) -> Tensor:
        """target [B, 3, h, w], context s [B, h, w, channels] or None -> logits [B, 3, V, h, w]."""
        pixels = self.intensity(target.permute(0, 2, 3, 1))  # [B, h, w, 24]
        cond = self.attention(self.attention_input(pixels, context))  # [B, h*w, D]
        cond = cond.unflatten(1, target.shape[2:])  # [B, h, w, D]
        if context is not None:
            cond = torch.cat([cond, context], dim=-1)  # [B, h, w, D + channels]
        x = pixels
        for layer in self.layers:
            x = run_layer(layer, x, cond, recompute=self.recompute)  # [B, h, w, R]
            if layer.is_first and self.direct is not None:
                x = x + self.direct(cond)
        return self.logits(x)

    def attention_input(self, pixels: Tensor, context: Tensor | None) -> Tensor:
        """Embedded pixels [B, h, w, 24], s -> [B, h*w, D]."""
        if self.stem is None:
            return self.attention.project(shift_one_pixel(pixels))
        local = self.stem(pixels)
        if self.surroundings is not None:
            local = local + self.surroundings(context).flatten(1, 2)
        return self.attention.project(shift_one_pixel(pixels)) + local

    def logits(self, x: Tensor) -> Tensor:
        """Stream [B, h, w, R] -> [B, 3, V, h, w]."""
        x = F.relu(x) if self.norm is None else self.norm(x)
        return self.head(x).unflatten(-1, (3, self.num_values)).permute(0, 3, 4, 1, 2)


class SPN(nn.Module):
    """One network of the chain: a slice embedder (unless the stage is a decoder alone) and a decoder."""

    def __init__(self, config: SPNConfig) -> None:
        super().__init__()
        self.config = config
        self.embedder = SliceEmbedder(config) if config.embedder is not None else None
        self.decoder = Decoder(config)
        init_weights(self)

    def context(self, slices: Tensor, index: Tensor, given: Tensor | None) -> Tensor | None:
        """The feature map s for target slices `index` [B]; reads only the slices before them. None without embedder."""
        if self.embedder is None:
            return None
        assert (given is None) == (self.config.num_given_bits == 0), "high bits are given exactly to depth upscaling"
        return self.embedder(slices, index, given)

    def forward(self, slices: Tensor, index: Tensor, given: Tensor | None = None) -> Tensor:
        """Logits [B, 3, V, h, w] of slice index[b] of image b, given the slices before it and itself up to each value.

        slices [B, S*S, 3, h, w] integers 0 .. V-1 (values this stage generates; ordering.image_to_slices), index [B]
        number of the target slice, given [B, S*S, 3, h, w] the more significant bits (depth upscaling only).
        """
        size = self.config.slice_size
        assert slices.shape[1:] == (self.config.num_slices, 3, size, size), slices.shape
        return self.decoder(target_slices(slices, index), self.context(slices, index, given))


def recompute_activations(model: SPN) -> None:
    """Trade time for memory in training: every layer keeps its input only and runs again in the backward pass."""
    for module in model.modules():
        if isinstance(module, AttentionStack | SliceEmbedder | Decoder):
            module.recompute = True


def nll_nats(logits: Tensor, target: Tensor) -> Tensor:
    """Negative log-likelihood in nats of each image, summed over its dims: [B, 3, V, h, w], [B, 3, h, w] -> [B].

    Always in float32 or wider, whatever the logits' type.
    """
    logits = logits.permute(0, 3, 4, 1, 2)  # the layout the decoder made: values last
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    target = target.permute(0, 2, 3, 1).long()
    nll = F.cross_entropy(logits.flatten(0, 3), target.flatten(), reduction="none")
    return nll.view(len(target), -1).sum(1)


@torch.no_grad()
def init_weights(model: SPN) -> None:
    """Glorot uniform everywhere (Tensor2Tensor's uniform_unit_scaling, fan_avg); biases 0; embeddings N(0, 1).

    Memory rows of parameter attention as Tensor2Tensor has them: keys of variance heads / width, values of 1.
    Recipe modern: what residual branches add starts at zero, so that a deep network begins as a shallow one; tables
    of intensities and the map to logits start as cosines of the intensity (`cosines`), so that near values are alike.
    Uses torch's default generator: seed it for equal weights.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight)
        elif isinstance(module, ParameterAttention):
            nn.init.normal_(module.keys, std=module.keys.shape[-1] ** -0.5)
            nn.init.normal_(module.values)
        elif isinstance(module, CausalStem):
            nn.init.xavier_uniform_(module.weight)
        elif isinstance(module, GroupRMSNorm):
            nn.init.ones_(module.gain)
    for module in model.modules():
        if isinstance(module, SelfAttention | ModernLayer):  # three maps in one matrix: each has its own fan
            for part in module.qkv.weight.chunk(3):
                nn.init.xavier_uniform_(part)
        if isinstance(module, ModernLayer):
            nn.init.zeros_(module.attn_out.weight)
            nn.init.zeros_(module.ffn_out.weight)
        if isinstance(module, GatedPixelCNNLayer) and module.norm is not None:
            nn.init.zeros_(module.up.weight)
    if model.embedder is not None and model.embedder.stem is not None:  # recipe modern
        for block in model.embedder.blocks:
            nn.init.zeros_(block.up.weight)
        _smooth_tables(model.embedder)
    if model.decoder.stem is not None:
        _smooth_tables(model.decoder)
        _smooth_head(model.decoder)


def cosines(num_values: int, frequencies: Sequence[int]) -> Tensor:
    """[V, frequencies]: cosines over the V intensities with so many half periods, of unit mean square.

    Frequencies below V are orthogonal (they are the DCT-II's).
    """
    phase = torch.pi * (torch.arange(num_values, dtype=torch.float64)[:, None] + 0.5) / num_values
    return (2**0.5 * torch.cos(phase * torch.tensor(frequencies, dtype=torch.float64))).float()


def _smooth_tables(part: nn.Module) -> None:
    """Units of each intensity table: the slowest cosines, then octaves, as far as the table tells them apart."""
    for module in part.modules():
        if isinstance(module, IntensityEmbedding):
            table = module.table.weight.unflatten(0, (3, -1))  # [3, V, units]
            chosen = [k for k in (1, 2, 3, 4, 8, 16, 32, 64) if k < table.shape[1]][: table.shape[2]]
            table[:, :, : len(chosen)] = cosines(table.shape[1], chosen)


def _smooth_head(decoder: Decoder) -> None:
    """Each group's logits as a cosine series, whose terms are the group's own channels, small and falling."""
    decoder.head.weight.zero_()
    values, first = decoder.num_values, 0
    for group, size in enumerate(group_sizes(decoder.head.in_features)):
        frequencies = range(1, min(values, size + 1))
        rows = cosines(values, frequencies) * HEAD_SCALE / torch.tensor(frequencies)
        decoder.head.weight[group * values : (group + 1) * values, first : first + len(frequencies)] = rows
        first += size


def parameter_counts(model: SPN) -> dict[str, int]:
    """Number of parameters by part, such as "decoder.attention", and in all ("total")."""
    counts: dict[str, int] = {}
    for name, p in model.named_parameters():
        for part in (".".join(name.split(".")[:2]), "total"):
            counts[part] = counts.get(part, 0) + p.numel()
    return counts
