"""spn/gpu/training.py: a network in its fast forms is the same network, forward and backward, compiled or not.

python -m pytest tests/spn/gpu/test_speed_up.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._inductor.compile_fx import compile_fx

from spn.gpu.training import TableLookup, add_shift, speed_up, table_gradient
from spn.model import SPN, nll_nats, recompute_activations

STAGES: dict[str, dict[str, Any]] = {  # sizes of a stage, and its slices
    "baseline": dict(image_size=5, scaling_factor=1, num_bits=3),
    "first_slice": dict(image_size=6, scaling_factor=2, num_bits=3),
    "size_upscale": dict(image_size=9, scaling_factor=3, num_bits=3),
    "depth_upscale": dict(image_size=6, scaling_factor=2, num_bits=5, num_given_bits=3),
    "depth_upscale_8": dict(image_size=4, scaling_factor=1, num_bits=1, num_given_bits=3),
}
LAYERS = {"num_layers": 7, "num_attn_layers": 2}  # more than a group of PixelCNN layers
gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


def make_network(tiny_config: Callable, stage: str, recipe: str, **decoder: int) -> SPN:
    part = {"recipe": recipe, "num_memory_rows": 6}
    embedder = {**part, "num_conv_layers": 2}
    return SPN(tiny_config(stage, decoder={**LAYERS, **part, **decoder}, embedder=embedder, **STAGES[stage]))


def logits_and_gradients(
    model: SPN, seed: int, forward: Callable[..., Tensor] | None = None, batch: int = 4
) -> dict[str, Tensor]:
    """Logits and the loss's gradient of every parameter, by name; the batch follows from the seed alone."""
    config, generator = model.config, torch.Generator().manual_seed(seed)
    device = next(model.parameters()).device
    shape = (batch, config.num_slices, 3, config.slice_size, config.slice_size)
    slices = torch.randint(config.num_values, shape, generator=generator).to(device)
    given = torch.randint(2**config.num_given_bits, shape, generator=generator).to(device)
    index = torch.arange(batch, device=device) % config.num_slices
    logits = (model if forward is None else forward)(slices, index, given if config.num_given_bits else None)
    loss = nll_nats(logits, slices[torch.arange(batch, device=device), index]).sum()
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    names = [name for name, _ in model.named_parameters()]
    return {"logits": logits.detach(), **dict(zip(names, gradients, strict=True))}


@pytest.mark.parametrize(("stage", "recompute"), [*((stage, False) for stage in STAGES), ("depth_upscale", True)])
@pytest.mark.parametrize("recipe", ["paper", "modern"])
def test_fast_forms_equal_the_plain_network(stage, recipe, recompute, tiny_config, randomised):
    """Every logit and every gradient in float64; the same names, parameters and values afterwards."""
    model = randomised(make_network(tiny_config, stage, recipe), 0)
    plain = logits_and_gradients(model, seed=1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    parameters = list(model.parameters())
    if recompute:
        recompute_activations(model)
    assert speed_up(model) is model
    assert type(model.decoder).__name__ == "FastDecoder"
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert list(model.state_dict()) == list(before)
    fast = logits_and_gradients(model, seed=1)
    for name, expected in plain.items():
        scale = expected.abs().max()
        assert scale > 0 or name.endswith("intensity.table.weight"), f"{name} has no gradient: nothing is compared"
        torch.testing.assert_close(fast[name], expected, rtol=1e-9, atol=1e-10 * float(scale), msg=name)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    ("stage", "compiled"),
    [pytest.param(stage, False, marks=gpu) for stage in STAGES] + [pytest.param("depth_upscale", True, marks=gpu)],
)
@pytest.mark.parametrize("recipe", ["paper", "modern"])
def test_fast_forms_in_bfloat16_are_as_close_as_the_plain_network_in_bfloat16(stage, recipe, compiled, tiny_config):
    """Against float64 on the same GPU: no logit and no gradient is further away than rounding explains."""
    torch.manual_seed(0)
    model = make_network(tiny_config, stage, recipe).cuda().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p) * p[0].numel() ** -0.5 if p.ndim > 1 else 0.1 * torch.randn_like(p))
    exact = logits_and_gradients(model.double(), seed=1, batch=64)
    model.float()

    def errors(forward: Callable[..., Tensor]) -> dict[str, float]:
        with torch.autocast("cuda", torch.bfloat16):
            found = logits_and_gradients(model, seed=1, batch=64, forward=forward)
        gradients = [name for name in exact if name != "logits"]
        scale = max(float(exact[name].norm()) for name in gradients)
        each = {
            name: float(
                (found[name] - value).norm() / (value.norm() if name == "logits" else value.norm() + 0.01 * scale)
            )
            for name, value in exact.items()
        }
        apart = torch.cat([(found[name] - exact[name]).flatten() for name in gradients])
        return {
            **each,
            "all gradients": float(apart.norm() / torch.cat([exact[name].flatten() for name in gradients]).norm()),
        }

    plain = errors(model)
    fast = errors(speed_up(model, compiled=compiled))
    # Gradients of biases are sums over positions that nearly cancel: one tensor may round worse than the others.
    for name, error in fast.items():
        assert error < 4 * plain[name] + 0.02, (name, error, plain[name])
    assert fast["all gradients"] < 1.5 * plain["all gradients"] + 0.01, (fast, plain)


