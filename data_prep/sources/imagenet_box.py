"""`imagenet_box`: ImageNet as Chrabaszcz et al. (2017) made it smaller (squashed, Pillow's box filter), in batches.

Pixels are in planes (R, G, B). Labels are the devkit's numbers less one, *not* alphabetical. Their validation images
are the test split. Not comparable with imagenet_oord: one model scores 3.69 on that one's 32 pixels, 3.43 on these.
"""

from __future__ import annotations

import io
import math
import pickle
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from tokenize import TokenError
from typing import Any

import numpy as np
import pyarrow as pa

from data_prep.config import DataConfig
from data_prep.sources.base import CHW, FileEntry, Index, Item, Listing, UnusableSource, choose_side, refuse_bomb

LAYOUT = """train_data_batch_1.npz ... train_data_batch_10.npz and val_data.npz, or the same without suffix (pickles;
read without running code); of 8, 16, 32 or 64 pixels"""
COUNT = "1,281,167 train and 50,000 test (val) images"

_NAME = re.compile(r"(?:^|/)(?:train_data(?:_batch_\d+)?|val_data)(?:\.npz)?$")


def used(listing: Listing, config: DataConfig) -> Iterator[FileEntry]:
    return (file for file in listing.others if _NAME.search(file.path))


def index(listing: Listing, config: DataConfig) -> Index:
    batches = {}
    for file in used(listing, config):
        with listing.open(file.path) as stream:
            batches[file.path] = read_batch(stream, path=file.path)
    sides = {path: batch.side for path, batch in batches.items()}
    found = Index(side=choose_side(sides, config, source="imagenet_box"))
    for path, batch in batches.items():
        if batch.side != found.side:
            found.skipped["other_size"] += 1
            continue
        name = path.rpartition("/")[2].removesuffix(".npz")
        add_rows(found, batch, path, f"{name}#%06d", "train" if name.startswith("train") else "test", first_label=1)
    return found


def add_rows(found: Index, batch: Batch, path: str, key: str, split: str, *, first_label: int = 0) -> None:
    """`key` has the place of a row's number."""
    size = 3 * batch.side * batch.side
    for row in range(batch.num_rows):
        label = None if batch.labels is None else batch.labels[row] - first_label
        place: dict[str, Any] = dict(block=0, row=row)
        if batch.offset is not None:
            place = dict(offset=batch.offset + row * (batch.stride or size))
        found.items.append(Item(key % row, path, size, label=label, split=split, layout=CHW, **place))


# ---- batches: NumPy archives and pickles, also CIFAR-10's ----------------------------------------------------------

_ARRAY = "data.npy"
_LABELS = ("labels.npy", "fine_labels.npy")


@dataclass(frozen=True)
class Batch:
    """Raw pixels, (N, 3 * side * side) uint8 in planes with N labels: a NumPy archive or a Python pickle.

    Pixels that lie in the file as they are become ranges of bytes; only compressed or re-encoded ones are blocks.
    Pickles are read by an unpickler that rebuilds NumPy arrays and can call nothing else.
    """

    side: int  # pixels
    num_rows: int
    labels: list[int] | None
    offset: int | None  # of row 0 in the file; None: the rows have to be read with `read_block`
    stride: int | None = None  # bytes from row to row; None: their own


def read_batch(stream: pa.NativeFile, *, path: str) -> Batch:
    """Raises UnusableSource: unsafe_pickle (also arrays of objects), shape_mismatch, corrupt_source_file."""
    if path.endswith(".npz"):
        array, labels, offset = _read_npz(stream, path)
        return Batch(_check(array, path), len(array), labels, offset)
    data = stream.read()
    array, labels = _unpickle(data, path)
    side = _check(array, path)
    # Most writers leave an array's bytes in one piece; a protocol 2 pickle of Python 3 does not.
    at = data.find(array[:1].tobytes()) if len(array) else -1
    in_one_piece = 0 <= at <= len(data) - array.size and np.array_equal(
        np.frombuffer(data, np.uint8, array.size, at), array.ravel()
    )
    return Batch(side, len(array), labels, at if in_one_piece else None)


def read_block(stream: pa.NativeFile, item: Item) -> np.ndarray:
    """All rows as an array, for batches without an offset."""
    return (_read_npz(stream, item.path) if item.path.endswith(".npz") else _unpickle(stream.read(), item.path))[0]


def _read_npz(stream: pa.NativeFile, path: str) -> tuple[np.ndarray, list[int] | None, int | None]:
    """The array, its labels, and where its bytes begin if they are in the file as they are."""
    try:
        with zipfile.ZipFile(io.BufferedReader(stream)) as archive:

            def read(name: str) -> np.ndarray:  # to its end, where zipfile compares the checksum
                info = archive.getinfo(name)
                stored = min(info.compress_size, stream.size())
                refuse_bomb(info.file_size, stored=stored, where=f"{path}: {name}")
                with archive.open(info) as member:
                    return np.lib.format.read_array(member, allow_pickle=False)

            array, info = read(_ARRAY), archive.getinfo(_ARRAY)
            labels_name = next((name for name in _LABELS if name in archive.namelist()), None)
            labels = None if labels_name is None else _as_labels(read(labels_name), array.shape[:1])
            is_stored = info.compress_type == zipfile.ZIP_STORED
            return array, labels, _member_offset(stream, info) + info.file_size - array.nbytes if is_stored else None
    except KeyError:
        raise UnusableSource("shape_mismatch", f"{path}: it has no array called data") from None
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, MemoryError, TokenError, SyntaxError) as error:
        raise UnusableSource("corrupt_source_file", f"{path}: {error}") from None
    except ValueError as error:
        if isinstance(error, UnusableSource):
            raise
        reason = "unsafe_pickle" if "allow_pickle" in str(error) else "corrupt_source_file"
        raise UnusableSource(reason, f"{path}: {error}") from None


