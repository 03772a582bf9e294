"""What a training worker gets: its share of each batch, target slices, flips, masks of dropout of its own, and as many
slices at once as its memory holds.

python -m pytest tests/pipelines/nodes/test_train.py
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
import torch.distributed as dist
from toy.context import context

from data_prep import ray_compat
from data_prep.files import Store, UserError, open_store
from pipelines import pipeline
from pipelines.config import NodeResources, TrainNodeConfig
from pipelines.dag.node import NodeOutput
from pipelines.loading import load
from pipelines.nodes import train, trained
from pipelines.nodes.memory import halved, largest_that_fits
from pipelines.tracking import NodeRun, RunHandle
from spn.checkpoint import save_checkpoint
from spn.config import SPNConfig, TrainConfig
from spn.evaluation import bits_per_dim, image_nats
from spn.model import SPN
from spn.ordering import image_to_slices
from spn.training import Batch, fit

BATCH, SIDE, CPU = 8, 4, torch.device("cpu")
SCORES = {train.SCORE: 1.5}


def node(model: SPNConfig, **settings: Any) -> TrainNodeConfig:
    settings = {"batch_size": BATCH, **settings}
    return TrainNodeConfig(
        stage=model.stage,
        model=model,
        train=TrainConfig(**settings),
        stored_bits=8,
        seed=0,
        valid_seed=0,
        resources=NodeResources(),
    )


@pytest.fixture
def size_upscale(tiny_config: Callable[..., SPNConfig]) -> SPNConfig:
    return tiny_config("size_upscale", image_size=SIDE, scaling_factor=2, num_bits=8)


# ---- its share of each batch ---------------------------------------------------------------------------------------


class Shard:
    """A worker's part of the stream from `step` on, as Ray Train hands it out."""

    def __init__(self, rank: int, num_workers: int, step: int, *, num_steps: int = 2) -> None:
        share = BATCH // num_workers
        steps = range(step, step + num_steps)
        self.positions = [s * BATCH + rank * share + row for s in steps for row in range(share)]

    def iter_batches(self, *, batch_size: int, **_: Any) -> Iterator[pa.Table]:
        for start in range(0, len(self.positions), batch_size):
            mine = self.positions[start : start + batch_size]
            pixels = [bytes([position]) * (SIDE * SIDE * 3) for position in mine]
            columns = {
                "key": [f"photo-{position % 12}" for position in mine],
                "px": pa.array(pixels, pa.binary(SIDE * SIDE * 3)),
                "epoch": pa.array([position // 12 for position in mine], pa.int32()),
                "position": pa.array(mine, pa.int64()),
            }
            yield pa.table(columns)


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch, size_upscale: SPNConfig) -> Callable[..., list[list[Batch]]]:
    """batches(rank, of=workers, seed=...) -> the worker's micro-batches of two images, of steps 3 and 4."""

    def build(rank: int, *, of: int, seed: int = 0, first_step: int = 3) -> list[list[Batch]]:
        config = dataclasses.replace(node(size_upscale), seed=seed)
        monkeypatch.setattr(train.ray.train, "get_dataset_shard", lambda _: Shard(rank, of, 3))
        return list(train.micro_batches(config, 2, first_step=first_step, rank=rank, num_workers=of, device=CPU))

    return build


def test_workers_share_a_batch_and_each_draws_masks_of_its_own(batches) -> None:
    """Rows and seeds of dropout are those of one worker alone with micro-batches of this size; no two are the same."""
    alone = batches(0, of=1)
    for workers in (2, 4):
        shares = [batches(rank, of=workers) for rank in range(workers)]
        for step, expected in enumerate(alone):
            together = [batch for share in shares for batch in share[step]]
            assert [batch.seed for batch in together] == [batch.seed for batch in expected]
            assert all(torch.equal(a.image, b.image) for a, b in zip(together, expected, strict=True))
    seeds = [batch.seed for step in alone for batch in step]
    assert len(set(seeds)) == len(seeds) == 8
    assert not set(seeds) & {batch.seed for step in batches(0, of=1, seed=1) for batch in step}


@pytest.mark.parametrize("step", [0, 2, 3])
def test_what_is_left_to_read_is_shared_evenly_after_the_last_step_too(step: int) -> None:
    """A training may be killed between its last checkpoint and its end: its workers start once more."""
    start, num_rows = train.rows_to_read(TrainConfig(num_steps=3, batch_size=BATCH), step)
    assert (start, num_rows) == (step * BATCH, max(3 - step, 1) * BATCH)


def test_rows_of_another_step_are_noticed(batches) -> None:
    with pytest.raises(AssertionError, match="instead of"):
        batches(0, of=1, first_step=2)


# ---- as many slices at once as its memory holds --------------------------------------------------------------------


class Memory:
    """Stands for a network on a GPU that holds `limit` slices: more raise torch's error. Keeps what was tried."""

    def __init__(self, model: SPN, limit: int) -> None:
        self.model, self.limit, self.tried = model, limit, list[int]()

    def __call__(self, image: torch.Tensor, *inputs: Any) -> torch.Tensor:
        self.tried.append(len(image))
        logits = self.model(image, *inputs)
        if len(image) > self.limit:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory.")
        return logits


def find(model: SPN, limit: int, *, share: int = 12, most: int | None = None) -> tuple[int, list[int]]:
    """The micro-batch and what was tried."""
    memory = Memory(model, limit)
    config = TrainConfig(batch_size=share, micro_batch_size=most)
    return train.find_micro_batch(model, memory, config, share=share, trying=True), memory.tried


def test_halves_that_divide_the_share_are_tried_until_one_fits(size_upscale: SPNConfig) -> None:
    model = SPN(size_upscale)
    assert find(model, 100) == (12, [12])
    assert find(model, 5) == (3, [12, 6, 3])
    assert find(model, 1) == (1, [12, 6, 3, 1])
    assert find(model, 100, most=5) == (4, [4]), "5 does not divide 12"
    with pytest.raises(UserError, match="^size_upscale cannot train on this GPU: its memory holds not even one slice"):
        find(model, 0)


@pytest.mark.parametrize(("limit", "compiled"), [(20, [16]), (9, [16, 8])])
def test_at_most_one_size_is_compiled_in_vain(limit: int, compiled: list[int], size_upscale: SPNConfig) -> None:
    class Plain(SPN):
        def forward(self, image: torch.Tensor, *inputs: Any) -> torch.Tensor:
            return plain(image, *inputs)

    plain, memory = Memory(SPN(size_upscale), 9), Memory(SPN(size_upscale), limit)
    config = TrainConfig(batch_size=64, compile=True)
    assert train.find_micro_batch(Plain(size_upscale), memory, config, share=64, trying=True) == compiled[-1]
    assert (plain.tried, memory.tried) == ([64, 32, 16, 8], compiled)


def test_trying_leaves_weights_gradients_and_random_state_alone(tiny_config) -> None:
    model = SPN(tiny_config("depth_upscale", image_size=SIDE, scaling_factor=2, decoder={"dropout": 0.5}))
    weights, state = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    assert find(model, 3)[0] == 3
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_another_error_is_no_lack_of_memory(size_upscale: SPNConfig) -> None:
    def broken(*_: Any) -> torch.Tensor:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        train.find_micro_batch(SPN(size_upscale), broken, TrainConfig(batch_size=4), share=4, trying=True)


@pytest.mark.parametrize("hidden", ["__cause__", "__context__"])
def test_a_lack_of_memory_is_seen_inside_the_compilers_own_error(hidden: str) -> None:
    def attempt(size: int) -> None:
        tried.append(size)
        if size > 3:
            error = RuntimeError("a kernel failed")
            setattr(error, hidden, torch.OutOfMemoryError("CUDA out of memory."))
            raise error

    tried: list[int] = []
    assert largest_that_fits(halved(12), attempt) == 3 and tried == [12, 6, 3]


@pytest.mark.parametrize(("limits", "agreed"), [((100, 5), 3), ((100, 0), None)])
def test_workers_agree_on_what_fits_all_of_them(
    limits: tuple[int, int], agreed: int | None, size_upscale: SPNConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two workers, one of which has less memory: neither waits for the other while it tries."""
    barrier, sizes, found = threading.Barrier(2, timeout=60), list[torch.Tensor](), list[int | None]()

    def all_reduce(own: torch.Tensor, op: dist.ReduceOp) -> None:
        assert op == dist.ReduceOp.MIN
        sizes.append(own.clone())
        barrier.wait()
        own.copy_(min(sizes))

    def work(limit: int) -> None:
        try:
            found.append(find(SPN(size_upscale), limit)[0])
        except UserError:
            found.append(None)

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(
        torch.random, "fork_rng", lambda **_: contextlib.nullcontext()
    )  # this process has one random state
    workers = [threading.Thread(target=work, args=(limit,)) for limit in limits]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert found == [agreed, agreed]


def test_a_restart_keeps_what_the_attempt_has_found(tmp_path: Path) -> None:
    """While it divides the share and keeps to the limit that is set."""
    store = open_store(tmp_path)
    config = TrainConfig(batch_size=24)
    assert train.recorded_micro_batch(store, config, num_workers=2) is None
    store.write_text(train.MICRO_BATCH, json.dumps({"micro_batch_size": 6}))
    assert train.recorded_micro_batch(store, config, num_workers=2) == 6
    assert train.recorded_micro_batch(store, config, num_workers=3) is None
    store.write_text(train.MICRO_BATCH, json.dumps({"micro_batch_size": 0}))
    assert train.recorded_micro_batch(store, config, num_workers=2) is None, "damaged"
    store.write_text(train.MICRO_BATCH, json.dumps({"micro_batch_size": 6}))
    capped = dataclasses.replace(config, micro_batch_size=4)
    assert train.recorded_micro_batch(store, capped, num_workers=2) is None


class Trained(Exception):
    """Ends a worker where it would train."""


@pytest.fixture
def work(size_upscale: SPNConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """work(fit, recorded, **more of the node's config): what one worker does, with `fit` for the training."""
    place = dict.fromkeys(("get_world_rank", "get_local_rank", "get_node_rank"), lambda: 0)
    where = SimpleNamespace(**place, get_world_size=lambda: 1)
    monkeypatch.setattr(train.ray.train, "get_context", lambda: where)
    monkeypatch.setattr(train.ray.train, "get_checkpoint", lambda: None)
    monkeypatch.setattr(train.ray.train, "get_dataset_shard", lambda _: Shard(0, 1, 0))
    monkeypatch.setattr(train, "get_device", lambda: CPU)
    config = node(size_upscale, num_steps=2, micro_batch_size=4)

    def run(fit: Callable[..., None], recorded: int | None = None, **more: Any) -> None:
        monkeypatch.setattr(train, "fit", fit)
        attempt = context("train_size_upscale", dataclasses.replace(config, **more), tmp_path)
        train.train_worker(attempt, recorded)

    return run


@pytest.mark.parametrize("recorded", [None, 2])
def test_a_worker_records_what_it_found_before_it_trains(
    recorded: int | None, work: Callable[..., None], tmp_path: Path
) -> None:
    handed_out = list[int]()

    def fit(*_: Any, batches: Iterator[list[Batch]], **__: Any) -> None:
        handed_out.extend(len(batch.index) for batch in next(batches))
        raise Trained

    with pytest.raises(Trained):
        work(fit, recorded)
    record = tmp_path / train.MICRO_BATCH
    if recorded:
        assert not record.exists() and handed_out == [2, 2, 2, 2]
    else:
        assert json.loads(record.read_text()) == {"micro_batch_size": 4} and handed_out == [4, 4]


@pytest.mark.parametrize(
    ("ranks", "watched"), [((0, 0, 0), (None, "")), ((2, 0, 1), (None, "node_1")), ((3, 1, 1), ("silent", "node_1"))]
)
def test_one_worker_of_each_machine_watches_its_load(
    ranks: tuple[int, int, int], watched: tuple, work: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """ranks: in the world, on its machine, of its machine. Rank 0's metrics have the names of MLflow's own page."""
    for key, rank in zip(("get_world_rank", "get_local_rank", "get_node_rank"), ranks, strict=True):
        monkeypatch.setattr(train.ray.train.get_context(), key, lambda rank=rank: rank)
    found = list[tuple]()
    monkeypatch.setattr(RunHandle, "at", lambda handle, run_id: RunHandle(run_id="silent"))
    monkeypatch.setattr(NodeRun, "send", lambda run, call: True)
    monkeypatch.setattr(NodeRun, "watch_machine", lambda run, *, name: found.append((run.handle.run_id, name)))
    work(lambda *_, **__: None, 2)
    assert found == [watched]


def test_memory_that_runs_out_later_names_the_setting(work: Callable[..., None]) -> None:
    def fit(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(UserError, match="^train.micro_batch_size: the GPU's memory does not hold 4 at once any more; "):
        work(fit)


def test_a_picture_that_cannot_be_drawn_ends_no_training(
    work: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Samples:
        num_images = 1

        def due(self, *_: Any, **__: Any) -> bool:
            return True

        def picture(self, *_: Any, **__: Any) -> np.ndarray:
            raise RuntimeError("no room for a picture")

    valid = SimpleNamespace(bits_per_dim=lambda model: SCORES, pixels=np.zeros((1, SIDE, SIDE, 3), np.uint8))
    monkeypatch.setattr(train, "ValidImages", lambda *_, **__: valid)
    scores = list[dict[str, float]]()
    with pytest.warns(UserWarning, match="^no picture of samples at step 0: no room for a picture$"):
        work(lambda *_, evaluate, **__: scores.append(evaluate()), samples=Samples())
    assert scores == [SCORES]


# ---- validation ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "more", "in_chain", "all_slices"),
    [
        ("size_upscale", {}, range(4), range(4)),
        ("size_upscale", {"first_given": True}, range(1, 4), range(4)),
        ("first_slice", {}, range(1), range(4)),
        ("first_slice", {"slices": "first"}, range(1), range(1)),
    ],
)
def test_validation_scores_the_slices_that_the_chain_uses_and_those_that_train_counts(
    stage: str, more: dict[str, Any], in_chain: range, all_slices: range, tiny_config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both in dims of the full image, and whatever the number of workers."""
    model = SPN(tiny_config(stage, image_size=SIDE, scaling_factor=2, num_bits=8)).eval()
    settings = {key: value for key, value in more.items() if key == "slices"}
    config = dataclasses.replace(node(model.config, **settings), first_given="first_given" in more)
    monkeypatch.setattr(train.ray.train, "get_dataset_shard", lambda name: {"valid": Shard(0, 1, 0)}[name])
    parts = [train.ValidImages(config, rank=rank, num_workers=2, device=CPU) for rank in range(2)]
    monkeypatch.setattr(train, "over_workers", lambda value: value)
    found = [part.bits_per_dim(model) for part in parts]
    image = torch.arange(16)[:, None, None, None].expand(-1, 3, SIDE, SIDE)
    for key, slices in ((train.SCORE, in_chain), (train.ALL_SLICES, all_slices)):
        nats = float(image_nats(model, image, None, slices=slices).sum())
        shown = 1 / len(slices) if stage == "first_slice" else 1  # a mean of slices, as in train/bits_per_dim
        expected = shown * bits_per_dim(nats, num_images=16, image_size=SIDE)
        assert sum(scores[key] for scores in found) == pytest.approx(expected)


def test_the_validation_images_follow_from_the_data_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the trainings of both seeds say so by an equal digest."""
    whole = SimpleNamespace(split_digest=lambda **_: "shards")

    def trains(*overrides: str) -> list[TrainNodeConfig]:
        return [each.config for each in pipeline.nodes(load("debug", overrides)) if each.name.startswith("train_")]

    digests = {train.valid_images_digest(whole, each, 8) for each in (*trains(), *trains("seed=1"))}
    assert {each.valid_seed for each in (*trains(), *trains("seed=1"))} == {0} and len(digests) == 1
    assert {each.valid_seed for each in trains("data.seed=1")} == {1}
    assert [each.first_given for each in trains()] == [False, True, False]


# ---- storage that damages or fills up -------------------------------------------------------------------------------

RUN, STEPS = "size_upscale-f-a", 4


class Ray:
    """Stands for Ray Train in this process: a worker reports to it, and resumes from what it has committed."""

    def __init__(self, store: Store, work: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
        self.store, self.work, self.monkeypatch = store, work, monkeypatch
        monkeypatch.setattr(train, "ValidImages", lambda *_, **__: SimpleNamespace(bits_per_dim=lambda model: SCORES))
        for name in ("report", "get_checkpoint"):
            monkeypatch.setattr(train.ray.train, name, getattr(self, name))

    def report(self, metrics: dict[str, float], *, checkpoint: Any, checkpoint_dir_name: str) -> None:
        shutil.copytree(checkpoint.path, self.checkpoint(checkpoint_dir_name))

    def get_checkpoint(self) -> Any:
        step = self.keep_intact()[0]
        return train.ray.train.Checkpoint.from_directory(self.checkpoint(step)) if step else None

    def checkpoint(self, step: int | str) -> Path:
        return Path(self.store.uri, RUN, step if isinstance(step, str) else f"step-{step:08d}")

    def keep_intact(self) -> tuple[int, list[str]]:
        return ray_compat.keep_intact_checkpoints(self.store.sub(RUN), score=train.SCORE)

    def train(self, num_steps: int = STEPS) -> list[str]:
        """To the end, from what storage holds. Returns what was said of damaged checkpoints."""
        first, lines = self.keep_intact()
        shard = Shard(0, 1, first, num_steps=num_steps - first)
        self.monkeypatch.setattr(train.ray.train, "get_dataset_shard", lambda _: shard)
        every = dict.fromkeys(("eval_every_steps", "checkpoint_every_steps"), 1)
        self.work(fit, train=TrainConfig(num_steps=num_steps, batch_size=BATCH, micro_batch_size=4, **every))
        self.keep_intact()  # as Ray commits each of them
        return lines


@pytest.fixture
def in_ray(work: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ray:
    return Ray(open_store(tmp_path), work, monkeypatch)


def flip_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut": (lambda it: os.truncate(it / "model.safetensors", 100), "model.safetensors has 100 bytes instead of"),
    "emptied": (lambda it: os.truncate(it / "trainer.pt", 0), "trainer.pt has 0 bytes instead of"),
    "missing": (lambda it: (it / "ema.safetensors").unlink(), "ema.safetensors is missing"),
    "bit of the weights": (lambda it: flip_bit(it / "model.safetensors"), "model.safetensors does not match its check"),
    "bit of the optimizer": (lambda it: flip_bit(it / "trainer.pt"), "trainer.pt does not match its checksum"),
    "damaged list": (lambda it: (it / "checksums.json").write_text("{"), "checksums.json is not readable"),
    "damaged history": (lambda it: (it / "history.json").write_text("{"), "history.json has 1 bytes instead of"),
    "damaged record": (lambda it: (it.parent / "checkpoint_manager_snapshot.json").write_text("{"), ""),
}


@pytest.mark.parametrize(("harm", "line"), DAMAGES.values(), ids=DAMAGES)
def test_a_training_resumes_from_its_newest_intact_checkpoint_and_ends_like_an_unbroken_one(
    harm: Callable[[Path], object], line: str, in_ray: Ray
) -> None:
    assert in_ray.train() == []
    last, newest = in_ray.checkpoint(STEPS), in_ray.checkpoint(STEPS - 1)
    whole = {file.name: file.read_bytes() for file in last.iterdir() if file.suffix in (".safetensors", ".pt")}
    shutil.rmtree(last)
    assert in_ray.keep_intact() == (STEPS - 1, [])
    harm(newest)
    lines = in_ray.train()
    assert {name: (last / name).read_bytes() for name in whole} == whole
    assert len(lines) == bool(line) and newest.is_dir()
    if line:
        assert lines[0].startswith(f"{newest.name} is damaged ({line}")
        assert lines[0].endswith(f" and set aside as damaged-{newest.name}")
        assert newest.with_name(f"damaged-{newest.name}").is_dir()


def test_a_longer_training_extends_a_finished_one_to_the_weights_of_an_unbroken_one(in_ray: Ray) -> None:
    in_ray.train()
    whole = (in_ray.checkpoint(STEPS) / "model.safetensors").read_bytes()
    shutil.rmtree(in_ray.checkpoint(""))
    in_ray.train(num_steps=STEPS - 2)
    finished = in_ray.checkpoint("").rename(in_ray.checkpoint("").with_name("finished"))
    for _ in range(2):  # the second time it has checkpoints of its own
        ray_compat.copy_checkpoints(in_ray.store.sub("finished"), in_ray.store.sub(RUN))
        in_ray.train(num_steps=STEPS - 1)
    in_ray.train()
    assert (in_ray.checkpoint(STEPS) / "model.safetensors").read_bytes() == whole
    assert sorted(file.name for file in finished.iterdir() if file.is_dir()) == ["step-00000001", "step-00000002"]


def test_what_a_killed_writer_left_is_no_checkpoint(in_ray: Ray) -> None:
    """And one that was whole before Ray knew of it is."""
    in_ray.train()
    in_ray.checkpoint("checkpoint_manager_snapshot.json").unlink()
    (in_ray.checkpoint(4) / ray_compat.CHECKSUMS).unlink()  # it is written last
    assert in_ray.keep_intact() == (3, [])
    assert not in_ray.checkpoint(4).exists() and not in_ray.checkpoint("damaged-step-00000004").exists()


def test_a_full_disk_is_named_by_the_worker_that_writes_a_checkpoint(
    in_ray: Ray, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(train.ray.train, "report", full)
    with pytest.raises(OSError, match="No space left on device") as raised:
        in_ray.train()
    assert raised.value.filename == in_ray.store.uri
    monkeypatch.setattr(train, "save_checkpoint", full)
    with pytest.raises(OSError, match="No space left on device") as raised:
        in_ray.train()
    assert Path(raised.value.filename).parent == Path(tempfile.gettempdir())


# ---- what it begins with -------------------------------------------------------------------------------------------


def checkpoint(folder: Path, config: SPNConfig) -> Path:
    model = SPN(config)
    folder.mkdir()
    save_checkpoint(folder, model=model, ema=model, trainer={})
    return folder


def test_weights_to_start_from_are_those_of_the_same_network(tiny_config: Callable[..., Any], tmp_path: Path) -> None:
    config = tiny_config("size_upscale", image_size=SIDE, scaling_factor=2)
    folder = checkpoint(tmp_path / "checkpoint", config)
    assert trained.start_weights_of(str(folder), config).keys() == dict(SPN(config).named_parameters()).keys()
    other = dataclasses.replace(config, num_bits=3)
    with pytest.raises(UserError, match=f"^train.init_from: {folder}: num_bits is 3 here, 1 in the checkpoint$"):
        trained.start_weights_of(str(folder), other)
    (folder / "config.json").write_text("[]")
    with pytest.raises(UserError, match=f"^train.init_from: {folder}: "):
        trained.start_weights_of(str(folder), config)
    with pytest.raises(UserError, match="^train.init_from: /nowhere has no config.json; it must be the folder of a "):
        trained.start_weights_of("/nowhere", config)


def test_data_without_validation_images_is_the_users_mistake(
    monkeypatch: pytest.MonkeyPatch, size_upscale: SPNConfig
) -> None:
    images = SimpleNamespace(uri="set", num_images=lambda split: 0 if split == "valid" else 1)
    monkeypatch.setattr(train, "open_dataset", lambda _: images)
    inputs = {"prepare_data": NodeOutput("/data", {"dataset": "dataset"}, "1")}
    with pytest.raises(UserError, match="no valid images"):
        train.run(SimpleNamespace(config=node(size_upscale), inputs=inputs))


# ---- batches -------------------------------------------------------------------------------------------------------


@pytest.fixture
def made(tiny_config: Callable[..., Any]) -> Callable[..., Batch]:
    """made(stage, epoch=..., **of TrainConfig) -> a batch of 400 random 8-bit images of that stage at S = 2."""

    def build(stage: str, *, epoch: int = 0, **settings: Any) -> Batch:
        bits = {"depth_upscale": dict(num_given_bits=3, num_bits=5)}.get(stage, dict(num_bits=3))
        model = tiny_config(stage, image_size=SIDE, scaling_factor=2, **bits)
        pixels = np.random.default_rng(0).integers(0, 256, (400, SIDE, SIDE, 3), dtype=np.uint8)
        keys = [f"photo-{number}" for number in range(400)]
        rows = {"px": pixels, "key": keys, "epoch": np.full(400, epoch)}
        return train.make_batch(rows, node(model, **settings), CPU)

    return build


@pytest.mark.parametrize("stage", ["first_slice", "size_upscale", "depth_upscale"])
def test_target_slices_are_drawn_evenly_from_all_meta_positions(stage, made) -> None:
    """An unbiased estimate needs each of the four as often: 100 of 400, four standard deviations allowed."""
    index = made(stage).index
    counts = index.bincount(minlength=4)
    assert len(counts) == 4 and (counts - 100).abs().max() < 4 * (400 * 3 / 16) ** 0.5
    assert torch.equal(index, made(stage).index)
    assert not torch.equal(index, made(stage, epoch=1).index)


def test_a_first_slice_network_trains_on_slice_0_0_alone_if_asked(made) -> None:
    """Other stages need all slices whatever is set."""
    assert not made("first_slice", slices="first").index.any()
    assert len(made("size_upscale", slices="first").index.unique()) == 4


def test_a_network_gets_the_bits_that_it_generates_and_those_above_as_given(made) -> None:
    low, high = made("size_upscale"), made("depth_upscale")
    assert low.given is None and low.image.max() == 7 and high.image.max() == 31
    assert torch.equal(high.given, low.image)


def test_half_of_the_images_are_flipped_if_asked(made) -> None:
    """As whole images, before they are cut into slices, and the given bits with them."""
    plain, flipped = made("depth_upscale"), made("depth_upscale", horizontal_flip=True)
    turned = torch.tensor([not torch.equal(a, b) for a, b in zip(plain.image, flipped.image, strict=True)])
    assert 160 < turned.sum() < 240
    for whole, other in ((plain.image, flipped.image), (plain.given, flipped.given)):
        assert torch.equal(other[turned], whole[turned].flip(-1))
    mirrored = image_to_slices(plain.image, 2)[turned].flip(-1)  # slice (0, 0) of the flipped image was slice (0, 1)
    assert torch.equal(image_to_slices(flipped.image, 2)[turned][:, 0], mirrored[:, 1])
