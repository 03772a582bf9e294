"""Stores: one put, nothing half-written, no rename on object stores.

python -m pytest tests/pipelines/test_storage.py
"""

from __future__ import annotations

import errno
import hashlib
import os
import pickle
from pathlib import Path

import pytest
from pyarrow._fs import _MockFileSystem

from data_prep import files as storage
from data_prep.files import Store, UserError, check_run_folder, claim_run_folder, join, open_store, run_folder_owner


def object_store() -> Store:
    """In memory, and not local: takes the way of S3 and GCS."""
    return Store("s3://bucket/run", filesystem=_MockFileSystem(), base="bucket/run")


@pytest.fixture(params=["local", "object store"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return open_store(tmp_path / "run") if request.param == "local" else object_store()


def test_bytes_come_back_and_are_replaced_whole(store: Store) -> None:
    store.write_bytes("a/b/c.bin", b"first, and longer")
    store.write_bytes("a/b/c.bin", b"second")
    assert store.read_bytes("a/b/c.bin") == b"second"
    assert store.sha256("a/b/c.bin") == hashlib.sha256(b"second").hexdigest()


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


def test_missing_file_raises(store: Store) -> None:
    with pytest.raises(FileNotFoundError):
        store.read_bytes("nothing")
    with pytest.raises(FileNotFoundError):
        store.download("nothing", "/nowhere")


def test_folder_goes_up_and_comes_down_unchanged(store: Store, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "sub").mkdir(parents=True)
    (source / "one").write_bytes(b"1" * 100)
    (source / "sub" / "two").write_bytes(b"")
    store.upload(source, "up")
    store.download("up", tmp_path / "down")
    assert (tmp_path / "down" / "one").read_bytes() == b"1" * 100
    assert (tmp_path / "down" / "sub" / "two").read_bytes() == b""
    store.sub("up").download("sub", tmp_path / "part")
    assert [p.name for p in (tmp_path / "part").iterdir()] == ["two"]
    store.download("up/one", tmp_path / "single")
    assert (tmp_path / "single").read_bytes() == b"1" * 100


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path)
    store.write_bytes("file", b"old")

    def full_disk(_: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(storage.os, "fsync", full_disk)
    with pytest.raises(OSError, match="no space"):
        store.write_bytes("file", b"new")
    assert store.read_bytes("file") == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_call_is_made_again_after_a_hiccup_and_only_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, failures = open_store(tmp_path), [OSError(errno.EIO, "input/output error"), ConnectionResetError("reset")]
    waits: list[float] = []
    monkeypatch.setattr(storage.time, "sleep", waits.append)
    fsync = os.fsync

    def failing(handle: int) -> None:
        if failures:
            raise failures.pop(0)
        fsync(handle)

    monkeypatch.setattr(storage.os, "fsync", failing)
    store.write_bytes("file", b"new")
    assert store.read_bytes("file") == b"new" and waits == [0.5, 2.0]
    failures += [OSError(errno.ENOSPC, "no space left")]
    with pytest.raises(OSError, match="no space"):
        store.write_bytes("file", b"newer")
    failures += [OSError(errno.EIO, "input/output error")] * 9
    with pytest.raises(OSError, match="input/output"):
        store.write_bytes("file", b"newer")
    assert len(waits) == 2 + len(storage._RETRY_SEC) and store.read_bytes("file") == b"new"


def test_object_stores_see_one_put_and_no_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> None:
        raise AssertionError("rename on a store")

    monkeypatch.setattr(storage.os, "replace", forbidden)
    store = object_store()
    store.write_bytes("a/file", b"x")
    assert [e.path for e in store.walk()] == ["a/file"]


def test_paths_cannot_leave_the_store(store: Store) -> None:
    for path in ("../other", "/etc/passwd", "a/../../b"):
        with pytest.raises(AssertionError, match="leads out"):
            store.path(path)


def test_a_store_survives_pickling(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.write_text("x", "1")
    assert pickle.loads(pickle.dumps(store)).read_bytes("x") == b"1"


def test_relative_and_file_uris_mean_absolute_local_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert open_store("runs").uri == str(tmp_path / "runs")
    assert open_store(f"file://{tmp_path}/runs").uri == str(tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_options_of_a_uri_stay_at_its_end() -> None:
    assert join("s3://bucket/run?region=eu-west-1", "a/b") == "s3://bucket/run/a/b?region=eu-west-1"
    assert join("/runs/what?", "a") == "/runs/what?/a"
    store = open_store("s3://bucket/run?region=eu-west-1&endpoint_override=127.0.0.1:1&scheme=http")
    assert store.path("a") == "bucket/run/a" and not store.is_local
    assert open_store(store.uri_of("a")).path() == "bucket/run/a"


def test_unknown_scheme_is_the_users_mistake() -> None:
    with pytest.raises(UserError, match="ftp"):
        open_store("ftp://host/x")


def test_run_folder_of_another_config_is_refused(store: Store) -> None:
    check_run_folder(store, name="demo")
    claim_run_folder(store, name="demo", config_yaml="name: demo\nseed: 1\n")
    claim_run_folder(store, name="demo", config_yaml="name: demo\nseed: 2\n")
    assert run_folder_owner(store) == "demo"
    with pytest.raises(UserError, match="run folder of config 'demo', not of 'debug'"):
        claim_run_folder(store, name="debug", config_yaml="name: debug\n")
    assert b"seed: 2" in store.read_bytes("config.yaml")


@pytest.mark.parametrize("content", ["just text", "seed: 1", "name: [1, 2", "\x00"])
def test_a_folder_with_a_foreign_config_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.yaml").write_text(content)
    with pytest.raises(UserError, match="does not look like a run folder"):
        check_run_folder(open_store(tmp_path), name="demo")
