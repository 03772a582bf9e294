"""Describes a finished dataset and checks that it is intact: `verify("runs/demo/.../dataset") == []`.

Checked are the size and sha256 of every file that the manifest lists, columns, the number of rows, the same keys in
every resolution and depth, each key once, the keys' hash, that every lower depth is 8-bit pixels >> (8 - bits), and the
counts of conversions. A row group is held at a time.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field

import numpy as np

from data_prep import images
from data_prep.config import SPLITS
from data_prep.files import open_store, printable
from data_prep.parquet import (
    NAMES,
    QUARANTINE,
    Dataset,
    Manifest,
    Shard,
    keys_hash,
    low_depth,
    open_dataset,
    pixels,
    read_shard,
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

    Shards are read side by side, one thread a core. Raises ValueError where there is no finished dataset.
    """
    dataset = open_dataset(uri)
    manifest = dataset.manifest
    quarantine = {QUARANTINE: {"sha256": manifest.quarantine_sha256}}
    problems = [*open_store(uri).problems(quarantine, hashed=True)]
    keys: dict[str, list[str]] = {split: [] for split in manifest.num_images}
    conversions: Counter[str] = Counter()
    groups: dict[tuple[str, int], list[Shard]] = {}  # files that hold the same rows
    for shard in manifest.shards:
        groups.setdefault((shard.split, shard.index), []).append(shard)
    done, total = 0, sum(manifest.num_images.values())
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        for part in pool.map(lambda name: _verify_part(dataset, groups[name]), sorted(groups)):  # in row order
            keys[part.split] += part.keys
            conversions += part.conversions
            problems += part.problems
            done += len(part.keys)
            progress(done, total)
    if problems:
        return problems  # what is summed up below would only repeat them
    for split, found in keys.items():
        expected = manifest.num_images[split]
        wrong = {
            f"{len(found)} rows, {expected} in the manifest": len(found) != expected,
            "a key occurs twice": len(set(found)) != len(found),
            "the keys are not those of the manifest": keys_hash(found) != manifest.split_hashes[split],
        }
        problems += [f"{split}: {text}" for text, is_so in wrong.items() if is_so]
    if dict(sorted(conversions.items())) != manifest.conversions:
        problems.append(f"conversions: the flags say {dict(conversions)}, the manifest {manifest.conversions}")
    return problems


def _verify_part(dataset: Dataset, shards: list[Shard]) -> _Part:
    shards = sorted(shards, key=lambda shard: (-shard.bits, shard.path))  # all others are compared with the first
    part, config, store = _Part(shards[0].split), dataset.manifest.config, open_store(dataset.uri)
    part.problems += store.problems({shard.path: asdict(shard) for shard in shards}, hashed=True)
    found = {(shard.resolution, shard.bits): shard for shard in shards}
    wanted = {(resolution, bits) for resolution in config["resolutions"] for bits in config["bits"]}
    for resolution, bits in sorted(wanted - found.keys()):
        part.problems.append(f"{shards[0].split} {shards[0].index}: the manifest has no file of {resolution=}, {bits=}")
    if part.problems:
        return part
    try:
        first, *others = (read_shard(dataset.uri, shard, columns=NAMES.names) for shard in shards)
        for shard, table in zip(shards[1:], others, strict=True):
            if not table.equals(first):
                part.problems.append(f"{shard.path}: keys, labels, sizes or flags differ from {shards[0].path}")
        wrong = [shard for shard in shards if not _is_low_depth(dataset.uri, shard, found[shard.resolution, 8])]
        part.problems += [f"{shard.path}: pixels are not the 8-bit ones >> {8 - shard.bits}" for shard in wrong]
    except ValueError as error:  # of a file that has other columns
        part.problems.append(str(error))
        return part
    part.keys = first.column("key").to_pylist()
    for flags, count in Counter(first.column("flags").to_pylist()).items():
        part.conversions.update(dict.fromkeys(images.conversions_of(flags), count))
    return part


def _is_low_depth(uri: str, shard: Shard, whole: Shard) -> bool:
    """Whether a shard's pixels are the most significant bits of those of 8 bits."""
    groups = range(len(shard.row_group_rows) if shard is not whole else 0)
    each = ([pixels(read_shard(uri, s, row_group=i, columns=["px"])) for s in (shard, whole)] for i in groups)
    return all(np.array_equal(low, low_depth(full, shard.bits)) for low, full in each)


# ---- in words --------------------------------------------------------------------------------------------------------


def readme(manifest: Manifest) -> str:
    """The dataset's own README.md: what a person needs to know before using or citing it."""
    config = manifest.config
    chosen = "resolutions bits crop tile_size tile_stride profile dct rounding exif min_side seed".split()
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
with the reason. `manifest.json` lists every file with its checksum. No file is in two splits; copies of a photo under
other names may be. {licence}
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
