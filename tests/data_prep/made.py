"""What data tests are made of: settings, files of sources, a finished dataset, an object store."""

from __future__ import annotations

import io
import pathlib
import tarfile
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image
from pyarrow._fs import _MockFileSystem

from data_prep import images
from data_prep.config import DataConfig
from data_prep.files import Store, open_store
from data_prep.parquet import (
    NAMES,
    QUARANTINE,
    QUARANTINE_SCHEMA,
    Dataset,
    Manifest,
    keys_hash,
    open_dataset,
    write_files,
)

IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])  # Hugging Face's


def config(root: object = None, **changes: object) -> DataConfig:
    good = dict(dataset="pictures", image_size=16, resolutions=[16], bits=[8], root=root and str(root))
    return DataConfig(**{**good, **changes})


def encoded(image: Image.Image | np.ndarray, kind: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(buffer, kind, **options)
    return buffer.getvalue()


def damaged_jpeg() -> bytes:
    """With pixels that decoders accept in silence."""
    data = bytearray(encoded(Image.effect_noise((64, 64), 50).convert("RGB"), "JPEG"))
    middle = len(data) // 2
    data[middle : middle + 2] = b"\xff\xd4"  # a restart mark where none belongs
    return bytes(data)


def image_column(values: Iterable[bytes | None]) -> pa.Array:
    return pa.array([{"bytes": value, "path": None} for value in values], IMAGE)


def write_parquet(
    path: pathlib.Path, images: Iterable[bytes | None], *, row_group_size: int | None = None, **columns: Sequence
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"image": image_column(images), **columns}), path, row_group_size=row_group_size)


def tar_of(members: Sequence[tuple[str, bytes | None]]) -> bytes:
    """None: a folder."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.type, info.size = (tarfile.DIRTYPE, 0) if data is None else (tarfile.REGTYPE, len(data))
            tar.addfile(info, io.BytesIO(data or b""))
    return buffer.getvalue()


def write(path: pathlib.Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def square_of(data: bytes, side: int = 16, *, dct: str = "tf") -> np.ndarray:
    """The square that a build with center crops makes of an image, step by step."""
    square = images.center_crop(images.decode(data, profile=dct).pixels)
    return images.resize_squares(square, [side], profile="tf")[side]


def columns(keys: Sequence[str]) -> pa.Table:
    """A dataset's columns but px: unlabelled gray photos of 60 x 80 pixels."""
    rows = [dict(key=key, label=None, orig_h=60, orig_w=80, flags=1) for key in keys]
    return pa.Table.from_pylist(rows, schema=NAMES)


def dataset(
    folder: pathlib.Path,
    splits: Mapping[str, Mapping[str, np.ndarray]],
    *,
    resolutions: Sequence[int],
    bits: Sequence[int],
    row_group_rows: int,
    num_shards: int = 1,
) -> Dataset:
    """A finished dataset of {split: {key: image}}, without Ray; one more photo is in quarantine.

    Images have the first resolution; the others take every second pixel, every third...
    """
    store, shards, settings = open_store(folder), [], dict(resolutions=list(resolutions), bits=list(bits))
    for split, found in splits.items():
        for index in range(num_shards):
            begin, end = (len(found) * i // num_shards for i in (index, index + 1))
            names, whole = columns(list(found)[begin:end]), np.stack(list(found.values())[begin:end])
            options = dict(split=split, index=index, num_shards=num_shards, row_group_rows=row_group_rows)
            steps = {side: resolutions[0] // side for side in resolutions}
            parts = (
                (names[rows], {side: whole[rows, ::step, ::step].copy() for side, step in steps.items()})
                for rows in (slice(0, 1), slice(1, None))  # a row group holds rows of both
            )
            shards += write_files(store, parts, **options, **settings)
    bad = dict(key="bad", source="bad", offset=None, size=0, sha256="", reason="empty", message="0 bytes")
    pq.write_table(pa.Table.from_pylist([bad], schema=QUARANTINE_SCHEMA), folder / QUARANTINE)
    manifest = Manifest(
        dataset="tiny",
        plan_hash="p",
        config=settings,
        source={},
        num_images={split: len(found) for split, found in splits.items()},
        split_hashes={split: keys_hash(found) for split, found in splits.items()},
        quarantine={"empty": 1},
        quarantine_sha256=store.sha256(QUARANTINE),
        conversions={"gray_to_rgb": sum(map(len, splits.values()))},
        shards=shards,
        versions={},
    )
    store.write_text("manifest.json", manifest.to_json())
    return open_dataset(str(folder))


def object_store(base: str = "bucket/run") -> Store:
    """In memory and not local: it is written as S3 and GCS are."""
    return Store(f"s3://{base}", filesystem=_MockFileSystem(), base=base)
