"""Training speed of one stage on this machine's GPU: slices/s, model FLOPs utilisation, peak memory.

    python benchmarks/train.py --config imagenet64 --stage size_upscale --batch 64 --out benchmarks/results/train

Random images, the stage's own optimiser, bfloat16, torch.compile; whole optimiser steps are timed after a warm-up.
mfu counts the dense products of forward and backward (torch's FLOP counter on the uncompiled network) over
what the card reaches (spn/gpu/flops.py); mfu_useful leaves out masked weights and the masked half of causal attention.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

import torch

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.machine import card, peak_gib, report, wait
from pipelines.config import stage_model_config
from pipelines.loading import load
from spn.config import SPNConfig, TrainConfig
from spn.gpu.flops import peak_flops, training_flops
from spn.gpu.training import speed_up
from spn.model import SPN
from spn.training import Batch, TrainState, train_step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", required=True)
    parser.add_argument("--stage", required=True)
    parser.add_argument("--batch", type=int, required=True, help="slices a micro-batch")
    parser.add_argument("--accumulate", type=int, default=8, help="micro-batches an optimiser step, as the presets do")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--out", type=Path, help="folder for the JSON")
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_intermixed_args()
    config = load(arguments.config, arguments.overrides)
    result = measure(
        stage_model_config(config, arguments.stage),
        dataclasses.replace(config.per_stage[arguments.stage].train, precision="bfloat16"),
        batch=arguments.batch,
        accumulate=arguments.accumulate,
        steps=arguments.steps,
        compiled=not arguments.no_compile,
    )
    result = {"config": config.name, "stage": arguments.stage, **result}
    report(result, arguments.out, f"{config.name}-{arguments.stage}-b{arguments.batch}")


def measure(
    model_config: SPNConfig,
    train_config: TrainConfig,
    *,
    batch: int,
    accumulate: int,
    steps: int,
    compiled: bool,
    device: str = "cuda",
) -> dict[str, Any]:
    """Times whole optimiser steps; raises torch.OutOfMemoryError where the batch does not fit."""
    torch.manual_seed(0)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    model = SPN(model_config).to(device)
    forward = speed_up(model, compiled=compiled)
    state = TrainState.create(model, train_config)
    size = model_config.image_size

    def draw(num_values: int):
        return torch.randint(0, num_values, (batch, 3, size, size), device=device)

    data = Batch(
        image=draw(model_config.num_values),
        index=torch.randint(0, model_config.num_slices, (batch,), device=device),
        given=draw(2**model_config.num_given_bits) if model_config.num_given_bits else None,
        keys=["random"] * batch,
    )
    started = time.perf_counter()
    for _ in range(3):
        train_step(state, [data] * 2, config=train_config, forward=forward)
    wait(device)
    warm = time.perf_counter() - started
    started = time.perf_counter()
    for _ in range(steps):
        train_step(state, [data] * accumulate, config=train_config, forward=forward)
    wait(device)
    seconds = (time.perf_counter() - started) / steps / accumulate
    dense, useful = training_flops(model_config)
    peak = peak_flops(card(device)["card"])
    return {
        **card(device),
        "batch": batch,
        "images_per_sec": batch / seconds,
        "accumulate": accumulate,
        "micro_step_sec": seconds,
        "mfu": peak and batch * dense / seconds / peak,
        "mfu_useful": peak and batch * useful / seconds / peak,
        "peak_gib": peak_gib(device),
        "tflop_per_slice": dense / 1e12,
        "compile_and_warm_up_sec": warm,
    }


if __name__ == "__main__":
    main()
