"""Sampling speed of a whole chain on this machine's GPU, with networks of a preset's size and random weights.

    python benchmarks/sample.py --config imagenet32 --batch 1 16 64 256 --out benchmarks/results/sample
    python benchmarks/sample.py --config celebahq256 --batch 64 --out benchmarks/results/sample

    python benchmarks/sample.py --chain FOLDER --decoder jacobi --batch 1 16 64   # as full_multidim.py --export writes

Every stage is drawn by spn/sampling.py, embedder included; with random weights by the fused kernels, whose time does
not depend on what they draw. `setup_sec` is the time, once per batch size, to pack weights, compile and record graphs.
With --slices only the last slices of a stage are drawn, and the time is scaled to all of them (`measured_steps` of
`pixel_steps`), because every slice takes the same work.

--chain measures trained networks, each on the images of the one before. `passes_a_slice` is the number of decoder
passes of Jacobi iteration, averaged over slices and images; `setup_sec` then includes the time of one slice.

floor_sec is the time that memory needs to deliver what each pixel step reads: the decoder's weights, and for each image
the keys and values of earlier pixels (bandwidth from the card's data sheet).
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.machine import card, peak_gib, report, wait
from pipelines.config import ExperimentConfig, stage_model_config, stage_names
from pipelines.loading import load
from spn.checkpoint import load_chain
from spn.config import DECODERS, PRECISIONS, SPNConfig
from spn.model import SPN
from spn.ordering import image_to_slices
from spn.sampling import rows_to_sample, sample_chain, sample_stage, uniforms

BANDWIDTH = {"H100": 3.35e12, "H200": 4.8e12}  # bytes/s, data sheet


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--config")
    which.add_argument("--chain", type=Path, help="folder of a trained chain")
    parser.add_argument("--decoder", choices=DECODERS, default="auto", help="of --chain")
    parser.add_argument("--batch", type=int, nargs="+", required=True, help="images drawn at once")
    parser.add_argument("--precision", choices=PRECISIONS, default="bfloat16")
    parser.add_argument("--slices", type=int, help="slices measured of each stage; all of them if not given")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, help="folder for the JSON")
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_intermixed_args()
    precision, device = arguments.precision, arguments.device
    for batch in arguments.batch:
        if arguments.chain:
            models = load_chain(arguments.chain, device=device)
            result = measure_chain(models, batch=batch, precision=precision, decoder=arguments.decoder)
            result = {"chain": arguments.chain.name, **result}
            name = f"{arguments.chain.name}-b{batch}-{precision}-{arguments.decoder}"
        else:
            config = load(arguments.config, arguments.overrides)
            result = measure(config, batch=batch, precision=precision, slices=arguments.slices, device=device)
            name = f"{config.name}-b{batch}-{precision}"
        report(result, arguments.out, name)


def measure(config: ExperimentConfig, *, batch: int, precision: str, slices: int | None, device: str) -> dict[str, Any]:
    """Times each stage of the chain, one after the other: a network's caches are freed before the next one's."""
    on_gpu = device == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    stages, setup = {}, 0.0
    for stage in stage_names(config):
        network = stage_model_config(config, stage)
        stages[stage] = measure_stage(network, batch=batch, precision=precision, slices=slices, device=device)
        setup += stages[stage].pop("setup_sec")
    seconds = sum(stage["sec"] for stage in stages.values())
    steps = sum(stage["pixel_steps"] for stage in stages.values())
    floors = [stage["floor_sec"] for stage in stages.values()]
    floor = None if None in floors else sum(floors)
    return {
        "config": config.name,
        **card(device),
        "precision": precision,
        "batch": batch,
        "sec_a_batch": seconds,
        "sec_an_image": seconds / batch,
        "images_per_sec": batch / seconds,
        "pixel_steps": steps,
        "measured_steps": sum(stage["measured_steps"] for stage in stages.values()),
        "ms_a_pixel_step": 1e3 * seconds / steps,
        "floor_sec": floor,
        "ratio_to_floor": floor and seconds / floor,
        "setup_sec": setup,
        "peak_gib": peak_gib(device),
        "stages": stages,
    }


def measure_chain(models: dict[str, SPN], *, batch: int, precision: str, decoder: str) -> dict[str, Any]:
    """Draws images 0 to batch - 1 stage by stage."""
    decoders: dict[Any, Any] = {}
    options: dict[str, Any] = dict(precision=precision, decoder=decoder, decoders=decoders)
    device = next(next(iter(models.values())).parameters()).device.type
    known: dict[str, Any] = {}
    stages, setup = {}, 0.0
    for stage, model in models.items():
        config = model.config
        shape = (batch, 3, config.image_size, config.image_size)
        blank, slices = torch.zeros(shape, dtype=torch.long, device=device), None
        if stage != "first_slice":
            slices = image_to_slices(blank, config.scaling_factor)[:, :-1]
        began = time.perf_counter()
        given = blank if config.num_given_bits else None
        sample_stage(
            model, torch.rand(shape, dtype=torch.float64, device=device), given=given, slices=slices, **options
        )
        wait(device)
        setup += time.perf_counter() - began
        decode = list(decoders.values())[-1]  # of this stage
        before, began = getattr(decode, "num_passes", None), time.perf_counter()
        drawn = sample_chain({stage: model}, seed=0, images=range(batch), **known, **options)[stage]
        wait(device)
        stages[stage] = {"sec": time.perf_counter() - began}
        if before is not None:
            num_slices = rows_to_sample([config], num_known_slices=int("slices" in known)) / config.slice_size
            stages[stage]["passes_a_slice"] = (decode.num_passes - before) / num_slices
        known = {"slices": drawn[:, None]} if stage == "first_slice" else {"image": drawn}
    seconds = sum(stage["sec"] for stage in stages.values())
    return {
        **card(device),
        "precision": precision,
        "decoder": decoder,
        "batch": batch,
        "sec_a_batch": seconds,
        "sec_an_image": seconds / batch,
        "setup_sec": setup,
        "stages": stages,
    }


def measure_stage(network: SPNConfig, *, batch: int, precision: str, slices: int | None, device: str) -> dict[str, Any]:
    torch.manual_seed(0)
    on_gpu = device == "cuda"
    model = SPN(network).to(device).eval()
    size, number = network.image_size, network.num_slices
    uniform = uniforms(0, stage=network.stage, images=range(batch), image_size=size).to(device)
    given = None
    if network.num_given_bits:
        given = torch.randint(2**network.num_given_bits, (batch, 3, size, size), device=device)
    drawn, most = (1, 1) if network.stage == "first_slice" else (min(slices or number, number), number)
    decoders: dict[Any, Any] = {}

    def draw(num_slices: int) -> float:
        side = network.slice_size
        known = torch.randint(network.num_values, (batch, number - num_slices, 3, side, side), device=device)
        wait(device)
        began = time.perf_counter()
        kept = None if network.stage == "first_slice" else known
        options = dict(precision=precision, decoder="fused" if on_gpu else "plain", decoders=decoders)
        sample_stage(model, uniform, given=given, slices=kept, **options)
        wait(device)
        return time.perf_counter() - began

    first = draw(1)  # prepares
    one = draw(1)
    seconds = draw(drawn) * most / drawn
    steps = network.slice_size**2
    return {
        "decoder_parameters": sum(p.numel() for p in model.decoder.parameters()),
        "sec": seconds,
        "setup_sec": first - one,
        "pixel_steps": steps * most,
        "measured_steps": steps * drawn,
        "floor_sec": floor_seconds(network, batch, precision, torch.cuda.get_device_name()) if on_gpu else None,
    }


def floor_seconds(network: SPNConfig, batch: int, precision: str, name: str) -> float | None:
    """Seconds in which memory delivers all that one stage has to read; None for a card that is not known."""
    bandwidth = next((value for card, value in BANDWIDTH.items() if card in name), None)
    if bandwidth is None:
        return None
    with torch.device("meta"):
        weights = sum(p.numel() for p in SPN(network).decoder.parameters())
    own, positions = network.decoder, network.slice_size**2
    cached = 2 * own.num_attn_layers * own.num_attn_heads * own.attn_head_dim * positions / 2  # on average
    width = 2 if precision == "bfloat16" else 4
    slices = 1 if network.stage == "first_slice" else network.num_slices
    return slices * positions * width * (weights + batch * cached) / bandwidth


if __name__ == "__main__":
    main()
