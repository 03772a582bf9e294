"""`celebahq`: CelebA-HQ's 30,000 faces: numbered files of 1024 or fewer pixels, or Glow's TFRecords.

Files: one folder of 00000.jpg ... or 0.png ..., such as `data256x256/`. Splits: split=glow (the first 3,000 by number
are test), celeba_partition, file. TFRecords: `train-r08-s-0000-of-0120.tfrecords` and `validation-r08-...`, pixels of
2 ** r, raw; their validation records are the test split. The literature agrees on the sizes of splits only, so the
manifest's hashes of the keys say which one a figure is about.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from data_prep.config import DataConfig
from data_prep.sources import tfrecord
from data_prep.sources.downsampled import choose_side
from data_prep.sources.item import HWC, Index, Item, Listing, SourceFile, UnusableSource
from data_prep.sources.listing import is_image_name, open_file
from data_prep.sources.names import check_series, split_of

LAYOUT = """one folder of numbered images (data256x256/00001.jpg, 1024 px PNG or JPEG), with split glow, file or
celeba_partition (needs list_eval_partition.txt, CelebA-HQ-to-CelebA-mapping.txt); or Glow's
*-r08-s-0000-of-0120.tfrecords; Hugging Face's Parquet is source hf_parquet"""
COUNT = "30,000 images: 27,000 train and 3,000 test"

_RECORDS = re.compile(r"-r(?P<log2>\d\d)-s-\d+-of-\d+\.tfrecords?$")
_NUMBERED = re.compile(r"^(?P<folder>|.*/)(?P<number>\d+)\.\w+$")
_FOLDER = re.compile(r"(?:^|/)(?:data\d+x\d+|CelebA-HQ-img|celeba[-_]?hq[^/]*)/", re.IGNORECASE)
_WHOLE = 30_000


def recognise(listing: Listing, config: DataConfig) -> str | None:
    records = next((file.path for file in listing.files if _RECORDS.search(file.path)), None)
    if records is not None:
        return f"it has {records}"
    numbered = [file.path for file in listing.files if is_image_name(file.path) and _NUMBERED.match(file.path)]
    if len(numbered) == _WHOLE:
        return f"it has {_WHOLE} numbered images"
    return next((f"it has {path}" for path in numbered if _FOLDER.search(path)), None)


def used(listing: Listing, config: DataConfig) -> Iterator[SourceFile]:
    records = [file for file in listing.files if _RECORDS.search(file.path)]
    return iter(records or [f for f in listing.files if is_image_name(f.path) and _NUMBERED.match(f.path)])


def index(listing: Listing, config: DataConfig) -> Index:
    records = {file.path: match for file in listing.files if (match := _RECORDS.search(file.path))}
    return _index_records(listing, config, records) if records else _index_files(listing, config)


def _index_files(listing: Listing, config: DataConfig) -> Index:
    found, seen = Index(), {}
    for file in used(listing, config):
        number = int(_NUMBERED.match(file.path)["number"])
        item = Item(file.path.rpartition("/")[2], file.path, file.size)
        if number in seen:
            found.reject(item, "duplicate_name", f"{seen[number]} has the same number; it is used")
            continue
        seen[number] = file.path
        found.items.append(item)
    found.num_skipped = len(listing.files) - len(found.items) - len(found.rejected)
    return found


def _index_records(listing: Listing, config: DataConfig, matches: dict[str, re.Match]) -> Index:
    sides = {path: 1 << int(match["log2"]) for path, match in matches.items()}
    side = choose_side(sides, config, source="celebahq")
    found = Index(num_skipped=len(listing.files) - len(matches))
    paths = [path for path in sorted(matches) if sides[path] == side]
    check_series(path.rpartition(".")[0] for path in paths)
    number = {"train": 0, "test": 0, None: 0}
    for path in paths:
        split = split_of(path, config)
        split = "test" if split == "valid" else split
        with open_file(listing, path) as stream:
            for offset, record in tfrecord.records(stream, path=path):
                key = f"{split or 'image'}/{number[split]:06d}"
                number[split] += 1
                _add_record(found, Item(key, path, 0, split=split), record, offset, side)
    return found


def _add_record(found: Index, item: Item, record: bytes, offset: int, side: int) -> None:
    try:
        features = tfrecord.features(record)
        shape, ((begin, size),) = list(features["shape"]), features["data"]
    except (KeyError, ValueError, TypeError) as error:
        raise UnusableSource("corrupt_source_file", f"{item.path}: record at byte {offset}: {error!r}") from None
    label = features.get("label") or [None]
    item = Item(item.key, item.path, size, offset + begin, split=item.split, label=label[0], layout=HWC)
    if shape != [side, side, 3] or size != side * side * 3:
        found.reject(item, "shape_mismatch", f"its shape is {shape}, its data has {size} bytes")
    else:
        found.items.append(item)
