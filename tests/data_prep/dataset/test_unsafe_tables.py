"""No Parquet file runs code, whatever types its columns have.  pytest tests/data_prep/dataset/test_unsafe_tables.py

Each file carries a pickle that would leave a mark. Ray is imported, so its extension types are registered with Arrow.
"""

from __future__ import annotations

import base64
import dataclasses
import os
import pathlib
import pickle
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray.data  # noqa: F401  registers the extension types
from ray.data._internal.object_extensions.arrow import ArrowPythonObjectType

from data_prep import sources
from data_prep.files import open_store
from data_prep.parquet import (
    QUARANTINE,
    QUARANTINE_SCHEMA,
    Manifest,
    Shard,
    UnsafeTable,
    open_parquet,
    pixel_column,
    read_shard,
    shard_path,
)
from data_prep.sources import UnusableSource
from data_prep.verify import verify
from tests.data_prep.made import IMAGE, config, image_column


class Mark:
    """Unpickled, it makes a file."""

    def __init__(self, place: pathlib.Path) -> None:
        self.place = place

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.place),)


@pytest.fixture(autouse=True)
def autoload(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user may have set it: Ray's columns unpickle their values when they are read."""
    monkeypatch.setenv("RAY_DATA_AUTOLOAD_PICKLE_OBJECT_SCALAR", "1")


@pytest.fixture
def mark(tmp_path: pathlib.Path) -> pathlib.Path:
    """Where a payload would leave its mark."""
    return tmp_path / "it ran"


def objects(mark: pathlib.Path, number: int) -> pa.ExtensionArray:
    data = pa.array([pickle.dumps(Mark(mark))] * number, pa.large_binary())
    return pa.ExtensionArray.from_storage(ArrowPythonObjectType(), data)


def labels(mark: pathlib.Path, image: pa.Array) -> pa.Table:
    return pa.table({"image": image, "label": objects(mark, 2)})


def image_bytes(mark: pathlib.Path, image: pa.Array) -> pa.Table:
    evil = pa.StructArray.from_arrays([objects(mark, 2), image.field(1)], ["bytes", "path"])
    return pa.table({"image": evil, "label": [1, 2]})


def nested_unread(mark: pathlib.Path, image: pa.Array) -> pa.Table:
    inner = pa.StructArray.from_arrays([objects(mark, 2)], ["deep"])
    return pa.table({"image": image, "notes": pa.ListArray.from_arrays([0, 1, 2], inner)})


def dictionary(mark: pathlib.Path, image: pa.Array) -> pa.Table:
    """Dictionary-encoded bytes, and the extension's name in the field's metadata."""
    kind = {"ARROW:extension:name": "ray.data.arrow_pickled_object", "ARROW:extension:metadata": ""}
    column = pa.array([pickle.dumps(Mark(mark))] * 2).dictionary_encode()
    field = pa.field("label", column.type, metadata=kind)
    return pa.table([image, column], pa.schema([pa.field("image", IMAGE), field]))


def tensor_metadata(mark: pathlib.Path, image: pa.Array) -> pa.Table:
    """The type's own description is a pickle: older versions of Ray load it when the schema is read."""
    kind = {"ARROW:extension:name": "ray.data.arrow_tensor_v2", "ARROW:extension:metadata": pickle.dumps(Mark(mark))}
    column = pa.array([[1], [2]], pa.large_list(pa.int64()))
    field = pa.field("unread", column.type, metadata=kind)
    return pa.table([image, column], pa.schema([pa.field("image", IMAGE), field]))


CASES = (labels, image_bytes, nested_unread, dictionary, tensor_metadata)


def write(path: pathlib.Path, make: Callable[..., pa.Table], mark: pathlib.Path, jpegs: list) -> None:
    image = image_column(data for _, data in jpegs[:2])
    path.parent.mkdir(exist_ok=True)
    pq.write_table(make(mark, image), path)
    assert b"ARROW:schema" in path.read_bytes()


def test_the_payload_would_run_without_the_check(mark: pathlib.Path, tmp_path: pathlib.Path, jpegs: list) -> None:
    write(tmp_path / "a.parquet", labels, mark, jpegs)
    pq.ParquetFile(tmp_path / "a.parquet").read().column("label")[0].as_py()
    assert mark.exists()


@pytest.mark.parametrize("source", ["auto", "hf_parquet"])
@pytest.mark.parametrize("make", CASES)
def test_extension_types_are_refused_with_the_file(
    make: Callable, source: str, mark: pathlib.Path, tmp_path: pathlib.Path, jpegs: list
) -> None:
    write(tmp_path / "raw" / "part.parquet", make, mark, jpegs)
    for look in (sources.identify, sources.find):
        with pytest.raises(UnusableSource) as refusal:
            look(config(tmp_path / "raw", source=source))
            sources.find(config(tmp_path / "raw", source=source))  # a named source is not opened to identify it
        assert refusal.value.reason == "unsafe_column" and "\n" not in str(refusal.value)
        assert "part.parquet: a column has an extension type" in str(refusal.value)
    assert not mark.exists()


@pytest.mark.parametrize("shift", range(3))
def test_the_name_of_an_extension_is_found_wherever_base64_puts_it(tmp_path: pathlib.Path, shift: int) -> None:
    text = base64.b64encode(b"x" * (30 + shift) + b"ARROW:extension:name" + b"y" * 30).decode()
    pq.write_table(pa.table({"a": [1]}).replace_schema_metadata({"other": text}), tmp_path / "a.parquet")
    with pytest.raises(UnsafeTable, match="a.parquet: a column has an extension type"):
        with pa.OSFile(str(tmp_path / "a.parquet")) as stream:
            open_parquet(stream, name="a.parquet")


@pytest.mark.parametrize("damage", [b"", b"PAR1", b"PAR1" + b"\xff" * 4 + b"PAR1", b"x" * 40 + b"PARE"])
def test_what_is_not_a_parquet_file_is_said(damage: bytes, tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.parquet").write_bytes(damage)
    with pytest.raises(UnusableSource, match="corrupt_source_file: a.parquet: it is not a Parquet file"):
        sources.find(config(tmp_path))


def test_a_data_set_for_training_is_read_only_with_its_own_columns(mark: pathlib.Path, tmp_path: pathlib.Path) -> None:
    path = shard_path(resolution=4, bits=8, split="train", index=0, num_shards=1)
    (tmp_path / path).parent.mkdir(parents=True)
    columns = {
        "key": pa.array(["a"]),
        "label": pa.array([1], pa.int32()),
        **{name: pa.array([4], pa.int32()) for name in ("orig_h", "orig_w", "flags")},
        "px": pixel_column(np.zeros((1, 4, 4, 3), np.uint8)),
    }
    pq.write_table(QUARANTINE_SCHEMA.empty_table(), tmp_path / QUARANTINE)
    for change, error in (
        ({"key": objects(mark, 1)}, "a column has an extension type"),
        ({"unread": objects(mark, 1)}, "a column has an extension type"),
        ({"label": pa.array(["x"])}, "of other types than a shard has"),
    ):
        pq.write_table(pa.table(columns | change), tmp_path / path)
        shard = Shard(path, "train", 0, 4, 8, (tmp_path / path).stat().st_size, "", [1])
        with pytest.raises(ValueError, match=error):
            read_shard(str(tmp_path), shard, row_group=0, columns=["key", "px"])
    pq.write_table(pa.table(columns | {"key": objects(mark, 1)}), tmp_path / path)
    manifest = Manifest("x", "", {"resolutions": [4], "bits": [8]}, {}, {"train": 1}, {}, {}, "", {}, [], {})
    store = open_store(tmp_path)
    sums = dict(bytes=store.info(path).bytes, sha256=store.sha256(path))
    manifest = dataclasses.replace(
        manifest, shards=[dataclasses.replace(shard, **sums)], quarantine_sha256=store.sha256(QUARANTINE)
    )
    (tmp_path / "manifest.json").write_text(manifest.to_json())
    (problem,) = verify(str(tmp_path))
    assert f"{path}: a column has an extension type" in problem
    assert not mark.exists()


def test_names_from_files_are_printed_as_escapes(tmp_path: pathlib.Path) -> None:
    name = "\x1b[2J\u202e\n<b>.parquet"
    (tmp_path / name).write_bytes(b"x" * 40)
    with pytest.raises(UnusableSource) as refusal:
        sources.find(config(tmp_path))
    assert "\\x1b[2J\\u202e\\n<b>.parquet: " in str(refusal.value) and str(refusal.value).isprintable()
    assert str(pickle.loads(pickle.dumps(refusal.value))) == str(refusal.value)
    (tmp_path / name).rename(tmp_path / "\x1b[2J.jpg")
    assert sources.find(config(tmp_path)).why == "it has images such as \\x1b[2J.jpg"
