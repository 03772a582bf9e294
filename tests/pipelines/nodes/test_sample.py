"""Distributed drawing: the same bytes whatever the workers, their order and their deaths; what is finished is kept.

python -m pytest tests/pipelines/nodes/test_sample.py
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from toy.context import context

from data_prep.files import UserError, open_store
from data_prep.parquet import pixels
from pipelines.config import NodeResources, SampleNodeConfig
from pipelines.dag.node import NodeOutput, Picture
from pipelines.dag.progress import Reporter, Update
from pipelines.nodes import sample
from pipelines.nodes.sample import Chunk, DrawingWorker, Job, chunks_of, draw, read_chunks
from pipelines.nodes.trained import load_stage_configs, load_stages
from pipelines.nodes.workers import gang_name
from spn.sampling import rows_to_sample, sample_chain

STAGES = ("first_slice", "size_upscale", "depth_upscale")
PARQUET = "res=8/bits=6"
TWELVE = Chunk(tuple(f"{n:05d}" for n in range(12)), tuple(range(12)))
distributed = pytest.mark.slow  # every worker is a process that imports torch and Ray


def config(workers: int = 1, **changes: Any) -> SampleNodeConfig:
    """Of the whole chain, two images at once."""
    base = SampleNodeConfig(
        stages=STAGES,
        num_images=12,
        batch_size=2,
        seed=7,
        temperature=dict.fromkeys(STAGES, 1.0),
        top_p=dict.fromkeys(STAGES),
        precision="float32",
        decoder="auto",
        resources=NodeResources(num_workers=workers, cpus_per_worker=0.5),
    )
    return dataclasses.replace(base, **changes)


@pytest.fixture
def job(networks: dict[str, NodeOutput], tmp_path: Path) -> Callable[..., Job]:
    """job(folder, workers, **changes of the config) -> a job that draws into that folder."""
    return lambda folder, workers=1, **changes: Job(config(workers, **changes), networks, str(tmp_path / folder))


def content(folder: str | Path) -> dict[str, str]:
    """{path: digest} of all files below."""
    root = Path(folder)
    return {
        str(p.relative_to(root)): hashlib.sha256(p.read_bytes()).hexdigest() for p in root.rglob("*") if p.is_file()
    }


class Progress(Reporter):
    """Keeps what was reported in this process."""

    def __init__(self) -> None:
        super().__init__("sample")
        self.updates: list[Update] = []

    def update(self, done: float, total: float, **more: str) -> None:
        self.updates.append(Update(done, total, **more))


@pytest.fixture(scope="module")
def drawn(networks: dict[str, NodeOutput], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """The twelve images, drawn by one worker."""
    folder = tmp_path_factory.mktemp("drawn") / "samples"
    draw(Job(config(), networks, str(folder)), TWELVE, progress=Reporter("sample"))
    return folder, content(folder)


def test_files_are_the_chains_own_samples(drawn, networks) -> None:
    folder, found = drawn
    models = load_stages(networks, STAGES, device="cpu")
    expected = sample_chain(models, seed=7, images=range(12))["depth_upscale"]
    expected = expected.permute(0, 2, 3, 1).numpy().astype(np.uint8)
    files = sorted((folder / PARQUET).glob("*.parquet"))
    assert [file.name for file in files] == [f"samples-{n:05d}-of-00006.parquet" for n in range(6)]
    assert len(found) == 12 + 6 + 1, "and chunks.json: no half-written file"
    for number, file in enumerate(files):
        table = pq.read_table(file, partitioning=None)
        assert table.column_names == ["key", "px"]
        assert table.column("key").to_pylist() == [f"{2 * number + n:05d}" for n in range(2)]
        assert np.array_equal(pixels(table), expected[2 * number : 2 * number + 2])
    for number in range(12):
        picture = np.asarray(Image.open(folder / f"images/{number:05d}.png"))
        assert np.array_equal(picture, expected[number].astype(int) * 255 // 63)
    configs, chunks = load_stage_configs(networks, STAGES), chunks_of(TWELVE, size=2)
    assert np.array_equal(read_chunks(open_store(folder), configs, chunks, most=5), expected[:5])


@distributed
def test_other_workers_draw_only_what_is_missing_or_damaged(drawn, job, ray_session: None) -> None:
    """Of an attempt that was cut off: what is whole stays untouched, the rest becomes what it would have been, whatever
    the number of workers."""
    again = job("again", 2)
    shutil.copytree(drawn[0], again.out)
    lost, other, damaged, without = (f"{PARQUET}/samples-{n:05d}-of-00006.parquet" for n in (0, 1, 3, 4))
    root = Path(again.out)
    (root / lost).unlink()
    (root / other).unlink()
    whole = (root / damaged).read_bytes()
    (root / damaged).write_bytes(whole[: len(whole) // 2] + b"x" + whole[len(whole) // 2 + 1 :])
    (root / "images/00008.png").unlink()  # of the chunk `without` its picture
    (root / f"{PARQUET}/samples-00002-of-00006.parquet.tmp-0123abcd-99999999").write_bytes(b"half a file")
    before = {p: p.stat().st_mtime_ns for p in root.rglob("*.parquet")}
    progress = Progress()
    draw(again, TWELVE, progress=progress)
    assert content(root) == drawn[1]
    redrawn = {str(p.relative_to(root)) for p, at in before.items() if p.stat().st_mtime_ns != at}
    assert redrawn == {damaged, without}
    per_image = rows_to_sample(list(load_stage_configs(again.inputs, STAGES).values())) * 4
    assert progress.updates[0] == Update(4 * per_image, 12 * per_image, unit="pixels", note="2 at once")


def test_nothing_is_started_when_all_is_there(drawn, job, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, found = drawn
    monkeypatch.setattr(sample, "gang", lambda *_, **__: pytest.fail("nothing is left to draw"))
    draw(dataclasses.replace(job("unused", 2), out=str(folder)), TWELVE, progress=Reporter("sample"))
    assert content(folder) == found


@pytest.mark.faults
def test_a_killed_worker_is_replaced_and_nothing_changes(
    drawn, job, ray_session: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL when the first chunk is there: what the worker had to draw is drawn by another process, and the file that
    it may have been writing is gone in the end."""
    killed, part, one = list[int](), sample._part, job("killed", 2)

    def kill_one(*arguments: Any) -> Reporter:
        workers = [] if killed else [process for process in raylet_children() if "DrawingWorker" in process.name()]
        for process in workers[:1]:
            process.kill()
            killed.append(process.pid)
            Path(one.out, f"{PARQUET}/samples-00001-of-00006.parquet.tmp-0123abcd-{process.pid}").write_bytes(b"half")
        return part(*arguments)

    monkeypatch.setattr(sample, "_part", kill_one)  # in this process: the driver, once a chunk is finished
    draw(one, TWELVE, progress=Reporter("sample"))
    assert killed and content(one.out) == drawn[1]


