"""Several GPUs of one machine against one: slices/s at the preset's global batch, and the loss curve at equal batches.

    python benchmarks/ddp.py --config imagenet64 --stage size_upscale --workers 2 4 8 --out benchmarks/results/ddp

The pipeline's own steps, loop, wrapper and sharing of a batch (spn/training.py, pipelines/nodes/train.py), without Ray:
what is compared is the training alone. Images are crops of the photos that come with the project, 8 bits; every run
takes the same ones, with the same target slices, in the same order from the same initial weights. One optimiser step
compiles and is not timed. Masks of dropout, which no preset of Table 4 has, agree where micro-batches have one size.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing
from PIL import Image

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.machine import report
from pipelines.config import stage_model_config
from pipelines.loading import load
from pipelines.nodes.memory import halved
from pipelines.nodes.train import make_forward, over_workers
from spn.bitdepth import stage_values
from spn.config import SPNConfig, TrainConfig
from spn.evaluation import bits_per_dim, image_nats, scored_slices
from spn.model import SPN
from spn.training import Batch, TrainState, fit, train_step

PHOTOS = Path(__file__).resolve().parents[1] / "data_prep" / "demo_photos"
NUM_CROPS, NUM_VALID = 4096, 32


@dataclasses.dataclass(frozen=True)
class Job:
    """What every worker gets. Picklable."""

    model: SPNConfig
    train: TrainConfig  # of the curve; num_steps and log_every_steps are those of the curve
    speed_batch: int  # slices an optimiser step when speed is measured, over all workers
    speed_steps: int  # that are timed
    seed: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", default="imagenet64")
    parser.add_argument("--stage", default="size_upscale")
    parser.add_argument("--workers", type=int, nargs="+", default=[2], help="each of these numbers against one")
    parser.add_argument("--micro-batch", type=int, default=128, help="slices at once on a GPU, at most")
    parser.add_argument("--speed-steps", type=int, default=3, help="optimiser steps that are timed")
    parser.add_argument("--curve-steps", type=int, default=60)
    parser.add_argument("--curve-batch", type=int, default=512, help="slices an optimiser step of the curve")
    parser.add_argument("--log-every", type=int, default=5)
    parser.add_argument("--out", type=Path, help="folder for the JSON")
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_intermixed_args()
    config = load(arguments.config, arguments.overrides)
    preset = config.per_stage[arguments.stage].train
    train = dataclasses.replace(
        preset,
        micro_batch_size=arguments.micro_batch,
        num_steps=arguments.curve_steps,
        batch_size=arguments.curve_batch,
        log_every_steps=arguments.log_every,
        eval_every_steps=arguments.curve_steps,
        checkpoint_every_steps=arguments.curve_steps,
    )
    batches = preset.batch_size, arguments.curve_batch
    if any(workers < 1 or batch % workers for workers in arguments.workers for batch in batches):
        parser.error(f"--workers must divide the batches, {batches[0]:,} and {batches[1]:,}")
    job = Job(stage_model_config(config, arguments.stage), train, preset.batch_size, arguments.speed_steps, config.seed)
    runs = {workers: run(job, workers) for workers in (1, *arguments.workers)}
    result = {"config": config.name, "stage": arguments.stage, **compare(runs)}
    report(result, arguments.out, f"{config.name}-{arguments.stage}-{max(runs)}")


def run(job: Job, num_workers: int) -> dict[str, Any]:
    """Starts the workers, one a GPU (processes on the CPU where there is none), and returns rank 0's measurements.

    Raises torch.multiprocessing.ProcessRaisedException with a worker's own error.
    """
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, args=(job, num_workers, folder), nprocs=num_workers)
        return json.loads((Path(folder) / "result.json").read_text())


def work(rank: int, job: Job, num_workers: int, folder: str) -> None:
    """One worker: measures speed, then trains the curve from fresh weights; rank 0 writes <folder>/result.json."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    if num_workers > 1:
        place = f"file://{folder}/workers"
        dist.init_process_group("nccl" if cuda else "gloo", init_method=place, rank=rank, world_size=num_workers)
    images = torch.from_numpy(crops(NUM_CROPS, job.model.image_size, seed=job.seed)).to(device).permute(0, 3, 1, 2)
    result = {
        "card": torch.cuda.get_device_name(device) if cuda else "cpu",
        "torch": torch.__version__,
        "workers": num_workers,
    }
    for name, measure in (("speed", speed), ("curve", curve)):
        began = time.perf_counter()
        result[name] = measure(job, images, rank, num_workers)
        if rank == 0:
            print(f"{num_workers} workers, {name}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    result["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30 if cuda else None
    if rank == 0:
        (Path(folder) / "result.json").write_text(json.dumps(result))
    if num_workers > 1:
        dist.destroy_process_group()


def speed(job: Job, images: torch.Tensor, rank: int, num_workers: int) -> dict[str, Any]:
    """Whole optimiser steps at the preset's global batch; batches are made before the clock starts."""
    config = dataclasses.replace(job.train, batch_size=job.speed_batch)
    share = config.batch_size // num_workers
    size = next(halved(min(share, config.micro_batch_size or share), divides=share))
    state, forward = start(job.model, config, images.device, seed=job.seed)
    steps = list(batches(job, config.batch_size, share, size, images, rank, num_steps=job.speed_steps + 1))
    began = time.perf_counter()
    train_step(state, steps[0], config=config, forward=forward)
    together(images.device)
    warm = time.perf_counter() - began
    began = time.perf_counter()
    for micro_batches in steps[1:]:
        train_step(state, micro_batches, config=config, forward=forward)
    together(images.device)
    seconds = (time.perf_counter() - began) / job.speed_steps
    return {
        "batch_size": config.batch_size,
        "micro_batch_size": size,
        "accumulation": share // size,
        "slices_per_sec": config.batch_size / seconds,
        "step_sec": seconds,
        "first_step_sec": warm,
    }


def curve(job: Job, images: torch.Tensor, rank: int, num_workers: int) -> dict[str, Any]:
    """The training loop: bits/dim as the pipeline logs them, and at the end on held-out crops."""
    config = job.train
    share = config.batch_size // num_workers
    size = next(halved(min(share, config.micro_batch_size or share), divides=share))
    state, forward = start(job.model, config, images.device, seed=job.seed)
    valid = images[-NUM_VALID:].long()
    logged: list[dict[str, float]] = []
    scores: list[float] = []

    def evaluate() -> dict[str, float]:
        values, given = values_of(job.model, valid)
        with torch.autocast(valid.device.type, torch.bfloat16, enabled=config.precision == "bfloat16"):
            nats = image_nats(state.ema, values, given, slices=scored_slices(state.ema, first_given=False)).sum()
        scores.append(bits_per_dim(float(nats), num_images=len(valid), image_size=job.model.image_size))
        return {"valid/bits_per_dim": scores[-1]}

    def on_log(step: int, metrics: dict[str, float]) -> None:
        if "train/bits_per_dim" in metrics:
            logged.append({"step": step, **{key: metrics[f"train/{key}"] for key in ("bits_per_dim", "grad_norm")}})

    fit(
        state,
        config=config,
        batches=batches(job, config.batch_size, share, size, images, rank, num_steps=config.num_steps),
        forward=forward,
        evaluate=evaluate,
        on_log=on_log,
        on_checkpoint=lambda state, metrics: None,
        sum_over_workers=over_workers,
    )
    return {
        "batch_size": config.batch_size,
        "micro_batch_size": size,
        "accumulation": share // size,
        "train": logged,
        "valid_bits_per_dim": scores[-1],
    }


def start(model_config: SPNConfig, config: TrainConfig, device: torch.device, *, seed: int) -> tuple[TrainState, Any]:
    """A fresh state, with equal weights on all workers and in all runs, and what its steps call."""
    torch.manual_seed(seed)
    model = SPN(model_config).to(device)
    forward = make_forward(model, config)
    return TrainState.create(model, config), forward


def batches(
    job: Job, batch_size: int, share: int, size: int, images: torch.Tensor, rank: int, *, num_steps: int
) -> Iterator[list[Batch]]:
    """Worker r of n gets rows [r G/n, (r+1) G/n) of each global batch of G rows, as in the pipeline."""
    draws = np.random.default_rng(job.seed)
    for step in range(num_steps):
        rows = draws.integers(len(images) - NUM_VALID, size=batch_size)
        targets = draws.integers(job.model.num_slices, size=batch_size)
        micro_batches = []
        for begin in range(rank * share, (rank + 1) * share, size):
            mine = slice(begin, begin + size)
            values, given = values_of(job.model, images[torch.from_numpy(rows[mine]).to(images.device)].long())
            index = torch.from_numpy(targets[mine]).to(images.device)
            keys, dropout_seed = [f"step {step}, row {begin}"], step * batch_size + begin
            micro_batches.append(Batch(values, index, given, keys, dropout_seed))
        yield micro_batches


def values_of(model: SPNConfig, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    return stage_values(image, stored_bits=8, given_bits=model.num_given_bits, num_bits=model.num_bits)


def crops(num: int, size: int, *, seed: int) -> np.ndarray:
    """uint8 [num, size, size, 3]: seeded squares of the built-in photos."""
    photos = [
        np.asarray(Image.open(path).convert("RGB")) for path in sorted(PHOTOS.glob("*/*.*")) if path.suffix != ".md"
    ]
    draws = np.random.default_rng(seed)
    found = []
    for number in range(num):
        photo = photos[number % len(photos)]
        top, left = (int(draws.integers(side - size + 1)) for side in photo.shape[:2])
        found.append(photo[top : top + size, left : left + size])
    return np.stack(found)


def together(device: torch.device) -> None:
    """Waits for this worker's GPU and for the other workers."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    if dist.is_initialized():
        dist.barrier()


def compare(runs: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """{workers: measurements} of one worker and of several -> the speedup and how far the curves part, for each."""
    one = runs[1]
    losses = {
        workers: {entry["step"]: entry["bits_per_dim"] for entry in run["curve"]["train"]}
        for workers, run in runs.items()
    }
    return {
        "card": one["card"],
        "torch": one["torch"],
        "speedup": {
            workers: run["speed"]["slices_per_sec"] / one["speed"]["slices_per_sec"] for workers, run in runs.items()
        },
        "largest_difference_of_curves": {
            workers: max(abs(own[step] / loss - 1) for step, loss in losses[1].items())
            for workers, own in losses.items()
        },
        "curves": losses,
        "runs": list(runs.values()),
    }


if __name__ == "__main__":
    main()
