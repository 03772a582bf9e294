"""Toys for Ray's workers, a finished run folder, and a training that nothing interrupted.

The path to the toys is in the environment before any test starts Ray: its workers are new processes.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

TOYS = Path(__file__).parent / "toys"

os.environ.update(
    MLFLOW_DISABLE_TELEMETRY="true",
    PYTHONPATH=os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH", ""), str(TOYS)])),
)
for outside in ("MLFLOW_TRACKING_URI", "RAY_JOB_CONFIG_JSON_ENV_VAR", "SPN_STORAGE"):
    os.environ.pop(outside, None)
sys.path.append(str(TOYS))
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background, and all that it starts, ignores it

from data_prep.files import Store, open_store  # noqa: E402
from pipelines import cli  # noqa: E402


@pytest.fixture
def command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """command(script, *arguments) -> (exit code, stdout, stderr), on the debug config with its storage in tmp_path."""

    def call(script: str, *arguments: str) -> tuple[int, str, str]:
        code = cli.main(["--config", "debug", f"storage={tmp_path / 'runs'}", *arguments], prog=script)
        return code, *capsys.readouterr()

    return call


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "run")


@pytest.fixture
def finished(store: Store) -> Store:
    """A run folder on which the whole diamond of toy nodes is up to date."""
    from toy.diamond import carry_out, decided

    assert carry_out(decided(store)) == ["prepare", "left", "right", "join"]
    return store


@pytest.fixture(scope="session")
def mlflow_place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of one MLflow database for many tests: making its schema takes seconds."""
    return tmp_path_factory.mktemp("mlflow")


@pytest.fixture(scope="session")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Storage with a dataset of config debug and one training that nothing interrupted, to compare others with."""
    from toy import training

    storage = tmp_path_factory.mktemp("unbroken")
    only = f"--only=prepare_data,{training.NODE}"
    training.finish(training.launch(storage, only, script="full_multidim.py"))
    return storage
