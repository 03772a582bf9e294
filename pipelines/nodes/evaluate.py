"""evaluate: exact bits/dim of every part and of the whole chain on all test images, beside what they must beat.

Images are scored in chunks of evaluate.batch_size, each written to its own Parquet file: a later start of the same
attempt scores the rest. Who scores a chunk changes nothing. Nothing here grows with the number of images but one number
for each image and stage.

    scores/<first>-<end>.parquet   key; of each stage nats: each slice's R, G, B, in subscale order; png: bytes of some
                                   the first chunk also: STAGE/float32, STAGE/raw (below)
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NotRequired, TypedDict

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image

from data_prep.files import Store, UserError, join, open_store
from data_prep.parquet import open_dataset, open_parquet, pixels, read_shard
from pipelines.config import EvaluateNodeConfig, ScoringConfig
from pipelines.dag.node import NodeContext, NodeOutput, NodeResult
from pipelines.dag.progress import Reporter
from pipelines.nodes.memory import naming
from pipelines.nodes.trained import checkpoint_uri, load_raw_weights, load_stage_configs, load_stages
from pipelines.nodes.workers import each, gang, gang_name
from pipelines.tracking import StageModel
from spn.bitdepth import stage_values
from spn.config import SPNConfig
from spn.evaluation import Forward, bits_per_dim, slice_nats
from spn.histogram import Histogram, count_values, raw_entropy_bits
from spn.model import SPN

RESULTS, PER_IMAGE, SCORES = "results.json", "per_image.parquet", "scores"
PNG_IMAGES = 1000  # how many test images are compared with their PNG files, which take longer than scoring them
FLOAT32, RAW = "/float32", "/raw"  # of columns: scored in float32 where bfloat16 is the rule; with raw weights
Read = Callable[[range], tuple[list[str], np.ndarray]]  # rows -> keys, uint8 [n, H, W, 3] at 8 bits


class Part(TypedDict):
    """Bits/dim of a stage's dims, or of the whole chain's, in dims of the full image: parts add up."""

    bits_per_dim: float
    standard_error: float  # over the images
    uniform: float
    histogram: float
    slices: NotRequired[list[float]]  # of each slice's own dims, in subscale order
    channels: NotRequired[list[float]]  # of each channel's own dims


class Difference(TypedDict):
    """Mean over the first images of the difference to the result, in bits/dim of the total, image by image."""

    difference: float
    standard_error: float
    num_images: int


class Results(TypedDict):
    """results.json."""

    dataset: str
    num_images: int
    image_size: int
    stages: dict[str, Part]
    total: Part
    generated_bits: int
    raw_entropy: float
    png: float
    size_upscale_as_plain_spn: NotRequired[float]
    precision: str
    in_float32: NotRequired[Difference]
    with_raw_weights: Difference


def run(context: NodeContext[EvaluateNodeConfig]) -> NodeResult:
    config = context.config
    stages, data = config.stages, context.inputs["prepare_data"]
    dataset = open_dataset(join(data.uri, data.named["dataset"]))
    num_test = dataset.num_images("test")
    if num_test == 0:
        raise UserError(f"data.num_test_photos: dataset {dataset.manifest.dataset} has no test images")
    size = load_stage_configs(context.inputs, stages)[stages[0]].image_size
    store = open_store(context.out)
    job = ScoringJob(config, context.inputs, store.uri, functools.partial(read_test, dataset.uri, size), compared=True)
    scores = score(job, num_test, progress=context.progress)
    histogram = Histogram()
    for images in _split(dataset, size, "train"):
        histogram.add(images)
    seen, seen_first = np.zeros((3, 256), np.int64), np.zeros((3, 256), np.int64)
    step = scores.configs[stages[0]].scaling_factor
    for images in _split(dataset, size, "test"):
        seen += count_values(images)
        seen_first += count_values(images[:, ::step, ::step])
    parts = {stage: _part(scores, stage, seen, seen_first, histogram) for stage in stages}
    last = scores.configs[stages[-1]]
    results = Results(
        dataset=dataset.manifest.dataset,
        num_images=num_test,
        image_size=size,
        stages=parts,
        total=Part(
            bits_per_dim=sum(part["bits_per_dim"] for part in parts.values()),
            standard_error=standard_error(scores.total),
            uniform=sum(part["uniform"] for part in parts.values()),
            histogram=sum(part["histogram"] for part in parts.values()),
        ),
        generated_bits=last.num_given_bits + last.num_bits,
        raw_entropy=raw_entropy_bits(seen),
        png=8 * sum(scores.png) / (len(scores.png) * size * size * 3),
        precision=config.precision if config.resources.use_gpu else "float32",
        with_raw_weights=scores.difference(RAW),
    )
    if first_given("size_upscale", stages):
        results["size_upscale_as_plain_spn"] = float(scores.sums["size_upscale"].sum()) / num_test
    if results["precision"] == "bfloat16":
        results["in_float32"] = scores.difference(FLOAT32)
    store.write_text(RESULTS, json.dumps(results, indent=1))
    with store.writing([PER_IMAGE]) as streams:
        pq.write_table(scores.table(), streams[PER_IMAGE])
    metrics = {f"test/bits_per_dim/{stage}": part["bits_per_dim"] for stage, part in parts.items()}
    metrics["test/bits_per_dim/total"] = results["total"]["bits_per_dim"]
    with context.run.open() as run:
        run.log_metrics({"test/bits_per_dim": results["total"]["bits_per_dim"], **metrics})
        run.log_text(json.dumps(results, indent=1), RESULTS)
        run.log_dataset(dataset, resolution=size, bits=8, split="test", context="test")
    test_set = dataset.split_digest(resolution=size, bits=8, split="test")
    _tell_train_runs(context, results, scores.configs, test_set)
    return NodeResult(outputs={"results": RESULTS, "per_image": PER_IMAGE}, metrics=metrics)


def first_given(stage: str, stages: Sequence[str]) -> bool:
    """Whether a stage gets slice (0, 0) from another network of the chain."""
    return stage == "size_upscale" and "first_slice" in stages


def standard_error(values: np.ndarray) -> float:
    """Of the mean."""
    return float(np.std(values, ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.nan


def read_test(uri: str, size: int, rows: range) -> tuple[list[str], np.ndarray]:
    """Rows of the test split at 8 bits."""
    dataset, tables, start = open_dataset(uri), [], 0
    for shard in dataset.shards(resolution=size, bits=8, split="test"):
        for group, length in enumerate(shard.row_group_rows):
            first, end = max(rows.start - start, 0), min(rows.stop - start, length)
            if first < end:
                table = read_shard(uri, shard, row_group=group, columns=["key", "px"])
                tables.append(table.slice(first, end - first))
            start += length
    table = pa.concat_tables(tables)
    return table.column("key").to_pylist(), np.concatenate([pixels(part) for part in tables])


def _split(dataset: Any, size: int, split: str) -> Iterator[np.ndarray]:
    """uint8 [n, H, W, 3] of each row group of a split at 8 bits."""
    for shard in dataset.shards(resolution=size, bits=8, split=split):
        for group in range(len(shard.row_group_rows)):
            yield pixels(read_shard(dataset.uri, shard, row_group=group, columns=["px"]))


def _part(scores: Scores, stage: str, seen: np.ndarray, seen_first: np.ndarray, histogram: Histogram) -> Part:
    """Bits/dim of the dims that a stage answers for, beside what a uniform distribution and the histogram need.

    seen, seen_first: counts of all values of the test images, and of those in slice (0, 0).
    """
    config = scores.configs[stage]
    given = first_given(stage, list(scores.configs))
    counts = seen_first if config.stage == "first_slice" else seen - seen_first if given else seen
    share = counts.sum() / seen.sum()
    nats = histogram.nats(counts, given_bits=config.num_given_bits, num_bits=config.num_bits)
    sums = scores.sums[stage][scores.slices(stage)] / scores.num_images
    return Part(
        bits_per_dim=float(sums.sum()),
        standard_error=standard_error(scores.per_image[stage]),
        uniform=config.num_bits * share,
        histogram=nats / math.log(2) / seen.sum(),
        slices=(sums.sum(1) * config.num_slices).tolist(),
        channels=(sums.sum(0) * 3 / share).tolist(),
    )


# ---- scoring in chunks ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScoringJob:
    """What every worker gets. Picklable."""

    config: ScoringConfig
    inputs: Mapping[str, NodeOutput]  # of the train nodes
    out: str  # folder of the node
    read: Read
    compared: bool = False  # with float32, raw weights and PNG files, on the first images


def score(job: ScoringJob, num_images: int, *, progress: Reporter) -> Scores:
    """Scores the chunks that are not on storage yet and returns what all came to.

    One worker is this process; several are Ray actors.
    """
    store, resources, batch = open_store(job.out), job.config.resources, job.config.batch_size
    store.remove_temporaries()
    chunks = [range(start, min(start + batch, num_images)) for start in range(0, num_images, batch)]
    todo = [rows for rows in chunks if not _is_finished(store, rows)]
    done, nats = num_images - sum(map(len, todo)), 0.0
    num = min(resources.num_workers, len(todo))
    with contextlib.ExitStack() as stack:
        if num > 1:
            name = gang_name("score", job.out)
            workers = gang(ScoringWorker, job, num=num, resources=resources, name=name)
            results = each(stack.enter_context(workers), "score", todo)
        else:
            worker = ScoringWorker(job)
            results = ((rows, worker.score(rows)) for rows in todo)
        scored = 0
        for rows, bits in results:
            scored, nats = scored + len(rows), nats + bits
            note = f"{nats / scored:.3f} bits/dim"
            progress.update(done + scored, num_images, unit="images", note=note)
    return Scores(store, job, chunks)


class Scores:
    """What the chunks' files say, read one after the other. All in bits/dim of the full image.

    configs: {stage: configuration of its network}, per_image: {stage: float64 [N], of the slices it answers for},
    sums: {stage: float64 [slices, 3], of all its slices over all images}, keys, num_images, png: sizes in bytes.
    """

    def __init__(self, store: Store, job: ScoringJob, chunks: Sequence[range]) -> None:
        self.configs = load_stage_configs(job.inputs, job.config.stages)
        self.num_images = chunks[-1].stop
        self.keys: list[str] = []
        self.png: list[int] = []
        self.sums: dict[str, np.ndarray] = {}
        self._first = _read(store, chunks[0])
        found: dict[str, list[np.ndarray]] = {stage: [] for stage in self.configs}
        for rows in chunks:
            table = _read(store, rows)
            self.keys += table.column("key").to_pylist()
            if "png" in table.column_names:
                self.png += table.column("png").drop_null().to_pylist()
            for stage in self.configs:
                bits = self._bits(table, stage)
                self.sums[stage] = self.sums.get(stage, 0) + bits.sum(0)
                found[stage].append(self._own(bits, stage))
        self.per_image = {stage: np.concatenate(parts) for stage, parts in found.items()}

    @property
    def total(self) -> np.ndarray:
        return np.sum(list(self.per_image.values()), axis=0)

    def slices(self, stage: str) -> slice:
        """Those that a stage answers for."""
        return slice(1 if first_given(stage, list(self.configs)) else 0, None)

    def table(self) -> pa.Table:
        """key, each stage, total."""
        return pa.table({"key": self.keys, **self.per_image, "total": self.total})

    def difference(self, other: str) -> Difference:
        """Of the first chunk's images, in a column of this name less the result."""
        change = sum(
            self._own(self._bits(self._first, stage + other) - self._bits(self._first, stage), stage)
            for stage in self.configs
        )
        assert isinstance(change, np.ndarray)
        return Difference(
            difference=float(change.mean()), standard_error=standard_error(change), num_images=len(change)
        )

    def _bits(self, table: pa.Table, column: str) -> np.ndarray:
        """[n, slices, 3]."""
        nats = table.column(column).combine_chunks().flatten().to_numpy().reshape(len(table), -1, 3)
        return nats * bits_per_dim(1.0, num_images=1, image_size=next(iter(self.configs.values())).image_size)

    def _own(self, bits: np.ndarray, stage: str) -> np.ndarray:
        """[n, slices, 3] -> [n]: of the slices that the stage answers for."""
        return bits[:, self.slices(stage)].sum((1, 2))


