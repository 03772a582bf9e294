"""What the data tests share: generated images, the folder with reference files if it is there."""

from __future__ import annotations

import json
import pathlib
import pickle
from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image

ROOT = pathlib.Path(__file__).parents[2]


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


@pytest.fixture
def rendered(tmp_path: pathlib.Path) -> Callable[..., dict[str, dict[str, tuple]]]:
    """rendered(config) -> split: {key: (label, pixels at image_size)}, through plan and shards, without Ray."""

    def render(config: object) -> dict[str, dict[str, tuple]]:
        import pyarrow.parquet as pq

        from data_prep import sources
        from data_prep.build import write_shard
        from data_prep.parquet import pixels
        from data_prep.plan import make_plan

        out = tmp_path / "rendered"
        plan = make_plan(config, sources.find(config))
        found: dict[str, dict[str, tuple]] = {"train": {}, "valid": {}, "test": {}}
        for shard in plan.shards:
            task, place = {"shard": pickle.dumps(shard)}, (plan.source.name, plan.source.root)
            answer = write_shard(task, config=config, source=place, out=str(out), plan_hash=plan.hash)
            sidecar = json.loads(answer["sidecar"])
            for file in sidecar["files"]:
                if (file["resolution"], file["bits"]) == (config.image_size, 8):
                    table = pq.read_table(out / file["path"], partitioning=None)
                    labels = table.column("label").to_pylist()
                    rows = zip(labels, pixels(table), strict=True)
                    found[shard.split] |= dict(zip(table.column("key").to_pylist(), rows, strict=True))
        return found

    return render


@pytest.fixture(scope="session")
def jpegs(shared_or_none: pathlib.Path | None) -> list[tuple[str, bytes]]:
    """(synset, bytes) of JPEGs: original ImageNet photos of six synsets where they are, else generated ones."""
    import io

    folder = None if shared_or_none is None else shared_or_none / "data" / "imagenet-raw" / "synsets" / "train"
    if folder is not None and folder.is_dir():
        paths = sorted(folder.glob("*/*.JPEG"))[:6]
        return [(path.parent.name, path.read_bytes()) for path in paths]
    found = []
    for i in range(6):
        buffer = io.BytesIO()
        small = np.random.default_rng(i).integers(0, 256, (5, 7, 3)).astype(np.uint8)
        Image.fromarray(small).resize((90, 70), Image.Resampling.BICUBIC).save(buffer, "JPEG")
        found.append((f"n{10_000_000 + i}", buffer.getvalue()))
    return found


@pytest.fixture(scope="session")
def shared_or_none() -> pathlib.Path | None:
    folder = ROOT.parent / "shared"
    return folder if folder.is_dir() else None
