"""Equal-time race: so many seconds of training on one GPU, then exact bits/dim of all test images.

    python pipelines/prepare_data.py --config cifar10 data.root=FOLDER storage=RUNS
    python benchmarks/race.py --dataset RUNS/cifar10/nodes/prepare_data/*/*/dataset --variant modern --seconds 480 \
        --out benchmarks/results/race

A variant is a chain of networks that share the seconds; on images of 8 bits and any size:

    paper, modern                        the decoder alone on whole images: the paper's of 144M parameters with RMSProp;
                                         recipe modern, 43M, with Muon
    spn_paper, spn_modern                an SPN of four slices at 3 bits, 46M and 42M
    paper_SYSTEM, modern_SYSTEM          the paper's systems, each chain of 43M to 47M parameters in all. SYSTEM:
                                         baseline (paper_baseline only; its modern counterpart is `modern`), spn2,
                                         spn4 (S = 2, 4), spn2_depth (3 bits, then 5), multidim (first slice, the
                                         other three, the five low bits)

Every step learns from 65,536 pixels, whatever the size of the slices. Compiling is not counted. Writes
DATA-VARIANT-SECONDSs-SEED.json and, beside it, the bits/dim of each image with averaged weights as .parquet:
`pipelines/evaluate.py --compare` compares two of them. With --tune the last tenth of the training images is held out
and scored instead of the test images, and nothing is written.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.machine import card, peak_gib, report, wait
from spn.bitdepth import stage_values
from spn.config import DecoderConfig, EmbedderConfig, SPNConfig, TrainConfig
from spn.evaluation import bits_per_dim, chain_nats
from spn.gpu.training import speed_up
from spn.model import SPN
from spn.training import Batch, TrainState, bits_per_dim_estimate, train_step

HELD_OUT = 0.1  # of the training images, with --tune
PLAN_EVERY = 100  # steps; the schedule then ends with the seconds, though the speed drifts by some percent
PIXELS = 64 * 32 * 32  # that a step learns from: 64 slices of 32x32, or as many others as have as many pixels
TOTAL_DECAY = 4.0  # rate x weight decay x steps of recipe modern, however long a training is
COMMON = dict(precision="bfloat16", polyak_warmup=True, horizontal_flip=True)
SETTINGS = {
    "paper": dict(optimizer="rmsprop", learning_rate=1e-4),
    "modern": dict(
        optimizer="muon",
        learning_rate=0.02,
        momentum=0.95,
        schedule="linear",
        warmup_steps=100,
        grad_clip=1.0,
        polyak_decay=0.98,  # the schedule itself averages: over more of its steps than its end, averages were worse
    ),
}


@dataclass(frozen=True)
class Variant:
    networks: tuple[SPNConfig, ...]  # of the chain, in its order
    settings: Mapping[str, Any]  # of TrainConfig, over COMMON
    shares: tuple[float, ...] = (1.0,)  # of the seconds, for each network


def modern(num_attn_layers: int, embedder_layers: int = 0, *, heads: int = 4, conv: int = 192) -> dict[str, Any]:
    """Decoder and embedder of recipe modern, of so many attention layers each."""
    common = dict(recipe="modern", residual_channels=768, num_attn_heads=heads, attn_head_dim=128)
    common["num_memory_rows"] = 352 * heads
    decoder = DecoderConfig(num_layers=3, conv_channels=conv, num_attn_layers=num_attn_layers, **common)
    if not embedder_layers:
        return {"decoder": decoder}
    embedder = EmbedderConfig(num_conv_layers=2, conv_channels=256, num_attn_layers=embedder_layers, **common)
    return {"decoder": decoder, "embedder": embedder}


def paper(num_attn_layers: int, num_layers: int, embedder: tuple[int, int] | None = None) -> dict[str, Any]:
    """The paper's decoder and embedder (attention, convolution layers) with CelebA-HQ 256's widths."""
    decoder = DecoderConfig(num_layers=num_layers, conv_channels=128, num_attn_layers=num_attn_layers, num_attn_heads=5)
    if embedder is None:
        return {"decoder": decoder}
    return {
        "decoder": decoder,
        "embedder": EmbedderConfig(num_attn_layers=embedder[0], num_conv_layers=embedder[1]),
    }


def variants(size: int) -> dict[str, Variant]:
    """Of images of size x size."""

    def network(stage: str, bits: int, parts: dict[str, Any], *, scaling: int = 2, given: int = 0) -> SPNConfig:
        return SPNConfig(stage, size, scaling, num_bits=bits, num_given_bits=given, **parts)

    def chains(recipe: str, *, alone: dict, two: dict, three: dict, first: dict) -> dict[str, Variant]:
        """alone, two, three: parts of an SPN's network as the only one, one of two, of three; first: of first_slice."""
        spn = {f"spn{S}": Variant((network("size_upscale", 8, alone, scaling=S),), SETTINGS[recipe]) for S in (2, 4)}
        depth = (network("size_upscale", 3, two), network("depth_upscale", 5, two, given=3))
        all_three = (
            network("first_slice", 3, first),
            network("size_upscale", 3, three),
            network("depth_upscale", 5, three, given=3),
        )
        systems = {
            **spn,
            "spn2_depth": Variant(depth, SETTINGS[recipe], (0.35, 0.65)),
            "multidim": Variant(all_three, SETTINGS[recipe], (0.1, 0.3, 0.6)),
        }
        return {f"{recipe}_{system}": variant for system, variant in systems.items()}

    def whole(recipe: str, parts: dict[str, Any]) -> Variant:
        return Variant((network("baseline", 8, parts, scaling=1),), SETTINGS[recipe])

    return {
        "paper": whole("paper", {}),
        "modern": whole("modern", modern(10, conv=384)),
        "spn_paper": Variant((network("size_upscale", 3, paper(5, 15, (6, 5))),), SETTINGS["paper"]),
        "spn_modern": Variant(
            (network("size_upscale", 3, modern(5, 3, conv=384)),),
            {**SETTINGS["modern"], "learning_rate": 0.014, "adamw_learning_rate": 0.003},
        ),
        "paper_baseline": whole("paper", paper(8, 15)),
        **chains(
            "paper",
            alone=paper(5, 15, (6, 5)),
            two=paper(3, 5, (3, 2)),
            three=paper(2, 3, (2, 1)),
            first=paper(2, 8),
        ),
        **chains(
            "modern",
            alone=modern(6, 3, conv=384),
            two=modern(3, 1),
            three=modern(2, 2, heads=3),
            first=modern(3),
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--dataset", required=True, help="Parquet dataset of 8 bits at one resolution")
    parser.add_argument("--variant", required=True, choices=variants(32))
    parser.add_argument("--seconds", type=float, default=480)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    from data_prep.parquet import open_dataset, pixels

    dataset = open_dataset(arguments.dataset)
    name, size = dataset.manifest.config["dataset"], max(dataset.manifest.config["resolutions"])
    train, test = (pixels(dataset.read(resolution=size, bits=8, split=split)) for split in ("train", "test"))
    if arguments.tune:
        train, test = held_out(train)
    variant = variants(size)[arguments.variant]
    result, scores = race(train, test, variant, seconds=arguments.seconds, seed=arguments.seed)
    result = {"variant": arguments.variant, "seed": arguments.seed, "data": f"{name} {size}x{size}", **result}
    result["scored_on"] = "held-out training images" if arguments.tune else "test"
    stem = f"{name}-{arguments.variant}-{arguments.seconds:g}s-{arguments.seed}"
    out = None if arguments.tune else arguments.out
    report(result, out, stem)
    if out:
        keys = [str(number) for number in range(len(test))]
        pq.write_table(pa.table({"key": keys, **scores}), out / f"{stem}.parquet")


def held_out(train: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Training images without their last tenth, and that."""
    rest = len(train) - int(HELD_OUT * len(train))
    return train[:rest], train[rest:]


def race(
    train: np.ndarray, test: np.ndarray, variant: Variant, *, seconds: float, seed: int = 0, device: str = "cuda"
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Train the chain for `seconds` on images [N, H, W, 3] (uint8, 8 bits) and score `test` exactly.

    Returns the result and {part of the chain, "total": float32 [N], bits/dim of each test image with averaged weights}.
    Compiled on a GPU only.
    """
    trained = train_chain(train, variant, seconds=seconds, seed=seed, device=device)
    models = {state.model.config.stage: state.model for state, _ in trained}
    raw = score(models, test)
    scores = score({stage: state.ema for stage, (state, _) in zip(models, trained, strict=True)}, test)
    stages = {
        stage: {**record, "test_bits_per_dim_raw": float(raw[stage].mean()), **_mean(scores[stage])}
        for stage, (_, record) in zip(models, trained, strict=True)
    }
    result = {
        **card(device),
        "seconds": sum(record["seconds"] for _, record in trained),
        "parameters": sum(record["parameters"] for _, record in trained),
        "test_bits_per_dim_raw": float(raw["total"].mean()),
        **_mean(scores["total"]),
        "num_test_images": len(test),
        "peak_gib": peak_gib(device),
        "stages": stages,
    }
    return result, scores


def train_chain(
    train: np.ndarray, variant: Variant, *, seconds: float, seed: int = 0, device: str = "cuda"
) -> list[tuple[TrainState, dict[str, Any]]]:
    """Each network of the chain after its share of the seconds, and what it did."""
    data = torch.from_numpy(train.copy()).to(device).permute(0, 3, 1, 2)
    return [
        _train(network, variant.settings, data, seconds=seconds * share, seed=seed + number)
        for number, (network, share) in enumerate(zip(variant.networks, variant.shares, strict=True))
    ]


def _mean(scores: np.ndarray) -> dict[str, float]:
    return {
        "test_bits_per_dim_averaged": float(scores.mean()),
        "standard_error": float(scores.std(ddof=1) / len(scores) ** 0.5),
    }


def _train(
    network: SPNConfig, settings: Mapping[str, Any], data: torch.Tensor, *, seconds: float, seed: int
) -> tuple[TrainState, dict[str, Any]]:
    """One network on 8-bit images [N, 3, H, W], each time a random slice of random images; and what it did."""
    device = data.device.type
    torch.manual_seed(seed)
    model = SPN(network).to(device)
    batch_size = PIXELS // network.slice_size**2
    config = TrainConfig(num_steps=1, **{"batch_size": batch_size, **COMMON, **settings})
    forward = speed_up(model, compiled=device == "cuda")
    draws = torch.Generator(device=device).manual_seed(seed)

    def batch() -> Batch:
        rows = torch.randint(len(data), (config.batch_size,), generator=draws, device=device)
        image = data[rows].long()
        flip = torch.rand(config.batch_size, generator=draws, device=device) < 0.5
        image = torch.where(flip[:, None, None, None], image.flip(-1), image)
        values, given = stage_values(image, stored_bits=8, given_bits=network.num_given_bits, num_bits=network.num_bits)
        index = torch.randint(network.num_slices, (config.batch_size,), generator=draws, device=device)
        return Batch(values, index, given, [network.stage])

    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    step_sec = _step_seconds(TrainState.create(model, config), config, batch, forward)
    model.load_state_dict(start)
    num_steps = max(1, int(seconds / step_sec))
    config = _planned(config, num_steps)
    state = TrainState.create(model, config)
    wait(device)
    began, losses = time.perf_counter(), []
    while state.step < config.num_steps and time.perf_counter() - began < seconds:
        if state.step and state.step % PLAN_EVERY == 0:
            wait(device)
            step_sec = (time.perf_counter() - began) / state.step
            config = _planned(config, int(seconds / step_sec))
            state.optimizers[0].param_groups[0]["weight_decay"] = config.weight_decay
        nats, _ = train_step(state, [batch()], config=config, forward=forward)
        losses.append(nats)
    wait(device)
    spent = time.perf_counter() - began
    state.check()
    last = torch.stack(losses[-100:])
    return state, {
        "seconds": spent,
        "steps": state.step,
        "planned_steps": config.num_steps,
        "batch_size": config.batch_size,
        "slices": state.step * config.batch_size,
        "parameters": sum(p.numel() for p in model.parameters()),
        "train_bits_per_dim_last_100_steps": bits_per_dim_estimate(
            last.sum().item(), num_images=len(last) * config.batch_size, config=network
        ),
    }


def _planned(config: TrainConfig, num_steps: int) -> TrainConfig:
    decay = TOTAL_DECAY / config.learning_rate / num_steps if config.optimizer == "muon" else 0.0
    return dataclasses.replace(config, num_steps=num_steps, weight_decay=decay)


def _step_seconds(
    state: TrainState, config: TrainConfig, batch: Callable[[], Batch], forward: Callable[..., Any]
) -> float:
    """Compiles and warms up, then times steps; what was trained here is thrown away."""
    device = next(state.model.parameters()).device.type
    for timed in (5, 20):
        wait(device)
        began = time.perf_counter()
        for _ in range(timed):
            train_step(state, [batch()], config=dataclasses.replace(config, num_steps=10**6), forward=forward)
        wait(device)
        seconds = (time.perf_counter() - began) / timed
    return seconds


def score(models: Mapping[str, SPN], test: np.ndarray, *, precision: str = "bfloat16") -> dict[str, np.ndarray]:
    """{part, "total": float32 [N]}: exact bits/dim of each 8-bit image [N, H, W, 3] with the present weights."""
    device = next(next(iter(models.values())).parameters()).device
    for model in models.values():
        model.eval()
    batches = []
    for start in range(0, len(test), 250):
        image = torch.from_numpy(test[start : start + 250].copy()).to(device).permute(0, 3, 1, 2).long()
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16"):
            batches.append({part: nats.cpu().numpy() for part, nats in chain_nats(models, image).items()})
    nats = {part: np.concatenate([batch[part] for batch in batches]) for part in models}
    nats["total"] = sum(nats.values())
    scale = bits_per_dim(1.0, num_images=1, image_size=test.shape[1])
    return {part: (found * scale).astype(np.float32) for part, found in nats.items()}


if __name__ == "__main__":
    main()
