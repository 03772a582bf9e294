"""The compression benchmark on a CPU with untrained tiny networks: every byte and every image counts.

python -m pytest tests/benchmarks/test_compress.py
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.compress import measure, sizes_of_formats
from spn.evaluation import bits_per_dim, chain_nats
from spn.model import SPN
from tests.benchmarks.test_race import tiny


def test_a_file_is_as_long_as_the_likelihood_and_its_header_say():
    models = {network.stage: SPN(network).eval() for network in tiny("modern_spn2_depth", 4).networks}
    images = np.random.default_rng(0).integers(256, size=(5, 4, 4, 3), dtype=np.uint8)
    result = measure(models, images, batch=2, precision="float32")
    nats = sum(chain_nats(models, torch.from_numpy(images).permute(0, 3, 1, 2).long()).values())
    likelihood = bits_per_dim(float(nats.sum()), num_images=5, image_size=4)
    assert result["bits_per_dim_likelihood"] == pytest.approx(likelihood)
    streams = result["bits_per_dim_on_disk"] - result["bits_per_dim_header"]
    assert 0.998 * likelihood < streams < 1.002 * likelihood + 12 * 8 / 48
    assert (result["batch"], result["num_images"], result["device"]) == (2, 5, "cpu")
    assert min(result[f"images_per_sec_{what}"] for what in ("encode", "decode")) > 0


def test_each_image_is_a_file_of_its_own_in_other_formats():
    noise = np.random.default_rng(0).integers(256, size=(2, 32, 32, 3), dtype=np.uint8)
    noisy, flat = sizes_of_formats(noise), sizes_of_formats(np.zeros_like(noise))
    assert {"png", "webp"} <= flat.keys() == noisy.keys()
    assert all(8 < noisy[name] < 9 and flat[name] < 0.3 for name in flat)
    assert sizes_of_formats(np.concatenate([noise, noise])) == pytest.approx(noisy)
