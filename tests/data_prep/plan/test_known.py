"""Ids of published datasets belong to their pixels, and to all of them.  pytest tests/data_prep/plan/test_known.py"""

from __future__ import annotations

import hashlib

import pytest

from data_prep import build, plan
from data_prep.files import open_store
from data_prep.sources import Source, UnusableSource
from tests.data_prep.made import config


@pytest.mark.parametrize(
    ("dataset", "source", "good"),
    [
        ("imagenet_oord", "imagenet_oord", True),
        ("imagenet_oord-part", "imagenet_oord", True),
        ("imagenet_box", "imagenet_box", True),
        ("imagenet_area", "ilsvrc_tar", True),
        ("imagenet_area", "hf_parquet", True),
        ("pictures", "folder", True),
        ("imagenet_area", "imagenet_box", False),
        ("imagenet_box", "imagenet_oord", False),
        ("imagenet_oord", "folder", False),
        ("imagenet_box-part", "ilsvrc_folder", False),
        ("imagenet32", "imagenet_box", False),
        ("cifar10", "hf_parquet", True),
        ("cifar10", "folder", True),
        ("cifar10-like", "folder", True),
        ("celebahq", "folder", False),
    ],
)
def test_each_id_has_its_source(dataset: str, source: str, good: bool):
    if good:
        plan.check_id(config(dataset=dataset), source)
    else:
        with pytest.raises(ValueError, match="dataset is"):
            plan.check_id(config(dataset=dataset), source)


def test_known_sets_are_whole_and_allow_no_quarantine():
    source = Source("cifar10", "", "x", [], [], {}, "")
    whole = {"train": 45_000, "valid": 5_000, "test": 10_000}
    plan.check_counts(config(dataset="cifar10"), source, whole)
    moved = {"train": 50_000, "valid": 0, "test": 10_000}
    plan.check_counts(config(dataset="cifar10"), source, moved)
    short = whole | {"test": 9_999}
    with pytest.raises(UnusableSource, match="count_mismatch: cifar10 has 50000 train and 10000 test images"):
        plan.check_counts(config(dataset="cifar10"), source, short)
    plan.check_counts(config(dataset="cifar10-part"), source, short)
    plan.check_counts(config(dataset="cifar10", check_counts=False), source, short)
    other_split = {"train": 24_183, "valid": 2_993, "test": 2_824}
    plan.check_counts(config(dataset="celebahq", split="celeba_partition"), source, other_split)
    with pytest.raises(UnusableSource, match="count_mismatch"):
        plan.check_counts(config(dataset="celebahq", split="glow"), source, other_split)
    shares = [plan.max_quarantine_fraction(config(dataset=name)) for name in ("cifar10", "cifar10-part", "pictures")]
    assert shares == [0, 0.001, 0.001]
    assert plan.max_quarantine_fraction(config(dataset="cifar10", max_quarantine_fraction=0.5)) == 0.5


def test_a_published_set_has_its_own_pixels(tiny: tuple, monkeypatch: pytest.MonkeyPatch):
    dataset, _, squares = tiny
    total = sum(int.from_bytes(hashlib.blake2b(px.tobytes(), digest_size=8).digest()) for px in squares[8])
    store, shards = open_store(dataset.uri), dataset.manifest.shards
    monkeypatch.setattr(build, "PIXELS", {"cifar10": (8, total % 2**64)})
    build._check_known(config(dataset="cifar10"), store, shards)
    monkeypatch.setattr(build, "PIXELS", {"cifar10": (8, 1)})
    with pytest.raises(UnusableSource, match="other_pixels: these are not the images of cifar10"):
        build._check_known(config(dataset="cifar10"), store, shards)
    for other in (config(dataset="cifar10-part"), config(dataset="cifar10", check_counts=False)):
        build._check_known(other, store, shards)
