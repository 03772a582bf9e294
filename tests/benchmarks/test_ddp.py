"""Two data-parallel workers train as one does: same batches, same losses, same weights (gloo, two processes).

python -m pytest tests/benchmarks/test_ddp.py
"""

from __future__ import annotations

import dataclasses
import json

import pytest

from benchmarks import ddp
from pipelines.config import stage_model_config
from pipelines.loading import load


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict]:
    """{workers: measurements} of the debug network; each of two workers accumulates two micro-batches. A worker that is
    alone works in this process: another takes seconds to start."""
    config = load("debug")
    train = dataclasses.replace(
        config.per_stage["size_upscale"].train,
        num_steps=6,
        batch_size=8,
        micro_batch_size=2,
        log_every_steps=1,
        grad_clip=1.0,
    )
    job = ddp.Job(stage_model_config(config, "size_upscale"), train, speed_batch=8, speed_steps=1, seed=0)
    folder = tmp_path_factory.mktemp("alone")
    ddp.work(0, job, 1, str(folder))
    return {1: json.loads((folder / "result.json").read_text()), 2: ddp.run(job, 2)}


def test_the_workers_share_each_batch(runs):
    for workers, run in runs.items():
        for part in (run["speed"], run["curve"]):
            assert part["batch_size"] == 8 == workers * part["micro_batch_size"] * part["accumulation"]
    assert [run["curve"]["accumulation"] for run in runs.values()] == [4, 2]


def test_two_workers_train_as_one(runs):
    """Loss of the whole batch, gradient norm of the averaged gradient, and the score of the weights that come out."""
    one, two = (runs[workers]["curve"] for workers in (1, 2))
    assert [entry["step"] for entry in one["train"]] == [1, 2, 3, 4, 5, 6]
    for a, b in zip(one["train"], two["train"], strict=True):
        assert b == pytest.approx(a, rel=1e-5)
    assert two["valid_bits_per_dim"] == pytest.approx(one["valid_bits_per_dim"], rel=1e-5)
    losses = [entry["bits_per_dim"] for entry in one["train"]]
    assert min(losses[1:]) < losses[0] * 0.999  # it trains: equal losses of untrained weights would show nothing


def test_the_comparison(runs):
    result = ddp.compare(runs)
    assert result["speedup"][1] == 1 and result["speedup"][2] > 0
    assert result["largest_difference_of_curves"][2] < 1e-5
    apart = {
        **runs,
        2: {
            **runs[2],
            "curve": {"train": [{**e, "bits_per_dim": 1.02 * e["bits_per_dim"]} for e in runs[2]["curve"]["train"]]},
        },
    }
    assert ddp.compare(apart)["largest_difference_of_curves"][2] == pytest.approx(0.02, rel=1e-3)


def test_workers_that_do_not_divide_the_batch_are_refused(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["ddp.py", "--config", "debug", "--workers", "2", "3"])
    with pytest.raises(SystemExit) as ended:
        ddp.main()
    assert ended.value.code == 2 and "--workers must divide the batches, 8 and 512" in capsys.readouterr().err
