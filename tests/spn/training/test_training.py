"""Training: an unbiased loss, one step of it, what stops a run, and what settings are refused.

python -m pytest tests/spn/training/test_training.py
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from spn import training
from spn.config import TrainConfig
from spn.evaluation import bits_per_dim, image_nats
from spn.model import nll_nats
from spn.training import Batch, NonFiniteLoss, TrainState, bits_per_dim_estimate, fit, train_step
from tests.spn.whole_images import logits_of, target_of

STAGES = [("baseline", 1), ("first_slice", 2), ("size_upscale", 2), ("depth_upscale", 2)]


# ---- loss -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stage", "scaling_factor"), STAGES)
def test_estimate_is_unbiased(stage, scaling_factor, tiny_spn, make_batch):
    """The mean of the training estimate over all target slices of every image is the exact bits/dim."""
    model = tiny_spn(stage, seed=0, image_size=4, scaling_factor=scaling_factor, num_bits=2)
    config = model.config
    batch = make_batch(model, 0, 5)
    slices = range(1 if stage == "first_slice" else config.num_slices)
    exact = float(image_nats(model, batch.image, batch.given, slices=slices).sum())
    estimates = []
    for number in slices:
        index = torch.full((5,), number)
        with torch.no_grad():
            nats = nll_nats(logits_of(model, batch.image, index, batch.given), target_of(model, batch.image, index))
        estimates.append(bits_per_dim_estimate(float(nats.sum()), num_images=5, config=config))
    assert sum(estimates) / len(estimates) == pytest.approx(bits_per_dim(exact, num_images=5, image_size=4), rel=1e-12)
    assert len(slices) == 1 or max(estimates) > 1.001 * min(estimates)  # slices differ: the mean is no accident


@pytest.mark.parametrize(("stage", "scaling_factor"), STAGES)
def test_accumulated_gradients_equal_one_big_batch(stage, scaling_factor, tiny_spn, settings, make_batch, snapshot):
    """Also where micro-batches differ in size: weights, averages, loss and gradient norm to 1e-11 in float64."""
    config, outcomes = settings(grad_clip=0.05), []
    for parts in ((6,), (1, 2, 3)):
        model = tiny_spn(stage, seed=4, image_size=4, scaling_factor=scaling_factor, num_bits=2).train()
        state = TrainState.create(model, config)
        for step in range(2):
            whole = make_batch(model, step, 6)
            cut = torch.arange(6).split(parts)
            micro = [
                Batch(whole.image[c], whole.index[c], None if whole.given is None else whole.given[c], ["k"] * len(c))
                for c in cut
            ]
            nats, norm = train_step(state, micro, config=config, forward=model)
        outcomes.append({**snapshot(state), "nats": nats, "norm": norm})
    for name, tensor in outcomes[0].items():
        torch.testing.assert_close(outcomes[1][name], tensor, rtol=1e-9, atol=1e-11, msg=name)


def test_synchronisation_only_at_the_last_micro_batch(network, settings, make_batch):
    """A data-parallel wrapper exchanges gradients once a step: forward and backward of the others are in no_sync."""
    model = network("size_upscale", 2)
    events = []

    class Wrapper:
        def no_sync(self):
            class Context:
                def __enter__(self):
                    events.append("enter")

                def __exit__(self, *_):
                    events.append("exit")

            return Context()

        def __call__(self, *args: Tensor | None) -> Tensor:
            logits = model(*args)
            events.append("forward")
            logits.register_hook(lambda _: events.append("backward"))
            return logits

    config = settings()
    micro = [make_batch(model, seed, 2) for seed in range(3)]
    train_step(TrainState.create(model, config), micro, config=config, forward=Wrapper())
    assert events == ["enter", "forward", "backward", "exit"] * 2 + ["forward", "backward"]


def test_masks_of_dropout_follow_from_the_micro_batch(network, settings, make_batch):
    """Whatever was drawn before, and whether one worker accumulates two micro-batches or two workers have one each."""

    def nats(*seeds: int | None, random_state: int) -> float:
        model = network("size_upscale", 2, dropout=0.5)
        state, batch = TrainState.create(model.train(), settings()), make_batch(model, 0, 4)
        torch.manual_seed(random_state)
        micro = [replace(batch, seed=seed) for seed in seeds]
        return float(train_step(state, micro, config=settings(), forward=model)[0])

    first, second = nats(5, random_state=0), nats(6, random_state=1)
    assert first != second
    assert nats(5, 6, random_state=2) == pytest.approx(first + second, rel=1e-12)
    assert nats(None, random_state=0) != nats(None, random_state=1)


def test_gradient_clipping(network, settings, make_batch):
    """The norm reported is that before clipping; a limit above it changes nothing, one below it is met exactly."""
    seen: dict[float | None, tuple[float, Tensor]] = {}
    for limit in (None, 1e6, 1e-3):
        model = network("size_upscale", 2)
        state = TrainState.create(model, settings(grad_clip=limit))
        used = []
        state.optimizers[0].register_step_pre_hook(
            lambda *_: used.append(torch.cat([p.grad.flatten() for p in model.parameters()]))  # noqa: B023
        )
        _, norm = train_step(state, [make_batch(model, 0, 4)], config=settings(grad_clip=limit), forward=model)
        seen[limit] = float(norm), used[0].clone()
    assert len({norm for norm, _ in seen.values()}) == 1
    assert seen[None][0] == pytest.approx(float(seen[None][1].norm()), rel=1e-5) and seen[None][0] > 1e-2
    assert torch.equal(seen[None][1], seen[1e6][1])
    assert float(seen[1e-3][1].norm()) == pytest.approx(1e-3, rel=1e-3)
    direction = torch.nn.functional.cosine_similarity(seen[None][1], seen[1e-3][1], dim=0)
    assert float(direction) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(("stage", "scaling_factor"), [("baseline", 1), ("depth_upscale", 2)])
def test_bfloat16_autocast_has_a_float32_loss(stage, scaling_factor, network, monkeypatch, settings, make_batch):
    """Activations in bfloat16, weights, gradients and loss not; the loss is near that of float32."""
    losses = {}
    for precision in ("float32", "bfloat16"):
        model, kinds = network(stage, scaling_factor, dropout=0.1), []

        def spy(logits: Tensor, target: Tensor, kinds: list = kinds) -> Tensor:
            nats = nll_nats(logits, target)
            kinds.append((logits.dtype, nats.dtype))
            return nats

        monkeypatch.setattr(training, "nll_nats", spy)
        config = settings(precision=precision)
        state = TrainState.create(model.train(), config)
        torch.manual_seed(0)
        grads = []
        state.optimizers[0].register_step_pre_hook(
            lambda *_: grads.extend(p.grad.dtype for p in model.parameters())  # noqa: B023
        )
        nats, _ = train_step(state, [make_batch(model, 0, 8)], config=config, forward=model)
        assert kinds == [(getattr(torch, precision), torch.float32)]
        assert set(grads) == {torch.float32} == {p.dtype for p in model.parameters()}
        losses[precision] = nats.item()
    assert losses["bfloat16"] == pytest.approx(losses["float32"], rel=0.02)
    assert losses["bfloat16"] != losses["float32"]


# ---- wrong numbers stop the run -------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["loss", "loss_infinite", "gradient_only", "second_micro_batch"])
def test_non_finite_numbers_stop_before_the_optimiser(where, network, settings, batches_from, snapshot, assert_bitwise):
    """Stage, step and image keys are named; weights, average, optimiser and step stay as they were."""
    model, config = network("depth_upscale", 2), settings()
    state = TrainState.create(model.train(), config)
    for step in range(2):
        train_step(state, next(batches_from(model, step)), config=config, forward=model)
    before = snapshot(state)
    calls = []

    def forward(*args) -> Tensor:
        logits = model(*args)
        calls.append(1)
        if where == "gradient_only":
            logits.register_hook(lambda grad: grad * math.inf)
        elif where == "loss_infinite":
            logits = (
                logits - math.inf * torch.nn.functional.one_hot(torch.tensor(0), 4).view(1, 1, 4, 1, 1).nan_to_num()
            )
        elif where == "loss" or len(calls) == 2:
            logits = logits * math.nan
        return logits

    micro = next(batches_from(model, 2))
    with pytest.raises(NonFiniteLoss) as raised:
        train_step(state, micro, config=config, forward=forward)
    message = str(raised.value)
    for part in ("depth_upscale", "step 2", *micro[0].keys, *micro[1].keys, "nan" if where != "gradient_only" else ""):
        assert part in message
    assert state.step == 2
    assert_bitwise(snapshot(state), before)


def test_fit_hands_out_nothing_after_wrong_numbers(network, settings, batches_from, snapshot, assert_bitwise):
    """No log, validation or checkpoint of the step that failed; the weights that are left are the last good ones."""
    model, config = network("baseline", 1), settings(log_every_steps=1, eval_every_steps=1, checkpoint_every_steps=1)
    state, logged, saved = TrainState.create(model, config), [], []

    def forward(*args) -> Tensor:
        return model(*args) * (math.nan if state.step == 2 else 1.0)

    with pytest.raises(NonFiniteLoss, match="stage baseline, step 2"):
        fit(
            state,
            config=config,
            batches=batches_from(model, 0),
            forward=forward,
            evaluate=lambda: {"valid/bits_per_dim": 1.0},
            on_log=lambda step, metrics: logged.append(step),
            on_checkpoint=lambda s, score: saved.append((s.step, snapshot(s))),
        )
    assert logged == [1, 1, 2, 2] and [step for step, _ in saved] == [1, 2]
    assert_bitwise(snapshot(state), saved[-1][1])


# ---- configuration --------------------------------------------------------------------------------------------------


AT_LEAST_1 = ("num_steps", "batch_size", "micro_batch_size", "num_valid_images")
AT_LEAST_1 += ("eval_every_steps", "checkpoint_every_steps", "log_every_steps")
AT_LEAST_0 = ("weight_decay", "warmup_steps", "adamw_learning_rate")
BELOW_1 = ("momentum", "decay", "polyak_decay")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"optimizer": "sgd"}, ["optimizer", "'sgd'", "rmsprop", "adamw"]),
        ({"schedule": "step"}, ["schedule", "'step'", "piecewise", "cosine", "linear"]),
        ({"cooldown": 0.0}, ["cooldown", "0.0", "above 0"]),
        ({"slices": "some"}, ["slices", "'some'", "all", "first"]),
        ({"precision": "float16"}, ["precision", "'float16'", "float32", "bfloat16"]),
        *(({name: 0}, [name, "0", "at least 1"]) for name in AT_LEAST_1),
        *(({name: -1.0}, [name, "-1.0", "at least 0"]) for name in AT_LEAST_0),
        *(({name: value}, [name, str(value), "below 1"]) for name in BELOW_1 for value in (-0.1, 1.0)),
        ({"learning_rate": 0.0}, ["learning_rate", "0.0", "above 0"]),
        ({"epsilon": 0.0}, ["epsilon", "0.0", "above 0"]),
        ({"lr_boundaries": [5], "lr_values": [1e-3, 1e-4]}, ["lr_values", "2", "1", "lr_boundaries"]),
        ({"lr_boundaries": [5, 3], "lr_values": [1e-3, 1e-4]}, ["lr_boundaries", "[5, 3]"]),
        ({"lr_boundaries": [5, 5], "lr_values": [1e-3, 1e-4]}, ["lr_boundaries", "[5, 5]"]),
        ({"learning_rate": float("nan")}, ["learning_rate", "nan"]),
        ({"lr_boundaries": [3], "lr_values": [-1.0]}, ["lr_values", "-1.0"]),
        ({"lr_boundaries": [-3], "lr_values": [1.0]}, ["lr_boundaries", "[-3]"]),
        ({"lr_boundaries": [3], "lr_values": [1.0], "schedule": "cosine"}, ["lr_boundaries", "piecewise"]),
        ({"grad_clip": 0.0}, ["grad_clip", "0.0", "null"]),
        ({"grad_clip": float("nan")}, ["grad_clip", "nan", "null"]),
        (
            {"eval_every_steps": 200, "checkpoint_every_steps": 300},
            ["checkpoint_every_steps", "300", "eval_every_steps", "200"],
        ),
    ],
    ids=str,
)
def test_settings_that_cannot_be_used_are_named(changes, words):
    """A ValueError says which field, which value, and what is allowed."""
    with pytest.raises(ValueError) as raised:
        TrainConfig(**changes)
    assert [word for word in words if word not in str(raised.value)] == []


def test_settings_at_their_limits_are_taken():
    TrainConfig()
    TrainConfig(num_steps=1, batch_size=1, micro_batch_size=1, num_valid_images=1, polyak_decay=0.0, grad_clip=1e-9)
    TrainConfig(eval_every_steps=1, checkpoint_every_steps=7, lr_boundaries=[0, 1], lr_values=[1.0, 2.0])
