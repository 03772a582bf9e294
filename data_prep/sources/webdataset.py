"""`webdataset`: tars of samples, files of one sample with the same name up to a dot, side by side.

    000123.jpg  000123.seg.png  000123.cls      an image, another one, and a class; or 000123.json with "cls" or "label"

What follows the name is a field, here `seg.png`. Of several images in a sample, `image_field` is used, or the one
whose field is a suffix alone. A name may have dots: `seg.png` is a field where 000123 is the name of other files too,
or where many samples have it. A key is tar and sample.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from data_prep.config import DataConfig
from data_prep.sources.base import (
    FileEntry,
    Index,
    Item,
    Listing,
    Unplannable,
    UnusableSource,
    check_series,
    is_image_name,
    splits_of,
)
from data_prep.sources.tars import Member, add_member, is_side_file, members

LAYOUT = "train-000000.tar, ... with 000123.jpg and maybe 000123.cls or .json side by side"
COUNT = "any"

_JSON_KEYS = ("cls", "label")
_MIN_SHARE = 0.1  # of the files with a suffix, those with a field that is a field of samples


@dataclass
class _Sample:
    key: str
    members: dict[str, Member] = field(default_factory=dict)  # by field, in the archive's order
    label: Any = None

    def images(self) -> dict[str, Member]:
        return {field: member for field, member in self.members.items() if is_image_name(f".{field}")}


def recognise(listing: Listing, config: DataConfig) -> str | None:
    """The first tar that begins with an image; one that is damaged before it is named when all are read."""
    for file in used(listing, config):
        names: list[str] = []
        with contextlib.suppress(UnusableSource), listing.open(file.path) as stream:
            for member in itertools.islice(members(stream, path=file.path), 8):
                names += [] if is_side_file(member.name) else [member.name]
        if any(map(is_image_name, names)):
            return f"{file.path} has {' and '.join(names[:2])}"
    return None


def used(listing: Listing, config: DataConfig) -> Iterator[FileEntry]:
    return (file for file in listing.others if file.path.lower().endswith(".tar"))


def index(listing: Listing, config: DataConfig) -> Index:
    found, of_tar = Index(), {}
    check_series(file.path[: -len(".tar")] for file in listing.files)
    for path in (file.path for file in listing.files):
        with listing.open(path) as stream:
            of_tar[path] = _samples(found, stream, path)
    paths = found.with_images({path: any(s.images() for s in samples) for path, samples in of_tar.items()})
    split_of = splits_of(paths, config, found)
    samples = [(path, split, sample) for path, split in split_of.items() for sample in of_tar[path]]
    chosen = _chosen([sample for _, _, sample in samples], config, found)
    for path, split, sample in samples:
        images = sample.images()
        member = next((images[field] for field in images if field in chosen), None)
        found.skipped["other_image_of_a_sample"] += len(images) - (member is not None)
        problem = None
        if member is None:
            problem = "missing_image", f"the sample has only {', '.join(sorted(sample.members))}"
            member = next(iter(sample.members.values()))
        item = Item(sample.key, path, member.size, member.offset, label=sample.label, split=split)
        add_member(found, member, item, problem)
    return found


def _samples(found: Index, stream: pa.NativeFile, path: str) -> list[_Sample]:
    every = list(members(stream, path=path, wants=lambda name: name.endswith((".cls", ".json"))))
    own = [member for member in every if not is_side_file(member.name)]
    found.skipped["not_a_data_file"] += len(every) - len(own)
    cut = _cutter([member.name for member in own])
    by_name: dict[str, list[_Sample]] = {}  # several where a name is there again
    for member in own:
        name, field = cut(member.name)
        same = by_name.setdefault(name, [_Sample(f"{path}/{name}")])
        if field in same[-1].members:
            same.append(_Sample(f"{path}/{name}"))
        sample = same[-1]
        if member.data is not None and field in ("cls", "json"):
            sample.label = _label(field, member.data, sample.label)
        sample.members[field] = replace(member, data=None)
    return [sample for same in by_name.values() for sample in same]


def _cutter(names: list[str]) -> Callable[[str], tuple[str, str]]:
    """A function: name of a member -> (sample, field)."""
    stems = {name.rpartition(".")[0] for name in names}
    cuts = {name: [(name[:i], name[i + 1 :].lower()) for i, c in enumerate(name) if c == "."] for name in names}
    times = Counter(rest for found in cuts.values() for _, rest in found)

    def cut(name: str) -> tuple[str, str]:
        for stem, rest in cuts[name]:
            *words, suffix = rest.split(".")
            often = times[rest] > max(1, _MIN_SHARE * times[suffix])
            if all(word[:1].isalpha() for word in words) and "/" not in rest and (not words or stem in stems or often):
                return stem, rest
        return name, ""

    return cut


def _chosen(samples: list[_Sample], config: DataConfig, found: Index) -> list[str]:
    """The fields of the images that are used. Raises Unplannable."""
    each = [list(sample.images()) for sample in samples]
    fields = [field for field, _ in Counter(field for fields in each for field in fields).most_common()]
    if config.image_field is None and all(len(fields) <= 1 for fields in each):
        return fields
    chosen = [field for field in fields if field == config.image_field or (not config.image_field and "." not in field)]
    if not chosen or any(sum(field in chosen for field in fields) > 1 for fields in each):
        what = f"the images of a sample are {', '.join(fields[:9])}"
        raise Unplannable(f"image_field is {config.image_field!r}; {what}: set image_field to one of them")
    found.note = f"; of {', '.join(fields[:9])} in a sample, {' or '.join(chosen)} is used"
    return chosen


def _label(name: str, data: bytes, known: Any) -> Any:
    """The class as a number; the known one where a description has none; text where it is no number."""
    try:
        fields = json.loads(data) if name == "json" else {"cls": data.decode().strip()}
        given = next((fields[key] for key in _JSON_KEYS if key in fields), None)
        return known if given is None else int(str(given))
    except (ValueError, TypeError, RecursionError):
        return "no number"
