"""Values are drawn from the distribution that logits, temperature and top_p say, to within one draw of many.

python -m pytest tests/spn/sampling/test_draws.py
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from spn.decoding.incremental import Draws, decode_slice, pick, prepare
from spn.sampling import sample_slice_slowly, uniforms

NUM = 5_003
EVENLY = (torch.arange(NUM, dtype=torch.float64) + 0.5) / NUM
BELOW_ONE = 1 - 2**-53  # the largest number that a draw can be


def counts(logits: Tensor, temperature: float = 1.0, top_p: float | None = None) -> Tensor:
    """How often each value is drawn when the uniform numbers are spread evenly."""
    return pick(logits.expand(NUM, -1), EVENLY, temperature, top_p).bincount(minlength=len(logits))


@pytest.mark.parametrize("temperature", [0.5, 0.95, 1.0, 2.0])
@pytest.mark.parametrize("num_values", [2, 8, 256])
def test_pick_draws_from_softmax_of_logits_over_temperature(temperature, num_values):
    """With uniforms spread evenly, each value is drawn as often as its probability says, to within one draw."""
    logits = torch.randn(num_values, generator=torch.Generator().manual_seed(num_values), dtype=torch.float64) * 2
    weights = torch.exp(logits / temperature)
    assert (counts(logits, temperature) - NUM * weights / weights.sum()).abs().max() <= 1


def test_pick_at_a_very_low_temperature_takes_the_most_likely_value():
    logits = torch.randn((500, 256), generator=torch.Generator().manual_seed(0))
    uniform = torch.rand(500, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert torch.equal(pick(logits, uniform, 1e-9), logits.argmax(1))


def test_logits_of_low_precision_are_drawn_from_in_float64():
    logits = torch.randn(256, generator=torch.Generator().manual_seed(0)).bfloat16()
    for top_p in (None, 0.9):
        assert torch.equal(counts(logits, top_p=top_p), counts(logits.double(), top_p=top_p))


def test_pick_at_the_ends_of_the_unit_interval():
    """0 takes the first value of any probability, the largest number below 1 the last; impossible values never."""
    logits = torch.tensor([[-1e9, 0.0, 0.0, -1e9]]).expand(2, -1)
    uniform = torch.tensor([0.0, 0.75], dtype=torch.float64)
    assert pick(logits, uniform, 1.0).tolist() == [1, 2]
    below_one = torch.tensor([BELOW_ONE], dtype=torch.float64)
    assert pick(torch.zeros(1, 8), below_one, 1.0).tolist() == [7]


# ---- top_p ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("num_values", [2, 8, 256])
def test_top_p_draws_from_the_nucleus_as_often_as_its_values_are_likely(top_p, num_values):
    """Against a nucleus built value by value in plain Python."""
    temperature = 0.7
    logits = torch.randn(num_values, generator=torch.Generator().manual_seed(num_values), dtype=torch.float64) * 2
    weights = [math.exp(value / temperature) for value in logits.tolist()]
    likely = [weight / sum(weights) for weight in weights]
    nucleus: list[int] = []
    for value in sorted(range(num_values), key=lambda v: -likely[v]):
        if sum(likely[v] for v in nucleus) < top_p:
            nucleus.append(value)
    mass = sum(likely[v] for v in nucleus)
    expected = torch.tensor([NUM * likely[v] / mass if v in nucleus else 0.0 for v in range(num_values)])
    drawn = counts(logits, temperature, top_p)
    assert (drawn - expected).abs().max() <= 1
    assert set(drawn.nonzero().flatten().tolist()) <= set(nucleus)


def test_of_equally_likely_values_the_smaller_is_in_the_nucleus():
    """Four values of a quarter each: half the mass is the first two, a hair more needs the third."""
    logits = torch.zeros(4, dtype=torch.float64)
    assert counts(logits, top_p=0.5).nonzero().flatten().tolist() == [0, 1]
    assert counts(logits, top_p=0.5 + 1e-9).nonzero().flatten().tolist() == [0, 1, 2]
    assert counts(torch.tensor([0.0, 1.0, 0.0, 1.0]), top_p=1e-9).nonzero().flatten().tolist() == [1]


def test_top_p_of_one_changes_no_draw():
    logits = torch.randn((500, 256), generator=torch.Generator().manual_seed(0))
    uniform = torch.rand(500, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert torch.equal(pick(logits, uniform, 0.8, 1.0), pick(logits, uniform, 0.8))


def test_the_last_draw_stays_in_the_nucleus():
    """Rounding must not carry the largest number below 1 past the nucleus, whatever its mass."""
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn((4000, 8), generator=generator, dtype=torch.float64)
    top = torch.full((4000,), BELOW_ONE, dtype=torch.float64)
    likely = torch.softmax(logits, -1)
    chosen = pick(logits, top, 1.0, 0.6)
    ahead = (likely * (likely > likely.gather(1, chosen[:, None]))).sum(1)
    assert (ahead < 0.6).all()
    assert torch.equal(pick(torch.tensor([[0.0, 0.0, -1e9]]), top[:1], 1.0, 0.9), torch.tensor([1]))


@pytest.mark.parametrize(("name", "values"), [("top_p", (0.0, -0.1, 1.1)), ("temperature", (0.0, -1.0, math.inf))])
def test_numbers_out_of_range_are_refused(name, values):
    for value in (*values, math.nan):
        with pytest.raises(ValueError, match=f"{name} is {value}"):
            Draws(torch.zeros((1, 3, 1, 1), dtype=torch.float64), **{name: value})


# ---- both decoders read the same draws -----------------------------------------------------------------------------


@pytest.mark.parametrize("known_rows", [0, 1, 3])
@pytest.mark.parametrize("top_p", [None, 0.6])
def test_known_rows_are_kept_and_what_follows_is_the_slow_decoders(known_rows, top_p, tiny_spn, random_values):
    model = tiny_spn("baseline", seed=3, image_size=4, scaling_factor=1, num_bits=3)
    known = random_values(1, 3, 5, 3, known_rows, 4)
    uniform = uniforms(2, stage="baseline", images=range(5), image_size=4)
    draws = Draws(uniform, temperature=0.9, top_p=top_p, known=known)
    fast = decode_slice(prepare(model), None, draws)
    assert torch.equal(fast, sample_slice_slowly(model, None, draws))
    assert torch.equal(fast[:, :, :known_rows], known)
    free = decode_slice(prepare(model), None, Draws(uniform, temperature=0.9, top_p=top_p))
    assert torch.equal(fast, free) == (known_rows == 0), "what is known changes what follows"
