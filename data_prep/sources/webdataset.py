"""`webdataset`: tars of samples, files of one sample with the same name up to the first dot, side by side.

    000123.jpg  000123.cls      an image and its class as a number; or 000123.json with "cls" or "label"

Where any sample has a label, one without is an error of the source (missing_label). A key is tar and sample.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pyarrow as pa

from data_prep.config import DataConfig
from data_prep.sources.base import (
    UNUSED,
    Index,
    Item,
    Listing,
    SourceFile,
    UnusableSource,
    check_series,
    is_image_name,
    split_of,
)
from data_prep.sources.tars import Member, add_member, is_side_file, members

LAYOUT = "train-000000.tar, ... with 000123.jpg and maybe 000123.cls or .json side by side"
COUNT = "any"

_LABELS = ("cls", "json")
_JSON_KEYS = ("cls", "label")


@dataclass
class _Sample:
    key: str
    first: Member  # stands for a sample without an image
    image: Member | None = None
    label: int | None = None
    has_label: bool = False
    problem: tuple[str, str] | None = None
    names: set[str] = field(default_factory=set)


def recognise(listing: Listing, config: DataConfig) -> str | None:
    """A tar whose first members are files of one sample: the same name, an image and something else.

    The first tar decides that has as many members; one that is damaged before them is named when all are read.
    """
    for file in used(listing, config):
        names = _first_names(listing, file.path)
        if len(names) < 2:
            continue
        stems = [_stem(name) for name in names]
        if len(set(names)) < 2 or stems[0] != stems[1] or not any(map(is_image_name, names)):
            return None
        return f"{file.path} has {names[0]} and {names[1]} side by side"
    return None


def _first_names(listing: Listing, path: str) -> list[str]:
    """Of the first two members; fewer where the tar ends or is damaged."""
    names: list[str] = []
    try:
        with listing.open(path) as stream:
            for member in members(stream, path=path, allow_truncated=True):
                names.append(member.name)
                if len(names) == 2:
                    break
    except UnusableSource:
        pass
    return names


def used(listing: Listing, config: DataConfig) -> Iterator[SourceFile]:
    return (file for file in listing.files if file.path.endswith(".tar"))


def index(listing: Listing, config: DataConfig) -> Index:
    found, samples = Index(), []
    paths = [file.path for file in listing.files]
    check_series(path.removesuffix(".tar") for path in paths)
    for path in paths:
        split = split_of(path, config)
        if split == UNUSED:
            found.num_skipped += 1
            continue
        with listing.open(path) as stream:
            samples += [(path, split, sample) for sample in _samples(found, stream, path, config)]
    labelled = any(sample.has_label for _, _, sample in samples)
    for path, split, sample in samples:
        _add(found, path, split, sample, labelled)
    return found


def _samples(found: Index, stream: pa.NativeFile, path: str, config: DataConfig) -> Iterator[_Sample]:
    sample: _Sample | None = None
    for member in members(stream, path=path, allow_truncated=config.allow_truncated_archive, wants=_is_label):
        if is_side_file(member.name):
            found.num_skipped += 1
            continue
        stem = _stem(member.name)
        suffix = member.name[len(stem) + 1 :].lower()
        if sample is None or sample.key != f"{path}/{stem}" or suffix in sample.names:
            if sample is not None:
                yield sample
            sample = _Sample(f"{path}/{stem}", replace(member, data=None))
        sample.names.add(suffix)
        if is_image_name(member.name):
            sample.image = member
        elif suffix in _LABELS and member.data is not None:
            _read_label(sample, suffix, member.data)
    if sample is not None:
        yield sample


def _is_label(name: str) -> bool:
    return name.rpartition(".")[2].lower() in _LABELS


def _read_label(sample: _Sample, suffix: str, data: bytes) -> None:
    try:
        if suffix == "json":
            fields = json.loads(data)
            value = next((fields[key] for key in _JSON_KEYS if key in fields), None)
            if value is None:
                return  # a description without a class
        else:
            value = data.decode().strip()
        sample.has_label = True
        sample.label = int(value)
    except (ValueError, TypeError, RecursionError):
        sample.has_label = True
        sample.problem = ("bad_label", f"its label is {data[:40]!r}, not a number")


def _add(found: Index, path: str, split: str | None, sample: _Sample, labelled: bool) -> None:
    member = sample.image or sample.first
    label = sample.label if sample.problem is None else None
    item = Item(sample.key, path, member.size, offset=member.offset, label=label, split=split)
    problem = sample.problem
    if sample.image is None:
        problem = "missing_image", f"the sample has only {', '.join(sorted(sample.names))}"
    elif labelled and not sample.has_label:
        problem = "missing_label", "the sample has no label, others have"
    add_member(found, member, item, problem=problem)
    found.seen.add(sample.key)  # the first sample counts, used or not


def _stem(name: str) -> str:
    folder, slash, base = name.rpartition("/")
    return folder + slash + base.partition(".")[0]
