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


TINY = dict(resolutions=[8, 4], bits=[3, 8])


@pytest.fixture
def tiny(tmp_path: pathlib.Path) -> tuple:
    """A finished dataset without Ray, its columns but px, and its pixels by resolution: two shards of 23 rows in row
    groups of 10; every image was gray, one more is in quarantine."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from data_prep.files import open_store
    from data_prep.parquet import QUARANTINE, QUARANTINE_SCHEMA, Manifest, ShardWriter, keys_hash, open_dataset, schema

    rng, keys, fields, shards = np.random.default_rng(0), [f"k{i}" for i in range(46)], list(schema(8))[:-1], []
    columns = [keys, [None] * 46, [60] * 46, [80] * 46, [1] * 46]
    arrays = [pa.array(column, field.type) for column, field in zip(columns, fields, strict=True)]
    names = pa.Table.from_arrays(arrays, schema=pa.schema(fields))
    squares = {side: rng.integers(0, 256, (46, side, side, 3)).astype(np.uint8) for side in TINY["resolutions"]}
    for index in range(2):
        writer = ShardWriter(open_store(tmp_path), split="train", index=index, num_shards=2, row_group_rows=10, **TINY)
        with writer.open():
            for begin, end in ((0, 4), (4, 21), (21, 23)):
                begin, end = 23 * index + begin, 23 * index + end
                writer.append(names.slice(begin, end - begin), {r: array[begin:end] for r, array in squares.items()})
        shards += writer.shards()
    bad = dict(key="bad", source="bad", offset=None, size=0, sha256="", reason="empty", message="0 bytes")
    pq.write_table(pa.Table.from_pylist([bad], schema=QUARANTINE_SCHEMA), tmp_path / QUARANTINE)
    manifest = Manifest(
        dataset="tiny",
        plan_hash="p",
        config=TINY,
        source={},
        num_images={"train": 46},
        split_hashes={"train": keys_hash(keys)},
        quarantine={"empty": 1},
        quarantine_sha256=open_store(tmp_path).sha256(QUARANTINE),
        conversions={"gray_to_rgb": 46},
        shards=shards,
        versions={},
    )
    (tmp_path / "manifest.json").write_text(manifest.to_json())
    return open_dataset(str(tmp_path)), names, squares


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
