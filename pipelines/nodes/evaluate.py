"""evaluate: exact bits/dim of each part and of the whole chain on all test images, beside the baselines to beat.

Images are scored in chunks of evaluate.batch_size, each written to its own Parquet file, so that a later launch of the
same attempt scores only the rest. Results do not depend on which worker scores a chunk. Memory does not grow with the
number of images, except for one number per image and stage.

    scores/<first>-<end>.parquet   key; of each stage nats: R, G, B of each slice that it answers for
                                   the first chunk also: STAGE/float32, STAGE/raw (below)
"""

from __future__ import annotations

import functools
import io
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NotRequired, TypedDict

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image

from data_prep.files import Store, UserError, join, open_store
from data_prep.parquet import open_dataset, open_parquet, pixels
from pipelines.config import EvaluateNodeConfig
from pipelines.dag.node import NodeContext, NodeOutput, NodeResult
from pipelines.dag.progress import Reporter
from pipelines.nodes.histogram import count_values, histogram_nats, raw_entropy_bits
from pipelines.nodes.memory import naming_full_memory
from pipelines.nodes.registry import FIRST_GIVEN, StageModel, register
from pipelines.nodes.trained import load_stage_configs, load_stages
from pipelines.nodes.workers import each, gang
from spn.config import SPNConfig, first_given
from spn.evaluation import Forward, bits_per_dim, scored_slices, stage_nats
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
    precision: str
    in_float32: NotRequired[Difference]
    with_raw_weights: Difference


def run(context: NodeContext[EvaluateNodeConfig]) -> NodeResult:
    config = context.config
    stages, dataset = config.stages, open_dataset(context.inputs["prepare_data"].place("dataset"))
    num_test = dataset.num_images("test")
    if num_test == 0:
        raise UserError(f"data.num_test_photos: dataset {dataset.manifest.dataset} has no test images")
    size = load_stage_configs(context.inputs, stages)[stages[0]].image_size
    store = open_store(context.out)
    job = ScoringJob(config, context.inputs, store.uri, functools.partial(read_test, dataset.uri, size), compared=True)
    scores = score(job, num_test, progress=context.progress)
    histogram, png = np.ones((3, 256)), list[int]()
    read = functools.partial(dataset.tables, resolution=size, bits=8, columns=["px"])
    for images in map(pixels, read(split="train")):
        histogram += count_values(images)
    seen, seen_first = np.zeros((3, 256), np.int64), np.zeros((3, 256), np.int64)
    step = scores.configs[stages[0]].scaling_factor
    for images in map(pixels, read(split="test")):
        seen += count_values(images)
        seen_first += count_values(images[:, ::step, ::step])
        png += map(_png_bytes, images[: PNG_IMAGES - len(png)])
    parts = {stage: _part(scores, stage, seen, seen_first, histogram) for stage in stages}
    last = scores.configs[stages[-1]]
    results = Results(
        dataset=dataset.manifest.dataset,
        num_images=num_test,
        image_size=size,
        stages=parts,
        total=Part(
            bits_per_dim=sum(part["bits_per_dim"] for part in parts.values()),
            standard_error=standard_error(scores.of("total")),
            uniform=sum(part["uniform"] for part in parts.values()),
            histogram=sum(part["histogram"] for part in parts.values()),
        ),
        generated_bits=last.num_given_bits + last.num_bits,
        raw_entropy=raw_entropy_bits(seen),
        png=8 * sum(png) / (len(png) * size * size * 3),
        precision=config.precision if config.resources.use_gpu else "float32",
        with_raw_weights=scores.difference(RAW),
    )
    if results["precision"] == "bfloat16":
        results["in_float32"] = scores.difference(FLOAT32)
    store.write_text(RESULTS, json.dumps(results, indent=1))
    with store.writing([PER_IMAGE]) as streams:
        pq.write_table(scores.table(), streams[PER_IMAGE])
    total = results["total"]
    metrics = {f"test/bits_per_dim/{name}": part["bits_per_dim"] for name, part in {**parts, "total": total}.items()}
    metrics["test/bits_per_dim"] = total["bits_per_dim"]
    with context.run.open() as run:
        run.log_metrics(metrics)
        run.log_text(json.dumps(results, indent=1), RESULTS)
        run.log_dataset(dataset, resolution=size, bits=8, split="test", context="test")
    test_set = dataset.split_digest(resolution=size, bits=8, split="test")
    _tell_train_runs(context, results, scores.configs, test_set)
    return NodeResult(outputs={"results": RESULTS, "per_image": PER_IMAGE}, metrics=metrics)


