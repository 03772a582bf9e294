"""prepare_data: raw photos -> Parquet at each resolution and bit depth, as a Ray Data job."""

from __future__ import annotations

import dataclasses

from data_prep import card
from data_prep import files as storage
from data_prep.build import TooManyUnusable, build
from data_prep.files import UserError
from data_prep.parquet import Manifest
from data_prep.sources import Unplannable, UnusableSource
from pipelines.dag.node import NodeContext, NodeResult

FOLDER = "dataset"


def run(context: NodeContext) -> NodeResult:
    """config: data (DataConfig without what is in options). options: root, max_quarantine_fraction, num_cpus of a task.

    Raising max_quarantine_fraction after a build gave up makes no other data set: it resumes. Raises UserError for a
    source that cannot be used, or not with this configuration.
    """
    options = {name: context.options[name] for name in ("root", "max_quarantine_fraction")}
    config = dataclasses.replace(context.config["data"], **options)

    def report(done: int, total: int, quarantined: int) -> None:
        context.progress.update(done, total, unit="images", note=f"{quarantined} quarantined")

    out = storage.join(context.out, FOLDER)
    try:
        manifest = build(config, out=out, progress=report, num_cpus_per_task=context.options["num_cpus"])
    except (UnusableSource, TooManyUnusable) as error:
        raise UserError(f"data.root: {error}") from error
    except Unplannable as error:
        raise UserError(f"data.{error}") from error
    metrics = _metrics(manifest)
    with context.run.open() as run:
        run.log_text(manifest.to_json(), "manifest.json")
        run.log_text(card.text(manifest), "dataset.md")
        run.log_metrics(metrics)
    digests = {storage.join(FOLDER, shard.path): shard.sha256 for shard in manifest.shards}
    return NodeResult(outputs={"dataset": FOLDER}, metrics=metrics, sha256=digests)


def _metrics(manifest: Manifest) -> dict[str, float]:
    """Counts: every image and photo is in one of them, by name."""
    counts = {f"images/{split}": count for split, count in manifest.num_images.items()}
    counts["images/quarantined"] = sum(manifest.quarantine.values())
    counts |= {f"quarantined/{reason}": count for reason, count in manifest.quarantine.items()}
    counts |= {f"converted/{name}": count for name, count in manifest.conversions.items()}
    counts["data_bytes"] = sum(shard.bytes for shard in manifest.shards)
    return {name: float(count) for name, count in counts.items()}
