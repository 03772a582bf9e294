"""Lists what lies below a root: files in a fixed order, and a hash that changes when any of them does."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable

import pyarrow as pa
import pyarrow.fs as pafs

from data_prep import files
from data_prep.sources.item import Listing, SourceFile, Unplannable, readable

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")  # TIFF: to be named, not skipped

_SYSTEM_FILES = ("thumbs.db", "desktop.ini")


def list_files(root: str) -> Listing:
    """Raises Unplannable when the folder is missing, cannot be opened, or holds a link or name of no use.

    And OSError when its storage is away: the same listing may work in a moment.
    """
    try:
        filesystem, folder = files.locate(root)
        info = filesystem.get_file_info(folder)
        is_folder = info.type == pafs.FileType.Directory
        found = filesystem.get_file_info(pafs.FileSelector(folder, recursive=True)) if is_folder else []
        below = [(info.path, info) for info in found]
        folders = [path for path, info in below if info.type == pafs.FileType.Directory]
        lost = _lost_link(filesystem, [folder, *folders]) if is_folder else None
    except UnicodeDecodeError as error:
        raise Unplannable(f"root is {root!r}; {error.object!r} is no name in UTF-8: rename it") from None
    except (OSError, ValueError) as error:  # pyarrow's errors for bad URIs and stores derive from these
        if files.is_hiccup(error):
            raise
        raise Unplannable(f"root is {root!r}; it cannot be opened: {' '.join(str(error).split())}") from None
    if not is_folder:
        what = "there is no such folder" if info.type == pafs.FileType.NotFound else "it is not a folder"
        raise Unplannable(f"root is {root!r}; {what}")
    if lost is not None:  # maybe an image, which must not be missing without a word
        raise Unplannable(f"root is {root!r}; {lost} is a link to a file that is not there: mend or remove it")
    prefix = len(folder.rstrip("/")) + 1
    listed, num_hidden = [], 0
    for path, info in below:
        if info.type == pafs.FileType.Directory:
            continue
        path = path[prefix:]
        if is_hidden(path) or info.type != pafs.FileType.File:  # a pipe, a socket
            num_hidden += 1
        else:
            listed.append(SourceFile(path, info.size, info.mtime_ns or 0))
    return Listing(root, tuple(sorted(listed, key=lambda file: file.path)), num_hidden)


def _lost_link(filesystem: pafs.FileSystem, folders: Iterable[str]) -> str | None:
    """The first link in local folders to a file that is not there: pyarrow's listing says nothing of such."""
    if not isinstance(filesystem, pafs.LocalFileSystem):
        return None
    for folder in folders:
        with os.scandir(folder) as entries:
            lost = sorted(e.path for e in entries if e.is_symlink() and not os.path.exists(e.path))
        for path in lost:
            if not is_hidden(path[len(folder) + 1 :]):
                return path
    return None


def open_file(listing: Listing, path: str) -> pa.NativeFile:
    """A listed file, for reading at any place. Raises UnusableSource when it is gone or may not be read."""
    filesystem, folder = files.locate(listing.root)
    with readable(path):
        return filesystem.open_input_file(f"{folder}/{path}")


def read_file(listing: Listing, path: str) -> bytes:
    with open_file(listing, path) as stream:
        return stream.read()


def is_hidden(path: str) -> bool:
    """Is it one of the files that systems leave beside data (.DS_Store, ._photo.jpg, Thumbs.db, __MACOSX/...)?"""
    parts = path.lower().split("/")
    return (
        parts[-1] in _SYSTEM_FILES
        or "__macosx" in parts[:-1]
        or any(part.startswith(".") and part not in (".", "..") for part in parts)
    )


def is_image_name(path: str) -> bool:
    return path.lower().endswith(IMAGE_SUFFIXES)


def hash_of(root: str, listed: Iterable[SourceFile], *, by_content: bool) -> str:
    """Hash of paths, sizes and times; by content, where times say nothing (files that come with this package)."""
    filesystem, folder = files.locate(root)
    sha = hashlib.sha256()
    for file in listed:
        third = files.digest(filesystem, f"{folder}/{file.path}")[1] if by_content else file.mtime_ns
        sha.update(json.dumps([file.path, file.size, third]).encode() + b"\n")
    return sha.hexdigest()
