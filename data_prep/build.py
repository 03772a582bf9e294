"""Builds a dataset as a Ray Data job: plan, one task for each shard, commit. A killed build resumes.

    lock     one build at a time in a folder
    job      a Ray Data dataset with one row for each shard of the plan; a task decodes each photo once, writes all
             resolutions and depths of its shard, then a sidecar in _build/ that lists them
    commit   the driver checks the whole, then writes manifest.json in one put

A shard whose sidecar matches the plan and whose files have its checksums is not written again.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import pickle
import platform
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray.data

from data_prep import images, sources
from data_prep.config import DataConfig
from data_prep.files import Store, UserError, open_store
from data_prep.lock import Lock
from data_prep.parquet import (
    MANIFEST,
    NAMES,
    QUARANTINE,
    QUARANTINE_SCHEMA,
    Manifest,
    Shard,
    draws,
    keys_hash,
    pixels,
    read_shard,
    write_files,
)
from data_prep.plan import (
    PIXELS,
    Plan,
    Row,
    ShardPlan,
    make_plan,
    max_quarantine_fraction,
    quarantine_record,
    refuse_small,
)
from data_prep.ray_compat import WaitForAutoscaler
from data_prep.sources.base import CHW, ENCODED, Item, Reader, Unplannable, UnusableSource
from data_prep.verify import readme

LOCK = "build.lock"
_PLAN = "_build/plan.json"
_GRACE_SEC = 5.0  # a task whose driver was killed ends within seconds
# Pixels that a task holds at once: few, so that it writes to the disk steadily; more where rows share what is read, so
# that it is read and decoded seldom.
_CHUNK_BYTES = 22_000_000
_SHARED_CHUNK_BYTES = 256_000_000


def build(
    config: DataConfig,
    *,
    out: str,
    progress: Callable[[int, int, int], None],
    listing_hash: str | None = None,
    num_cpus_per_task: float = 1,
) -> Manifest:
    """Builds the dataset in the folder `out` (path or URI) and returns its manifest. Ray must be initialised.

    `progress(done, total, quarantined)` is called as shards finish: images done and planned, photos quarantined.
    Raises Unplannable, also for files that are not those of `listing_hash` (sources.identify), UnusableSource (mostly
    before anything is written; nothing is committed), and UserError for an `out` that holds another finished dataset,
    or where another build is at work.
    """
    source = sources.find(config)
    if listing_hash not in (None, source.listing_hash):
        where = f"root is {source.root!r}; its files, as {platform.node()} sees them,"
        what = "are not those that the launch listed: start again, or name a folder that all machines share"
        raise Unplannable(f"{where} {what}")
    plan = make_plan(config, source)
    store = open_store(out)
    with Lock(store, file=LOCK, grace_sec=_GRACE_SEC) as lock:
        _prepare_folder(store, plan)
        sidecars: list[dict] = []
        bad = {record["key"]: record for record in plan.quarantine}
        total = sum(len(shard.rows) for shard in plan.shards)
        done = 0
        progress(done, total, len(plan.rejected) + len(bad))
        _check_share(plan, store, bad)
        for sidecar in _run(plan, out, num_cpus_per_task):
            sidecars.append(sidecar)
            bad |= {record["key"]: record for record in sidecar["quarantine"]}
            done += sidecar["num_planned"]
            progress(done, total, len(plan.rejected) + len(bad))
            _check_share(plan, store, bad)
        _write_quarantine(store, _records(plan, bad))
        manifest = _manifest(plan, store, sidecars, bad)
        store.remove_temporaries()
        store.write_text("README.md", readme(manifest))
        lock.check()
        store.write_text(MANIFEST, manifest.to_json())
    return manifest


def _prepare_folder(store: Store, plan: Plan) -> None:
    """Refuses another finished dataset, clears what another unfinished build left."""
    if store.exists(MANIFEST):
        if Manifest.from_json(store.read_bytes(MANIFEST).decode()).plan_hash != plan.hash:
            raise UserError(
                f"{store.uri} holds a finished dataset of another plan, or made with other versions of libraries: "
                "choose another folder (in a pipeline: --rerun prepare_data)"
            )
    elif store.exists(_PLAN) and json.loads(store.read_bytes(_PLAN))["plan_hash"] != plan.hash:
        for entry in store.list():
            if entry.path == "_build" or entry.path.startswith("res="):
                store.delete(entry.path)
    store.remove_temporaries()
    store.write_text(_PLAN, json.dumps({"plan_hash": plan.hash}) + "\n")


def _run(plan: Plan, out: str, num_cpus_per_task: float) -> Iterator[dict]:
    """Sidecars as their shards finish. Raises UnusableSource."""
    tasks = [{"shard": pickle.dumps(shard)} for shard in plan.shards]
    dataset = ray.data.from_items(tasks, override_num_blocks=len(tasks))
    dataset.context.enable_progress_bars = False  # the caller shows progress
    dataset.context.execution_options.preserve_order = False
    dataset.context.custom_execution_callback_classes.append(WaitForAutoscaler)
    write = functools.partial(
        write_shard, config=plan.config, source=(plan.source.name, plan.source.root), out=out, plan_hash=plan.hash
    )
    for row in dataset.map(write, num_cpus=num_cpus_per_task).iter_rows():
        if row.get("unusable"):
            raise UnusableSource(*json.loads(row["unusable"]))
        yield json.loads(row["sidecar"])


def _check_share(plan: Plan, store: Store, bad: dict[str, dict]) -> None:
    """Raises UnusableSource as soon as the share is exceeded, before the rest of a large source is decoded."""
    records = _records(plan, bad)
    num_photos = len(plan.source.items) + len(plan.rejected)
    allowed = max_quarantine_fraction(plan.config)
    if len(records) <= allowed * num_photos:
        return
    _write_quarantine(store, records)  # says which photos, and why
    reasons = ", ".join(f"{count} {reason}" for reason, count in _reasons(records).items())
    first = "; ".join(f"{record['key']}: {record['message']}" for record in records[:3])
    raise UnusableSource(
        "too_many_unusable",
        f"{len(records)} of {num_photos} photos cannot be used, more than max_quarantine_fraction "
        f"{allowed} allows: {reasons} ({first}); all of them are in {QUARANTINE}; "
        "with a larger fraction the build resumes",
    )


def _records(plan: Plan, bad: dict[str, dict]) -> list[dict]:
    """All records of the quarantine in a fixed order. `bad` has those of items, by key."""
    return sorted([*plan.rejected, *bad.values()], key=lambda record: (record["key"], record["offset"] or 0))


def _reasons(records: list[dict]) -> dict[str, int]:
    return dict(sorted(Counter(record["reason"] for record in records).items()))


def _write_quarantine(store: Store, records: list[dict]) -> None:
    with store.writing([QUARANTINE]) as streams:
        pq.write_table(pa.Table.from_pylist(records, schema=QUARANTINE_SCHEMA), streams[QUARANTINE])


def _manifest(plan: Plan, store: Store, sidecars: list[dict], bad: dict[str, dict]) -> Manifest:
    config = plan.config
    assert len(sidecars) == len(plan.shards), f"{len(sidecars)} of {len(plan.shards)} shards came back"
    num_images = dict.fromkeys((s.split for s in plan.shards), 0)
    conversions: Counter = Counter()
    for sidecar in sidecars:
        num_images[sidecar["split"]] += sidecar["num_rows"]
        conversions.update(sidecar["conversions"])
    keys: dict[str, list[str]] = {split: [] for split in num_images}
    for shard in plan.shards:
        keys[shard.split] += [row.key for row in shard.rows if row.item.key not in bad]
    for split, count in num_images.items():
        assert count == len(keys[split]), f"{split}: {count} rows written, {len(keys[split])} planned and usable"
        if not count:
            message = f"no photo of the {split} split can be used: {_reasons(_records(plan, bad))}"
            raise UnusableSource("too_many_unusable", message)
    shards = [Shard(**fields) for sidecar in sidecars for fields in sidecar["files"]]
    # Each task has counted and hashed what it wrote; here the driver looks at all files once more.
    if problems := store.problems({shard.path: {"bytes": shard.bytes} for shard in shards}):
        raise OSError(f"{store.uri}: {problems[0]}; start the build again")
    _check_known(config, store, shards)
    return Manifest(
        dataset=config.dataset,
        plan_hash=plan.hash,
        config={name: value for name, value in asdict(config).items() if name != "root"},  # the listing_hash says more
        source=dict(
            name=plan.source.name,
            recognised_by=plan.source.why,
            built_in=config.root is None,
            listing_hash=plan.source.listing_hash,
            skipped=plan.source.skipped,
            splits=plan.splits,
        ),
        num_images=num_images,
        split_hashes={split: keys_hash(keys[split]) for split in num_images},
        quarantine=_reasons(_records(plan, bad)),
        quarantine_sha256=store.sha256(QUARANTINE),
        conversions=dict(sorted(conversions.items())),
        shards=sorted(shards, key=lambda shard: shard.path),
        versions=plan.versions,
    )


def _check_known(config: DataConfig, store: Store, shards: list[Shard]) -> None:
    """A published set is known by its pixels, in whatever files they come. Raises UnusableSource."""
    side, known = PIXELS.get(config.dataset, (None, 0))
    whole = [shard for shard in shards if (shard.resolution, shard.bits) == (side, 8)]
    if config.check_counts and whole:
        arrays = (pixels(read_shard(store.uri, shard, columns=["px"])) for shard in whole)
        found = (hashlib.blake2b(px.tobytes(), digest_size=8).digest() for array in arrays for px in array)
        if sum(int.from_bytes(digest) for digest in found) % 2**64 != known:
            message = f"these are not the images of {config.dataset}: choose another id, such as {config.dataset}-like"
            raise UnusableSource("other_pixels", message)


# ---- one shard, in a Ray task --------------------------------------------------------------------------------------


def write_shard(task: dict, *, config: DataConfig, source: tuple[str, str], out: str, plan_hash: str) -> dict:
    """Writes a shard at every resolution and depth; `source`: name and root. Returns {"sidecar": its text}.

    For a source that turns out unusable it returns {"unusable": reason and message as JSON}: Ray Data passes on only
    the text of an error.
    """
    shard: ShardPlan = pickle.loads(task["shard"])  # of this build's own driver
    store = open_store(out)
    sidecar_path = f"_build/{shard.split}-{shard.index:05d}-of-{shard.num_shards:05d}.json"
    if store.exists(sidecar_path):
        text = store.read_bytes(sidecar_path).decode()
        if _is_intact(store, json.loads(text), plan_hash):
            return {"sidecar": text}
    quarantine, conversions = list[dict](), Counter[str]()
    try:
        with Reader(*source) as reader:
            files = write_files(
                store,
                _chunks(config, reader, shard.rows, quarantine, conversions),
                split=shard.split,
                index=shard.index,
                num_shards=shard.num_shards,
                resolutions=config.resolutions,
                bits=config.bits,
                row_group_rows=config.row_group_rows,
            )
    except UnusableSource as error:
        return {"unusable": json.dumps([error.reason, error.message])}
    sidecar = dict(
        plan_hash=plan_hash,
        split=shard.split,
        num_planned=len(shard.rows),
        num_rows=files[0].num_rows,
        conversions=dict(sorted(conversions.items())),
        quarantine=quarantine,
        files=[asdict(file) for file in files],
    )
    text = json.dumps(sidecar, indent=1) + "\n"
    store.write_text(sidecar_path, text)
    return {"sidecar": text}


def _is_intact(store: Store, sidecar: dict, plan_hash: str) -> bool:
    try:
        same = (store.sha256(shard["path"]) == shard["sha256"] for shard in sidecar["files"])
        return sidecar["plan_hash"] == plan_hash and all(same)
    except FileNotFoundError:
        return False


def _chunks(
    config: DataConfig, reader: Reader, rows: list[Row], quarantine: list[dict], conversions: Counter[str]
) -> Iterator[tuple[pa.Table, dict[int, np.ndarray]]]:
    """Rows in plan order as (columns but px, resolution -> pixels), a bounded number at a time, in memory that is used
    again for the next ones.

    Inside a chunk items are read in the order of their places in the source, each once for all its tiles. What cannot
    be used is added to `quarantine`, what was converted is counted in `conversions`.
    """
    bytes_per_row = sum(resolution**2 * 3 for resolution in config.resolutions)
    shared = any(row.top is not None or row.item.block is not None for row in rows)
    rows_per_chunk = min(len(rows), max(1, (_SHARED_CHUNK_BYTES if shared else _CHUNK_BYTES) // bytes_per_row))
    memory = {r: np.empty((rows_per_chunk, r, r, 3), np.uint8) for r in config.resolutions}  # of every chunk in turn
    for begin in range(0, len(rows), rows_per_chunk):
        chunk = rows[begin : begin + rows_per_chunk]
        squares = {resolution: array[: len(chunk)] for resolution, array in memory.items()}
        names: dict[int, dict] = {}  # by place in the chunk, of what can be used
        for places in _by_item(chunk):
            item = chunk[places[0]].item
            try:
                decoded = _decode(config, reader, item)
                height, width = decoded.pixels.shape[:2]
                refuse_small(min(height, width), config.min_side)
            except images.UnusableImage as error:
                quarantine.append(quarantine_record(reader, item, error.reason, error.message))
                continue
            for place in places:
                row = chunk[place]
                square = _square(config, row, decoded.pixels)
                upscaled = ("upscaled",) if min(square.shape[:2]) < max(config.resolutions) else ()
                flags = images.flags_of(decoded.conversions + upscaled)
                conversions.update(images.conversions_of(flags))
                names[place] = dict(key=row.key, label=item.label, orig_h=height, orig_w=width, flags=flags)
                resized = images.resize_squares(square, config.resolutions, profile=config.round_profile)
                for resolution, array in squares.items():
                    array[place] = resized[resolution]
        used = sorted(names)
        if len(used) < len(chunk):
            squares = {resolution: array[used] for resolution, array in squares.items()}
        yield pa.Table.from_pylist([names[place] for place in used], schema=NAMES), squares


def _by_item(rows: list[Row]) -> list[list[int]]:
    """Places in `rows`, those of one item together, items in the order of the source's bytes."""

    def where(place: int) -> tuple:
        item = rows[place].item
        return item.path, item.block or 0, item.row or 0, item.offset or 0

    by_item = itertools.groupby(sorted(range(len(rows)), key=where), key=where)
    return [list(places) for _, places in by_item]


def _decode(config: DataConfig, reader: Reader, item: Item) -> images.Decoded:
    data = reader.read(item)
    if item.layout != ENCODED:
        return images.from_raw(data, planar=item.layout == CHW)
    return images.decode(
        data, profile=config.decode_profile, name=item.key, exif=config.exif, strict_jpeg=config.strict_jpeg
    )


def _square(config: DataConfig, row: Row, pixels: np.ndarray) -> np.ndarray:
    """What becomes the training image: a square, or, to be squashed, all of it. A view."""
    if row.top is not None and row.left is not None:
        assert config.tile_size is not None
        return pixels[row.top : row.top + config.tile_size, row.left : row.left + config.tile_size]
    if config.crop == "random":
        height, width = pixels.shape[:2]
        side = min(height, width)
        (place,) = draws(config.seed, [row.key], [0], purpose="crop", high=max(height, width) - side + 1)
        return pixels[place : place + side] if height > width else pixels[:, place : place + side]
    return pixels if config.crop == "squash" else images.center_crop(pixels)
