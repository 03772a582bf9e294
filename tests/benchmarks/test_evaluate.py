"""The benchmark of scoring on a CPU.  python -m pytest tests/benchmarks/test_evaluate.py"""

from __future__ import annotations

from benchmarks.evaluate import measure
from pipelines.loading import load


def test_a_whole_chain_is_scored() -> None:
    result = measure(load("debug", ["evaluate.batch_size=2"]), chunks=1, device="cpu")
    assert (result["config"], result["batch"], result["precision"]) == ("debug", 2, "float32")
    assert result["images_per_sec"] > 0 and result["ratio_to_forward"] > 0
