"""One stage as a Ray Train job: TorchTrainer, Ray Data ingest, checkpoints with their exact data position.

The only file with TorchTrainer, get_dataset_shard and report. What a step is and how it is resumed is
in spn.training; here are the workers around it. A run is named stage-fingerprint-attempt: Ray Train resumes a name that
it finds on storage, and one that is finished trains nothing more.
"""

from __future__ import annotations

import functools
import json
import posixpath
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import ray.data
import ray.train
import torch
from ray.train.torch import TorchConfig, TorchTrainer, get_device
from torch import Tensor

from data_prep import files as storage
from data_prep.files import Store, UserError
from data_prep.ingest import collate, train_stream
from data_prep.order import draws
from data_prep.parquet import open_dataset
from pipelines import ray_compat
from pipelines.dag.node import NodeContext
from pipelines.nodes.parallel import make_forward, micro_batch_size, sum_over_workers
from spn.bitdepth import stage_values
from spn.checkpoint import CONFIG, EMA, check_start, load_trainer, load_weights, save_checkpoint, start_weights
from spn.config import SPNConfig, TrainConfig
from spn.evaluation import EVAL_BATCH, bits_per_dim, image_nats, scored_slices
from spn.gpu.flops import peak_flops, training_flops
from spn.model import SPN, recompute_activations
from spn.training import Batch, TrainState, fit

if TYPE_CHECKING:  # types only: rules of the configuration do not change what is trained
    from pipelines.config import NodeResources
    from pipelines.nodes.training_samples import TrainingSamples

HISTORY = "history.json"  # beside each checkpoint: all that was logged up to it
TRAINING_SAMPLES = "training_samples"  # key of the grids in MLflow


@dataclass(frozen=True)
class Fitted:
    """What a finished training run leaves."""

    checkpoint: str  # best by validation, folder relative to the attempt
    valid_bits_per_dim: float
    images_seen: int
    history: list[dict[str, float]]  # of the whole run: {"step": ..., "time_ms": since 1970, metric: value}


def fit_stage(context: NodeContext, *, dataset: str) -> Fitted:
    """Train one stage on the Parquet data set at URI `dataset`. Raises ray.train.TrainingFailedError, UserError."""
    stage, model, train = context.config["stage"], context.config["model"], context.config["train"]
    resources: NodeResources = context.options["resources"]
    images = open_dataset(dataset)
    for split in ("train", "valid"):
        if images.num_images(split) == 0:
            key = "data.num_valid_photos" if split == "valid" else "data.root"
            raise UserError(f"{key}: {dataset} has no {split} images; training and choosing a checkpoint need some")
    if train.init_from is not None and context.fresh:  # else it may have been read, and be gone
        check_start_weights(train.init_from, model)
    store = storage.open_store(context.out)
    name = f"{stage}-{context.fingerprint}-{context.attempt}"
    stream = functools.partial(
        train_stream,
        dataset,
        resolution=model.image_size,
        bits=context.config["stored_bits"],
        seed=context.config["seed"],
        # The node's cost sets CPUs aside for reading, but the tasks ask for none: what workers leave over may be spread
        # over machines in parts that are too small for any of them, and they would wait for ever.
        num_cpus_per_task=0,
        # One reads some 1,200 images of 256 pixels a second; a worker on a GPU wants up to 900.
        num_read_tasks=resources.num_workers + 1,
    )
    num_valid = min(train.num_valid_images or images.num_images("valid"), images.num_images("valid"))

    def train_data() -> ray.data.Dataset:
        # Evaluated anew whenever the workers start: the stream begins where the last committed checkpoint stopped.
        start, num_rows = rows_to_read(train, committed_step(store, name))
        rows = None if resources.num_workers == 1 else train.batch_size // resources.num_workers
        return stream(split="train", start_row=start, num_rows=num_rows, rows_per_block=rows)

    def valid_data() -> ray.data.Dataset:
        return stream(split="valid", start_row=0, num_rows=num_valid)  # a fixed set, drawn by the seed

    per_worker = {"CPU": resources.cpus_per_worker}
    if resources.use_gpu:
        per_worker["GPU"] = resources.gpus_per_worker
    in_order = ray.data.ExecutionOptions(preserve_order=True)
    trainer = TorchTrainer(
        train_worker,
        train_loop_config={
            "model": model,
            "train": train,
            "samples": context.options["samples"],
            "stored_bits": context.config["stored_bits"],
            "seed": context.config["seed"],
            "num_threads": max(1, int(resources.cpus_per_worker)),
            "run": context.run,
            "restarts": context.restarts,
            "progress": context.progress,
        },
        scaling_config=ray.train.ScalingConfig(
            num_workers=resources.num_workers, use_gpu=resources.use_gpu, resources_per_worker=per_worker
        ),
        torch_config=TorchConfig(backend="nccl" if resources.use_gpu else "gloo"),
        datasets={"train": train_data, "valid": valid_data},
        # Locality would let the cluster's state decide which worker gets which block. A worker alone needs no split.
        dataset_config=ray.train.DataConfig(
            datasets_to_split=["train"] if resources.num_workers > 1 else [],
            execution_options=in_order,
            enable_shard_locality=False,
        ),
        run_config=ray.train.RunConfig(
            name=name,
            storage_path=store.path(),
            storage_filesystem=store.filesystem,
            checkpoint_config=ray.train.CheckpointConfig(
                num_to_keep=resources.num_to_keep,
                checkpoint_score_attribute="valid/bits_per_dim",
                checkpoint_score_order="min",
            ),
            # The node starts again instead: Ray Train would also repeat what the code itself did wrong.
            failure_config=ray.train.FailureConfig(max_failures=0),
        ),
    )
    result = trainer.fit()
    best, metrics = min(result.best_checkpoints, key=lambda item: item[1]["valid/bits_per_dim"])
    last = posixpath.join(name, posixpath.basename(result.checkpoint.path))
    return Fitted(
        checkpoint=posixpath.join(name, posixpath.basename(best.path)),
        valid_bits_per_dim=metrics["valid/bits_per_dim"],
        images_seen=train.num_steps * train.batch_size,
        history=json.loads(store.read_bytes(posixpath.join(last, HISTORY))),
    )


