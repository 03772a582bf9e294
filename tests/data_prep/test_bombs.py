"""Files that unfold to far more than they are stored in are refused by name.  pytest tests/data_prep/test_bombs.py

Limits are lowered, so that a small bomb shows what a large one would meet.
"""

from __future__ import annotations

import io
import pathlib
import tarfile
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep import sources
from data_prep.images import UnusableImage
from data_prep.sources import UnusableSource, base, celebahq
from tests.data_prep.made import config, image_column


@pytest.fixture(autouse=True)
def low_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "MAX_UNFOLDED_BYTES", 100_000)
    monkeypatch.setattr(base, "MAX_FILE_BYTES", 50_000)
    monkeypatch.setattr(celebahq, "_MAX_RECORD_BYTES", 10_000)


def write_images(path: pathlib.Path, values: list[bytes], **columns: pa.Array) -> None:
    pq.write_table(pa.table({"image": image_column(values), **columns}), path, compression="zstd")


def large_value(path: pathlib.Path) -> None:
    write_images(path / "a.parquet", [bytes(1_000_000), b"x" * 40])


def repeated_value(path: pathlib.Path) -> None:
    """It is stored once, in the dictionary; the rows are its number."""
    write_images(path / "a.parquet", [np.random.default_rng(0).bytes(2_000)] * 500)


def footer_that_lies(path: pathlib.Path) -> None:
    """It says 100 bytes, the page's header a million."""
    large_value(path)
    data = (path / "a.parquet").read_bytes()
    size = pq.read_metadata(path / "a.parquet").row_group(0).column(0).total_uncompressed_size

    def varint(value: int) -> bytes:
        value *= 2
        return bytes([value & 127 | 128, value >> 7 & 127 | 128, value >> 14])

    assert data.count(varint(size)) >= 1
    (path / "a.parquet").write_bytes(data.replace(varint(size), bytes([200, 129, 0])))
    assert pq.read_metadata(path / "a.parquet").row_group(0).column(0).total_uncompressed_size == 100


def rows_of_nothing(path: pathlib.Path) -> None:
    write_images(path / "a.parquet", [b""] * 100_000)


def pixels_of_nothing(path: pathlib.Path) -> None:
    np.savez_compressed(path / "val_data.npz", data=np.zeros((1_000, 192), np.uint8))


def labels_of_nothing(path: pathlib.Path) -> None:
    data = np.random.default_rng(0).integers(0, 256, (2, 192)).astype(np.uint8)
    np.savez_compressed(path / "val_data.npz", data=data, labels=np.zeros(20_000, np.int64))


def large_record(path: pathlib.Path) -> None:
    head = (20_000).to_bytes(8, "little")
    record = head + celebahq.masked_crc32c(head).to_bytes(4, "little") + bytes(20_004)
    (path / "train-r03-s-0000-of-0001.tfrecords").write_bytes(record)


def large_header(path: pathlib.Path) -> None:
    with tarfile.open(path / "a.tar", "w") as archive:
        member = tarfile.TarInfo("a.jpg")
        member.pax_headers = {"comment": "x" * 2_000_000}
        archive.addfile(member, io.BytesIO())


BOMBS = {
    large_value: "decompression_bomb: a.parquet: row group 0: [0-9]+ bytes unfold to at least [0-9]+",
    repeated_value: "decompression_bomb: a.parquet: row group 0: [0-9]+ bytes unfold to at least [0-9]+",
    footer_that_lies: "decompression_bomb: a.parquet: row group 0: [0-9]+ bytes unfold to at least 1000",
    rows_of_nothing: "decompression_bomb: a.parquet: 100000 rows in a file of [0-9]+ bytes",
    pixels_of_nothing: "decompression_bomb: val_data.npz: data.npy: [0-9]+ bytes unfold to at least 192128",
    labels_of_nothing: "decompression_bomb: val_data.npz: labels.npy: [0-9]+ bytes unfold to at least 160128",
    large_record: "decompression_bomb: train-r03-s-0000-of-0001.tfrecords: the record at byte 0 has 20000 bytes",
    large_header: "a.tar: a header of [0-9]+ bytes; 1048576 are allowed",
}
SOURCES = {"a.parquet": "hf_parquet", "val_data.npz": "imagenet_box", "a.tar": "webdataset"}


@pytest.mark.parametrize(("make", "message"), BOMBS.items(), ids=lambda case: getattr(case, "__name__", None))
def test_a_bomb_is_refused_by_name(
    make: Callable, message: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path)
    if make in (large_value, footer_that_lies):  # by its headers
        monkeypatch.setattr(pq.ParquetFile, "iter_batches", lambda *_, **__: pytest.fail("a page unfolds"))
    (file,) = tmp_path.iterdir()
    with pytest.raises(UnusableSource, match=message):
        found = sources.find(config(tmp_path, image_size=8, resolutions=[8], source=SOURCES.get(file.name, "celebahq")))
        with sources.Reader(found.name, found.root) as reader:
            for item in found.items:
                reader.read(item)


@pytest.mark.parametrize("kind", ["file", "row"])
def test_a_file_that_is_too_large_for_an_image_goes_to_quarantine(kind: str, tmp_path: pathlib.Path) -> None:
    data = np.random.default_rng(0).bytes(60_000)
    if kind == "row":
        write_images(tmp_path / "a.parquet", [data])
    else:
        (tmp_path / "a.jpg").write_bytes(data)
    source = "folder" if kind == "file" else "hf_parquet"
    (item,) = sources.find(config(tmp_path, source=source)).items
    with sources.Reader(source, str(tmp_path)) as reader:
        with pytest.raises(UnusableImage, match="too_large: it has 60000 bytes; 50000 are allowed"):
            reader.read(item)
