"""Which items are train, valid and test. Every rule is a pure function of the keys, the seed and the source's files.

    auto              the source's own split if it has one (ImageNet: its validation images are `test`), else by_photo
    by_photo          num_valid_photos and num_test_photos are drawn by the seed
    glow              CelebA-HQ as in Glow: the first 3,000 images, by number, are `test`
    celeba_partition  CelebA-HQ by CelebA's own partition: needs list_eval_partition.txt and the mapping to CelebA
    file              lines "key split" in split_file, one for each image

Where test images are given and validation images are not, num_valid_photos of train are drawn by the seed.
"""

from __future__ import annotations

import re

from data_prep import files
from data_prep.config import SPLITS, DataConfig
from data_prep.order import rank_by_hash
from data_prep.sources.item import Item, Unplannable, UnusableSource, as_text, readable

NUM_GLOW_TEST = 3_000

_MAPPINGS = ("CelebA-HQ-to-CelebA-mapping.txt", "image_list.txt")
_PARTITION = "list_eval_partition.txt"


def split_items(config: DataConfig, root: str, items: list[Item]) -> dict[str, list[Item]]:
    """Split -> items in the order given, disjoint. Raises Unplannable, UnusableSource."""
    rule = config.split
    if rule == "auto":
        named = sum(item.split is not None for item in items)
        if 0 < named < len(items):
            raise UnusableSource("no_split", f"only {named} of {len(items)} images are in a split; use split=file")
        rule = "own" if named else "by_photo"
    if rule == "by_photo":
        keys = split_photos(config, [item.key for item in items])
        split_of = {key: split for split, found in keys.items() for key in found}
    elif rule == "own":
        split_of = {item.key: item.split for item in items}
    elif rule == "glow":
        split_of = _glow(items)
    elif rule == "celeba_partition":
        split_of = _celeba_partition(root, items)
    else:
        split_of = _from_file(config, root, items)
    if rule != "by_photo":
        split_of = _draw_valid(config, items, split_of)
    return {split: [item for item in items if split_of[item.key] == split] for split in SPLITS}


def split_photos(config: DataConfig, keys: list[str]) -> dict[str, list[str]]:
    """Split -> photo keys, disjoint. When photos come or go, only photos at the edges of the ranking change splits."""
    held_out = config.num_valid_photos + config.num_test_photos
    if held_out >= len(keys):
        raise Unplannable(
            f"num_valid_photos + num_test_photos is {held_out}; the source has {len(keys)} photos "
            "and at least one must be left for training"
        )
    ranked = rank_by_hash(keys, config.seed, "split")
    valid, rest = ranked[: config.num_valid_photos], ranked[config.num_valid_photos :]
    return {"train": rest[config.num_test_photos :], "valid": valid, "test": rest[: config.num_test_photos]}


def _draw_valid(config: DataConfig, items: list[Item], split_of: dict[str, str]) -> dict[str, str]:
    given = set(split_of.values())
    if config.num_test_photos:
        raise Unplannable(
            f"num_test_photos is {config.num_test_photos}; the source is split already: leave it out, or split=by_photo"
        )
    train = [item.key for item in items if split_of[item.key] == "train"]
    if "valid" in given and config.num_valid_photos:
        raise Unplannable(f"num_valid_photos is {config.num_valid_photos}; the source has its own, leave it out")
    if config.num_valid_photos >= max(1, len(train)):
        raise Unplannable(
            f"num_valid_photos is {config.num_valid_photos}; the source has {len(train)} train images "
            "and at least one must be left for training"
        )
    valid = rank_by_hash(train, config.seed, "split")[: config.num_valid_photos]
    return split_of | dict.fromkeys(valid, "valid")


def _number(item: Item) -> int:
    """The number in a file name such as 00123.jpg; TFRecords and Parquet rows are numbered by their order."""
    match = re.search(r"(\d+)\D*$", item.key)
    if match is None:
        raise Unplannable(f"split needs numbered images; {item.key} has no number")
    return int(match[1])


def _glow(items: list[Item]) -> dict[str, str]:
    if len(items) <= NUM_GLOW_TEST:
        raise Unplannable(f"split is 'glow'; it takes {NUM_GLOW_TEST} images for test, the source has {len(items)}")
    # Rows of Parquet files are in order within a file; files have numbers of their own.
    ranked = sorted(items, key=lambda item: (0 if item.block is not None else _number(item), item.key))
    return {item.key: "test" if i < NUM_GLOW_TEST else "train" for i, item in enumerate(ranked)}


def _celeba_partition(root: str, items: list[Item]) -> dict[str, str]:
    """CelebA-HQ's image i is CelebA's image orig_file; that one's partition is 0 train, 1 valid, 2 test."""
    lines = [line.split() for line in _lines(root, (_PARTITION,))]
    partition = {line[0]: SPLITS[int(line[1])] for line in lines if line[1:2] in (["0"], ["1"], ["2"])}
    header, *rows = [line.split() for line in _lines(root, _MAPPINGS)] or [[]]
    try:
        index, original = header.index("idx"), header.index("orig_file")
    except ValueError:
        raise UnusableSource("missing_column", f"{_MAPPINGS[0]} has no columns idx and orig_file") from None
    rows = [row for row in rows if len(row) > max(index, original) and row[index].isdecimal()]
    original_of = {int(row[index]): row[original] for row in rows}  # an image that no good line names is told below
    split_of = {}
    for item in items:
        name = original_of.get(_number(item))
        if name not in partition:
            raise UnusableSource("split_mismatch", f"{item.key}: the mapping and the partition do not name it")
        split_of[item.key] = partition[name]
    return split_of


def _from_file(config: DataConfig, root: str, items: list[Item]) -> dict[str, str]:
    assert config.split_file is not None
    split_of = {}
    for line in _lines(root, (config.split_file,)):
        key, _, split = line.strip().replace(",", " ").rpartition(" ")
        key = key.strip().strip('"')
        if split not in SPLITS:
            raise UnusableSource("split_mismatch", f"{config.split_file}: {line!r} names none of {', '.join(SPLITS)}")
        split_of[key] = split
    missing = [item.key for item in items if item.key not in split_of]
    if missing or len(split_of) != len(items):
        first = f", such as {missing[0]}" if missing else ""
        counts = f"{len(split_of)} images, the source has {len(items)}, {len(missing)} of them without a split"
        raise UnusableSource("split_mismatch", f"{config.split_file} names {counts}{first}")
    return split_of


def _lines(root: str, names: tuple[str, ...]) -> list[str]:
    """Lines of the first of the files that is there: below the root, or anywhere by path or URI."""
    below, folder = files.locate(root)
    for name in names:
        anywhere = "://" in name or name.startswith(("/", "~"))
        filesystem, path = files.locate(name) if anywhere else (below, f"{folder}/{name}")
        if files.exists(filesystem, path):
            with readable(name):
                text = as_text(files.read_bytes(filesystem, path), path=name)
            return [line for line in text.splitlines() if line.strip()]
    raise UnusableSource("missing_file", f"{names[0]} is not below {root}")