def committed_step(store: Store, name: str) -> int:
    """Optimiser steps behind the last checkpoint that Ray Train has committed under this run name; 0 without one."""
    checkpoint = ray_compat.committed_checkpoint(store, name)
    return 0 if checkpoint is None else step_of(checkpoint)


def rows_to_read(train: TrainConfig, step: int) -> tuple[int, int]:
    """First row of the stream after `step` optimiser steps, and how many from there on: whole batches, never none.

    A training that was interrupted after its last step reads nothing more, but its workers ask for their shares.
    """
    return step * train.batch_size, max(train.num_steps - step, 1) * train.batch_size


def checkpoint_name(step: int) -> str:
    return f"step-{step:08d}"


def step_of(name: str) -> int:
    return int(name.rsplit("-", 1)[1])


def train_worker(settings: dict[str, Any]) -> None:
    """What each Ray Train worker runs."""
    torch.set_num_threads(settings["num_threads"])
    model_config: SPNConfig = settings["model"]
    config: TrainConfig = settings["train"]
    workers = ray.train.get_context()
    rank, num_workers = workers.get_world_rank(), workers.get_world_size()
    device = get_device()
    torch.manual_seed(settings["seed"])  # equal initial weights on all workers
    model = SPN(model_config).to(device)
    if config.recompute_activations:
        recompute_activations(model)
    state = TrainState.create(model, config)
    history: list[dict[str, float]] = []
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            history = resume(state, Path(folder), device)
    elif config.init_from is not None:
        state.start_from(start_weights_of(config.init_from, model_config))
    forward = make_forward(model, compiled=config.compile, mode=config.compile_mode)
    flops_per_slice, peak = speed_limits(model_config, device)
    # Rank 0 logs the training; the first worker of every other machine opens the run for that machine's numbers alone.
    run = settings["run"].open() if workers.get_local_rank() == 0 else None
    if run is not None:
        run.watch_machine(lambda: state.step, name="" if rank == 0 else f"node_{workers.get_node_rank()}")
    if rank == 0 and settings["restarts"]:
        run.log_history(history)  # what an earlier process had measured and perhaps not sent
        run.log_metrics({"restarts": float(settings["restarts"])}, step=state.step)
    progress, last_score = settings["progress"], ""

    def on_step(step: int) -> None:
        if rank == 0:
            total = config.num_steps * config.batch_size
            progress.update(step * config.batch_size, total, unit="slices", note=last_score)

    def on_log(step: int, metrics: dict[str, float]) -> None:
        nonlocal last_score
        if "valid/bits_per_dim" in metrics:
            last_score = f"valid {metrics['valid/bits_per_dim']:.3f} bits/dim"
        if peak is not None and "train/slices_per_sec" in metrics:
            achieved = metrics["train/slices_per_sec"] * flops_per_slice / num_workers
            metrics = {**metrics, "train/mfu": achieved / peak}
        now = int(time.time() * 1000)
        history.append({"step": step, "time_ms": now, **metrics})
        if rank == 0:
            run.log_metrics(metrics, step=step, time_ms=now)

    def on_checkpoint(state: TrainState, metrics: dict[str, float]) -> None:
        # A barrier of all workers; rank 0's files are the checkpoint, and are on storage when it returns. Nobody else
        # has anything to keep: masks of dropout follow from the micro-batches.
        with tempfile.TemporaryDirectory() as folder:
            if rank == 0:
                save_checkpoint(Path(folder), model=state.model, ema=state.polyak.shadow, trainer=state.trainer_dict())
                (Path(folder) / HISTORY).write_text(json.dumps(history))
            ray.train.report(
                metrics,
                checkpoint=ray.train.Checkpoint.from_directory(folder) if rank == 0 else None,
                checkpoint_dir_name=checkpoint_name(state.step),
            )

    valid = ValidImages(settings, rank=rank, num_workers=num_workers, device=device)
    samples: TrainingSamples | None = settings["samples"]

    def evaluate() -> float:
        score = valid.bits_per_dim(model)
        steps = {"eval_every_steps": config.eval_every_steps, "num_steps": config.num_steps}
        if rank == 0 and samples is not None and samples.due(state.step, **steps):
            image = to_image(valid.pixels[: samples.num_images], device)
            picture = samples.picture(model, image, stored_bits=settings["stored_bits"], precision=config.precision)
            run.log_image(picture, key=TRAINING_SAMPLES, step=state.step)
        return score

    on_step(state.step)
    try:
        fit(
            state,
            config=config,
            batches=micro_batches(settings, first_step=state.step, rank=rank, num_workers=num_workers, device=device),
            forward=forward,
            evaluate=evaluate,
            on_log=on_log,
            on_checkpoint=on_checkpoint,
            on_step=on_step,
            sum_over_workers=sum_over_workers,
        )
    finally:
        if run is not None:
            run.close()


