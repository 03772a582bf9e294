"""Equal-time race: so many seconds of training on one GPU, then exact bits/dim on all held-out images.

    python pipelines/prepare_data.py --config cifar10 data.root=FOLDER storage=RUNS
    python benchmarks/race.py --dataset RUNS/cifar10/nodes/prepare_data/*/*/dataset --variant modern --seconds 480 \
        --out benchmarks/results/race

Variants on 32x32 images of 8 bits (CIFAR-10), whole: paper (the paper's decoder and RMSProp recipe, with the Polyak
warm-up), paper_adamw (its decoder, a present-day optimiser and schedule), modern (recipe modern, Muon). On 64x64 images
of 3 bits (Tiny ImageNet), SPNs of four slices, a random one of each image a step, all four scored: spn_paper (the
networks of CelebA-HQ 256, RMSProp), spn_modern (recipe modern, dropout, Muon, 4% more parameters). Compiling is not
counted.
With --tune the last tenth of the training images is held out and scored instead of the test images.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from spn.config import DecoderConfig, EmbedderConfig, SPNConfig, TrainConfig
from spn.evaluation import bits_per_dim, image_nats
from spn.gpu.training import speed_up
from spn.model import SPN
from spn.training import Batch, TrainState, bits_per_dim_estimate, train_step

HELD_OUT = 0.1  # of the training images, with --tune
COMMON = dict(batch_size=64, precision="bfloat16", polyak_warmup=True, horizontal_flip=True)
RMSPROP = dict(optimizer="rmsprop", learning_rate=1e-4)
ADAMW = dict(optimizer="adamw", learning_rate=4e-4, schedule="linear", warmup_steps=100, grad_clip=1.0, decay=0.95)
MUON = dict(optimizer="muon", learning_rate=0.02, momentum=0.95, schedule="linear", warmup_steps=100, grad_clip=1.0)
WHOLE = dict(stage="baseline", image_size=32, scaling_factor=1, num_bits=8)
SLICES = dict(stage="size_upscale", image_size=64, scaling_factor=2, num_bits=3)
MODERN = dict(recipe="modern", num_attn_heads=4, attn_head_dim=128, num_memory_rows=1408)
MODERN_DECODER = DecoderConfig(num_layers=3, conv_channels=192, residual_channels=768, num_attn_layers=12, **MODERN)


@dataclass(frozen=True)
class Variant:
    network: SPNConfig
    settings: dict[str, Any]  # of TrainConfig, over COMMON


VARIANTS = {
    "paper": Variant(SPNConfig(**WHOLE), RMSPROP),
    "paper_adamw": Variant(SPNConfig(**WHOLE), ADAMW),
    "modern": Variant(SPNConfig(**WHOLE, decoder=MODERN_DECODER), MUON),
    "spn_paper": Variant(
        SPNConfig(
            **SLICES,
            decoder=DecoderConfig(conv_channels=128, num_attn_layers=5, num_attn_heads=5),
            embedder=EmbedderConfig(),
        ),
        RMSPROP,
    ),
    # Dropout: 0.1 and 0.2 scored alike on held-out images.
    "spn_modern": Variant(
        SPNConfig(
            **SLICES,
            decoder=dataclasses.replace(MODERN_DECODER, num_attn_layers=8, dropout=0.15),
            embedder=EmbedderConfig(
                num_conv_layers=2, residual_channels=768, num_attn_layers=4, dropout=0.15, **MODERN
            ),
        ),
        MUON,
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--dataset", required=True, help="Parquet dataset with the variant's size and bits")
    parser.add_argument("--variant", required=True, choices=VARIANTS)
    parser.add_argument("--seconds", type=float, default=480)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    from data_prep.parquet import open_dataset, pixels

    dataset, network = open_dataset(arguments.dataset), VARIANTS[arguments.variant].network
    train, test = (
        pixels(dataset.read(resolution=network.image_size, bits=network.num_bits, split=split))
        for split in ("train", "test")
    )
    if arguments.tune:
        train, test = held_out(train)
    result = race(train, test, variant=arguments.variant, seconds=arguments.seconds, seed=arguments.seed)
    result = {**result, "scored_on": "held-out training images" if arguments.tune else "test"}
    print(json.dumps(result), flush=True)
    if arguments.out and not arguments.tune:
        arguments.out.mkdir(parents=True, exist_ok=True)
        name = f"{arguments.variant}-{arguments.seconds:g}s.json"
        (arguments.out / name).write_text(json.dumps(result, indent=1) + "\n")


def held_out(train: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Training images without their last tenth, and that."""
    rest = len(train) - int(HELD_OUT * len(train))
    return train[:rest], train[rest:]


