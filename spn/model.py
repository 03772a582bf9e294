"""The Subscale Pixel Network: slice embedder and masked decoder (paper section 3.2, figure 4, table 4).

B batch, H W image, S scaling factor (S * S slices), h w slice (h = H/S), V values (2 ** num_bits).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spn.config import DecoderConfig, EmbedderConfig, SPNConfig
from spn.layers import (
    AttentionStack,
    GatedPixelCNNLayer,
    IntensityEmbedding,
    MaskedLinear,
    ParameterAttention,
    ResidualBlock,
    SelfAttention,
    add_product,
    add_shift,
    bias_in_shift,
    channel_groups,
    group_sizes,
    run_group,
    run_layer,
)
from spn.modern import CausalStem, GroupNorm, ModernLayer, ModernStack
from spn.ordering import image_to_slices, slot_sources


def attention_stack(
    own: DecoderConfig | EmbedderConfig, *, in_channels: int, slice_size: int, causal: bool
) -> AttentionStack | ModernStack:
    """The attention part of a decoder or embedder, by its recipe."""
    sizes = dict(num_layers=own.num_attn_layers, num_heads=own.num_attn_heads, head_dim=own.attn_head_dim)
    if own.recipe == "modern":
        return ModernStack(
            in_channels=in_channels,
            slice_size=slice_size,
            hidden=own.num_memory_rows,
            causal=causal,
            dropout=own.dropout,
            **sizes,
        )
    return AttentionStack(
        in_channels=in_channels,
        length=slice_size**2,
        num_rows=own.num_memory_rows,
        causal=causal,
        dropout=own.dropout,
        **sizes,
    )


META_UNITS = 8  # units of the meta-position embedding (section 3.2)
HEAD_SCALE = 0.3  # recipe modern: of the slowest cosine in the first logits


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
        device = self.meta_position.weight.device
        self.register_buffer("sources", slot_sources(config.scaling_factor).to(device), persistent=False)
        self.attention = attention_stack(own, in_channels=channels, slice_size=config.slice_size, causal=False)
        attn_width = own.num_attn_heads * own.attn_head_dim
        # Recipe modern: the image's pixels around a target pixel are spread over slices and neighbouring positions.
        self.stem = nn.Conv2d(attn_width, attn_width, 3, padding=1, bias=False) if own.recipe == "modern" else None
        self.widen = nn.Linear(attn_width, own.residual_channels)
        self.blocks = nn.ModuleList(
            ResidualBlock(residual_channels=own.residual_channels, conv_channels=own.conv_channels)
            for _ in range(own.num_conv_layers)
        )
        self.out = nn.Linear(own.residual_channels, own.conv_channels)
        self.recompute = False

    def projected(self, slices: Tensor, index: Tensor, given: Tensor | None) -> Tensor:
        """The embedder's input through its first map: slices, given [B, S*S, 3, h, w], index [B] -> [B, h, w, D].

        The input has 24 channels for each slot, then those of the meta-position, then 24 for each high-bit slice and
        for the target's own. It is never made: each slice is embedded once, and of the map's columns each target gets
        those of the slots that its slices fill, so that empty slots cost nothing.
        """
        batch, num_slices, _, height, width = slices.shape
        num_slots, project = self.sources.shape[1], self.attention.project
        sizes = [num_slots * 24, META_UNITS] + ([num_slices * 24, 24] if self.given_intensity is not None else [])
        columns = project.weight.split(sizes, dim=1)
        fills = self.sources[index, None] == torch.arange(num_slices, device=index.device)[:, None]  # [B, S*S, slots]
        by_slot = columns[0].unflatten(1, (num_slots, 24)).permute(1, 2, 0).flatten(1)  # [slots, 24 * D]
        weight = (fills.to(by_slot.dtype) @ by_slot).view(batch, num_slices * 24, -1)
        seen = self.intensity(slices.permute(0, 3, 4, 1, 2)).flatten(3)  # [B, h, w, S*S * 24]
        x = (seen.flatten(1, 2) @ weight).view(batch, height, width, -1)
        x = x + F.linear(self.meta_position(index), columns[1], project.bias)[:, None, None]
        if self.given_intensity is None:
            return x
        assert given is not None
        own = given[torch.arange(batch, device=index.device), index]
        x = x + F.linear(self.given_intensity(given.permute(0, 3, 4, 1, 2)).flatten(3), columns[2])
        return x + F.linear(self.given_intensity(own.permute(0, 2, 3, 1)), columns[3])

    def forward(self, slices: Tensor, index: Tensor, given: Tensor | None) -> Tensor:
        """Slices of the values generated so far (later ones are never read) -> s [B, h, w, conv_channels]."""
        x = self.projected(slices, index, given)
        batch, height, width, _ = x.shape
        if self.stem is not None:
            x = x + self.stem(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        x = self.attention.after_project(x.flatten(1, 2)).view(batch, height, width, -1)
        x, shift = bias_in_shift(F.linear(x, self.widen.weight), self.widen.bias), self.widen.bias.detach()
        for block in self.blocks:
            x, shift = run_layer(block, x, shift, recompute=self.recompute)
        return self.out(F.relu(x + shift.to(x.dtype)))


LAYERS_A_GROUP = 5  # PixelCNN layers between two updates of the wide stream


class Decoder(nn.Module):
    """Masked 1D self-attention over the target slice, then a Gated PixelCNN conditioned on it and on s (figure 4b)."""

    def __init__(self, config: SPNConfig) -> None:
        super().__init__()
        own = config.decoder
        self.num_values = config.num_values
        self.intensity = IntensityEmbedding(num_values=config.num_values)
        attn_width = own.num_attn_heads * own.attn_head_dim
        modern = own.recipe == "modern"
        self.stem = CausalStem(in_channels=24, width=attn_width) if modern else None
        self.attention = attention_stack(own, in_channels=24, slice_size=config.slice_size, causal=True)
        # Recipe modern: attention reads s, too. The paper's decoder has it for the PixelCNN's gates only.
        self.surroundings = None
        if modern and config.embedder is not None:
            self.surroundings = nn.Linear(config.embedder.conv_channels, attn_width, bias=False)
        cond_channels = attn_width + (config.embedder.conv_channels if config.embedder else 0)
        self.layers = nn.ModuleList(
            GatedPixelCNNLayer(
                conv_channels=own.conv_channels,
                residual_channels=own.residual_channels,
                cond_channels=cond_channels,
                first_input=self.intensity.groups() if i == 0 else None,
                norm=GroupNorm(own.residual_channels) if modern and i > 0 else None,
            )
            for i in range(own.num_layers)
        )
        # Recipe modern: what attention found enters the stream past the gates, and the stream is normed for the head.
        self.direct = nn.Linear(cond_channels, own.residual_channels, bias=False) if modern else None
        self.norm = GroupNorm(own.residual_channels) if modern else None
        self.head = MaskedLinear(channel_groups(3 * config.num_values), channel_groups(own.residual_channels))
        self.layers_a_group = LAYERS_A_GROUP
        self.recompute = False

    def forward(self, target: Tensor, context: Tensor | None) -> Tensor:
        """target [B, 3, h, w], context s [B, h, w, channels] or None -> logits [B, 3, V, h, w]."""
        batch, _, height, width = target.shape
        pixels = self.intensity(target.permute(0, 2, 3, 1))  # [B, h, w, 24]
        # Shifted by one pixel in raster order: attention position t reads pixels before t, so it needs no RGB mask.
        before = [F.pad(pixels.flatten(1, 2)[:, :-1], (0, 0, 1, 0))]
        if self.stem is not None:
            local = self.stem(pixels)
            if self.surroundings is not None:
                assert context is not None
                local = local + self.surroundings(context).flatten(1, 2)
            before.append(local)
        cond = self.attention(*before).view(batch, height, width, -1)
        if context is not None:
            cond = torch.cat([cond, context.to(cond.dtype)], dim=-1)
        layers = list(self.layers)
        shares = F.linear(cond, torch.cat([layer.cond.weight for layer in layers])).chunk(len(layers), dim=-1)
        x, shift = pixels, None
        if self.direct is None:
            for start in range(0, len(layers), self.layers_a_group):
                group = slice(start, start + self.layers_a_group)
                x, shift = run_layer(run_group, layers[group], x, shift, shares[group], recompute=self.recompute)
        else:
            for layer, share in zip(layers, shares, strict=True):
                x, shift = run_layer(layer, x, shift, share, recompute=self.recompute)
                if layer.is_first:
                    x = add_product(x, cond, self.direct.weight)
        x = add_shift(x, shift)
        x = F.relu(x) if self.norm is None else self.norm(x)
        logits = self.head(x).view(batch, height, width, 3, self.num_values)
        return logits.permute(0, 3, 4, 1, 2)


class SPN(nn.Module):
    """One network of the chain: a slice embedder (unless the stage is a decoder alone) and a decoder."""

    def __init__(self, config: SPNConfig) -> None:
        super().__init__()
        self.config = config
        self.embedder = SliceEmbedder(config) if config.embedder is not None else None
        self.decoder = Decoder(config)
        init_weights(self)

    def context(self, image: Tensor, index: Tensor, given: Tensor | None) -> Tensor | None:
        """The feature map s for target slices `index` [B]; reads only the slices before them. None without embedder."""
        if self.embedder is None:
            return None
        assert (given is None) == (self.config.num_given_bits == 0), "high bits are given exactly to depth upscaling"
        size = self.config.scaling_factor
        return self.embedder(
            image_to_slices(image, size), index, None if given is None else image_to_slices(given, size)
        )

    def target(self, image: Tensor, index: Tensor) -> Tensor:
        """The slices `index` [B] of image [B, 3, H, W] -> [B, 3, h, w]."""
        slices = image_to_slices(image, self.config.scaling_factor)
        return slices[torch.arange(len(index), device=image.device), index]

    def forward(self, image: Tensor, index: Tensor, given: Tensor | None = None) -> Tensor:
        """Logits [B, 3, V, h, w] of slice index[b] of image[b], given the slices before it and itself up to each value.

        image [B, 3, H, W] integers 0 .. V-1 (values this stage generates), index [B] number of the target slice,
        given [B, 3, H, W] the more significant bits (depth upscaling only).
        """
        assert image.ndim == 4 and image.shape[1] == 3, image.shape
        assert image.shape[2] == image.shape[3] == self.config.image_size, image.shape
        return self.decoder(self.target(image, index), self.context(image, index, given))


def recompute_activations(model: SPN) -> None:
    """Trade time for memory in training: every layer keeps its input only and runs again in the backward pass."""
    for module in model.modules():
        if isinstance(module, AttentionStack | ModernStack | SliceEmbedder | Decoder):
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
        elif isinstance(module, GroupNorm):
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
    if model.embedder is not None and model.config.embedder.recipe == "modern":
        for block in model.embedder.blocks:
            nn.init.zeros_(block.up.weight)
        _smooth_tables(model.embedder)
    if model.config.decoder.recipe == "modern":
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
    """Number of parameters by part, and in all ("total")."""
    parts: dict[str, nn.Module] = {}
    if model.embedder is not None:
        if model.embedder.stem is not None:
            parts["embedder_stem"] = model.embedder.stem
        parts["embedder_attention"] = model.embedder.attention
    if model.decoder.stem is not None:
        parts["decoder_stem"] = model.decoder.stem
    if model.decoder.surroundings is not None:
        parts["decoder_surroundings"] = model.decoder.surroundings
    parts["decoder_attention"] = model.decoder.attention
    parts["decoder_pixelcnn"] = model.decoder.layers
    if model.decoder.direct is not None:
        parts["decoder_direct"] = model.decoder.direct
    parts["decoder_head"] = model.decoder.head
    counts = {name: sum(p.numel() for p in module.parameters()) for name, module in parts.items()}
    if model.embedder is not None:
        convs = (model.embedder.widen, model.embedder.blocks, model.embedder.out)
        counts["embedder_convolutions"] = sum(p.numel() for m in convs for p in m.parameters())
    total = sum(p.numel() for p in model.parameters())
    counts["intensity_and_position_embeddings"] = total - sum(counts.values())
    counts["total"] = total
    return counts
