"""prepare_data: raw photos -> Parquet at each resolution and bit depth, as a Ray Data job."""

from __future__ import annotations

import dataclasses

from data_prep.build import build
from pipelines import storage
from pipelines.node import NodeContext, NodeResult

FOLDER = "dataset"


def run(context: NodeContext) -> NodeResult:
    """config: data (DataConfig without its root). options: root, num_cpus of one shard's task."""
    config = dataclasses.replace(context.config["data"], root=context.options["root"])

    def report(done: int, total: int, quarantined: int) -> None:
        context.progress.update(done, total, unit="images", note=f"{quarantined} quarantined")

    out = storage.join(context.out, FOLDER)
    manifest = build(config, out=out, progress=report, num_cpus_per_task=context.options["num_cpus"])
    metrics = {f"images/{split}": float(count) for split, count in manifest.num_images.items()}
    metrics["images/quarantined"] = float(sum(manifest.quarantine.values()))
    with context.run.open() as run:
        run.log_text(manifest.to_json(), "manifest.json")
        run.log_metrics(metrics)
    digests = {storage.join(FOLDER, shard.path): shard.sha256 for shard in manifest.shards}
    return NodeResult(outputs={"dataset": FOLDER}, metrics=metrics, sha256=digests)
