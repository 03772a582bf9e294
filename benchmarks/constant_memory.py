"""Step time and peak memory as the image grows: an SPN with slices of 32x32, and the decoder on whole images.

    python benchmarks/constant_memory.py --out benchmarks/results/constant_memory

The paper's claim (section 2.2): memory and computation stay effectively constant with the image's size, as slices keep
theirs. The networks of one preset, all at 8 bits, with the same number of slices per step: as SPN of S = 2, 4, 8 on
images of 64, 128, 256 pixels (compiled); and the decoder alone on whole images (not compiled: compare rows of one
system), first few of them, then as many as there were slices, where running out of memory is a result. One JSON, a row
for each.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.machine import report
from benchmarks.train import measure
from pipelines.config import ExperimentConfig, stage_model_config
from pipelines.loading import load

SLICE = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", default="imagenet64", help="preset with the networks")
    parser.add_argument("--batch", type=int, default=64, help="slices, or whole images, a micro-batch")
    parser.add_argument("--few", type=int, default=4, help="whole images, to see their growth")
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches an optimiser step")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, help="folder for the JSON")
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_intermixed_args()
    result: dict[str, Any] = {"config": arguments.config, "rows": []}
    for row in planned(arguments.batch, arguments.few):
        result["rows"].append({**row, **measured(row, arguments)})
        result["growth"] = growth(result["rows"])
        report(result, arguments.out, arguments.config)  # after every row: what was measured stays


def planned(batch: int, few: int) -> list[dict[str, Any]]:
    """What to measure: system, image_size, scaling_factor, batch."""
    spn = [dict(system="size_upscale", image_size=SLICE * s, scaling_factor=s, batch=batch) for s in (2, 4, 8)]
    sizes = [(few, SLICE), (few, 2 * SLICE), (few, 4 * SLICE), (batch, 2 * SLICE), (batch, 4 * SLICE)]
    return spn + [dict(system="baseline", image_size=size, scaling_factor=1, batch=n) for n, size in sizes]


def experiment(row: dict[str, Any], preset: str, overrides: Sequence[str]) -> ExperimentConfig:
    """The preset with a row's system and image size."""
    size = row["image_size"]
    own = [f"stages=[{row['system']}]", "bits=[8]", f"scaling_factor={row['scaling_factor']}", "data.bits=[8]"]
    own += [f"data.image_size={size}", f"data.resolutions=[{size}]", "data.root=."]
    return load(preset, [*own, *overrides])


def measured(row: dict[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """Step time and peak memory of one row, or that memory ran out."""
    config, compiled = experiment(row, arguments.config, arguments.overrides), row["system"] != "baseline"
    try:
        found = measure(
            stage_model_config(config, row["system"]),
            dataclasses.replace(config.per_stage[row["system"]].train, precision="bfloat16"),
            batch=row["batch"],
            accumulate=arguments.accumulate,
            steps=2,
            compiled=compiled,
            device=arguments.device,
        )
    except torch.OutOfMemoryError as error:
        found = {"out_of_memory": str(error).split(". ")[0]}
    found = {"compiled": compiled, **found}
    gc.collect()  # networks and graphs of this row, before the next one's peak is measured
    torch._dynamo.reset()
    if arguments.device == "cuda":
        torch.cuda.empty_cache()
    return found


def growth(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Largest over smallest step time and peak memory of the SPN's rows."""
    spn = [row for row in rows if row["system"] == "size_upscale" and "micro_step_sec" in row]
    return {
        name: max(row[name] for row in spn) / min(row[name] for row in spn)
        for name in ("micro_step_sec", "peak_gib")
        if spn and all(row[name] for row in spn)
    }


if __name__ == "__main__":
    main()
