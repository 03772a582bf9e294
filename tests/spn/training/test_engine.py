"""Options of the training engine that change speed or memory, never the result; and starting from given weights.

python -m pytest tests/spn/training/test_engine.py
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from spn.checkpoint import check_start, load_weights, save_checkpoint
from spn.config import TrainConfig
from spn.model import SPN, nll_nats, recompute_activations
from spn.training import Batch, TrainState
from tests.spn.whole_images import logits_of, target_of


def loss_and_gradients(model: SPN, batch: Batch) -> tuple[torch.Tensor, list[torch.Tensor]]:
    torch.manual_seed(4)  # of dropout
    logits = logits_of(model, batch.image, batch.index, batch.given)
    loss = nll_nats(logits, target_of(model, batch.image, batch.index)).sum()
    return loss, list(torch.autograd.grad(loss, list(model.parameters())))


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_recomputed_activations_give_the_same_gradients(dropout, tiny_config, make_batch):
    """Bit for bit, dropout included; and less is kept for the backward pass."""
    part = {"dropout": dropout}
    config = tiny_config("depth_upscale", image_size=8, scaling_factor=2, decoder=part, embedder=part)
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
            found.append(loss_and_gradients(model, make_batch(model, 4, 3)))
    assert torch.equal(found[0][0], found[1][0])
    assert all(torch.equal(a, b) for a, b in zip(found[0][1], found[1][1], strict=True))
    assert kept[1] < kept[0]


def test_training_starts_from_another_runs_averaged_weights(tiny_config, tmp_path):
    config = tiny_config("size_upscale", image_size=8, scaling_factor=2)
    torch.manual_seed(1)
    theirs = SPN(config)
    average = SPN(config)
    averaged = dict(average.named_parameters())
    save_checkpoint(tmp_path, model=theirs, ema=average, trainer={})
    torch.manual_seed(2)
    state = TrainState.create(SPN(config), TrainConfig())
    check_start(tmp_path, config)
    state.start_from(load_weights(tmp_path, averaged=True))
    for name, p in state.model.named_parameters():
        assert torch.equal(p, averaged[name]) and torch.equal(state.ema.get_parameter(name), averaged[name]), name
    assert state.step == 0
    with torch.no_grad():
        next(state.model.parameters()).add_(1)  # the average is a copy, not the weights themselves
    name, p = next(iter(state.model.named_parameters()))
    assert not torch.equal(p, state.ema.get_parameter(name))


def test_weights_of_another_network_are_refused_by_what_differs(tiny_config, tmp_path):
    config = tiny_config("size_upscale", image_size=8, scaling_factor=2)
    model = SPN(config)
    save_checkpoint(tmp_path, model=model, ema=model, trainer={})
    deeper, dropped = (
        {"decoder": dataclasses.replace(config.decoder, **new)} for new in ({"num_layers": 9}, {"dropout": 0.5})
    )
    for change, name in (
        ({"num_bits": 3}, "num_bits"),
        ({"image_size": 16}, "image_size"),
        (deeper, "decoder.num_layers"),
    ):
        with pytest.raises(ValueError, match=f"^{name} is .* here, .* in the checkpoint"):
            check_start(tmp_path, dataclasses.replace(config, **change))
    check_start(tmp_path, dataclasses.replace(config, **dropped))
