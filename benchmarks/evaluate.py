"""Speed of exact scoring against that of bare forward passes, with networks of a preset's size and random weights.

    python benchmarks/evaluate.py --config imagenet64 --chunks 4 --out benchmarks/results/evaluate
    python benchmarks/evaluate.py --config celebahq256 --chunks 2 --out benchmarks/results/evaluate

Chunks of random images are scored as the node evaluate does it, files included, by one worker. The forward pass is
that of the same compiled networks on the same slices, with images on the GPU and no loss. Compiling is not counted.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.machine import card, peak_gib, report, wait
from pipelines.config import EvaluateNodeConfig, ExperimentConfig, NodeResources, stage_model_config, stage_names
from pipelines.loading import load
from pipelines.nodes.evaluate import ScoringJob, ScoringWorker
from spn.bitdepth import stage_values
from spn.config import first_given
from spn.evaluation import scored_slices
from spn.model import SPN
from spn.ordering import image_to_slices


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", required=True)
    parser.add_argument("--chunks", type=int, default=4, help="of evaluate.batch_size images; one more warms up")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, help="folder for the JSON")
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_intermixed_args()
    result = measure(load(arguments.config, arguments.overrides), chunks=arguments.chunks, device=arguments.device)
    report(result, arguments.out, result["config"])


def measure(config: ExperimentConfig, *, chunks: int, device: str) -> dict[str, Any]:
    torch.manual_seed(0)
    batch, size, stages = config.evaluate.batch_size, config.data.image_size, tuple(stage_names(config))
    images = np.random.default_rng(0).integers(256, size=(batch, size, size, 3)).astype(np.uint8)
    scoring = EvaluateNodeConfig(
        stages=stages,
        batch_size=batch,
        precision=config.evaluate.precision,
        resources=NodeResources(use_gpu=device == "cuda", cpus_per_worker=4),
    )
    with tempfile.TemporaryDirectory() as out:
        worker = ScoringWorker(ScoringJob(scoring, {}, out, lambda rows: ([str(row) for row in rows], images)))
        models = {stage: SPN(stage_model_config(config, stage)).to(device).eval() for stage in stages}
        worker.__dict__["models"] = models  # instead of loading what a training left
        worker.score(range(batch))  # compiles
        began = time.perf_counter()
        for number in range(1, chunks + 1):
            worker.score(range(number * batch, (number + 1) * batch))
        seconds = time.perf_counter() - began
        forward = forward_seconds(worker, images) * chunks
    return {
        "config": config.name,
        **card(device),
        "precision": scoring.precision if device == "cuda" else "float32",
        "batch": batch,
        "images_per_sec": chunks * batch / seconds,
        "forward_images_per_sec": chunks * batch / forward,
        "ratio_to_forward": forward / seconds,
        "peak_gib": peak_gib(device),
    }


@torch.no_grad()
def forward_seconds(worker: ScoringWorker, images: np.ndarray) -> float:
    """Of the slices that are scored, logits alone."""
    image = torch.from_numpy(images.copy()).to(worker.device).permute(0, 3, 1, 2).long()
    work = []
    for stage, model in worker.models.items():
        config = model.config
        values, given = stage_values(image, stored_bits=8, given_bits=config.num_given_bits, num_bits=config.num_bits)
        cut = [None if part is None else image_to_slices(part, config.scaling_factor) for part in (values, given)]
        for number in scored_slices(model, first_given=first_given(stage, worker.models)):
            work.append(
                (worker.forwards[stage], cut[0], torch.full((len(image),), number, device=image.device), cut[1])
            )
    wait(worker.device)
    began = time.perf_counter()
    with torch.autocast(worker.device, torch.bfloat16, enabled=worker.in_bfloat16):
        for forward, values, index, given in work:
            forward(values, index, given)
    wait(worker.device)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