def resume(state: TrainState, folder: Path, device: torch.device) -> list[dict[str, float]]:
    """Load a checkpoint into `state`; returns what had been logged up to it."""
    state.load(
        weights=load_weights(folder, averaged=False, device=str(device)),
        ema=load_weights(folder, averaged=True, device=str(device)),
        trainer=load_trainer(folder),
    )
    return json.loads((folder / HISTORY).read_text())


def check_start_weights(uri: str, config: SPNConfig) -> None:
    """Raises UserError if there is no checkpoint at a path or URI, or one of another network. It reads little."""
    store = storage.open_store(uri)
    for name in (CONFIG, EMA):
        if not store.exists(name):
            raise UserError(f"train.init_from: {uri} has no {name}; it must be the folder of a checkpoint")
    with tempfile.TemporaryDirectory() as folder:
        store.download(CONFIG, Path(folder) / CONFIG)
        try:
            check_start(Path(folder), config)
        except (ValueError, KeyError, TypeError) as error:  # also of a config.json that is something else
            raise UserError(f"train.init_from: {uri}: {str(error).removeprefix('init_from: ')}") from error


def start_weights_of(uri: str, config: SPNConfig) -> dict[str, Tensor]:
    """Averaged weights of the checkpoint folder at a path or URI. Raises UserError as above."""
    check_start_weights(uri, config)
    store = storage.open_store(uri)
    with tempfile.TemporaryDirectory() as folder:
        for name in (CONFIG, EMA):
            store.download(name, Path(folder) / name)
        return start_weights(Path(folder), config)


def speed_limits(config: SPNConfig, device: torch.device) -> tuple[int, float | None]:
    """FLOPs of training one slice, and FLOP/s that the device reaches (None: not known, no train/mfu is logged)."""
    peak = peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return (training_flops(config)[0] if peak else 0), peak


