"""The update of the weights against recurrences written by hand: TensorFlow's RMSProp, rates, Polyak averaging.

python -m pytest tests/spn/training/test_training_updates.py
"""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

from spn.config import OPTIMIZERS, TrainConfig
from spn.optimizers import TFRMSProp, make_optimizers
from spn.training import TrainState, learning_rate, train_step, update_ema
from tests.spn.whole_images import logits_of, target_of

STAGES = [("baseline", 1), ("first_slice", 2), ("size_upscale", 2), ("depth_upscale", 2)]


# ---- TensorFlow's RMSProp -------------------------------------------------------------------------------------------


def recurrence(w: Tensor, grads: list[Tensor], rates: list[float], *, momentum: float, decay: float, epsilon: float):
    """The update written out number by number in Python floats: [steps, n] weights after each step."""
    weights, mean_square, moment, out = w.tolist(), [1.0] * len(w), [0.0] * len(w), []
    for grad, rate in zip(grads, rates, strict=True):
        for k, g in enumerate(grad.tolist()):
            mean_square[k] = decay * mean_square[k] + (1 - decay) * g * g
            moment[k] = momentum * moment[k] + rate * g / math.sqrt(mean_square[k] + epsilon)
            weights[k] -= moment[k]
        out.append(list(weights))
    return torch.tensor(out, dtype=torch.float64)


@pytest.mark.parametrize(("momentum", "decay", "epsilon"), [(0.9, 0.95, 1e-8), (0.0, 0.9, 1e-10), (0.5, 0.3, 1e-2)])
def test_rmsprop_is_the_recurrence(momentum, decay, epsilon):
    """Gradients of all sizes over 150 steps, the rate dropping twice on the way; two tensors, float64 to 1e-12."""
    generator = torch.Generator().manual_seed(0)
    size = torch.logspace(-7, 2, 10, dtype=torch.float64)
    grads = [torch.randn(10, generator=generator, dtype=torch.float64) * size for _ in range(150)]
    rates = [1e-2] * 60 + [3e-3] * 50 + [1e-4] * 40
    start = torch.randn(10, generator=generator, dtype=torch.float64)
    expected = recurrence(start, grads, rates, momentum=momentum, decay=decay, epsilon=epsilon)
    a, b = nn.Parameter(start[:4].clone().view(2, 2)), nn.Parameter(start[4:].clone())
    optimizer = TFRMSProp([a, b], lr=1.0, momentum=momentum, decay=decay, epsilon=epsilon)
    for grad, rate, wanted in zip(grads, rates, expected, strict=True):
        a.grad, b.grad = grad[:4].clone().view(2, 2), grad[4:].clone()
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        torch.testing.assert_close(torch.cat([a.flatten(), b]).detach(), wanted, rtol=1e-12, atol=1e-12)


def test_no_gradient_is_not_a_zero_gradient():
    """Without a gradient a weight keeps value and state; with a zero one its momentum goes on and its ms decays."""
    fixed, coasting = (nn.Parameter(torch.ones(2, dtype=torch.float64)) for _ in range(2))
    optimizer = TFRMSProp([fixed, coasting], lr=0.1, momentum=0.9, decay=0.95, epsilon=1e-8)
    optimizer.step()
    assert torch.equal(fixed, torch.ones_like(fixed)) and not optimizer.state_dict()["state"]
    for p in (fixed, coasting):
        p.grad = torch.ones_like(p)
    optimizer.step()
    kept = fixed.detach().clone(), {k: v.clone() for k, v in optimizer.state[fixed].items()}
    fixed.grad, coasting.grad = None, torch.zeros_like(coasting)
    before, moment = coasting.detach().clone(), optimizer.state[coasting]["moment"].clone()
    optimizer.step()
    assert torch.equal(fixed, kept[0])
    assert all(torch.equal(optimizer.state[fixed][k], v) for k, v in kept[1].items())
    torch.testing.assert_close(coasting.detach(), before - 0.9 * moment)
    torch.testing.assert_close(optimizer.state[coasting]["mean_square"], torch.full_like(before, 0.95))


@pytest.mark.parametrize(("stage", "scaling_factor"), STAGES)
def test_train_step_is_rmsprop_on_the_mean_nll(stage, scaling_factor, tiny_spn, settings, make_batch):
    """Three steps of a whole network: weights and average follow the recurrences, gradients taken here by hand."""
    model = tiny_spn(stage, seed=1, image_size=4, scaling_factor=scaling_factor, num_bits=2).train()
    config = settings(lr_boundaries=[1, 2], lr_values=[5e-3, 1e-3], polyak_warmup=True)
    state, mirror = TrainState.create(model, config), copy.deepcopy(model)
    start = torch.cat([p.detach().flatten() for p in model.parameters()])
    grads, shadow = [], start.clone()
    for step, batch in enumerate(make_batch(model, s, 4) for s in range(3)):
        mirror.load_state_dict(model.state_dict())
        mirror.zero_grad()
        logits = logits_of(mirror, batch.image, batch.index, batch.given)  # [B, 3, V, h, w]
        target = target_of(mirror, batch.image, batch.index)
        chosen = torch.log_softmax(logits, 2).gather(2, target[:, :, None])
        (-chosen.mean()).backward()
        grads.append(torch.cat([p.grad.flatten() for p in mirror.parameters()]))
        nats, norm = train_step(state, [batch], config=config, forward=model)
        assert nats.item() == pytest.approx(-chosen.sum().item(), rel=1e-12)
        assert norm.item() == pytest.approx(grads[-1].norm().item(), rel=1e-10)
        assert state.step == step + 1
        weights = torch.cat([p.detach().flatten() for p in model.parameters()])
        expected = recurrence(start, grads, [1e-2, 5e-3, 1e-3][: step + 1], momentum=0.9, decay=0.95, epsilon=1e-8)
        torch.testing.assert_close(weights, expected[-1], rtol=1e-9, atol=1e-9)
        decay = min(0.9, (2 + step) / (11 + step))
        shadow = decay * shadow + (1 - decay) * weights
        torch.testing.assert_close(torch.cat([p.flatten() for p in state.ema.parameters()]), shadow)
    assert sum(g.abs().max() > 1e-6 for g in grads) == 3


