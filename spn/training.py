"""Loss, optimisers, Polyak averaging and the training loop (paper section 3.3, table 4 "Optimization").

The loop knows one network and the batches it is handed; wrapping for several workers happens outside.
B batch, H W image, S scaling factor.
"""

from __future__ import annotations

import contextlib
import copy
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from spn.config import SPNConfig, TrainConfig
from spn.model import SPN, nll_nats
from spn.optimizers import make_optimizers
from spn.ordering import image_to_slices, target_slices


@dataclass(frozen=True)
class Batch:
    """One micro-batch on one worker."""

    image: Tensor  # [B, 3, H, W] integers that this stage generates
    index: Tensor  # [B] target slice of each image
    given: Tensor | None  # [B, 3, H, W] more significant bits, for depth upscaling
    keys: Sequence[str]  # of the images, for messages
    seed: int | None = None  # of dropout in this micro-batch; None: torch's random state goes on


def learning_rate(config: TrainConfig, step: int) -> float:
    """Rate of optimiser step `step` (counted from 0): linear warm-up, then piecewise constant, or to zero."""
    rate = config.learning_rate
    if config.schedule == "piecewise":
        for boundary, value in zip(config.lr_boundaries, config.lr_values, strict=True):
            if step >= boundary:
                rate = value
    elif config.schedule == "linear":
        rate *= min(1.0, (config.num_steps - step) / max(1.0, config.cooldown * config.num_steps))
    else:
        done = max(0, step - config.warmup_steps) / max(1, config.num_steps - config.warmup_steps)
        rate *= 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    if step < config.warmup_steps:
        rate *= (step + 1) / config.warmup_steps
    return rate


@torch.no_grad()
def update_ema(ema: nn.Module, model: nn.Module, config: TrainConfig, *, num_updates: int) -> None:
    """After optimiser step number `num_updates` (from 1): ema <- ema - (1 - decay)(ema - weight), for each weight, as
    tf.train.ExponentialMovingAverage does, with its warm-up if `polyak_warmup`."""
    decay = config.polyak_decay
    if config.polyak_warmup:
        decay = min(decay, (1 + num_updates) / (10 + num_updates))
    torch._foreach_lerp_(list(ema.parameters()), [p.detach() for p in model.parameters()], 1 - decay)


class NonFiniteLoss(RuntimeError):
    """Loss or gradient became NaN or infinite: training stops, and nothing of that step is handed out."""


class FiniteCheck:
    """Is a step's loss and gradient finite? On a GPU the answer is read later, so that it never waits for the CPU."""

    def __init__(self, values: Tensor, message: Callable[[float, float], str]) -> None:
        """values [2]: loss and gradient norm; message: of them, the error's."""
        self.message, self.event = message, None
        self.values = values
        if values.is_cuda:
            self.values = torch.empty_like(values, device="cpu", pin_memory=True)
            self.values.copy_(values, non_blocking=True)
            self.event = torch.cuda.Event()
            self.event.record()

    def check(self) -> None:
        if self.event is not None:
            self.event.synchronize()
        if not torch.isfinite(self.values).all():
            raise NonFiniteLoss(self.message(*self.values.tolist()))


@dataclass
class TrainState:
    """All that resuming needs, beside the data position, which is step * batch_size."""

    model: SPN
    ema: SPN  # Polyak average of the weights, from their initial values: a network of its own, for evaluation only
    optimizers: Sequence[torch.optim.Optimizer]
    step: int = 0
    finite: FiniteCheck | None = None  # of the last step, until it is read

    @classmethod
    def create(cls, model: SPN, config: TrainConfig) -> TrainState:
        """Of a network that stands on its device in its fast forms, since the average is a copy of it."""
        return cls(model, copy.deepcopy(model).eval(), make_optimizers(model, config))

    def trainer_dict(self) -> dict[str, Any]:
        """Contents of trainer.pt: plain containers and tensors only."""
        optimizers = {str(number): optimizer.state_dict() for number, optimizer in enumerate(self.optimizers)}
        state = {"step": self.step, "optimizer": optimizers, "rng": torch.get_rng_state()}
        if torch.cuda.is_available():
            state["cuda_rng"] = torch.cuda.get_rng_state()
        return state

    def check(self) -> None:
        """Wait until the last step is known to be good. Raises NonFiniteLoss if not: then nor are the weights."""
        finite, self.finite = self.finite, None
        if finite is not None:
            finite.check()

    def start_from(self, weights: dict[str, Tensor]) -> None:
        """Begin at given weights instead of random ones; the average begins there too."""
        self.model.load_state_dict(weights)
        self.ema.load_state_dict(weights)

    def load(self, *, weights: dict[str, Tensor], ema: dict[str, Tensor], trainer: dict[str, Any]) -> None:
        """Go on where a checkpoint left off."""
        self.model.load_state_dict(weights)
        self.ema.load_state_dict(ema)
        saved = trainer["optimizer"]
        if "0" not in saved:  # a single optimiser as earlier versions saved it
            saved = {"0": saved}
        for number, optimizer in enumerate(self.optimizers):
            optimizer.load_state_dict(saved[str(number)])
        self.step = trainer["step"]
        torch.set_rng_state(trainer["rng"])
        if "cuda_rng" in trainer and torch.cuda.is_available():
            torch.cuda.set_rng_state(trainer["cuda_rng"])


def bits_per_dim_estimate(nats: float, *, num_images: int, config: SPNConfig) -> float:
    """Summed nats of one random target slice for each image -> unbiased estimate of bits/dim (section 3.3), which is
    always per dim of the *full* image."""
    dims = num_images * 3 * config.slice_size**2
    share = 1 / config.num_slices if config.stage == "first_slice" else 1.0  # of the image's dims
    return nats / dims / math.log(2) * share


