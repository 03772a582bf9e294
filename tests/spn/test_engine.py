"""Options of the training engine that change speed or memory, never the result; and starting from given weights.

python -m pytest tests/spn/test_engine.py
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from spn.checkpoint import save_checkpoint, start_weights
from spn.config import TrainConfig
from spn.gpu.compiling import MODES, compile_network
from spn.model import SPN, nll_nats, recompute_activations
from spn.training import TrainState


def loss_and_gradients(model: SPN, seed: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    config, generator = model.config, torch.Generator().manual_seed(seed)
    shape = (3, 3, config.image_size, config.image_size)
    image = torch.randint(config.num_values, shape, generator=generator)
    given = torch.randint(2**config.num_given_bits, shape, generator=generator) if config.num_given_bits else None
    index = torch.randint(config.num_slices, (3,), generator=generator)
    torch.manual_seed(seed)  # of dropout
    loss = nll_nats(model(image, index, given), model.target(image, index)).sum()
    return loss, list(torch.autograd.grad(loss, list(model.parameters())))


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("stage", ["size_upscale", "depth_upscale"])
def test_recomputed_activations_give_the_same_gradients(stage, dropout, tiny_config):
    """Bit for bit, dropout included; and less is kept for the backward pass."""
    part = {"dropout": dropout}
    config = tiny_config(stage, image_size=8, scaling_factor=2, decoder=part, embedder=part)
    torch.manual_seed(0)
    model = SPN(config)
    kept: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[-1] += tensor.numel()
        return tensor

    found = []
    for recompute in (False, True):
        if recompute:
            recompute_activations(model)
        kept.append(0)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            found.append(loss_and_gradients(model, seed=4))
    assert torch.equal(found[0][0], found[1][0])
    assert all(torch.equal(a, b) for a, b in zip(found[0][1], found[1][1], strict=True))
    assert kept[1] < kept[0]


@pytest.mark.parametrize("recipe", ["paper", "modern"])
def test_a_network_is_compiled_as_one_graph(recipe, tiny_config):
    """Nothing in it makes torch.compile fall back to Python in between, and the loss stays the same."""
    part = {"recipe": recipe, "num_memory_rows": 4}
    config = tiny_config(
        "depth_upscale", image_size=8, scaling_factor=2, decoder={"num_layers": 7, **part}, embedder=part
    )
    torch.manual_seed(0)
    model = SPN(config)
    loss, gradients = loss_and_gradients(model, seed=4)
    model.forward = torch.compile(model.forward, backend="aot_eager", fullgraph=True)
    compiled_loss, compiled_gradients = loss_and_gradients(model, seed=4)
    torch.testing.assert_close(compiled_loss, loss)
    for actual, expected in zip(compiled_gradients, gradients, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", list(MODES))
def test_compiled_networks_keep_the_layouts_that_they_have(mode, tiny_config, monkeypatch):
    """The compiler is told not to transpose tensors of four axes, and that of a key that it knows."""
    model = SPN(tiny_config("size_upscale", image_size=8, scaling_factor=2))
    plain = loss_and_gradients(model, seed=4)
    seen = []

    def compiler(graph, inputs, *, config_patches, **_):
        with torch._inductor.config.patch(config_patches):
            config = torch._inductor.config
            seen.append((config.layout_optimization, config.coordinate_descent_tuning, config.max_autotune))
        return graph.forward

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compiler)
    model.forward = compile_network(model.forward, mode=mode)
    found = loss_and_gradients(model, seed=4)
    assert seen == [(False, mode != "default", mode == "max_autotune")]
    torch.testing.assert_close(found, plain)


def test_training_starts_from_another_runs_averaged_weights(tiny_config, tmp_path):
    config = tiny_config("size_upscale", image_size=8, scaling_factor=2)
    torch.manual_seed(1)
    theirs = SPN(config)
    averaged = {name: p.detach() + 1 for name, p in theirs.named_parameters()}
    save_checkpoint(tmp_path, model=theirs, ema=averaged, trainer={})
    torch.manual_seed(2)
    state = TrainState.create(SPN(config), TrainConfig())
    state.start_from(start_weights(tmp_path, config))
    for name, p in state.model.named_parameters():
        assert torch.equal(p, averaged[name]) and torch.equal(state.polyak.shadow[name], averaged[name]), name
    assert state.step == 0
    with torch.no_grad():
        next(state.model.parameters()).add_(1)  # the average is a copy, not the weights themselves
    name, p = next(iter(state.model.named_parameters()))
    assert not torch.equal(p, state.polyak.shadow[name])


def test_weights_of_another_network_are_refused_by_what_differs(tiny_config, tmp_path):
    config = tiny_config("size_upscale", image_size=8, scaling_factor=2)
    model = SPN(config)
    save_checkpoint(tmp_path, model=model, ema=dict(model.named_parameters()), trainer={})
    for change in ({"num_bits": 3}, {"image_size": 16}):
        other = dataclasses.replace(config, **change)
        with pytest.raises(ValueError, match=f"init_from: {next(iter(change))} is"):
            start_weights(tmp_path, other)
