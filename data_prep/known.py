"""Data sets that papers report figures on: their ids, how many images they have, and from which source they come.

A figure in bits/dim compares only with figures on the same pixels. Three sets are called "ImageNet 32" or "64":

    imagenet_oord   van den Oord et al. 2016, PNGs; the one of the Subscale Pixel Networks paper's tables 1 and 3
    imagenet_box    Chrabaszcz et al. 2017, batches; easier to compress by some tenths of a bit
    imagenet_area   made here from the raw photos: central square, TensorFlow's area resize

An id may have more words behind it (`imagenet_area-dogs`): then it is another set, and no count is expected of it.
"""

from __future__ import annotations

import re

from data_prep.config import DataConfig
from data_prep.sources.item import Source, Unplannable, UnusableSource

# images: (train and valid together, test)
COUNTS = {
    "imagenet_area": (1_281_167, 50_000),
    "imagenet_box": (1_281_167, 50_000),
    "imagenet_oord": (1_281_149, 49_999),
    "celebahq": (27_000, 3_000),
    "cifar10": (50_000, 10_000),
}

_OWN_ID = ("imagenet_oord", "imagenet_box")  # these sources make one data set, and nothing else makes it


def max_quarantine_fraction(config: DataConfig) -> float:
    if config.max_quarantine_fraction is not None:
        return config.max_quarantine_fraction
    return 0.0 if config.dataset in COUNTS else 0.001


def check_id(config: DataConfig, source: str) -> None:
    """Raises Unplannable when the data set's id belongs to other pixels than the source has."""
    family = re.split(r"[^a-z0-9_]", config.dataset)[0]
    wrong = family in _OWN_ID and source != family
    if source in _OWN_ID and family != source:
        what = f"source {source} makes {source} (a part of it: {source}-part)"
        raise Unplannable(f"dataset is {config.dataset!r}; {what}")
    if wrong or (family == "imagenet_area" and source in _OWN_ID):
        raise Unplannable(f"dataset is {config.dataset!r}; source {source} holds other pixels, give it another name")


def check_counts(config: DataConfig, source: Source, num_items: dict[str, int]) -> None:
    """`num_items`: by split. Raises UnusableSource when a known data set is not complete."""
    if not config.check_counts or config.dataset not in COUNTS:
        return
    train, test = COUNTS[config.dataset]
    found = (num_items["train"] + num_items["valid"], num_items["test"])
    if config.split in ("by_photo", "celeba_partition", "file"):
        good = sum(found) == train + test
    else:
        good = found == (train, test)
    if not good:
        rejected = f" and {len(source.rejected)} that cannot be used" if source.rejected else ""
        raise UnusableSource(
            "count_mismatch",
            f"{config.dataset} has {train} train and {test} test images; the source ({source.name}) has {found[0]} and "
            f"{found[1]}{rejected}. Name a part of it otherwise, such as dataset={config.dataset}-part",
        )
