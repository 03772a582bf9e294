"""Recipe modern: its blocks by their definitions, its masks broken on purpose, its probabilities summed.

That every stage is causal without blind spots, and decoded incrementally, is in test_causality.py and
test_sampling_incremental.py, which run both recipes.

    python -m pytest tests/spn/network/test_modern.py
"""

from __future__ import annotations

import itertools

import pytest
import torch

from spn.layers import GroupRMSNorm, channel_groups
from spn.model import SPN, cosines
from spn.modern import CausalStem, ModernLayer, rotary_cos_sin, rotate

MODERN = {"recipe": "modern", "num_memory_rows": 10}


def test_rotation_depends_on_the_offset_between_positions_alone():
    """Equal queries and keys: their product is the same for every pair with the same (row, column) offset."""
    cos_sin = rotary_cos_sin(5, 6, 8).double()
    q, k = torch.randn(2, 8, dtype=torch.float64)
    products = {}
    for (r, c), (s, d) in itertools.product(itertools.product(range(5), range(6)), repeat=2):
        value = rotate(q[None], cos_sin[:, r * 6 + c, None]) @ rotate(k[None], cos_sin[:, s * 6 + d, None]).t()
        products.setdefault((s - r, d - c), []).append(value.item())
    for values in products.values():
        assert max(values) - min(values) < 1e-5  # cos_sin is float32
    firsts = [values[0] for values in products.values()]
    assert len({round(value, 4) for value in firsts}) > len(firsts) / 2, "different offsets differ"


def test_group_rms_norm_gives_each_group_a_unit_mean_square():
    norm = GroupRMSNorm(8)
    torch.nn.init.ones_(norm.gain)
    torch.manual_seed(0)
    x, groups = torch.randn(4, 8), channel_groups(8)
    for group in range(3):
        part = norm(x)[:, groups == group]
        torch.testing.assert_close(part.square().mean(-1), torch.ones(4), rtol=1e-4, atol=1e-4)


def test_stem_reads_its_window_before_the_pixel():
    """By perturbation: rows h-3..h, columns w-3..w+3, of the own row only what is to the left."""
    stem = CausalStem(in_channels=2, width=3).double()
    torch.nn.init.normal_(stem.weight)
    x = torch.randn(1, 7, 9, 2, dtype=torch.float64)
    base = stem(x).view(7, 9, 3)
    for row, column in itertools.product(range(7), range(9)):
        other = x.clone()
        other[0, row, column] += 1
        moved = (stem(other).view(7, 9, 3) - base).abs().amax(-1) > 0
        for r, c in itertools.product(range(7), range(9)):
            inside = abs(c - column) <= 3 and (r - 3 <= row < r or (row == r and column < c))
            assert bool(moved[r, c]) == inside, (row, column, r, c)


def test_a_new_layer_is_the_identity(tiny_config):
    """Residual branches add nothing at first. That a network of such layers learns is shown in test_model.py."""
    torch.manual_seed(0)
    model = SPN(tiny_config("size_upscale", image_size=8, scaling_factor=2, decoder=MODERN, embedder=MODERN))
    layers = [m for m in model.modules() if isinstance(m, ModernLayer)]
    assert len(layers) == 2  # one in the embedder, one in the decoder
    x = torch.randn(2, 16, 8)
    for layer in layers:
        assert torch.equal(layer(x, model.decoder.attention.cos_sin), x)


def test_attention_reads_the_context_too(tiny_spn):
    """With s cut off from gates and stream the logits still follow it; cut off from attention as well, no more."""
    model = tiny_spn("size_upscale", seed=0, image_size=8, scaling_factor=2, decoder=MODERN, embedder=MODERN)
    decoder, width = model.decoder, model.decoder.surroundings.out_features
    target = torch.randint(model.config.num_values, (1, 3, 4, 4))
    contexts = torch.randn(2, 1, 4, 4, decoder.surroundings.in_features, dtype=torch.float64)

    def moved() -> float:
        with torch.no_grad():
            one, other = (decoder(target, context) for context in contexts)
        return float((one - other).abs().max())

    for own in (*(layer.cond for layer in decoder.layers), decoder.direct):
        own.weight.data[:, width:] = 0
    assert moved() > 1e-3
    decoder.surroundings.weight.data.zero_()
    assert moved() == 0


@pytest.mark.parametrize("num_values", [2, 8, 256])
def test_cosines_are_orthogonal_and_of_unit_mean_square(num_values):
    rows = cosines(num_values, range(1, num_values))
    expected = num_values * torch.eye(num_values - 1)
    torch.testing.assert_close(rows.t() @ rows, expected, rtol=0, atol=1e-3)


def test_a_new_table_and_head_treat_near_intensities_alike(tiny_config):
    """Neighbours are nearer than intensities far apart, in each colour's table and in the map to logits."""
    torch.manual_seed(0)
    decoder = SPN(tiny_config("baseline", image_size=8, scaling_factor=1, num_bits=8, decoder=MODERN)).decoder
    for table in (*decoder.intensity.table.weight.chunk(3), *decoder.head.weight.chunk(3)):
        assert (table[1:] - table[:-1]).norm(dim=1).mean() < 0.5 * (table[128:] - table[:128]).norm(dim=1).mean()