class ScoringWorker:
    """Keeps the networks loaded and scores one chunk after the other."""

    def __init__(self, job: ScoringJob) -> None:
        torch.set_num_threads(job.config.resources.num_threads)
        torch.backends.cudnn.allow_tf32 = False  # float32 means float32
        self.job, self.device = job, job.config.resources.device
        self.in_bfloat16 = self.device == "cuda" and job.config.precision == "bfloat16"

    @functools.cached_property
    def models(self) -> dict[str, SPN]:
        """Loaded by the first call: what fails in a constructor is to Ray a lost worker, which is replaced."""
        return load_stages(self.job.inputs, self.job.config.stages, device=self.device)

    @functools.cached_property
    def forwards(self) -> dict[str, Forward]:
        """What is called for each network: on a GPU its compiled form."""
        if self.device != "cuda":
            return dict(self.models)
        from spn.gpu.training import speed_up

        return {stage: speed_up(model, compiled=True) for stage, model in self.models.items()}

    def score(self, rows: range) -> float:
        """Scores a chunk, writes its file and returns about its images' bits/dim, summed, for the progress line."""
        batch = self.job.config.batch_size
        keys, images = self.job.read(rows)
        whole = images
        if self.device == "cuda" and rows.start:  # a shorter last chunk would be compiled once more
            whole = np.concatenate([images, np.zeros((batch - len(images), *images.shape[1:]), np.uint8)])
        with naming("evaluate.batch_size", batch):
            nats = self._nats(whole, self.forwards, torch.bfloat16 if self.in_bfloat16 else None)
        found = {stage: part[: len(images)] for stage, part in nats.items()}
        columns: dict[str, Any] = {"key": keys, **{stage: _lists(part) for stage, part in found.items()}}
        if self.job.compared and rows.start == 0:
            columns |= self._compared(images)
        if self.job.compared:
            sizes = [_png_bytes(image) for image in images[: max(0, PNG_IMAGES - rows.start)]]
            columns["png"] = pa.array([*sizes, *[None] * (len(images) - len(sizes))], pa.int64())
        with open_store(self.job.out).writing([_path(rows)]) as streams:
            pq.write_table(pa.table(columns), streams[_path(rows)], write_page_checksum=True)
        total = sum(float(part.sum()) for part in found.values())
        return bits_per_dim(total, num_images=1, image_size=images.shape[1])

    def _nats(
        self, images: np.ndarray, forwards: Mapping[str, Forward], dtype: torch.dtype | None
    ) -> dict[str, np.ndarray]:
        """{stage: float64 [n, slices, 3]} of 8-bit images."""
        image = torch.from_numpy(images.copy()).to(self.device).permute(0, 3, 1, 2).long()
        nats = {}
        for stage, model in self.models.items():
            config = model.config
            values, given = stage_values(
                image, stored_bits=8, given_bits=config.num_given_bits, num_bits=config.num_bits
            )
            slices = range(1 if config.stage == "first_slice" else config.num_slices)
            with torch.autocast(self.device, dtype=dtype, enabled=dtype is not None):
                found = slice_nats(model, values, given, slices=slices, forward=forwards[stage])
            nats[stage] = found.cpu().numpy()
        return nats

    def _compared(self, images: np.ndarray) -> dict[str, pa.Array]:
        """The same images in float32, if bfloat16 is the rule, and with raw weights. A quarter of them at once: float32
        takes more memory, and nothing is compiled."""
        columns: dict[str, pa.Array] = {}
        quarters = np.array_split(images, min(4, len(images)))

        def scored_again(dtype: torch.dtype | None) -> dict[str, np.ndarray]:
            found = [self._nats(quarter, self.models, dtype) for quarter in quarters]
            return {stage: np.concatenate([part[stage] for part in found]) for stage in self.models}

        if self.in_bfloat16:
            columns |= {stage + FLOAT32: _lists(part) for stage, part in scored_again(None).items()}
        averaged = {stage: model.state_dict() for stage, model in self.models.items()}
        averaged = {stage: {k: v.clone() for k, v in weights.items()} for stage, weights in averaged.items()}
        for stage, model in self.models.items():
            model.load_state_dict(load_raw_weights(self.job.inputs, stage, device=self.device))
        dtype = torch.bfloat16 if self.in_bfloat16 else None
        columns |= {stage + RAW: _lists(part) for stage, part in scored_again(dtype).items()}
        for stage, model in self.models.items():
            model.load_state_dict(averaged[stage])
        return columns


