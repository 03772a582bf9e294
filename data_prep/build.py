"""Builds a data set as a Ray Data job: plan, one task for each shard, commit. Can be killed and started again.

    claim    one build at a time in a folder
    job      a Ray Data dataset with one row for each shard of the plan; a task writes all resolutions and depths of
             its shard, then a sidecar in _build/ that says so
    commit   the driver checks the whole, then writes manifest.json in one put

A shard whose sidecar matches the plan and whose files have its checksums is not written again.
"""

from __future__ import annotations

import functools
import json
import pickle
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import ray.data
from ray.data._internal.execution.execution_callback import ExecutionCallback

from data_prep import card, files, known, sources
from data_prep.claim import Claim
from data_prep.config import DataConfig
from data_prep.parquet import MANIFEST, QUARANTINE, QUARANTINE_SCHEMA, Manifest, Shard, keys_hash
from data_prep.plan import Plan, config_dict, make_plan, num_duplicates
from data_prep.shard import write_shard
from data_prep.sources.item import UnusableSource

CLAIM = "build.lock"
_ANSWER_SEC = 1.0  # a cluster may have no machine yet, or the one that answers is just starting


class TooManyUnusable(Exception):
    """More photos than max_quarantine_fraction allows could not be used; nothing was committed."""


def build(
    config: DataConfig,
    *,
    out: str,
    progress: Callable[[int, int, int], None],
    num_cpus_per_task: float = 1,
) -> Manifest:
    """Builds the data set in the folder `out` (path or URI) and returns its manifest. Ray must be initialised.

    `progress(done, total, quarantined)` is called as shards finish: images done and planned, photos quarantined.
    Raises Unplannable, UnusableSource (mostly before anything is written), TooManyUnusable, ValueError for an `out`
    that holds another finished data set, and claim.FolderInUse while another build is at work in `out`.
    """
    plan = make_plan(config, sources.find(config))
    filesystem, folder = files.locate(out)
    with Claim(filesystem, f"{folder}/{CLAIM}") as claim:
        _prepare_folder(filesystem, folder, out, plan)
        sidecars: list[dict] = []
        bad = {record["key"]: record for record in plan.quarantine}
        total = sum(len(shard.rows) for shard in plan.shards)
        done = 0
        progress(done, total, len(plan.rejected) + len(bad))
        try:
            _check_share(config, plan, bad)
            for sidecar in _run(config, plan, out, num_cpus_per_task):
                sidecars.append(sidecar)
                bad |= {record["key"]: record for record in sidecar["quarantine"]}
                done += sidecar["num_planned"]
                progress(done, total, len(plan.rejected) + len(bad))
                _check_share(config, plan, bad)
        except TooManyUnusable:
            _write_quarantine(filesystem, folder, _records(plan, bad))  # says which photos, and why
            raise
        _write_quarantine(filesystem, folder, _records(plan, bad))
        manifest = _manifest(config, plan, filesystem, folder, sidecars, bad)
        files.remove_temporaries(filesystem, folder)
        files.put_bytes(filesystem, f"{folder}/README.md", card.text(manifest).encode())
        claim.check()
        files.put_bytes(filesystem, f"{folder}/{MANIFEST}", manifest.to_json().encode())
    return manifest


def _prepare_folder(filesystem: pafs.FileSystem, folder: str, out: str, plan: Plan) -> None:
    """Refuses another finished data set, clears what another unfinished build left."""
    plan_path = f"{folder}/_build/plan.json"
    if files.exists(filesystem, f"{folder}/{MANIFEST}"):
        found = Manifest.from_json(files.read_bytes(filesystem, f"{folder}/{MANIFEST}").decode())
        if found.plan_hash != plan.hash:
            raise ValueError(f"out is {out!r}; it holds a finished data set of another plan, choose another folder")
    elif files.exists(filesystem, plan_path):
        if json.loads(files.read_bytes(filesystem, plan_path))["plan_hash"] != plan.hash:
            for info in filesystem.get_file_info(pafs.FileSelector(folder)):
                if info.base_name == "_build" or info.base_name.startswith("res="):
                    filesystem.delete_dir(info.path)
    files.remove_temporaries(filesystem, folder)
    shards = [{"split": s.split, "index": s.index, "num_rows": len(s.rows)} for s in plan.shards]
    text = json.dumps({"plan_hash": plan.hash, "shards": shards}, indent=1) + "\n"
    files.put_bytes(filesystem, plan_path, text.encode())


