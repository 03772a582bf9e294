"""The data config refuses what makes no sense, naming field and value.  pytest tests/data_prep/plan/test_config.py"""

from __future__ import annotations

import pytest

from data_prep.config import DataConfig

GOOD = dict(dataset="photos", image_size=64, resolutions=[64, 32], bits=[3, 8])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dataset", "my photos"),
        ("source", "tape"),
        ("image_size", 0),
        ("resolutions", [32]),
        ("resolutions", [64, 64]),
        ("bits", [3]),
        ("bits", [8, 9]),
        ("crop", "round"),
        ("tile_size", 32),
        ("profile", "fast"),
        ("split", "magic"),
        ("split", "file"),
        ("split_file", "splits.csv"),
        ("dct", "slow"),
        ("rounding", "up"),
        ("exif", "rotate"),
        ("min_side", 0),
        ("num_test_photos", -1),
        ("rows_per_shard", 0),
        ("row_group_rows", 0),
        ("max_quarantine_fraction", 1.5),
        ("seed", -1),
    ],
)
def test_bad_value_is_named(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field) as error:
        DataConfig(**{**GOOD, field: value})
    assert str(value) in str(error.value) and "\n" not in str(error.value)


def test_tiles_need_a_size() -> None:
    with pytest.raises(ValueError, match="tile_size is None"):
        DataConfig(**GOOD, crop="tiles")
    assert DataConfig(**GOOD, crop="tiles", tile_size=48).tile_stride is None


def test_dct_and_rounding_follow_the_profile_unless_named() -> None:
    def chosen(**changes: object) -> tuple[str, str]:
        config = DataConfig(**GOOD, **changes)
        return config.decode_profile, config.round_profile

    assert chosen() == ("tf", "tf") and chosen(profile="accurate") == ("accurate", "accurate")
    assert chosen(rounding="nearest") == ("tf", "accurate")
    assert chosen(profile="accurate", dct="fast") == ("tf", "accurate")
