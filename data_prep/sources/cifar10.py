"""`cifar10`: CIFAR-10 as binary batches, Python pickles, folders of PNG or Hugging Face Parquet (column `img`).

Binary: records of one label byte and 3,072 pixel bytes in planes (R, G, B). Labels are the official numbers, 0 airplane
to 9 truck. The official test images are the test split; validation comes from train.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from data_prep.config import DataConfig
from data_prep.sources import hf_parquet, imagenet_box
from data_prep.sources.base import CHW, Index, Item, Listing, SourceFile, UnusableSource, is_image_name

LAYOUT = """data_batch_1.bin ... data_batch_5.bin and test_batch.bin, or the Python version without .bin, or
train/airplane/*.png ... and test/, or Hugging Face's Parquet with column img"""
COUNT = "50,000 train and 10,000 test images of 32 pixels"

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

_BATCH = re.compile(r"(?:^|/)(?P<name>(?:data|test)_batch(?:_\d)?)(?P<kind>\.bin)?$")
_PNG = re.compile(rf"(?:^|/)(?P<split>train|test)/(?P<label>{'|'.join(CLASSES)})/[^/]+$")
_PIXELS = 3 * 32 * 32


def recognise(listing: Listing, config: DataConfig) -> str | None:
    first = next((f.path for f in listing.files if _BATCH.search(f.path) or _is_png(f.path)), None)
    return f"it has {first}" if first else hf_parquet.recognise(listing, config, column="img")


def used(listing: Listing, config: DataConfig) -> Iterator[SourceFile]:
    for chosen in (lambda path: _BATCH.search(path), _is_png, lambda path: path.endswith(".parquet")):
        found = [file for file in listing.files if chosen(file.path)]
        if found:
            return iter(found)
    return iter(())


def index(listing: Listing, config: DataConfig) -> Index:
    files = list(used(listing, config))
    if files and files[0].path.endswith(".parquet"):
        return hf_parquet.index(listing, config)
    found = Index()
    for file in files:
        match = _BATCH.search(file.path)
        if match is None:
            found.items.append(_png(file))
            continue
        split = "test" if match["name"].startswith("test") else "train"
        if match["kind"]:
            _add_binary(found, file, match["name"], split, listing.read(file.path))
            continue
        with listing.open(file.path) as stream:
            batch = imagenet_box.read_batch(stream, path=file.path)
        for row in range(batch.num_rows):
            place = dict(block=0, row=row) if batch.offset is None else dict(offset=batch.offset + row * _PIXELS)
            number = None if batch.labels is None else batch.labels[row]
            key = f"{match['name']}#{row:05d}"
            found.items.append(Item(key, file.path, _PIXELS, label=number, split=split, layout=CHW, **place))
    return found


def read_block(stream: pa.NativeFile, item: Item) -> Sequence[Any]:
    return (hf_parquet if item.path.endswith(".parquet") else imagenet_box).read_block(stream, item)


def _add_binary(found: Index, file: SourceFile, name: str, split: str, data: bytes) -> None:
    if not data or len(data) % (1 + _PIXELS):
        message = f"{file.path}: {len(data)} bytes are not a whole number of records of {1 + _PIXELS} bytes"
        raise UnusableSource("corrupt_source_file", message)
    labels = np.frombuffer(data, np.uint8)[:: 1 + _PIXELS].tolist()
    for row, label in enumerate(labels):
        offset = row * (1 + _PIXELS) + 1
        item = Item(f"{name}#{row:05d}", file.path, _PIXELS, offset, label=label, split=split, layout=CHW)
        if label < len(CLASSES):
            found.items.append(item)
        else:
            found.reject(item, "bad_label", f"its label is {label}, there are {len(CLASSES)} classes")


def _png(file: SourceFile) -> Item:
    match = _PNG.search(file.path)
    assert match is not None
    key, label = file.path[match.start() :].lstrip("/"), CLASSES.index(match["label"])
    return Item(key, file.path, file.size, label=label, split=match["split"])


def _is_png(path: str) -> bool:
    return is_image_name(path) and bool(_PNG.search(path))
