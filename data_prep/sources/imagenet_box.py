"""`imagenet_box`: ImageNet as Chrabaszcz et al. (2017) made it smaller (squashed, Pillow's box filter), in batches.

Pixels are in planes (R, G, B). Labels are the devkit's numbers less one, *not* alphabetical. Their validation images
are the test split. Not comparable with imagenet_oord: one model scores 3.69 on that one's 32 pixels, 3.43 on these.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from data_prep.config import DataConfig
from data_prep.sources.batches import read_batch
from data_prep.sources.downsampled import choose_side
from data_prep.sources.item import CHW, Index, Item, Listing, SourceFile
from data_prep.sources.listing import open_file

LAYOUT = """train_data_batch_1.npz ... train_data_batch_10.npz and val_data.npz, or the same without suffix (pickles;
read without running code); of 8, 16, 32 or 64 pixels"""
COUNT = "1,281,167 train and 50,000 test (val) images"

_NAME = re.compile(r"(?:^|/)(?:train_data(?:_batch_\d+)?|val_data)(?:\.npz)?$")


def recognise(listing: Listing, config: DataConfig) -> str | None:
    return next((f"it has {file.path}" for file in used(listing, config)), None)


def used(listing: Listing, config: DataConfig) -> Iterator[SourceFile]:
    return (file for file in listing.files if _NAME.search(file.path))


def index(listing: Listing, config: DataConfig) -> Index:
    batches = {}
    for file in used(listing, config):
        with open_file(listing, file.path) as stream:
            batches[file.path] = read_batch(stream, path=file.path)
    sides = {path: batch.side for path, batch in batches.items()}
    found = Index(side=choose_side(sides, config, source="imagenet_box"))
    found.num_skipped = len(listing.files) - len(batches)
    for path, batch in batches.items():
        if batch.side != found.side:
            continue
        name = path.rpartition("/")[2].removesuffix(".npz")
        size = 3 * batch.side * batch.side
        for row in range(batch.num_rows):
            label = None if batch.labels is None else batch.labels[row] - 1  # they count from 1
            place = dict(block=0, row=row) if batch.offset is None else dict(offset=batch.offset + row * size)
            split = "train" if name.startswith("train") else "test"
            found.items.append(Item(f"{name}#{row:06d}", path, size, label=label, split=split, layout=CHW, **place))
    return found
