"""A file is whole or absent, on a disk and on an object store.  pytest tests/data_prep/store/test_files.py"""

from __future__ import annotations

import errno
import hashlib
import os
import pathlib

import pytest

from data_prep import files
from data_prep.files import Store, UserError, join, open_store, parent
from tests.data_prep.made import object_store

# ---- what is written is what is read -------------------------------------------------------------------------------


def test_bytes_come_back_and_are_replaced_whole(store: Store) -> None:
    store.write_bytes("a/b/c.bin", b"first, and longer")
    store.write_bytes("a/b/c.bin", b"second")
    assert store.read_bytes("a/b/c.bin") == b"second"
    assert store.sha256("a/b/c.bin") == hashlib.sha256(b"second").hexdigest()
    with store.open("a/b/c.bin") as stream:
        assert stream.read_at(3, 1) == b"eco"


def test_listing_names_files_and_folders_below(store: Store) -> None:
    for name in ("a/1", "a/2/3", "b"):
        store.write_text(name, "xx")
    assert [(e.path, e.is_folder) for e in store.list()] == [("a", True), ("b", False)]
    assert [(e.path, e.bytes) for e in store.walk("a")] == [("a/1", 2), ("a/2/3", 2)]
    assert store.list("nothing/here") == []


def test_exists_and_delete(store: Store) -> None:
    store.write_text("a/1", "x")
    store.write_text("a/2", "x")
    assert store.exists("a") and store.exists("a/1") and not store.exists("a/3")
    store.delete("a/1")
    assert not store.exists("a/1") and store.exists("a/2")
    store.delete("a")
    store.delete("never was")
    assert not store.exists("a/2")


def test_missing_file_raises(store: Store, tmp_path: pathlib.Path) -> None:
    with pytest.raises(FileNotFoundError):
        store.read_bytes("nothing")
    with pytest.raises(FileNotFoundError):
        store.download("nothing", tmp_path / "nothing")


@pytest.mark.parametrize("content", [b"1" * 100, b""])
def test_a_file_goes_up_and_comes_down_unchanged(store: Store, tmp_path: pathlib.Path, content: bytes) -> None:
    (tmp_path / "source").write_bytes(content)
    store.upload(tmp_path / "source", "up/file")
    store.sub("up").download("file", tmp_path / "target")
    assert (tmp_path / "target").read_bytes() == content


# ---- whole or absent -----------------------------------------------------------------------------------------------


def test_an_error_while_writing_leaves_the_old_file_and_nothing_else(store: Store) -> None:
    store.write_bytes("a/b.bin", b"old")
    with pytest.raises(RuntimeError), store.writing(["a/b.bin", "c.bin"]) as streams:
        streams["a/b.bin"].write(b"half")
        raise RuntimeError
    assert store.read_bytes("a/b.bin") == b"old" and [entry.path for entry in store.walk()] == ["a/b.bin"]


def test_several_files_are_on_the_disk_before_the_first_of_them_appears(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, paths = open_store(tmp_path), [str(tmp_path / "a" / "1.bin"), str(tmp_path / "b" / "2.bin")]
    synced: dict[int, int] = {}  # inode -> bytes
    fsync, replace = os.fsync, os.replace

    def note(descriptor: int) -> None:
        fsync(descriptor)
        synced[os.fstat(descriptor).st_ino] = os.fstat(descriptor).st_size

    def check(source: str, target: str) -> None:
        for path in (path if os.path.exists(path) else path + source[len(target) :] for path in paths):
            assert synced[os.stat(path).st_ino] == 30, path
        replace(source, target)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(os, "replace", check)
    with store.writing(["a/1.bin", "b/2.bin"]) as streams:
        for _ in range(10):
            for stream in streams.values():
                stream.write(b"abc")
        assert not any(os.path.exists(path) for path in paths)
    assert [pathlib.Path(path).read_bytes() for path in paths] == [b"abc" * 10] * 2
    assert {stream.sha256 for stream in streams.values()} == {hashlib.sha256(b"abc" * 10).hexdigest()}


def test_object_stores_see_one_put_and_no_rename(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> None:
        raise AssertionError("rename on a store")

    monkeypatch.setattr(files.os, "replace", forbidden)
    store = object_store()
    store.write_bytes("a/file", b"x")
    with store.writing(["a/other"]) as streams:
        streams["a/other"].write(b"y")
        assert not store.exists("a/other")
    assert [e.path for e in store.walk()] == ["a/file", "a/other"]


def test_leftovers_of_killed_writers_are_removed(tmp_path: pathlib.Path) -> None:
    (tmp_path / "x").mkdir()
    for name in ("x/a.parquet.tmp-0123abcd-123", "x/a.tmp-notes", "a.parquet"):
        (tmp_path / name).write_bytes(b"")
    open_store(tmp_path).remove_temporaries()
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == ["a.parquet", "a.tmp-notes"]


def test_only_transient_errors_are_retried(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, failures = open_store(tmp_path), [OSError(errno.EIO, "input/output error"), ConnectionResetError("reset")]
    waits: list[float] = []
    monkeypatch.setattr(files.time, "sleep", waits.append)
    fsync = os.fsync

    def failing(handle: int) -> None:
        if failures:
            raise failures.pop(0)
        fsync(handle)

    monkeypatch.setattr(files.os, "fsync", failing)
    store.write_bytes("file", b"new")
    assert store.read_bytes("file") == b"new" and waits == [0.5, 2.0]
    failures += [OSError(errno.ENOSPC, "no space left")]
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path}'"):
        store.write_bytes("file", b"newer")
    failures += [OSError(errno.EIO, "input/output error")] * 9
    with pytest.raises(OSError, match="input/output"):
        store.write_bytes("file", b"newer")
    assert len(waits) == 2 + len(files._RETRY_SEC)
    assert store.read_bytes("file") == b"new" and [p.name for p in tmp_path.iterdir()] == ["file"]


# ---- places --------------------------------------------------------------------------------------------------------


def test_paths_cannot_leave_the_store(store: Store) -> None:
    for path in ("../other", "/etc/passwd", "a/../../b"):
        with pytest.raises(AssertionError, match="leads out"):
            store.path(path)


def test_relative_and_file_uris_mean_absolute_local_folders(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for uri in ("my runs/", f"file://{tmp_path}/my runs", (tmp_path / "my runs").as_uri()):
        assert open_store(uri).uri == str(tmp_path / "my runs")
    assert not (tmp_path / "my runs").exists()


def test_options_of_a_uri_stay_at_its_end() -> None:
    assert join("s3://bucket/run?region=eu-west-1", "a/b") == "s3://bucket/run/a/b?region=eu-west-1"
    assert join("/runs/what?", "a") == "/runs/what?/a"
    assert parent("s3://bucket/run/a?region=eu-west-1") == ("s3://bucket/run?region=eu-west-1", "a")
    assert parent("/runs/what?") == ("/runs", "what?") and parent("/a") == ("/", "a") and parent("a") == (".", "a")
    store = open_store("s3://bucket/run?region=eu-west-1&endpoint_override=127.0.0.1:1&scheme=http")
    assert store.path("a") == "bucket/run/a" and not store.is_local
    assert open_store(store.uri_of("a")).path() == "bucket/run/a"


@pytest.mark.parametrize("uri", ["ftp://host/x", "file://host/x"])
def test_places_that_cannot_be_opened_are_the_users_mistake(uri: str) -> None:
    with pytest.raises(UserError, match=f"'{uri}' cannot be opened"):
        open_store(uri)
