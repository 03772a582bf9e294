"""Builds a data set as a Ray Data job: plan, one task for each shard, commit. Can be killed and started again.

    plan     the source's photos are split, their rows permuted by the seed and cut into shards
    job      a Ray Data dataset with one row for each shard; a task writes all resolutions and depths of its shard
             from one decode of each photo, then a sidecar in _build/ that says so
    commit   the driver checks the whole, then writes manifest.json in one put

A shard whose sidecar matches the plan and whose files have its checksums is not written again.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import pathlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import ray.data

from data_prep import card, files, images, sources
from data_prep.config import SPLITS, DataConfig
from data_prep.order import permutation, rank_by_hash
from data_prep.parquet import (
    MANIFEST,
    QUARANTINE,
    QUARANTINE_SCHEMA,
    Manifest,
    Shard,
    ShardWriter,
    keys_hash,
    schema,
)

_CHUNK_BYTES = 256_000_000  # of pixels that a task holds at once
_BYTE_DECIDING_LIBRARIES = ("numpy", "pillow", "pyarrow", "simplejpeg")


class TooManyUnusable(Exception):
    """More photos than max_quarantine_fraction allows could not be used; nothing was committed."""


@dataclass(frozen=True)
class Row:
    """One training image: a photo, or the tile of it at (top, left)."""

    photo: str
    top: int | None = None
    left: int | None = None

    @property
    def key(self) -> str:
        return self.photo if self.top is None else f"{self.photo}#y{self.top:04d}_x{self.left:04d}"


@dataclass(frozen=True)
class ShardPlan:
    split: str
    index: int
    num_shards: int
    rows: list[Row]


@dataclass(frozen=True)
class Plan:
    source: sources.Source
    photos: dict[str, list[str]]  # split -> photo keys
    shards: list[ShardPlan]
    quarantine: list[dict]  # photos whose header is unusable already; records of QUARANTINE_SCHEMA
    hash: str
    versions: dict[str, str]


def build(
    config: DataConfig,
    *,
    out: str,
    progress: Callable[[int, int, int], None],
    num_cpus_per_task: float = 0.5,
) -> Manifest:
    """Builds the data set in the folder `out` (path or URI) and returns its manifest. Ray must be initialised.

    `progress(done, total, quarantined)` is called as shards finish: images done and planned, photos quarantined.
    Raises ValueError for an unusable source or an `out` that holds another finished data set, TooManyUnusable.
    """
    plan = make_plan(config, sources.find(config))
    filesystem, folder = files.locate(out)
    _claim(filesystem, folder, out, plan)
    sidecars: list[dict] = []
    bad = {record["key"]: record for record in plan.quarantine}
    total = sum(len(shard.rows) for shard in plan.shards)
    done = 0
    progress(done, total, len(bad))
    try:
        _check_share(config, plan, bad)
        for sidecar in _run(config, plan, out, num_cpus_per_task):
            sidecars.append(sidecar)
            bad |= {record["key"]: record for record in sidecar["quarantine"]}
            done += sidecar["num_planned"]
            progress(done, total, len(bad))
            _check_share(config, plan, bad)
    finally:
        _write_quarantine(filesystem, folder, bad)  # also when the build fails: it says which photos, and why
    return _commit(config, plan, filesystem, folder, sidecars, bad)


def make_plan(config: DataConfig, source: sources.Source) -> Plan:
    photos = split_photos(config, [photo.key for photo in source.photos])
    shards, quarantine = [], []
    for number, split in enumerate(SPLITS):
        rows = []
        for photo in photos[split]:
            if config.crop == "center":
                rows.append(Row(photo))
                continue
            try:
                rows += _tiles(config, split, photo, sources.read_photo(source.root, photo))
            except images.UnusableImage as error:
                quarantine.append(_quarantine_record(source, photo, error))
        rows.sort(key=lambda row: row.key)
        rows = [rows[i] for i in permutation(len(rows), config.seed, number)]
        num_shards = -(-len(rows) // config.rows_per_shard)
        bounds = [len(rows) * i // num_shards for i in range(num_shards)] + [len(rows)] if num_shards else []
        shards += [
            ShardPlan(split, i, num_shards, rows[begin:end])
            for i, (begin, end) in enumerate(zip(bounds[:-1], bounds[1:], strict=True))
        ]
    versions = {name: importlib.metadata.version(name) for name in _BYTE_DECIDING_LIBRARIES}
    ingredients = [_config_dict(config), source.listing_hash, _code_hash(), versions]
    plan_hash = hashlib.sha256(json.dumps(ingredients, sort_keys=True).encode()).hexdigest()
    return Plan(source, photos, shards, quarantine, plan_hash, versions)


def split_photos(config: DataConfig, keys: list[str]) -> dict[str, list[str]]:
    """Split -> photo keys, disjoint. When photos come or go, only photos at the edges of the ranking change splits."""
    held_out = config.num_valid_photos + config.num_test_photos
    if held_out >= len(keys):
        raise ValueError(
            f"num_valid_photos + num_test_photos is {held_out}; the source has {len(keys)} photos "
            "and at least one must be left for training"
        )
    ranked = rank_by_hash(keys, config.seed, "split")
    valid, rest = ranked[: config.num_valid_photos], ranked[config.num_valid_photos :]
    return {"train": rest[config.num_test_photos :], "valid": valid, "test": rest[: config.num_test_photos]}


def _tiles(config: DataConfig, split: str, photo: str, data: bytes) -> list[Row]:
    height, width = images.header_size(data)
    size = config.tile_size
    assert size is not None
    _refuse_small(min(height, width), max(size, config.min_side))
    # Held-out tiles never overlap, so that no pixel is scored twice.
    stride = config.tile_stride if split == "train" and config.tile_stride else size
    return [Row(photo, top, left) for top, left in images.tile_origins(height, width, size=size, stride=stride)]


def _refuse_small(side: int, needed: int) -> None:
    if side < needed:
        raise images.UnusableImage("too_small", f"short side of {side} pixels, at least {needed} needed")


def _config_dict(config: DataConfig) -> dict:
    fields = asdict(config)
    del fields["root"]  # a place; what lies there is in the listing hash
    return fields


def _code_hash() -> str:
    sha = hashlib.sha256()
    for name in ("build.py", "images.py", "order.py", "parquet.py"):
        sha.update((pathlib.Path(__file__).parent / name).read_bytes())
    return sha.hexdigest()


def _quarantine_record(source: sources.Source, photo: str, error: images.UnusableImage) -> dict:
    data = sources.read_photo(source.root, photo)
    sha256 = hashlib.sha256(data).hexdigest()
    return dict(
        key=photo, source=source.root, size=len(data), sha256=sha256, reason=error.reason, message=error.message
    )


def _claim(filesystem: pafs.FileSystem, folder: str, out: str, plan: Plan) -> None:
    """Makes `out` ours: refuses another finished data set, clears what another unfinished build left."""
    plan_path = f"{folder}/_build/plan.json"
    if files.exists(filesystem, f"{folder}/{MANIFEST}"):
        found = Manifest.from_json(files.read_bytes(filesystem, f"{folder}/{MANIFEST}").decode())
        if found.plan_hash != plan.hash:
            raise ValueError(f"out is {out!r}; it holds a finished data set of another plan, choose another folder")
    elif files.exists(filesystem, plan_path):
        if json.loads(files.read_bytes(filesystem, plan_path))["plan_hash"] != plan.hash:
            for info in filesystem.get_file_info(pafs.FileSelector(folder)):
                if info.base_name == "_build" or info.base_name.startswith("res="):
                    filesystem.delete_dir(info.path)
    files.remove_temporaries(filesystem, folder)
    shards = [{"split": s.split, "index": s.index, "num_rows": len(s.rows)} for s in plan.shards]
    text = json.dumps({"plan_hash": plan.hash, "shards": shards}, indent=1) + "\n"
    files.put_bytes(filesystem, plan_path, text.encode())


def _run(config: DataConfig, plan: Plan, out: str, num_cpus_per_task: float) -> Iterator[dict]:
    """Sidecars as their shards finish."""
    tasks = [{"shard": json.dumps(asdict(shard))} for shard in plan.shards]
    dataset = ray.data.from_items(tasks, override_num_blocks=len(tasks))
    dataset.context.enable_progress_bars = False  # the caller shows progress
    dataset.context.execution_options.preserve_order = False
    write = functools.partial(_write_shard, config=config, root=plan.source.root, out=out, plan_hash=plan.hash)
    for row in dataset.map(write, num_cpus=num_cpus_per_task).iter_rows():
        yield json.loads(row["sidecar"])


def _write_shard(task: dict, *, config: DataConfig, root: str, out: str, plan_hash: str) -> dict:
    """Runs in a Ray task. Returns the sidecar's text, from disk when the shard is there already."""
    fields = json.loads(task["shard"])
    shard = ShardPlan(**{**fields, "rows": [Row(**row) for row in fields["rows"]]})
    filesystem, folder = files.locate(out)
    sidecar_path = f"{folder}/_build/{shard.split}-{shard.index:05d}-of-{shard.num_shards:05d}.json"
    if files.exists(filesystem, sidecar_path):
        text = files.read_bytes(filesystem, sidecar_path).decode()
        if _is_intact(filesystem, folder, json.loads(text), plan_hash):
            return {"sidecar": text}
    writer = ShardWriter(
        filesystem,
        folder=folder,
        split=shard.split,
        index=shard.index,
        num_shards=shard.num_shards,
        resolutions=config.resolutions,
        bits=config.bits,
        row_group_rows=config.row_group_rows,
    )
    quarantine, conversions, num_rows = [], Counter(), 0
    with writer:
        for names, squares, bad in _chunks(config, sources.Source(root, [], {}, ""), shard.rows):
            writer.append(names, squares)
            quarantine += bad
            num_rows += names.num_rows
            for flags in names.column("flags").to_pylist():
                conversions.update(images.conversions_of(flags))
    sidecar = dict(
        plan_hash=plan_hash,
        split=shard.split,
        index=shard.index,
        num_planned=len(shard.rows),
        num_rows=num_rows,
        conversions=dict(sorted(conversions.items())),
        quarantine=quarantine,
        files=[asdict(written) for written in writer.shards()],
    )
    text = json.dumps(sidecar, indent=1) + "\n"
    files.put_bytes(filesystem, sidecar_path, text.encode())
    return {"sidecar": text}


