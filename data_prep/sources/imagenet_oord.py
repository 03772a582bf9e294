"""`imagenet_oord`: ImageNet as van den Oord et al. (2016) made it smaller, 32 or 64 pixels, PNG, no labels.

The images of the Subscale Pixel Networks paper's tables 1 and 3. Their validation images are the test split here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from data_prep.config import DataConfig
from data_prep.sources.base import FileEntry, Index, Item, Listing, choose_side, is_image_name
from data_prep.sources.tars import add_member, is_side_file, members

LAYOUT = "train_32x32.tar and valid_32x32.tar, or train_64x64.tar and valid_64x64.tar, or folders of these names"
COUNT = "1,281,149 train and 49,999 test (valid) images, without labels"

_NAME = re.compile(r"(?:^|/)(?P<split>train|valid)_(?P<side>\d+)x(?P=side)(?:\.tar$|/)")
_SPLITS = {"train": "train", "valid": "test"}


def used(listing: Listing, config: DataConfig) -> Iterator[FileEntry]:
    tars = (file for file in listing.others if file.path.endswith(".tar"))
    return (file for file in (*tars, *listing.images) if _NAME.search(file.path))


def index(listing: Listing, config: DataConfig) -> Index:
    matches = {file.path: (file, match) for file in listing.files if (match := _NAME.search(file.path))}
    sides = {path: int(match["side"]) for path, (_, match) in matches.items()}
    found = Index(side=choose_side(sides, config, source="imagenet_oord"))
    for path, (file, match) in matches.items():
        if sides[path] != found.side:
            found.skipped["other_size"] += 1
            continue
        if not path.endswith(".tar"):
            found.items.append(Item(_key(match["split"], path), path, file.bytes, split=_SPLITS[match["split"]]))
            continue
        with listing.open(path) as stream:
            for member in members(stream, path=path):
                if member.is_regular and (is_side_file(member.name) or not is_image_name(member.name)):
                    found.skipped["not_a_data_file"] += 1
                    continue
                key = _key(match["split"], member.name)
                item = Item(key, path, member.size, offset=member.offset, split=_SPLITS[match["split"]])
                add_member(found, member, item)
    return found


def _key(split: str, name: str) -> str:
    """The same for a member of the tar, which has the folder in its name or not, and for an extracted file."""
    return f"{split}/{name.rpartition('/')[2]}"
