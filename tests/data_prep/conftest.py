"""What the data tests share: a small Ray, generated images, the folder with reference files if it is there."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from PIL import Image

ROOT = pathlib.Path(__file__).parents[2]

# Before ray is imported anywhere: only loopback, no telemetry, no tokens, the fast reader.
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_DATA_USE_DATASOURCE_V2", "0")


@pytest.fixture(scope="package")  # gone before other rooms start their own
def local_ray() -> Iterator[None]:
    import ray

    # Ray's workers are new processes: they find this checkout only through the environment.
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *([before] if before else [])])
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before


@pytest.fixture(scope="session")
def shared() -> pathlib.Path:
    folder = ROOT.parent / "shared"
    if not folder.is_dir():
        pytest.skip("the folder with reference files is not here")
    return folder


@pytest.fixture(scope="session")
def make_photos() -> Callable[..., None]:
    """Writes smooth random colour images, PNG and JPEG in turn: make_photos(folder, number)."""

    def make(folder: pathlib.Path, number: int, *, height: int = 60, width: int = 80) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for i in range(number):
            rng = np.random.default_rng(i)
            small = rng.integers(0, 256, (height // 10, width // 10, 3)).astype(np.uint8)
            image = Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)
            image.save(folder / f"photo_{i:02d}.{'png' if i % 2 else 'jpg'}")

    return make
