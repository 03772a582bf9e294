"""Who is train, valid and test: the source's own split, drawn by the seed, or from a file.

pytest tests/data_prep/plan/test_splits.py
"""

from __future__ import annotations

import os
import pathlib

import pytest

from data_prep.config import DataConfig
from data_prep.plan import split_items
from data_prep.sources import Item, Unplannable, UnusableSource, identify
from tests.data_prep.made import config


def items(**numbers: int) -> list[Item]:
    """items(train=3) -> three items of the split train; `none` for items without one."""
    return [
        Item(f"{split}/{i}.png", f"{split}/{i}.png", 1, split=None if split == "none" else split)
        for split, number in numbers.items()
        for i in range(number)
    ]


def sizes(config: DataConfig, found: list[Item], root: str = "x") -> dict[str, int]:
    return {split: len(part) for split, part in split_items(config, root, found).items()}


def test_own_test_split_stays_and_valid_is_drawn_from_train():
    rule, found = config(num_valid_photos=3), items(train=10, test=4)
    by_split = split_items(rule, "x", found)
    assert {item.key for item in by_split["test"]} == {f"test/{i}.png" for i in range(4)}
    assert [item.split for item in by_split["valid"]] == ["train"] * 3
    assert {item.key for part in by_split.values() for item in part} == {item.key for item in found}
    again = split_items(config(num_valid_photos=3, seed=1), "x", found)["valid"]
    assert again != by_split["valid"]
    smaller = split_items(rule, "x", [item for item in found if item not in by_split["train"][:1]])
    assert smaller["valid"] == by_split["valid"]  # an image that goes does not reshuffle the others


def test_own_valid_split_stays():
    assert sizes(config(), items(train=5, valid=2, test=1)) == {"train": 5, "valid": 2, "test": 1}
    both = config(num_valid_photos=2, num_test_photos=1)
    assert sizes(both, items(train=5, valid=3)) == {"train": 4, "valid": 3, "test": 1}
    assert sizes(both, items(train=5, test=4)) == {"train": 3, "valid": 2, "test": 4}


def test_by_photo_where_the_source_has_no_split_or_is_told_to():
    rule = config(num_valid_photos=1, num_test_photos=2)
    assert sizes(rule, items(none=9)) == {"train": 6, "valid": 1, "test": 2}
    told = config(num_valid_photos=1, num_test_photos=2, split="by_photo")
    assert sizes(told, items(train=5, test=4)) == {"train": 6, "valid": 1, "test": 2}
    assert sizes(rule, items(train=9)) == {"train": 6, "valid": 1, "test": 2}  # a source of one split


def test_contradictions_are_named():
    with pytest.raises(ValueError, match=r"num_valid_photos \+ num_test_photos is 5; the source has 5 photos"):
        sizes(config(num_valid_photos=5), items(train=5, test=4))
    with pytest.raises(ValueError, match="split is 'glow'; it takes 3000 images for test, the source has 5"):
        sizes(config(split="glow"), items(none=5))


def test_file_names_the_split_of_every_image(tmp_path: pathlib.Path):
    found = [Item(key, key, 1) for key in ("a.png", "b c.png", "d.png")]
    path = tmp_path / "splits.csv"
    path.write_text('\ufeffkey,split\na.png,"train"\n"b c.png",testing\n\nd.png\ttrain\n')
    for name in ("splits.csv", str(path), path.as_uri()):
        rule = config(split="file", split_file=name)
        assert sizes(rule, found, str(tmp_path)) == {"train": 2, "valid": 0, "test": 1}
    rule = config(split="file", split_file="splits.csv", num_valid_photos=1)
    assert sizes(rule, found, str(tmp_path)) == {"train": 1, "valid": 1, "test": 1}
    for text, message in [
        ("a.png,train\n", "names 1 images, the source has 3, 2 of them without a split, such as b c.png"),
        ("a.png,train\nb c.png,test\nd.png,train\ne.png,train\n", "names 4 images, the source has 3"),
        ("a.png,holdout\n", "'a.png,holdout' names none of train, valid, test"),
        ("a.png,train\na.png,test\n", "a.png is in train and in test"),
        ("\xff\xfe1\n2\n", "'2' names none of train, valid, test"),
    ]:
        path.write_text(text, encoding="latin-1")
        with pytest.raises(UnusableSource, match=f"split_mismatch: splits.csv.*{message}"):
            sizes(rule, found, str(tmp_path))
    path.unlink()
    for make in (lambda: None, path.mkdir):
        make()
        with pytest.raises(Unplannable, match="^split is 'file'; there is no file splits.csv"):
            sizes(rule, found, str(tmp_path))


@pytest.mark.parametrize(
    ("rule", "names"),
    [
        ({"split": "file", "split_file": "splits.csv"}, ["splits.csv"]),
        ({"split": "celeba_partition"}, ["list_eval_partition.txt", "image_list.txt"]),
    ],
)
def test_what_decides_the_splits_is_part_of_the_source(tmp_path: pathlib.Path, rule: dict, names: list[str]):
    """An edit in place that keeps the size and the time counts."""
    (tmp_path / "a.png").write_bytes(b"")
    hashes = []
    for edited in (None, *names):
        for name in names:
            (tmp_path / name).write_text("valid" if name == edited else "train")
            os.utime(tmp_path / name, (1, 1))
        hashes.append(identify(config(root=str(tmp_path), source="folder", **rule))[1])
    assert len(set(hashes)) == 1 + len(names)
