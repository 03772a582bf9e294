"""On an NVIDIA GPU: the same training steps as on the CPU, and what happens to wrong numbers.

python -m pytest -m gpu tests/spn/gpu/test_gpu.py
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from spn.config import TrainConfig
from spn.gpu.training import FastIntensityEmbedding, speed_up
from spn.model import SPN
from spn.training import Batch, NonFiniteLoss, TrainState, fit, train_step

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


def networks(tiny_config) -> list[SPN]:
    torch.manual_seed(0)
    size = dict(image_size=8, scaling_factor=2)
    return [
        SPN(tiny_config("first_slice", num_bits=3, **size)),
        SPN(tiny_config("size_upscale", num_bits=3, **size)),
        SPN(tiny_config("depth_upscale", num_bits=5, num_given_bits=3, **size)),
    ]


def moved(batch: Batch) -> Batch:
    given = None if batch.given is None else batch.given.cuda()
    return dataclasses.replace(batch, image=batch.image.cuda(), index=batch.index.cuda(), given=given)


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("optimizer", ["rmsprop", "adamw"])
def test_training_steps_equal_the_cpus(which, optimizer, tiny_config, make_batch):
    settings = TrainConfig(num_steps=5, batch_size=6, optimizer=optimizer, learning_rate=1e-3, polyak_warmup=True)
    finished = {}
    for device in ("cpu", "cuda"):
        model = networks(tiny_config)[which].to(device).double()  # so that rounding cannot turn a tiny gradient around
        state = TrainState.create(model, settings)
        forward = speed_up(model) if device == "cuda" else model
        for step in range(3):
            batch = make_batch(model, step, 6)
            train_step(state, [moved(batch) if device == "cuda" else batch], config=settings, forward=forward)
        finished[device] = {name: p.detach().cpu() for name, p in model.named_parameters()}
    for name, weight in finished["cpu"].items():
        torch.testing.assert_close(finished["cuda"][name], weight, rtol=1e-6, atol=1e-9, msg=name)


def test_wrong_numbers_are_reported_a_step_later(tiny_config, make_batch):
    """The CPU reads a step's verdict while the next one runs; that one changes nothing, and names the step at fault."""
    model = networks(tiny_config)[0].cuda()
    settings = TrainConfig(num_steps=5, batch_size=6)
    state, batch = TrainState.create(model, settings), moved(make_batch(model, 0, 6))
    train_step(state, [batch], config=settings, forward=model)
    train_step(state, [batch], config=settings, forward=lambda *given: model(*given) * math.nan)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with pytest.raises(NonFiniteLoss, match="stage first_slice, step 1: loss nan"):
        train_step(state, [batch], config=settings, forward=model)
    assert state.step == 2
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), before[name], rtol=0, atol=0, equal_nan=True)


def test_wrong_numbers_of_the_last_step_are_found_by_check(tiny_config, make_batch):
    model = networks(tiny_config)[0].cuda()
    settings = TrainConfig(num_steps=5, batch_size=6)
    state, batch = TrainState.create(model, settings), moved(make_batch(model, 0, 6))
    train_step(state, [batch], config=settings, forward=model)
    state.check()

    def broken(*given: torch.Tensor) -> torch.Tensor:
        logits = model(*given)
        logits.register_hook(lambda grad: grad * math.inf)  # the loss is finite, the gradient is not
        return logits

    train_step(state, [batch], config=settings, forward=broken)
    with pytest.raises(NonFiniteLoss, match="step 1"):
        state.check()


def test_fit_hands_out_nothing_of_a_step_with_wrong_numbers(tiny_config, make_batch):
    """Before each log, validation and checkpoint the verdict is waited for."""
    model = networks(tiny_config)[0].cuda()
    settings = TrainConfig(
        num_steps=6, batch_size=6, log_every_steps=2, eval_every_steps=2, checkpoint_every_steps=2, polyak_warmup=True
    )
    state, seen = TrainState.create(model, settings), []
    with pytest.raises(NonFiniteLoss, match="step 3"):
        fit(
            state,
            config=settings,
            batches=([moved(make_batch(model, step, 6))] for step in range(6)),
            forward=lambda *given: model(*given) * (math.nan if state.step == 3 else 1.0),
            evaluate=lambda: {"valid/bits_per_dim": 1.0},
            on_log=lambda step, metrics: seen.append(step),
            on_checkpoint=lambda state, score: seen.append(state.step),
        )
    assert seen == [2, 2, 2]  # rate and loss, validation, checkpoint


@pytest.mark.parametrize("num_values", [2, 8, 32, 256])
@pytest.mark.parametrize("shape", [(1,), (3, 5, 7), (16, 8, 8, 112), (70, 32, 32, 64)])
def test_table_gradient_under_autocast_is_the_embeddings(num_values, shape):
    """Sums of what bfloat16 hands back, themselves in float32: few rows, many, and no multiple of a block."""
    layer = FastIntensityEmbedding(num_values=num_values).cuda()
    values = torch.randint(num_values, (*shape, 3), device="cuda")
    upstream = torch.randn(*shape, 24, device="cuda").bfloat16().float()
    with torch.autocast("cuda", torch.bfloat16):
        rows = layer(values)
    (found,) = torch.autograd.grad(rows, layer.table.weight, upstream.to(rows.dtype))
    exact = torch.nn.functional.embedding(values + layer.offset, layer.table.weight.double()).flatten(-2)
    (expected,) = torch.autograd.grad(exact, layer.table.weight, upstream.double())
    assert (found - expected).norm() / expected.norm() < 1e-4
