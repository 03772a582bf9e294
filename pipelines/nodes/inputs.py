"""The images that a node reads, as MLflow's data sets: name, digest of the very bytes, shape and number."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from data_prep.parquet import Dataset

if TYPE_CHECKING:
    from pipelines.tracking import NodeRun

_DIGEST_CHARS = 32  # MLflow keeps 36


def split_digest(dataset: Dataset, *, resolution: int, bits: int, split: str) -> str:
    """Of the manifest's checksums of a split's shards, in order: equal exactly where all files are, byte for byte."""
    shards = dataset.shards(resolution=resolution, bits=bits, split=split)
    return hashlib.sha256("\n".join(shard.sha256 for shard in shards).encode()).hexdigest()[:_DIGEST_CHARS]


def log_split(run: NodeRun, dataset: Dataset, *, resolution: int, bits: int, split: str, context: str) -> None:
    """Names a split as input of a run. context: MLflow's word for what it was read for, e.g. "training"."""
    run.log_dataset(
        name=f"{dataset.manifest.dataset}-{resolution}px-{bits}bit-{split}",
        digest=split_digest(dataset, resolution=resolution, bits=bits, split=split),
        uri=dataset.uri,
        context=context,
        shape=(-1, resolution, resolution, 3),
        profile={"num_rows": dataset.num_images(split), "bits": bits},
    )
