"""train_<stage>: one network of the chain, trained by a TorchTrainer of its own (paper section 3.3).

An optimiser step is in spn/training.py, a network in spn/model.py. Here are the workers around them: their shares of
each batch, the micro-batch that their memory holds, exact validation, and checkpoints with their exact position in the
data. A Ray Train run is named stage-fingerprint-attempt: Ray Train resumes a run that it finds on
storage under this name, and one that is finished trains no further.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import json
import posixpath
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import ray.data
import ray.train
import torch
import torch.distributed as dist
from ray.train.torch import TorchConfig, get_device
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from data_prep import ray_compat
from data_prep.files import Store, UserError, naming_full_disk, open_store
from data_prep.ingest import collate, train_stream
from data_prep.parquet import Dataset, draws, open_dataset
from pipelines.config import TrainNodeConfig
from pipelines.dag.node import NodeContext, NodeResult
from pipelines.nodes.memory import free_memory, halved, largest_that_fits, naming_full_memory
from pipelines.nodes.trained import start_weights_of
from spn.bitdepth import stage_values
from spn.checkpoint import CONFIG, load_trainer, load_weights, save_checkpoint
from spn.config import TrainConfig
from spn.evaluation import EVAL_BATCH, bits_per_dim, stage_nats
from spn.model import SPN, recompute_activations
from spn.training import Batch, TrainState, batch_nats, fit

HISTORY = "history.json"  # all that was logged: of the whole training, and beside each checkpoint up to it
MICRO_BATCH = "micro_batch.json"  # what was found at the start of the attempt
SCORE, ALL_SLICES = "valid/bits_per_dim", "valid/bits_per_dim/all_slices"
SAMPLES = "training_samples"  # key of the grids in MLflow


def run(context: NodeContext[TrainNodeConfig]) -> NodeResult:
    """Trains a stage on the dataset of prepare_data. Raises ray.train.TrainingFailedError, UserError."""
    config, dataset = context.config, open_dataset(context.inputs["prepare_data"].place("dataset"))
    for split, key in (("train", "data.root"), ("valid", "data.num_valid_photos")):
        if dataset.num_images(split) == 0:
            raise UserError(f"{key}: {dataset.uri} has no {split} images; training and validation need some")
    store = open_store(context.out)
    name = f"{config.stage}-{context.fingerprint}-{context.attempt}"
    if context.extends is not None:
        base = posixpath.dirname(context.extends.named["checkpoint"])
        ray_compat.copy_checkpoints(open_store(context.extends.uri).sub(base), store.sub(name))
    step, lines = ray_compat.keep_intact_checkpoints(store.sub(name), score=SCORE)
    for line in lines:
        print(line)  # to the attempt's log, and to the screen
        context.progress.update(0, config.train.num_steps * config.train.batch_size, unit="slices", note=line)
    num_valid = min(config.train.num_valid_images or dataset.num_images("valid"), dataset.num_images("valid"))

    def log_inputs() -> None:
        with context.run.open() as run:
            for split, purpose in (("train", "training"), ("valid", "validation")):
                run.log_dataset(
                    dataset, resolution=config.model.image_size, bits=config.stored_bits, split=split, context=purpose
                )
            run.set_tags({"valid_images": valid_images_digest(dataset, config, num_valid)})

    logs = threading.Thread(target=log_inputs, daemon=True)  # while the training starts: importing MLflow takes seconds
    logs.start()
    trainer = _trainer(context, store, name=name, step=step, dataset=dataset.uri, num_valid=num_valid)
    result = ray_compat.fit(trainer)
    logs.join()
    history = json.loads(store.read_bytes(posixpath.join(name, posixpath.basename(result.checkpoint.path), HISTORY)))
    store.write_text(HISTORY, json.dumps(history, indent=1))
    ranked = sorted(result.best_checkpoints, key=lambda each: each[1][SCORE])
    scores = {posixpath.join(name, posixpath.basename(found.path)): metrics[SCORE] for found, metrics in ranked}
    checkpoint = next((each for each in scores if not ray_compat.check_checkpoint(store.sub(each))[0]), None)
    if checkpoint is None:
        raise OSError(errno.EIO, "no checkpoint is intact", store.uri_of(name))  # retried
    with context.run.open() as run:
        run.log_text(store.read_bytes(f"{checkpoint}/{CONFIG}").decode(), CONFIG)
    metrics = {SCORE: scores[checkpoint], "images_seen": float(config.train.num_steps * config.train.batch_size)}
    return NodeResult(outputs={"checkpoint": checkpoint, "history": HISTORY}, metrics=metrics)


def valid_images_digest(dataset: Dataset, config: TrainNodeConfig, num_images: int) -> str:
    """Equal for trainings of any seed and any stage that validate on the same images."""
    whole = dataset.split_digest(resolution=config.model.image_size, bits=8, split="valid")
    return hashlib.sha256(f"{whole} {config.valid_seed} {num_images}".encode()).hexdigest()[:32]


def _trainer(
    context: NodeContext[TrainNodeConfig], store: Store, *, name: str, step: int, dataset: str, num_valid: int
) -> DataParallelTrainer:
    """step: of the checkpoint that it resumes from, where its data begins."""
    config = context.config
    resources, train = config.resources, config.train
    stream = functools.partial(
        train_stream,
        dataset,
        resolution=config.model.image_size,
        bits=config.stored_bits,
        # The node's cost sets CPUs aside for reading, but the read tasks ask for none: what the workers leave over may
        # be spread over machines in parts that are too small for any task, which would then wait for ever.
        num_cpus_per_task=0,
        # One task reads about 1,200 images of 256 pixels per second; a worker on a GPU needs up to 900.
        num_read_tasks=resources.num_workers + 1,
    )

    start, num_rows = rows_to_read(train, step)
    is_shared = resources.num_workers > 1
    rows = train.batch_size // resources.num_workers if is_shared else None
    train_data = functools.partial(
        stream, split="train", seed=config.seed, start_row=start, num_rows=num_rows, rows_per_block=rows
    )
    valid_data = functools.partial(stream, split="valid", seed=config.valid_seed, start_row=0, num_rows=num_valid)
    recorded = recorded_micro_batch(store, train, num_workers=resources.num_workers)
    return DataParallelTrainer(
        functools.partial(train_worker, context, recorded),
        scaling_config=ray.train.ScalingConfig(
            num_workers=resources.num_workers, use_gpu=resources.use_gpu, resources_per_worker=resources.worker
        ),
        # One worker has nobody to talk to, and the controller need not import PyTorch.
        backend_config=TorchConfig(backend="nccl" if resources.use_gpu else "gloo") if is_shared else None,
        datasets={"train": train_data, "valid": valid_data},
        # Locality would let the cluster's state decide which worker gets which block. One worker needs no split.
        dataset_config=ray.train.DataConfig(
            datasets_to_split=["train"] if is_shared else [],
            execution_options=ray.data.ExecutionOptions(preserve_order=True),
            enable_shard_locality=False,
        ),
        run_config=ray.train.RunConfig(
            name=name,
            storage_path=store.path(),
            storage_filesystem=store.filesystem,
            checkpoint_config=ray.train.CheckpointConfig(
                num_to_keep=resources.num_to_keep,
                checkpoint_score_attribute=SCORE,
                checkpoint_score_order="min",
            ),
            # The node is retried instead: Ray Train would also repeat an error of the code itself.
            failure_config=ray.train.FailureConfig(max_failures=0),
        ),
    )


def rows_to_read(train: TrainConfig, step: int) -> tuple[int, int]:
    """First row of the stream after `step` optimiser steps, and how many rows from there on: whole batches, never none.

    A training that was interrupted after its last step reads nothing more, but its workers ask for their shares.
    """
    return step * train.batch_size, max(train.num_steps - step, 1) * train.batch_size


# ---- a worker ---------------------------------------------------------------------------------------------------


def train_worker(context: NodeContext[TrainNodeConfig], recorded: int | None) -> None:
    """What each Ray Train worker runs. recorded: micro-batch of the attempt; None: to be found."""
    node, config = context.config, context.config.train
    torch.set_num_threads(node.resources.num_threads)
    workers = ray.train.get_context()
    rank, num_workers = workers.get_world_rank(), workers.get_world_size()
    device = get_device()
    # Read meanwhile: the processes that read then exist already when training begins.
    valid = ValidImages(node, rank=rank, num_workers=num_workers, device=device)
    torch.backends.cudnn.allow_tf32 = False  # float32 means float32
    torch.manual_seed(node.seed)  # equal initial weights on all workers
    model = SPN(node.model).to(device)
    if config.recompute_activations:
        recompute_activations(model)
    forward = make_forward(model, config)
    state = TrainState.create(model, config)
    history: list[dict[str, float]] = []
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            history = resume(state, Path(folder), device)
    elif node.init_from is not None:
        state.start_from(start_weights_of(node.init_from, node.model))
    share = config.batch_size // num_workers
    if (micro_batch_size := recorded) is None:
        micro_batch_size = find_micro_batch(model, forward, config, share=share, trying=device.type == "cuda")
        if rank == 0:
            open_store(context.out).write_text(MICRO_BATCH, json.dumps({"micro_batch_size": micro_batch_size}))
    note = f"{num_workers} x {micro_batch_size:,} slices x {share // micro_batch_size:,} accumulated"
    recorder = Recorder(context, state, history, note=note)

    def evaluate() -> dict[str, float]:
        scores = valid.bits_per_dim(state.ema)
        recorder.draw(valid)
        return scores

    recorder.on_step(state.step)
    batches = micro_batches(
        node, micro_batch_size, first_step=state.step, rank=rank, num_workers=num_workers, device=device
    )
    with contextlib.closing(recorder), naming_full_memory("train.micro_batch_size", micro_batch_size):
        fit(
            state,
            config=config,
            batches=batches,
            forward=forward,
            evaluate=evaluate,
            on_log=recorder.on_log,
            on_checkpoint=recorder.on_checkpoint,
            on_step=recorder.on_step,
            sum_over_workers=over_workers,
        )


class Recorder:
    """Records a training: rank 0 its progress, measurements, checkpoints and pictures; the first worker of every other
    machine that machine's load; the other workers nothing."""

    def __init__(
        self, context: NodeContext[TrainNodeConfig], state: TrainState, history: list[dict[str, float]], *, note: str
    ) -> None:
        workers, silent = ray.train.get_context(), context.run.at(None)
        self.context, self.state, self.history, self.note = context, state, history, note
        self.is_first, self.num_workers = workers.get_world_rank() == 0, workers.get_world_size()
        self.peak_speed = peak_speed(state.model)
        self.machine = (context.run if workers.get_local_rank() == 0 else silent).open()
        self.machine.watch_machine(name="" if self.is_first else f"node_{workers.get_node_rank()}")
        self.run = self.machine if self.is_first else silent.open()
        if context.restarts:  # waits for the server: what an earlier process had measured and perhaps not sent
            mark = {"step": state.step, "time_ms": int(time.time() * 1000), "restarts": context.restarts}
            self.run.log_history([*history, mark])

    def on_step(self, step: int) -> None:
        if self.is_first:
            train = self.context.config.train
            done, total = step * train.batch_size, train.num_steps * train.batch_size
            self.context.progress.update(done, total, unit="slices", note=self.note)

    def on_log(self, step: int, metrics: dict[str, float]) -> None:
        if SCORE in metrics:
            self.note = f"valid {metrics[SCORE]:.3f} bits/dim"
        if self.peak_speed is not None and "train/slices_per_sec" in metrics:
            mfu = metrics["train/slices_per_sec"] / self.num_workers / self.peak_speed
            metrics = {**metrics, "train/mfu": mfu}
        now = int(time.time() * 1000)
        self.history.append({"step": step, "time_ms": now, **metrics})
        self.run.log_metrics(metrics, step=step, time_ms=now)

    def on_checkpoint(self, state: TrainState, metrics: dict[str, float]) -> None:
        """A barrier of all workers. Rank 0's files are the checkpoint, and are on storage when it returns. The other
        workers have nothing of their own to keep: masks of dropout follow from the micro-batches."""
        with tempfile.TemporaryDirectory() as folder:
            if self.is_first:
                with naming_full_disk(folder):
                    save_checkpoint(Path(folder), model=state.model, ema=state.ema, trainer=state.trainer_dict())
                    (Path(folder) / HISTORY).write_text(json.dumps(self.history))
                    ray_compat.seal_checkpoint(open_store(folder), metrics)
            with naming_full_disk(self.context.out):
                ray.train.report(
                    metrics,
                    checkpoint=ray.train.Checkpoint.from_directory(folder) if self.is_first else None,
                    checkpoint_dir_name=f"step-{state.step:08d}",
                )

    def draw(self, valid: ValidImages) -> None:
        """A grid of samples, if one is due."""
        node, step, samples = self.context.config, self.state.step, self.context.config.samples
        steps = {"eval_every_steps": node.train.eval_every_steps, "num_steps": node.train.num_steps}
        if not self.is_first or samples is None or not samples.due(step, **steps):
            return
        try:
            model = self.state.ema
            image = to_image(valid.pixels[: samples.num_images], next(model.parameters()).device)
            picture = samples.picture(model, image, stored_bits=node.stored_bits, precision=node.train.precision)
            self.run.log_image(picture, key=SAMPLES, step=step)
        except Exception as error:  # it is for people alone: the training goes on
            warnings.warn(f"no picture of samples at step {step:,}: {error}", stacklevel=1)

    def close(self) -> None:
        self.machine.close()


