"""Muon: orthogonal updates, matrices cut where several maps share a tensor, everything else to AdamW.

RMSProp's recurrence and AdamW's groups are in test_training_updates.py.

    python -m pytest tests/spn/training/test_optimizers.py
"""

from __future__ import annotations

import pytest
import torch

from spn.config import TrainConfig
from spn.model import SPN
from spn.optimizers import Muon, make_optimizers, orthogonalised
from spn.training import Batch, TrainState, learning_rate, train_step


@pytest.mark.parametrize("shape", [(8, 8), (4, 12), (20, 5), (3, 6, 9)])
def test_orthogonalised_matrices_have_singular_values_near_one_and_the_same_directions(shape):
    torch.manual_seed(0)
    matrices = torch.randn(shape, dtype=torch.float64) @ torch.diag(
        torch.logspace(0, 1, shape[-1], dtype=torch.float64)
    )
    u, s, v = torch.linalg.svd(matrices, full_matrices=False)
    found = u.mT @ orthogonalised(matrices) @ v.mT
    values = found.diagonal(dim1=-2, dim2=-1)
    keep = s / s.amax(-1, keepdim=True) > 0.05  # five steps do not lift what is all but zero
    assert ((values > 0.6) & (values < 1.3))[keep].all()
    off = found - torch.diag_embed(values)
    assert off.abs().max() < 1e-9


def test_a_step_by_hand():
    """Two steps of momentum, the Nesterov look-ahead, decay and the factor of a tall matrix."""
    torch.manual_seed(0)
    w, grads = torch.randn(6, 3, dtype=torch.float64), torch.randn(2, 6, 3, dtype=torch.float64)
    p = torch.nn.Parameter(w.clone())
    optimizer = Muon([p], lr=0.1, momentum=0.9, weight_decay=0.01, parts={})
    moment = torch.zeros_like(w)
    for grad in grads:
        p.grad = grad.clone()
        optimizer.step()
        moment = 0.9 * moment + 0.1 * grad
        update = orthogonalised(0.1 * grad + 0.9 * moment)
        w = w * (1 - 0.1 * 0.01) - 0.1 * 2**0.5 * update
    torch.testing.assert_close(p.detach(), w)


def test_maps_that_share_a_tensor_are_orthogonalised_one_by_one():
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.zeros(12, 4, dtype=torch.float64))
    p.grad = torch.randn(12, 4, dtype=torch.float64)
    Muon([p], lr=1.0, momentum=0.0, weight_decay=0.0, parts={p: 3}).step()
    expected = torch.cat([orthogonalised(part) for part in p.grad.chunk(3)])
    torch.testing.assert_close(-p.detach(), expected)


@pytest.mark.parametrize("recipe", ["paper", "modern"])
def test_every_parameter_is_in_one_optimizer_and_moves(recipe, tiny_config):
    part = {"recipe": recipe, "num_memory_rows": 12}
    config = tiny_config("size_upscale", image_size=8, scaling_factor=2, decoder=part, embedder=part)
    settings = TrainConfig(
        num_steps=4,
        batch_size=4,
        optimizer="muon",
        learning_rate=0.02,
        momentum=0.95,
        schedule="linear",
        warmup_steps=1,
    )
    torch.manual_seed(0)
    model = SPN(config)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizers = make_optimizers(model, settings)
    held = [id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in model.parameters())
    muon = {id(p) for p in optimizers[0].param_groups[0]["params"]}
    names = {name for name, p in model.named_parameters() if id(p) in muon}
    assert {"decoder.layers.1.current.weight", "embedder.blocks.0.conv.weight"} <= names
    attention = "decoder.attention.layers.0."
    assert attention + ("qkv.weight" if recipe == "modern" else "memory.keys") in names
    assert not any("table" in name or "meta_position" in name or "head" in name or "bias" in name for name in names)
    state = TrainState.create(model, settings)
    for seed in range(3):  # a zero output map hides what is behind it from the first gradient
        generator = torch.Generator().manual_seed(seed)
        image = torch.randint(2, (4, 3, 8, 8), generator=generator)
        batch = Batch(image, torch.tensor([0, 1, 2, 3]), None, ["x"] * 4)
        train_step(state, [batch], config=settings, forward=model)
    unmoved = [name for name, p in model.named_parameters() if torch.equal(p, before[name])]
    assert unmoved == []
    rates = [optimizer.param_groups[0]["lr"] / learning_rate(settings, 2) for optimizer in state.optimizers]
    assert rates == pytest.approx([1.0, settings.adamw_learning_rate / 0.02])


def test_linear_schedule_holds_and_cools_down_to_zero():
    settings = TrainConfig(num_steps=100, schedule="linear", learning_rate=0.02, warmup_steps=10, cooldown=0.6)
    rates = [learning_rate(settings, step) for step in range(100)]
    assert rates[0] == pytest.approx(0.002) and rates[10:41] == pytest.approx([0.02] * 31)
    assert rates[70] == pytest.approx(0.01) and rates[99] == pytest.approx(0.02 / 60)
    assert all(a >= b for a, b in zip(rates[40:], rates[41:], strict=False))
