"""Images drawn by several workers: chunks of a fixed size, each a file on storage when it is done.

Which worker draws a chunk, in which order and after how many restarts changes nothing: an image's randomness follows
from its own seed, and the batch that it is drawn in is part of the configuration. A chunk's Parquet file appears whole,
after its PNGs: a later start of the same attempt finds what is done and draws the rest.

    images/<key>.png                                     8 bits a channel, for the eye
    res=<R>/bits=<B>/samples-00000-of-00004.parquet      columns as in data_prep/parquet.py, values of B bits
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from data_prep.files import Store, open_store
from data_prep.parquet import ShardWriter, pixels, schema, shard_path
from pipelines.dag.node import NodeOutput
from pipelines.nodes.pictures import display, png
from pipelines.nodes.trained import load_stage_configs, load_stages
from spn.config import SPNConfig
from spn.model import SPN
from spn.ordering import image_to_slices
from spn.sampling import Decode, rows_to_sample, sample_chain

if TYPE_CHECKING:
    from pipelines.config import NodeResources, ResourcesConfig
    from pipelines.dag.progress import Reporter

SPLIT, IMAGES = "samples", "images"
CHUNKS = "chunks.json"
MOST_ON_GPU = 1024  # images drawn at once
ON_CPU = 16  # one thread computes a chunk, and what is finished of it is kept only when all of it is


@dataclass(frozen=True)
class Chunk:
    """Images that are drawn in one batch."""

    index: int
    keys: tuple[str, ...]  # names of the images
    seeds: tuple[int | str, ...]  # what seeds each one's draws
    given: np.ndarray | None = None  # uint8 [n, h, w, 3]: what each starts from


@dataclass(frozen=True)
class Job:
    """What every worker needs to know. Picklable."""

    inputs: Mapping[str, NodeOutput]  # of the train nodes
    stages: Sequence[str]  # to be run, in order
    seed: int
    temperature: Mapping[str, float]
    top_p: Mapping[str, float | None]
    out: str  # folder of the images
    num_chunks: int
    use: str | None = None  # of `given`: size_upscale, depth_upscale, complete; None: nothing is given
    precision: str = "float32"  # of the networks on a GPU
    num_given: int = 0  # complete: slices in subscale order, or rows of a baseline


def chunks_of(
    keys: Sequence[str], seeds: Sequence[int | str], *, size: int, given: np.ndarray | None = None
) -> list[Chunk]:
    """Consecutive chunks of `size` images; the last may be smaller."""
    return [
        Chunk(
            index=start // size,
            keys=tuple(keys[start : start + size]),
            seeds=tuple(seeds[start : start + size]),
            given=None if given is None else given[start : start + size],
        )
        for start in range(0, len(keys), size)
    ]


def chunk_size(batch_size: int | None, *, num_images: int, store: Store, resources: NodeResources) -> int:
    """Images drawn at once: as configured, as an earlier start of the attempt recorded in `store`, or chosen now."""
    if batch_size is not None:
        return batch_size
    if store.exists(CHUNKS):
        return json.loads(store.read_bytes(CHUNKS))["batch_size"]
    size = min(-(-num_images // resources.num_workers), MOST_ON_GPU) if resources.use_gpu else ON_CPU
    store.write_text(CHUNKS, json.dumps({"batch_size": size, "device": resources.device}, indent=1))
    return size


def draw(job: Job, chunks: Sequence[Chunk], *, resources: ResourcesConfig, progress: Reporter) -> None:
    """Draws the chunks that are not on storage yet, side by side on resources.num_workers Ray actors.

    A worker that dies is started anew and its chunk drawn again, resources.max_failures times; then Ray's error is
    raised. What is finished stays on storage either way.
    """
    import ray

    store, configs = open_store(job.out), load_stage_configs(job.inputs, job.stages)
    store.remove_temporaries()
    pixels_each = pixels_to_draw(job, configs)
    total = pixels_each * sum(len(chunk.keys) for chunk in chunks)
    present = {entry.path for entry in store.walk()}
    todo = [chunk for chunk in chunks if not _is_finished(store, job, configs, chunk, present)]
    before = total - pixels_each * sum(len(chunk.keys) for chunk in todo)
    progress.update(before, total, unit="pixels")
    options = {
        "num_cpus": resources.cpus_per_worker,
        "num_gpus": resources.gpus_per_worker if resources.use_gpu else 0,
        "max_restarts": resources.max_failures,
        "max_task_retries": resources.max_failures,
    }
    worker_class = ray.remote(**options)(DrawingWorker)
    num_workers = min(resources.num_workers, len(todo))
    workers = [worker_class.remote(job, progress, total, device=resources.device) for _ in range(num_workers)]
    try:
        idle, running, waiting = list(workers), {}, list(reversed(todo))
        while waiting or running:
            while waiting and idle:
                worker, chunk = idle.pop(), waiting.pop()
                running[worker.draw.remote(chunk)] = worker, chunk
            (reference,), _ = ray.wait(list(running), num_returns=1)
            worker, chunk = running.pop(reference)
            ray.get(reference)  # raises what went wrong there
            idle.append(worker)
            _part(progress, chunk).update(pixels_each * len(chunk.keys), total, unit="pixels")
    finally:
        for worker in workers:
            ray.kill(worker)


class DrawingWorker:
    """A process that keeps the networks loaded and draws one chunk after the other."""

    def __init__(self, job: Job, progress: Reporter, total: int, *, device: str) -> None:
        torch.set_num_threads(1)  # sums are the same whatever CPUs the worker was given
        self.job, self.progress, self.total, self.device = job, progress, total, device
        self.decoders: dict[Any, Decode] = {}  # of chunks of `batch` images
        self.batch = 0

    @functools.cached_property
    def models(self) -> dict[str, SPN]:
        """Loaded by the first chunk: what fails in a constructor is to Ray a lost worker, which is started anew."""
        return load_stages(self.job.inputs, self.job.stages, device=self.device)

    @property
    def configs(self) -> dict[str, SPNConfig]:
        return {stage: model.config for stage, model in self.models.items()}

    def draw(self, chunk: Chunk) -> None:
        """Draws a chunk and writes its files, the Parquet file last."""
        job, part, done, configs = self.job, _part(self.progress, chunk), 0, self.configs
        if len(chunk.keys) != self.batch:  # the last chunk may be smaller; decoders of two sizes may not fit
            self.decoders.clear()
            self.batch = len(chunk.keys)
        pixels_a_row = len(chunk.keys) * next(iter(configs.values())).slice_size

        def on_row() -> None:
            nonlocal done
            done += pixels_a_row
            part.update(done, self.total, unit="pixels")

        known = sample_chain(
            self.models,
            seed=job.seed,
            images=chunk.seeds,
            temperature=job.temperature,
            top_p=job.top_p,
            precision=job.precision,
            decoders=self.decoders,
            **self._start(chunk),
            on_row=on_row,
        )
        values = list(known.values())[-1].permute(0, 2, 3, 1).to(torch.uint8).cpu().numpy()
        write_chunk(open_store(job.out), chunk, values, num_bits=_depth(configs), num_chunks=job.num_chunks)

    def _start(self, chunk: Chunk) -> dict[str, Any]:
        """What `sample_chain` is given."""
        if chunk.given is None:
            return {}
        given = torch.from_numpy(chunk.given.copy()).to(self.device).permute(0, 3, 1, 2).long()
        if self.job.use == "depth_upscale":
            return {"image": given}
        if self.job.use == "size_upscale":
            return {"slices": given[:, None]}
        assert self.job.use == "complete", self.job.use
        if self.job.stages[0] == "baseline":
            return {"rows": given[:, :, : self.job.num_given]}
        factor = self.configs["size_upscale"].scaling_factor
        return {"slices": image_to_slices(given, factor)[:, : self.job.num_given]}


def pixels_to_draw(job: Job, configs: Mapping[str, SPNConfig]) -> int:
    """Pixel steps of one image: one for each pixel of each slice of each stage that is run."""
    in_slices = job.use == "size_upscale" or (job.use == "complete" and job.stages[0] != "baseline")
    known = 1 if job.use == "size_upscale" else job.num_given
    rows = rows_to_sample(list(configs.values()), num_known_slices=known if in_slices else 0)
    return rows * next(iter(configs.values())).slice_size


def write_chunk(store: Store, chunk: Chunk, values: np.ndarray, *, num_bits: int, num_chunks: int) -> None:
    """values: uint8 [n, R, R, 3] of `num_bits` bits."""
    for key, picture in zip(chunk.keys, display(values, num_bits=num_bits), strict=True):
        store.write_bytes(f"{IMAGES}/{key}.png", png(picture))
    side, num = values.shape[1], len(values)
    names = schema(side).remove(schema(side).get_field_index("px"))
    columns = [list(chunk.keys), [None] * num, [side] * num, [side] * num, [0] * num]  # key, label, sides, flags
    with ShardWriter(
        store,
        split=SPLIT,
        index=chunk.index,
        num_shards=num_chunks,
        resolutions=[side],
        bits=[num_bits],
        row_group_rows=None,
    ) as writer:
        table = pa.table([pa.array(c, f.type) for c, f in zip(columns, names, strict=True)], schema=names)
        # The writer takes 8 bits, of which it keeps the high ones.
        writer.append(table, {side: values << (8 - num_bits)})


def read_chunks(store: Store, configs: Mapping[str, SPNConfig], *, num_chunks: int, most: int) -> np.ndarray:
    """uint8 [N, R, R, 3] of the last stage's depth: the first `most` images."""
    found: list[np.ndarray] = []
    for index in range(num_chunks):
        if sum(map(len, found)) < most:
            found.append(pixels(_read(store, _path(configs, index, num_chunks))))
    return np.concatenate(found)[:most]


