"""Sources on an S3 server give what the same files give locally.

pytest tests/data_prep/sources/test_object_store.py
"""

from __future__ import annotations

import dataclasses
import logging
import pathlib
import re
from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep import images, sources
from data_prep.config import DataConfig
from data_prep.files import open_store
from data_prep.sources import Reader
from data_prep.sources.base import UnusableSource
from tests.data_prep.made import image_column, tar_of


@pytest.fixture(scope="module")
def s3() -> Iterator[Callable[[str], str]]:
    """s3(path) -> its URI on a server in this process, which listens on the loopback interface only."""
    server_module = pytest.importorskip("moto.server")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    options = f"scheme=http&endpoint_override={host}:{port}&region=us-east-1&allow_bucket_creation=true"
    yield lambda path: f"s3://key:secret@{path}?{options}"
    server.stop()


def upload(folder: pathlib.Path, uri: str) -> None:
    store = open_store(uri)
    store.filesystem.create_dir(store.base.partition("/")[0])
    for file in folder.rglob("*"):
        if file.is_file():
            store.upload(file, file.relative_to(folder).as_posix())


def write_sources(root: pathlib.Path, jpegs: list[tuple[str, bytes]]) -> dict[str, DataConfig]:
    """One folder for each way of reading: whole files, members of tars, rows of Parquet, raw pixels, packed pixels."""
    base = DataConfig(dataset="pictures", image_size=32, resolutions=[32], bits=[8], num_valid_photos=1)
    (root / "photos").mkdir(parents=True)
    for i, (_, data) in enumerate(jpegs):
        (root / "photos" / f"{i}.jpg").write_bytes(data)
    (root / "tars").mkdir()
    inner = [(f"{synset}.tar", tar_of([(f"{synset}_1.JPEG", data)])) for synset, data in jpegs]
    (root / "tars" / "ILSVRC2012_img_train.tar").write_bytes(tar_of(inner))
    (root / "parquet").mkdir()
    rows = image_column(data for _, data in jpegs)
    pq.write_table(pa.table({"image": rows}), root / "parquet" / "train.parquet", row_group_size=4)
    pixels = np.stack(
        [images.resize_squares(images.decode(data, profile="tf").pixels, [32], profile="tf")[32] for _, data in jpegs]
    )
    planes = pixels.transpose(0, 3, 1, 2).reshape(len(jpegs), -1)
    for name, save in (("stored", np.savez), ("deflated", np.savez_compressed)):
        (root / name).mkdir()
        save(root / name / "train_data_batch_1.npz", data=planes, labels=np.arange(1, 1 + len(jpegs)))
    box = dataclasses.replace(base, dataset="imagenet_box-part")
    return {"photos": base, "tars": base, "parquet": base, "stored": box, "deflated": box}


def test_sources_on_s3_are_those_on_disk(tmp_path: pathlib.Path, jpegs: list, s3: Callable, rendered: Callable):
    configs = write_sources(tmp_path / "raw", jpegs)
    upload(tmp_path / "raw", s3("bucket/raw"))
    for name, config in configs.items():
        local = dataclasses.replace(config, root=str(tmp_path / "raw" / name))
        remote = dataclasses.replace(config, root=s3(f"bucket/raw/{name}"))
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
    config = DataConfig(dataset="x", image_size=8, resolutions=[8], bits=[8], root=str(tmp_path / "tars"))
    last = max(sources.find(config).items, key=lambda item: item.offset)
    path = tmp_path / "tars" / last.path
    path.write_bytes(path.read_bytes()[: last.offset + 10])
    with (
        Reader("ilsvrc_tar", config.root) as reader,
        pytest.raises(UnusableSource, match="it has changed since it was listed"),
    ):
        reader.read(last)


def test_the_endpoint_and_login_may_come_from_the_environment(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, s3: Callable[[str], str]
) -> None:
    """The variables that docs/cluster.md names; boto3, by which MLflow and Ray read S3, has the same ones."""
    (tmp_path / "a.txt").write_bytes(b"here")
    upload(tmp_path, s3("elsewhere/folder"))
    endpoint = re.search(r"endpoint_override=([^&]+)", s3("x"))[1]
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{endpoint}")
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
    config = DataConfig(
        dataset="pictures",
        image_size=8,
        resolutions=[8],
        bits=[8],
        root=s3("other/raw"),
        split="file",
        split_file="splits.csv",
    )
    assert list(rendered(config)["test"]) == ["2.jpg"]
    assert list(rendered(dataclasses.replace(config, split_file=s3("other/raw/splits.csv")))["test"]) == ["2.jpg"]
