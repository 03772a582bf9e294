"""Toys for Ray's workers, a finished run folder, and a training that nothing interrupted.

The path to the toys is in the environment before any test starts Ray: its workers are new processes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

TOYS = Path(__file__).parent / "toys"

os.environ.update(
    MLFLOW_DISABLE_TELEMETRY="true",
    PYTHONPATH=os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH", ""), str(TOYS)])),
)
os.environ.pop("MLFLOW_TRACKING_URI", None)
sys.path.append(str(TOYS))

from data_prep.files import Store, open_store  # noqa: E402


@pytest.fixture
def finished(tmp_path: Path) -> Store:
    """A run folder on which the whole diamond of toy nodes is up to date."""
    from toy.diamond import carry_out, decided

    store = open_store(tmp_path / "run")
    assert carry_out(decided(store)) == ["prepare", "left", "right", "join"]
    return store


@pytest.fixture
def run_with_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """run_with_gpus(setting, …) -> exit code of a start on a machine with GPUs that stops where it would write."""
    from pipelines import cluster, full_multidim, start

    def stop(*_: object) -> None:
        raise SystemExit("would have run")

    monkeypatch.delenv("RAY_JOB_CONFIG_JSON_ENV_VAR", raising=False)
    monkeypatch.setattr(cluster, "connect", lambda **_: cluster.ClusterInfo("embedded", {"CPU": 64.0, "GPU": 8.0}))
    monkeypatch.setattr(cluster, "disconnect", lambda: None)
    monkeypatch.setattr(start, "_locked", stop)
    return lambda *options: full_multidim.main(["--config", "debug", f"storage={tmp_path / 'runs'}", *options])


@pytest.fixture(scope="session")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Storage with a data set of config debug and one training that nothing interrupted, to compare others with."""
    from toy import training

    storage = tmp_path_factory.mktemp("unbroken")
    only = f"--only=prepare_data,{training.NODE}"
    training.finish(training.launch(storage, only, script="full_multidim.py"))
    return storage
