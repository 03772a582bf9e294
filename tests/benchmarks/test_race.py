"""The race on a CPU with tiny networks: what it trains on, what it scores.

python -m pytest tests/benchmarks/test_race.py
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from benchmarks import race
from spn.model import SPN

TINY = dict(conv_channels=6, residual_channels=12, num_attn_layers=1, num_attn_heads=1, attn_head_dim=8, dropout=0.0)
DECODER = {**TINY, "num_layers": 2, "num_memory_rows": 4}
EMBEDDER = {**TINY, "num_conv_layers": 1, "num_memory_rows": 4}


@pytest.mark.parametrize("variant", ["modern", "spn_paper"])
def test_a_network_without_preference_scores_its_bits(variant):
    """All slices of all images count: with equal logits everywhere, bits/dim are the bits."""
    network = race.VARIANTS[variant].network
    model = SPN(race.changed(network, {"decoder": DECODER, **({"embedder": EMBEDDER} if network.embedder else {})}))
    torch.nn.init.zeros_(model.decoder.head.weight)
    images = np.random.default_rng(0).integers(network.num_values, size=(3, network.image_size, network.image_size, 3))
    assert race._score(model, images.astype(np.uint8)) == pytest.approx(network.num_bits, abs=1e-6)


@pytest.mark.parametrize("variant", ["spn_paper", "spn_modern"])
def test_a_short_race_learns_and_counts(variant, monkeypatch):
    """Images of one colour: twenty steps, whatever the machine's speed, beat equal probabilities."""
    monkeypatch.setattr(race, "_step_seconds", lambda *_: 50.0)
    train = np.full((10, 64, 64, 3), 5, np.uint8)
    changes = {
        "decoder": DECODER,
        "embedder": EMBEDDER,
        "train": {"batch_size": 2, "learning_rate": 1e-2, "warmup_steps": 1},
    }
    result = race.race(train, train[:2], variant=variant, seconds=1000.0, changes=changes, device="cpu")
    assert result["test_bits_per_dim"] < 3 and math.isfinite(result["train_bits_per_dim_last_100_steps"])
    assert result["steps"] == 20 and result["images"] == 40 == 10 * result["epochs"]


def test_images_of_more_bits_are_refused():
    with pytest.raises(ValueError, match="3 bits"):
        race.race(np.full((2, 64, 64, 3), 8, np.uint8), None, variant="spn_paper", seconds=1, device="cpu")


def test_held_out_images_are_not_trained_on():
    train, rest = race.held_out(np.arange(50))
    assert len(rest) == 5 and np.array_equal(np.concatenate([train, rest]), np.arange(50))


def test_the_two_sides_are_of_one_size():
    with torch.device("meta"):
        counts = [
            sum(p.numel() for p in SPN(race.VARIANTS[v].network).parameters()) for v in ("spn_paper", "spn_modern")
        ]
    assert max(counts) / min(counts) < 1.05