def standard_error(values: np.ndarray) -> float:
    """Of the mean."""
    return float(np.std(values, ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.nan


def read_test(uri: str, size: int, rows: range) -> tuple[list[str], np.ndarray]:
    """Rows of the test split at 8 bits."""
    tables = open_dataset(uri).tables(resolution=size, bits=8, split="test", columns=["key", "px"], rows=rows)
    table = pa.concat_tables(tables)
    return table.column("key").to_pylist(), pixels(table)


def _part(scores: Scores, stage: str, seen: np.ndarray, seen_first: np.ndarray, histogram: np.ndarray) -> Part:
    """Bits/dim of the dims that a stage answers for, beside what a uniform distribution and the histogram need.

    seen, seen_first: counts of all values of the test images, and of those in slice (0, 0).
    """
    config = scores.configs[stage]
    rest = seen - seen_first if first_given(stage, scores.configs) else seen
    counts = seen_first if config.stage == "first_slice" else rest
    share = counts.sum() / seen.sum()
    nats = histogram_nats(histogram, counts, given_bits=config.num_given_bits, num_bits=config.num_bits)
    means = scores.mean(stage)
    return Part(
        bits_per_dim=float(means.sum()),
        standard_error=standard_error(scores.of(stage)),
        uniform=config.num_bits * share,
        histogram=nats / math.log(2) / seen.sum(),
        slices=(means.sum(1) * config.num_slices).tolist(),
        channels=(means.sum(0) * 3 / share).tolist(),
    )


# ---- scoring in chunks ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScoringJob:
    """What every worker gets. Picklable."""

    config: EvaluateNodeConfig
    inputs: Mapping[str, NodeOutput]  # of the train nodes
    out: str  # folder of the node
    read: Read
    compared: bool = False  # with float32 and raw weights, on the images of the first chunk


def score(job: ScoringJob, num_images: int, *, progress: Reporter) -> Scores:
    """Scores the chunks that are not on storage yet and returns what all came to."""
    store, batch = open_store(job.out), job.config.batch_size
    scores, todo = Scores(load_stage_configs(job.inputs, job.config.stages)), list[range]()
    for start in range(0, num_images, batch):
        rows = range(start, min(start + batch, num_images))
        table = _finished(store, rows)
        if table is None:
            todo.append(rows)
        else:
            scores.add(rows, table)
    with gang(ScoringWorker, job, most=len(todo)) as workers:
        for rows, table in each(workers, "score", todo):
            scores.add(rows, table)
            total = scores.of("total")
            progress.update(len(total), num_images, unit="images", note=f"{total.mean():.3f} bits/dim")
    store.remove_temporaries()
    return scores


class Scores:
    """What the scored chunks come to, whatever the order in which they are added. In bits/dim of the full image."""

    def __init__(self, configs: Mapping[str, SPNConfig]) -> None:
        self.configs = configs  # of each stage's network
        # By a chunk's first row: {"key", column of the chunk or "total": of each image}, {column: [slices, 3], summed}.
        self._chunks: dict[int, tuple[dict[str, Any], dict[str, np.ndarray]]] = {}

    def add(self, rows: range, table: pa.Table) -> None:
        unit = bits_per_dim(1.0, num_images=1, image_size=next(iter(self.configs.values())).image_size)
        own, sums = {"key": table.column("key")}, {}
        for column in table.column_names[1:]:
            stage = column.partition("/")[0]
            bits = unit * table.column(column).combine_chunks().flatten().to_numpy().reshape(len(table), -1, 3)
            own[column] = bits.sum((1, 2))
            sums[column] = bits.sum(0)
            total = "total" + column.removeprefix(stage)
            own[total] = own.get(total, 0) + own[column]
        self._chunks[rows.start] = own, sums

    def of(self, part: str) -> np.ndarray:
        """[N] of a stage, or of "total"."""
        return np.concatenate([self._chunks[start][0][part] for start in sorted(self._chunks)])

    def table(self) -> pa.Table:
        """A row per image: key, each stage, total."""
        keys = pa.concat_arrays(c for start in sorted(self._chunks) for c in self._chunks[start][0]["key"].chunks)
        return pa.table({"key": keys, **{part: self.of(part) for part in (*self.configs, "total")}})

    def mean(self, stage: str) -> np.ndarray:
        """[slices, 3] over all images."""
        return np.sum([self._chunks[start][1][stage] for start in sorted(self._chunks)], axis=0) / len(self.of(stage))

    def difference(self, other: str) -> Difference:
        """Of the first chunk's images, in the columns of this name less the result."""
        first = self._chunks[0][0]
        change = first["total" + other] - first["total"]
        return Difference(difference=change.mean(), standard_error=standard_error(change), num_images=len(change))


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

    def score(self, rows: range) -> tuple[range, pa.Table]:
        """Scores a chunk, writes its file and returns what is in it."""
        batch = self.job.config.batch_size
        keys, images = self.job.read(rows)
        whole = images
        if self.device == "cuda" and rows.start:  # a shorter last chunk would be compiled once more
            whole = np.concatenate([images, np.zeros((batch - len(images), *images.shape[1:]), np.uint8)])
        with naming_full_memory("evaluate.batch_size", batch):
            found = self._nats(whole, self.models, self.forwards, in_bfloat16=self.in_bfloat16)
        columns = {"key": pa.array(keys), **{stage: _lists(part[: len(images)]) for stage, part in found.items()}}
        if self.job.compared and rows.start == 0:
            raw = load_stages(self.job.inputs, self.job.config.stages, averaged=False, device=self.device)
            columns |= self._again(images, raw, RAW, in_bfloat16=self.in_bfloat16)
            if self.in_bfloat16:
                columns |= self._again(images, self.models, FLOAT32, in_bfloat16=False)
        table = pa.table(columns)
        with open_store(self.job.out).writing([_path(rows)]) as streams:
            pq.write_table(table, streams[_path(rows)], write_page_checksum=True)
        return rows, table

    def _nats(
        self, images: np.ndarray, models: Mapping[str, SPN], forwards: Mapping[str, Forward], *, in_bfloat16: bool
    ) -> dict[str, np.ndarray]:
        """{stage: float64 [n, slices, 3]} of 8-bit images."""
        image, nats = torch.from_numpy(images.copy()).to(self.device).permute(0, 3, 1, 2).long(), {}
        for stage, model in models.items():
            slices = scored_slices(model, first_given=first_given(stage, models))
            with torch.autocast(self.device, dtype=torch.bfloat16, enabled=in_bfloat16):
                nats[stage] = stage_nats(model, image, slices=slices, forward=forwards[stage]).cpu().numpy()
        return nats

    def _again(
        self, images: np.ndarray, models: Mapping[str, SPN], name: str, *, in_bfloat16: bool
    ) -> dict[str, pa.Array]:
        """Columns STAGE + name of the same images: a quarter at once, as float32 and what is not compiled need more
        memory."""
        quarters = np.array_split(images, min(4, len(images)))
        found = [self._nats(quarter, models, models, in_bfloat16=in_bfloat16) for quarter in quarters]
        return {stage + name: _lists(np.concatenate([part[stage] for part in found])) for stage in models}


def _lists(nats: np.ndarray) -> pa.Array:
    """float64 [n, slices, 3] -> list<double> column."""
    return pa.FixedSizeListArray.from_arrays(pa.array(nats.ravel()), nats[0].size)


def _path(rows: range) -> str:
    return f"{SCORES}/{rows.start:08d}-{rows.stop:08d}.parquet"


def _finished(store: Store, rows: range) -> pa.Table | None:
    """A chunk that an earlier start scored; None: it is not there, or damaged, as its checksums say."""
    try:
        with store.open(_path(rows)) as stream:
            table = open_parquet(stream, name=_path(rows), page_checksum_verification=True).read(use_threads=False)
        return table if len(table) == len(rows) else None
    except (OSError, pa.ArrowInvalid):
        return None


def _png_bytes(image: np.ndarray) -> int:
    """Of an image as a PNG file (8 bits, Pillow's best effort)."""
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, format="PNG", optimize=True)
    return buffer.tell()


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
            checkpoint=output.place("checkpoint"),
            attempt=output.attempt,
            test_bits_per_dim=part["bits_per_dim"],
            standard_error=part["standard_error"],
            test_set=test_set,
            scores=join(context.out, PER_IMAGE),
            scored_dims=dims + (FIRST_GIVEN if first_given(stage, configs) else ""),
        )
        with context.run.at(output.mlflow_run_id).open() as run:
            run.log_metrics({"test/bits_per_dim": part["bits_per_dim"]})
            register(run, model)
