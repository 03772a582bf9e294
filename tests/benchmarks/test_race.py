"""The race on a CPU with tiny networks: what it trains on, what it scores.

python -m pytest tests/benchmarks/test_race.py
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from benchmarks import race
from spn.model import SPN

TINY = dict(conv_channels=6, residual_channels=12, num_attn_layers=1, num_attn_heads=1, attn_head_dim=8, dropout=0.0)


def tiny(name: str, size: int) -> race.Variant:
    """A variant's chain with small networks."""
    variant = race.variants(size)[name]
    networks = []
    for network in variant.networks:
        parts = {"decoder": dataclasses.replace(network.decoder, **TINY, num_layers=2, num_memory_rows=4)}
        if network.embedder:
            parts["embedder"] = dataclasses.replace(network.embedder, **TINY, num_conv_layers=1, num_memory_rows=4)
        networks.append(dataclasses.replace(network, **parts))
    settings = {**variant.settings, "batch_size": 2, "learning_rate": 1e-2, "warmup_steps": 1}
    return race.Variant(tuple(networks), settings, variant.shares)


@pytest.mark.parametrize(
    ("name", "bits"),
    [("modern", 8), ("spn_paper", 3), ("paper_spn4", 8), ("modern_spn2_depth", 8), ("paper_multidim", 8)],
)
def test_networks_without_preference_score_their_bits(name, bits):
    """All slices of all images count once: with equal logits everywhere, bits/dim are the bits."""
    models = {network.stage: SPN(network) for network in tiny(name, 8).networks}
    for model in models.values():
        torch.nn.init.zeros_(model.decoder.head.weight)
    images = np.random.default_rng(0).integers(256, size=(3, 8, 8, 3)).astype(np.uint8)
    scores = race.score(models, images)
    assert scores["total"] == pytest.approx([bits] * 3, abs=1e-6)
    assert list(scores) == [*models, "total"]


@pytest.mark.parametrize("name", ["spn_modern", "paper_multidim"])
def test_a_short_race_learns_and_counts(name, monkeypatch):
    """Images of one colour: up to ten steps of each network, whatever the machine's speed, beat equal odds."""
    monkeypatch.setattr(race, "_step_seconds", lambda *_: 50.0)
    train = np.full((10, 16, 16, 3), 165, np.uint8)
    variant = tiny(name, 16)
    result, scores = race.race(train, train[:2], variant, seconds=500.0, device="cpu")
    assert [stage["steps"] for stage in result["stages"].values()] == [int(10 * share) for share in variant.shares]
    assert all(stage["slices"] == 2 * stage["steps"] for stage in result["stages"].values())
    assert result["test_bits_per_dim_raw"] < sum(network.num_bits for network in variant.networks)
    parts = sum(stage["test_bits_per_dim_averaged"] for stage in result["stages"].values())
    assert parts == pytest.approx(result["test_bits_per_dim_averaged"], abs=1e-5) and math.isfinite(parts)
    assert scores["total"].shape == (2,)


@pytest.mark.parametrize("took", [0.5, 2.0])
def test_the_schedule_ends_with_the_seconds(took, monkeypatch):
    """Steps take half or twice the time first measured: all seconds are used, the rate falls to zero in them, and the
    decay is that of so many steps."""
    now, rates, decays, train_step = [0.0], [], [], race.train_step

    def step(state, *rest, **options):
        now[0] += took
        nats = train_step(state, *rest, **options)
        rates.append(state.optimizers[0].param_groups[0]["lr"])
        decays.append(state.optimizers[0].param_groups[0]["weight_decay"])
        return nats

    monkeypatch.setattr(race.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(race, "train_step", step)
    monkeypatch.setattr(race, "_step_seconds", lambda *_: 1.0)
    monkeypatch.setattr(race, "PLAN_EVERY", 5)
    variant = tiny("modern", 8)
    race.race(*[np.zeros((4, 8, 8, 3), np.uint8)] * 2, variant, seconds=40.0, device="cpu")
    assert len(rates) == 40 / took and rates[-1] < 0.1 * rates[2] < rates[2]
    assert decays[-1] * variant.settings["learning_rate"] * len(decays) == pytest.approx(race.TOTAL_DECAY)


def test_held_out_images_are_not_trained_on():
    train, rest = race.held_out(np.arange(50))
    assert len(rest) == 5 and np.array_equal(np.concatenate([train, rest]), np.arange(50))


def test_the_systems_that_are_compared_are_of_one_size():
    """Total parameters of each chain, within 10% of each other; and the two SPNs at 3 bits."""
    with torch.device("meta"):
        total = {
            name: sum(p.numel() for network in variant.networks for p in SPN(network).parameters())
            for name, variant in race.variants(32).items()
        }
    assert total["spn_modern"] / total["spn_paper"] < 1.05
    compared = [count for name, count in total.items() if name not in ("paper", "spn_paper", "spn_modern")]
    assert len(compared) == 10 and max(compared) / min(compared) < 1.1
