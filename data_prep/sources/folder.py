"""`folder`: images at any depth below one folder. A key is a path. No labels; splits by names."""

from __future__ import annotations

from collections.abc import Iterator

from data_prep.config import DataConfig
from data_prep.sources.base import IMAGE_SUFFIXES, Index, Item, Listing, SourceFile, splits_of

LAYOUT = f"images of any size at any depth ({' '.join(IMAGE_SUFFIXES[:7])})"
COUNT = "any"


def recognise(listing: Listing, config: DataConfig) -> str | None:
    return f"it has images such as {listing.images[0].path}" if listing.images else None


def used(listing: Listing, config: DataConfig) -> Iterator[SourceFile]:
    return iter(listing.images)


def index(listing: Listing, config: DataConfig) -> Index:
    found, sizes = Index(), {file.path: file.size for file in listing.images}
    for path, split in splits_of(sizes, config, found).items():
        found.items.append(Item(path, path, sizes[path], split=split))
    return found
