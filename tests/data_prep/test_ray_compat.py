"""Each use of what Ray does not promise to keep.

A job that starts on all cores: test_build.py, `test_shards_are_begun_on_all_cores_at_once`. CPUs of tasks that split
blocks: test_ingest.py, `test_it_runs_beside_workers_that_hold_all_but_a_quarter_of_a_cpu`.

python -m pytest tests/data_prep/test_ray_compat.py
"""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from data_prep import ray_compat
from data_prep.files import open_store

ROOT = Path(__file__).parents[2]


def test_ray_train_resumes_by_the_record_of_intact_checkpoints(tmp_path: Path) -> None:
    from ray.train import CheckpointConfig
    from ray.train.v2._internal.execution.checkpoint.checkpoint_manager import CheckpointManager
    from ray.train.v2._internal.execution.context import StorageContext

    store = open_store(tmp_path)
    assert ray_compat.keep_intact_checkpoints(store.sub("run"), score="score") == (0, [])
    for step, score in ((1, 2.0), (2, 1.0), (3, 3.0)):
        ray_compat.seal_checkpoint(store.sub(f"run/step-{step:08d}"), {"score": score})
    assert ray_compat.keep_intact_checkpoints(store.sub("run"), score="score") == (3, [])
    config = CheckpointConfig(num_to_keep=2, checkpoint_score_attribute="score", checkpoint_score_order="min")
    manager = CheckpointManager(config, StorageContext(storage_path=str(tmp_path), experiment_dir_name="run"))
    assert manager._latest_checkpoint_result.checkpoint.path == str(tmp_path / "run/step-00000003")
    assert [each.metrics["score"] for each in manager._checkpoint_results] == [3.0, 2.0, 1.0], "the best comes last"


def test_no_core_in_sight_does_not_hold_a_job_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster whose machines are yet to come; and a Ray that keeps this somewhere else."""
    monkeypatch.setattr(ray_compat, "_ANSWER_SEC", 0.01)
    none = SimpleNamespace(get_total_resources=lambda: SimpleNamespace(cpu=0.0))
    for executor in (SimpleNamespace(_cluster_autoscaler=none), SimpleNamespace()):
        ray_compat.WaitForAutoscaler().before_execution_starts(executor)


def test_scheduling_rests_between_its_steps(ray_session: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise it would take turns with the training for the interpreter's lock, some hundred times per second."""
    import ray.data

    rests: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: 5.0 + sum(rests), sleep=rests.append)
    with monkeypatch.context() as patched:
        patched.setattr(ray_compat, "time", clock)
        paced = ray_compat.RestBetweenSteps()
        for _ in range(3):
            paced.on_execution_step(None)
    assert rests == [0.0, *[pytest.approx(ray_compat._STEP_SEC)] * 2]
    steps = []
    monkeypatch.setattr(ray_compat.RestBetweenSteps, "on_execution_step", lambda self, executor: steps.append(executor))
    rows = ray.data.range(4).map_batches(lambda batch: batch)
    rows.context.custom_execution_callback_classes.append(ray_compat.RestBetweenSteps)
    assert rows.take_all() and steps, "Ray Data calls it at every step"


def test_no_other_module_uses_private_names_of_ray() -> None:
    """Modules, and attributes of Ray Data's objects."""
    module = r"\bray(\.\w+)*\.(_private|_internal)\b|\bfrom ray(\.\w+)* import _"
    private = re.compile(module + r"|_cluster_autoscaler\b|\._logical_plan\b")
    files = [file for package in ("spn", "data_prep", "pipelines") for file in (ROOT / package).rglob("*.py")]
    assert [file.name for file in files if private.search(file.read_text())] == ["ray_compat.py"]
