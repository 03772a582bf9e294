"""One shard of the plan, written at every resolution and depth from one decode of each photo. Runs in a Ray task."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs

from data_prep import files, images, sources
from data_prep.config import DataConfig
from data_prep.order import draws
from data_prep.parquet import ShardWriter, schema
from data_prep.plan import Row, ShardPlan, content_of, quarantine_record, refuse_small
from data_prep.sources.item import CHW, ENCODED, Item, UnusableSource

# Pixels that a task holds at once: so few that the disk gets something steadily; more where rows share what is read, so
# that it is read and decoded seldom.
_CHUNK_BYTES = 22_000_000
_SHARED_CHUNK_BYTES = 256_000_000


def write_shard(task: dict, *, config: DataConfig, root: str, out: str, plan_hash: str) -> dict:
    """Runs in a Ray task. Returns {"sidecar": its text}, from disk when the shard is there already.

    Of a source that turns out unusable it returns {"unusable": reason and message as JSON}: of an error Ray Data hands
    on only a text.
    """
    try:
        return {"sidecar": _write_shard(task, config=config, root=root, out=out, plan_hash=plan_hash)}
    except UnusableSource as error:
        return {"unusable": json.dumps([error.reason, error.message])}


def _write_shard(task: dict, *, config: DataConfig, root: str, out: str, plan_hash: str) -> str:
    shard: ShardPlan = pickle.loads(task["shard"])
    filesystem, folder = files.locate(out)
    sidecar_path = f"{folder}/_build/{shard.split}-{shard.index:05d}-of-{shard.num_shards:05d}.json"
    if files.exists(filesystem, sidecar_path):
        text = files.read_bytes(filesystem, sidecar_path).decode()
        if _is_intact(filesystem, folder, json.loads(text), plan_hash):
            return text
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
    quarantine, contents, conversions, num_rows = [], [], Counter(), 0
    with writer, sources.Reader(root) as reader:
        for names, squares in _chunks(config, reader, shard.rows, quarantine, contents):
            writer.append(names, squares)
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
        contents="".join(contents),
        files=[asdict(written) for written in writer.shards()],
    )
    text = json.dumps(sidecar, indent=1) + "\n"
    files.put_bytes(filesystem, sidecar_path, text.encode())
    return text


def _is_intact(filesystem: pafs.FileSystem, folder: str, sidecar: dict, plan_hash: str) -> bool:
    if sidecar["plan_hash"] != plan_hash:
        return False
    paths = [(f"{folder}/{shard['path']}", shard["sha256"]) for shard in sidecar["files"]]
    return all(files.exists(filesystem, path) and files.digest(filesystem, path)[1] == sha for path, sha in paths)


def _chunks(
    config: DataConfig, reader: sources.Reader, rows: list[Row], quarantine: list[dict], contents: list[str]
) -> Iterator[tuple[pa.Table, dict[int, np.ndarray]]]:
    """Rows in plan order as (columns but px, resolution -> pixels), a bounded number at a time, in memory that is used
    again for the next ones.

    Inside a chunk items are taken in the order of their places in the source, each once, however its tiles are
    scattered. What cannot be used is added to `quarantine`, what was read to `contents`.
    """
    bytes_per_row = sum(resolution**2 * 3 for resolution in config.resolutions)
    shared = any(row.top is not None or row.item.block is not None for row in rows)
    rows_per_chunk = min(len(rows), max(1, (_SHARED_CHUNK_BYTES if shared else _CHUNK_BYTES) // bytes_per_row))
    memory = {r: np.empty((rows_per_chunk, r, r, 3), np.uint8) for r in config.resolutions}  # of every chunk in turn
    for begin in range(0, len(rows), rows_per_chunk):
        chunk = rows[begin : begin + rows_per_chunk]
        squares = {resolution: array[: len(chunk)] for resolution, array in memory.items()}
        facts: list[tuple[int, int, int] | None] = [None] * len(chunk)  # orig_h, orig_w, flags
        for places in _by_item(chunk):
            item = chunk[places[0]].item
            try:
                decoded = _decode(config, reader, item, contents)
                height, width = decoded.pixels.shape[:2]
                refuse_small(min(height, width), config.min_side)
                if not config.allow_upscaling:
                    refuse_small(min(height, width, config.tile_size or height), max(config.resolutions))
            except images.UnusableImage as error:
                quarantine.append(quarantine_record(reader, item, error.reason, error.message)[0])
                continue
            for place in places:
                square = _square(config, chunk[place], decoded.pixels)
                upscaled = ("upscaled",) if min(square.shape[:2]) < max(config.resolutions) else ()
                facts[place] = (height, width, images.flags_of(decoded.conversions + upscaled))
                resized = images.resize_squares(square, config.resolutions, profile=config.round_profile)
                for resolution, array in squares.items():
                    array[place] = resized[resolution]
        used = [i for i, fact in enumerate(facts) if fact is not None]
        if len(used) < len(chunk):
            squares = {resolution: array[used] for resolution, array in squares.items()}
        columns = [
            [chunk[i].key for i in used],
            [chunk[i].item.label for i in used],
            *([facts[i][column] for i in used] for column in range(3)),
        ]
        fields = list(schema(config.image_size))[:-1]
        arrays = [pa.array(values, field.type) for values, field in zip(columns, fields, strict=True)]
        yield pa.Table.from_arrays(arrays, schema=pa.schema(fields)), squares


def _by_item(rows: list[Row]) -> list[list[int]]:
    """Places in `rows`, those of one item together, items in the order of the source's bytes."""
    places: dict[str, list[int]] = {}
    for place, row in enumerate(rows):
        places.setdefault(row.item.key, []).append(place)

    def where(group: list[int]) -> tuple:
        item = rows[group[0]].item
        return item.path, item.block or 0, item.row or 0, item.offset or 0

    return sorted(places.values(), key=where)


def _decode(config: DataConfig, reader: sources.Reader, item: Item, contents: list[str]) -> images.Decoded:
    data = reader.read(item)
    contents.append(content_of(item.key, data))
    if item.layout != ENCODED:
        return images.from_raw(data, planar=item.layout == CHW)
    return images.decode(
        data, profile=config.decode_profile, name=item.key, exif=config.exif, strict_jpeg=config.strict_jpeg
    )


def _square(config: DataConfig, row: Row, pixels: np.ndarray) -> np.ndarray:
    """What becomes the training image: a square, or, to be squashed, all of it. A view."""
    if row.top is not None and row.left is not None:
        assert config.tile_size is not None
        return pixels[row.top : row.top + config.tile_size, row.left : row.left + config.tile_size]
    if config.crop == "random":
        height, width = pixels.shape[:2]
        side = min(height, width)
        (place,) = draws(config.seed, [row.key], [0], purpose="crop", high=max(height, width) - side + 1)
        return pixels[place : place + side] if height > width else pixels[:, place : place + side]
    return pixels if config.crop == "squash" else images.center_crop(pixels)
