"""One network on several workers: each holds all of it, and gradients are averaged once an optimiser step.

The process group is the caller's: Ray Train makes it in the pipeline, benchmarks/ddp.py by itself.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from spn.gpu.compiling import compile_network


def num_workers() -> int:
    """Workers of this process's group; 1 without one."""
    return dist.get_world_size() if dist.is_initialized() else 1


def micro_batch_size(share: int, *, most: int | None = None) -> int:
    """The largest number of slices, at most `most`, that divides a worker's share of a batch."""
    return next(size for size in range(min(share, most or share), 0, -1) if share % size == 0)


def make_forward(model: nn.Module, *, compiled: bool, mode: str = "default") -> Callable[..., Tensor]:
    """What a training step calls instead of the model: compiled if asked for, wrapped where there are several workers.

    mode: how much the compiler tries out (spn/compiling.py).
    The wrapper has `no_sync`, so that micro-batches before a step's last exchange nothing. It begins with rank 0's
    weights on all workers.
    """
    forward = model
    if compiled:
        # By default the compiler cuts the graph into pieces, so that the exchange begins before the backward pass ends.
        # Once in a whole optimiser step that saves less than the cuts cost in every micro-batch.
        torch._dynamo.config.optimize_ddp = False
        forward = compile_network(model, mode=mode)
    return DistributedDataParallel(forward) if num_workers() > 1 else forward


def sum_over_workers(value: Tensor) -> Tensor:
    """The sum over all workers, on each of them. All must call it. `value` itself is left alone."""
    if num_workers() == 1:
        return value
    total = value.clone()
    dist.all_reduce(total)
    return total
