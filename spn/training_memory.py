"""GPU memory that training a network takes on one worker: counted from shapes, without a GPU.

A forward and a backward pass run on the meta device as a GPU would run them (meta.py), and what is alive at once is
added up. What a GPU really holds of that differs by a measured share: compiled code keeps less, torch's own calls some
more.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from spn.config import SPNConfig, TrainConfig
from spn.evaluation import EVAL_BATCH
from spn.meta import AsOnGPU, peak_bytes, sum_bytes
from spn.model import SPN, nll_nats, recompute_activations
from spn.optimizers import make_optimizer

# What a GPU holds of the passes as counted: the most that was measured on an H200 (benchmarks/results/), in bfloat16,
# by recipe where compiled. Compiled float32 was not measured: as counted.
COMPILED = {"paper": 0.91, "modern": 0.65}
UNCOMPILED = 1.1
MANY = 64  # slices of the larger of two micro-batches that are counted; others lie on their line


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes of one worker."""

    state: int  # weights, gradients, Polyak average, optimiser; with several workers what they exchange
    images: int  # of an optimiser step's micro-batches
    first: int  # that passes over one slice hold
    further: int  # over each further slice of a micro-batch
    beside: int  # least on top of state and images, whatever the micro-batch: optimiser, validation, next images

    def passes(self, micro_batch_size: int) -> int:
        return max(self.first + (micro_batch_size - 1) * self.further, self.beside)

    def total(self, micro_batch_size: int) -> int:
        return self.state + self.images + self.passes(micro_batch_size)


def training_memory(config: SPNConfig, train: TrainConfig, *, num_workers: int) -> TrainingMemory:
    """Memory of each of the workers that share the batches of a training."""
    counted = _count(config, train.optimizer, train.precision, train.recompute_activations)
    kept = _kept(config, train)
    # 64-bit values of an optimiser step's images, and as many of the given bits.
    image_bytes = 3 * config.image_size**2 * 8 * (2 if config.num_given_bits else 1)
    images = train.batch_size // num_workers * image_bytes
    return TrainingMemory(
        state=counted.weights * (3 if num_workers == 1 else 4) + counted.optimizer,
        images=images,
        first=int(kept * counted.one),
        further=int(kept * (counted.many - counted.one) / (MANY - 1)),
        beside=max(counted.step, int(UNCOMPILED * counted.scoring), images),
    )


def _kept(config: SPNConfig, train: TrainConfig) -> float:
    if not train.compile:
        return UNCOMPILED
    recipes = {part.recipe for part in (config.decoder, config.embedder) if part is not None}
    return max(COMPILED[recipe] for recipe in recipes) if train.precision == "bfloat16" else 1.0


@dataclass(frozen=True)
class _Counted:
    """Bytes as they are on the meta device."""

    weights: int
    optimizer: int  # its state
    step: int  # that its step holds for a moment
    one: int  # alive at once in a forward and a backward pass over one slice
    many: int  # over MANY
    scoring: int  # while images are scored; never compiled


@functools.lru_cache(maxsize=64)
def _count(config: SPNConfig, optimizer: str, precision: str, recompute: bool) -> _Counted:
    with torch.device("meta"):
        model = SPN(config).train()
    if recompute:
        recompute_activations(model)
    weights = list(model.parameters())
    for p in weights:
        p.grad = torch.empty_like(p)  # there already, as in all micro-batches but a step's first
    own = [*weights, *(p.grad for p in weights), *model.buffers()]
    one, many = (_peak_of_passes(model, batch, precision, own) for batch in (1, MANY))
    made = make_optimizer(model, TrainConfig(optimizer=optimizer))
    for group in made.param_groups:
        if "foreach" in group:  # AdamW, which a GPU runs over all tensors at once
            group["foreach"] = True
    stepping = peak_bytes(made.step, apart_from=own)
    state = sum_bytes(x for x in tree_leaves(made.state_dict()) if isinstance(x, Tensor))
    # The averaged weights are in the model then; its own are kept beside them, but no gradients are.
    scoring = _peak_of_scoring(model.eval(), precision, own)
    return _Counted(sum_bytes(weights), state, stepping - state, one, many, scoring)


def _peak_of_passes(model: SPN, batch: int, precision: str, own: Sequence[Tensor]) -> int:
    image, index, given = _inputs(model.config, batch)

    def work() -> None:
        with AsOnGPU(precision):
            loss = nll_nats(model(image, index, given), model.target(image, index)).sum()
            # From the edge, not the tensor: a call with tensors would leave the mode, and layers that are computed
            # again would run as on the meta device.
            edge = torch.autograd.graph.get_gradient_edge(loss)
            torch.autograd.backward(edge, torch.ones_like(loss))

    return peak_bytes(work, apart_from=[*own, image, index])


def _peak_of_scoring(model: SPN, precision: str, own: Sequence[Tensor]) -> int:
    image, index, given = _inputs(model.config, EVAL_BATCH)

    @torch.no_grad()
    def work() -> None:
        with AsOnGPU(precision):
            nll_nats(model(image, index, given), model.target(image, index))

    return peak_bytes(work, apart_from=[*own, image, index])


def _inputs(config: SPNConfig, batch: int) -> tuple[Tensor, Tensor, Tensor | None]:
    size = config.image_size
    image = torch.zeros((batch, 3, size, size), dtype=torch.long, device="meta")
    index = torch.zeros((batch,), dtype=torch.long, device="meta")
    return image, index, image if config.num_given_bits else None
