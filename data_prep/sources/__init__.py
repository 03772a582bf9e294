"""Where raw images are: finds the items of a source, in a fixed order, and counts the files that it skips.

A layout is a module of this package with the names of data_prep.sources.base.Layout. Layouts are imported when they
are needed, by name.
"""

from __future__ import annotations

import os
import pathlib
from collections import Counter
from dataclasses import replace

from data_prep.config import LAYOUTS, DataConfig
from data_prep.files import printable
from data_prep.sources.base import (
    IMAGE_SUFFIXES,
    Item,
    Listing,
    Reader,
    Source,
    SourceFile,
    Unplannable,
    UnusableSource,
    hash_of,
    is_image_name,
    layout,
    list_files,
    refuse_loss,
    split_word,
)

__all__ = ["BUILT_IN_PHOTOS", "Item", "Reader", "Source", "Unplannable", "UnusableSource"]
__all__ += ["describe", "find", "identify", "root_of"]

BUILT_IN_PHOTOS = pathlib.Path(__file__).parents[1] / "demo_photos"

_PLAIN = ("hf_parquet", "webdataset")  # whatever the data set
_UNPACK, _EXPORT = "unpack them", "write their images as files, or into a WebDataset"
_ADVICE = dict.fromkeys((".zip", ".gz", ".tgz", ".bz2", ".xz", ".rar", ".7z"), _UNPACK)
_ADVICE |= dict.fromkeys((".npy", ".npz", ".mdb", ".lmdb", ".h5", ".hdf5", ".mat", ".arrow", ".tfrecord"), _EXPORT)
_ARCHIVES = (".tar", ".parquet", *_ADVICE)


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
    paths = {file.path for file in used}
    rest = [file.path for file in listing.files if file.path not in paths]
    left = {
        "other_image": [path for path in rest if is_image_name(path)],
        "other_archive": [path for path in rest if path.lower().endswith(_ARCHIVES)],
    }
    num_images = len(found.items) + len(found.rejected) + len(left["other_image"])
    if config.source == "auto":
        choice = f"source={name}" + (" or source=folder" if name != "folder" else "")
        refuse_loss(left["other_image"], num_images, what=f"images are not read by {name}", choice=choice)
    found.skipped += Counter({reason: len(names) for reason, names in left.items()})
    found.skipped["not_a_data_file"] += listing.num_hidden + len(rest) - sum(map(len, left.values()))
    if unread := [*left["other_archive"], *left["other_image"]]:
        why += f"; left out: {unread[0]}" + (f" and {len(unread) - 1} more" if unread[1:] else "")
    items = [item if _is_label(item.label) else replace(item, label=None) for item in found.items]
    found.skipped["label_not_a_number"] += sum(a is not b for a, b in zip(items, found.items, strict=True))
    return Source(
        name=name,
        why=printable(why + found.note),
        root=listing.root,
        items=sorted(items, key=lambda item: item.key),
        rejected=sorted(found.rejected, key=lambda rejected: (rejected.item.key, rejected.item.offset or 0)),
        skipped=dict(sorted((+found.skipped).items())),
        listing_hash=hash_of(listing.root, used, config),
        side=found.side,
        split_like=next(filter(_is_split_like, (file.path for file in listing.files)), None),
    )


def _is_label(label: object) -> bool:
    return label is None or (isinstance(label, int) and not isinstance(label, bool) and abs(label) < 2**31)


def _is_split_like(path: str) -> bool:
    """Whether a folder's name, or that of a list, may mean a split."""
    *folders, name = path.split("/")
    is_list = name.lower().endswith((".txt", ".csv", ".tsv", ".json"))
    return any(map(split_word, [*folders, name] if is_list else folders))


def _recognise(listing: Listing, config: DataConfig) -> tuple[str, list[SourceFile], str]:
    """(layout, files that it explains, what it was recognised by).

    A layout of single images is taken only when it explains all of them. Then that of a data set goes before any tars
    or tables with images, and these before images in a folder.
    """
    name, why = config.source, "named in the configuration"
    if name == "auto":
        images = {file.path for file in listing.files if is_image_name(file.path)}
        whys: dict[str, str] = {}
        explained: dict[str, set[str]] = {}
        for each in LAYOUTS:
            if each != "folder" and (text := layout(each).recognise(listing, config)):
                paths = {file.path for file in layout(each).used(listing, config)}
                if images <= paths or not images & paths:
                    whys[each], explained[each] = text, paths
        candidates = [each for each in whys if each not in _PLAIN] or list(whys)
        whole = [each for each in candidates if explained[each] >= set().union(*(explained[c] for c in candidates))]
        if len(candidates) > 1 and len(whole) != 1:
            texts = "; ".join(f"{each} ({whys[each]})" for each in candidates)
            raise Unplannable(f"root is {listing.root!r}; it may be {texts}: set source to one of them")
        name = next(iter(whole), "folder")
        why = whys.get(name) or layout("folder").recognise(listing, config) or ""
    used = list(layout(name).used(listing, config))
    if not used:
        wanted = f"images ({', '.join(IMAGE_SUFFIXES)})" if name == "folder" else f"files of source {name}"
        text = f": {' '.join(layout(name).LAYOUT.split())}"
        if name == "folder":
            text = " and no archives of a known layout (prepare_data.py --list-sources shows them)"
        raise Unplannable(f"root is {listing.root!r}; the folder has no {wanted}{text}{_what_is_there(listing)}")
    return name, used, why


def _what_is_there(listing: Listing) -> str:
    """For a folder without images: its commonest kinds of files, and what to do with those that may hold images."""
    kinds = Counter(os.path.splitext(file.path)[1].lower() or "without a suffix" for file in listing.files)
    if not kinds:
        return "; it is empty"
    advice = " and ".join(dict.fromkeys(_ADVICE[kind] for kind in kinds if kind in _ADVICE))
    there = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common(3))
    return f"; it has {there}" + (f": {advice}" if advice else "")