def raylet_children() -> list[psutil.Process]:
    """Workers whose parent, the raylet, is no child of this process any more."""
    import ray

    session = ray._private.worker.global_worker.node.get_session_dir_path()
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if any(session in word for word in process.info["cmdline"] or ()):
            found += process.children(recursive=True)
    return found


@distributed
@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_in_a_chunk_ends_the_node_and_keeps_what_is_finished(workers, job, ray_session: None) -> None:
    import ray

    images = Chunk(("a", "b\0"), (0, 1))  # no file can have the second name
    wrong = job("wrong", workers, batch_size=1)
    if workers == 2:  # one worker needs no group, and would leave this one as it is
        ray.util.placement_group([{"CPU": 0.5}], name=gang_name(DrawingWorker, wrong))
    with pytest.raises(ValueError, match="null"):
        draw(wrong, images, progress=Reporter("sample"))
    groups = [g for g in ray.util.placement_group_table().values() if g["name"] == gang_name(DrawingWorker, wrong)]
    if workers == 1:  # this process, which needs no group
        expected = ["chunks.json", "images/a.png", f"{PARQUET}/samples-00000-of-00002.parquet"]
        assert sorted(content(wrong.out)) == expected
    else:
        assert [group["state"] for group in groups] == ["REMOVED"] * 2, "the start's own, and that of a killed one"


def test_a_worker_that_cannot_load_a_network_fails_by_its_own_error(job) -> None:
    """In its constructor Ray would take that for a lost worker, and the node would be retried again and again."""
    worker = DrawingWorker(dataclasses.replace(job("none"), inputs={}), Reporter("sample"), 1)
    with pytest.raises(KeyError, match="train_first_slice"):
        worker.draw(chunks_of(TWELVE, size=2)[0])


def test_a_worker_keeps_decoders_of_one_chunk_size(job) -> None:
    """The last chunk may be smaller, and a GPU may not hold decoders of both sizes."""
    worker, sizes = DrawingWorker(job("samples"), Reporter("sample"), 1), []
    for chunk in chunks_of(Chunk(TWELVE.keys[:3], TWELVE.seeds[:3]), size=2):
        worker.draw(chunk)
        sizes.append({key[1] for key in worker.decoders})
    assert sizes == [{2}, {1}]


def test_how_images_were_drawn_is_recorded(networks, tmp_path: Path, ray_in_this_process: list[Any]) -> None:
    inputs = {name: dataclasses.replace(made, mlflow_run_id=name) for name, made in networks.items()}
    made = context("sample", config(precision="bfloat16"), tmp_path, inputs)
    result = sample.run(made)
    assert result.metrics == {"images/sampled": 12, "images/batch_size": 2}
    assert result.pictures[:3] == [
        Picture("samples/chain.png", "samples/chain"),
        Picture("samples/first_slice.png", "samples/first_slice"),
        Picture("samples/first_slice.png", "samples", 1, "train_first_slice"),
    ]
    assert len(result.pictures) == 7 and all((tmp_path / picture.path).is_file() for picture in result.pictures)
    record = json.loads((tmp_path / "samples/samples.json").read_text())
    assert (record["batch_size"], record["precision"]) == (2, "bfloat16")