def changed(network: SPNConfig, changes: dict[str, dict[str, Any]]) -> SPNConfig:
    """With fields of its decoder or embedder changed."""
    parts = {
        part: dataclasses.replace(getattr(network, part), **new) for part, new in changes.items() if part != "train"
    }
    return dataclasses.replace(network, **parts)


def race(
    train: np.ndarray,
    test: np.ndarray,
    *,
    variant: str,
    seconds: float,
    seed: int = 0,
    changes: dict[str, dict[str, Any]] | None = None,
    device: str = "cuda",
) -> dict[str, Any]:
    """Train for `seconds` on images [N, H, W, 3] (uint8, of the variant's size and bits), score `test` exactly.

    changes: {"decoder", "embedder", "train": changed fields}. Compiled on a GPU only.
    """
    changes = changes or {}
    network, settings = changed(VARIANTS[variant].network, changes), VARIANTS[variant].settings
    if train.max() >= network.num_values:
        raise ValueError(f"training images hold {train.max()}; {variant} models {network.num_bits} bits")
    torch.manual_seed(seed)
    model = SPN(network).to(device)
    config = TrainConfig(num_steps=1, **{**COMMON, **settings, **changes.get("train", {})})
    data = torch.from_numpy(train.copy()).to(device).permute(0, 3, 1, 2)
    forward = speed_up(model, compiled=device == "cuda")
    draws = torch.Generator(device=device).manual_seed(seed)

    def batch() -> Batch:
        rows = torch.randint(len(data), (config.batch_size,), generator=draws, device=device)
        image = data[rows].long()
        flip = torch.rand(config.batch_size, generator=draws, device=device) < 0.5
        image = torch.where(flip[:, None, None, None], image.flip(-1), image)
        index = torch.randint(network.num_slices, (config.batch_size,), generator=draws, device=device)
        return Batch(image, index, None, [variant])

    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    probe = TrainState.create(model, config)
    step_sec = _step_seconds(probe, config, batch, forward)
    model.load_state_dict(start)
    config = dataclasses.replace(config, num_steps=max(1, int(seconds / step_sec)))
    state = TrainState.create(model, config)
    _wait(device)
    began, losses = time.perf_counter(), []
    while state.step < config.num_steps and time.perf_counter() - began < seconds:
        nats, _ = train_step(state, [batch()], config=config, forward=forward)
        losses.append(nats)
    _wait(device)
    spent = time.perf_counter() - began
    state.check()
    scores = {"raw": _score(model, test)}
    with state.polyak.applied(model):
        scores["averaged"] = _score(model, test)
    last = losses[-100:]
    estimate = bits_per_dim_estimate(
        torch.stack(last).sum().item(), num_images=len(last) * config.batch_size, config=network
    )
    return {
        "variant": variant,
        "card": torch.cuda.get_device_name() if device == "cuda" else device,
        "torch": torch.__version__,
        "seconds": spent,
        "steps": state.step,
        "planned_steps": config.num_steps,
        "images": state.step * config.batch_size,
        "epochs": state.step * config.batch_size / len(train),
        "parameters": sum(p.numel() for p in model.parameters()),
        "test_bits_per_dim": min(scores.values()),
        "test_bits_per_dim_raw": scores["raw"],
        "test_bits_per_dim_averaged": scores["averaged"],
        "num_test_images": len(test),
        "train_bits_per_dim_last_100_steps": estimate,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None,
        "changes": changes,
    }


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _step_seconds(state: TrainState, config: TrainConfig, batch: Any, forward: Any) -> float:
    """Compiles and warms up, then times steps; what was trained here is thrown away."""
    device = next(state.model.parameters()).device.type
    for timed in (5, 20):
        _wait(device)
        began = time.perf_counter()
        for _ in range(timed):
            train_step(state, [batch()], config=dataclasses.replace(config, num_steps=10**6), forward=forward)
        _wait(device)
        seconds = (time.perf_counter() - began) / timed
    return seconds


def _score(model: SPN, test: np.ndarray) -> float:
    """Exact bits/dim of all slices of all images, with the network's present weights."""
    device = next(model.parameters()).device
    model.eval()
    nats = 0.0
    for start in range(0, len(test), 250):
        image = torch.from_numpy(test[start : start + 250].copy()).to(device).permute(0, 3, 1, 2).long()
        with torch.autocast(device.type, torch.bfloat16):
            nats += float(image_nats(model, image, None, slices=range(model.config.num_slices)).sum())
    model.train()
    return bits_per_dim(nats, num_images=len(test), image_size=model.config.image_size)


if __name__ == "__main__":
    main()
