"""What a build will write: photos split, rows permuted by the seed and cut into shards, and a hash of all of it.

Every rule is a pure function of the keys, the seed and the source's files. `split` chooses which items are train, valid
and test:

    auto              the source's own splits where it has any (ImageNet: its validation images are `test`)
    by_photo          drawn from all images, whatever the source says
    glow              CelebA-HQ as in Glow, whose 3,000 `test` images are the first of Karras's shuffled records: files
                      are identified by their number in CelebA-HQ (idx), records and rows by their position
    glow_records      the same for files whose numbers are positions in the records
    celeba_partition  CelebA-HQ by CelebA's own partition: needs list_eval_partition.txt and the mapping to CelebA
    file              lines "key split" in split_file, one for each image

num_valid_photos and num_test_photos are drawn from train by the seed where a rule gives no valid or test images.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from data_prep import images
from data_prep.config import SPLITS, DataConfig
from data_prep.parquet import permutation
from data_prep.sources.base import (
    ENCODED,
    Item,
    Reader,
    Source,
    Unplannable,
    UnusableSource,
    split_files,
    split_words,
)

NUM_GLOW_TEST, NUM_CELEBAHQ = 3_000, 30_000
GLOW = ("glow", "glow_records")

_BYTE_DECIDING_LIBRARIES = ("numpy", "pillow", "pyarrow", "simplejpeg")


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
    config: DataConfig  # with `exif` decided
    source: Source
    shards: list[ShardPlan]
    quarantine: list[dict]  # items whose header is unusable already; records of QUARANTINE_SCHEMA
    rejected: list[dict]  # what the source turned away; such records may share a key with an item that is used
    hash: str
    versions: dict[str, str]
    splits: str  # where they come from, for people


def with_exif(config: DataConfig, source: str) -> DataConfig:
    """With `exif` decided: a folder of the user's own photos is turned upright, all else has TensorFlow's pixels."""
    is_own = source == "folder" and _family(config) not in COUNTS
    return replace(config, exif=config.exif or ("apply" if is_own else "ignore"))


def make_plan(config: DataConfig, source: Source) -> Plan:
    config = with_exif(config, source.name)
    check_id(config, source.name)
    if source.side is not None and config.resolutions != [source.side]:
        what = f"source {source.name} has images of {source.side} pixels, which are the dataset"
        raise Unplannable(f"resolutions is {list(config.resolutions)}; {what}: it must be [{source.side}]")
    if config.crop == "tiles" and any(item.layout != ENCODED for item in source.items[:1]):
        raise Unplannable(f"crop is 'tiles'; source {source.name} has small finished images, use center")
    by_split = split_items(config, source.root, source.items)
    check_counts(config, source, {split: len(items) for split, items in by_split.items()})
    shards: list[ShardPlan] = []
    quarantine: list[dict] = []
    with Reader(source.name, source.root) as reader:
        for number, split in enumerate(SPLITS):
            rows: list[Row] = []
            for item in by_split[split]:
                try:
                    rows += _tiles(config, split, item, reader.read(item)) if config.crop == "tiles" else [Row(item)]
                except images.UnusableImage as error:
                    quarantine.append(quarantine_record(reader, item, error.reason, error.message))
            shards += _shards(config, split, number, rows)
        rejected = [quarantine_record(reader, r.item, r.reason, r.message) for r in source.rejected]
    versions = {name: importlib.metadata.version(name) for name in _BYTE_DECIDING_LIBRARIES}
    deciding = {f.name: getattr(config, f.name) for f in fields(config) if f.metadata.get("semantic", True)}
    ingredients = [deciding, source.name, source.listing_hash, versions]
    plan_hash = hashlib.sha256(json.dumps(ingredients, sort_keys=True).encode()).hexdigest()
    return Plan(
        config=config,
        source=source,
        shards=shards,
        quarantine=quarantine,
        rejected=rejected,
        hash=plan_hash,
        versions=versions,
        splits=describe_splits(config, source),
    )


def _shards(config: DataConfig, split: str, number: int, rows: list[Row]) -> list[ShardPlan]:
    """The split's rows in seeded order, cut into shards of about the same size.

    Where items lie in blocks that are read as a whole (row groups of Parquet files), blocks are put in a seeded order
    instead, and then the rows of each shard, so that a shard reads few blocks.
    """
    rows = sorted(rows, key=lambda row: row.key)
    blocks = sorted({(row.item.path, row.item.block) for row in rows if row.item.block is not None})
    if blocks:
        order = permutation(len(blocks), config.seed, number, 1).tolist()
        rank: dict[tuple[str, int | None], int] = dict(zip(blocks, order, strict=True))
        rows.sort(key=lambda row: rank[row.item.path, row.item.block])
    else:
        rows = [rows[i] for i in permutation(len(rows), config.seed, number)]
    num_shards = -(-len(rows) // config.rows_per_shard)
    shards = []
    for i in range(num_shards):
        part = rows[len(rows) * i // num_shards : len(rows) * (i + 1) // num_shards]
        if blocks:
            part = [part[j] for j in permutation(len(part), config.seed, number, 2, i)]
        shards.append(ShardPlan(split, i, num_shards, part))
    return shards


def _tiles(config: DataConfig, split: str, item: Item, data: bytes) -> list[Row]:
    size = config.tile_size
    assert size is not None
    height, width = images.header_size(data, exif=config.exif)
    refuse_small(min(height, width), max(size, config.min_side))
    # Held-out tiles never overlap, so that no pixel is scored twice.
    stride = config.tile_stride if split == "train" and config.tile_stride else size
    return [Row(item, top, left) for top, left in images.tile_origins(height, width, size=size, stride=stride)]


def refuse_small(side: int, needed: int) -> None:
    if side < needed:
        raise images.UnusableImage("too_small", f"short side of {side} pixels, at least {needed} needed")


def quarantine_record(reader: Reader, item: Item, reason: str, message: str) -> dict:
    """A record of QUARANTINE_SCHEMA; bytes that cannot be read count as none."""
    try:
        data = reader.read(item) if item.size or item.block is not None else b""
    except images.UnusableImage:
        data = b""
    return dict(
        key=item.key,
        source=item.path,
        offset=item.offset if item.row is None else item.row,
        size=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        reason=reason,
        message=message,
    )


# ---- splits --------------------------------------------------------------------------------------------------------


def split_items(config: DataConfig, root: str, items: list[Item]) -> dict[str, list[Item]]:
    """Split -> items in the order given, disjoint. Raises Unplannable, UnusableSource."""
    if config.split in ("auto", "by_photo"):
        split_of = {item.key: (config.split == "auto" and item.split) or "train" for item in items}
    elif config.split in GLOW:
        split_of = _glow(config, items)
    elif config.split == "celeba_partition":
        split_of = _celeba_partition(config, root, items)
    else:
        split_of = _from_file(config, root, items)
    split_of = _draw_held_out(config, split_of)
    return {split: [item for item in items if split_of[item.key] == split] for split in SPLITS}


def _draw_held_out(config: DataConfig, split_of: dict[str, str]) -> dict[str, str]:
    """Draws valid and test photos from train where there are none. When photos come or go, only those at the edges of
    the ranking change splits."""
    given = set(split_of.values()) - {"train"}
    train = [key for key, split in split_of.items() if split == "train"]
    num_valid = 0 if "valid" in given else config.num_valid_photos
    num_test = 0 if "test" in given else config.num_test_photos
    if num_valid + num_test >= (len(train) or len(given)):
        raise Unplannable(
            f"num_valid_photos + num_test_photos is {num_valid + num_test}; the source has {len(train)} photos "
            "to draw from and at least one must be left for training"
        )
    ranked = rank_by_hash(train, config.seed, "split")[: num_valid + num_test]
    return split_of | dict.fromkeys(ranked[:num_valid], "valid") | dict.fromkeys(ranked[num_valid:], "test")


def describe_splits(config: DataConfig, source: Source) -> str:
    """Where the splits come from, for people."""
    has = {item.split for item in source.items}
    given = [split for split in ("valid", "test") if split in has]
    if config.split in GLOW:
        kind = "of the records" if _in_record_order(config, source.items) else "in CelebA-HQ (idx)"
        return f"by split={config.split}: " + ("the source's own" if given else f"an image's number is that {kind}")
    if config.split != "auto":
        return f"by split={config.split}" + (", not the source's own" if given else "")
    if not given:
        names = "splits are folders or files named train, and valid or test, or lists of every image; else split=file"
        return "drawn by the seed" + (f", not by {source.split_like} ({names})" if source.split_like else "")
    return f"the source's own {' and '.join(given)}; num_*_photos apply to others only (split=by_photo: to all)"


def rank_by_hash(names: Sequence[str], *entropy: object) -> list[str]:
    """The names in an order that adding or removing one leaves unchanged for the others."""
    start = "\0".join(map(str, entropy)) + "\0"
    return sorted(names, key=lambda name: hashlib.blake2b((start + name).encode(), digest_size=16).digest())


def _number(item: Item) -> int:
    """The number in a file name such as 00123.jpg; TFRecords and Parquet rows are numbered by their order."""
    match = re.search(r"(\d+)\D*$", item.key)
    if match is None:
        raise Unplannable(f"split needs numbered images; {item.key} has no number")
    return int(match[1])


def _in_record_order(config: DataConfig, items: Sequence[Item]) -> bool:
    return config.split == "glow_records" or any(item.layout != ENCODED or item.block is not None for item in items)


def _glow(config: DataConfig, items: list[Item]) -> dict[str, str]:
    own = {item.key: item.split or "train" for item in items}
    if "test" in own.values() or "valid" in own.values():
        return own  # Glow's TFRecords
    if len(items) <= NUM_GLOW_TEST:
        raise Unplannable(
            f"split is {config.split!r}; it takes {NUM_GLOW_TEST} images for test, the source has {len(items)}"
        )
    if _in_record_order(config, items):
        # Rows of Parquet files are in order within a file; files have numbers of their own.
        ranked = sorted(items, key=lambda item: (0 if item.block is not None else _number(item), item.key))
        return {item.key: "test" if i < NUM_GLOW_TEST else "train" for i, item in enumerate(ranked)}
    records = np.arange(NUM_CELEBAHQ)
    np.random.RandomState(123).shuffle(records)  # as dataset_tool.py of Karras et al. does; NumPy keeps it as it is
    test = set(records[:NUM_GLOW_TEST].tolist())
    if (last := max(map(_number, items))) >= NUM_CELEBAHQ:
        what = f"{last} is none of CelebA-HQ's numbers, 0 to {NUM_CELEBAHQ - 1}"
        raise Unplannable(f"split is 'glow'; {what}: split=glow_records takes the first {NUM_GLOW_TEST} by number")
    return {item.key: "test" if _number(item) in test else "train" for item in items}


def _celeba_partition(config: DataConfig, root: str, items: list[Item]) -> dict[str, str]:
    """CelebA-HQ's image idx is CelebA's image orig_file, the first and third column of the mapping; that one's
    partition is 0 train, 1 valid, 2 test."""
    partition_rows, mapping_rows = ([line.split() for line in lines] for lines in _lines(config, root))
    partition = {row[0]: SPLITS[int(row[1])] for row in partition_rows if row[1:2] in (["0"], ["1"], ["2"])}
    original_of = {int(row[0]): row[2] for row in mapping_rows if len(row) > 2 and row[0].isdecimal()}
    split_of = {}
    for item in items:
        name = original_of.get(_number(item))
        if name not in partition:
            raise UnusableSource("split_mismatch", f"{item.key}: the mapping and the partition do not name it")
        split_of[item.key] = partition[name]
    return split_of


def _from_file(config: DataConfig, root: str, items: list[Item]) -> dict[str, str]:
    split_of: dict[str, str] = {}
    (lines,), keys = _lines(config, root), {item.key for item in items}
    for number, line in enumerate(lines):
        match = re.fullmatch(r'\s*"?(.+?)"?[\s,;]+"?(\w+)"?\s*', line)
        key, split = (match[1], "/".join(split_words(match[2]))) if match else (line, "")
        if split not in SPLITS:
            if number == 0 and key not in keys:
                continue  # a header
            raise UnusableSource("split_mismatch", f"{config.split_file}: {line!r} names none of {', '.join(SPLITS)}")
        if split_of.setdefault(key, split) != split:
            raise UnusableSource("split_mismatch", f"{config.split_file}: {key} is in {split_of[key]} and in {split}")
    missing = [item.key for item in items if item.key not in split_of]
    if missing or len(split_of) != len(items):
        first = f", such as {missing[0]}" if missing else ""
        counts = f"{len(split_of)} images, the source has {len(items)}, {len(missing)} of them without a split"
        raise UnusableSource("split_mismatch", f"{config.split_file} names {counts}{first}")
    return split_of


def _lines(config: DataConfig, root: str) -> list[list[str]]:
    """The lines of each file that decides the splits."""
    texts = [data.decode("utf-8-sig", "replace") for data in split_files(config, root)]
    return [[line for line in text.splitlines() if line.strip()] for text in texts]


# ---- known datasets ------------------------------------------------------------------------------------------------

# Data sets that papers report results on: (train and valid images together, test images). A result in bits/dim compares
# only with results on the same pixels, and three sets are called "ImageNet 32" or "64":
#     imagenet_oord   van den Oord et al. 2016, PNGs; the one of the Subscale Pixel Networks paper's tables 1 and 3
#     imagenet_box    Chrabaszcz et al. 2017, batches; easier to compress by some tenths of a bit
#     imagenet_area   made here from the raw photos: central square, TensorFlow's area resize
# An id may have more words behind it (`imagenet_area-dogs`): then it is another set, and no count is expected of it.
COUNTS = {
    "imagenet_area": (1_281_167, 50_000),
    "imagenet_box": (1_281_167, 50_000),
    "imagenet_oord": (1_281_149, 49_999),
    "celebahq": (27_000, 3_000),
    "cifar10": (50_000, 10_000),
}

# What can hold these sets. The first two sources make their own one and nothing else.
_SOURCES = {
    "imagenet_oord": ("imagenet_oord",),
    "imagenet_box": ("imagenet_box",),
    "imagenet_area": ("ilsvrc_folder", "ilsvrc_tar", "hf_parquet", "webdataset"),
    "celebahq": ("celebahq", "hf_parquet", "webdataset"),
    "cifar10": ("cifar10", "folder", "hf_parquet", "webdataset"),  # known by its pixels
}
_OWN_ID = ("imagenet_oord", "imagenet_box")
PIXELS = {"cifar10": (32, 1773520551906879786)}  # side; sum of the 64-bit hashes of all images


def max_quarantine_fraction(config: DataConfig) -> float:
    if config.max_quarantine_fraction is not None:
        return config.max_quarantine_fraction
    return 0.0 if config.dataset in COUNTS else 0.001


def _family(config: DataConfig) -> str:
    return re.split(r"[^a-z0-9_]", config.dataset)[0]


def check_id(config: DataConfig, source: str) -> None:
    """Raises Unplannable when the dataset's id belongs to other pixels than the source has."""
    family = _family(config)
    if source in _OWN_ID and family != source:
        what = f"source {source} makes {source} (a part of it: {source}-part); images of your own: source=folder"
        raise Unplannable(f"dataset is {config.dataset!r}; {what}")
    if (family in _OWN_ID or config.dataset in _SOURCES) and source not in _SOURCES[family]:
        raise Unplannable(
            f"dataset is {config.dataset!r}; source {source} holds other pixels: name it "
            f"otherwise, or set data.source to {' or '.join(_SOURCES[family])}"
        )


def check_counts(config: DataConfig, source: Source, num_items: dict[str, int]) -> None:
    """`num_items`: by split. Raises UnusableSource when a known dataset is not complete."""
    if not config.check_counts or config.dataset not in COUNTS:
        return
    train, test = COUNTS[config.dataset]
    found = (num_items["train"] + num_items["valid"], num_items["test"])
    if config.split in ("by_photo", "celeba_partition", "file"):
        good = sum(found) == train + test
    else:
        good = found == (train, test)
    if not good:
        rejected = f" and {len(source.rejected)} that cannot be used" if source.rejected else ""
        raise UnusableSource(
            "count_mismatch",
            f"{config.dataset} has {train} train and {test} test images; the source ({source.name}) has {found[0]} and "
            f"{found[1]}{rejected}. Name a part of it otherwise, such as dataset={config.dataset}-part",
        )
