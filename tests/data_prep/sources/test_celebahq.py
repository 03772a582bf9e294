"""CelebA-HQ: numbered files and Glow's TFRecords, and the splits that go by its name.

pytest tests/data_prep/sources/test_celebahq.py
"""

from __future__ import annotations

import functools
import pathlib
import struct
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest

from data_prep import plan, sources
from data_prep.sources import celebahq
from data_prep.sources.base import HWC, Unplannable, UnusableSource
from tests.data_prep import made

GLOW = dict(dataset="celebahq-part", image_size=32, resolutions=[32], split="glow")
config = functools.partial(made.config, **GLOW)


@pytest.fixture
def small_glow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "NUM_GLOW_TEST", 2)


@pytest.fixture
def faces(jpegs: list) -> list[tuple[str, bytes]]:
    return [(".jpg", data) for _, data in jpegs]


# ---- numbered files ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", ["data256x256", "CelebA-HQ-img", "."])
def test_numbered_files_are_split_by_number(
    tmp_path: pathlib.Path, faces: list, rendered: Callable, small_glow: None, folder: str
):
    (tmp_path / "raw" / folder).mkdir(parents=True, exist_ok=True)
    for i, (suffix, data) in enumerate(faces):
        (tmp_path / "raw" / folder / f"{i + 8}{suffix}").write_bytes(data)  # 8, 9, 10: not in the order of their names
    source = "celebahq" if folder == "." else "auto"  # a folder of numbers alone may be anything
    found = rendered(config(tmp_path / "raw", num_valid_photos=1, source=source, split="glow_records"))
    assert {split: len(part) for split, part in found.items()} == {"train": 3, "valid": 1, "test": 2}
    assert {key.partition(".")[0] for key in found["test"]} == {"8", "9"}
    for part in found.values():
        for key, (_, px) in part.items():
            assert np.array_equal(px, made.square_of(faces[int(key.partition(".")[0]) - 8][1], 32))


def test_glow_takes_its_three_thousand_by_the_number_in_celebahq_or_in_the_records():
    """The first records are CelebA-HQ's images 25665 and 16464; 294 of Glow's test images have a number below 3,000."""

    def split(rule: str, **more: object) -> tuple[set[int], str]:
        found = [sources.Item(f"{i:05d}.jpg", f"{i:05d}.jpg", 1, **more) for i in range(30_000)]
        settings = config(pathlib.Path("x"), split=rule)
        by_split = plan.split_items(settings, "x", found)
        assert {split: len(part) for split, part in by_split.items()} == {"train": 27_000, "valid": 0, "test": 3_000}
        source = SimpleNamespace(items=found)
        return {int(item.key[:5]) for item in by_split["test"]}, plan.describe_splits(settings, source)

    test, said = split("glow")
    assert {25665, 16464} <= test and len(test & set(range(3_000))) == 294
    assert said == "by split=glow: an image's number is that in CelebA-HQ (idx)"
    for rule, more in (("glow_records", {}), ("glow", {"layout": HWC})):
        assert split(rule, **more) == (set(range(3_000)), f"by split={rule}: an image's number is that of the records")
    from_one = [sources.Item(f"{i}.jpg", f"{i}.jpg", 1) for i in range(1, 30_001)]
    with pytest.raises(ValueError, match="30000 is none of CelebA-HQ's numbers, 0 to 29999: split=glow_records"):
        plan.split_items(config(pathlib.Path("x")), "x", from_one)


def test_the_same_number_twice_is_a_duplicate(tmp_path: pathlib.Path, faces: list):
    for name in ("00001.png", "1.png", "2.png"):
        (tmp_path / name).write_bytes(faces[0][1])
    found = sources.find(config(tmp_path, source="celebahq"))
    assert [item.key for item in found.items] == ["00001.png", "2.png"]
    assert [(r.item.key, r.reason) for r in found.rejected] == [("1.png", "duplicate_name")]


