"""`cifar10`: CIFAR-10 as binary batches, Python pickles or folders of PNG; its Parquet is read by hf_parquet.

Binary: records of one label byte and 3,072 pixel bytes in planes (R, G, B). Labels are the official numbers, 0 airplane
to 9 truck. The official test images are the test split; validation comes from train.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from data_prep import images
from data_prep.config import DataConfig
from data_prep.sources import imagenet_box
from data_prep.sources.base import CHW, Index, Item, Listing, SourceFile, UnusableSource

LAYOUT = """data_batch_1.bin ... data_batch_5.bin and test_batch.bin, or the Python version without .bin, or
train/airplane/*.png ... and test/; Hugging Face's Parquet is source hf_parquet"""
COUNT = "50,000 train and 10,000 test images of 32 pixels"

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

read_block = imagenet_box.read_block

_BATCH = re.compile(r"(?:^|/)(?P<name>(?:data|test)_batch(?:_\d)?)(?P<kind>\.bin)?$")
_PNG = re.compile(rf"(?:^|/)(?P<split>train|test)/(?P<label>{'|'.join(CLASSES)})/[^/]+$")
_PIXELS = 3 * 32 * 32


def recognise(listing: Listing, config: DataConfig) -> str | None:
    """Batches, or images of 32 pixels in folders of all ten classes."""
    files = list(used(listing, config))
    if files and not _BATCH.search(files[0].path):
        if {_png(file).label for file in files} != set(range(len(CLASSES))):
            return None
        try:
            if images.header_size(listing.read(files[0].path)) != (32, 32):
                return None
        except images.UnusableImage:
            return None
    return f"it has {files[0].path}" if files else None


def used(listing: Listing, config: DataConfig) -> Iterator[SourceFile]:
    batches = [file for file in listing.others if _BATCH.search(file.path)]
    return iter(batches or [file for file in listing.images if _PNG.search(file.path)])


def index(listing: Listing, config: DataConfig) -> Index:
    found = Index()
    for file in listing.files:
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
            place: dict[str, Any] = (
                dict(block=0, row=row) if batch.offset is None else dict(offset=batch.offset + row * _PIXELS)
            )
            number = None if batch.labels is None else batch.labels[row]
            key = f"{match['name']}#{row:05d}"
            found.items.append(Item(key, file.path, _PIXELS, label=number, split=split, layout=CHW, **place))
    return found


def _add_binary(found: Index, file: SourceFile, name: str, split: str, data: bytes) -> None:
    if not data or len(data) % (1 + _PIXELS):
        message = f"{file.path}: {len(data)} bytes are not a whole number of records of {1 + _PIXELS} bytes"
        raise UnusableSource("corrupt_source_file", message)
    labels = np.frombuffer(data, np.uint8)[:: 1 + _PIXELS].tolist()
    for row, label in enumerate(labels):
        offset = row * (1 + _PIXELS) + 1
        key = f"{name}#{row:05d}"
        found.items.append(Item(key, file.path, _PIXELS, offset, label=label, split=split, layout=CHW))


def _png(file: SourceFile) -> Item:
    match = _PNG.search(file.path)
    assert match is not None
    key, label = file.path[match.start() :].lstrip("/"), CLASSES.index(match["label"])
    return Item(key, file.path, file.size, label=label, split=match["split"])
