"""Equal-time race on CIFAR-10: so many seconds of training on one GPU, then exact bits/dim on all held-out images.

    python pipelines/prepare_data.py --config cifar10 data.root=FOLDER storage=RUNS
    python benchmarks/race.py --dataset RUNS/cifar10/nodes/prepare_data/*/*/dataset --variant modern --seconds 480 \
        --out benchmarks/results/race

Variants: paper (the paper's decoder and RMSProp recipe, with the Polyak warm-up), paper_adamw (its decoder, a
present-day optimiser and schedule), modern (recipe modern, Muon). Compiling is not counted. With --tune the last 5,000
training images are held out and scored instead of the test images.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from spn.evaluation import bits_per_dim, image_nats
from spn.model import SPN, DecoderConfig, SPNConfig
from spn.training import Batch, TrainConfig, TrainState, train_step

SIZE, HELD_OUT = 32, 5_000
COMMON = dict(batch_size=64, precision="bfloat16", polyak_warmup=True, horizontal_flip=True)
ADAMW = dict(optimizer="adamw", learning_rate=4e-4, schedule="linear", warmup_steps=100, grad_clip=1.0, decay=0.95)
MUON = dict(optimizer="muon", learning_rate=0.02, momentum=0.95, schedule="linear", warmup_steps=100, grad_clip=1.0)
VARIANTS: dict[str, tuple[DecoderConfig, dict[str, Any]]] = {
    "paper": (DecoderConfig(), dict(optimizer="rmsprop", learning_rate=1e-4)),
    "paper_adamw": (DecoderConfig(), ADAMW),
    "modern": (
        DecoderConfig(
            recipe="modern",
            num_layers=3,
            conv_channels=192,
            residual_channels=768,
            num_attn_layers=12,
            num_attn_heads=4,
            attn_head_dim=128,
            num_memory_rows=1408,
        ),
        MUON,
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--dataset", required=True, help="Parquet data set with 32x32 images of 8 bits")
    parser.add_argument("--variant", required=True, choices=VARIANTS)
    parser.add_argument("--seconds", type=float, default=480)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    from data_prep.parquet import open_dataset, pixels

    dataset = open_dataset(arguments.dataset)
    train, test = (pixels(dataset.read(resolution=SIZE, bits=8, split=split)) for split in ("train", "test"))
    if arguments.tune:
        train, test = train[:-HELD_OUT], train[-HELD_OUT:]
    result = race(train, test, variant=arguments.variant, seconds=arguments.seconds, seed=arguments.seed)
    result = {**result, "scored_on": "held-out training images" if arguments.tune else "test"}
    print(json.dumps(result), flush=True)
    if arguments.out and not arguments.tune:
        arguments.out.mkdir(parents=True, exist_ok=True)
        name = f"{arguments.variant}-{arguments.seconds:g}s.json"
        (arguments.out / name).write_text(json.dumps(result, indent=1) + "\n")


def race(
    train: np.ndarray,
    test: np.ndarray,
    *,
    variant: str,
    seconds: float,
    seed: int = 0,
    changes: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Train on uint8 [N, 32, 32, 3] for `seconds`, score uint8 images exactly. changes: of TrainConfig or decoder."""
    changes = changes or {}
    torch.manual_seed(seed)
    device = torch.device("cuda")
    decoder, settings = VARIANTS[variant]
    decoder = dataclasses.replace(decoder, **changes.get("decoder", {}))
    model = SPN(SPNConfig(stage="baseline", image_size=SIZE, scaling_factor=1, num_bits=8, decoder=decoder)).to(device)
    config = TrainConfig(num_steps=1, **{**COMMON, **settings, **changes.get("train", {})})
    data = torch.from_numpy(train.copy()).to(device).permute(0, 3, 1, 2)
    forward = torch.compile(model)
    draws = torch.Generator(device=device).manual_seed(seed)
    index = torch.zeros(config.batch_size, dtype=torch.long, device=device)

    def batch() -> Batch:
        rows = torch.randint(len(data), (config.batch_size,), generator=draws, device=device)
        image = data[rows].long()
        flip = torch.rand(config.batch_size, generator=draws, device=device) < 0.5
        image = torch.where(flip[:, None, None, None], image.flip(-1), image)
        return Batch(image, index, None, ["cifar10"])

    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    probe = TrainState.create(model, config)
    step_sec = _step_seconds(probe, config, batch, forward)
    model.load_state_dict(start)
    config = dataclasses.replace(config, num_steps=max(1, int(seconds / step_sec)))
    state = TrainState.create(model, config)
    torch.cuda.synchronize()
    began, losses = time.perf_counter(), []
    while state.step < config.num_steps and time.perf_counter() - began < seconds:
        nats, _ = train_step(state, [batch()], config=config, forward=forward)
        losses.append(nats)
    torch.cuda.synchronize()
    spent = time.perf_counter() - began
    scores = {"raw": _score(model, test)}
    with state.polyak.applied(model):
        scores["averaged"] = _score(model, test)
    last = torch.stack(losses[-100:]).mean().item() / (config.batch_size * SIZE * SIZE * 3) / np.log(2)
    return {
        "variant": variant,
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "seconds": spent,
        "steps": state.step,
        "planned_steps": config.num_steps,
        "images": state.step * config.batch_size,
        "parameters": sum(p.numel() for p in model.parameters()),
        "test_bits_per_dim": min(scores.values()),
        "test_bits_per_dim_raw": scores["raw"],
        "test_bits_per_dim_averaged": scores["averaged"],
        "num_test_images": len(test),
        "train_bits_per_dim_last_100_steps": last,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "changes": changes,
    }


def _step_seconds(state: TrainState, config: TrainConfig, batch: Any, forward: Any) -> float:
    """Compiles and warms up, then times steps; what was trained here is thrown away."""
    for timed in (5, 20):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(timed):
            train_step(state, [batch()], config=dataclasses.replace(config, num_steps=10**6), forward=forward)
        torch.cuda.synchronize()
        seconds = (time.perf_counter() - began) / timed
    return seconds


def _score(model: SPN, test: np.ndarray) -> float:
    model.eval()
    nats = 0.0
    for start in range(0, len(test), 250):
        image = torch.from_numpy(test[start : start + 250].copy()).cuda().permute(0, 3, 1, 2).long()
        with torch.autocast("cuda", torch.bfloat16):
            nats += float(image_nats(model, image, None, slices=range(1)).sum())
    model.train()
    return bits_per_dim(nats, num_images=len(test), image_size=SIZE)


if __name__ == "__main__":
    main()
