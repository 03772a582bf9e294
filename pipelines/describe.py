"""Parameters, FLOPs, batch sizes and GPU-hours of a config's stages: no weights, no data, no training.

    python pipelines/describe.py --config imagenet128 [--json] [key.sub=value ...]

The networks are built on torch's meta device, which has shapes but no memory.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # before the imports below
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # the project instead of this folder

from pipelines import cli
from pipelines.config import ExperimentConfig, stage_model_config, stage_names, train_node
from pipelines.loading import load

# What GPU-hours rest on: the share of the card's FLOP/s (spn.gpu.flops) that training and scoring reach. Measured on
# the presets' networks: training 0.59 to 0.62, celebahq256's 0.49 (benchmarks/results/train/); scoring 0.63 and 0.51
# (benchmarks/results/evaluate/). Validation, checkpoints and waiting for data come out of the rest.
CARD, MFU = "H100", 0.5

# Parameters that the paper states: table 4 by data set, appendix C for the first slice of ImageNet 128.
PAPER_PARAMETERS = {
    "imagenet32": {"baseline": 150e6, "size_upscale": 150e6},
    "imagenet64": {"size_upscale": 150e6, "depth_upscale": 150e6},
    "imagenet128": {"first_slice": 150e6, "size_upscale": 250e6, "depth_upscale": 250e6},
    "imagenet256": {"size_upscale": 250e6, "depth_upscale": 250e6},
    "celebahq256": {"size_upscale": 50e6, "depth_upscale": 50e6},
}


def main(argv: Sequence[str] | None = None) -> int:
    return cli.run_guarded(lambda: _main(argv))


def _main(argv: Sequence[str] | None) -> int:
    parser = cli.Parser(prog="describe.py", description="Parameters, FLOPs, batch sizes and GPU-hours.")
    cli.add_config_arguments(parser)
    parser.add_argument("--json", action="store_true", help="machine-readable")
    arguments = parser.parse_intermixed_args(argv)
    config = load(arguments.config, arguments.overrides)
    cli.print_notes(config, arguments, reads=describe)
    description = describe(config)
    print(json.dumps(description, indent=2) if arguments.json else as_text(description))
    return 0


def describe(config: ExperimentConfig) -> dict[str, Any]:
    """{"config": name, "stages": {stage: parameters, FLOPs, batch, cost}, "gpu_hours": to train all stages,
    "scoring_gpu_hours": to score 1,000 images with all slices of all stages}."""
    stages = {stage: describe_stage(config, stage) for stage in stage_names(config)}
    total = sum(found["cost"]["gpu_hours"] for found in stages.values())
    slices = {stage: 1 if stage == "first_slice" else config.scaling_factor**2 for stage in stages}
    per_second = MFU * next(iter(stages.values()))["cost"]["peak_flops"]
    scoring = (
        1000 * sum(found["flops_per_slice"] * slices[stage] for stage, found in stages.items()) / per_second / 3600
    )
    return {"config": config.name, "stages": stages, "gpu_hours": total, "scoring_gpu_hours": scoring}


def describe_stage(config: ExperimentConfig, stage: str) -> dict[str, Any]:
    """Counts of one network. FLOPs are dense: masked weights and masked attention count as if they were not."""
    import torch

    from spn.gpu.flops import PEAK_FLOPS, forward_flops
    from spn.model import SPN, parameter_counts

    network, train = stage_model_config(config, stage), config.per_stage[stage].train
    num_workers = config.resources.per_node[train_node(stage)].num_workers
    with torch.device("meta"):
        counts = parameter_counts(SPN(network))
    forward, useful = forward_flops(network)
    total_flops = 3 * forward * train.batch_size * train.num_steps
    return {
        "parameters": counts,
        "paper_parameters": PAPER_PARAMETERS.get(config.name, {}).get(stage),
        "flops_per_slice": forward,
        "useful_flops_per_slice": useful,
        "training_flops_per_slice": 3 * forward,  # the backward pass costs two forward passes
        "batch": {
            "batch_size": train.batch_size,
            "num_workers": num_workers,
            "slices_per_worker": train.batch_size // num_workers,
            "micro_batch_size": train.micro_batch_size,
        },
        "cost": {
            "num_steps": train.num_steps,
            "training_flops": total_flops,
            "card": CARD,
            "peak_flops": PEAK_FLOPS[CARD],
            "mfu": MFU,
            "gpu_hours": total_flops / (MFU * PEAK_FLOPS[CARD]) / 3600,
        },
    }


def as_text(description: dict[str, Any]) -> str:
    lines = [f"config {description['config']}"]
    for stage, found in description["stages"].items():
        counts, batch, cost = found["parameters"], found["batch"], found["cost"]
        paper, most, workers = found["paper_parameters"], batch["micro_batch_size"], batch["num_workers"]
        lines += [
            "",
            f"{stage}: {counts['total']:,} parameters" + (f" (paper: ~{paper / 1e6:.0f}M)" if paper else ""),
            *(f"  {part:<34}{count:>14,}" for part, count in counts.items() if part != "total"),
            f"  FLOPs per slice: {found['flops_per_slice'] / 1e9:,.2f} G forward, "
            f"{found['training_flops_per_slice'] / 1e9:,.2f} G in training (dense: masked entries counted)",
            f"  batch of {batch['batch_size']:,} slices = {workers} worker{'s' if workers > 1 else ''} x "
            f"{batch['slices_per_worker']:,} slices" + (f", at most {most:,} at once" if most else ""),
            f"  {cost['num_steps']:,} steps: {cost['training_flops']:.2e} FLOPs, about {cost['gpu_hours']:,.2f} "
            f"GPU-hours, {cost['gpu_hours'] / workers:,.2f} hours on {workers} GPUs",
        ]
    lines += [
        "",
        f"scoring 1,000 images: about {60 * description['scoring_gpu_hours']:,.2f} GPU-minutes",
        f"all stages: about {description['gpu_hours']:,.2f} GPU-hours of an {cost['card']}, if training and scoring in "
        f"bfloat16 reach {cost['mfu']:.0%} of {cost['peak_flops'] / 1e12:.0f} TFLOP/s (assumed)",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
