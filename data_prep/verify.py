"""What a finished data set is, in words, and whether it is whole: `verify("runs/demo/.../dataset") == []`.

Checked are the size and sha256 of every file that the manifest lists, Parquet's page checksums, columns, row groups,
the number of rows, the same keys in every resolution and depth, each key once, the keys' hash, that every lower depth
is 8-bit pixels >> (8 - bits), and the counts of conversions and of the quarantine. A row group is held at a time.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from data_prep import images, parquet
from data_prep.config import SPLITS
from data_prep.files import open_store, printable
from data_prep.parquet import (
    QUARANTINE,
    QUARANTINE_SCHEMA,
    Dataset,
    Manifest,
    Shard,
    UnsafeTable,
    keys_hash,
    open_dataset,
    open_parquet,
    pixels,
    schema,
)


@dataclass
class _Part:
    """What was found in the files of one shard of a split, all resolutions and depths of it."""

    split: str
    keys: list[str] = field(default_factory=list)
    conversions: Counter = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)


def verify(uri: str, *, progress: Callable[[int, int], None] = lambda done, total: None) -> list[str]:
    """What is wrong, one line each. `progress(done, total)` counts images, each with all its resolutions and depths.

    Shards are read side by side, one thread a core. Raises ValueError where there is no finished data set.
    """
    dataset = open_dataset(uri)
    manifest = dataset.manifest
    problems = _quarantine_problems(dataset)
    parts: dict[str, list[_Part]] = {split: [] for split in manifest.num_images}
    groups: dict[tuple[str, int], list[Shard]] = {}  # files that hold the same rows
    for shard in manifest.shards:
        groups.setdefault((shard.split, shard.index), []).append(shard)
    done, total = 0, sum(manifest.num_images.values())
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        for part in pool.map(lambda name: _verify_part(dataset, groups[name]), sorted(groups)):  # in row order
            parts[part.split].append(part)
            problems += part.problems
            done += len(part.keys)
            progress(done, total)
    if problems:
        return problems  # what is summed up below would only repeat them
    for split, found in parts.items():
        keys, expected = [key for part in found for key in part.keys], manifest.num_images[split]
        wrong = {
            f"{len(keys)} rows, {expected} in the manifest": len(keys) != expected,
            "a key occurs twice": len(set(keys)) != len(keys),
            "the keys are not those of the manifest": keys_hash(keys) != manifest.split_hashes[split],
        }
        problems += [f"{split}: {text}" for text, is_so in wrong.items() if is_so]
    conversions = sum((part.conversions for found in parts.values() for part in found), Counter())
    if dict(sorted(conversions.items())) != manifest.conversions:
        problems.append(f"conversions: the flags say {dict(conversions)}, the manifest {manifest.conversions}")
    return problems


def _quarantine_problems(dataset: Dataset) -> list[str]:
    store = open_store(dataset.uri)
    if problems := store.problems({QUARANTINE: {"sha256": dataset.manifest.quarantine_sha256}}, hashed=True):
        return list(problems)
    with store.open(QUARANTINE) as stream:
        try:
            table = open_parquet(stream, name=QUARANTINE).read()
        except UnsafeTable as error:
            return [str(error)]
    if not table.schema.equals(QUARANTINE_SCHEMA):
        return [f"{QUARANTINE}: columns are {table.schema.names} of other types than this version writes"]
    reasons = dict(sorted(Counter(table.column("reason").to_pylist()).items()))
    if reasons != dataset.manifest.quarantine:
        return [f"{QUARANTINE}: reasons are {reasons}, {dataset.manifest.quarantine} in the manifest"]
    return []


def _verify_part(dataset: Dataset, shards: list[Shard]) -> _Part:
    part, files = _Part(shards[0].split), {shard.path: asdict(shard) for shard in shards}
    part.problems += open_store(dataset.uri).problems(files, hashed=True)
    config = dataset.manifest.config
    wanted = {(resolution, bits) for resolution in config["resolutions"] for bits in config["bits"]}
    for resolution, bits in sorted(wanted - {(shard.resolution, shard.bits) for shard in shards}):
        part.problems.append(f"{shards[0].split} {shards[0].index}: the manifest has no file of {resolution=}, {bits=}")
    if part.problems:
        return part
    first = None  # columns but px
    for resolution in config["resolutions"]:
        depths = sorted((s for s in shards if s.resolution == resolution), key=lambda shard: -shard.bits)
        names = _verify_depths(dataset, depths, part.problems)
        if names is not None and first is not None and not names.equals(first):
            part.problems.append(f"{depths[0].path}: keys, labels, sizes or flags differ from another resolution")
        first = names if first is None else first
    if first is not None:
        part.keys = first.column("key").to_pylist()
        for flags, count in Counter(first.column("flags").to_pylist()).items():
            part.conversions.update(dict.fromkeys(images.conversions_of(flags), count))
    return part


def _verify_depths(dataset: Dataset, shards: list[Shard], problems: list[str]) -> pa.Table | None:
    """Compares all depths of one shard at one resolution, 8 bits first; returns its columns but px."""
    store = open_store(dataset.uri)
    with ExitStack() as stack:
        readers = []
        for shard in shards:
            stream = stack.enter_context(store.open(shard.path))
            try:
                readers.append(open_parquet(stream, name=shard.path, page_checksum_verification=True))
            except UnsafeTable as error:
                problems.append(str(error))
                return None
        if found := [text for shard, reader in zip(shards, readers, strict=True) for text in _layout(shard, reader)]:
            problems += found
            return None
        wrong: dict[str, None] = {}  # each once, however many row groups it concerns
        groups = []
        for group in range(len(shards[0].row_group_rows)):
            names: pa.Table | None = None
            full = np.empty(0)
            for shard, reader in zip(shards, readers, strict=True):
                table = reader.read_row_group(group, use_threads=False)
                px, table = pixels(table), table.drop_columns(["px"])
                names, full = (table, px) if names is None else (names, full)
                if not table.equals(names):
                    wrong[f"{shard.path}: keys, labels, sizes or flags differ from another depth"] = None
                if not np.array_equal(px, parquet.low_depth(full, shard.bits)):
                    wrong[f"{shard.path}: pixels are not the 8-bit ones >> {8 - shard.bits}"] = None
            groups.append(names)
        problems += wrong
        return pa.concat_tables(groups)


def _layout(shard: Shard, reader: pq.ParquetFile) -> Iterator[str]:
    if not reader.schema_arrow.equals(schema(shard.resolution)):
        yield f"{shard.path}: columns are {reader.schema_arrow.names} of other types than this version writes"
    rows = [reader.metadata.row_group(i).num_rows for i in range(reader.num_row_groups)]
    if rows != shard.row_group_rows:
        yield f"{shard.path}: row groups have {rows} rows, {shard.row_group_rows} in the manifest"


# ---- in words --------------------------------------------------------------------------------------------------------


def readme(manifest: Manifest) -> str:
    """The dataset's own README.md: what a person needs to know before using or citing it."""
    config = manifest.config
    chosen = ("resolutions", "bits", "crop", "tile_size", "tile_stride", "profile", "exif", "min_side", "seed")
    lines = "\n".join(f"- {line}" for line in counts(manifest))
    licence = "The images keep the licences of their source."
    if manifest.source["built_in"]:
        licence = "Authors and licences of the photos: data_prep/demo_photos/ATTRIBUTION.md. Some are CC BY 4.0."
    return f"""# {manifest.dataset}

RGB images as Parquet, `res=<R>/bits=<B>/<split>-*.parquet`, the same rows in the same order for every resolution R and
bit depth B. Depth B holds the B most significant bits of each 8-bit value.

{lines}
- made with {", ".join(f"{name}={config[name]}" for name in chosen if config[name] is not None)}
- plan {manifest.plan_hash}, {", ".join(f"{name} {version}" for name, version in manifest.versions.items())}

Columns: `key` (path in the source), `label` (null where unknown), `orig_h`, `orig_w` (of the whole photo), `flags` (one
bit for each conversion), `px` (R x R x 3 bytes, row by row). Photos that could not be used are in `quarantine.parquet`,
with the reason. `manifest.json` lists every file with its checksum. No photo is in two splits. {licence}
"""


def counts(manifest: Manifest) -> list[str]:
    """Source, images by split, conversions, quarantine, skipped files."""
    found = manifest.num_images
    images = ", ".join(f"{found[split]} {split}" for split in SPLITS if split in found)
    lines = [
        f"source: {manifest.source['name']} ({manifest.source['recognised_by']})",
        f"splits: {manifest.source['splits']}",
        f"dataset {manifest.dataset}: {sum(manifest.num_images.values())} images ({images})",
    ]
    kinds = {"converted": manifest.conversions, "quarantined": manifest.quarantine}
    for what, found in (kinds | {"skipped": manifest.source["skipped"]}).items():
        names = ", ".join(f"{count} {name}" for name, count in found.items())
        lines.append(f"{what}: {sum(found.values())}" + (f" ({names})" if names else ""))
    return [printable(line) for line in lines]  # of a dataset that may come from others
