"""prepare_data: raw photos -> Parquet at each resolution and bit depth, as a Ray Data job."""

from __future__ import annotations

from data_prep.build import build
from data_prep.files import UserError, join
from data_prep.parquet import Manifest
from data_prep.sources import Unplannable, UnusableSource
from data_prep.verify import readme
from pipelines.config import PrepareDataNodeConfig
from pipelines.dag.node import NodeContext, NodeResult

FOLDER = "dataset"


def run(context: NodeContext[PrepareDataNodeConfig]) -> NodeResult:
    """Raises UserError for a source that cannot be used, or not with this config.

    A build that gave up is resumed with a higher max_quarantine_fraction: that makes no other dataset.
    """
    config = context.config

    def report(done: int, total: int, quarantined: int) -> None:
        context.progress.update(done, total, unit="images", note=f"{quarantined} quarantined")

    out = join(context.out, FOLDER)
    try:
        manifest = build(
            config.data,
            out=out,
            progress=report,
            listing_hash=config.listing_hash,
            num_cpus_per_task=config.num_cpus,
        )
    except UnusableSource as error:
        raise UserError(f"data.root: {error}") from error
    except Unplannable as error:
        raise UserError(f"data.{error}") from error
    metrics = _metrics(manifest)
    with context.run.open() as run:
        run.log_text(manifest.to_json(), "manifest.json")
        run.log_text(readme(manifest), "dataset.md")
        run.log_metrics(metrics)
    digests = {join(FOLDER, shard.path): shard.sha256 for shard in manifest.shards}
    return NodeResult(outputs={"dataset": FOLDER}, metrics=metrics, sha256=digests)


def _metrics(manifest: Manifest) -> dict[str, float]:
    """Counts: every image and photo is in one of them, by name."""
    counts = {f"images/{split}": count for split, count in manifest.num_images.items()}
    counts["images/quarantined"] = sum(manifest.quarantine.values())
    counts |= {f"quarantined/{reason}": count for reason, count in manifest.quarantine.items()}
    counts |= {f"converted/{name}": count for name, count in manifest.conversions.items()}
    counts["data_bytes"] = sum(shard.bytes for shard in manifest.shards)
    return {name: float(count) for name, count in counts.items()}