def _run(config: DataConfig, plan: Plan, out: str, num_cpus_per_task: float) -> Iterator[dict]:
    """Sidecars as their shards finish. Raises UnusableSource."""
    tasks = [{"shard": pickle.dumps(shard)} for shard in plan.shards]
    dataset = ray.data.from_items(tasks, override_num_blocks=len(tasks))
    dataset.context.enable_progress_bars = False  # the caller shows progress
    dataset.context.execution_options.preserve_order = False
    dataset.context.custom_execution_callback_classes.append(KnowsItsCores)
    write = functools.partial(write_shard, config=config, root=plan.source.root, out=out, plan_hash=plan.hash)
    for row in dataset.map(write, num_cpus=num_cpus_per_task).iter_rows():
        if row.get("unusable"):
            raise UnusableSource(*json.loads(row["unusable"]))
        yield json.loads(row["sidecar"])


class KnowsItsCores(ExecutionCallback):
    """Makes a Ray Data job begin on all its cores.

    Ray Data asks for the job's share of the cluster without waiting for the answer, takes it that there is no core,
    starts a single task all the same and asks again after a second. The answer takes some milliseconds.
    """

    def before_execution_starts(self, executor: Any) -> None:
        autoscaler = getattr(executor, "_cluster_autoscaler", None)  # not public: without it, only the second is lost
        until = time.monotonic() + _ANSWER_SEC
        while autoscaler is not None and not autoscaler.get_total_resources().cpu and time.monotonic() < until:
            time.sleep(0.002)


def _check_share(config: DataConfig, plan: Plan, bad: dict[str, dict]) -> None:
    """As soon as the share is passed for certain: no need to decode the rest of a large source."""
    records = _records(plan, bad)
    num_photos = len(plan.source.items) + len(plan.rejected)
    allowed = known.max_quarantine_fraction(config)
    if len(records) <= allowed * num_photos:
        return
    reasons = ", ".join(f"{count} {reason}" for reason, count in _reasons(records).items())
    first = "; ".join(f"{record['key']}: {record['message']}" for record in records[:3])
    raise TooManyUnusable(
        f"{len(records)} of {num_photos} photos cannot be used, more than max_quarantine_fraction "
        f"{allowed} allows: {reasons} ({first}); all of them are in {QUARANTINE}; with more allowed it goes on"
    )


def _records(plan: Plan, bad: dict[str, dict]) -> list[dict]:
    """All records of the quarantine in a fixed order. `bad` has those of items, by key."""
    return sorted([*plan.rejected, *bad.values()], key=lambda record: (record["key"], record["offset"] or 0))


def _reasons(records: list[dict]) -> dict[str, int]:
    return dict(sorted(Counter(record["reason"] for record in records).items()))


def _write_quarantine(filesystem: pafs.FileSystem, folder: str, records: list[dict]) -> None:
    with files.whole_file(filesystem, f"{folder}/{QUARANTINE}") as stream:
        pq.write_table(pa.Table.from_pylist(records, schema=QUARANTINE_SCHEMA), stream)


def _manifest(
    config: DataConfig,
    plan: Plan,
    filesystem: pafs.FileSystem,
    folder: str,
    sidecars: list[dict],
    bad: dict[str, dict],
) -> Manifest:
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
            raise TooManyUnusable(f"no photo of the {split} split can be used: {_reasons(_records(plan, bad))}")
    shards = [Shard(**fields) for sidecar in sidecars for fields in sidecar["files"]]
    _check_sizes(filesystem, folder, shards)
    return Manifest(
        dataset=config.dataset,
        plan_hash=plan.hash,
        config=config_dict(config),
        source=dict(
            name=plan.source.name,
            recognised_by=plan.source.why,
            built_in=config.root is None,
            listing_hash=plan.source.listing_hash,
            num_photos=len(plan.source.items),
            skipped=plan.source.skipped,
            duplicate_content=num_duplicates([plan.contents, *(sidecar["contents"] for sidecar in sidecars)]),
        ),
        num_images=num_images,
        num_photos={split: len(set(plan.photos[split]) - set(bad)) for split in num_images},
        split_hashes={split: keys_hash(keys[split]) for split in num_images},
        quarantine=_reasons(_records(plan, bad)),
        quarantine_sha256=files.digest(filesystem, f"{folder}/{QUARANTINE}")[1],
        conversions=dict(sorted(conversions.items())),
        shards=sorted(shards, key=lambda shard: shard.path),
        versions=plan.versions,
    )


def _check_sizes(filesystem: pafs.FileSystem, folder: str, shards: list[Shard]) -> None:
    """Each task has counted and hashed what it wrote; here all files are looked at once more, where readers will."""
    for shard, info in zip(shards, filesystem.get_file_info([f"{folder}/{s.path}" for s in shards]), strict=True):
        found = info.size if info.is_file else None
        if found != shard.bytes:
            raise OSError(f"{info.path} has {found} bytes, {shard.bytes} were written; start the build again")
