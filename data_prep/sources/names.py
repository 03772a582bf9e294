"""What the names of shards say: which split, and whether one of a numbered series is missing."""

from __future__ import annotations

import re
from collections.abc import Iterable

from data_prep.config import DataConfig
from data_prep.sources.item import UnusableSource

UNUSED = "unused"  # a split that the data set does not have

_WORDS = {"train": "train", "training": "train", "val": "valid", "valid": "valid", "validation": "valid"}
_WORDS |= {"test": "test", "testing": "test"}
_OF = re.compile(r"^(?P<series>.*)-(?P<index>\d+)-of-(?P<count>\d+)(?P<rest>[^/]*)$")


def split_of(path: str, config: DataConfig) -> str | None:
    """Split that a shard's path names, the last word counting; None when it names none.

    ImageNet is scored on its validation images; its test images have no labels and no place in any figure: UNUSED.
    """
    words = [_WORDS[word] for word in re.split(r"[^a-z]+", path.lower()) if word in _WORDS]
    if not words:
        return None
    if config.dataset.startswith("imagenet"):
        return {"train": "train", "valid": "test", "test": UNUSED}[words[-1]]
    return words[-1]


def check_series(paths: Iterable[str]) -> None:
    """Names such as train-00003-of-00128.parquet say how many there must be. Raises UnusableSource missing_file."""
    series: dict[tuple[str, str, int], set[int]] = {}
    for path in paths:
        if match := _OF.match(path):
            series.setdefault((match["series"], match["rest"], int(match["count"])), set()).add(int(match["index"]))
    for (name, rest, count), found in series.items():
        expected = set(range(1, count + 1)) if count in found else set(range(count))
        if found != expected:
            missing = sorted(expected - found)
            message = f"{len(missing)} of {count} files {name}-*-of-*{rest} are missing, such as number {missing[0]}"
            raise UnusableSource("missing_file", message)