def _is_finished(store: Store, job: Job, configs: Mapping[str, SPNConfig], chunk: Chunk, present: set[str]) -> bool:
    path = _path(configs, chunk.index, job.num_chunks)
    if not {path, *(f"{IMAGES}/{key}.png" for key in chunk.keys)} <= present:
        return False
    try:
        table = _read(store, path)
    except (OSError, pa.ArrowInvalid):  # damaged, as its checksums say
        return False
    return table.column("key").to_pylist() == list(chunk.keys)


def _read(store: Store, path: str) -> pa.Table:
    with store.filesystem.open_input_file(store.path(path)) as stream:
        return pq.ParquetFile(stream, page_checksum_verification=True).read(use_threads=False)


def _path(configs: Mapping[str, SPNConfig], index: int, num_chunks: int) -> str:
    side = next(iter(configs.values())).image_size
    return shard_path(resolution=side, bits=_depth(configs), split=SPLIT, index=index, num_shards=num_chunks)


def _depth(configs: Mapping[str, SPNConfig]) -> int:
    """Bits of the images when the last stage has run."""
    last = list(configs.values())[-1]
    return last.num_given_bits + last.num_bits


def _part(progress: Reporter, chunk: Chunk) -> Reporter:
    return progress.part(f"chunk {chunk.index}")
