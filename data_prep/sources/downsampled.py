"""Small images that others made of ImageNet and that are data sets of their own: taken as they are, never resized."""

from __future__ import annotations

from data_prep.config import DataConfig
from data_prep.sources.item import Unplannable, UnusableSource


def choose_side(found: dict[str, int], config: DataConfig, *, source: str) -> int:
    """`found`: {file: side of its images}. Raises Unplannable when none has image_size, UnusableSource for none."""
    if not found:
        raise UnusableSource("missing_file", f"source {source} finds none of its files")
    if config.image_size not in found.values():
        sides = ", ".join(map(str, sorted(set(found.values()))))
        raise Unplannable(f"image_size is {config.image_size}; the source ({source}) has images of {sides} pixels")
    return config.image_size
