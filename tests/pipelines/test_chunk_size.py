"""How many images are drawn at once: chosen once from the GPU's memory, recorded, refused in one line.

python -m pytest tests/pipelines/test_chunk_size.py
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest

from data_prep.files import UserError, open_store
from pipelines import start
from pipelines.config import NodeResources, ResourcesConfig, stage_model_config
from pipelines.dag.progress import Reporter
from pipelines.loading import load
from pipelines.nodes import chunk_size, drawing
from pipelines.nodes.chunk_size import ON_CPU, RECORD, refusal, settle
from pipelines.nodes.drawing import DrawingWorker, Job, chunks_of
from spn.footprint import batch_bytes, largest_batch

GPU, CPU = NodeResources(use_gpu=True), NodeResources()
SIXTEEN = 16 * 2**30
SMALL = 2**30 * 9 // 8  # a little more than the kernels themselves take


@pytest.fixture(scope="module")
def networks() -> dict:
    """The paper's network for 32 x 32 images, 144M parameters; on the meta device nothing of it is made."""
    return {"baseline": stage_model_config(load("imagenet32", ["data.root=unused"]), "baseline")}


@pytest.fixture
def ask(networks, tmp_path):
    """ask(wanted, resources=…, …) -> images a chunk, with records in one place."""

    def settled(wanted: int | None, resources: NodeResources, num_images: int = 4096, place: str = "") -> int:
        store = open_store(tmp_path).sub(place) if place else open_store(tmp_path)
        config = {"batch_size": wanted, "precision": "bfloat16"}
        return settle(config, num_images=num_images, configs=networks, store=store, resources=resources)

    return settled


