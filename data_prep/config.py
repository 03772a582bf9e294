"""What to build: source, pixels, splits and layout of one data set. Plain dataclass, no command of its own."""

from __future__ import annotations

from dataclasses import dataclass

SOURCES = ("folder",)
CROPS = ("center", "tiles")
PROFILES = ("tf", "accurate")
SPLITS = ("train", "valid", "test")


@dataclass(frozen=True)
class DataConfig:
    """One Parquet data set. Everything here changes the bytes that are written, except `root` (a place)."""

    dataset: str  # id that every reported figure names, such as demo_photos
    image_size: int  # H = W that the networks model, pixels
    resolutions: list[int]  # every H = W to write, image_size among them
    bits: list[int]  # every depth to write, 8 among them; depth b holds the b most significant bits
    source: str = "folder"
    root: str | None = None  # path or URI of the raw images; None: the photos that come with this package
    crop: str = "center"  # center: the central square; tiles: many squares from each photo
    tile_size: int | None = None  # side of a tile in source pixels; None unless crop is tiles
    tile_stride: int | None = None  # step between train tiles; None: tile_size. Valid and test never overlap
    profile: str = "tf"  # tf: fast integer DCT, truncate to uint8; accurate: accurate DCT, round to nearest
    min_side: int = 1  # photos with a shorter side go to quarantine; below a resolution they are scaled up
    num_valid_photos: int = 0  # splits are by photo: all tiles of a photo are in one split
    num_test_photos: int = 0
    rows_per_shard: int = 10_000
    row_group_rows: int | None = None  # None: as many as make about 16 MB of pixels
    max_quarantine_fraction: float = 0.001  # of the source's photos; above it the build fails
    seed: int = 0  # decides the splits and the row order

    def __post_init__(self) -> None:
        if not self.dataset or any(c.isspace() or c in "/\\" for c in self.dataset):
            raise ValueError(f"dataset is {self.dataset!r}; it must be a name without spaces and slashes")
        _one_of("source", self.source, SOURCES)
        _one_of("crop", self.crop, CROPS)
        _one_of("profile", self.profile, PROFILES)
        _at_least("image_size", self.image_size, 1)
        _distinct("resolutions", self.resolutions, low=1, high=8192, needed=self.image_size)
        _distinct("bits", self.bits, low=1, high=8, needed=8)
        if self.crop == "tiles" and self.tile_size is None:
            raise ValueError("tile_size is None; crop tiles needs it")
        for name in ("tile_size", "tile_stride"):
            value = getattr(self, name)
            if value is not None and self.crop != "tiles":
                raise ValueError(f"{name} is {value}, but crop is {self.crop}; leave it out")
            if value is not None:
                _at_least(name, value, 1)
        _at_least("min_side", self.min_side, 1)
        _at_least("num_valid_photos", self.num_valid_photos, 0)
        _at_least("num_test_photos", self.num_test_photos, 0)
        _at_least("rows_per_shard", self.rows_per_shard, 1)
        if self.row_group_rows is not None:
            _at_least("row_group_rows", self.row_group_rows, 1)
        if not 0 <= self.max_quarantine_fraction <= 1:
            raise ValueError(f"max_quarantine_fraction is {self.max_quarantine_fraction}; it must be within 0 and 1")
        _at_least("seed", self.seed, 0)


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(allowed)}")


def _at_least(name: str, value: int, low: int) -> None:
    if value < low:
        raise ValueError(f"{name} is {value}; it must be at least {low}")


def _distinct(name: str, values: list[int], *, low: int, high: int, needed: int) -> None:
    if len(set(values)) != len(values) or any(not low <= value <= high for value in values):
        raise ValueError(f"{name} is {list(values)}; it must hold different numbers within {low} and {high}")
    if needed not in values:
        raise ValueError(f"{name} is {list(values)}; it must contain {needed}")
