"""`cifar10`: CIFAR-10 as binary batches or Python pickles; its Parquet is read by hf_parquet, PNG files by folder.

Binary: records of one label byte and 3,072 pixel bytes in planes (R, G, B). Labels are the official numbers, 0 airplane
to 9 truck. The official test images are the test split; validation comes from train.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from data_prep.config import DataConfig
from data_prep.sources import imagenet_box
from data_prep.sources.base import FileEntry, Index, Listing, UnusableSource

LAYOUT = """data_batch_1.bin ... data_batch_5.bin and test_batch.bin, or the Python version without .bin;
train/airplane/*.png ... and test/ are source folder, Hugging Face's Parquet is source hf_parquet"""
COUNT = "50,000 train and 10,000 test images of 32 pixels"

read_block = imagenet_box.read_block

_BATCH = re.compile(r"(?:^|/)(?P<name>(?:data|test)_batch(?:_\d)?)(?P<kind>\.bin)?$")
_RECORD = 1 + 3 * 32 * 32  # bytes


def used(listing: Listing, config: DataConfig) -> Iterator[FileEntry]:
    return (file for file in listing.others if _BATCH.search(file.path))


def index(listing: Listing, config: DataConfig) -> Index:
    found = Index()
    for file in listing.files:
        match = _BATCH.search(file.path)
        assert match is not None
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
    return imagenet_box.Batch(32, len(labels), labels, offset=1, stride=_RECORD)
