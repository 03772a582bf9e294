"""Sources on an S3 server give what the same files give locally.

pytest tests/data_prep/sources/test_object_store.py
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable

import numpy as np
import pytest

from data_prep import sources
from data_prep.config import DataConfig
from data_prep.files import open_store
from data_prep.sources import Reader
from data_prep.sources.base import UnusableSource
from tests.data_prep.made import config, square_of, tar_of, write_parquet


def upload(folder: pathlib.Path, uri: str) -> None:
    store = open_store(uri)
    for file in folder.rglob("*"):
        if file.is_file():
            store.upload(file, file.relative_to(folder).as_posix())


def write_sources(root: pathlib.Path, jpegs: list[tuple[str, bytes]]) -> dict[str, DataConfig]:
    """One folder for each way of reading: whole files, members of tars, rows of Parquet, raw pixels, packed pixels."""
    base = config(image_size=32, resolutions=[32], num_valid_photos=1)
    (root / "photos").mkdir(parents=True)
    for i, (_, data) in enumerate(jpegs):
        (root / "photos" / f"{i}.jpg").write_bytes(data)
    (root / "tars").mkdir()
    inner = [(f"{synset}.tar", tar_of([(f"{synset}_1.JPEG", data)])) for synset, data in jpegs]
    (root / "tars" / "ILSVRC2012_img_train.tar").write_bytes(tar_of(inner))
    write_parquet(root / "parquet" / "train.parquet", (data for _, data in jpegs), row_group_size=4)
    pixels = np.stack([square_of(data, 32) for _, data in jpegs])
    planes = pixels.transpose(0, 3, 1, 2).reshape(len(jpegs), -1)
    for name, save in (("stored", np.savez), ("deflated", np.savez_compressed)):
        (root / name).mkdir()
        save(root / name / "train_data_batch_1.npz", data=planes, labels=np.arange(1, 1 + len(jpegs)))
    box = dataclasses.replace(base, dataset="imagenet_box-part")
    return {"photos": base, "tars": base, "parquet": base, "stored": box, "deflated": box}


def test_sources_on_s3_are_those_on_disk(tmp_path: pathlib.Path, jpegs: list, s3: Callable, rendered: Callable):
    configs = write_sources(tmp_path / "raw", jpegs)
    upload(tmp_path / "raw", s3("bucket/raw"))
    for name, base in configs.items():
        local = dataclasses.replace(base, root=str(tmp_path / "raw" / name))
        remote = dataclasses.replace(base, root=s3(f"bucket/raw/{name}"))
        here, there = sources.find(local), sources.find(remote)
        assert here.items == there.items and here.name == there.name, name
        assert sources.identify(remote)[1] == there.listing_hash
        rows = rendered(local)
        found = rendered(remote)
        assert rows.keys() == found.keys() and len(rows["train"]) == len(jpegs) - 1
        for split, part in rows.items():
            assert part.keys() == found[split].keys(), name
            assert all(np.array_equal(px, found[split][key][1]) for key, (_, px) in part.items()), name


def test_a_file_that_became_shorter_is_an_error(tmp_path: pathlib.Path, jpegs: list):
    write_sources(tmp_path, jpegs)
    last = max(sources.find(config(tmp_path / "tars")).items, key=lambda item: item.offset)
    path = tmp_path / "tars" / last.path
    path.write_bytes(path.read_bytes()[: last.offset + 10])
    with (
        Reader("ilsvrc_tar", str(tmp_path / "tars")) as reader,
        pytest.raises(UnusableSource, match="it has changed since it was listed"),
    ):
        reader.read(last)


def test_the_endpoint_and_login_may_come_from_the_environment(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, s3: Callable[[str], str], s3_endpoint: str
) -> None:
    """The variables that docs/cluster.md names; boto3, by which MLflow and Ray read S3, has the same ones."""
    (tmp_path / "a.txt").write_bytes(b"here")
    upload(tmp_path, s3("elsewhere/folder"))
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{s3_endpoint}")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    assert open_store("s3://elsewhere/folder").read_bytes("a.txt") == b"here"


def test_a_split_file_may_lie_on_s3(tmp_path: pathlib.Path, jpegs: list, s3: Callable, rendered: Callable):
    (tmp_path / "raw").mkdir()
    for i, (_, data) in enumerate(jpegs):
        (tmp_path / "raw" / f"{i}.jpg").write_bytes(data)
    lines = [f"{i}.jpg,{'test' if i == 2 else 'train'}" for i in range(len(jpegs))]
    (tmp_path / "raw" / "splits.csv").write_text("\n".join(lines))
    upload(tmp_path / "raw", s3("other/raw"))
    for split_file in ("splits.csv", s3("other/raw/splits.csv")):
        remote = config(s3("other/raw"), split="file", split_file=split_file)
        assert list(rendered(remote)["test"]) == ["2.jpg"]
