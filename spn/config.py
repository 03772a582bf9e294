"""Settings of the networks and of their training, as frozen dataclasses that check themselves.

Defaults are the paper's (table 4). An error names the field and its value.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

RECIPES = ("paper", "modern")
STAGES = ("baseline", "first_slice", "size_upscale", "depth_upscale")
OPTIMIZERS = ("rmsprop", "adamw", "muon")
SCHEDULES = ("piecewise", "cosine", "linear")
SLICES = ("all", "first")
PRECISIONS = ("float32", "bfloat16")
DECODERS = ("auto", "fused", "plain", "jacobi")  # of sampling


def execution(default: Any) -> Any:
    """A field for how training is executed, which no fingerprint counts: a change of it is no reason to train again.

    "Not semantic" means that results are equal up to rounding. With dropout, masks follow the micro-batch, so another
    size draws other masks of the same distribution. What chooses among weights is semantic: how often validation and
    checkpoints come decides which ones are handed over.
    """
    return field(default=default, metadata={"semantic": False})


def first_given(stage: str, stages: Iterable[str]) -> bool:
    """Whether another network of the chain makes slice (0, 0) for a stage, which then answers for the others."""
    return stage == "size_upscale" and "first_slice" in stages


def _one_of(name: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(allowed)}")


def _at_least(owner: object, least: int, *names: str) -> None:
    """None passes."""
    for name in names:
        value = getattr(owner, name)
        if value is not None and not least <= value < math.inf:
            raise ValueError(f"{name} is {value}; it must be at least {least}")


def _below_one(owner: object, *names: str) -> None:
    for name in names:
        if not 0 <= getattr(owner, name) < 1:
            raise ValueError(f"{name} is {getattr(owner, name)}; it must be at least 0 and below 1")


def _check_sizes(own: DecoderConfig | EmbedderConfig, num_layers: str) -> None:
    """What decoder and embedder have in common; `num_layers` names the field of the convolutional part."""
    _at_least(own, 1, num_layers, "conv_channels", "residual_channels", "num_attn_heads", "attn_head_dim")
    _at_least(own, 1, "num_memory_rows")
    _at_least(own, 0, "num_attn_layers")
    _below_one(own, "dropout")
    _one_of("recipe", own.recipe, RECIPES)
    if own.num_attn_heads * own.attn_head_dim % 2:
        width = f"num_attn_heads {own.num_attn_heads} * attn_head_dim {own.attn_head_dim}"
        raise ValueError(f"attention width is {width}; it must be even, half sines and half cosines of the position")
    if own.recipe == "modern" and own.attn_head_dim % 4:
        raise ValueError(f"attn_head_dim is {own.attn_head_dim}; with recipe modern it must be a multiple of 4")


@dataclass(frozen=True)
class DecoderConfig:
    """Masked 1D self-attention followed by a Gated PixelCNN (table 4, "Decoder")."""

    num_layers: int = 15  # gated PixelCNN layers
    conv_channels: int = 256
    residual_channels: int = 1280
    num_attn_layers: int = 8
    num_attn_heads: int = 10
    attn_head_dim: int = 128  # channels per head; attention width = heads * channels per head
    num_memory_rows: int = 1280  # learned key/value rows of parameter attention
    dropout: float = 0.0
    recipe: str = "paper"  # modern: blocks of spn/modern.py; num_memory_rows is then the feed-forward layer's units

    def __post_init__(self) -> None:
        _check_sizes(self, "num_layers")


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
    recipe: str = "paper"  # modern: blocks of spn/modern.py; num_memory_rows is then the feed-forward layer's units

    def __post_init__(self) -> None:
        _check_sizes(self, "num_conv_layers")


@dataclass(frozen=True)
class SPNConfig:
    """One separately trained network of the chain."""

    stage: str  # baseline | first_slice | size_upscale | depth_upscale | depth_upscale_<d>
    image_size: int  # H = W of the full image
    scaling_factor: int  # S: the image is cut into S * S slices
    num_bits: int  # bits per channel that this stage generates
    num_given_bits: int = 0  # more significant bits it is conditioned on (depth upscaling)
    decoder: DecoderConfig = field(default_factory=DecoderConfig)
    embedder: EmbedderConfig | None = None  # None: decoder alone (baseline, first_slice)

    def __post_init__(self) -> None:
        if self.stage not in STAGES and not re.fullmatch(r"depth_upscale_[1-8]", self.stage):
            raise ValueError(f"stage is {self.stage!r}; it must be one of {', '.join(STAGES)}, depth_upscale_<bits>")
        _at_least(self, 1, "image_size", "scaling_factor", "num_bits")
        if self.image_size % self.scaling_factor:
            raise ValueError(
                f"image_size is {self.image_size}; scaling_factor {self.scaling_factor} does not divide it"
            )
        if self.num_given_bits < 0 or self.num_given_bits + self.num_bits > 8:
            total = f"{self.num_given_bits} given + {self.num_bits} generated"
            raise ValueError(f"bits are {total}; together they must be between 1 and 8")
        if self.embedder is None and (self.num_given_bits or self.stage.startswith(("size", "depth"))):
            raise ValueError(f"embedder is None; stage {self.stage} reads earlier slices or high bits and needs one")
        if self.stage.startswith("depth") and not self.num_given_bits:
            raise ValueError(f"num_given_bits is 0; stage {self.stage} needs high bits to add to")
        if self.stage == "baseline" and self.scaling_factor != 1:
            raise ValueError(f"scaling_factor is {self.scaling_factor}; the baseline generates the whole image, with 1")

    @property
    def slice_size(self) -> int:
        return self.image_size // self.scaling_factor

    @property
    def num_slices(self) -> int:
        return self.scaling_factor**2

    @property
    def num_values(self) -> int:
        return 2**self.num_bits


@dataclass(frozen=True)
class TrainConfig:
    """Defaults are the paper's (table 4, ImageNet 64)."""

    num_steps: int = 200_000  # the paper gives none
    batch_size: int = 2048  # slices per optimiser step, over all workers and accumulated micro-batches
    micro_batch_size: int | None = execution(None)  # most slices on a worker at once; None: its share of the batch
    optimizer: str = "rmsprop"  # TensorFlow's RMSProp; adamw; muon (matrices; adamw for all else)
    learning_rate: float = 1e-4
    schedule: str = "piecewise"
    lr_boundaries: list[int] = field(default_factory=list)  # steps at which the rate drops
    lr_values: list[float] = field(default_factory=list)  # the rate from each boundary on
    warmup_steps: int = 0  # linear warm-up, with every schedule
    momentum: float = 0.9  # adamw: beta1
    decay: float = 0.95  # of the mean square; adamw: beta2
    epsilon: float = 1e-8
    adamw_learning_rate: float = 1.5e-3  # muon only: rate of the parameters that are not matrices
    cooldown: float = 0.6  # linear schedule: the last share of the steps, over which the rate falls to zero
    weight_decay: float = 0.0  # adamw and muon
    grad_clip: float | None = None  # global norm; None: no clipping
    polyak_decay: float = 0.9999
    polyak_warmup: bool = False  # min(polyak_decay, (1 + n) / (10 + n)) at step n
    slices: str = "all"  # first_slice stage: train on slice (0, 0) only ("first") or on all meta-positions
    horizontal_flip: bool = False
    precision: str = "float32"  # bfloat16: products, streams, logits; weights, softmax and loss stay float32
    compile: bool = execution(False)  # torch.compile: about a minute at the start, much faster steps on a GPU
    recompute_activations: bool = execution(False)  # a third more work, a fraction of the memory
    init_from: str | None = None  # path or URI of a checkpoint folder whose averaged weights training starts from
    eval_every_steps: int = 1000
    num_valid_images: int | None = None  # a fixed seeded set; None: all of the validation split
    checkpoint_every_steps: int = 1000  # the best of these is what a training hands over
    log_every_steps: int = execution(50)

    def __post_init__(self) -> None:
        _one_of("optimizer", self.optimizer, OPTIMIZERS)
        _one_of("schedule", self.schedule, SCHEDULES)
        _one_of("slices", self.slices, SLICES)
        _one_of("precision", self.precision, PRECISIONS)
        _at_least(self, 1, "num_steps", "batch_size", "micro_batch_size", "num_valid_images")
        _at_least(self, 1, "eval_every_steps", "checkpoint_every_steps", "log_every_steps")
        _at_least(self, 0, "weight_decay", "warmup_steps", "adamw_learning_rate")
        _below_one(self, "momentum", "decay", "polyak_decay")
        rates = (("learning_rate", self.learning_rate), *(("lr_values", rate) for rate in self.lr_values))
        for name, value in (("epsilon", self.epsilon), *rates):  # masked weights have no gradient: it divides theirs
            if not 0 < value < math.inf:
                raise ValueError(f"{name} is {value}; it must be above 0")
        if len(self.lr_boundaries) != len(self.lr_values):
            raise ValueError(f"lr_values has {len(self.lr_values)} rates for {len(self.lr_boundaries)} lr_boundaries")
        if sorted(set(self.lr_boundaries)) != list(self.lr_boundaries):
            raise ValueError(f"lr_boundaries is {list(self.lr_boundaries)}; steps must increase")
        if self.lr_boundaries and (self.schedule != "piecewise" or self.lr_boundaries[0] < 0):
            raise ValueError(f"lr_boundaries is {list(self.lr_boundaries)}; it holds steps of a piecewise schedule")
        if not 0 < self.cooldown <= 1:
            raise ValueError(f"cooldown is {self.cooldown}; it must be above 0 and at most 1")
        if self.grad_clip is not None and not self.grad_clip > 0:
            raise ValueError(f"grad_clip is {self.grad_clip}; it must be above 0, or null")
        if self.checkpoint_every_steps % self.eval_every_steps:
            raise ValueError(
                f"checkpoint_every_steps is {self.checkpoint_every_steps}; it must be a multiple of eval_every_steps "
                f"{self.eval_every_steps}, so that every checkpoint has a validation score"
            )
