"""What to build: source, pixels, splits and layout of one dataset. Plain dataclass, no command of its own."""

from __future__ import annotations

import pkgutil
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

# Layouts of raw images, a module each; read from the folder, so that a new one outdates no finished dataset.
_READERS = [module.name for module in pkgutil.iter_modules([str(Path(__file__).with_name("sources"))])]
LAYOUTS = tuple(sorted(set(_READERS) - {"base", "tars"}))  # these two are what the readers share
SOURCES = ("auto", *LAYOUTS)
CROPS = ("center", "squash", "random", "tiles")
PROFILES = {"tf": ("fast", "truncate"), "accurate": ("accurate", "nearest")}  # DCT, rounding
SPLITS = ("train", "valid", "test")
SPLIT_RULES = ("auto", "by_photo", "glow", "glow_records", "celeba_partition", "file")
NOT_SEMANTIC = {"semantic": False}  # metadata of fields that decide no result: fingerprints leave them out


@dataclass(frozen=True)
class DataConfig:
    """One Parquet dataset. Every field decides its bytes, except those that are NOT_SEMANTIC."""

    dataset: str  # id that every reported figure names, such as demo_photos
    image_size: int  # H = W that the networks model, pixels
    resolutions: list[int]  # every H = W to write, image_size among them
    bits: list[int]  # every depth to write, 8 among them; depth b holds the b most significant bits
    source: str = "auto"  # layout of the raw images; auto: recognised by the names of the files
    # Path or URI of the raw images; None: the photos of this package (dataset demo_photos only).
    root: str | None = field(default=None, metadata=NOT_SEMANTIC)
    split: str = "auto"  # auto: the source's own test split, else by photo; see data_prep/plan.py
    split_file: str | None = None  # of split file: lines "key split"; a path below root, else any path or URI
    image_field: str | None = None  # of several images in a sample: a column, or what follows its name, such as seg.png
    crop: str = "center"  # center: the central square; squash: all of it; random: a seeded square; tiles: many squares
    tile_size: int | None = None  # side of a tile in source pixels; None unless crop is tiles
    tile_stride: int | None = None  # step between train tiles; None: tile_size. Valid and test never overlap
    profile: str = "tf"  # tf: fast integer DCT, truncate to uint8; accurate: accurate DCT, round to nearest
    dct: str | None = None  # fast, accurate; None: as the profile says
    rounding: str | None = None  # truncate, nearest; None: as the profile says
    exif: str | None = None  # ignore the orientation, as TensorFlow does, or apply it; None: see plan.with_exif
    strict_jpeg: bool = False  # JPEGs with damaged pixels go to quarantine; else they are used and flagged
    min_side: int = 1  # photos with a shorter side go to quarantine
    num_valid_photos: int = 0  # drawn by the seed; splits are by photo: all tiles of a photo are in one split
    num_test_photos: int = 0  # 0 where the source has a test split of its own
    rows_per_shard: int = 10_000
    row_group_rows: int | None = None  # None: as many as make about 16 MB of pixels
    # Share of unusable photos above which the build fails; None: 0 if the dataset is known, else 0.001.
    max_quarantine_fraction: float | None = field(default=None, metadata=NOT_SEMANTIC)
    check_counts: bool = True  # known datasets must have exactly as many images as were published
    seed: int = 0  # decides the splits and the row order

    def __post_init__(self) -> None:
        if not self.dataset or any(c.isspace() or c in "/\\" for c in self.dataset):
            raise ValueError(f"dataset is {self.dataset!r}; it must be a name without spaces and slashes")
        one_of("source", self.source, SOURCES)
        one_of("crop", self.crop, CROPS)
        one_of("split", self.split, SPLIT_RULES)
        if (self.split_file is None) == (self.split == "file"):
            raise ValueError(f"split_file is {self.split_file!r}, but split is {self.split}; they go together")
        one_of("profile", self.profile, PROFILES)
        one_of("dct", self.dct, ("fast", "accurate"), optional=True)
        one_of("rounding", self.rounding, ("truncate", "nearest"), optional=True)
        one_of("exif", self.exif, ("ignore", "apply"), optional=True)
        at_least(self, 1, "image_size")
        _distinct("resolutions", self.resolutions, low=1, high=8192, needed=self.image_size)
        _distinct("bits", self.bits, low=1, high=8, needed=8)
        if self.crop == "tiles" and self.tile_size is None:
            raise ValueError("tile_size is None; crop tiles needs it")
        for name in ("tile_size", "tile_stride"):
            value = getattr(self, name)
            if value is not None and self.crop != "tiles":
                raise ValueError(f"{name} is {value}, but crop is {self.crop}; leave it out")
        at_least(self, 1, "tile_size", "tile_stride", "min_side", "rows_per_shard", "row_group_rows")
        at_least(self, 0, "num_valid_photos", "num_test_photos", "seed")
        if self.max_quarantine_fraction is not None and not 0 <= self.max_quarantine_fraction <= 1:
            raise ValueError(f"max_quarantine_fraction is {self.max_quarantine_fraction}; it must be within 0 and 1")

    @property
    def decode_profile(self) -> str:
        """The profile whose DCT decodes the JPEGs."""
        return "tf" if (self.dct or PROFILES[self.profile][0]) == "fast" else "accurate"

    @property
    def round_profile(self) -> str:
        """The profile whose rounding makes the resized values uint8."""
        return "tf" if (self.rounding or PROFILES[self.profile][1]) == "truncate" else "accurate"


def one_of(name: str, value: str | None, allowed: Collection[str], *, optional: bool = False) -> None:
    if value not in allowed and not (optional and value is None):
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(allowed)}")


def at_least(owner: object, low: float, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if value is not None and not value >= low:
            raise ValueError(f"{name} is {value}; it must be at least {low}")


def _distinct(name: str, values: list[int], *, low: int, high: int, needed: int) -> None:
    if len(set(values)) != len(values) or any(not low <= value <= high for value in values):
        raise ValueError(f"{name} is {list(values)}; it must hold different numbers within {low} and {high}")
    if needed not in values:
        of = ", the image_size" if name == "resolutions" else ""
        raise ValueError(f"{name} is {list(values)}; it must contain {needed}{of}")
