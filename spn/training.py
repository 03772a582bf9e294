"""Loss, optimisers, Polyak averaging and the training loop (paper section 3.3, table 4 "Optimization")."""

from __future__ import annotations

from dataclasses import dataclass, field

OPTIMIZERS = ("rmsprop", "adamw")
SCHEDULES = ("piecewise", "cosine")
SLICES = ("all", "first")
PRECISIONS = ("float32", "bfloat16")


@dataclass(frozen=True)
class TrainConfig:
    """Defaults are the paper's (table 4, ImageNet 64)."""

    num_steps: int = 200_000
    batch_size: int = 2048  # slices an optimiser step, over all workers and accumulated micro-batches
    micro_batch_size: int | None = None  # slices a worker holds at once; None: batch_size / workers
    optimizer: str = "rmsprop"  # TensorFlow's RMSProp, or adamw
    learning_rate: float = 1e-4
    schedule: str = "piecewise"
    lr_boundaries: list[int] = field(default_factory=list)  # steps at which the rate drops
    lr_values: list[float] = field(default_factory=list)  # the rate from each boundary on
    warmup_steps: int = 0  # linear, both schedules
    momentum: float = 0.9
    decay: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.0  # adamw only
    grad_clip: float | None = None  # global norm; None: no clipping
    polyak_decay: float = 0.9999
    polyak_warmup: bool = False  # min(polyak_decay, (1 + n) / (10 + n)) at step n
    slices: str = "all"  # first_slice stage: train on slice (0, 0) only ("first") or on all meta-positions
    horizontal_flip: bool = False
    precision: str = "float32"
    eval_every_steps: int = 1000
    num_valid_images: int | None = None  # a fixed seeded set; None: all of the validation split
    checkpoint_every_steps: int = 1000
    log_every_steps: int = 50
