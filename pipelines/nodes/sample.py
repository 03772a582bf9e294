"""sample: images drawn through the whole chain by several workers, and what each stage made of them side by side.

Which worker draws a chunk of images, in which order and after how many restarts changes nothing: an image's randomness
follows from its own seed, and the number of images drawn at once is recorded in the attempt before anything is drawn. A
chunk's Parquet file appears whole, after its PNGs: a later start of the same attempt finds what is done and draws the
rest. How a network draws stands in spn/sampling.py and spn/decoding/incremental.py.

    images/<key>.png                                     8 bits per channel, for the eye
    res=<R>/bits=<B>/samples-00000-of-00004.parquet      key, and px as in data_prep/parquet.py, of B bits
    chunks.json                                          {"batch_size": images drawn at once}
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from data_prep.files import Store, UserError, open_store
from data_prep.parquet import open_parquet, pixel_column, pixels, shard_path
from pipelines.config import SampleNodeConfig
from pipelines.dag.node import NodeContext, NodeOutput, NodeResult, Picture
from pipelines.dag.progress import Reporter
from pipelines.nodes.memory import halved, largest_that_fits, naming_full_memory
from pipelines.nodes.pictures import (
    after_stages,
    animation,
    depth_after,
    display,
    generation_frames,
    grid,
    png,
    side_by_side,
)
from pipelines.nodes.trained import checkpoint_step, load_stage_configs, load_stages
from pipelines.nodes.workers import ask, each, gang
from spn.config import SPNConfig
from spn.model import SPN
from spn.ordering import image_to_slices
from spn.sampling import Decode, rows_to_sample, sample_chain, sample_stage

FOLDER, CHAIN, ANIMATION, RECORD = "samples", "chain.png", "generation.webp", "samples.json"
NUM_SHOWN = 64  # images in the grids
SPLIT, IMAGES, CHUNKS = "samples", "images", "chunks.json"
MOST_ON_GPU = 1024  # drawn at once: the cost per image hardly falls beyond, and only whole chunks are kept
ON_CPU = 16  # one thread draws a chunk, and only whole chunks are kept


def run(context: NodeContext[SampleNodeConfig]) -> NodeResult:
    config = context.config
    store = open_store(context.out).sub(FOLDER)
    numbers = range(config.num_images)
    to_draw = Chunk(tuple(f"{number:05d}" for number in numbers), tuple(numbers))
    chunks = draw(Job(config, context.inputs, store.uri), to_draw, progress=context.progress)
    configs = load_stage_configs(context.inputs, config.stages)
    values = read_chunks(store, configs, chunks, most=NUM_SHOWN)
    pictures = after_stages(values, configs)
    grids = {stage: grid(images) for stage, images in pictures.items()}
    chain = side_by_side(list(pictures.values()))
    for stage, picture in grids.items():
        store.write_bytes(f"{stage}.png", png(picture))
    store.write_bytes(CHAIN, png(chain))
    store.write_bytes(ANIMATION, animation(generation_frames(values[0], list(configs.values()))))
    store.write_text(RECORD, json.dumps(record(context, chunks), indent=1))
    shown = [Picture(f"{FOLDER}/{CHAIN}", "samples/chain")]
    for stage in grids:
        trained, file = context.inputs[f"train_{stage}"], f"{FOLDER}/{stage}.png"
        shown.append(Picture(file, f"samples/{stage}"))
        if trained.mlflow_run_id:  # under one key, so that the stages' grids lie side by side in the UI
            shown.append(Picture(file, "samples", checkpoint_step(trained), trained.mlflow_run_id))
    return NodeResult(outputs={"samples": FOLDER}, metrics=counts(chunks), pictures=shown)


def counts(chunks: Sequence[Chunk]) -> dict[str, float]:
    return {
        "images/sampled": float(sum(len(chunk.keys) for chunk in chunks)),
        "images/batch_size": float(len(chunks[0].keys)),
    }


def record(context: NodeContext[Any], chunks: Sequence[Chunk]) -> dict[str, Any]:
    """How the images were drawn, as JSON."""
    config: SampleNodeConfig = context.config
    left_out = {field.name for field in dataclasses.fields(config) if not field.metadata.get("semantic", True)}
    settings = {name: value for name, value in vars(config).items() if name not in left_out}
    networks = {stage: context.inputs[f"train_{stage}"].attempt for stage in config.stages}
    return {**settings, "batch_size": len(chunks[0].keys), "networks": networks}


# ---- chunks -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chunk:
    """Images that are drawn in one batch, or all of them, to be cut into chunks. Picklable."""

    keys: tuple[str, ...]  # their names
    seeds: tuple[int | str, ...]  # what seeds each one's draws
    given: np.ndarray | None = None  # uint8 [N, h, w, 3]: what each starts from
    index: int = 0
    of: int = 1  # chunks


@dataclass(frozen=True)
class Job:
    """What every worker gets. Picklable."""

    config: SampleNodeConfig
    inputs: Mapping[str, NodeOutput]  # of the train nodes
    out: str  # folder of the images


def chunks_of(images: Chunk, *, size: int) -> list[Chunk]:
    """Consecutive chunks of `size` images; the last may be smaller."""
    parts = [slice(start, start + size) for start in range(0, len(images.keys), size)]
    return [
        Chunk(images.keys[p], images.seeds[p], None if images.given is None else images.given[p], index, len(parts))
        for index, p in enumerate(parts)
    ]


def draw(job: Job, images: Chunk, *, progress: Reporter) -> list[Chunk]:
    """Draws the chunks that are not on storage yet, side by side on resources.num_workers workers; returns all.

    What is finished stays on storage whatever happens. Raises UserError if not even one image fits into a GPU.
    """
    store, configs = open_store(job.out), load_stage_configs(job.inputs, job.config.stages)
    resources, pixels_each = job.config.resources, pixels_to_draw(job, configs)
    total = pixels_each * len(images.keys)
    share = -(-len(images.keys) // resources.num_workers)
    workers: list[Any] = []

    def start_workers(most: int) -> None:
        if not workers and most:
            workers.extend(stack.enter_context(gang(DrawingWorker, job, progress, total, most=most)))

    with contextlib.ExitStack() as stack:
        size = recorded_size(store)
        if size is None and not resources.use_gpu:
            size = job.config.batch_size or min(share, ON_CPU)
        elif size is None:
            start_workers(len(images.keys))
            size = min(ask(workers, "largest_batch", min(share, job.config.batch_size or MOST_ON_GPU, MOST_ON_GPU)))
            if size == 0:
                raise UserError(f"not even one image of {', '.join(configs)} fits into a GPU's memory at once")
        store.write_text(CHUNKS, json.dumps({"batch_size": size}))
        chunks, present = chunks_of(images, size=size), {entry.path for entry in store.walk()}
        todo = [chunk for chunk in chunks if not _is_finished(store, configs, chunk, present)]
        left = sum(len(chunk.keys) for chunk in todo)
        progress.update(total - pixels_each * left, total, unit="pixels", note=f"{size:,} at once")
        start_workers(len(todo))
        for chunk in each(workers, "draw", todo):
            _part(progress, chunk).update(pixels_each * len(chunk.keys), total, unit="pixels")
    store.remove_temporaries()
    return chunks


def recorded_size(store: Store) -> int | None:
    """Images drawn at once, as an earlier start of the attempt found; None at the first."""
    return json.loads(store.read_bytes(CHUNKS))["batch_size"] if store.exists(CHUNKS) else None


def pixels_to_draw(job: Job, configs: Mapping[str, SPNConfig]) -> int:
    """Pixel steps of one image: one for each pixel of each slice of each stage that is run."""
    use, num_given = job.config.use, job.config.num_given or 0
    in_slices = use == "complete" and job.config.stages[0] != "baseline"
    known = 1 if use == "size_upscale" else num_given if in_slices else 0
    rows = rows_to_sample(list(configs.values()), num_known_slices=known)
    return rows * next(iter(configs.values())).slice_size


# ---- a worker ---------------------------------------------------------------------------------------------------


class _OneRow(Exception):
    """Ends a trial."""


class DrawingWorker:
    """Keeps the networks loaded and draws one chunk after the other."""

    def __init__(self, job: Job, progress: Reporter, total: int) -> None:
        torch.set_num_threads(1)  # sums are the same whatever CPUs the worker was given
        torch.backends.cudnn.allow_tf32 = False  # float32 means float32
        self.job, self.progress, self.total = job, progress, total
        self.device = job.config.resources.device
        self.decoders: dict[Any, Decode] = {}  # of chunks of `batch` images
        self.batch = 0

    @functools.cached_property
    def models(self) -> dict[str, SPN]:
        """Loaded by the first call: what fails in a constructor is to Ray a lost worker, which is replaced."""
        return load_stages(self.job.inputs, self.job.config.stages, device=self.device)

    def largest_batch(self, most: int) -> int:
        """Images that can be drawn at once: `most`, or half, or a quarter, …; 0: not even one."""
        return largest_that_fits(halved(most), self.try_batch)

    def try_batch(self, batch: int) -> None:
        """Draws the first row of every stage. What they allocate stays: a chunk of this size uses it again."""
        self._make_room(batch)
        config = self.job.config

        def stop() -> None:
            raise _OneRow

        try:
            for stage, model in self.models.items():
                shape = (batch, 3, model.config.image_size, model.config.image_size)
                given = torch.zeros(shape, dtype=torch.long, device=self.device)
                with contextlib.suppress(_OneRow):
                    sample_stage(
                        model,
                        torch.zeros(shape, dtype=torch.float64, device=self.device),
                        given=given if model.config.num_given_bits else None,
                        temperature=config.temperature[stage],
                        top_p=config.top_p[stage],
                        precision=config.precision,
                        decoder=config.decoder,
                        decoders=self.decoders,
                        on_row=stop,
                    )
        except BaseException:
            self._make_room(0)
            raise

    def _note(self, batch: int) -> str:
        """How images are drawn, for the progress line."""
        if self.device != "cuda" or self.job.config.decoder != "auto":
            return f"{batch:,} at once"
        from spn.gpu.folding import not_covered

        why = {stage: not_covered(model) for stage, model in self.models.items()}
        plain = [f"{stage} without the fused kernels: {reason}" for stage, reason in why.items() if reason is not None]
        return "; ".join([f"{batch:,} at once", *plain])

    def _make_room(self, batch: int) -> None:
        """Decoders of two sizes may not fit."""
        if batch != self.batch:
            self.decoders.clear()
            self.batch = batch

    def draw(self, chunk: Chunk) -> Chunk:
        """Draws a chunk, writes its files, the Parquet file last, and returns it."""
        config, part, done = self.job.config, _part(self.progress, chunk), 0
        configs = {stage: model.config for stage, model in self.models.items()}
        self._make_room(len(chunk.keys))
        note = self._note(len(chunk.keys))
        pixels_per_row = len(chunk.keys) * next(iter(configs.values())).slice_size

        def on_row() -> None:
            nonlocal done
            done += pixels_per_row
            part.update(done, self.total, unit="pixels", note=note)

        with naming_full_memory("sample.batch_size", len(chunk.keys)):
            known = sample_chain(
                self.models,
                seed=config.seed,
                images=chunk.seeds,
                temperature={stage: config.temperature[stage] for stage in self.models},
                top_p={stage: config.top_p[stage] for stage in self.models},
                precision=config.precision,
                decoder=config.decoder,
                decoders=self.decoders,
                **self._start(chunk),
                on_row=on_row,
            )
        values = list(known.values())[-1].permute(0, 2, 3, 1).to(torch.uint8).cpu().numpy()
        num_bits = depth_after(configs[config.stages[-1]])
        write_chunk(open_store(self.job.out), _path(configs, chunk), chunk, values, num_bits=num_bits)
        return dataclasses.replace(chunk, given=None)

    def _start(self, images: Chunk) -> dict[str, Any]:
        """What `sample_chain` starts from."""
        if images.given is None:
            return {}
        given = torch.from_numpy(images.given.copy()).to(self.device).permute(0, 3, 1, 2).long()
        use, num_given = self.job.config.use, self.job.config.num_given
        if use == "depth_upscale":
            return {"image": given}
        if use == "size_upscale":
            return {"slices": given[:, None]}
        if self.job.config.stages[0] == "baseline":
            return {"rows": given[:, :, :num_given]}
        factor = self.models["size_upscale"].config.scaling_factor
        return {"slices": image_to_slices(given, factor)[:, :num_given]}


# ---- files ------------------------------------------------------------------------------------------------------


def write_chunk(store: Store, path: str, chunk: Chunk, values: np.ndarray, *, num_bits: int) -> None:
    """values: uint8 [n, R, R, 3] of `num_bits` bits."""
    for key, picture in zip(chunk.keys, display(values, num_bits=num_bits), strict=True):
        store.write_bytes(f"{IMAGES}/{key}.png", png(picture))
    table = pa.table({"key": list(chunk.keys), "px": pixel_column(values)})
    plain = {"use_dictionary": False, "write_statistics": False}  # of px they would put whole images into the footer
    with store.writing([path]) as streams:
        pq.write_table(table, streams[path], compression="zstd", write_page_checksum=True, **plain)


def read_chunks(store: Store, configs: Mapping[str, SPNConfig], chunks: Iterable[Chunk], *, most: int) -> np.ndarray:
    """uint8 [N, R, R, 3] of the last stage's depth: the first `most` images."""
    found: list[np.ndarray] = []
    for chunk in chunks:
        if sum(map(len, found)) < most:
            found.append(pixels(_read(store, _path(configs, chunk))))
    return np.concatenate(found)[:most]


def _is_finished(store: Store, configs: Mapping[str, SPNConfig], chunk: Chunk, present: set[str]) -> bool:
    path = _path(configs, chunk)
    if not {path, *(f"{IMAGES}/{key}.png" for key in chunk.keys)} <= present:
        return False
    try:
        table = _read(store, path)
    except (OSError, pa.ArrowInvalid):  # damaged, as its checksums say
        return False
    return table.column("key").to_pylist() == list(chunk.keys)


def _read(store: Store, path: str) -> pa.Table:
    with store.filesystem.open_input_file(store.path(path)) as stream:
        return open_parquet(stream, name=path, page_checksum_verification=True).read(use_threads=False)


def _path(configs: Mapping[str, SPNConfig], chunk: Chunk) -> str:
    last = list(configs.values())[-1]
    size, bits = last.image_size, depth_after(last)
    return shard_path(resolution=size, bits=bits, split=SPLIT, index=chunk.index, num_shards=chunk.of)


def _part(progress: Reporter, chunk: Chunk) -> Reporter:
    return progress.part(f"chunk {chunk.index}")
