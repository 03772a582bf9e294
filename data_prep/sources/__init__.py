"""Where raw images are: finds the items of a source, in a fixed order, and counts the files that it skips.

A layout is a module of this package, see data_prep.sources.base.Layout. Layouts are imported when they are needed.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections import Counter
from dataclasses import replace

from data_prep.config import LAYOUTS, DataConfig
from data_prep.files import printable
from data_prep.images import begins_as_image
from data_prep.sources.base import (
    MAX_LOSS,
    FileEntry,
    Item,
    Listing,
    Reader,
    Source,
    Unplannable,
    UnusableSource,
    hash_of,
    is_image_name,
    layout,
    list_files,
    refuse_loss,
    split_words,
)

__all__ = ["BUILT_IN_PHOTOS", "Item", "Reader", "Source", "Unplannable", "UnusableSource"]
__all__ += ["describe", "find", "identify", "root_of"]

BUILT_IN_PHOTOS = pathlib.Path(__file__).parents[1] / "demo_photos"

_PLAIN = ("hf_parquet", "webdataset")  # whatever the dataset
_ARCHIVES = frozenset(
    ".zip .gz .tgz .bz2 .xz .zst .rar .7z .tar .npy .npz .mdb .lmdb .h5 .hdf5 .mat .arrow .parquet .tfrecord "
    ".tfrecords .pkl .pt .bin .rec".split()
)
_MAX_SUFFIXES = 50  # of which a file is looked into


def describe() -> list[tuple[str, str, str]]:
    """(name, layout, expected number of images) of every source."""
    return [(name, " ".join(layout(name).LAYOUT.split()), layout(name).COUNT) for name in LAYOUTS]


def root_of(config: DataConfig) -> str:
    """Where the raw images are. Raises Unplannable without a root, except for the photos that come with the project."""
    if config.root is None and config.dataset != "demo_photos":
        raise Unplannable(f"root is not set: name the folder with the images of {config.dataset}")
    return str(BUILT_IN_PHOTOS) if config.root is None else config.root


def identify(config: DataConfig) -> tuple[str, str]:
    """(source, hash of the names, sizes and modification times of its files and of what decides the splits).

    The source is the name of the module `data_prep.sources.<source>` that reads it; with the hash it decides what a
    dataset is made from. Archives are not read through, so it is quick. Raises Unplannable and OSError as `find` does.
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
    first_of = {item.key: item for item in reversed(found.items)}
    for item in found.items:
        if item is not (first := first_of[item.key]):
            found.reject(item, "duplicate_name", f"{first.path} has {item.key} too; the first one is used")
    found.items = list(first_of.values())
    paths = {file.path for file in used}
    left = [file.path for file in listing.files if file.path not in paths]
    found.skipped += Counter(map(_kind, left)) + Counter(not_a_data_file=listing.num_hidden)
    if not found.items:
        reasons = Counter(rejected.reason for rejected in found.rejected)
        counts = ", ".join(f"{count} {reason}" for reason, count in reasons.items()) or "its files are empty"
        raise Unplannable(f"root is {listing.root!r}; {name} finds no usable image in it: {counts}")
    if config.source == "auto":
        images = [path for path in left if is_image_name(path)]
        choice = f"source={name}" + (" or source=folder" if name != "folder" else "")
        num_images = len(found.items) + len(found.rejected) + len(images)
        refuse_loss(images, num_images, what=f"images are not read by {name}", choice=choice)
        if len(unnamed := _unnamed_images(listing, left)) > MAX_LOSS * num_images:
            what = f"{len(unnamed)} files such as {unnamed[0]} are images whose names do not say so"
            raise Unplannable(f"root is {listing.root!r}; {what}: rename them to .jpg, or set source={name}")
    if unread := [path for path in left if _kind(path) != "not_a_data_file"]:
        why += f"; left out: {unread[0]}" + (f" and {len(unread) - 1} more" if unread[1:] else "")
    for i, item in enumerate(found.items):
        if item.label is not None and not (type(item.label) is int and abs(item.label) < 2**31):
            found.items[i] = replace(item, label=None)
            found.skipped["label_not_a_number"] += 1
    return Source(
        name=name,
        why=printable(why + found.note),
        root=listing.root,
        items=sorted(found.items, key=lambda item: item.key),
        rejected=sorted(found.rejected, key=lambda rejected: (rejected.item.key, rejected.item.offset or 0)),
        skipped=dict(sorted((+found.skipped).items())),
        listing_hash=hash_of(listing.root, used, config),
        side=found.side,
        split_like=next((file.path for file in listing.files if _is_split_like(file.path)), None),
    )