def micro_batches(
    settings: dict[str, Any], *, first_step: int, rank: int, num_workers: int, device: torch.device
) -> Iterator[Sequence[Batch]]:
    """This worker's micro-batches of each optimiser step from `first_step` on.

    Worker r of n gets rows [r G/n, (r+1) G/n) of each global batch of G rows of the stream: the batch does not depend
    on n. Every row's position in the stream is checked, so a wrong order cannot pass unseen.
    """
    config: TrainConfig = settings["train"]
    share = config.batch_size // num_workers
    size = micro_batch_size(share, most=config.micro_batch_size)
    shard = ray.train.get_dataset_shard("train")
    tables = shard.iter_batches(batch_size=size, batch_format="pyarrow", prefetch_batches=2)
    step, done = first_step, []
    for table in tables:
        rows = collate(table)
        start = step * config.batch_size + rank * share + len(done) * size
        expected = np.arange(start, start + len(rows["position"]))
        assert np.array_equal(rows["position"], expected), f"rows {rows['position'][:4]}… instead of {expected[:4]}…"
        done.append(make_batch(rows, settings, device))
        if len(done) * size == share:
            yield done
            step, done = step + 1, []


def make_batch(rows: dict[str, Any], settings: dict[str, Any], device: torch.device) -> Batch:
    """Arrays of the ingest -> what the network reads; target slices and flips are drawn from (seed, key, epoch).

    The first image's draw seeds dropout: workers, whose images differ, have masks of their own, a restart repeats them,
    and with micro-batches of one size they are the same however many workers share them.
    """
    model: SPNConfig = settings["model"]
    train: TrainConfig = settings["train"]
    draw: Callable[..., np.ndarray] = functools.partial(draws, settings["seed"], rows["key"], rows["epoch"])
    image = to_image(rows["px"], device)
    if train.horizontal_flip:
        flip = to_device(draw(purpose="flip", high=2), device) == 1
        image = torch.where(flip[:, None, None, None], image.flip(-1), image)
    if model.stage == "first_slice" and train.slices == "first":
        index = np.zeros(len(image), dtype=np.int64)
    else:
        index = draw(purpose="slice", high=model.num_slices)
    values, given = stage_values(
        image, stored_bits=settings["stored_bits"], given_bits=model.num_given_bits, num_bits=model.num_bits
    )
    dropout_seed = int(draw(purpose="dropout", high=2**63)[0])
    return Batch(values, to_device(index, device), given, rows["key"], dropout_seed)


def to_image(pixels: np.ndarray, device: torch.device) -> Tensor:
    """uint8 [B, H, W, 3] -> integers [B, 3, H, W] on the device: the one place where the layout changes."""
    return to_device(np.ascontiguousarray(pixels), device).permute(0, 3, 1, 2).long()


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """A copy that a GPU makes in its turn, from pinned memory: otherwise each batch waits for the step before."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


class ValidImages:
    """This worker's share of the fixed validation images (uint8, kept in memory) and their exact score."""

    def __init__(self, settings: dict[str, Any], *, rank: int, num_workers: int, device: torch.device) -> None:
        self.settings, self.rank, self.num_workers, self.device = settings, rank, num_workers, device
        self.pixels: np.ndarray | None = None
        self.num_images = 0

    def _load(self) -> np.ndarray:
        tables: list[pa.Table] = list(
            ray.train.get_dataset_shard("valid").iter_batches(batch_size=EVAL_BATCH, batch_format="pyarrow")
        )
        pixels = np.concatenate([collate(table)["px"] for table in tables])
        self.num_images = len(pixels)
        return pixels[self.rank :: self.num_workers].copy()

    def bits_per_dim(self, model: SPN) -> float:
        """Exact: every slice that the stage answers for, of every image, nats summed over all workers, divided once."""
        if self.pixels is None:
            self.pixels = self._load()
        config = model.config
        nats = torch.zeros((), dtype=torch.float64, device=self.device)
        precision = self.settings["train"].precision
        for start in range(0, len(self.pixels), EVAL_BATCH):
            image = to_image(self.pixels[start : start + EVAL_BATCH], self.device)
            values, given = stage_values(
                image,
                stored_bits=self.settings["stored_bits"],
                given_bits=config.num_given_bits,
                num_bits=config.num_bits,
            )
            with torch.autocast(self.device.type, torch.bfloat16, enabled=precision == "bfloat16"):
                nats += image_nats(model, values, given, slices=scored_slices(model, first_given=False)).sum()
        nats = sum_over_workers(nats)
        return bits_per_dim(nats.item(), num_images=self.num_images, image_size=config.image_size)
