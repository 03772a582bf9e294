"""Each use of what Ray does not promise to keep.

python -m pytest tests/pipelines/test_ray_compat.py
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import pytest

from data_prep.files import open_store
from pipelines import ray_compat
from pipelines.project import ROOT


def test_a_session_binds_to_loopback_wherever_ray_was_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """That its ports then listen on loopback only: test_cluster.py, "ray first"."""
    from ray._private import ray_constants

    monkeypatch.setattr(ray_constants, "ENABLE_RAY_CLUSTER", True)  # fails where Ray has renamed it
    ray_compat.bind_to_loopback()
    assert ray_constants.ENABLE_RAY_CLUSTER is False


def report_two_checkpoints() -> None:
    import ray.train

    for name in ("step-00000001", "step-00000002"):
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "weights").write_text(name)
            checkpoint = ray.train.Checkpoint.from_directory(folder)
            ray.train.report({"score": 1.0}, checkpoint=checkpoint, checkpoint_dir_name=name)


def test_the_last_committed_checkpoint_is_found(ray_session: None, tmp_path: Path) -> None:
    from ray.train import RunConfig, ScalingConfig
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    assert ray_compat.committed_checkpoint(open_store(tmp_path), "run") is None
    DataParallelTrainer(
        report_two_checkpoints,
        scaling_config=ScalingConfig(num_workers=1),
        run_config=RunConfig(name="run", storage_path=str(tmp_path)),
    ).fit()
    assert ray_compat.committed_checkpoint(open_store(tmp_path), "run") == "step-00000002"
    assert (tmp_path / "run" / "step-00000002" / "weights").read_text() == "step-00000002"


def test_no_other_module_of_the_pipelines_uses_private_names_of_ray() -> None:
    private = re.compile(r"\bray(\.\w+)*\.(_private|_internal)\b")
    files = (ROOT / "pipelines").rglob("*.py")
    assert [file.name for file in files if private.search(file.read_text())] == ["ray_compat.py"]
