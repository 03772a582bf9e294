"""`cifar10`: CIFAR-10 as binary batches, Python pickles or folders of PNG; its Parquet is read by hf_parquet.

Binary: records of one label byte and 3,072 pixel bytes in planes (R, G, B). Labels are the official numbers, 0 airplane
to 9 truck. The official test images are the test split; validation comes from train.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from data_prep import images
from data_prep.config import DataConfig
from data_prep.sources import imagenet_box
from data_prep.sources.base import Index, Item, Listing, SourceFile, UnusableSource

LAYOUT = """data_batch_1.bin ... data_batch_5.bin and test_batch.bin, or the Python version without .bin, or
train/airplane/*.png ... and test/; Hugging Face's Parquet is source hf_parquet"""
COUNT = "50,000 train and 10,000 test images of 32 pixels"

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

read_block = imagenet_box.read_block

_BATCH = re.compile(r"(?:^|/)(?P<name>(?:data|test)_batch(?:_\d)?)(?P<kind>\.bin)?$")
_PNG = re.compile(rf"(?:^|/)(?P<split>train|test)/(?P<label>{'|'.join(CLASSES)})/[^/]+$")
_RECORD = 1 + 3 * 32 * 32  # bytes


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
        if match["kind"]:
            batch = _binary(listing.read(file.path), file.path)
        else:
            with listing.open(file.path) as stream:
                batch = imagenet_box.read_batch(stream, path=file.path)
        name = match["name"]
        split = "test" if name.startswith("test") else "train"
        imagenet_box.add_rows(found, batch, file.path, f"{name}#%05d", split)
    return found


def _binary(data: bytes, path: str) -> imagenet_box.Batch:
    if not data or len(data) % _RECORD:
        message = f"{path}: {len(data)} bytes are not a whole number of records of {_RECORD} bytes"
        raise UnusableSource("corrupt_source_file", message)
    labels = np.frombuffer(data, np.uint8)[::_RECORD].tolist()
    return imagenet_box.Batch(len(labels), 32, labels, offset=1, stride=_RECORD)


def _png(file: SourceFile) -> Item:
    match = _PNG.search(file.path)
    assert match is not None
    key, label = file.path[match.start() :].lstrip("/"), CLASSES.index(match["label"])
    return Item(key, file.path, file.size, label=label, split=match["split"])
