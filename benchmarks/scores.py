"""Bits/dim of a chain's parts with standard errors, and how two chains differ image by image.

    python benchmarks/scores.py RUN/nodes/evaluate/.../per_image.parquet [OTHER/.../per_image.parquet]

The standard error is that of the mean over the test images. Of two files, of the same test images, the difference
first - second is paired: what all images have in common falls away, so it is far more certain than either mean.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("files", nargs="+", type=Path, help="one per_image.parquet, or two to compare")
    arguments = parser.parse_args()
    print(json.dumps(scores(*arguments.files), indent=1))


def scores(first: Path, second: Path | None = None) -> dict[str, dict[str, float]]:
    """{part: mean and standard error}, of one file or of the paired difference for the parts that both have.

    Raises ValueError if the two are not of the same images.
    """
    columns = _columns(first)
    if second is not None:
        other = _columns(second)
        if set(columns) != set(other):
            raise ValueError(f"{first} and {second} score different images")
        columns = {
            key: {part: value - other[key][part] for part, value in row.items() if part in other[key]}
            for key, row in columns.items()
        }
    parts = list(next(iter(columns.values())))
    return {part: _mean(np.array([row[part] for row in columns.values()])) for part in parts}


def _columns(file: Path) -> dict[str, dict[str, float]]:
    """{key of an image: {part: bits/dim}}."""
    return {row.pop("key"): row for row in pq.read_table(file).to_pylist()}


def _mean(values: np.ndarray) -> dict[str, float]:
    return {
        "bits_per_dim": float(values.mean()),
        "standard_error": float(values.std(ddof=1) / len(values) ** 0.5),
        "num_images": len(values),
    }


if __name__ == "__main__":
    main()
