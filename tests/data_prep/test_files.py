"""A written file is whole or absent.  pytest tests/data_prep/test_files.py"""

from __future__ import annotations

import hashlib
import os
import pathlib

import pyarrow.fs as pafs
import pytest

from data_prep import files


def test_error_while_writing_leaves_the_old_file_and_nothing_else(tmp_path: pathlib.Path):
    filesystem, folder = files.locate(str(tmp_path))
    files.put_bytes(filesystem, f"{folder}/a/b.bin", b"old")
    with pytest.raises(RuntimeError), files.whole_file(filesystem, f"{folder}/a/b.bin") as stream:
        stream.write(b"half")
        raise RuntimeError
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b.bin"]
    assert files.read_bytes(filesystem, f"{folder}/a/b.bin") == b"old"
    assert files.digest(filesystem, f"{folder}/a/b.bin") == (3, hashlib.sha256(b"old").hexdigest())


def test_several_files_are_on_the_disk_before_the_first_of_them_appears(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    filesystem, folder = files.locate(str(tmp_path))
    paths = [f"{folder}/a/1.bin", f"{folder}/b/2.bin"]
    monkeypatch.setattr(files, "_SYNC_BYTES", 4)  # so that most is on its way before the end
    synced: dict[int, int] = {}  # inode -> bytes
    fsync, replace = os.fsync, os.replace

    def note(descriptor: int) -> None:
        fsync(descriptor)
        synced[os.fstat(descriptor).st_ino] = os.fstat(descriptor).st_size

    def check(source: str, target: str) -> None:
        for path in (f"{p}.tmp-{os.getpid()}" if not os.path.exists(p) else p for p in paths):
            assert synced[os.stat(path).st_ino] == 30, path
        replace(source, target)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(os, "replace", check)
    with files.whole_files(filesystem, paths) as streams:
        for _ in range(10):
            for path in paths:
                streams[path].write(b"abc")
        assert not any(os.path.exists(path) for path in paths)
    assert [pathlib.Path(path).read_bytes() for path in paths] == [b"abc" * 10] * 2
    assert {stream.sha256 for stream in streams.values()} == {hashlib.sha256(b"abc" * 10).hexdigest()}


def test_disk_that_fails_behind_the_writer_fails_the_file(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    """The kernel tells of an error once, to whoever syncs first."""
    filesystem, folder = files.locate(str(tmp_path))
    monkeypatch.setattr(files, "_SYNC_BYTES", 4)
    errors = [OSError("the disk is gone")]
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(errors.pop()) if errors else None)
    with pytest.raises(OSError, match="the disk is gone"), files.whole_file(filesystem, f"{folder}/a.bin") as stream:
        stream.write(b"abcdef")
    assert not errors and list(tmp_path.iterdir()) == []


def test_other_filesystems_see_one_complete_put(tmp_path: pathlib.Path):
    """SubTreeFileSystem stands for an object store: it is no LocalFileSystem, so nothing is renamed."""
    store = pafs.SubTreeFileSystem(str(tmp_path), pafs.LocalFileSystem())
    with pytest.raises(RuntimeError), files.whole_file(store, "b.bin") as stream:
        stream.write(b"half")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    files.put_bytes(store, "b.bin", b"whole")
    assert (tmp_path / "b.bin").read_bytes() == b"whole"


def test_leftovers_of_killed_writers_are_removed(tmp_path: pathlib.Path):
    (tmp_path / "x").mkdir()
    for name in ("x/a.parquet.tmp-123", "x/a.tmp-notes", "a.parquet"):
        (tmp_path / name).write_bytes(b"")
    files.remove_temporaries(*files.locate(str(tmp_path)))
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == ["a.parquet", "a.tmp-notes"]


def test_relative_and_home_paths_are_made_absolute(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert files.locate("data/set/")[1] == str(tmp_path / "data" / "set")
    assert files.locate(f"file://{tmp_path}/set")[1] == str(tmp_path / "set")
