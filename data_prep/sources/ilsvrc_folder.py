"""`ilsvrc_folder`: ImageNet extracted, one folder for each synset; Kaggle's archive has the same below CLS-LOC.

Keys are paths from `train/` and `val/` on, so that they do not depend on what lies above. Labels are alphabetical
synset numbers. Validation images are the test split; validation comes from train.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from data_prep.config import DataConfig
from data_prep.sources import ilsvrc_labels
from data_prep.sources.ilsvrc_labels import class_numbers
from data_prep.sources.item import Index, Item, Listing, SourceFile, UnusableSource
from data_prep.sources.listing import is_image_name

LAYOUT = f"""train/n01440764/*.JPEG, ... and val/*.JPEG or val/n01440764/*.JPEG, also below ILSVRC/Data/CLS-LOC/;
labels of a flat val, if wanted: {ilsvrc_labels.LISTS}"""
COUNT = "1,281,167 train and 50,000 test (val) images"

_TRAIN = re.compile(r"^(?P<top>|.*/)train/(?P<synset>n\d{8})/(?P<name>[^/]+)$")


def recognise(listing: Listing, config: DataConfig) -> str | None:
    match = _first_train(listing)
    return match and f"it has {match[0]}"


def used(listing: Listing, config: DataConfig) -> Iterator[SourceFile]:
    top = _top(listing)
    return (
        file
        for file in listing.files
        if ilsvrc_labels.is_label_file(file.path)
        or (is_image_name(file.path) and file.path.startswith((f"{top}train/", f"{top}val/")))
    )


def index(listing: Listing, config: DataConfig) -> Index:
    found, top = Index(), _top(listing)
    train, val = [], []
    for file in listing.files:
        name = file.path.removeprefix(top)
        if not is_image_name(name) or not (file.path.startswith(top) and name.startswith(("train/", "val/"))):
            found.num_skipped += not ilsvrc_labels.is_label_file(file.path)
        else:
            (train if name.startswith("train/") else val).append((name, file))
    number = class_numbers({name.split("/")[1] for name, _ in train if name.count("/") == 2})
    flat = [name.split("/")[1] for name, _ in val if name.count("/") == 1]
    labels = ilsvrc_labels.val_labels(listing, flat, train_synsets=set(number)) if flat else {}
    for name, file in train:
        if name.count("/") != 2:
            raise UnusableSource("unexpected_layout", f"{file.path}: train images lie in one folder for each synset")
        found.items.append(Item(name, file.path, file.size, label=number[name.split("/")[1]], split="train"))
    for name, file in val:
        folder, _, base = name.removeprefix("val/").rpartition("/")
        label = number.get(folder) if folder else labels.get(base)
        found.items.append(Item(name, file.path, file.size, label=label, split="test"))
    return found


def _first_train(listing: Listing) -> re.Match | None:
    return next((m for file in listing.files if is_image_name(file.path) and (m := _TRAIN.match(file.path))), None)


def _top(listing: Listing) -> str:
    match = _first_train(listing)
    return match["top"] if match else ""
