"""The training loop: when it logs, validates and saves, and that going on from a checkpoint equals never stopping.

python -m pytest tests/spn/training/test_training_loop.py
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from spn.checkpoint import load_trainer, load_weights, save_checkpoint
from spn.config import TrainConfig
from spn.evaluation import image_nats
from spn.model import SPN, nll_nats
from spn.training import Batch, TrainState, fit
from tests.spn.whole_images import logits_of, target_of

# ---- the loop -------------------------------------------------------------------------------------------------------


def test_fit_logs_validates_and_saves_at_the_right_steps(network, settings, batches_from, assert_bitwise):
    """Every interval and, once, the last step; the average is in evaluation mode, the network is not."""
    model = network("first_slice", 2)
    config = settings(num_steps=7, log_every_steps=2, eval_every_steps=3, checkpoint_every_steps=6)
    state = TrainState.create(model, config)
    logged, saved, steps, scores = [], [], [], []

    def evaluate() -> dict[str, float]:
        assert not any(m.training for m in state.ema.modules())
        scores.append(10.0 + state.step)
        return {"valid/bits_per_dim": scores[-1]}

    def on_log(step: int, metrics: dict[str, float]) -> None:
        assert step == state.step
        logged.append((step, metrics))

    def on_checkpoint(got: TrainState, score: dict[str, float]) -> None:
        assert got is state
        assert all(m.training for m in model.modules())
        assert not torch.equal(model.decoder.head.weight, state.ema.decoder.head.weight)
        saved.append((state.step, score["valid/bits_per_dim"]))

    nats = []

    def taken() -> Iterator[list[Batch]]:
        for micro in batches_from(model, 0):
            with torch.no_grad():
                scored = [
                    nll_nats(logits_of(model, b.image, b.index), target_of(model, b.image, b.index)).sum()
                    for b in micro
                ]
            nats.append(float(sum(scored)))
            yield micro

    fit(
        state,
        config=config,
        batches=taken(),
        forward=model,
        evaluate=evaluate,
        on_log=on_log,
        on_checkpoint=on_checkpoint,
        on_step=steps.append,
    )
    assert steps == [1, 2, 3, 4, 5, 6, 7] and len(nats) == 7  # no batch is taken and then left
    assert saved == [(6, 16.0), (7, 17.0)] and scores == [13.0, 16.0, 17.0]
    trained = {step: metrics for step, metrics in logged if "train/bits_per_dim" in metrics}
    valid = {step: metrics for step, metrics in logged if "valid/bits_per_dim" in metrics}
    assert list(trained) == [2, 4, 6, 7] and list(valid) == [3, 6, 7]
    since = 0
    for step, metrics in trained.items():
        # Mean over the steps since the last log; 4 slices per step of 2 x 2 x 3 dims, a quarter of the image each.
        mean = sum(nats[since:step]) / (4 * (step - since) * 12) / math.log(2) / 4
        assert metrics["train/bits_per_dim"] == pytest.approx(mean, rel=1e-5)
        assert metrics["images_seen"] == 4 * step
        assert metrics["train/lr"] == 1e-2
        assert metrics["train/grad_norm"] > 0 and metrics["train/slices_per_sec"] > 0
        assert 0 < metrics["train/data_wait"] < 1
        since = step
    assert [(v["valid/bits_per_dim"], v["images_seen"]) for v in valid.values()] == [(13, 12), (16, 24), (17, 28)]


def test_fit_of_a_finished_run_does_nothing(network, settings):
    model, config = network("baseline", 1), settings()
    state = TrainState.create(model, config)
    state.step = config.num_steps

    def never(*_) -> float:
        raise AssertionError("called")

    fit(
        state,
        config=config,
        batches=iter(()),
        forward=model,
        evaluate=never,
        on_log=never,
        on_checkpoint=never,
    )


# ---- resuming -------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(make_batch, batches_from) -> Callable[[TrainState, TrainConfig, Path | None], list[dict]]:
    """run(state, config, folder) -> its log; trains on batches that follow from the step, checkpoints in
    <folder>/<step>."""

    def run_once(state: TrainState, config: TrainConfig, folder: Path | None) -> list[dict]:
        logs, timed = [], ("train/slices_per_sec", "train/data_wait")

        def on_checkpoint(got: TrainState, score: dict[str, float]) -> None:
            if folder is not None:
                place = folder / str(got.step)
                place.mkdir(parents=True)
                save_checkpoint(place, model=got.model, ema=got.ema, trainer=got.trainer_dict())

        def evaluate() -> dict[str, float]:
            batch = make_batch(state.model, 99, 4)
            slices = range(1 if state.model.config.stage == "first_slice" else state.model.config.num_slices)
            nats = image_nats(state.ema, batch.image, batch.given, slices=slices)
            return {"valid/bits_per_dim": float(nats.sum())}

        fit(
            state,
            config=config,
            batches=batches_from(state.model, state.step),
            forward=state.model,
            evaluate=evaluate,
            on_log=lambda step, metrics: logs.append(
                {"step": step} | {k: v for k, v in metrics.items() if k not in timed}
            ),
            on_checkpoint=on_checkpoint,
        )
        return logs

    return run_once


def resume(folder: Path, model: SPN, config: TrainConfig, *, random_state: bool = True) -> TrainState:
    """A state as a fresh process would make it, from the files of a checkpoint."""
    state = TrainState.create(model, config)
    torch.manual_seed(12345)  # a new process's stream is elsewhere
    held = torch.get_rng_state()
    state.load(
        weights=load_weights(folder, averaged=False),
        ema=load_weights(folder, averaged=True),
        trainer=load_trainer(folder),
    )
    if not random_state:
        torch.set_rng_state(held)
    return state


@pytest.mark.parametrize(
    ("stage", "optimizer", "dropout"),
    [
        ("first_slice", "rmsprop", 0.0),
        ("first_slice", "adamw", 0.2),
        ("depth_upscale", "rmsprop", 0.2),
        ("depth_upscale", "adamw", 0.0),
        ("depth_upscale", "muon", 0.0),
    ],
)
def test_resuming_equals_the_unbroken_run_bit_for_bit(
    stage, optimizer, dropout, network, tmp_path, settings, snapshot, assert_bitwise, run
):
    """Stopped after step 3 of 9 and again after 6: weights, average, optimiser, random state and logs of all later
    steps are those of a run that was never stopped. With dropout this needs the random state."""
    config = settings(
        num_steps=9,
        optimizer=optimizer,
        **(dict(schedule="linear") if optimizer == "muon" else dict(lr_boundaries=[5], lr_values=[3e-3])),
        weight_decay=0.01,
        warmup_steps=4,
        polyak_warmup=True,
        log_every_steps=3,
        grad_clip=1.0,
    )
    torch.manual_seed(7)
    whole = TrainState.create(network(stage, 2, dropout=dropout), config)
    logs = run(whole, config, tmp_path / "whole")
    random_state = torch.get_rng_state()
    for start in (3, 6):
        model = network(stage, 2, seed=start, dropout=dropout)  # other initial weights
        state = resume(tmp_path / "whole" / str(start), model, config)
        assert state.step == start
        again = run(state, config, None)
        assert state.step == 9
        assert_bitwise(snapshot(state), snapshot(whole))
        assert torch.equal(torch.get_rng_state(), random_state)
        assert again == [entry for entry in logs if entry["step"] > start]
    lost = resume(tmp_path / "whole" / "6", network(stage, 2, dropout=dropout), config, random_state=False)
    run(lost, config, None)
    differs = any(not torch.equal(a, b) for a, b in zip(snapshot(lost).values(), snapshot(whole).values(), strict=True))
    assert differs == (dropout > 0)
