"""Where raw images are: finds the files of a source, in a fixed order, and says what it left out.

A source is one folder with images at any depth. The key of a photo is its path below that folder, with forward slashes.
"""

from __future__ import annotations

import hashlib
import json
import pathlib
from collections import Counter
from dataclasses import dataclass

import pyarrow.fs as pafs

from data_prep import files
from data_prep.config import DataConfig

BUILT_IN_PHOTOS = pathlib.Path(__file__).parent / "demo_photos"

_IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")  # TIFF: to be named, not skipped
_SIDE_FILES = ("thumbs.db", "desktop.ini")


@dataclass(frozen=True)
class SourceFile:
    key: str  # path below the root, forward slashes
    size: int  # bytes
    mtime_ns: int  # 0 where the filesystem has none


@dataclass(frozen=True)
class Source:
    root: str  # path or URI, as in the config
    photos: list[SourceFile]  # sorted by key
    skipped: dict[str, int]  # files that are no images, counted by reason
    listing_hash: str  # hex; changes when a photo comes, goes or changes

    def read(self, key: str) -> bytes:
        return read_photo(self.root, key)


def root_of(config: DataConfig) -> str:
    return str(BUILT_IN_PHOTOS) if config.root is None else config.root


def read_photo(root: str, key: str) -> bytes:
    filesystem, folder = files.locate(root)
    return files.read_bytes(filesystem, f"{folder}/{key}")


def listing_hash(config: DataConfig) -> str:
    """Hash of names, sizes and modification times: what a cache of this source's data set must depend on."""
    return find(config).listing_hash


def find(config: DataConfig) -> Source:
    """Lists the source. Raises ValueError in one line when the folder is missing or has no images."""
    root = root_of(config)
    try:
        filesystem, folder = files.locate(root)
        info = filesystem.get_file_info(folder)
        is_folder = info.type == pafs.FileType.Directory
        found = filesystem.get_file_info(pafs.FileSelector(folder, recursive=True)) if is_folder else []
    except (OSError, ValueError) as error:  # pyarrow's errors for bad URIs and unreachable stores derive from these
        raise ValueError(f"root is {root!r}; it cannot be opened: {' '.join(str(error).split())}") from None
    if not is_folder:
        what = "there is no such folder" if info.type == pafs.FileType.NotFound else "it is not a folder"
        raise ValueError(f"root is {root!r}; {what}")
    photos, skipped = [], Counter()
    for info in found:
        if info.type != pafs.FileType.File:
            continue
        key = info.path[len(folder.rstrip("/")) + 1 :]
        reason = _skip_reason(key)
        if reason:
            skipped[reason] += 1
        else:
            photos.append(SourceFile(key, info.size, info.mtime_ns or 0))
    if not photos:
        raise ValueError(f"root is {root!r}; the folder has no images ({', '.join(_IMAGE_SUFFIXES)})")
    photos.sort(key=lambda photo: photo.key)
    return Source(root, photos, dict(sorted(skipped.items())), _hash(photos, root, by_content=config.root is None))


def _skip_reason(key: str) -> str | None:
    parts = key.lower().split("/")
    name = parts[-1]
    if name in _SIDE_FILES or "__macosx" in parts[:-1]:
        return "system_file"
    if any(part.startswith(".") for part in parts):
        return "hidden"
    if not name.endswith(_IMAGE_SUFFIXES):
        return "not_an_image_name"
    return None


def _hash(photos: list[SourceFile], root: str, *, by_content: bool) -> str:
    """The built-in photos go by content: their times change with each checkout or upload of this package."""
    sha = hashlib.sha256()
    for photo in photos:
        third = hashlib.sha256(read_photo(root, photo.key)).hexdigest() if by_content else photo.mtime_ns
        sha.update(json.dumps([photo.key, photo.size, third]).encode() + b"\n")
    return sha.hexdigest()