def _member_offset(stream: pa.NativeFile, info: zipfile.ZipInfo) -> int:
    """Where a stored member's bytes begin; the local header may have other extra fields than the directory."""
    header = stream.read_at(30, info.header_offset)
    return info.header_offset + 30 + int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")


def _check(array: np.ndarray, path: str) -> int:
    """The side of the images."""
    shape, dtype = array.shape, array.dtype
    if dtype.hasobject:
        raise UnusableSource("unsafe_pickle", f"{path}: data is an array of objects")
    side = math.isqrt(shape[1] // 3) if len(shape) == 2 else 0
    if not side or side * side * 3 != shape[1] or dtype != np.uint8 or not array.flags.c_contiguous:
        message = f"{path}: data is {dtype} {shape}; it must be uint8, one row of 3 square planes for each image"
        raise UnusableSource("shape_mismatch", message)
    return side


def _as_labels(values: Any, shape: tuple) -> list[int] | None:
    """None unless they are a number for each image: no model needs them."""
    array = np.asarray(values)
    return array.tolist() if array.shape == shape and array.dtype.kind in "iu" else None


def _unpickle(data: bytes, path: str) -> tuple[np.ndarray, list[int] | None]:
    try:
        found = _ArrayUnpickler(io.BytesIO(data), encoding="latin1").load()
        found = {key.decode() if isinstance(key, bytes) else key: value for key, value in dict(found).items()}
    except UnusableSource as error:
        raise UnusableSource(error.reason, f"{path}: {error.message}") from None
    except Exception as error:  # a damaged pickle can fail in many ways; none of them runs foreign code
        raise UnusableSource("corrupt_source_file", f"{path}: {type(error).__name__}: {error}") from None
    values = {key: value.array if isinstance(value, _Array) else value for key, value in found.items()}
    array = values.get("data")
    if not isinstance(array, np.ndarray):
        raise UnusableSource("shape_mismatch", f"{path}: it has no array called data")
    return array, _as_labels(values.get("labels"), array.shape[:1])


class _DType:
    """Stands for numpy.dtype in a pickle: numbers only."""

    def __init__(self, name: str, *_: object) -> None:
        if not re.fullmatch(r"[biuf]\d", name):
            raise UnusableSource("unsafe_pickle", f"an array of type {name!r}; only numbers are allowed")
        self.dtype = np.dtype(name)

    def __setstate__(self, state: tuple) -> None:
        if state[1] in ("<", ">"):
            self.dtype = self.dtype.newbyteorder(state[1])


class _Array:
    """Stands for numpy.ndarray in a pickle, which first makes an empty array and then sets its state."""

    def __init__(self) -> None:
        self.array: np.ndarray | None = None

    def __setstate__(self, state: tuple) -> None:
        _, shape, dtype, is_fortran, data = state
        data = data.encode("latin1") if isinstance(data, str) else data
        self.array = np.frombuffer(data, dtype.dtype).reshape(shape, order="F" if is_fortran else "C")


def _reconstruct(kind: type, shape: tuple, code: bytes) -> _Array:
    return _Array()


def _frombuffer(data: bytes, dtype: _DType, shape: tuple, order: str) -> _Array:
    found = _Array()
    found.__setstate__((1, shape, dtype, order == "F", data))
    return found


def _scalar(dtype: _DType, data: bytes | str) -> np.generic:
    return np.frombuffer(data.encode("latin1") if isinstance(data, str) else data, dtype.dtype)[0]


def _latin1(text: str, encoding: str) -> bytes:
    return text.encode("latin1")


_ALLOWED: dict[tuple[str, str], Callable] = {
    ("_codecs", "encode"): _latin1,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _DType,
    **{(f"{package}.multiarray", "_reconstruct"): _reconstruct for package in ("numpy.core", "numpy._core")},
    **{(f"{package}.multiarray", "scalar"): _scalar for package in ("numpy.core", "numpy._core")},
    **{(f"{package}.numeric", "_frombuffer"): _frombuffer for package in ("numpy.core", "numpy._core")},
}


class _ArrayUnpickler(pickle.Unpickler):
    """Finds our stand-ins for NumPy's classes and nothing else, so that not even NumPy's own code sees the contents."""

    def find_class(self, module: str, name: str) -> Callable:
        if (module, name) not in _ALLOWED:
            message = f"it wants to call {module}.{name}; only arrays of numbers are allowed"
            raise UnusableSource("unsafe_pickle", message)
        return _ALLOWED[module, name]
