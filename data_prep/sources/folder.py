"""`folder`: images at any depth below one folder. A key is a path. No labels; splits by names or lists."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator

from data_prep.config import DataConfig
from data_prep.sources.base import (
    IMAGE_SUFFIXES,
    FileEntry,
    Index,
    Item,
    Listing,
    is_image_name,
    split_words,
    splits_of,
)

LAYOUT = f"images of any size at any depth ({' '.join(IMAGE_SUFFIXES[:7])})"
COUNT = "any"

_TABLES = (".csv", ".tsv")  # lists with a header
_MAX_LIST_BYTES = 1 << 28


def recognise(listing: Listing, config: DataConfig) -> str | None:
    return f"it has images such as {listing.images[0].path}" if listing.images else None


def used(listing: Listing, config: DataConfig) -> Iterator[FileEntry]:
    return iter(listing.images and listing.images + [file for file in listing.others if _list_of(file)])


def index(listing: Listing, config: DataConfig) -> Index:
    found, sizes = Index(), {file.path: file.bytes for file in listing.images}
    lists = {file.path: split for file in listing.others if (split := _list_of(file))}
    listed = functools.partial(_by_lists, listing, list(sizes), lists, found)
    for path, split in splits_of(sizes, config, found, listed=listed).items():
        found.items.append(Item(path, path, sizes[path], split=split))
    found.skipped["not_a_data_file"] += 0 if found.note else len(lists)
    return found


def _list_of(file: FileEntry) -> str | None:
    """The split whose images a list such as meta/train.txt may name."""
    name = file.path.rpartition("/")[2]
    is_list = name.endswith((".txt", ".lst", *_TABLES)) and file.bytes <= _MAX_LIST_BYTES
    return next(iter(words)) if is_list and len(words := split_words(name)) == 1 else None


def _by_lists(listing: Listing, paths: list[str], lists: dict[str, str], found: Index) -> dict[str, str]:
    """{path: split} where the lists name every image and nothing else: by the ends of their paths, with suffix or not,
    each in one split. Else nothing."""
    split_of: dict[str, str] = {}
    for path, split in lists.items():
        lines = listing.read(path).decode("utf-8-sig", "replace").splitlines()[path.endswith(_TABLES) :]
        for line in filter(str.strip, lines):
            field = re.split(r"[,;\t]", line)[0].strip(' "').removeprefix("./")
            name = field if is_image_name(field) else field.partition(" ")[0]
            if split_of.setdefault(name, split) != split:
                return {}
    first, splits = next(iter(split_of), ""), set(split_of.values())
    ends = ("/".join(path.split("/")[-1 - first.count("/") :]) for path in paths)
    names = [end if is_image_name(first) else end.rpartition(".")[0] for end in ends]
    if "train" not in splits or len(splits) == 1 or sorted(names) != sorted(split_of):
        return {}
    found.note += f"; splits by {', '.join(sorted(lists))}"
    return {path: split_of[name] for path, name in zip(paths, names, strict=True)}