def _kind(path: str) -> str:
    if is_image_name(path):
        return "other_image"
    return "other_archive" if _suffix(path) in _ARCHIVES else "not_a_data_file"


def _suffix(path: str) -> str:
    return os.path.splitext(path)[1].lower().partition("-")[0]  # x.tfrecord-00000-of-00128


def _unnamed_images(listing: Listing, paths: list[str]) -> list[str]:
    """Files that begin as images do, whatever their names say; the first one of a suffix stands for all of them."""
    by_suffix: dict[str, list[str]] = {}
    for path in paths:
        if _kind(path) == "not_a_data_file":
            by_suffix.setdefault(_suffix(path), []).append(path)
    found: list[str] = []
    for same in list(by_suffix.values())[:_MAX_SUFFIXES]:
        with contextlib.suppress(UnusableSource), listing.open(same[0]) as stream:
            found += same if begins_as_image(stream.read(16)) else []
    return found


def _is_split_like(path: str) -> bool:
    """Whether a folder's name, or that of a list, may mean a split."""
    is_list = path.endswith((".txt", ".lst", ".csv", ".tsv", ".json"))
    return bool(split_words(path if is_list else path.rpartition("/")[0])) or (is_list and "split" in path.lower())


def _recognise(listing: Listing, config: DataConfig) -> tuple[str, list[FileEntry], str]:
    """(layout, files that it explains, what it was recognised by).

    A layout of single images is taken only when it explains all of them. Then that of a dataset goes before any tars
    or tables with images, and these before images in a folder.
    """
    name, why = config.source, "named in the configuration"
    if name == "auto":
        images = {file.path for file in listing.images}
        whys: dict[str, str] = {}
        for each in LAYOUTS:
            if each != "folder" and (text := _why(each, listing, config)):
                explained = images & {file.path for file in layout(each).used(listing, config)}
                if not explained or explained == images:
                    whys[each] = text
        candidates = [each for each in whys if each not in _PLAIN] or list(whys)
        if len(candidates) > 1:
            texts = "; ".join(f"{each} ({whys[each]})" for each in candidates)
            raise Unplannable(f"root is {listing.root!r}; it may be {texts}: set data.source to one of them")
        name = next(iter(candidates), "folder")
        why = whys.get(name) or _why("folder", listing, config) or ""
    used = list(layout(name).used(listing, config))
    if not used:
        wanted = "images" if name == "folder" else f"files of source {name}"
        text = f": {' '.join(layout(name).LAYOUT.split())}"
        if name == "folder":
            text = " and no archives of a known layout (prepare_data.py --list-sources shows them)"
        raise Unplannable(f"root is {listing.root!r}; the folder has no {wanted}{text}{_what_is_there(listing)}")
    return name, used, why


def _why(name: str, listing: Listing, config: DataConfig) -> str | None:
    """Why the folder is taken for the layout, or None."""
    if recognise := getattr(layout(name), "recognise", None):
        return recognise(listing, config)
    first = next(layout(name).used(listing, config), None)
    return None if first is None else f"it has {first.path}"


def _what_is_there(listing: Listing) -> str:
    """For a folder without images: its commonest kinds of files, and what to do with those that may hold images."""
    kinds = Counter(_suffix(file.path) or "without a suffix" for file in listing.files)
    if not kinds:
        return "; it is empty"
    advice = "unpack archives, and write what other files hold as JPEG or PNG files, or as a WebDataset"
    if unnamed := _unnamed_images(listing, [file.path for file in listing.files]):
        advice = f"{unnamed[0]} is an image: rename such files to .jpg"
    return f"; it has {', '.join(f'{count} {kind}' for kind, count in kinds.most_common(3))}: {advice}"
