"""Means, standard errors and paired differences of per_image.parquet.

python -m pytest tests/benchmarks/test_scores.py
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks.scores import scores


def write(path: Path, keys: list[str], total: list[float], **parts: list[float]) -> Path:
    pq.write_table(pa.table({"key": keys, "total": total, **parts}), path)
    return path


def test_a_mean_with_its_standard_error(tmp_path: Path) -> None:
    found = scores(write(tmp_path / "a", list("abcd"), [1.0, 2.0, 3.0, 4.0]))["total"]
    assert found["bits_per_dim"] == 2.5 and found["num_images"] == 4
    assert found["standard_error"] == pytest.approx((5 / 3) ** 0.5 / 2)


def test_a_difference_is_paired_by_image(tmp_path: Path) -> None:
    first = write(tmp_path / "a", list("abc"), [1.0, 5.0, 9.0], only_here=[0.0, 0.0, 0.0])
    second = write(tmp_path / "b", list("cab"), [8.5, 0.5, 4.5])
    found = scores(first, second)
    assert list(found) == ["total"]
    assert found["total"] == {"bits_per_dim": 0.5, "standard_error": 0.0, "num_images": 3}


def test_scores_of_other_images_are_refused(tmp_path: Path) -> None:
    first, second = write(tmp_path / "a", ["a"], [1.0]), write(tmp_path / "b", ["b"], [1.0])
    with pytest.raises(ValueError, match="different images"):
        scores(first, second)
