"""One shard of the plan, written at every resolution and depth from one decode of each photo. Runs in a Ray task."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs

from data_prep import files, images, sources
from data_prep.config import DataConfig
from data_prep.parquet import ShardWriter, schema
from data_prep.plan import Row, ShardPlan, quarantine_record, refuse_small

_CHUNK_BYTES = 256_000_000  # of pixels that a task holds at once


def write_shard(task: dict, *, config: DataConfig, root: str, out: str, plan_hash: str) -> dict:
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
                refuse_small(min(height, width), config.min_side)
            except images.UnusableImage as error:
                quarantine.append(quarantine_record(source, photo, error))
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
