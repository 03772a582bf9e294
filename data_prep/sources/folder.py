"""`folder`: images at any depth below one folder. The key of an image is its path. No labels; splits by names."""

from __future__ import annotations

from collections.abc import Iterator

from data_prep.config import DataConfig
from data_prep.sources.base import IMAGE_SUFFIXES, Index, Item, Listing, SourceFile, is_image_name, splits_of

LAYOUT = f"images of any size at any depth ({' '.join(IMAGE_SUFFIXES[:6])})"
COUNT = "any"


def recognise(listing: Listing, config: DataConfig) -> str | None:
    first = next(used(listing, config), None)
    return None if first is None else f"it has images such as {first.path}"


def used(listing: Listing, config: DataConfig) -> Iterator[SourceFile]:
    return (file for file in listing.files if is_image_name(file.path))


def index(listing: Listing, config: DataConfig) -> Index:
    found, sizes = Index(), {file.path: file.size for file in listing.files}
    for path, split in splits_of(sizes, config, found).items():
        found.items.append(Item(path, path, sizes[path], split=split))
    return found
