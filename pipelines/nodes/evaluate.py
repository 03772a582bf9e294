"""evaluate: exact bits/dim of every part and of the whole chain on all test images, beside what they must beat."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NotRequired, TypedDict

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image

from data_prep.files import UserError, join, open_store
from data_prep.parquet import Dataset, open_dataset, pixels, read_shard
from pipelines.config import EvaluateNodeConfig
from pipelines.dag.node import NodeContext, NodeResult
from pipelines.nodes.trained import checkpoint_uri, load_stages
from pipelines.tracking import StageModel
from spn.bitdepth import stage_values
from spn.config import SPNConfig
from spn.evaluation import bits_per_dim, chain_nats, image_nats
from spn.histogram import Histogram, raw_entropy_bits

RESULTS, PER_IMAGE = "results.json", "per_image.parquet"


class Part(TypedDict):
    """Bits/dim of a stage's dims, or of the whole chain's."""

    bits_per_dim: float
    uniform: float
    histogram: float


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


def run(context: NodeContext[EvaluateNodeConfig]) -> NodeResult:
    config = context.config
    torch.set_num_threads(config.resources.num_threads)
    stages, data = config.stages, context.inputs["prepare_data"]
    dataset = open_dataset(join(data.uri, data.named["dataset"]))
    models = load_stages(context.inputs, stages, device=config.resources.device)
    size = models[stages[0]].config.image_size
    num_test = dataset.num_images("test")
    if num_test == 0:
        raise UserError(f"data.num_test_photos: dataset {dataset.manifest.dataset} has no test images")
    keys: list[str] = []
    nats: dict[str, list[float]] = {stage: [] for stage in stages}
    plain_spn: list[float] = []  # size_upscale with slice (0, 0) as well: the same network as a model of its own
    raw: list[np.ndarray] = []
    for names, images in _batches(dataset, size, batch=config.batch_size):
        image = torch.from_numpy(images.copy()).to(config.resources.device).permute(0, 3, 1, 2).long()
        for stage, part in chain_nats(models, image).items():
            nats[stage] += part.tolist()
            if _first_given(stage, stages):
                values, _ = stage_values(image, stored_bits=8, given_bits=0, num_bits=models[stage].config.num_bits)
                plain_spn += (part + image_nats(models[stage], values, None, slices=range(1))).tolist()
        keys += names
        raw.append(images)
        context.progress.update(len(keys), num_test, unit="images", note=_note(nats, len(keys), size))
    test = np.concatenate(raw)
    histogram = _train_histogram(dataset, size)
    parts = {
        stage: _part(sum(nats[stage]), models[stage].config, test, histogram, first_given=_first_given(stage, stages))
        for stage in stages
    }
    last = models[stages[-1]].config
    results = Results(
        dataset=dataset.manifest.dataset,
        num_images=num_test,
        image_size=size,
        stages=parts,
        total=Part(
            bits_per_dim=sum(part["bits_per_dim"] for part in parts.values()),
            uniform=sum(part["uniform"] for part in parts.values()),
            histogram=sum(part["histogram"] for part in parts.values()),
        ),
        generated_bits=last.num_given_bits + last.num_bits,
        raw_entropy=raw_entropy_bits(test),
        png=_png_bits_per_dim(test),
    )
    if plain_spn:
        results["size_upscale_as_plain_spn"] = _bits(sum(plain_spn), num_test, size)
    store = open_store(context.out)
    store.write_text(RESULTS, json.dumps(results, indent=1))
    store.write_bytes(PER_IMAGE, _per_image(keys, nats, size))
    metrics = {f"test/bits_per_dim/{stage}": part["bits_per_dim"] for stage, part in parts.items()}
    metrics["test/bits_per_dim/total"] = results["total"]["bits_per_dim"]
    with context.run.open() as run:
        run.log_metrics({"test/bits_per_dim": results["total"]["bits_per_dim"], **metrics})
        run.log_text(json.dumps(results, indent=1), RESULTS)
        run.log_dataset(dataset, resolution=size, bits=8, split="test", context="test")
    test_set = dataset.split_digest(resolution=size, bits=8, split="test")
    _tell_train_runs(context, results, {stage: model.config for stage, model in models.items()}, test_set)
    return NodeResult(outputs={"results": RESULTS, "per_image": PER_IMAGE}, metrics=metrics)


def _first_given(stage: str, stages: Sequence[str]) -> bool:
    return stage == "size_upscale" and "first_slice" in stages


def _bits(nats: float, num_images: int, size: int) -> float:
    return bits_per_dim(nats, num_images=num_images, image_size=size)


def _batches(dataset: Dataset, size: int, *, batch: int) -> Iterator[tuple[list[str], np.ndarray]]:
    """(keys, uint8 [B, H, W, 3]) over all test images at 8 bits; the last batch may be short."""
    for shard in dataset.shards(resolution=size, bits=8, split="test"):
        for group in range(len(shard.row_group_rows)):
            table = read_shard(dataset.uri, shard, row_group=group, columns=["key", "px"])
            for start in range(0, len(table), batch):
                rows = table.slice(start, batch)
                yield rows.column("key").to_pylist(), pixels(rows)


def _note(nats: Mapping[str, list[float]], num_images: int, size: int) -> str:
    return f"{_bits(sum(map(sum, nats.values())), num_images, size):.3f} bits/dim"


def _train_histogram(dataset: Dataset, size: int) -> Histogram:
    histogram = Histogram()
    for shard in dataset.shards(resolution=size, bits=8, split="train"):
        for group in range(len(shard.row_group_rows)):
            histogram.add(pixels(read_shard(dataset.uri, shard, row_group=group, columns=["px"])))
    return histogram


def _part(nats: float, config: SPNConfig, test: np.ndarray, histogram: Histogram, *, first_given: bool) -> Part:
    """Bits/dim of the dims that a stage answers for, beside what a uniform distribution and the histogram need."""
    size, step = config.image_size, config.scaling_factor

    def counted(images: np.ndarray) -> float:
        return histogram.nats(images, given_bits=config.num_given_bits, num_bits=config.num_bits)

    share, chosen = 1 / config.num_slices, counted(test[:, ::step, ::step])
    if config.stage != "first_slice":
        share, chosen = (1 - share, counted(test) - chosen) if first_given else (1.0, counted(test))
    return Part(
        bits_per_dim=_bits(nats, len(test), size),
        uniform=config.num_bits * share,
        histogram=_bits(chosen, len(test), size),
    )


def _png_bits_per_dim(test: np.ndarray) -> float:
    """Size of the images as PNG files (8 bits, Pillow's best effort), in bits per dim."""
    total = 0
    for image in test:
        buffer = io.BytesIO()
        Image.fromarray(image).save(buffer, format="PNG", optimize=True)
        total += buffer.tell()
    return 8 * total / test.size


def _per_image(keys: list[str], nats: Mapping[str, list[float]], size: int) -> bytes:
    columns: dict[str, Any] = {"key": keys}
    for stage, values in nats.items():
        columns[stage] = [_bits(value, 1, size) for value in values]
    columns["total"] = [sum(values) for values in zip(*(columns[stage] for stage in nats), strict=True)]
    buffer = io.BytesIO()
    pq.write_table(pa.table(columns), buffer)
    return buffer.getvalue()


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
            dims=dims + (" without slice (0, 0)" if _first_given(stage, list(configs)) else ""),
        )
        with context.run.at(output.mlflow_run_id).open() as run:
            run.log_metrics({"test/bits_per_dim": part["bits_per_dim"]})
            run.register_model(model)