def test_celeba_partition_follows_the_mapping(tmp_path: pathlib.Path, faces: list):
    (tmp_path / "CelebA-HQ-img").mkdir()
    for i in range(4):
        (tmp_path / "CelebA-HQ-img" / f"{i}.jpg").write_bytes(faces[i][1])
    mapping = (
        "idx orig_idx orig_file\n0 119613 119614.jpg\n1 99094 099095.jpg\n2 200121 200122.jpg\n3 81059 081060.jpg\n"
    )
    (tmp_path / "CelebA-HQ-to-CelebA-mapping.txt").write_text(mapping)
    partition = tmp_path / "list_eval_partition.txt"
    whole = "119614.jpg 0\n099095.jpg 2\n200122.jpg 1\n081060.jpg 0\n000001.jpg 0\n"
    partition.write_text(whole)
    rule = config(tmp_path, split="celeba_partition")
    by_split = plan.split_items(rule, str(tmp_path), sources.find(rule).items)
    assert {split: [item.key for item in found] for split, found in by_split.items()} == {
        "train": ["0.jpg", "3.jpg"],
        "valid": ["2.jpg"],
        "test": ["1.jpg"],
    }
    for listed, mapped, name in (
        ("119614.jpg 0\n", mapping, "1.jpg"),
        ("<html>\n", mapping, "0.jpg"),
        (whole, mapping[:50], "1.jpg"),
    ):
        partition.write_text(listed)
        (tmp_path / "CelebA-HQ-to-CelebA-mapping.txt").write_text(mapped)
        with pytest.raises(UnusableSource, match=f"split_mismatch: {name}: the mapping and the"):
            plan.split_items(rule, str(tmp_path), sources.find(rule).items)
    partition.unlink()
    with pytest.raises(Unplannable, match="split is 'celeba_partition'; there is no file list_eval_partition.txt"):
        plan.split_items(rule, str(tmp_path), sources.find(rule).items)


# ---- TFRecords -----------------------------------------------------------------------------------------------------


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def message(number: int, body: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(body)) + body


def example(pixels: np.ndarray, label: int) -> bytes:
    def feature(name: str, kind: int, body: bytes) -> bytes:
        return message(1, message(1, name.encode()) + message(2, message(kind, body)))

    shape = message(1, b"".join(varint(side) for side in pixels.shape))
    unpacked = varint(1 << 3) + varint(label)  # a writer may pack integers or not
    return message(
        1,
        feature("shape", 3, shape) + feature("data", 1, message(1, pixels.tobytes())) + feature("label", 3, unpacked),
    )


def record(body: bytes) -> bytes:
    head = struct.pack("<Q", len(body))
    crcs = [struct.pack("<I", celebahq.masked_crc32c(part)) for part in (head, body)]
    return head + crcs[0] + body + crcs[1]


@pytest.fixture
def glow_records(tmp_path: pathlib.Path) -> tuple[pathlib.Path, np.ndarray]:
    pixels = np.random.default_rng(0).integers(0, 256, (7, 32, 32, 3)).astype(np.uint8)
    for name, part in (
        ("train/train-r05-s-0000-of-0002", (0, 2)),
        ("train/train-r05-s-0001-of-0002", (2, 4)),
        ("validation/validation-r05-s-0000-of-0001", (4, 7)),
    ):
        path = tmp_path / "raw" / f"{name}.tfrecords"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"".join(record(example(pixels[i], i)) for i in range(*part)))
    (tmp_path / "raw" / "train" / "train-r04-s-0000-of-0001.tfrecords").write_bytes(b"")  # another resolution
    return tmp_path / "raw", pixels


def test_records_are_read_without_tensorflow(glow_records: tuple, rendered: Callable):
    root, pixels = glow_records
    found = rendered(config(root, num_valid_photos=1))
    assert {split: len(part) for split, part in found.items()} == {"train": 3, "valid": 1, "test": 3}
    assert set(found["test"]) == {f"test/{i:06d}" for i in range(3)}
    for part in found.values():
        assert all(np.array_equal(px, pixels[label]) for label, px in part.values())


def test_missing_or_damaged_records_are_refused(glow_records: tuple):
    root, _ = glow_records
    path = root / "train" / "train-r05-s-0001-of-0002.tfrecords"
    good = path.read_bytes()
    for bad in (good[:-1], good[:5000] + b"\0\0" + good[5002:], b"\xff" + good[1:]):
        path.write_bytes(bad)
        with pytest.raises(UnusableSource, match="corrupt_source_file: train/train-r05-s-0001"):
            sources.find(config(root))
    path.unlink()
    with pytest.raises(UnusableSource, match="missing_file: 1 of 2 files"):
        sources.find(config(root))


def test_checksum_is_crc32c():
    """The published check value."""
    assert celebahq.crc32c(b"123456789") == 0xE3069283
