"""A folder's images are found in a fixed order, the rest is counted, what goes away is named.

pytest tests/data_prep/sources/test_sources.py
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import os
import pathlib
from collections.abc import Callable

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep import sources
from data_prep.config import SOURCES
from data_prep.files import Store
from data_prep.sources import UnusableSource
from tests.data_prep import made

config = functools.partial(made.config, dataset="demo_photos")


def test_keys_are_sorted_relative_paths_and_side_files_are_counted(tmp_path: pathlib.Path, make_photos: Callable):
    make_photos(tmp_path / "b", 2)
    make_photos(tmp_path / "a" / "deep", 1)
    for name in (".DS_Store", "Thumbs.db", "._photo.jpg", "LICENSE", "notes.txt", ".cache/photo.jpg"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("x")
    found = sources.find(config(tmp_path))
    assert [item.key for item in found.items] == ["a/deep/photo_00.jpg", "b/photo_00.jpg", "b/photo_01.png"]
    assert found.skipped == {"not_a_data_file": 6}
    with sources.Reader(found.name, found.root) as reader:
        assert reader.read(found.items[2]) == (tmp_path / "b" / "photo_01.png").read_bytes()
    assert sources.find(config(tmp_path.as_uri())).items == found.items
    assert (found.name, found.why) == ("folder", "it has images such as a/deep/photo_00.jpg")


def test_listing_hash_sees_each_change(tmp_path: pathlib.Path, make_photos: Callable):
    make_photos(tmp_path, 2)
    hashes = [sources.identify(config(tmp_path))[1]]
    assert sources.identify(config(tmp_path))[1] == hashes[0]
    os.utime(tmp_path / "photo_00.jpg", (1, 1))
    hashes.append(sources.identify(config(tmp_path))[1])
    (tmp_path / "photo_01.png").rename(tmp_path / "photo_02.png")
    hashes.append(sources.identify(config(tmp_path))[1])
    with open(tmp_path / "photo_02.png", "ab") as file:
        file.write(b"x")
    os.utime(tmp_path / "photo_02.png", (1, 1))
    hashes.append(sources.identify(config(tmp_path))[1])
    assert len(set(hashes)) == 4


def test_built_in_photos_do_not_depend_on_file_times(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    before = sources.find(config())
    assert len(before.items) == 14
    for item in before.items:
        copy = tmp_path / item.path
        copy.parent.mkdir(exist_ok=True)
        copy.write_bytes((sources.BUILT_IN_PHOTOS / item.path).read_bytes())
        os.utime(copy, (1, 1))
    monkeypatch.setattr(sources, "BUILT_IN_PHOTOS", tmp_path)
    assert sources.identify(config())[1] == before.listing_hash


def test_every_built_in_photo_is_attributed():
    text = (sources.BUILT_IN_PHOTOS / "ATTRIBUTION.md").read_text()
    for item in sources.find(config()).items:
        assert item.key.split("/")[-1] in text


def test_unusable_folders_are_said_in_one_line(tmp_path: pathlib.Path):
    (tmp_path / "notes.txt").write_text("x")
    cases = [
        (tmp_path / "missing", "no such folder"),
        (tmp_path / "notes.txt", "it is a file; name the folder"),
        (tmp_path, "no images"),
        ("nonsense://bucket/images", "cannot be opened"),
    ]
    for root, message in cases:
        with pytest.raises(ValueError, match=message) as error:
            sources.find(config(root))
        assert str(root) in str(error.value) and "\n" not in str(error.value)


def test_a_link_to_nothing_is_named_and_not_passed_over(tmp_path: pathlib.Path, make_photos: Callable):
    make_photos(tmp_path / "raw", 2)
    make_photos(tmp_path / "elsewhere", 1)
    os.rename(tmp_path / "elsewhere", tmp_path / "moved")
    (tmp_path / "raw" / "lost.jpg").symlink_to(tmp_path / "elsewhere" / "photo_00.jpg")
    with pytest.raises(ValueError, match="root is .*raw'; .*raw/lost.jpg is a link to a file that is not there"):
        sources.find(config(tmp_path / "raw"))
    (tmp_path / "elsewhere").symlink_to(tmp_path / "moved")  # a link to a folder, and through it to the file
    assert len(sources.find(config(tmp_path / "raw")).items) == 3
    os.mkfifo(tmp_path / "raw" / "pipe.jpg")
    assert sources.find(config(tmp_path / "raw")).skipped == {"not_a_data_file": 1}


def test_a_name_that_is_no_text_is_shown(tmp_path: pathlib.Path, make_photos: Callable):
    make_photos(tmp_path, 2)
    try:
        os.rename(tmp_path / "photo_00.jpg", os.fsencode(tmp_path) + b"/caf\xe9.jpg")
    except OSError:
        pytest.skip("this file system has names in UTF-8 only")
    with pytest.raises(ValueError, match=r"root is .*caf\\xe9.jpg' is not a name in UTF-8") as error:
        sources.find(config(tmp_path))
    assert not isinstance(error.value, UnicodeError)


def test_what_may_be_two_sources_is_refused_with_both_names(tmp_path: pathlib.Path, make_photos: Callable):
    make_photos(tmp_path / "train" / "n01440764", 1)
    (tmp_path / "data_batch_1.bin").write_bytes(b"x")
    with pytest.raises(
        ValueError, match=r"may be cifar10 \(it has data_batch_1.bin.*; ilsvrc_folder \(it has train/n0"
    ):
        sources.find(config(tmp_path))
    (tmp_path / "data_batch_1.bin").unlink()
    found = sources.find(config(tmp_path))
    assert (found.name, found.why) == ("ilsvrc_folder", "it has train/n01440764/photo_00.jpg")


def test_a_named_source_without_its_files_shows_the_layout(tmp_path: pathlib.Path, make_photos: Callable):
    make_photos(tmp_path, 1)
    for name in SOURCES:
        if name not in ("auto", "folder", "celebahq"):
            named = dataclasses.replace(config(tmp_path), source=name)
            with pytest.raises(ValueError, match=f"the folder has no files of source {name}: ") as error:
                sources.find(named)
            assert "\n" not in str(error.value)


def test_every_source_is_described_by_the_command_and_the_page():
    described = sources.describe()
    assert {name for name, _, _ in described} == set(SOURCES) - {"auto"}
    assert all(layout and count and "\n" not in layout for _, layout, count in described)
    page = (pathlib.Path(__file__).parents[3] / "docs" / "data.md").read_text()
    assert all(f"| `{name}` |" in page for name, _, _ in described)


def test_listing_hash_of_an_archive_does_not_read_it(tmp_path: pathlib.Path):
    (tmp_path / "ILSVRC2012_img_train.tar").write_bytes(b"no tar at all")
    assert len(sources.identify(config(tmp_path))[1]) == 64
    with pytest.raises(ValueError, match="not_an_archive"):
        sources.find(config(tmp_path))


def test_files_that_went_away_or_may_not_be_read_are_named(
    tmp_path: pathlib.Path, jpegs: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in (0, 1):
        (tmp_path / f"{i}.jpg").write_bytes(jpegs[i][1])
    found = sources.find(config(tmp_path, source="folder"))
    (tmp_path / "0.jpg").unlink()
    with sources.Reader("folder", str(tmp_path)) as reader:
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
    (item,) = sources.find(config(tmp_path, source="folder")).items

    def away(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with sources.Reader("folder", str(tmp_path)) as reader, monkeypatch.context() as patch:
        assert reader.read(item) == jpegs[0][1]
        patch.setattr(Store, "read_bytes", away)
        with pytest.raises(OSError, match="Input/output error"):
            reader.read(item)
    for name in ("open", "info"):
        with monkeypatch.context() as patch:
            patch.setattr(Store, name, away)
            with pytest.raises(OSError, match="Input/output error"):
                sources.identify(config(tmp_path))
