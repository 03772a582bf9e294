"""ImageNet as tars, folders and Kaggle's archive gives one dataset; labels come from whichever list is there.

pytest tests/data_prep/sources/test_ilsvrc.py
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import pathlib
import tarfile
from collections.abc import Callable

import numpy as np
import pytest

from data_prep import sources
from data_prep.sources.base import UnusableSource
from tests.data_prep import made
from tests.data_prep.made import tar_of

VAL = [f"ILSVRC2012_val_{i:08d}.JPEG" for i in (1, 2, 3)]


AREA = dict(dataset="imagenet_area-part", resolutions=[16, 8], bits=[3, 8], num_valid_photos=2)
config = functools.partial(made.config, **AREA)


def as_tars(root: pathlib.Path, jpegs: list[tuple[str, bytes]]) -> None:
    root.mkdir()
    inner = [(f"{synset}.tar", tar_of([(f"{synset}_1.JPEG", data)])) for synset, data in jpegs]
    (root / "ILSVRC2012_img_train.tar").write_bytes(tar_of(inner))
    (root / "ILSVRC2012_img_val.tar").write_bytes(tar_of([(VAL[i], jpegs[i][1]) for i in (2, 0, 1)]))


def as_folders(root: pathlib.Path, jpegs: list[tuple[str, bytes]], *, top: str = "") -> None:
    for synset, data in jpegs:
        path = root / top / "train" / synset / f"{synset}_1.JPEG"
        path.parent.mkdir(parents=True)
        path.write_bytes(data)
    (root / top / "val").mkdir()
    for i in range(3):
        (root / top / "val" / VAL[i]).write_bytes(jpegs[i][1])


def kaggle_labels(root: pathlib.Path, synsets: list[str]) -> None:
    with open(root / "LOC_val_solution.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["ImageId", "PredictionString"])
        for name, synset in zip(VAL[::-1], synsets[::-1], strict=True):
            writer.writerow([name.removesuffix(".JPEG"), f"{synset} 1 2 30 40 {synset} 5 6 7 8 "])


def test_tars_folders_and_kaggle_give_the_same_rows(tmp_path: pathlib.Path, jpegs: list, rendered: Callable):
    as_tars(tmp_path / "tars", jpegs)
    as_folders(tmp_path / "folders", jpegs)
    as_folders(tmp_path / "kaggle", jpegs, top="ILSVRC/Data/CLS-LOC")
    synsets = [jpegs[i][0] for i in (5, 0, 3)]
    found = {}
    for name in ("tars", "folders", "kaggle"):
        kaggle_labels(tmp_path / name, synsets)
        found[name] = rendered(config(tmp_path / name))
    source = sources.find(config(tmp_path / "tars"))
    assert (source.name, source.why) == ("ilsvrc_tar", "it has ILSVRC2012_img_train.tar")
    assert sources.find(config(tmp_path / "kaggle")).name == "ilsvrc_folder"
    rows = found["tars"]
    assert {split: len(part) for split, part in rows.items()} == {"train": 4, "valid": 2, "test": 3}
    for i, (synset, data) in enumerate(jpegs):
        label, px = (rows["train"] | rows["valid"])[f"train/{synset}/{synset}_1.JPEG"]
        assert label == i and np.array_equal(px, made.square_of(data))
    assert [rows["test"][f"val/{name}"][0] for name in VAL] == [5, 0, 3]
    for other in ("folders", "kaggle"):
        for split, part in rows.items():
            assert part.keys() == found[other][split].keys()
            assert all(part[k][0] == v[0] and np.array_equal(part[k][1], v[1]) for k, v in found[other][split].items())


def test_other_lists_of_labels(tmp_path: pathlib.Path, jpegs: list):
    synsets = [synset for synset, _ in jpegs]
    for number, (name, text) in enumerate(
        [
            ("imagenet_2012_validation_synset_labels.txt", "\n".join([synsets[2], synsets[1], synsets[0]])),
            ("val.txt", "\n".join(f"{name} {label}" for name, label in zip(VAL, (2, 1, 0), strict=True))),
            ("val_labels.csv", "\n".join(f"{name},{synsets[i]}" for name, i in zip(VAL, (2, 1, 0), strict=True))),
        ]
    ):
        root = tmp_path / str(number)
        as_folders(root, jpegs)
        assert {item.label for item in sources.find(config(root)).items if item.split == "test"} == {None}
        (root / name).write_text(text)
        found = sources.find(config(root))
        assert [item.label for item in found.items if item.split == "test"] == [2, 1, 0], name
        assert found.skipped == {}
        for damaged in (text[: text.rindex("\n")], text.replace(synsets[1], "fish").replace("1", "one"), "\xff", ""):
            (root / name).write_text(damaged, encoding="latin-1")
            found = sources.find(config(root))  # no model uses labels: what is missing or no number is null
            assert {item.label for item in found.items if item.split == "test"} <= {2, 1, 0, None}


def test_val_in_synset_folders_and_numbers_of_images_that_are_no_labels(tmp_path: pathlib.Path, jpegs: list):
    as_folders(tmp_path / "raw", jpegs)
    (tmp_path / "raw" / "val" / jpegs[4][0]).mkdir()
    for name in VAL:
        (tmp_path / "raw" / "val" / name).rename(tmp_path / "raw" / "val" / jpegs[4][0] / name)
    lists = tmp_path / "raw" / "ImageSets" / "CLS-LOC"
    lists.mkdir(parents=True)
    (lists / "val.txt").write_text("".join(f"{name.removesuffix('.JPEG')} {i}\n" for i, name in enumerate(VAL, 1)))
    found = sources.find(config(tmp_path / "raw"))
    assert {item.label for item in found.items if item.split == "test"} == {4}
    assert found.skipped == {"not_a_data_file": 1}


def test_known_data_set_must_be_complete(tmp_path: pathlib.Path, jpegs: list, rendered: Callable):
    as_tars(tmp_path / "raw", jpegs)
    whole = config(tmp_path / "raw", dataset="imagenet_area")
    with pytest.raises(UnusableSource, match=r"imagenet_area has 1281167 train and 50000 test images; .* has 6 and 3"):
        rendered(whole)
    assert rendered(dataclasses.replace(whole, check_counts=False))["test"]
    with pytest.raises(ValueError, match="imagenet_oord.*other pixels"):
        rendered(config(tmp_path / "raw", dataset="imagenet_oord-part"))


def test_compressed_tar_is_named(tmp_path: pathlib.Path, jpegs: list):
    import gzip

    as_tars(tmp_path / "raw", jpegs)
    path = tmp_path / "raw" / "ILSVRC2012_img_val.tar"
    path.write_bytes(gzip.compress(path.read_bytes()))
    with pytest.raises(UnusableSource, match="not_an_archive: ILSVRC2012_img_val.tar: compressed"):
        sources.find(config(tmp_path / "raw"))


def test_a_tar_that_ends_between_two_members_is_cut_off_too(tmp_path: pathlib.Path, jpegs: list):
    as_tars(tmp_path / "raw", jpegs)
    path = tmp_path / "raw" / "ILSVRC2012_img_val.tar"
    with tarfile.open(path) as tar:
        last = tar.getmembers()[-1].offset
    path.write_bytes(path.read_bytes()[:last])
    with pytest.raises(UnusableSource, match="truncated_archive.*no end mark"):
        sources.find(config(tmp_path / "raw"))
