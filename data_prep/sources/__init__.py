"""Where raw images are: finds the items of a source, in a fixed order, and says what it left out.

Each module named in `_READERS` reads one layout. It has LAYOUT and COUNT (for people), `recognise` (why a folder is
taken for it, or None), `used` (the files that it reads) and `index` (the items in them).
"""

from __future__ import annotations

import pathlib
from types import ModuleType

from data_prep.config import DataConfig
from data_prep.sources import (
    celebahq,
    cifar10,
    folder,
    hf_parquet,
    ilsvrc_folder,
    ilsvrc_tar,
    imagenet_box,
    imagenet_oord,
    webdataset,
)
from data_prep.sources.item import Index, Listing, Source, SourceFile, Unplannable, UnusableSource
from data_prep.sources.listing import IMAGE_SUFFIXES, hash_of, list_files
from data_prep.sources.reading import Reader

__all__ = ["BUILT_IN_PHOTOS", "Reader", "Source", "describe", "find", "identify", "root_of"]

BUILT_IN_PHOTOS = pathlib.Path(__file__).parents[1] / "demo_photos"

_READERS: dict[str, ModuleType] = {
    "ilsvrc_tar": ilsvrc_tar,
    "ilsvrc_folder": ilsvrc_folder,
    "imagenet_oord": imagenet_oord,
    "imagenet_box": imagenet_box,
    "webdataset": webdataset,
    "hf_parquet": hf_parquet,
    "celebahq": celebahq,
    "cifar10": cifar10,
    "folder": folder,
}


def describe() -> list[tuple[str, str, str]]:
    """(name, layout, expected number of images) of every source."""
    return [(name, " ".join(reader.LAYOUT.split()), reader.COUNT) for name, reader in _READERS.items()]


def root_of(config: DataConfig) -> str:
    return str(BUILT_IN_PHOTOS) if config.root is None else config.root


def identify(config: DataConfig) -> tuple[str, str]:
    """Name of the source, and hash of its files' names, sizes and modification times: what a cache of its data set
    must depend on.

    Archives are not read through, so it is quick. Raises Unplannable and OSError as `find` does.
    """
    listing = list_files(root_of(config))
    name, used, _ = _recognise(listing, config)
    return name, hash_of(listing.root, used, by_content=config.root is None)


def find(config: DataConfig) -> Source:
    """Finds all items of the source.

    Raises Unplannable when the folder is missing, has no images, or may be one of several sources; UnusableSource when
    a file of the source is damaged or missing; both are ValueErrors of one line. OSError when the storage is away.
    """
    listing = list_files(root_of(config))
    name, used, why = _recognise(listing, config)
    found = _READERS[name].index(listing, config)
    _check_labels(found)
    skipped = listing.num_hidden + found.num_skipped
    return Source(
        name=name,
        why=why,
        root=listing.root,
        items=sorted(found.items, key=lambda item: item.key),
        rejected=sorted(found.rejected, key=lambda rejected: (rejected.item.key, rejected.item.offset or 0)),
        skipped={"not_a_data_file": skipped} if skipped else {},
        listing_hash=hash_of(listing.root, used, by_content=config.root is None),
        side=found.side,
    )


def _check_labels(found: Index) -> None:
    for item in found.items:
        if item.label is not None and not (isinstance(item.label, int) and abs(item.label) < 2**31):
            message = f"{item.path}: the label of {item.key} is {item.label!r}; it must be a whole number of 32 bits"
            raise UnusableSource("bad_label", message)


def _recognise(listing: Listing, config: DataConfig) -> tuple[str, list[SourceFile], str]:
    """(reader, files that it reads, what it was recognised by). `folder` is what is left when nothing else fits."""
    name, why = config.source, "named in the configuration"
    if name == "auto":
        special = {n: text for n, r in _READERS.items() if n != "folder" and (text := r.recognise(listing, config))}
        if len(special) > 1:
            candidates = "; ".join(f"{n} ({text})" for n, text in special.items())
            raise Unplannable(f"root is {listing.root!r}; it may be {candidates}: set source to one of them")
        name, why = next(iter(special.items()), ("folder", folder.recognise(listing, config) or ""))
    used = list(_READERS[name].used(listing, config))
    if not used:
        wanted = f"images ({', '.join(IMAGE_SUFFIXES)})" if name == "folder" else f"files of source {name}"
        layout = f": {' '.join(_READERS[name].LAYOUT.split())}"
        if name == "folder":
            layout = " and no archives of a known layout (prepare_data.py --list-sources shows them)"
        raise Unplannable(f"root is {listing.root!r}; the folder has no {wanted}{layout}")
    return name, used, why