def _is_intact(filesystem: pafs.FileSystem, folder: str, sidecar: dict, plan_hash: str) -> bool:
    if sidecar["plan_hash"] != plan_hash:
        return False
    paths = [(f"{folder}/{shard['path']}", shard["sha256"]) for shard in sidecar["files"]]
    return all(files.exists(filesystem, path) and files.digest(filesystem, path)[1] == sha for path, sha in paths)


def _chunks(
    config: DataConfig, source: sources.Source, rows: list[Row]
) -> Iterator[tuple[pa.Table, dict[int, np.ndarray], list[dict]]]:
    """Rows in plan order as (columns but px, resolution -> pixels, quarantine records), a bounded number at a time.

    Inside a chunk photos are taken one after another, so that each is decoded once however its tiles are scattered.
    """
    bytes_per_row = sum(resolution**2 * 3 for resolution in config.resolutions)
    rows_per_chunk = max(1, _CHUNK_BYTES // bytes_per_row)
    for begin in range(0, len(rows), rows_per_chunk):
        chunk = rows[begin : begin + rows_per_chunk]
        squares = {r: np.empty((len(chunk), r, r, 3), np.uint8) for r in config.resolutions}
        facts: list[tuple[int, int, int] | None] = [None] * len(chunk)  # orig_h, orig_w, flags
        quarantine = []
        for photo, places in _by_photo(chunk).items():
            try:
                decoded = images.decode(source.read(photo), profile=config.profile)
                height, width = decoded.pixels.shape[:2]
                _refuse_small(min(height, width), config.min_side)
            except images.UnusableImage as error:
                quarantine.append(_quarantine_record(source, photo, error))
                continue
            for place in places:
                square = _square(config, chunk[place], decoded.pixels)
                upscaled = ("upscaled",) if square.shape[0] < max(config.resolutions) else ()
                facts[place] = (height, width, images.flags_of(decoded.conversions + upscaled))
                resized = images.resize_squares(square, config.resolutions, profile=config.profile)
                for resolution, array in squares.items():
                    array[place] = resized[resolution]
        used = [i for i, fact in enumerate(facts) if fact is not None]
        if len(used) < len(chunk):
            squares = {resolution: array[used] for resolution, array in squares.items()}
        columns = [
            [chunk[i].key for i in used],
            [None] * len(used),  # a folder has no labels
            *([facts[i][column] for i in used] for column in range(3)),
        ]
        fields = list(schema(config.image_size))[:-1]
        arrays = [pa.array(values, field.type) for values, field in zip(columns, fields, strict=True)]
        yield pa.Table.from_arrays(arrays, schema=pa.schema(fields)), squares, quarantine


def _by_photo(rows: list[Row]) -> dict[str, list[int]]:
    places: dict[str, list[int]] = {}
    for place, row in enumerate(rows):
        places.setdefault(row.photo, []).append(place)
    return places


def _square(config: DataConfig, row: Row, pixels: np.ndarray) -> np.ndarray:
    if row.top is None or row.left is None:
        return images.center_crop(pixels)
    assert config.tile_size is not None
    return pixels[row.top : row.top + config.tile_size, row.left : row.left + config.tile_size]


def _check_share(config: DataConfig, plan: Plan, bad: dict[str, dict]) -> None:
    """As soon as the share is passed for certain: no need to decode the rest of a large source."""
    num_photos = len(plan.source.photos)
    if len(bad) <= config.max_quarantine_fraction * num_photos:
        return
    reasons = ", ".join(f"{count} {reason}" for reason, count in _reasons(bad).items())
    first = "; ".join(f"{key}: {bad[key]['message']}" for key in sorted(bad)[:3])
    raise TooManyUnusable(
        f"{len(bad)} of {num_photos} photos cannot be used, more than max_quarantine_fraction "
        f"{config.max_quarantine_fraction} allows: {reasons} ({first}); all of them are in {QUARANTINE}"
    )


def _reasons(bad: dict[str, dict]) -> dict[str, int]:
    return dict(sorted(Counter(record["reason"] for record in bad.values()).items()))


def _write_quarantine(filesystem: pafs.FileSystem, folder: str, bad: dict[str, dict]) -> None:
    records = [bad[key] for key in sorted(bad)]
    with files.whole_file(filesystem, f"{folder}/{QUARANTINE}") as stream:
        pq.write_table(pa.Table.from_pylist(records, schema=QUARANTINE_SCHEMA), stream)


def _commit(
    config: DataConfig,
    plan: Plan,
    filesystem: pafs.FileSystem,
    folder: str,
    sidecars: list[dict],
    bad: dict[str, dict],
) -> Manifest:
    assert len(sidecars) == len(plan.shards), f"{len(sidecars)} of {len(plan.shards)} shards came back"
    num_images = dict.fromkeys((s.split for s in plan.shards), 0)
    conversions: Counter = Counter()
    for sidecar in sidecars:
        num_images[sidecar["split"]] += sidecar["num_rows"]
        conversions.update(sidecar["conversions"])
    keys: dict[str, list[str]] = {split: [] for split in num_images}
    for shard in plan.shards:
        keys[shard.split] += [row.key for row in shard.rows if row.photo not in bad]
    for split, count in num_images.items():
        assert count == len(keys[split]), f"{split}: {count} rows written, {len(keys[split])} planned and usable"
        if not count:
            raise TooManyUnusable(f"no photo of the {split} split can be used: {_reasons(bad)}")
    files.remove_temporaries(filesystem, folder)
    shards = [Shard(**fields) for sidecar in sidecars for fields in sidecar["files"]]
    manifest = Manifest(
        dataset=config.dataset,
        plan_hash=plan.hash,
        config=_config_dict(config),
        source=dict(
            built_in=config.root is None,
            listing_hash=plan.source.listing_hash,
            num_photos=len(plan.source.photos),
            skipped=plan.source.skipped,
        ),
        num_images=num_images,
        num_photos={split: len(set(plan.photos[split]) - set(bad)) for split in num_images},
        split_hashes={split: keys_hash(keys[split]) for split in num_images},
        quarantine=_reasons(bad),
        quarantine_sha256=files.digest(filesystem, f"{folder}/{QUARANTINE}")[1],
        conversions=dict(sorted(conversions.items())),
        shards=sorted(shards, key=lambda shard: shard.path),
        versions=plan.versions,
    )
    files.put_bytes(filesystem, f"{folder}/README.md", card.text(manifest).encode())
    files.put_bytes(filesystem, f"{folder}/{MANIFEST}", manifest.to_json().encode())
    return manifest
