"""Scoring in chunks: exact whoever scores them and however often it is stopped; results with their errors.

python -m pytest tests/pipelines/nodes/test_evaluate.py
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from toy.context import context

from data_prep.files import UserError
from pipelines import cli, inspection
from pipelines.config import EvaluateNodeConfig, NodeResources
from pipelines.dag.node import NodeOutput
from pipelines.dag.progress import Reporter
from pipelines.nodes import evaluate, registry
from pipelines.nodes.evaluate import ScoringJob, ScoringWorker, score
from pipelines.nodes.histogram import count_values, histogram_nats
from pipelines.nodes.trained import load_stages
from spn.checkpoint import save_checkpoint
from spn.evaluation import bits_per_dim, chain_nats
from tests.data_prep import made

STAGES = ("first_slice", "size_upscale", "depth_upscale")
NUM, SIDE = 7, 8
KEYS = [f"image {number}" for number in range(NUM)]
IMAGES = np.random.default_rng(0).integers(256, size=(2 * NUM, SIDE, SIDE, 3)).astype(np.uint8)
TRAIN, TEST = IMAGES[:NUM], IMAGES[NUM:]


def config(workers: int = 1) -> EvaluateNodeConfig:
    """Three chunks: of 3, 3 and 1 images."""
    resources = NodeResources(num_workers=workers, cpus_per_worker=0.5)
    return EvaluateNodeConfig(stages=STAGES, batch_size=3, precision="float32", resources=resources, dataset="tiny")


def read(rows: range) -> tuple[list[str], np.ndarray]:
    return KEYS[rows.start : rows.stop], TEST[rows.start : rows.stop]


@pytest.fixture
def job(networks: dict[str, NodeOutput], tmp_path: Path) -> Callable[..., ScoringJob]:
    return lambda folder="scored", workers=1: ScoringJob(config(workers), networks, str(tmp_path / folder), read)


@pytest.fixture
def exact(networks: dict[str, NodeOutput]) -> dict[str, np.ndarray]:
    """{stage: bits/dim of each image}, all images in one batch."""
    image = torch.from_numpy(TEST).permute(0, 3, 1, 2).long()
    nats = chain_nats(load_stages(networks, STAGES, device="cpu"), image)
    return {stage: part.numpy() * bits_per_dim(1, num_images=1, image_size=SIDE) for stage, part in nats.items()}


def test_each_image_is_scored_exactly(job, exact) -> None:
    table = score(job(), NUM, progress=Reporter("evaluate")).table()
    assert table.column("key").to_pylist() == KEYS
    for stage, expected in exact.items():
        assert table.column(stage).to_numpy() == pytest.approx(expected, rel=1e-6)
    assert table.column("total").to_numpy() == pytest.approx(sum(exact.values()), rel=1e-6)


def test_a_later_start_scores_what_is_missing_or_damaged(job, monkeypatch: pytest.MonkeyPatch) -> None:
    before, files = score(job(), NUM, progress=Reporter("evaluate")).table(), Path(job().out, "scores")
    names = sorted(file.name for file in files.iterdir())
    Path(files, names[0]).unlink()
    cut = Path(files, names[2])
    cut.write_bytes(cut.read_bytes()[:-40])
    done, real = list[range](), ScoringWorker.score

    def counted(worker: ScoringWorker, rows: range) -> Any:
        Path(files, f"{names[0]}.tmp-0123abcd-1").write_bytes(b"half")  # as a killed worker leaves it
        done.append(rows)
        return real(worker, rows)

    monkeypatch.setattr(ScoringWorker, "score", counted)
    reads, real_read = list[range](), evaluate._finished
    monkeypatch.setattr(evaluate, "_finished", lambda store, rows: reads.append(rows) or real_read(store, rows))
    assert score(job(), NUM, progress=Reporter("evaluate")).table() == before
    assert done == [range(0, 3), range(6, 7)] and reads == [range(0, 3), range(3, 6), range(6, 7)], "each once"
    assert sorted(file.name for file in files.iterdir()) == names


def test_several_workers_score_the_same(job, ray_in_this_process: list[Any]) -> None:
    alone = score(job(), NUM, progress=Reporter("evaluate")).table()
    assert score(job("shared", workers=2), NUM, progress=Reporter("evaluate")).table() == alone
    assert len(ray_in_this_process) == 2


@pytest.fixture
def dataset(tmp_path: Path) -> NodeOutput:
    """Of seven training and seven test images, in row groups of two."""
    splits = {name: dict(zip(KEYS, images, strict=True)) for name, images in (("train", TRAIN), ("test", TEST))}
    made.dataset(tmp_path / "dataset", splits, resolutions=[SIDE], bits=[8], row_group_rows=2)
    return NodeOutput(str(tmp_path), {"dataset": "dataset"}, "attempt")


def test_results(networks, dataset, exact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = load_stages(networks, STAGES, device="cpu")
    raw = copy.deepcopy(models)
    for model in raw.values():
        model.load_state_dict({name: 1.1 * value for name, value in model.state_dict().items()})
    loaded = {True: models, False: raw}
    monkeypatch.setattr(evaluate, "load_stages", lambda *_, averaged=True, device: loaded[averaged])
    given = context("evaluate", config(), tmp_path / "out", {**networks, "prepare_data": dataset})
    metrics = evaluate.run(given).metrics
    results = json.loads((tmp_path / "out/results.json").read_text())
    for stage, expected in exact.items():
        part, bits = results["stages"][stage], 3
        assert part["bits_per_dim"] == pytest.approx(expected.mean(), rel=1e-6) == metrics[f"test/bits_per_dim/{stage}"]
        assert part["standard_error"] == pytest.approx(expected.std(ddof=1) / NUM**0.5, rel=1e-5)
        dims = {"first_slice": 1 / 4, "size_upscale": 3 / 4, "depth_upscale": 1}[stage]
        assert part["uniform"] == pytest.approx(bits * dims)
        assert len(part["slices"]) == 4 * dims and np.mean(part["slices"]) * dims == pytest.approx(part["bits_per_dim"])
        assert np.mean(part["channels"]) * dims == pytest.approx(part["bits_per_dim"])
    total = sum(exact.values())
    assert results["total"]["bits_per_dim"] == pytest.approx(total.mean(), rel=1e-6)
    assert metrics["test/bits_per_dim"] == results["total"]["bits_per_dim"], "sent again by the driver, as its parts"
    assert results["total"]["standard_error"] == pytest.approx(total.std(ddof=1) / NUM**0.5, rel=1e-5)
    nats = histogram_nats(1 + count_values(TRAIN), count_values(TEST), given_bits=0, num_bits=6)
    assert results["total"]["histogram"] == pytest.approx(nats / np.log(2) / TEST.size)
    assert results["generated_bits"] == 6 and results["png"] > 8 and results["precision"] == "float32"
    image = torch.from_numpy(TEST).permute(0, 3, 1, 2).long()
    change = sum(chain_nats(raw, image[:3]).values()).numpy() / np.log(2) / (3 * SIDE**2) - total[:3]
    assert results["with_raw_weights"] == pytest.approx(
        {"difference": change.mean(), "standard_error": change.std(ddof=1) / 3**0.5, "num_images": 3}, rel=1e-4
    )
    for column in ("bits_per_dim", "histogram", "uniform"):
        parts = sum(part[column] for part in results["stages"].values())
        assert parts == pytest.approx(results["total"][column], abs=1e-9)
    table = pq.read_table(tmp_path / "out/per_image.parquet")
    assert table.column_names == ["key", *STAGES, "total"] and table.column("key").to_pylist() == KEYS
    assert np.mean(table.column("total")) == pytest.approx(results["total"]["bits_per_dim"], abs=1e-9)


def test_raw_weights_are_those_of_the_last_step(tiny_spn, tmp_path: Path) -> None:
    model, ema = (tiny_spn("first_slice", seed=s, image_size=SIDE, scaling_factor=2).float() for s in (0, 1))
    (tmp_path / "step-1").mkdir()
    save_checkpoint(tmp_path / "step-1", model=model, ema=ema, trainer={})
    inputs = {"train_first_slice": NodeOutput(str(tmp_path), {"checkpoint": "step-1"}, "attempt")}
    for which, network in ((True, ema), (False, model)):
        found = load_stages(inputs, ["first_slice"], averaged=which, device="cpu")["first_slice"].state_dict()
        assert all(torch.equal(found[name], value) for name, value in network.state_dict().items())


# ---- --compare ------------------------------------------------------------------------------------------------------


def scores_file(path: Path, keys: str, total: list[float], **parts: list[float]) -> str:
    pq.write_table(pa.table({"key": list(keys), "total": total, **parts}), path)
    return str(path)


def test_runs_are_compared_image_by_image(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = scores_file(tmp_path / "a.parquet", "abc", [1.0, 5.0, 9.0], only_here=[0.0, 0.0, 0.0])
    second = scores_file(tmp_path / "b.parquet", "cab", [8.5, 0.5, 4.2])
    assert cli.main(["--compare", first, "--compare", second], prog="evaluate.py") == 0
    printed = capsys.readouterr().out
    assert "only_here" not in printed and "bits/dim of 3 images" in printed
    (line,) = (line for line in printed.splitlines() if "total" in line)
    assert line.replace("│", " ").split() == ["total", "5.0000", "4.4000", "+0.6000", "0.1000"]


def test_parts_that_score_other_values_are_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Other slices or bits of the same images, or other pixels, as the results beside the scores say."""
    for name, uniform, entropy in (("a", 2.25, 7.5), ("b", 3, 7.5), ("c", 2.25, 7.4)):
        (tmp_path / name).mkdir()
        scores_file(tmp_path / name / "per_image.parquet", "abc", [1.0, 2.0, 3.0], size_upscale=[1.0, 2.0, 3.0])
        parts = {"stages": {"size_upscale": {"uniform": uniform}}, "total": {"uniform": 8}, "raw_entropy": entropy}
        (tmp_path / name / "results.json").write_text(json.dumps({"image_size": 16, **parts}))

    def lines(*names: str) -> list[str]:
        places = [word for name in names for word in ("--compare", str(tmp_path / name / "per_image.parquet"))]
        assert cli.main(places, prog="evaluate.py") == 0
        return [" ".join(line.replace("│", " ").split()) for line in capsys.readouterr().out.splitlines()]

    whole, pixels = "total 2.0000 2.0000 +0.0000 0.0000", "16x16 pixels with a raw entropy of 7.5000"
    found = lines("a", "b")
    (other,) = (line for line in found if "size_upscale" in line)
    assert whole in found and other.endswith(
        f"it scores other bits, slices or pixels, A 2.25 bits/dim of {pixels}, B 3 bits/dim of {pixels}"
    )
    found = lines("a", "c")
    assert whole not in found and sum("is not compared: it scores other" in line for line in found) == 2


def test_a_file_of_scores_may_have_options_in_its_uri(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(place: str) -> None:
        raise OSError("stop")

    monkeypatch.setattr(registry, "read_scores", stop)
    uri = "s3://key:secret@bucket/per_image.parquet?region=eu"
    with pytest.raises(UserError, match=r"^--compare s3://(?!key:secret).*per_image.parquet.*: stop$"):
        inspection.compare([uri, uri])


def test_scores_of_other_images_and_runs_without_scores_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = (scores_file(tmp_path / f"{key}.parquet", key, [1.0]) for key in "ab")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").touch()
    for places, text in (
        ([first, second], "score different images"),
        ([first, str(tmp_path / "run")], "no finished evaluate"),
        ([first, str(tmp_path / "rum")], "rum: no run folder"),
        ([first, str(tmp_path / "none.parquet")], "none.parquet"),
        ([first] * 3, "given 3 times"),
    ):
        arguments = [word for place in places for word in ("--compare", place)]
        assert cli.main(arguments, prog="evaluate.py") == 2
        assert text in capsys.readouterr().err