def inductor_without_code(graph, inputs):
    """The compiler up to the graphs of the forward and the backward pass, which run as they are."""
    return compile_fx(graph, inputs, inner_compile=lambda made, *_, **__: make_boxed_func(made.forward))


@pytest.mark.parametrize(("recipe", "recompute"), [("paper", False), ("paper", True), ("modern", True)])
def test_a_network_is_compiled_as_one_graph(recipe, recompute, tiny_config):
    """Nothing in it makes torch.compile fall back to Python in between, and the loss stays the same.

    Recomputing changes the groups of recipe paper. In recipe modern it only wraps the layers, so one case is enough.
    """
    torch.manual_seed(0)
    model = make_network(tiny_config, "depth_upscale", recipe, num_layers=2, num_attn_layers=1)
    speed_up(model)
    if recompute:
        recompute_activations(model)
    plain = logits_and_gradients(model, seed=4)
    compiled = torch.compile(model.forward, backend=inductor_without_code, fullgraph=True)
    for name, found in logits_and_gradients(model, seed=4, forward=compiled).items():
        torch.testing.assert_close(found, plain[name], rtol=1e-4, atol=1e-4, msg=name)


def test_compiled_networks_keep_the_layouts_that_they_have(tiny_config, monkeypatch):
    """The compiler is asked not to transpose tensors of four axes, by a key that it knows; and the whole graph may be
    kept on the disk for the next start."""
    from torch._functorch._aot_autograd.autograd_cache import check_cacheable

    model = SPN(tiny_config("size_upscale", image_size=8, scaling_factor=2))
    plain = logits_and_gradients(model, seed=4)
    seen = []

    def compiler(graph, inputs, *, config_patches, **_):
        with torch._inductor.config.patch(config_patches):
            seen.append(torch._inductor.config.layout_optimization)
            check_cacheable(graph)  # else it raises
        return graph.forward

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compiler)
    found = logits_and_gradients(model, seed=4, forward=speed_up(model, compiled=True))
    assert seen == [False]
    for name, expected in plain.items():
        torch.testing.assert_close(found[name], expected, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("num_values", [2, 8, 32])
def test_gradient_of_the_table_lookup_is_that_of_an_embedding(num_values):
    """What the GPU uses: values and gradients as of an ordinary embedding, whatever the number of rows divides by."""
    for shape in ((3, 5, 7), (2, 512), (1,)):
        tables = torch.randn(3, num_values, 8, dtype=torch.float64, requires_grad=True)
        values = torch.randint(num_values, (*shape, 3))
        rows = F.embedding(values + torch.arange(3) * num_values, tables.flatten(0, 1))
        found = TableLookup.apply(tables, values, tables.dtype)
        assert torch.equal(found, rows)
        upstream = torch.randn_like(rows)
        expected, actual = (torch.autograd.grad(out, tables, upstream)[0] for out in (rows, found))
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_the_table_lookup_is_compiled_as_one_graph():
    """Its gradient is one operation of the graph, whose type and shape are known before it runs."""
    tables, values = torch.randn(3, 8, 8, requires_grad=True), torch.randint(8, (4, 6, 5, 3))
    lookup = torch.compile(TableLookup.apply, backend="aot_eager", fullgraph=True)
    for dtype in (torch.float32, torch.bfloat16):
        upstream = torch.randn(4, 6, 5, 3, 8).to(dtype)
        (expected,) = torch.autograd.grad(TableLookup.apply(tables, values, dtype), tables, upstream)
        (found,) = torch.autograd.grad(lookup(tables, values, dtype), tables, upstream)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, expected)
    torch.library.opcheck(table_gradient, (torch.randn(30, 3, 8), torch.randint(8, (30, 3)).to(torch.uint8), 8))


def test_gradients_of_a_shift_are_those_of_an_addition():
    """Whatever the number of positions divides by, and where the gradient comes in another layout."""
    for shape in ((3, 5, 7, 6), (2, 512, 4), (1, 3)):
        x, shift = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in (shape, shape[-1:]))
        upstream = torch.randn(shape[::-1], dtype=torch.float64).permute(*range(len(shape))[::-1])
        plain, found = x + shift, add_shift(x, shift)
        assert torch.equal(found, plain)
        expected, actual = (torch.autograd.grad(out, (x, shift), upstream) for out in (plain, found))
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
