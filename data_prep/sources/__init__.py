"""Where raw images are: finds the items of a source, in a fixed order, and counts the files that it skips.

A layout is a module of this package with the names of data_prep.sources.base.Layout. Layouts are imported when they
are needed, by name.
"""

from __future__ import annotations

import pathlib
from dataclasses import replace

from data_prep.config import LAYOUTS, DataConfig
from data_prep.files import printable
from data_prep.sources.base import (
    IMAGE_SUFFIXES,
    Index,
    Item,
    Listing,
    Reader,
    Source,
    SourceFile,
    Unplannable,
    UnusableSource,
    hash_of,
    layout,
    list_files,
)

__all__ = ["BUILT_IN_PHOTOS", "Item", "Reader", "Source", "Unplannable", "UnusableSource"]
__all__ += ["describe", "find", "identify", "root_of"]

BUILT_IN_PHOTOS = pathlib.Path(__file__).parents[1] / "demo_photos"


def describe() -> list[tuple[str, str, str]]:
    """(name, layout, expected number of images) of every source."""
    return [(name, " ".join(layout(name).LAYOUT.split()), layout(name).COUNT) for name in LAYOUTS]


def root_of(config: DataConfig) -> str:
    return str(BUILT_IN_PHOTOS) if config.root is None else config.root


def identify(config: DataConfig) -> tuple[str, str]:
    """(source, hash of the names, sizes and modification times of its files and of what decides the splits).

    The source is the name of the module `data_prep.sources.<source>` that reads it; with the hash it decides what a
    data set is made from. Archives are not read through, so it is quick. Raises Unplannable and OSError as `find` does.
    """
    listing = list_files(root_of(config))
    name, used, _ = _recognise(listing, config)
    return name, hash_of(listing.root, used, config)


def find(config: DataConfig) -> Source:
    """Finds all items of the source.

    Raises Unplannable when the folder is missing, has no images, or may be one of several sources; UnusableSource when
    a file of the source is damaged or missing; both are ValueErrors of one line. OSError when the storage fails.
    """
    listing = list_files(root_of(config))
    name, used, why = _recognise(listing, config)
    found = layout(name).index(replace(listing, files=tuple(used)), config)
    _check_labels(found)
    skipped = listing.num_hidden + len(listing.files) - len(used) + found.num_skipped
    return Source(
        name=name,
        why=why,
        root=listing.root,
        items=sorted(found.items, key=lambda item: item.key),
        rejected=sorted(found.rejected, key=lambda rejected: (rejected.item.key, rejected.item.offset or 0)),
        skipped={"not_a_data_file": skipped} if skipped else {},
        listing_hash=hash_of(listing.root, used, config),
        side=found.side,
    )


def _check_labels(found: Index) -> None:
    for item in found.items:
        if item.label is not None and not (isinstance(item.label, int) and abs(item.label) < 2**31):
            message = f"{item.path}: the label of {item.key} is {item.label!r}; it must be a whole number of 32 bits"
            raise UnusableSource("bad_label", message)


def _recognise(listing: Listing, config: DataConfig) -> tuple[str, list[SourceFile], str]:
    """(layout, files that it reads, what it was recognised by). `folder` is the layout when no other fits."""
    name, why = config.source, "named in the configuration"
    if name == "auto":
        special = {n: text for n in LAYOUTS if n != "folder" and (text := layout(n).recognise(listing, config))}
        if len(special) > 1:
            candidates = "; ".join(f"{n} ({text})" for n, text in special.items())
            raise Unplannable(f"root is {listing.root!r}; it may be {candidates}: set source to one of them")
        name, why = next(iter(special.items()), ("folder", layout("folder").recognise(listing, config) or ""))
    used = list(layout(name).used(listing, config))
    if not used:
        wanted = f"images ({', '.join(IMAGE_SUFFIXES)})" if name == "folder" else f"files of source {name}"
        text = f": {' '.join(layout(name).LAYOUT.split())}"
        if name == "folder":
            text = " and no archives of a known layout (prepare_data.py --list-sources shows them)"
        raise Unplannable(f"root is {listing.root!r}; the folder has no {wanted}{text}")
    return name, used, printable(why)