def _lists(nats: np.ndarray) -> pa.Array:
    """float64 [n, slices, 3] -> list<double> column."""
    return pa.FixedSizeListArray.from_arrays(pa.array(nats.ravel()), nats[0].size)


def _path(rows: range) -> str:
    return f"{SCORES}/{rows.start:08d}-{rows.stop:08d}.parquet"


def _is_finished(store: Store, rows: range) -> bool:
    try:
        return store.exists(_path(rows)) and len(_read(store, rows)) == len(rows)
    except (OSError, pa.ArrowInvalid):  # damaged, as its checksums say
        return False


def _read(store: Store, rows: range) -> pa.Table:
    with store.filesystem.open_input_file(store.path(_path(rows))) as stream:
        return open_parquet(stream, name=_path(rows), page_checksum_verification=True).read(use_threads=False)


def _png_bytes(image: np.ndarray) -> int:
    """Of an image as a PNG file (8 bits, Pillow's best effort)."""
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, format="PNG", optimize=True)
    return buffer.tell()


# ---- MLflow -----------------------------------------------------------------------------------------------------


def _tell_train_runs(
    context: NodeContext[EvaluateNodeConfig], results: Results, configs: Mapping[str, SPNConfig], test_set: str
) -> None:
    """Each stage's own run gets its test score, so that the UI's compare page has it in one column, and its network
    becomes a version in the model registry."""
    for stage, part in results["stages"].items():
        output, config = context.inputs[f"train_{stage}"], configs[stage]
        dims = f"{config.image_size}px S={config.scaling_factor} bits {config.num_given_bits}+{config.num_bits}"
        model = StageModel(
            stage=stage,
            checkpoint=checkpoint_uri(output),
            attempt=output.attempt,
            bits_per_dim=part["bits_per_dim"],
            test_set=test_set,
            scores=join(context.out, PER_IMAGE),
            dims=dims + (" without slice (0, 0)" if first_given(stage, list(configs)) else ""),
        )
        with context.run.at(output.mlflow_run_id).open() as run:
            run.log_metrics({"test/bits_per_dim": part["bits_per_dim"]})
            run.register_model(model)