# ---- as many images at once as a GPU holds -------------------------------------------------------------------------


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, ray_in_this_process: list[Any]) -> Callable[..., list[int]]:
    """gpus(limit, …): workers on GPUs that hold so many images, one each; returns the batches that were tried."""
    real, load = sample.sample_stage, sample.load_stages
    seen: list[int] = []

    def build(*limits: int) -> list[int]:
        def on_a_gpu(model: Any, uniform: torch.Tensor, **options: Any) -> torch.Tensor:
            (number,) = (n for n, worker in enumerate(ray_in_this_process) if model in worker.models.values())
            seen.append(len(uniform))
            if len(uniform) > limits[number]:
                raise torch.cuda.OutOfMemoryError("CUDA out of memory.")
            return real(model, uniform, **options)

        monkeypatch.setattr(sample, "sample_stage", on_a_gpu)
        monkeypatch.setattr(sample, "load_stages", lambda *args, device: load(*args, device="cpu"))
        monkeypatch.setattr(NodeResources, "device", "cpu")
        return seen

    return build


ON_GPUS = NodeResources(num_workers=2, use_gpu=True)


def test_workers_try_their_share_then_halves_and_the_smallest_is_recorded(
    job, gpus, ray_in_this_process: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def draw_here(worker: DrawingWorker, chunk: Chunk) -> Chunk:
        drew.append(ray_in_this_process.index(worker))
        return draw_chunk(worker, chunk)

    alone = job("alone")
    draw(alone, TWELVE, progress=Reporter("sample"))
    draw_chunk, drew, tried = DrawingWorker.draw, list[int](), gpus(100, 4)
    monkeypatch.setattr(DrawingWorker, "draw", draw_here)
    one = job("tried", batch_size=None, resources=ON_GPUS)
    chunks = draw(one, TWELVE, progress=Reporter("sample"))
    assert [len(chunk.keys) for chunk in chunks] == [3, 3, 3, 3]
    assert tried == [6, 6, 6, 6, 3, 3, 3], "all three stages; on the second worker six do not fit, three do"
    assert drew == [0, 1, 0, 1], "each worker as soon as it is free"
    assert json.loads((Path(one.out) / "chunks.json").read_text()) == {"batch_size": 3}
    pictures = [{file: each for file, each in content(j.out).items() if file.endswith(".png")} for j in (one, alone)]
    assert len(pictures[0]) == 12 and pictures[0] == pictures[1]


def test_a_restart_keeps_the_number_that_was_found(job, gpus) -> None:
    one = job("kept", batch_size=None, resources=ON_GPUS)
    (Path(one.out)).mkdir()
    (Path(one.out) / "chunks.json").write_text('{"batch_size": 5}')
    tried = gpus(1, 1)
    assert [len(chunk.keys) for chunk in draw(one, TWELVE, progress=Reporter("sample"))] == [5, 5, 2]
    assert tried == [], "nothing is tried"


def test_memory_that_runs_out_later_names_the_setting(job, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_much(*_: Any, **__: Any) -> None:
        raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")

    monkeypatch.setattr(sample, "sample_chain", too_much)
    with pytest.raises(UserError, match="^sample.batch_size: the GPU's memory does not hold 2 at once any more; "):
        DrawingWorker(job("late"), Reporter("sample"), 1).draw(chunks_of(TWELVE, size=2)[0])


@pytest.mark.parametrize(("batch_size", "most"), [(4, 4), (2000, 6), (None, 6)])
def test_the_configured_number_is_the_most_that_is_tried(batch_size: int | None, most: int, job, gpus) -> None:
    tried = gpus(100, 100)
    draw(job("most", batch_size=batch_size, resources=ON_GPUS), TWELVE, progress=Reporter("sample"))
    assert set(tried) == {most}


def test_a_gpu_too_small_for_one_image_is_the_users_mistake(job, gpus) -> None:
    gpus(100, 0)
    one = job("none", batch_size=None, resources=ON_GPUS)
    with pytest.raises(UserError, match="^not even one image of first_slice, size_upscale, depth_upscale fits into"):
        draw(one, TWELVE, progress=Reporter("sample"))
    assert content(one.out) == {}


@pytest.mark.parametrize(("workers", "batch_size", "expected"), [(1, None, 16), (4, None, 5), (4, 20, 20)])
def test_on_a_cpu_nothing_is_tried(
    workers: int, batch_size: int | None, expected: int, job, ray_in_this_process
) -> None:
    images = Chunk(tuple(f"{n:05d}" for n in range(17)), tuple(range(17)))
    one = job("cpu", workers, batch_size=batch_size, stages=STAGES[:1])
    assert len(draw(one, images, progress=Reporter("sample"))[0].keys) == min(expected, 17)
    assert json.loads((Path(one.out) / "chunks.json").read_text()) == {"batch_size": expected}
