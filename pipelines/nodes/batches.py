"""How the workers of a training share each batch: micro-batches that their memory holds, the rest by accumulation.

All of it follows from the configuration: whoever goes on with a training, on whatever machine, shares batches alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from data_prep.files import UserError
from spn.config import SPNConfig, TrainConfig
from spn.meta import bytes_to_have, usable_bytes

GIB = 2**30


@dataclass(frozen=True)
class BatchPlan:
    """How one optimiser step's batch is shared: batch_size = workers * micro_batch_size * accumulation, in slices."""

    batch_size: int
    num_workers: int
    micro_batch_size: int
    accumulation: int
    limit: str = "a worker's share"  # why a micro-batch is not larger
    counted_bytes: int | None = None  # memory of a worker; None: not on a GPU
    gpu_part: float = 1.0  # of a GPU that a worker has

    def __str__(self) -> str:
        counted = "" if self.counted_bytes is None else f"; {self.counted_bytes / GIB:.1f} GiB counted"
        return (
            f"batch of {self.batch_size:,} slices = {self.num_workers} worker{'s' if self.num_workers > 1 else ''} x "
            f"{self.micro_batch_size} slices x {self.accumulation} accumulated (limit: {self.limit}{counted})"
        )

    def refusal(self, gpu_bytes: int, *, stage: str) -> str | None:
        """One line if a worker's part of a GPU of this size is less than what was counted."""
        if self.counted_bytes is None or self.counted_bytes <= gpu_bytes * self.gpu_part:
            return None
        part = "" if self.gpu_part == 1 else f"{self.gpu_part:g} of "
        return (
            f"resources.gpu_memory_gib: training {stage} in micro-batches of {self.micro_batch_size} slices takes "
            f"{self.counted_bytes / GIB:.1f} GiB, of {part}a GPU with {gpu_bytes / GIB:.1f}; for smaller ones: "
            f"resources.gpu_memory_gib={math.floor(gpu_bytes / GIB)}"
        )


def batch_plan(
    train: TrainConfig,
    num_workers: int,
    *,
    key: str = "resources.num_workers",
    memory: str = "",
    fits: Callable[[int], bool] = lambda micro_batch_size: True,
) -> BatchPlan:
    """The largest micro-batches within train.micro_batch_size that fit and divide a worker's share of the batch.

    key: where num_workers was set, for the message. memory: name of the limit behind `fits`, which one slice has to
    pass. Raises ValueError where the workers cannot share the batch evenly.
    """
    share, rest = divmod(train.batch_size, num_workers)
    if rest:
        raise ValueError(f"train.batch_size is {train.batch_size}; {key}, {num_workers}, must divide it")
    limit, most = "a worker's share", share
    if train.micro_batch_size is not None and train.micro_batch_size < share:
        limit, most = f"train.micro_batch_size={train.micro_batch_size}", train.micro_batch_size
    allowed = [size for size in range(most, 0, -1) if share % size == 0]
    micro = next(size for size in allowed if fits(size))
    return BatchPlan(
        train.batch_size, num_workers, micro, share // micro, limit=limit if micro == allowed[0] else memory
    )


def gpu_batch_plan(
    model: SPNConfig,
    train: TrainConfig,
    num_workers: int,
    *,
    gpu_memory_gib: float | None,
    gpus_per_worker: float,
    key: str,
) -> BatchPlan:
    """The same on GPUs, within the memory of one if that is given, with the count of what a worker takes.

    key: where gpu_memory_gib was set, for the message. Raises UserError where not even one slice fits.
    """
    from spn.training_memory import training_memory

    counted, part = training_memory(model, train, num_workers=num_workers), min(1.0, gpus_per_worker)
    limits = {}
    if gpu_memory_gib is not None:
        usable = usable_bytes(int(gpu_memory_gib * part * GIB))
        if counted.total(1) > usable:
            least = math.ceil(bytes_to_have(counted.total(1)) / part / GIB)
            raise UserError(
                f"{key} is {gpu_memory_gib:g}; training {model.stage} takes {counted.total(1) / GIB:.1f} GiB even with "
                f"single slices: it must be at least {least}"
            )
        limits = {"memory": f"{key}={gpu_memory_gib:g}", "fits": lambda size: counted.total(size) <= usable}
    plan = batch_plan(train, num_workers, **limits)
    return replace(plan, counted_bytes=counted.total(plan.micro_batch_size), gpu_part=part)
