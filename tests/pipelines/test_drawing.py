"""Distributed drawing: the same bytes whatever the workers, their order and their deaths; what is finished is kept.

python -m pytest tests/pipelines/test_drawing.py
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from data_prep.files import open_store
from data_prep.parquet import pixels, schema
from pipelines.config import ResourcesConfig
from pipelines.dag.node import NodeContext, NodeOutput
from pipelines.dag.progress import Reporter, Update
from pipelines.loading import load
from pipelines.nodes import drawing, sample, sample_images, score_images
from pipelines.nodes.drawing import Chunk, DrawingWorker, Job, chunks_of, draw, read_chunks
from pipelines.nodes.own_images import OwnImages
from pipelines.nodes.trained import load_stage_configs, load_stages
from pipelines.pipeline import nodes
from pipelines.tracking import RunHandle
from spn.checkpoint import save_checkpoint
from spn.evaluation import chain_nats
from spn.ordering import image_to_slices
from spn.sampling import rows_to_sample, sample_chain

STAGES = ["first_slice", "size_upscale", "depth_upscale"]
PARQUET = "res=8/bits=6"
distributed = pytest.mark.slow  # every worker is a process that imports torch and Ray


@pytest.fixture(scope="module")
def networks(tiny_spn, tmp_path_factory) -> dict[str, NodeOutput]:
    """Outputs of train nodes: a chain at 8 x 8, S = 2, bits [3, 6], re-randomised."""
    common, inputs = dict(image_size=8, scaling_factor=2, num_bits=3), {}
    for seed, stage in enumerate(STAGES):
        model = tiny_spn(stage, seed=seed, **common, num_given_bits=3 if stage == "depth_upscale" else 0).float()
        folder = tmp_path_factory.mktemp(stage)
        (folder / "checkpoint").mkdir()
        save_checkpoint(folder / "checkpoint", model=model, ema=model.state_dict(), trainer={})
        inputs[f"train_{stage}"] = NodeOutput(str(folder), {"checkpoint": "checkpoint"}, {}, f"attempt-{stage}")
    return inputs


@pytest.fixture
def job(networks, tmp_path) -> Callable[..., Job]:
    """job(folder, **changes) -> six chunks of the whole chain, into that folder."""

    def build(folder: str, **changes: object) -> Job:
        even = dict.fromkeys(STAGES, 1.0)
        base = Job(networks, STAGES, 7, even, dict.fromkeys(STAGES), str(tmp_path / folder), 6)
        return dataclasses.replace(base, **changes)

    return build


def twelve_images() -> list[Chunk]:
    return chunks_of([f"{n:05d}" for n in range(12)], range(12), size=2)


def workers(number: int, **changes: object) -> ResourcesConfig:
    return ResourcesConfig(num_workers=number, cpus_per_worker=0.5, **changes)


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


def draw_all(job: Job, number: int = 2, **changes: object) -> dict[str, str]:
    draw(job, twelve_images(), resources=workers(number, **changes), progress=Reporter("sample"))
    return content(job.out)


@pytest.fixture(scope="module")
def drawn(networks, tmp_path_factory, ray_session) -> tuple[Path, dict[str, str]]:
    """The twelve images, drawn by one worker."""
    folder = tmp_path_factory.mktemp("drawn") / "samples"
    even = dict.fromkeys(STAGES, 1.0)
    return folder, draw_all(Job(networks, STAGES, 7, even, dict.fromkeys(STAGES), str(folder), 6), 1)


@distributed
def test_files_are_the_chains_own_samples_in_the_columns_of_a_data_set(drawn, networks):
    folder, found = drawn
    expected = sample_chain(load_stages(networks, STAGES, device="cpu"), seed=7, images=range(12))["depth_upscale"]
    expected = expected.permute(0, 2, 3, 1).numpy().astype(np.uint8)
    files = sorted((folder / PARQUET).glob("*.parquet"))
    assert [file.name for file in files] == [f"samples-{n:05d}-of-00006.parquet" for n in range(6)]
    assert len(found) == 12 + 6, "and nothing else: no half-written file"
    for number, file in enumerate(files):
        table = pq.read_table(file, partitioning=None)
        assert table.schema.equals(schema(8))
        assert table.column("key").to_pylist() == [f"{2 * number + n:05d}" for n in range(2)]
        assert np.array_equal(pixels(table), expected[2 * number : 2 * number + 2])
    for number in range(12):
        picture = np.asarray(Image.open(folder / f"images/{number:05d}.png"))
        assert np.array_equal(picture, expected[number].astype(int) * 255 // 63)
    configs = load_stage_configs(networks, STAGES)
    assert np.array_equal(read_chunks(open_store(folder), configs, num_chunks=6, most=5), expected[:5])


@distributed
def test_another_number_of_workers_and_another_order_give_the_same_bytes(drawn, job):
    backwards = job("backwards")
    draw(backwards, twelve_images()[::-1], resources=workers(2), progress=Reporter("sample"))
    assert content(backwards.out) == drawn[1]


@distributed
def test_a_killed_worker_is_replaced_and_nothing_changes(drawn, job):
    """SIGKILL as soon as the first chunk is there: the worker's chunk is drawn again, by another process."""
    killed: list[int] = []
    one = job("killed")

    def kill_the_first() -> None:
        deadline = time.monotonic() + 60
        while not killed and time.monotonic() < deadline:
            if list(Path(one.out).rglob("*.parquet")):
                for process in psutil.Process().children(recursive=True) + raylet_children():
                    if "DrawingWorker" in process.name() or "DrawingWorker" in " ".join(process.cmdline()):
                        process.kill()
                        killed.append(process.pid)
                        return
            time.sleep(0.005)

    watcher = threading.Thread(target=kill_the_first)
    watcher.start()
    try:
        found = draw_all(one, 1)
    finally:
        watcher.join()
    assert killed, "a worker was there to be killed"
    assert found == drawn[1]


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
def test_a_second_start_draws_only_what_is_missing_or_damaged(drawn, job):
    """Of an attempt that was cut off: what is whole stays untouched, the rest becomes what it would have been."""
    again = job("again")
    shutil.copytree(drawn[0], again.out)
    lost, damaged, without = (f"{PARQUET}/samples-{n:05d}-of-00006.parquet" for n in (1, 3, 4))
    root = Path(again.out)
    (root / lost).unlink()
    whole = (root / damaged).read_bytes()
    (root / damaged).write_bytes(whole[: len(whole) // 2] + b"x" + whole[len(whole) // 2 + 1 :])
    (root / "images/00008.png").unlink()  # of the chunk `without` its picture
    (root / f"{PARQUET}/samples-00002-of-00006.parquet.tmp-0123abcd-99999999").write_bytes(b"half a file")
    before = {p: p.stat().st_mtime_ns for p in root.rglob("*.parquet")}
    progress = Progress()
    draw(again, twelve_images(), resources=workers(2), progress=progress)
    assert content(root) == drawn[1]
    redrawn = {str(p.relative_to(root)) for p, at in before.items() if p.stat().st_mtime_ns != at}
    assert redrawn == {damaged, without}
    configs = load_stage_configs(again.inputs, STAGES)
    per_image = rows_to_sample(list(configs.values())) * 4
    assert progress.updates[0] == Update(6 * per_image, 12 * per_image, unit="pixels")


@distributed
def test_nothing_is_started_when_all_is_there(drawn, job, monkeypatch):
    import ray

    folder, found = drawn
    monkeypatch.setattr(ray, "wait", lambda *_, **__: pytest.fail("nothing is left to draw"))
    draw(job("unused", out=str(folder)), twelve_images(), resources=workers(2), progress=Reporter("sample"))
    assert content(folder) == found


@distributed
def test_a_mistake_in_a_chunk_ends_the_node_and_keeps_what_is_finished(job, ray_session):
    wrong = job("wrong", use="size_upscale", stages=STAGES[1:], num_chunks=2)
    fits = Chunk(0, ("a",), (0,), np.zeros((1, 4, 4, 3), np.uint8))
    does_not = Chunk(1, ("b",), (1,), np.zeros((1, 3, 4, 3), np.uint8))
    with pytest.raises(RuntimeError, match="shape|size"):
        draw(wrong, [fits, does_not], resources=workers(1), progress=Reporter("sample"))
    assert sorted(content(wrong.out)) == ["images/a.png", f"{PARQUET}/samples-00000-of-00002.parquet"]


def test_a_worker_that_cannot_load_a_network_fails_by_its_own_error(job):
    """In its constructor Ray would take that for a lost worker, and the node would be started again and again."""
    worker = DrawingWorker(job("none", inputs={}), Reporter("sample"), 1, device="cpu")
    with pytest.raises(KeyError, match="train_first_slice"):
        worker.draw(twelve_images()[0])


# ---- the user's own images -----------------------------------------------------------------------------------------


@pytest.fixture
def in_this_process(monkeypatch) -> None:
    """One worker draws all chunks, here: what the node makes of them is tested, not Ray."""

    def draw_here(job: Job, chunks: list[Chunk], *, resources: ResourcesConfig, progress: Reporter) -> None:
        worker = DrawingWorker(job, progress, 1, device="cpu")
        for chunk in chunks:
            worker.draw(chunk)

    monkeypatch.setattr(sample, "draw", draw_here)
    monkeypatch.setattr(sample_images, "draw", draw_here)


def context(networks, out: Path, own: OwnImages | None, *settings: str, name: str = "sample_images") -> NodeContext:
    """Of the node as the pipeline makes it from the configuration debug, so that it has all that the node reads."""
    settings = ("images=given", "sample.num_draws=2", "sample.batch_size=3", "sample.seed=1", *settings)
    (node,) = (node for node in nodes(load("debug", settings), images=own) if node.name == name)
    return NodeContext(
        node=name,
        fingerprint="f",
        attempt="a",
        config=node.config,
        options=node.options,
        inputs=networks,
        out=str(out),
        run=RunHandle(),
        progress=Reporter(name),
        fresh=True,
    )


def draws_of(folder: Path) -> dict[str, np.ndarray]:
    """{key: uint8 [8, 8, 3] of 6 bits}."""
    found = {}
    for file in sorted((folder / "own_images" / PARQUET).glob("*.parquet")):
        table = pq.read_table(file, partitioning=None)
        found |= dict(zip(table.column("key").to_pylist(), pixels(table), strict=True))
    return found


@pytest.mark.parametrize("use, side, num_given", [("size_upscale", 4, 0), ("depth_upscale", 8, 0), ("complete", 8, 2)])
def test_what_is_given_is_kept_bit_for_bit_in_every_draw(use, side, num_given, networks, tmp_path, in_this_process):
    given = np.random.default_rng(0).integers(0, 8, (2, side, side, 3), dtype=np.uint8)
    stages = ("depth_upscale",) if use == "depth_upscale" else ("size_upscale", "depth_upscale")
    own = OwnImages("sample_images", ("a", "b"), given, 3, stages, use, num_given)
    sample_images.run(context(networks, tmp_path, own))
    found = draws_of(tmp_path)
    assert list(found) == ["a-00", "a-01", "b-00", "b-01"]
    for key, image in found.items():
        start, high = given["ab".index(key[0])], image >> 3
        if use == "size_upscale":
            assert np.array_equal(high[::2, ::2], start)
        elif use == "depth_upscale":
            assert np.array_equal(high, start)
        else:
            slices = [
                image_to_slices(torch.from_numpy(x.copy()).permute(2, 0, 1)[None], 2)[0, :2] for x in (high, start)
            ]
            assert torch.equal(*slices)
    assert len({image.tobytes() for image in found.values()}) == 4, "every draw is another one"
    folder = tmp_path / "own_images"
    assert Image.open(folder / "grid.png").size == (3 * 8 + 2 * 2, 2 * 8 + 2)
    assert Image.open(folder / "generation.webp").n_frames > 10


def test_first_rows_are_kept_bit_for_bit_by_a_baseline(tiny_spn, tmp_path, in_this_process):
    model = tiny_spn("baseline", seed=0, image_size=8, scaling_factor=1, num_bits=6).float()
    (tmp_path / "checkpoint").mkdir()
    save_checkpoint(tmp_path / "checkpoint", model=model, ema=model.state_dict(), trainer={})
    trained = {"train_baseline": NodeOutput(str(tmp_path), {"checkpoint": "checkpoint"}, {}, "a")}
    given = np.random.default_rng(0).integers(0, 64, (1, 8, 8, 3), dtype=np.uint8)
    own = OwnImages("sample_images", ("a",), given, 6, ("baseline",), "complete", 3)
    baseline = ("stages=[baseline]", "bits=[8]", "scaling_factor=1")
    sample_images.run(context(trained, tmp_path, own, *baseline))
    first, second = draws_of(tmp_path).values()
    assert np.array_equal(first[:3], given[0, :3]) and np.array_equal(second[:3], given[0, :3])
    assert not np.array_equal(first[3:], second[3:]) and not np.array_equal(first[3:], given[0, 3:])


def test_draws_depend_on_the_image_not_on_its_name_or_its_neighbours(networks, tmp_path, in_this_process):
    given = np.random.default_rng(0).integers(0, 8, (2, 8, 8, 3), dtype=np.uint8)
    both = OwnImages("sample_images", ("a", "b"), given, 3, ("depth_upscale",), "depth_upscale")
    alone = OwnImages("sample_images", ("other",), given[1:], 3, ("depth_upscale",), "depth_upscale")
    sample_images.run(context(networks, tmp_path / "both", both, "sample.batch_size=1"))
    sample_images.run(context(networks, tmp_path / "alone", alone, "sample.batch_size=1", "sample.num_draws=3"))
    pair, single = draws_of(tmp_path / "both"), draws_of(tmp_path / "alone")
    for number in range(2):
        assert np.array_equal(pair[f"b-{number:02d}"], single[f"other-{number:02d}"])
    assert len(single) == 3


def test_a_worker_keeps_decoders_of_one_chunk_size(networks, job):
    """The last chunk may be smaller, and a GPU may not hold decoders of both sizes."""
    worker = DrawingWorker(job("samples", num_chunks=2), Reporter("sample"), 1, device="cpu")
    sizes = []
    for chunk in chunks_of([f"{n}" for n in range(3)], range(3), size=2):
        worker.draw(chunk)
        sizes.append({key[1] for key in worker.decoders})
    assert sizes == [{2}, {1}]


class Drawn(Exception):
    """Ends a node where it would draw."""


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["sample", "sample_images"])
def test_images_are_drawn_at_the_configured_precision(
    name, precision, networks, tmp_path, in_this_process, monkeypatch
):
    asked_for = []

    def seen(*_: object, precision: str, **__: object) -> None:
        asked_for.append(precision)
        raise Drawn

    monkeypatch.setattr(drawing, "sample_chain", seen)
    given = np.zeros((1, 8, 8, 3), np.uint8)
    own = OwnImages(name, ("a",), given, 3, ("depth_upscale",), "depth_upscale") if name == "sample_images" else None
    run = {"sample": sample.run, "sample_images": sample_images.run}[name]
    with pytest.raises(Drawn):
        run(context(networks, tmp_path, own, f"sample.precision={precision}", "resources.use_gpu=true", name=name))
    assert asked_for == [precision]


@pytest.mark.parametrize("name", ["sample", "sample_images"])
def test_a_chosen_chunk_size_is_recorded_with_the_samples_and_kept_by_who_goes_on(
    name, networks, tmp_path, in_this_process, monkeypatch
):
    given = np.zeros((5, 8, 8, 3), np.uint8)
    keys = tuple("abcde")
    own = OwnImages(name, keys, given, 3, ("depth_upscale",), "depth_upscale") if name == "sample_images" else None
    run, folder = (sample.run, "samples") if name == "sample" else (sample_images.run, "own_images")
    made = context(
        networks, tmp_path, own, "sample.batch_size=null", "sample.num_draws=1", "sample.num_images=5", name=name
    )
    monkeypatch.setattr(sample, "checkpoint_step", lambda output: 0)
    sizes = []
    for on_cpu in (3, 2):  # the second start would choose another one
        monkeypatch.setattr(drawing, "ON_CPU", on_cpu)
        assert run(made).metrics["images/batch_size"] == 3
        files = [path.name for path in sorted((tmp_path / folder / PARQUET).glob("*.parquet"))]
        assert files == ["samples-00000-of-00002.parquet", "samples-00001-of-00002.parquet"]
        record = tmp_path / folder / ("samples.json" if name == "sample" else "record.json")
        sizes.append(json.loads(record.read_text())["batch_size"])
    assert sizes == [3, 3]


def test_scores_are_the_chains_exact_bits_per_dim(networks, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # a GPU in sight is none that was asked for
    values = np.random.default_rng(0).integers(0, 64, (5, 8, 8, 3), dtype=np.uint8)
    own = OwnImages("score_images", tuple(f"{n}.png" for n in range(5)), values, 6, tuple(STAGES))
    result = score_images.run(context(networks, tmp_path, own, "evaluate.batch_size=2", name="score_images"))
    table = pq.read_table(tmp_path / "own_images/scores.parquet").to_pydict()
    assert list(table) == ["key", *STAGES, "total"] and table["key"] == list(own.keys)
    image = torch.from_numpy(values).permute(0, 3, 1, 2).long() << 2
    for stage, nats in chain_nats(load_stages(networks, STAGES, device="cpu"), image).items():
        assert table[stage] == pytest.approx((nats / np.log(2) / (3 * 8 * 8)).tolist(), rel=1e-6)
    assert table["total"] == [sum(parts) for parts in zip(*(table[s] for s in STAGES), strict=True)]
    lines = (tmp_path / "own_images/scores.csv").read_text().splitlines()
    assert lines[0].replace('"', "") == "key,first_slice,size_upscale,depth_upscale,total" and len(lines) == 6
    assert float(lines[1].split(",")[-1]) == table["total"][0]
    assert result.metrics["own_images/bits_per_dim/total"] == pytest.approx(sum(table["total"]) / 5)
