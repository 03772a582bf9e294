"""The incremental decoder computes the logits of the full forward, and nothing but its cache changes on the way.

python -m pytest tests/spn/sampling/test_sampling_incremental.py
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from spn.decoding import incremental
from spn.decoding.incremental import prepare
from spn.evaluation import image_nats
from spn.model import SPN
from spn.sampling import sample_stage
from tests.spn.whole_images import context_of, incremental_logits, logits_of, target_of

# Channel counts that 3 does not divide, odd numbers of layers, no attention, a single layer, groups without a channel.
SHAPES = {
    "plain": dict(num_layers=2, conv_channels=6, residual_channels=9, num_attn_layers=2),
    "uneven": dict(num_layers=3, conv_channels=7, residual_channels=11, num_attn_layers=1, num_attn_heads=3),
    "uneven_wide_conv": dict(num_layers=5, conv_channels=10, residual_channels=8, num_attn_layers=3, num_attn_heads=1),
    "no_attention": dict(num_layers=3, conv_channels=8, residual_channels=10, num_attn_layers=0),
    "one_layer": dict(num_layers=1, conv_channels=5, residual_channels=7, num_attn_layers=1),
    "modern": dict(num_layers=3, conv_channels=7, residual_channels=11, num_attn_layers=2, recipe="modern"),
    "modern_no_attention": dict(num_layers=2, conv_channels=6, residual_channels=9, num_attn_layers=0, recipe="modern"),
    "empty_group": dict(num_layers=2, conv_channels=2, residual_channels=4, num_attn_layers=1),
}


def every_slice(model: SPN, seed: int, random_values) -> tuple[Tensor, Tensor, Tensor | None]:
    """A batch in which each target slice occurs once, every row with an image of its own: (image, index, given)."""
    config = model.config
    shape = (config.num_slices, 3, config.image_size, config.image_size)
    given = random_values(seed + 1, config.num_given_bits, *shape) if config.num_given_bits else None
    return random_values(seed, config.num_bits, *shape), torch.arange(config.num_slices), given


def difference(model: SPN, batch: tuple[Tensor, Tensor, Tensor | None]) -> float:
    """Largest difference between incremental logits and the full forward, over every slice, position and channel."""
    image, index, given = batch
    with torch.no_grad():
        full = logits_of(model, image, index, given)
        fast = incremental_logits(model, target_of(model, image, index), context_of(model, image, index, given))
    assert full.abs().max() > 0.1  # logits that are all but zero would prove nothing
    return float((fast - full).abs().max())


# ---- the incremental decoder is the full forward ------------------------------------------------------------------


def assert_incremental_logits_equal_full_forward(case: str, shape: str, stage_network, random_values) -> None:
    """Every slice, position and channel, for two seeds: 1e-9 in float64, 1e-4 in float32."""
    for seed in (1, 2):
        model = stage_network(case, seed=seed, decoder=SHAPES[shape])
        batch = every_slice(model, seed, random_values)
        assert difference(model, batch) < 1e-9
        assert difference(model.float(), batch) < 1e-4


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("case", ["baseline", "depth_upscale_2"])
def test_incremental_logits_of_every_decoder_equal_full_forward(case, shape, stage_network, random_values):
    """Without a context and with one, which is all that a decoder sees of its stage."""
    assert_incremental_logits_equal_full_forward(case, shape, stage_network, random_values)


def test_incremental_logits_of_every_stage_equal_full_forward(case, stage_network, random_values):
    assert_incremental_logits_equal_full_forward(case, "uneven", stage_network, random_values)


def test_incremental_logits_of_a_slice_of_one_pixel(tiny_spn, random_values):
    """At width 1 the pixel before, the pixel to the left and the row itself share one column of the cache."""
    for stage, size in (("baseline", 1), ("size_upscale", 2), ("depth_upscale", 2)):
        model = tiny_spn(stage, seed=3, image_size=size, scaling_factor=size, num_bits=2)
        assert difference(model, every_slice(model, 3, random_values)) < 1e-9


def _no_end_row(monkeypatch) -> None:
    monkeypatch.setattr(incremental, "end_row", lambda cache: None)


def _keys_not_written(monkeypatch) -> None:
    right = incremental._attend

    def wrong(layer, x, keys, values, position, cos_sin):
        y = right(layer, x, keys, values, position, cos_sin)
        keys[:, :, position] = 0
        return y

    monkeypatch.setattr(incremental, "_attend", wrong)


def _left_forgotten(monkeypatch) -> None:
    right = incremental.start_pixel

    def wrong(weights, cache, previous, row, column) -> None:
        kept = [r.clone() for r in cache.row]
        for r in cache.row:
            r[:, column] = 0
        right(weights, cache, previous, row, column)
        for r, k in zip(cache.row, kept, strict=True):
            r.copy_(k)

    monkeypatch.setattr(incremental, "start_pixel", wrong)


WRONG = [_no_end_row, _keys_not_written, _left_forgotten]


@pytest.mark.parametrize("break_cache", WRONG, ids=lambda f: f.__name__)
@pytest.mark.parametrize("case", ["baseline", "size_upscale_2", "depth_upscale_2"])
def test_a_wrong_cache_is_noticed(case, break_cache, stage_network, random_values, monkeypatch):
    """The comparison above is worth something: each mistake in the cache moves logits by far more than rounding."""
    model = stage_network(case, seed=1, decoder=SHAPES["uneven"])
    batch = every_slice(model, 1, random_values)
    assert difference(model, batch) < 1e-9
    break_cache(monkeypatch)
    assert difference(model, batch) > 1e-2


# ---- the network stays as it is ------------------------------------------------------------------------------------


def test_a_network_in_training_mode_is_refused(stage_network):
    """Dropout would draw from, and score, another network."""
    model = stage_network("baseline", seed=7).train()
    shape = (2, 3, model.config.image_size, model.config.image_size)
    with pytest.raises(AssertionError, match="dropout"):
        sample_stage(model, torch.rand(shape, dtype=torch.float64))
    with pytest.raises(AssertionError, match="dropout"):
        image_nats(model, torch.zeros(shape, dtype=torch.long), None, slices=range(1))


def test_sampling_leaves_the_network_as_it_was(stage_network):
    """Weights, buffers, modes, attributes and gradients: nothing is changed, and the weights used are copies."""
    model = stage_network("depth_upscale_2", seed=7)

    def state() -> tuple:
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        return (
            {name: (t.clone(), t.data_ptr(), t._version, t.requires_grad) for name, t in tensors.items()},
            {name: (m.training, sorted(vars(m))) for name, m in model.named_modules()},
            list(model.state_dict()),
        )

    before = state()
    shape = (2, 3, model.config.image_size, model.config.image_size)
    sample_stage(model, torch.rand(shape, dtype=torch.float64), given=torch.randint(8, shape))
    after = state()
    assert before[1:] == after[1:]
    assert before[0].keys() == after[0].keys()
    for name, (tensor, *rest) in before[0].items():
        assert torch.equal(tensor, after[0][name][0]), name
        assert rest == list(after[0][name][1:]), name
    assert all(p.grad is None for p in model.parameters())
    weights = prepare(model)
    for layer in weights.layers:
        for tensor in (layer.above, layer.above_bias, layer.left, layer.context, layer.attention, layer.current):
            tensor.zero_()
    for tensor in (*weights.head, *(tensor for layer in weights.layers for tensor in (*(layer.down or ()), *layer.up))):
        tensor.zero_()
    for name, tensor in {**dict(model.named_parameters()), **dict(model.named_buffers())}.items():
        assert torch.equal(tensor, before[0][name][0]), name
