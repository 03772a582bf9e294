"""What lies beside the images (lists of labels and splits, containers) in a bad state: refused in one line that names
the file, and never with whatever error its parser happens to raise.

pytest tests/data_prep/sources/test_damage.py
"""

from __future__ import annotations

import dataclasses
import errno
import io
import pathlib
import zipfile
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep import sources
from data_prep.build import build
from data_prep.config import DataConfig
from data_prep.files import Store
from data_prep.plan import make_plan
from data_prep.sources.base import UnusableSource
from tests.data_prep.made import config, image_column

PARTITION, MAPPING = "list_eval_partition.txt", "CelebA-HQ-to-CelebA-mapping.txt"
MAPPED = "idx orig_idx orig_file\n0 0 000001.jpg\n1 1 000002.jpg\n"
NO_TEXT = b"\xff\xfe1\n2\n"


def photos(root: pathlib.Path, jpegs: list) -> DataConfig:
    for i in (0, 1):
        (root / f"{i}.jpg").write_bytes(jpegs[i][1])
    return config(root, source="folder", split="file", split_file="splits.txt")


def faces(root: pathlib.Path, jpegs: list) -> DataConfig:
    return dataclasses.replace(photos(root, jpegs), source="celebahq", split="celeba_partition", split_file=None)


def nothing(root: pathlib.Path, jpegs: list) -> DataConfig:
    return config(root, dataset="imagenet_box-part")


def arrays(*, compression: int = zipfile.ZIP_DEFLATED, cut: bool = False) -> bytes:
    """A batch of 16x16 images, by a compression method that zipfile does not know, or with damaged compressed bytes."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, data=np.random.default_rng(0).integers(0, 256, (4, 768)).astype(np.uint8))
    data = bytearray(buffer.getvalue())
    if cut:
        data[200:260] = bytes(60)
    if compression != zipfile.ZIP_DEFLATED:
        for mark, at in ((b"PK\x03\x04", 8), (b"PK\x01\x02", 10)):
            data[data.index(mark) + at] = compression
    return bytes(data)


BATCH = "train_data_batch_1.npz"
CASES: dict[str, tuple[Callable, dict[str, bytes], str]] = {
    "split file is not text": (
        photos,
        {"splits.txt": NO_TEXT},
        "splits.txt: '2' names none of train, valid, test",
    ),
    "partition is a page": (faces, {PARTITION: b"<html>\n", MAPPING: MAPPED.encode()}, "0.jpg: the mapping and the"),
    "mapping is cut": (faces, {PARTITION: b"000001.jpg 0\n", MAPPING: MAPPED[:40].encode()}, "1.jpg: the mapping and"),
    "method of compression": (nothing, {BATCH: arrays(compression=99)}, f"{BATCH}: That compression method"),
    "compressed bytes": (nothing, {BATCH: arrays(cut=True)}, f"{BATCH}: "),
}


@pytest.mark.parametrize(("make", "files", "message"), CASES.values(), ids=CASES)
def test_a_bad_file_is_refused_by_its_name(
    make: Callable, files: dict[str, bytes], message: str, tmp_path: pathlib.Path, jpegs: list
) -> None:
    made = make(tmp_path, jpegs)
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    with pytest.raises(UnusableSource) as refusal:
        make_plan(made, sources.find(made))
    assert refusal.value.message.startswith(message) and "\n" not in str(refusal.value)


def table(path: pathlib.Path, jpegs: list, labels: pa.Array) -> None:
    column = image_column(data for _, data in jpegs[: len(labels)])
    pq.write_table(pa.table({"image": column, "label": labels}), path, compression="snappy")


def test_files_that_went_away_or_may_not_be_read_are_named(
    tmp_path: pathlib.Path, jpegs: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = dataclasses.replace(photos(tmp_path, jpegs), split="by_photo", split_file=None)
    found = sources.find(made)
    (tmp_path / "0.jpg").unlink()
    with sources.Reader(made.source, made.root) as reader:
        with pytest.raises(UnusableSource, match="missing_file: 0.jpg was there"):
            reader.read(found.items[0])

        def refused(*_: object) -> bytes:  # permissions do not bind root, who may run this
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(Store, "read_bytes", refused)
        with pytest.raises(UnusableSource, match="unreadable_file: 1.jpg may not be read"):
            reader.read(found.items[1])


def test_storage_that_is_away_for_a_moment_is_nobodys_mistake(
    tmp_path: pathlib.Path, jpegs: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the folder's nor an image's: the same read may work the next time."""
    (tmp_path / "photo.jpg").write_bytes(jpegs[0][1])
    pq.write_table(pa.table({"image": [jpegs[0][1]]}), tmp_path / "part.parquet")
    made = config(tmp_path, source="folder")
    (item,) = sources.find(made).items

    def away(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with sources.Reader(made.source, made.root) as reader, monkeypatch.context() as patch:
        assert reader.read(item) == jpegs[0][1]
        patch.setattr(Store, "read_bytes", away)
        with pytest.raises(OSError, match="Input/output error"):
            reader.read(item)
    for name in ("open", "info"):
        with monkeypatch.context() as patch:
            patch.setattr(Store, name, away)
            with pytest.raises(OSError, match="Input/output error"):
                sources.identify(config(tmp_path))


def damaged_table(root: pathlib.Path, jpegs: list) -> DataConfig:
    """Its index is sound; the pages of images are not."""
    path = root / "part.parquet"
    table(path, jpegs, pa.array([1, 2, 3, 4]))
    data = bytearray(path.read_bytes())
    data[100:300] = bytes(200)
    path.write_bytes(data)
    return config(root)


@pytest.mark.usefixtures("ray_session")
def test_the_build_ends_with_what_a_shard_found(tmp_path: pathlib.Path, jpegs: list) -> None:
    (tmp_path / "raw").mkdir()
    made = damaged_table(tmp_path / "raw", jpegs)
    with pytest.raises(UnusableSource, match="^corrupt_source_file: part.parquet: row group 0: "):
        build(made, out=str(tmp_path / "set"), progress=lambda *_: None)
