"""`ilsvrc_folder`: ImageNet extracted, one folder for each synset; Kaggle's archive has the same below CLS-LOC.

Keys are paths from `train/` and `val/` on, so that they do not depend on what lies above. Validation images are the
test split; validation comes from train. Labels are alphabetical synset numbers; those of validation images come from
whichever list lies beside them, and are null without one. The devkit's numbers are in another order and are not read.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

from data_prep.config import DataConfig
from data_prep.sources.base import FileEntry, Index, Item, Listing

SYNSET = re.compile(r"n\d{8}")

_TRAIN = re.compile(r"^(?P<top>|.*/)train/(?P<synset>n\d{8})/(?P<name>[^/]+)$")
_SYNSET_LINES = "imagenet_2012_validation_synset_labels.txt"
_KAGGLE = "LOC_val_solution.csv"
_PAIRS = re.compile(r"^(val|val_map|val_labels)\.(txt|csv)$")

LISTS = f"{_KAGGLE}, {_SYNSET_LINES}, val.txt or val_labels.csv"
LAYOUT = f"""train/n01440764/*.JPEG, ... and val/*.JPEG or val/n01440764/*.JPEG, also below ILSVRC/Data/CLS-LOC/;
labels of a flat val, if wanted: {LISTS}"""
COUNT = "1,281,167 train and 50,000 test (val) images"


def recognise(listing: Listing, config: DataConfig) -> str | None:
    match = _first_train(listing)
    return match and f"it has {match[0]}"


def used(listing: Listing, config: DataConfig) -> Iterator[FileEntry]:
    """Of ImageNet itself, Kaggle's test images too, which have no labels and are in no result."""
    test = "|test/[^/]+" if config.dataset.startswith("imagenet") else ""
    own = re.compile(rf"{re.escape(_top(listing))}(train/n\d{{8}}/[^/]+|val/(n\d{{8}}/)?[^/]+{test})")
    labels = (file for file in listing.others if is_label_file(file.path))
    return itertools.chain(labels, (file for file in listing.images if own.fullmatch(file.path)))


def index(listing: Listing, config: DataConfig) -> Index:
    found, top = Index(), _top(listing)
    by_split: dict[str, list[tuple[str, FileEntry]]] = {"train": [], "val": [], "test": []}
    for file in listing.images:
        split, _, name = file.path.removeprefix(top).partition("/")
        by_split[split].append((name, file))  # its name below train/ or val/
    number = class_numbers({name.split("/")[0] for name, _ in by_split["train"]})
    flat = [name for name, _ in by_split["val"] if "/" not in name]
    labels = val_labels(listing, flat, train_synsets=set(number)) if flat else {}
    for split, own in (("train", "train"), ("val", "test")):
        for name, file in by_split[split]:
            folder, _, base = name.rpartition("/")
            label = number.get(folder) if folder else labels.get(base)
            found.items.append(Item(f"{split}/{name}", file.path, file.bytes, label=label, split=own))
    found.skipped["unlabelled_test"] = len(by_split["test"])
    return found


def _first_train(listing: Listing) -> re.Match | None:
    return next((m for file in listing.images if (m := _TRAIN.match(file.path))), None)


def _top(listing: Listing) -> str:
    match = _first_train(listing)
    return match["top"] if match else ""


# ---- labels of validation images, also of ilsvrc_tar ---------------------------------------------------------------


def is_label_file(path: str) -> bool:
    name = path.rpartition("/")[2]
    # ImageSets/CLS-LOC/val.txt of Kaggle's archive numbers the images; it has no labels.
    pairs = _PAIRS.match(name) and "ImageSets/" not in path
    return bool(name in (_SYNSET_LINES, _KAGGLE) or pairs)


def val_labels(listing: Listing, names: list[str], *, train_synsets: set[str]) -> dict[str, Any]:
    """{file name: label} of the validation images with these names, as far as a list in the listing gives labels.

    The classes are `train_synsets` with the list's; numbers (Caffe's val.txt) are taken as they are.
    """
    paths = {file.path.rpartition("/")[2]: file.path for file in listing.others if is_label_file(file.path)}
    if not paths:
        return {}
    first = next((name for name in (_KAGGLE, _SYNSET_LINES) if name in paths), min(paths))
    lines = listing.read(paths[first]).decode(errors="replace").splitlines()
    fields = [re.split(r"[\s,]+", line.strip()) for line in lines]
    pairs = {line[0].rpartition("/")[2].removesuffix(".JPEG"): line[1] for line in fields if len(line) > 1}
    if first == _SYNSET_LINES and len(lines) == len(names):
        pairs = {name.removesuffix(".JPEG"): line[0] for name, line in zip(sorted(names), fields, strict=True)}
    number = class_numbers(train_synsets | set(filter(SYNSET.fullmatch, pairs.values())))
    found = {name: pairs[stem] for name in names if (stem := name.removesuffix(".JPEG")) in pairs}
    return {name: int(text) if text.isdecimal() else number.get(text, text) for name, text in found.items()}


def class_numbers(synsets: set[str]) -> dict[str, int]:
    return {synset: i for i, synset in enumerate(sorted(synsets))}
