"""`ilsvrc_tar`: ImageNet as it is downloaded. The train tar holds one tar for each synset, the val tar is flat.

Keys are those of the extracted folders (`train/n01440764/n01440764_10026.JPEG`), so both give the same dataset.
Labels are alphabetical synset numbers. Validation images are the test split; validation comes from train.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from data_prep.config import DataConfig
from data_prep.sources.base import FileEntry, Index, Item, Listing, is_image_name, is_unsafe
from data_prep.sources.ilsvrc_folder import COUNT as COUNT
from data_prep.sources.ilsvrc_folder import LISTS, SYNSET, class_numbers, is_label_file, val_labels
from data_prep.sources.tars import Member, add_member, is_side_file, members

LAYOUT = f"""ILSVRC2012_img_train.tar (a tar of n01440764.tar, ...) and ILSVRC2012_img_val.tar (flat), both or one;
labels of val, if wanted: {LISTS}"""

_ARCHIVE = re.compile(r"^ILSVRC\d{4}_img_(train|val)(?!_t3)\w*\.tar$")  # task 3's photos are in the whole one


def used(listing: Listing, config: DataConfig) -> Iterator[FileEntry]:
    archives = [file for file in listing.others if _split(file.path)]
    return iter(archives and archives + [file for file in listing.others if is_label_file(file.path)])


def index(listing: Listing, config: DataConfig) -> Index:
    """A synset is the folder's or inner tar's name."""
    found = Index()
    entries: list[tuple[str, str, str, Member]] = []  # train or val, file, name below train/ or val/, member
    for file in listing.files:
        if (split := _split(file.path)) is None:
            continue
        with listing.open(file.path) as stream:
            for member in members(stream, path=file.path):
                if is_side_file(member.name):
                    found.skipped["not_a_data_file"] += 1
                elif split == "train" and member.is_regular and member.name.endswith(".tar"):
                    synset = member.name.rpartition("/")[2].removesuffix(".tar")
                    where = f"{file.path}: {member.name}"
                    begin, size = member.offset, member.size
                    for inner in members(stream, path=where, begin=begin, size=size):
                        is_odd = is_unsafe(inner.name) or not inner.is_regular
                        name = inner.name if is_odd else inner.name.rpartition("/")[2]
                        entries.append((split, file.path, f"{synset}/{name}", inner))
                else:
                    name = member.name.removeprefix("./").removeprefix("train/").removeprefix("val/")
                    entries.append((split, file.path, name, member))
    whole = [(split, name) for split, _, name, member in entries if member.is_regular]
    synsets = {name.partition("/")[0] for split, name in whole if split == "train" and SYNSET.match(name)}
    number = class_numbers(synsets)
    names = [name.rpartition("/")[2] for split, name in whole if split == "val" and is_image_name(name)]
    labels = val_labels(listing, names, train_synsets=synsets)
    for split, path, name, member in entries:
        if member.is_regular and not is_image_name(name):
            found.skipped["not_a_data_file"] += 1
            continue
        label = number.get(name.partition("/")[0]) if split == "train" else labels.get(name.rpartition("/")[2])
        own = "train" if split == "train" else "test"
        item = Item(f"{split}/{name}", path, member.size, offset=member.offset, label=label, split=own)
        add_member(found, member, item)
    return found


def _split(path: str) -> str | None:
    match = _ARCHIVE.match(path.rpartition("/")[2])
    return match and match[1]