def make_forward(model: nn.Module, config: TrainConfig) -> Callable[..., Tensor]:
    """What a training step calls instead of the model: on a GPU its fast forms, compiled if asked for; wrapped where
    there are several workers.

    The wrapper has `no_sync`, so that only a step's last micro-batch exchanges gradients. It begins with rank 0's
    weights on all workers.
    """
    forward: Callable[..., Tensor] = model
    if config.compile or next(model.parameters()).device.type == "cuda":
        from spn.gpu.training import speed_up

        # By default the compiler cuts the graph into pieces, so that the exchange begins before the backward pass ends.
        # Once in a whole optimiser step that saves less than the cuts cost in every micro-batch.
        torch._dynamo.config.optimize_ddp = False
        forward = speed_up(model, compiled=config.compile)
    is_shared = dist.is_initialized() and dist.get_world_size() > 1
    return DistributedDataParallel(forward) if is_shared else forward


def over_workers(value: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
    """The sum, or another `op`, over all workers, on each of them. All must call it. `value` itself is left alone."""
    total = value.clone()
    if dist.is_initialized():
        dist.all_reduce(total, op=op)
    return total


def peak_speed(model: SPN) -> float | None:
    """Slices per second at the peak FLOP/s of a worker's GPU; None: not known, so no train/mfu is logged."""
    device = next(model.parameters()).device
    if device.type != "cuda":
        return None
    from spn.gpu.flops import peak_flops, training_flops

    peak = peak_flops(torch.cuda.get_device_name(device))
    return None if peak is None else peak / training_flops(model.config)[0]


# ---- the micro-batch --------------------------------------------------------------------------------------------


def recorded_micro_batch(store: Store, train: TrainConfig, *, num_workers: int) -> int | None:
    """What the attempt found at its start; None if it has not yet, or if that suits no longer."""
    if not store.exists(MICRO_BATCH):
        return None
    share = train.batch_size // num_workers
    try:
        size = json.loads(store.read_bytes(MICRO_BATCH))["micro_batch_size"]
        return size if share % size == 0 and size <= (train.micro_batch_size or share) else None
    except (ValueError, KeyError, TypeError, ZeroDivisionError):  # damaged
        return None


def find_micro_batch(
    model: SPN, forward: Callable[..., Tensor], config: TrainConfig, *, share: int, trying: bool
) -> int:
    """Slices that a worker holds at once: its share of the batch, at most train.micro_batch_size.

    trying: halved until one forward and backward pass fits on all workers, which all call this. Weights and random
    state stay as they are. Raises UserError if not even one slice fits.
    """
    sizes = list(halved(min(share, config.micro_batch_size or share), divides=share))
    if not trying:
        return sizes[0]

    def fits(forward: Callable[..., Tensor]) -> int:
        return largest_that_fits(sizes, functools.partial(try_micro_batch, model, forward, config, share=share))

    if config.compile:  # for a minute at each size. The network as it is needs more memory, but not twice as much
        plain = fits(model)
        sizes = sizes[max(0, sizes.index(plain) - 1) :] if plain else sizes[-1:]
    found = fits(forward.module if isinstance(forward, DistributedDataParallel) else forward)  # each worker by itself
    own = torch.tensor(found, device=next(model.parameters()).device)
    agreed = int(over_workers(own, dist.ReduceOp.MIN))
    if agreed != found:
        free_memory()
    if agreed == 0:
        raise UserError(
            f"{model.config.stage} cannot train on this GPU: its memory holds not even one slice; "
            "train.recompute_activations=true or a smaller network needs less"
        )
    return agreed


def try_micro_batch(model: SPN, forward: Callable[..., Tensor], config: TrainConfig, size: int, *, share: int) -> None:
    """A forward and a backward pass over `size` slices, with everything in memory that a training keeps there."""
    device, side = next(model.parameters()).device, model.config.image_size
    weights = list(model.parameters())
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        try:
            for p in weights:
                p.grad = torch.zeros_like(p)  # of the micro-batches before
            optimizer_state = [torch.empty_like(p) for p in weights for _ in range(2)]  # no optimiser here keeps more
            # The images of this step, and those of the next one, which are copied while the GPU works.
            image = torch.zeros((2 * share, 3, side, side), dtype=torch.long, device=device)
            given = torch.zeros_like(image) if model.config.num_given_bits else None
            index = torch.zeros(size, dtype=torch.long, device=device)
            values, above = image[:size], None if given is None else given[:size]
            batch_nats(model, Batch(values, index, above, []), config=config, forward=forward).backward()
            del optimizer_state
        finally:
            for p in weights:
                p.grad = None


# ---- data -------------------------------------------------------------------------------------------------------


def micro_batches(
    node: TrainNodeConfig, size: int, *, first_step: int, rank: int, num_workers: int, device: torch.device
) -> Iterator[Sequence[Batch]]:
    """This worker's micro-batches of `size` slices, of each optimiser step from `first_step` on.

    Worker r of n gets rows [r G/n, (r+1) G/n) of each global batch of G rows of the stream: the batch does not depend
    on n. Every row's position in the stream is checked, so a wrong order cannot pass unseen.
    """
    batch_size = node.train.batch_size
    share = batch_size // num_workers
    shard = ray.train.get_dataset_shard("train")
    step, done = first_step, list[Batch]()
    for table in shard.iter_batches(batch_size=size, batch_format="pyarrow", prefetch_batches=2):
        rows = collate(table)
        start = step * batch_size + rank * share + len(done) * size
        expected = np.arange(start, start + len(rows["position"]))
        assert np.array_equal(rows["position"], expected), f"rows {rows['position'][:4]}… instead of {expected[:4]}…"
        done.append(make_batch(rows, node, device))
        if len(done) * size == share:
            yield done
            step, done = step + 1, []


def make_batch(rows: Mapping[str, Any], node: TrainNodeConfig, device: torch.device) -> Batch:
    """Arrays of the ingest -> what the network reads; target slices and flips are drawn from (seed, key, epoch).

    The first image's draw seeds dropout: workers, whose images differ, have masks of their own, a restart repeats them,
    and with micro-batches of one size they are the same however many workers share them.
    """
    model, train = node.model, node.train
    draw: Callable[..., np.ndarray] = functools.partial(draws, node.seed, rows["key"], rows["epoch"])
    image = to_image(rows["px"], device)
    if train.horizontal_flip:
        flip = to_device(draw(purpose="flip", high=2), device) == 1
        image = torch.where(flip[:, None, None, None], image.flip(-1), image)
    if model.stage == "first_slice" and train.slices == "first":
        index = np.zeros(len(image), dtype=np.int64)
    else:
        index = draw(purpose="slice", high=model.num_slices)
    values, given = stage_values(
        image, stored_bits=node.stored_bits, given_bits=model.num_given_bits, num_bits=model.num_bits
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
    """This worker's share of the fixed validation images (uint8, read in a thread and kept in memory) and their exact
    score."""

    def __init__(self, node: TrainNodeConfig, *, rank: int, num_workers: int, device: torch.device) -> None:
        self.node, self.rank, self.num_workers, self.device = node, rank, num_workers, device
        self.num_images = 0  # of all workers
        self._read = ThreadPoolExecutor(1).submit(self._pixels, ray.train.get_dataset_shard("valid"))

    def _pixels(self, shard: ray.data.DataIterator) -> np.ndarray:
        tables = shard.iter_batches(batch_size=EVAL_BATCH, batch_format="pyarrow")
        pixels = np.concatenate([collate(table)["px"] for table in tables])
        self.num_images = len(pixels)
        return pixels[self.rank :: self.num_workers].copy()

    @property
    def pixels(self) -> np.ndarray:
        return self._read.result()

    def bits_per_dim(self, model: SPN) -> dict[str, float]:
        """Exact, nats summed over all workers and divided once. SCORE: of the slices that the chain takes from this
        network, as in test/bits_per_dim. ALL_SLICES: of those that it trains on, as in train/bits_per_dim.
        """
        config, train, half = model.config, self.node.train, self.node.train.precision == "bfloat16"
        is_first = config.stage == "first_slice"
        slices = range(1 if is_first and train.slices == "first" else config.num_slices)
        nats = torch.zeros(len(slices), dtype=torch.float64, device=self.device)
        for start in range(0, len(self.pixels), EVAL_BATCH):
            image = to_image(self.pixels[start : start + EVAL_BATCH], self.device)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=half):
                nats += stage_nats(model, image, slices=slices, stored_bits=self.node.stored_bits).sum((0, 2))
        nats = over_workers(nats)
        in_chain = nats[:1] if is_first else nats[1:] if self.node.first_given else nats
        # A first_slice network is given no other slice, so that all are draws of one kind: their mean.
        found = {SCORE: in_chain.sum(), ALL_SLICES: nats.mean() if is_first else nats.sum()}
        size = config.image_size
        return {
            key: bits_per_dim(value.item(), num_images=self.num_images, image_size=size) for key, value in found.items()
        }


def resume(state: TrainState, folder: Path, device: torch.device) -> list[dict[str, float]]:
    """Loads a checkpoint into `state`; returns what had been logged up to it."""
    state.load(
        weights=load_weights(folder, averaged=False, device=str(device)),
        ema=load_weights(folder, averaged=True, device=str(device)),
        trainer=load_trainer(folder),
    )
    return json.loads((folder / HISTORY).read_text())