# ---- optimiser and rate ---------------------------------------------------------------------------------------------


def test_weight_decay_spares_norms_biases_and_embeddings(network, settings):
    """With all gradients zero AdamW moves exactly what is decayed: matrices, not gains, biases or embedding tables.

    It holds every weight once.
    """
    model = network("depth_upscale", 2)
    (optimizer,) = make_optimizers(model, settings(optimizer="adamw", weight_decay=0.5, learning_rate=0.1))
    held = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in model.parameters())
    tables = {f"{n}.weight" for n, m in model.named_modules() if isinstance(m, nn.Embedding)}
    assert len(tables) == 4
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for name, p in model.named_parameters():
        decayed = p.ndim >= 2 and name not in tables
        torch.testing.assert_close(p.detach(), before[name] * (0.95 if decayed else 1.0), msg=name)


def test_piecewise_rate_at_its_boundaries():
    """The paper's: 1e-4, 3e-5 from step 50k, 1e-5 from 100k; steps count from 0."""
    config = TrainConfig(lr_boundaries=[50_000, 100_000], lr_values=[3e-5, 1e-5])
    expected = {0: 1e-4, 49_999: 1e-4, 50_000: 3e-5, 99_999: 3e-5, 100_000: 1e-5, 199_999: 1e-5}
    assert {step: learning_rate(config, step) for step in expected} == expected
    assert learning_rate(TrainConfig(learning_rate=5e-5), 10**6) == 5e-5


def test_cosine_rate_at_its_ends():
    config = TrainConfig(schedule="cosine", num_steps=100, learning_rate=2.0)
    assert learning_rate(config, 0) == 2.0
    assert learning_rate(config, 50) == pytest.approx(1.0)
    assert learning_rate(config, 25) == pytest.approx(1 + math.cos(math.pi / 4))
    assert learning_rate(config, 100) == pytest.approx(0.0, abs=1e-15)
    assert learning_rate(config, 150) == pytest.approx(0.0, abs=1e-15)
    assert 0 < learning_rate(config, 99) < 1e-3


@pytest.mark.parametrize("schedule", ["piecewise", "cosine"])
def test_warmup_rises_in_equal_steps_to_the_full_rate(schedule):
    config = TrainConfig(schedule=schedule, num_steps=110, warmup_steps=10, learning_rate=1.0)
    rates = [learning_rate(config, step) for step in range(110)]
    assert rates[:10] == pytest.approx([(n + 1) / 10 for n in range(10)])
    assert rates[10] == 1.0
    assert max(rates) == 1.0
    if schedule == "cosine":
        assert rates[60] == pytest.approx(0.5)  # half way between the end of the warm-up and the end


def test_train_step_uses_the_rate_of_its_step(network, settings, make_batch):
    """The optimiser is given learning_rate(step before the update), in every parameter group."""
    for name in OPTIMIZERS:
        model = network("baseline", 1)
        config = settings(optimizer=name, lr_boundaries=[1, 3], lr_values=[1e-3, 1e-4], warmup_steps=2)
        state, seen = TrainState.create(model, config), []
        state.optimizers[0].register_step_pre_hook(lambda opt, *_: seen.append([g["lr"] for g in opt.param_groups]))  # noqa: B023
        for batch in (make_batch(model, s, 2) for s in range(5)):
            train_step(state, [batch], config=config, forward=model)
        assert [rates[0] for rates in seen] == [5e-3, 1e-3, 1e-3, 1e-4, 1e-4]
        assert all(len(set(rates)) == 1 for rates in seen)


# ---- Polyak averaging -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("warmup", [False, True])
def test_polyak_is_the_recurrence(warmup):
    """From the initial weights, not from zero; with warm-up the decay is min(decay, (1 + n) / (10 + n))."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2, dtype=torch.float64)
    ema, config = copy.deepcopy(model), TrainConfig(polyak_decay=0.8, polyak_warmup=warmup)
    expected = [p.detach().clone() for p in model.parameters()]
    for n in range(1, 60):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p))
        update_ema(ema, model, config, num_updates=n)
        decay = min(0.8, (1 + n) / (10 + n)) if warmup else 0.8
        assert (decay < 0.8) == (warmup and n < 35)
        expected = [s - (1 - decay) * (s - p.detach()) for s, p in zip(expected, model.parameters(), strict=True)]
        for average, wanted in zip(ema.parameters(), expected, strict=True):
            torch.testing.assert_close(average.detach(), wanted, rtol=1e-12, atol=1e-12)
