"""What the data tests share: generated images, the folder with reference files if it is there."""

from __future__ import annotations

import json
import pathlib
import pickle
from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image

from data_prep.files import Store, open_store
from tests.data_prep import made

SHARED = pathlib.Path(__file__).parents[3] / "shared"


@pytest.fixture(scope="session")
def shared() -> pathlib.Path:
    if not SHARED.is_dir():
        pytest.skip("the folder with reference files is not here")
    return SHARED


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


@pytest.fixture(params=["local", "object store"])
def store(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Store:
    return open_store(tmp_path / "run") if request.param == "local" else made.object_store()


@pytest.fixture
def written() -> Callable[..., tuple]:
    """written(config, folder) -> (plan, sidecars): all shards, without Ray."""

    def write(config: object, out: pathlib.Path) -> tuple[object, list[dict]]:
        from data_prep import sources
        from data_prep.build import write_shard
        from data_prep.plan import make_plan

        plan = make_plan(config, sources.find(config))
        options = dict(
            config=plan.config, source=(plan.source.name, plan.source.root), out=str(out), plan_hash=plan.hash
        )
        answers = [write_shard({"shard": pickle.dumps(shard)}, **options) for shard in plan.shards]
        return plan, [json.loads(answer["sidecar"]) for answer in answers]

    return write


@pytest.fixture
def rendered(tmp_path: pathlib.Path, written: Callable) -> Callable[..., dict[str, dict[str, tuple]]]:
    """rendered(config) -> split: {key: (label, pixels at image_size)}, through plan and shards, without Ray."""

    def render(config: object) -> dict[str, dict[str, tuple]]:
        import pyarrow.parquet as pq

        from data_prep.parquet import pixels

        found: dict[str, dict[str, tuple]] = {"train": {}, "valid": {}, "test": {}}
        for file in (file for sidecar in written(config, tmp_path / "rendered")[1] for file in sidecar["files"]):
            if (file["resolution"], file["bits"]) == (config.image_size, 8):
                table = pq.read_table(tmp_path / "rendered" / file["path"], partitioning=None)
                rows = zip(table.column("label").to_pylist(), pixels(table), strict=True)
                found[file["split"]] |= dict(zip(table.column("key").to_pylist(), rows, strict=True))
        return found

    return render


@pytest.fixture
def tiny(tmp_path: pathlib.Path) -> tuple:
    """A finished dataset, its columns but px, its pixels by resolution: two shards of 23 rows in row groups of 10."""
    whole = np.random.default_rng(0).integers(0, 256, (46, 8, 8, 3)).astype(np.uint8)
    images = {f"k{i}": image for i, image in enumerate(whole)}
    options = dict(resolutions=[8, 4], bits=[3, 8], row_group_rows=10, num_shards=2)
    return (
        made.dataset(tmp_path, {"train": images}, **options),
        made.columns(list(images)),
        {8: whole, 4: whole[:, ::2, ::2]},
    )


@pytest.fixture(scope="session")
def jpegs() -> list[tuple[str, bytes]]:
    """(synset, bytes) of JPEGs: original ImageNet photos of six synsets where they are, else generated ones."""
    originals = sorted((SHARED / "data" / "imagenet-raw" / "synsets" / "train").glob("*/*.JPEG"))[:6]
    if originals:
        return [(path.parent.name, path.read_bytes()) for path in originals]
    found = []
    for i in range(6):
        small = np.random.default_rng(i).integers(0, 256, (5, 7, 3)).astype(np.uint8)
        image = Image.fromarray(small).resize((90, 70), Image.Resampling.BICUBIC)
        found.append((f"n{10_000_000 + i}", made.encoded(image, "JPEG")))
    return found
