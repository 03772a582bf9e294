"""The Subscale Pixel Network: slice embedder and masked decoder (paper section 3.2, figure 4, table 4)."""

from __future__ import annotations

from dataclasses import dataclass, field

STAGES = ("baseline", "first_slice", "size_upscale", "depth_upscale")


def _positive(owner: object, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")


@dataclass(frozen=True)
class DecoderConfig:
    """Masked 1D self-attention followed by a Gated PixelCNN (table 4, "Decoder")."""

    num_layers: int = 15  # gated PixelCNN layers
    conv_channels: int = 256
    residual_channels: int = 1280
    num_attn_layers: int = 8
    num_attn_heads: int = 10
    attn_head_dim: int = 128  # channels a head; attention width = heads * channels a head
    num_memory_rows: int = 1280  # learned key/value rows of parameter attention
    dropout: float = 0.0

    def __post_init__(self) -> None:
        _positive(self, "num_layers", "conv_channels", "residual_channels", "num_attn_heads", "attn_head_dim")
        _positive(self, "num_memory_rows")


@dataclass(frozen=True)
class EmbedderConfig:
    """Self-attention, then residual convolution blocks, over the preceding slices (table 4, "Slice Embedder")."""

    num_conv_layers: int = 5
    conv_channels: int = 256
    residual_channels: int = 1024
    num_attn_layers: int = 6
    num_attn_heads: int = 4
    attn_head_dim: int = 64
    num_memory_rows: int = 1280
    dropout: float = 0.0

    def __post_init__(self) -> None:
        _positive(self, "num_conv_layers", "conv_channels", "residual_channels", "num_attn_heads", "attn_head_dim")
        _positive(self, "num_memory_rows")


@dataclass(frozen=True)
class SPNConfig:
    """One separately trained network of the chain."""

    stage: str  # baseline | first_slice | size_upscale | depth_upscale | depth_upscale_<d>
    image_size: int  # H = W of the full image
    scaling_factor: int  # S: the image is cut into S * S slices
    num_bits: int  # bits a channel that this stage generates
    num_given_bits: int = 0  # more significant bits it is conditioned on (depth upscaling)
    decoder: DecoderConfig = field(default_factory=DecoderConfig)
    embedder: EmbedderConfig | None = None  # None: decoder alone (baseline, first_slice)
