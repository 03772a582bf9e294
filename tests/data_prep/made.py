"""Settings and files that tests of sources are made of."""

from __future__ import annotations

import io
import pathlib
import tarfile
from collections.abc import Iterable, Sequence

import numpy as np
import pyarrow as pa
from PIL import Image

from data_prep.config import DataConfig

IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])  # Hugging Face's


def config(root: object = None, **changes: object) -> DataConfig:
    good = dict(dataset="pictures", image_size=16, resolutions=[16], bits=[8], root=root and str(root))
    return DataConfig(**{**good, **changes})


def encoded(image: Image.Image | np.ndarray, kind: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(buffer, kind, **options)
    return buffer.getvalue()


def image_column(values: Iterable[bytes | None]) -> pa.Array:
    return pa.array([{"bytes": value, "path": None} for value in values], IMAGE)


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
