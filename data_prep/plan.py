"""What a build will write: photos split, rows permuted by the seed and cut into shards, and a hash of all of it."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import pathlib
from dataclasses import asdict, dataclass

from data_prep import images, sources
from data_prep.config import SPLITS, DataConfig
from data_prep.order import permutation, rank_by_hash

_BYTE_DECIDING_LIBRARIES = ("numpy", "pillow", "pyarrow", "simplejpeg")
_BYTE_DECIDING_CODE = ("images.py", "order.py", "parquet.py", "plan.py", "shard.py")


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
                quarantine.append(quarantine_record(source, photo, error))
        rows.sort(key=lambda row: row.key)
        rows = [rows[i] for i in permutation(len(rows), config.seed, number)]
        num_shards = -(-len(rows) // config.rows_per_shard)
        bounds = [len(rows) * i // num_shards for i in range(num_shards)] + [len(rows)] if num_shards else []
        shards += [
            ShardPlan(split, i, num_shards, rows[begin:end])
            for i, (begin, end) in enumerate(zip(bounds[:-1], bounds[1:], strict=True))
        ]
    versions = {name: importlib.metadata.version(name) for name in _BYTE_DECIDING_LIBRARIES}
    ingredients = [config_dict(config), source.listing_hash, _code_hash(), versions]
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
    refuse_small(min(height, width), max(size, config.min_side))
    # Held-out tiles never overlap, so that no pixel is scored twice.
    stride = config.tile_stride if split == "train" and config.tile_stride else size
    return [Row(photo, top, left) for top, left in images.tile_origins(height, width, size=size, stride=stride)]


def refuse_small(side: int, needed: int) -> None:
    if side < needed:
        raise images.UnusableImage("too_small", f"short side of {side} pixels, at least {needed} needed")


def config_dict(config: DataConfig) -> dict:
    fields = asdict(config)
    del fields["root"]  # a place; what lies there is in the listing hash
    return fields


def _code_hash() -> str:
    sha = hashlib.sha256()
    for name in _BYTE_DECIDING_CODE:
        sha.update((pathlib.Path(__file__).parent / name).read_bytes())
    return sha.hexdigest()


def quarantine_record(source: sources.Source, photo: str, error: images.UnusableImage) -> dict:
    data = sources.read_photo(source.root, photo)
    sha256 = hashlib.sha256(data).hexdigest()
    return dict(
        key=photo, source=source.root, size=len(data), sha256=sha256, reason=error.reason, message=error.message
    )