def free(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    monkeypatch.setattr(chunk_size, "_free_bytes_of_workers", lambda resources: num_bytes)


def test_a_configured_size_is_taken_as_it_is(ask, tmp_path):
    assert ask(7, CPU) == 7 and ask(9, GPU) == 9
    assert list(tmp_path.iterdir()) == [], "it is in the configuration"


def test_on_a_cpu_it_is_a_fixed_number(ask, tmp_path):
    assert ask(None, CPU, num_images=3) == ask(None, CPU, num_images=5000, place="other") == ON_CPU
    assert json.loads((tmp_path / RECORD).read_text()) == {"batch_size": ON_CPU, "device": "cpu"}


def test_on_a_gpu_it_is_what_fits(ask, tmp_path, networks, monkeypatch):
    free(monkeypatch, SIXTEEN)
    found = ask(None, GPU)
    assert 16 <= found == largest_batch(list(networks.values()), SIXTEEN, precision="bfloat16") < 1024
    record = json.loads((tmp_path / RECORD).read_text())
    assert record == {"batch_size": found, "device": "cuda", "free_bytes": SIXTEEN, "num_workers": 1}
    free(monkeypatch, 4 * SIXTEEN)
    assert ask(None, GPU, place="other") > found


def test_every_worker_gets_its_share(ask, monkeypatch):
    free(monkeypatch, 4 * SIXTEEN)
    two = NodeResources(use_gpu=True, num_workers=2)
    assert ask(None, GPU, num_images=33, place="one") == 33
    assert ask(None, two, num_images=33, place="two") == 17


def test_whoever_goes_on_with_an_attempt_reads_the_record(ask, monkeypatch):
    free(monkeypatch, SIXTEEN)
    found = ask(None, GPU)
    free(monkeypatch, 2**20)  # another machine, on which it would not be chosen
    assert ask(None, GPU) == found
    assert ask(None, CPU) == found


def test_a_gpu_too_small_for_one_image_is_refused(ask, tmp_path, monkeypatch):
    free(monkeypatch, 2**30)
    with pytest.raises(UserError, match="not even one image fits"):
        ask(None, GPU)
    assert list(tmp_path.iterdir()) == []


def test_the_refusal_says_what_where_and_the_largest_that_fits(networks):
    largest = largest_batch(list(networks.values()), SIXTEEN, precision="bfloat16")
    assert refusal(largest, networks, SIXTEEN, precision="bfloat16") is None
    line = refusal(4000, networks, SIXTEEN, precision="bfloat16")
    taken = batch_bytes(list(networks.values()), 4000, precision="bfloat16") / 2**30
    assert line == (
        f"sample.batch_size: 4000 at once would take {taken:.1f} GiB for baseline in bfloat16, of a GPU with 16.0 GiB; "
        f"the largest that fits is {largest}"
    )


# ---- before and while drawing --------------------------------------------------------------------------------------


def test_what_no_gpu_of_this_machine_holds_is_refused_before_anything_is_written(
    tmp_path, run_with_gpus, monkeypatch, capsys
):
    monkeypatch.setattr(start, "largest_gpu_bytes", lambda: SMALL)
    settings = ("resources.use_gpu=true", "sample.num_images=9000", "sample.batch_size=4000")
    assert run_with_gpus(*settings) == 2
    line = capsys.readouterr().err
    assert line.startswith("error: sample.batch_size: 4000 at once") and line.count("\n") == 1
    assert "1.1 GiB" in line and "first_slice, size_upscale, depth_upscale" in line
    assert not (tmp_path / "runs").exists()


def test_what_may_fit_is_not_refused(run_with_gpus, monkeypatch):
    large = ("resources.use_gpu=true", "sample.batch_size=4000")
    for memory, settings in (
        (SMALL, ("sample.num_images=4", *large)),  # no chunk is larger than all images
        (SMALL, ("sample.batch_size=null", "sample.num_images=9000", "resources.use_gpu=true")),
        (SMALL, ("sample.batch_size=4000", "sample.num_images=9000")),  # on a CPU
        (None, ("sample.num_images=9000", *large)),  # no driver to ask
    ):
        monkeypatch.setattr(start, "largest_gpu_bytes", lambda memory=memory: memory)
        with pytest.raises(SystemExit, match="would have run"):
            run_with_gpus(*settings)


def test_a_worker_says_what_its_gpu_does_not_hold(networks, monkeypatch):
    monkeypatch.setattr(drawing, "load_stage_configs", lambda inputs, stages: networks)
    monkeypatch.setattr(drawing, "free_gpu_bytes", lambda: SIXTEEN)
    job = Job({}, ["baseline"], 0, {}, {}, "unused", 1, precision="bfloat16")
    worker = DrawingWorker(job, Reporter("sample"), 1, device="cuda")
    assert worker.problem(8) is None
    assert worker.problem(4000) == refusal(4000, networks, SIXTEEN, precision="bfloat16")


def test_drawing_ends_with_what_a_worker_says(networks, tmp_path, monkeypatch):
    """And nothing is drawn. Ray is stood in for: the tests' session has no GPU."""
    monkeypatch.setattr(drawing, "load_stage_configs", lambda inputs, stages: networks)
    killed, asked_for = [], []

    def problem(batch: int) -> str:
        asked_for.append(batch)
        return "too large"

    worker = SimpleNamespace(problem=SimpleNamespace(remote=problem))
    remote = SimpleNamespace(remote=lambda *_, **__: worker)
    ray = SimpleNamespace(remote=lambda **_: lambda _: remote, get=list, kill=killed.append)
    monkeypatch.setitem(sys.modules, "ray", ray)
    job = Job({}, ["baseline"], 0, {}, {}, str(tmp_path), 2, precision="bfloat16")
    chunks = chunks_of(["a", "b", "c"], range(3), size=2)
    with pytest.raises(UserError, match="too large"):
        drawing.draw(job, chunks, resources=ResourcesConfig(use_gpu=True), progress=Reporter("sample"))
    assert (asked_for, killed) == ([2], [worker])


def test_the_driver_of_a_machine_without_gpus_shows_none():
    """Or a real number of bytes where there are some."""
    found = chunk_size.largest_gpu_bytes()
    assert found is None or found > 2**30
