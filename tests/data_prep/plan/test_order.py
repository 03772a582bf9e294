"""Random order and draws depend on their names and numbers alone.  pytest tests/data_prep/plan/test_order.py"""

from __future__ import annotations

import numpy as np

from data_prep.parquet import draws, permutation
from data_prep.plan import rank_by_hash


def test_values_are_fixed_for_ever():
    """Literal values: another version of NumPy or Python must not change the row order of a running training."""
    assert permutation(8, 1, 2).tolist() == [5, 6, 3, 2, 1, 0, 4, 7]
    assert draws(3, ["a", "b", "c"], [0, 0, 7], purpose="flip", high=1000).tolist() == [254, 797, 502]


def test_permutation_has_every_number_and_depends_on_all_of_the_entropy():
    seen = [tuple(permutation(100, *entropy)) for entropy in [(0,), (1,), (1, 1), (1, 2), (1, 1, 1)]]
    assert all(sorted(order) == list(range(100)) for order in seen) and len(set(seen)) == len(seen)


def test_draw_does_not_depend_on_the_place_in_the_batch():
    keys, epochs = [f"photo_{i}.png" for i in range(50)], [i % 3 for i in range(50)]
    together = draws(5, keys, epochs, purpose="target_slice", high=16)
    backwards = draws(5, keys[::-1], np.array(epochs[::-1], np.int32), purpose="target_slice", high=16)
    assert together.dtype == np.int64 and np.array_equal(together, backwards[::-1])


def test_draws_are_uniform_and_independent_by_purpose_and_epoch():
    keys = [f"{i}" for i in range(16_000)]
    first = draws(0, keys, [0] * len(keys), purpose="target_slice", high=16)
    counts = np.bincount(first, minlength=16)
    assert counts.size == 16 and ((counts - 1000) ** 2 / 1000).sum() < 45  # chi-squared, 15 degrees: 1 in 10,000
    for seed, epoch, purpose in [(1, 0, "target_slice"), (0, 1, "target_slice"), (0, 0, "flip")]:
        other = draws(seed, keys, [epoch] * len(keys), purpose=purpose, high=16)
        assert abs((first == other).mean() - 1 / 16) < 0.01


def test_rank_is_stable_when_a_name_goes():
    names = [f"{i}.png" for i in range(20)]
    ranked = rank_by_hash(names, 0, "split")
    assert sorted(ranked) == sorted(names) and ranked != names
    assert rank_by_hash(names[1:], 0, "split") == [name for name in ranked if name != names[0]]
