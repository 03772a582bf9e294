"""torch.compile, set for these networks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

# Where a graph has convolutions, the compiler by default lays out all tensors of four axes as images, channels last:
# here also the heads of attention and the streams [B, h, w, C], whose last axis it takes for a width. All of them were
# transposed before and after each use. The convolutions need no help: what they read lies channels last already.
OPTIONS = {"layout_optimization": False}
# What the compiler tries out on the GPU at the start of a training, more and more of it.
MODES = {
    "default": {},
    "tuned": {"coordinate_descent_tuning": True},  # block sizes of the kernels that it writes itself
    "max_autotune": {"coordinate_descent_tuning": True, "max_autotune": True},  # also products by kernels of its own
}


def compile_network(model: nn.Module | Callable[..., Tensor], *, mode: str = "default") -> Callable[..., Tensor]:
    """What a training step calls instead of the model; compiled at the first call, for each shape of a batch."""
    return torch.compile(model, options={**OPTIONS, **MODES[mode]})
