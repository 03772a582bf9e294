"""Parts of a chain's score add up.  python -m pytest tests/pipelines/nodes/test_evaluate.py"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from pipelines.config import EvaluateNodeConfig, NodeResources
from pipelines.dag.node import NodeContext, NodeOutput
from pipelines.dag.progress import Reporter
from pipelines.nodes import evaluate
from pipelines.nodes.trained import load_stages
from pipelines.tracking import RunHandle
from spn.evaluation import chain_nats
from spn.histogram import Histogram

STAGES = ("first_slice", "size_upscale", "depth_upscale")


def test_parts_of_the_whole_chain_add_up(networks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slice (0, 0) counts once: as the first slice's. With it, size_upscale is a network of its own as well."""
    test, names = np.random.default_rng(0).integers(0, 256, (5, 8, 8, 3), dtype=np.uint8), list("abcde")
    manifest = SimpleNamespace(dataset="noise")
    dataset = SimpleNamespace(manifest=manifest, uri="", num_images=lambda _: 5, split_digest=lambda **_: "digest")
    monkeypatch.setattr(evaluate, "open_dataset", lambda _: dataset)
    monkeypatch.setattr(
        evaluate, "_batches", lambda *_, batch: [(names[:batch], test[:batch]), (names[batch:], test[batch:])]
    )
    monkeypatch.setattr(evaluate, "_train_histogram", lambda *_: Histogram())
    config = EvaluateNodeConfig(stages=STAGES, batch_size=3, resources=NodeResources(), dataset="noise")
    inputs = networks | {"prepare_data": NodeOutput(str(tmp_path), {"dataset": "dataset"}, {}, "a")}
    where = {"inputs": inputs, "out": str(tmp_path), "run": RunHandle(), "progress": Reporter("evaluate")}
    evaluate.run(NodeContext("evaluate", "f", "a", config, **where))

    results = json.loads((tmp_path / "results.json").read_text())
    parts = results["stages"].values()
    for column in ("uniform", "histogram"):  # a histogram of no pixels is uniform
        assert [part[column] for part in parts] == pytest.approx([3 / 4, 9 / 4, 3])
    for column in ("bits_per_dim", "histogram", "uniform"):
        assert sum(part[column] for part in parts) == pytest.approx(results["total"][column], abs=1e-9)
    table = pq.read_table(tmp_path / "per_image.parquet").to_pydict()
    assert table["key"] == names and np.mean(table["total"]) == pytest.approx(results["total"]["bits_per_dim"])
    alone = load_stages(networks, STAGES[1:], device="cpu")
    nats = chain_nats(alone, torch.from_numpy(test).permute(0, 3, 1, 2).long())["size_upscale"]
    bits = nats.sum().item() / np.log(2) / test.size
    assert results["size_upscale_as_plain_spn"] == pytest.approx(bits, rel=1e-6)
