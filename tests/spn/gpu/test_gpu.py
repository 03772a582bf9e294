"""On an NVIDIA GPU: the same numbers as on the CPU, in training steps, bfloat16 and sampling.

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
from spn.sampling import sample_chain
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


def inputs(model: SPN, batch: int, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    config = model.config

    def draw(num_values: int) -> torch.Tensor:
        return torch.randint(num_values, (batch, 3, config.image_size, config.image_size), generator=generator)

    index = torch.randint(1 if config.stage == "first_slice" else config.num_slices, (batch,), generator=generator)
    given = draw(2**config.num_given_bits) if config.num_given_bits else None
    return Batch(draw(config.num_values), index, given, ["x"] * batch)


def moved(batch: Batch) -> Batch:
    given = None if batch.given is None else batch.given.cuda()
    return dataclasses.replace(batch, image=batch.image.cuda(), index=batch.index.cuda(), given=given)


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("optimizer", ["rmsprop", "adamw"])
def test_training_steps_equal_the_cpus(which, optimizer, tiny_config):
    settings = TrainConfig(num_steps=5, batch_size=6, optimizer=optimizer, learning_rate=1e-3, polyak_warmup=True)
    finished = {}
    for device in ("cpu", "cuda"):
        model = networks(tiny_config)[which].to(device).double()  # so that rounding cannot turn a tiny gradient around
        state = TrainState.create(model, settings)
        forward = speed_up(model) if device == "cuda" else model
        for step in range(3):
            batch = inputs(model, 6, step)
            train_step(state, [moved(batch) if device == "cuda" else batch], config=settings, forward=forward)
        finished[device] = {name: p.detach().cpu() for name, p in model.named_parameters()}
    for name, weight in finished["cpu"].items():
        torch.testing.assert_close(finished["cuda"][name], weight, rtol=1e-6, atol=1e-9, msg=name)


def test_wrong_numbers_are_reported_a_step_later(tiny_config):
    """The CPU reads a step's verdict while the next one runs; that one changes nothing, and names the step at fault."""
    model = networks(tiny_config)[0].cuda()
    settings = TrainConfig(num_steps=5, batch_size=6)
    state, batch = TrainState.create(model, settings), moved(inputs(model, 6, 0))
    train_step(state, [batch], config=settings, forward=model)
    train_step(state, [batch], config=settings, forward=lambda *given: model(*given) * math.nan)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with pytest.raises(NonFiniteLoss, match="stage first_slice, step 1: loss nan"):
        train_step(state, [batch], config=settings, forward=model)
    assert state.step == 2
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), before[name], rtol=0, atol=0, equal_nan=True)


def test_wrong_numbers_of_the_last_step_are_found_by_check(tiny_config):
    model = networks(tiny_config)[0].cuda()
    settings = TrainConfig(num_steps=5, batch_size=6)
    state, batch = TrainState.create(model, settings), moved(inputs(model, 6, 0))
    train_step(state, [batch], config=settings, forward=model)
    state.check()

    def broken(*given: torch.Tensor) -> torch.Tensor:
        logits = model(*given)
        logits.register_hook(lambda grad: grad * math.inf)  # the loss is finite, the gradient is not
        return logits

    train_step(state, [batch], config=settings, forward=broken)
    with pytest.raises(NonFiniteLoss, match="step 1"):
        state.check()


def test_fit_hands_out_nothing_of_a_step_with_wrong_numbers(tiny_config):
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
            batches=([moved(inputs(model, 6, step))] for step in range(6)),
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


def test_a_chain_is_sampled_as_on_the_cpu(tiny_config):
    """By the plain decoder in float64, where no rounding decides a draw: the same images from the same seed.

    The decoders that a GPU takes by itself are in test_fused.py and test_jacobi.py.
    """
    chain = {m.config.stage: m.double().eval() for m in networks(tiny_config)}
    expected = sample_chain(chain, seed=3, images=range(4))
    on_gpu = {stage: m.cuda() for stage, m in chain.items()}
    found = sample_chain(on_gpu, seed=3, images=range(4), decoder="plain")
    for stage, image in expected.items():
        assert torch.equal(found[stage].cpu(), image), stage


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")
@pytest.mark.parametrize("decoder", ["fused", "jacobi"])
def test_a_card_that_is_not_the_current_one_draws_as_the_current_one(decoder, tiny_config):
    _, *chain = networks(tiny_config)
    drawn = [
        sample_chain({m.config.stage: m.eval().to(card) for m in chain}, seed=3, images=range(4), decoder=decoder)
        for card in ("cuda:0", "cuda:1")
    ]
    for stage, image in drawn[0].items():
        assert torch.equal(drawn[1][stage].cpu(), image.cpu()), stage
