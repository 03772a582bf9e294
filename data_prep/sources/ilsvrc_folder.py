"""`ilsvrc_folder`: ImageNet extracted, one folder for each synset; Kaggle's archive has the same below CLS-LOC.

Keys are paths from `train/` and `val/` on, so that they do not depend on what lies above. Validation images are the
test split; validation comes from train. Labels are alphabetical synset numbers; those of validation images come from
whichever list lies beside them, and are null without one. The devkit's numbers are in another order and are not read.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator

from data_prep.config import DataConfig
from data_prep.sources.base import Index, Item, Listing, SourceFile, UnusableSource, is_image_name

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


def used(listing: Listing, config: DataConfig) -> Iterator[SourceFile]:
    """Of ImageNet itself, Kaggle's test images too, which have no labels and are in no result."""
    test = "|test/[^/]+" if config.dataset.startswith("imagenet") else ""
    own = re.compile(rf"{re.escape(_top(listing))}(train/n\d{{8}}/[^/]+|val/(n\d{{8}}/)?[^/]+{test})")
    return (f for f in listing.files if is_label_file(f.path) or (is_image_name(f.path) and own.fullmatch(f.path)))


def index(listing: Listing, config: DataConfig) -> Index:
    found, top = Index(), _top(listing)
    by_split: dict[str, list[tuple[str, SourceFile]]] = {"train": [], "val": [], "test": []}
    for file in listing.files:
        if not is_label_file(file.path):
            split, _, name = file.path.removeprefix(top).partition("/")
            by_split[split].append((name, file))  # its name below train/ or val/
    number = class_numbers({name.split("/")[0] for name, _ in by_split["train"]})
    flat = [name for name, _ in by_split["val"] if "/" not in name]
    labels = val_labels(listing, flat, train_synsets=set(number)) if flat else {}
    for split, own in (("train", "train"), ("val", "test")):
        for name, file in by_split[split]:
            folder, _, base = name.rpartition("/")
            label = number.get(folder) if folder else labels.get(base)
            found.items.append(Item(f"{split}/{name}", file.path, file.size, label=label, split=own))
    found.skipped["unlabelled_test"] = len(by_split["test"])
    return found


def _first_train(listing: Listing) -> re.Match | None:
    return next((m for file in listing.files if is_image_name(file.path) and (m := _TRAIN.match(file.path))), None)


def _top(listing: Listing) -> str:
    match = _first_train(listing)
    return match["top"] if match else ""


# ---- labels of validation images, also of ilsvrc_tar ---------------------------------------------------------------


def is_label_file(path: str) -> bool:
    name = path.rpartition("/")[2]
    # ImageSets/CLS-LOC/val.txt of Kaggle's archive numbers the images; it has no labels.
    pairs = _PAIRS.match(name) and "ImageSets/" not in path
    return bool(name in (_SYNSET_LINES, _KAGGLE) or pairs)


def val_labels(listing: Listing, names: list[str], *, train_synsets: set[str]) -> dict[str, int]:
    """{file name: label}; empty when the listing has no list of labels.

    `names`: file names of the validation images. `train_synsets` with those of the list are the classes. Raises
    UnusableSource: label_count_mismatch; bad_label.
    """
    paths = {file.path.rpartition("/")[2]: file.path for file in listing.files if is_label_file(file.path)}
    if _KAGGLE in paths:
        where = paths[_KAGGLE]
        lines = list(csv.reader(io.StringIO(listing.text(where))))[1:]  # ImageId,Prediction
        pairs = {f"{line[0]}.JPEG": line[1].split()[0] for line in lines if len(line) == 2 and line[1].split()}
        found = _by_name(pairs, names, where)
    elif _SYNSET_LINES in paths:
        where = paths[_SYNSET_LINES]
        found = _by_order(listing.text(where).split(), sorted(names), where)
    elif paths:
        where = paths[min(paths)]
        lines = [re.split(r"[\s,]+", line.strip()) for line in listing.text(where).splitlines()]
        pairs = {line[0].rpartition("/")[2]: line[1] for line in lines if len(line) > 1 and line[0].endswith(".JPEG")}
        found = _by_name(pairs, names, where)
    else:
        return {}
    return _numbers(found, train_synsets, where)


def _by_order(values: list[str], names: list[str], where: str) -> dict[str, str]:
    if len(values) != len(names):
        message = f"{where} has {len(values)} labels; there are {len(names)} validation images"
        raise UnusableSource("label_count_mismatch", message)
    return dict(zip(names, values, strict=True))


def _by_name(pairs: dict[str, str], names: list[str], where: str) -> dict[str, str]:
    missing = [name for name in names if name not in pairs]
    if missing or len(pairs) != len(names):
        first = f"; it has none for {missing[0]}" if missing else ""
        message = f"{where} has {len(pairs)} labels; there are {len(names)} validation images{first}"
        raise UnusableSource("label_count_mismatch", message)
    return {name: pairs[name] for name in names}


def _numbers(found: dict[str, str], train_synsets: set[str], where: str) -> dict[str, int]:
    """Synsets to alphabetical numbers; lists that hold such numbers already (Caffe's val.txt) are taken as they are."""
    if all(value.isdigit() for value in found.values()):
        return {name: int(value) for name, value in found.items()}
    bad = next((value for value in found.values() if not SYNSET.fullmatch(value)), None)
    if bad is not None:
        raise UnusableSource("bad_label", f"{where}: {bad!r} among the labels of the validation images is not a synset")
    number = class_numbers(train_synsets | set(found.values()))
    return {name: number[value] for name, value in found.items()}


def class_numbers(synsets: set[str]) -> dict[str, int]:
    return {synset: i for i, synset in enumerate(sorted(synsets))}
