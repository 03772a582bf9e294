"""What the benchmark of constant memory compares: the same networks on the same number of slices of one size.

python -m pytest tests/benchmarks/test_constant_memory.py
"""

from __future__ import annotations

import argparse

import torch

from benchmarks import constant_memory
from pipelines.config import stage_model_config
from spn.model import SPN, parameter_counts


def test_rows_differ_in_the_embedders_input_alone():
    rows = [row for row in constant_memory.planned(64, 4) if row["system"] == "size_upscale"]
    counts = []
    for row in rows:
        config = stage_model_config(constant_memory.experiment(row, "imagenet64", []), "size_upscale")
        assert config.slice_size == 32 and row["batch"] == 64 and config.num_values == 256
        with torch.device("meta"):
            model = SPN(config)
        found = parameter_counts(model)
        found["embedder.attention"] -= model.embedder.attention.project.weight.numel()
        found["total"] = found["embedder.meta_position"] = 0  # one meta-position more for each slice
        counts.append(found)
    assert counts[0] == counts[1] == counts[2]
    assert [row["image_size"] for row in rows] == [64, 128, 256]


def test_the_baseline_reads_whole_images():
    for row in constant_memory.planned(64, 4):
        if row["system"] == "baseline":
            config = stage_model_config(constant_memory.experiment(row, "imagenet64", []), "baseline")
            assert config.slice_size == config.image_size == row["image_size"] and config.embedder is None


def test_no_memory_left_is_a_row(monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")

    monkeypatch.setattr(constant_memory, "measure", full)
    arguments = argparse.Namespace(config="imagenet64", overrides=[], accumulate=1, device="cpu")
    row = constant_memory.planned(64, 4)[-1]
    assert constant_memory.measured(row, arguments)["out_of_memory"] == "CUDA out of memory"


def test_growth_is_the_largest_over_the_smallest():
    rows = [
        dict(system="size_upscale", micro_step_sec=s, peak_gib=g) for s, g in ((2.0, 10.0), (2.2, 11.0), (2.5, 9.0))
    ]
    rows.append(dict(system="baseline", micro_step_sec=50.0, peak_gib=50.0))
    found = constant_memory.growth(rows)
    assert abs(found["micro_step_sec"] - 1.25) < 1e-9 and abs(found["peak_gib"] - 11 / 9) < 1e-9
