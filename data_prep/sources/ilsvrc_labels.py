"""Labels of ImageNet's validation images, from whichever list comes with them. Labels are alphabetical class numbers.

The devkit's own numbers (ILSVRC2012_validation_ground_truth.txt: one number from 1 to 1000 on each line, in the order
of the file names) are *not* in alphabetical order of the synsets; its meta.mat says which synset each number means.
"""

from __future__ import annotations

import csv
import io
import re
import tarfile
import zlib
from collections.abc import Callable

from data_prep.sources.item import Listing, UnusableSource, as_text
from data_prep.sources.listing import read_file

SYNSET = re.compile(r"n\d{8}")

_TRUTH, _META = "ILSVRC2012_validation_ground_truth.txt", "meta.mat"
_DEVKIT = re.compile(r"ILSVRC2012_devkit_t12\.(tar\.gz|tgz|tar)$")
_SYNSET_LINES = "imagenet_2012_validation_synset_labels.txt"
_KAGGLE = "LOC_val_solution.csv"
_PAIRS = re.compile(r"^(val|val_map|val_labels)\.(txt|csv)$")

LISTS = f"{_KAGGLE}, the devkit ({_TRUTH} and {_META}, or its tar.gz), {_SYNSET_LINES}, val.txt or val_labels.csv"


def is_label_file(path: str) -> bool:
    name = path.rpartition("/")[2]
    # ImageSets/CLS-LOC/val.txt of Kaggle's archive numbers the images; it has no labels.
    pairs = _PAIRS.match(name) and "ImageSets/" not in path
    return bool(name in (_TRUTH, _META, _SYNSET_LINES, _KAGGLE) or _DEVKIT.search(name) or pairs)


def val_labels(listing: Listing, names: list[str], *, train_synsets: set[str]) -> dict[str, int]:
    """{file name: label}; empty when the listing has no list of labels.

    `names`: file names of the validation images. `train_synsets` with those of the list are the classes. Raises
    UnusableSource: label_count_mismatch; bad_label; missing_file for devkit numbers without meta.mat.
    """
    paths = {path.rpartition("/")[2]: path for path in map(_path, listing.files) if is_label_file(path)}
    by_number = sorted(names)
    if _KAGGLE in paths:
        lines = list(csv.reader(io.StringIO(_text(listing, paths[_KAGGLE]))))[1:]  # ImageId,Prediction
        pairs = {f"{line[0]}.JPEG": line[1].split()[0] for line in lines if len(line) == 2 and line[1].split()}
        where = paths[_KAGGLE]
        found = _by_name(pairs, names, where)
    elif _TRUTH in paths or any(map(_DEVKIT.search, paths)):
        truth, meta, where = _devkit(listing, paths)
        numbers = _by_order(as_text(truth, path=where).split(), by_number, where)
        synset_of = _devkit_synsets(meta)
        unknown = set(numbers.values()) - set(synset_of)
        if unknown:
            raise UnusableSource("bad_label", f"{where}: {sorted(unknown)[0]!r} is none of its classes")
        found = {name: synset_of[number] for name, number in numbers.items()}
    elif _SYNSET_LINES in paths:
        where = paths[_SYNSET_LINES]
        found = _by_order(_text(listing, where).split(), by_number, where)
    else:
        where = next((path for name, path in sorted(paths.items()) if _PAIRS.match(name)), None)
        if where is None:
            return {}
        lines = [re.split(r"[\s,]+", line.strip()) for line in _text(listing, where).splitlines()]
        pairs = {line[0].rpartition("/")[2]: line[1] for line in lines if len(line) > 1 and line[0].endswith(".JPEG")}
        found = _by_name(pairs, names, where)
    return _numbers(found, train_synsets, where)


def _text(listing: Listing, path: str) -> str:
    return as_text(read_file(listing, path), path=path)


def _path(file: object) -> str:
    return file.path


def _by_order(values: list[str], names: list[str], where: str) -> dict[str, str]:
    if len(values) != len(names):
        message = f"{where} has {len(values)} labels; there are {len(names)} validation images"
        raise UnusableSource("label_count_mismatch", message)
    return dict(zip(names, values, strict=True))


def _by_name(pairs: dict[str, str], names: list[str], where: str) -> dict[str, str]:
    missing = [name for name in names if name not in pairs]
    if missing or len(pairs) != len(names):
        first = f"; it has none for {missing[0]}" if missing else ""
        message = f"{where} has {len(pairs)} labels; there are {len(names)} validation images{first}"
        raise UnusableSource("label_count_mismatch", message)
    return {name: pairs[name] for name in names}


def _numbers(found: dict[str, str], train_synsets: set[str], where: str) -> dict[str, int]:
    """Synsets to alphabetical numbers; lists that hold such numbers already (Caffe's val.txt) are taken as they are."""
    if all(value.isdigit() for value in found.values()):
        return {name: int(value) for name, value in found.items()}
    bad = next((value for value in found.values() if not SYNSET.fullmatch(value)), None)
    if bad is not None:
        raise UnusableSource("bad_label", f"{where}: {bad!r} among the labels of the validation images is no synset")
    number = class_numbers(train_synsets | set(found.values()))
    return {name: number[value] for name, value in found.items()}


def class_numbers(synsets: set[str]) -> dict[str, int]:
    return {synset: i for i, synset in enumerate(sorted(synsets))}


def _devkit(listing: Listing, paths: dict[str, str]) -> tuple[bytes, Callable[[], bytes], str]:
    """(ground truth, a function that gives meta.mat, name for people); meta.mat is read when the counts agree."""
    archive = next((path for name, path in paths.items() if _DEVKIT.search(name)), None)

    def member(name: str) -> bytes:
        if name in paths:
            return read_file(listing, paths[name])
        if archive is not None:
            data = io.BytesIO(read_file(listing, archive))
            try:
                with tarfile.open(fileobj=data) as tar:
                    for info in tar:
                        if info.isreg() and info.name.rpartition("/")[2] == name:
                            return tar.extractfile(info).read()
            except (tarfile.TarError, EOFError, OSError, zlib.error) as error:  # all of it is in memory
                raise UnusableSource("corrupt_source_file", f"{archive}: {' '.join(str(error).split())}") from None
        message = (
            f"{name}: the devkit's numbers are no labels without it (or leave the devkit out: labels are null then)"
        )
        raise UnusableSource("missing_file", message)

    return member(_TRUTH), lambda: member(_META), paths.get(_TRUTH, archive)


def _devkit_synsets(meta: Callable[[], bytes]) -> dict[str, str]:
    """Devkit number, as text -> synset, of the classes that have images (inner nodes of the tree have none)."""
    import scipy.io  # only here: the devkit alone needs MATLAB's format

    data = io.BytesIO(meta())
    try:
        rows = scipy.io.loadmat(data, squeeze_me=True)["synsets"]
        return {str(int(row["ILSVRC2012_ID"])): str(row["WNID"]) for row in rows if int(row["num_children"]) == 0}
    except Exception as error:  # a damaged file fails in many ways
        raise UnusableSource("corrupt_source_file", f"{_META}: {type(error).__name__}: {error}") from None
