"""What a build will write: photos split, rows permuted by the seed and cut into shards, and a hash of all of it."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import pathlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass

import numpy as np

from data_prep import images, known, sources
from data_prep.config import SPLITS, DataConfig
from data_prep.order import permutation
from data_prep.sources.item import ENCODED, Item, Unplannable
from data_prep.splits import split_items

_BYTE_DECIDING_LIBRARIES = ("numpy", "pillow", "pyarrow", "simplejpeg")
_BYTE_DECIDING_CODE = ("images.py", "order.py", "parquet.py", "plan.py", "resize.py", "shard.py", "splits.py")


@dataclass(frozen=True, slots=True)
class Row:
    """One training image: an item of the source, or the tile of it at (top, left)."""

    item: Item
    top: int | None = None
    left: int | None = None

    @property
    def key(self) -> str:
        return self.item.key if self.top is None else f"{self.item.key}#y{self.top:04d}_x{self.left:04d}"


@dataclass(frozen=True)
class ShardPlan:
    split: str
    index: int
    num_shards: int
    rows: list[Row]


@dataclass(frozen=True)
class Plan:
    source: sources.Source
    photos: dict[str, list[str]]  # split -> item keys
    shards: list[ShardPlan]
    quarantine: list[dict]  # items whose header is unusable already; records of QUARANTINE_SCHEMA
    rejected: list[dict]  # what the source turned away; such records may share a key with an item that is used
    contents: str  # of the rejected, as in a sidecar
    hash: str
    versions: dict[str, str]


def make_plan(config: DataConfig, source: sources.Source) -> Plan:
    known.check_id(config, source.name)
    if source.side is not None and config.resolutions != [source.side]:
        what = f"source {source.name} has images of {source.side} pixels, which are the data set"
        raise Unplannable(f"resolutions is {list(config.resolutions)}; {what}: it must be [{source.side}]")
    if config.crop == "tiles" and any(item.layout != ENCODED for item in source.items[:1]):
        raise Unplannable(f"crop is 'tiles'; source {source.name} has small finished images, use center")
    by_split = split_items(config, source.root, source.items)
    known.check_counts(config, source, {split: len(items) for split, items in by_split.items()})
    shards, quarantine = [], []
    with sources.Reader(source.root) as reader:
        for number, split in enumerate(SPLITS):
            rows = []
            for item in by_split[split]:
                if config.crop != "tiles":
                    rows.append(Row(item))
                    continue
                try:
                    rows += _tiles(config, split, item, reader.read(item))
                except images.UnusableImage as error:
                    quarantine.append(quarantine_record(reader, item, error.reason, error.message)[0])
            shards += _shards(config, split, number, rows)
        rejected = [quarantine_record(reader, r.item, r.reason, r.message) for r in source.rejected]
    versions = {name: importlib.metadata.version(name) for name in _BYTE_DECIDING_LIBRARIES}
    config_parts = config_dict(config)
    del config_parts["max_quarantine_fraction"]  # when to give up: another answer keeps the shards that are done
    ingredients = [config_parts, source.name, source.listing_hash, _code_hash(), versions]
    plan_hash = hashlib.sha256(json.dumps(ingredients, sort_keys=True).encode()).hexdigest()
    return Plan(
        source=source,
        photos={split: [item.key for item in items] for split, items in by_split.items()},
        shards=shards,
        quarantine=quarantine,
        rejected=[record for record, _ in rejected],
        contents="".join(content for _, content in rejected),
        hash=plan_hash,
        versions=versions,
    )


def _shards(config: DataConfig, split: str, number: int, rows: list[Row]) -> list[ShardPlan]:
    """The split's rows in seeded order, cut into shards of about the same size.

    Where items lie in blocks that are read as a whole (row groups of Parquet files), blocks are put in a seeded order
    instead, and then the rows of each shard, so that a shard reads few blocks.
    """
    rows = sorted(rows, key=lambda row: row.key)
    blocks = sorted({(row.item.path, row.item.block) for row in rows if row.item.block is not None})
    if blocks:
        rank = {block: i for i, block in zip(permutation(len(blocks), config.seed, number, 1), blocks, strict=True)}
        rows.sort(key=lambda row: rank[row.item.path, row.item.block])
    else:
        rows = [rows[i] for i in permutation(len(rows), config.seed, number)]
    num_shards = -(-len(rows) // config.rows_per_shard)
    bounds = [len(rows) * i // num_shards for i in range(num_shards)] + [len(rows)] if num_shards else []
    shards = []
    for i, (begin, end) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
        part = rows[begin:end]
        if blocks:
            part = [part[j] for j in permutation(len(part), config.seed, number, 2, i)]
        shards.append(ShardPlan(split, i, num_shards, part))
    return shards


def _tiles(config: DataConfig, split: str, item: Item, data: bytes) -> list[Row]:
    height, width = images.header_size(data, exif=config.exif)
    size = config.tile_size
    assert size is not None
    refuse_small(min(height, width), max(size, config.min_side))
    # Held-out tiles never overlap, so that no pixel is scored twice.
    stride = config.tile_stride if split == "train" and config.tile_stride else size
    return [Row(item, top, left) for top, left in images.tile_origins(height, width, size=size, stride=stride)]


def refuse_small(side: int, needed: int) -> None:
    if side < needed:
        raise images.UnusableImage("too_small", f"short side of {side} pixels, at least {needed} needed")


def config_dict(config: DataConfig) -> dict:
    fields = asdict(config)
    del fields["root"]  # a place; what lies there is in the listing hash
    return fields


def _code_hash() -> str:
    room = pathlib.Path(__file__).parent
    sha = hashlib.sha256()
    for path in [*(room / name for name in _BYTE_DECIDING_CODE), *sorted((room / "sources").glob("*.py"))]:
        sha.update(path.read_bytes())
    return sha.hexdigest()


def quarantine_record(reader: sources.Reader, item: Item, reason: str, message: str) -> tuple[dict, str]:
    """(record of QUARANTINE_SCHEMA, content as in `content_of`); bytes that cannot be had count as none."""
    try:
        data = reader.read(item) if item.size or item.block is not None else b""
    except images.UnusableImage:
        data = b""
    record = dict(
        key=item.key,
        source=item.path,
        offset=item.offset if item.row is None else item.row,
        size=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        reason=reason,
        message=message,
    )
    return record, content_of(f"{item.key}@{item.offset}", data)  # its key may be that of an image that is used


def content_of(key: str, data: bytes) -> str:
    """32 hex digits: a hash of the key, then one of the content; "" for no bytes. Tells equal images apart from one.

    Of the content: size, first, middle and last 4 KiB. Compressed images that agree in these are the same; hashing
    every byte would take some percent of the whole build.
    """
    if not data:
        return ""
    middle = len(data) // 2
    sample = b"%d:" % len(data) + data[:4096] + data[middle : middle + 4096] + data[-4096:]
    return "".join(hashlib.blake2b(part, digest_size=8).hexdigest() for part in (key.encode(), sample))


def num_duplicates(contents: Iterable[str]) -> int:
    """Images whose content another image has too, the first of them not counted. Takes many `content_of`."""
    pairs = np.frombuffer(bytes.fromhex("".join(contents)), np.uint64).reshape(-1, 2)
    images_seen = np.unique(pairs, axis=0)  # tiles of one photo give it once for each shard
    return len(images_seen) - len(np.unique(images_seen[:, 1]))
