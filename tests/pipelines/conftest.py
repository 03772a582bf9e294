"""Ray for tests: loopback only, one session for all tests of this folder.

The variables are set before anything imports ray, which reads some of them on import.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

TOYS = Path(__file__).parent / "toys"
ROOT = Path(__file__).parents[2]

os.environ.update(
    RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",
    RAY_USAGE_STATS_ENABLED="0",
    RAY_AUTH_MODE="disabled",
    RAY_DATA_USE_DATASOURCE_V2="0",
    RAY_CHDIR_TO_TRIAL_DIR="0",
    MLFLOW_DISABLE_TELEMETRY="true",
    PYTHONPATH=os.pathsep.join(filter(None, [str(ROOT), str(TOYS), os.environ.get("PYTHONPATH", "")])),
)
os.environ.pop("RAY_ADDRESS", None)
os.environ.pop("MLFLOW_TRACKING_URI", None)
sys.path.append(str(TOYS))

from pipelines.storage import Store, open_store  # noqa: E402


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """A local Ray session of 2 CPUs, unless one is there already."""
    import ray

    if ray.is_initialized():
        yield
        return
    ray.init(
        address="local",
        num_cpus=2,
        num_gpus=0,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
        object_store_memory=200_000_000,
    )
    yield
    ray.shutdown()


@pytest.fixture
def finished(tmp_path: Path) -> Store:
    """A run folder on which the whole diamond of toy nodes is up to date."""
    from toy.diamond import carry_out, decided

    store = open_store(tmp_path / "run")
    assert carry_out(decided(store)) == ["prepare", "left", "right", "join"]
    return store


@pytest.fixture(scope="session")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Storage with a data set of config debug and one training that nothing interrupted, to compare others with."""
    from toy import training

    storage = tmp_path_factory.mktemp("unbroken")
    only = f"--only=prepare_data,{training.NODE}"
    training.finish(training.launch(storage, only, script="full_multidim.py"))
    return storage