def batch_nats(model: SPN, batch: Batch, *, config: TrainConfig, forward: Callable[..., Tensor]) -> Tensor:
    """Summed nats of a micro-batch's target slices; images are cut into slices here, once."""
    size = model.config.scaling_factor
    slices = image_to_slices(batch.image, size)
    given = None if batch.given is None else image_to_slices(batch.given, size)
    with torch.autocast(slices.device.type, torch.bfloat16, enabled=config.precision == "bfloat16"):
        logits = forward(slices, batch.index, given)
    return nll_nats(logits, target_slices(slices, batch.index)).sum()


def train_step(
    state: TrainState, micro_batches: Sequence[Batch], *, config: TrainConfig, forward: Callable[..., Tensor]
) -> tuple[Tensor, Tensor]:
    """One optimiser step over this worker's micro-batches: (summed nats, gradient norm before clipping).

    `forward` is the model or a wrapper of it (compiled, data-parallel). Gradients are of the mean nats per dim.
    Raises NonFiniteLoss: on a CPU before the weights change, on a GPU one step later or in `state.check`.
    """
    device = next(state.model.parameters()).device
    num_images = sum(len(batch.index) for batch in micro_batches)
    dims = num_images * 3 * state.model.config.slice_size**2
    total = torch.zeros((), dtype=torch.float64, device=device)
    no_sync = getattr(forward, "no_sync", contextlib.nullcontext)
    for number, batch in enumerate(micro_batches):
        last = number == len(micro_batches) - 1
        if batch.seed is not None:
            torch.manual_seed(batch.seed)
        with contextlib.nullcontext() if last else no_sync():
            nats = batch_nats(state.model, batch, config=config, forward=forward)
            (nats / dims).backward()
        total += nats.detach()
    limit = math.inf if config.grad_clip is None else config.grad_clip
    grad_norm = torch.nn.utils.clip_grad_norm_(state.model.parameters(), limit)
    state.check()
    keys = ", ".join(str(key) for batch in micro_batches for key in batch.keys[:4])
    where = f"stage {state.model.config.stage}, step {state.step}"
    state.finite = FiniteCheck(
        torch.stack([total / dims, grad_norm.to(total.dtype)]),
        lambda loss, norm: f"{where}: loss {loss:.4g} nats/dim, gradient norm {norm:.4g}; batch with images {keys}, …",
    )
    if device.type == "cpu":
        state.check()
    for optimizer in state.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, state.step) * group.get("lr_scale", 1.0)
        optimizer.step()
        optimizer.zero_grad()
    state.step += 1
    update_ema(state.ema, state.model, config, num_updates=state.step)
    return total, grad_norm


def fit(
    state: TrainState,
    *,
    config: TrainConfig,
    batches: Iterator[Sequence[Batch]],  # this worker's micro-batches of each optimiser step, from state.step on
    forward: Callable[..., Tensor],  # the model, or a wrapper of it
    evaluate: Callable[[], dict[str, float]],  # exact validation scores of state.ema, by name
    on_log: Callable[[int, dict[str, float]], None],
    on_checkpoint: Callable[[TrainState, dict[str, float]], None],
    on_step: Callable[[int], None] = lambda step: None,
    sum_over_workers: Callable[[Tensor], Tensor] = lambda value: value,  # called by all of them after the same steps
) -> None:
    """Train to config.num_steps: log, validate on Polyak-averaged weights, and hand out checkpoints with their score.

    What is logged is of the whole batch, whichever worker had which part of it. The last step always validates and
    checkpoints. Whatever the callbacks do, state is complete when they are called.
    """
    model = state.model.train()
    none = torch.zeros((), dtype=torch.float64, device=next(model.parameters()).device)
    nats, num_images, steps, waited, started = none, 0, 0, 0.0, time.perf_counter()  # of this worker since the last log
    while state.step < config.num_steps:
        asked = time.perf_counter()
        micro_batches = next(batches)
        waited += time.perf_counter() - asked
        total, grad_norm = train_step(state, micro_batches, config=config, forward=forward)
        nats = nats + total
        num_images += sum(len(batch.index) for batch in micro_batches)
        steps += 1
        step, finished = state.step, state.step == config.num_steps
        on_step(step)
        if step % config.log_every_steps == 0 or step % config.eval_every_steps == 0 or finished:
            state.check()
        if step % config.log_every_steps == 0 or finished:
            counted = sum_over_workers(torch.stack([nats, nats.new_tensor(num_images)])).tolist()
            estimate = bits_per_dim_estimate(counted[0], num_images=round(counted[1]), config=model.config)
            seconds = time.perf_counter() - started
            on_log(
                step,
                {
                    "train/bits_per_dim": estimate,
                    "train/lr": state.optimizers[0].param_groups[0]["lr"],
                    "train/grad_norm": float(grad_norm),
                    "train/slices_per_sec": steps * config.batch_size / seconds,
                    "train/data_wait": waited / seconds,  # share of the time; a GPU works on meanwhile
                    "images_seen": step * config.batch_size,
                },
            )
            nats, num_images, steps, waited, started = none, 0, 0, 0.0, time.perf_counter()
        if step % config.eval_every_steps == 0 or finished:
            paused = time.perf_counter()
            score = {**evaluate(), "images_seen": step * config.batch_size}
            on_log(step, score)
            if step % config.checkpoint_every_steps == 0 or finished:
                on_checkpoint(state, score)
            started += time.perf_counter() - paused  # the rate is that of training alone
