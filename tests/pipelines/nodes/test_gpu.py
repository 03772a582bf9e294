"""On a GPU with little memory: how much fits is found by trying, and then it does fit.

python -m pytest -m gpu tests/pipelines/nodes/test_gpu.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from data_prep.files import UserError
from pipelines.config import NodeResources, SampleNodeConfig
from pipelines.dag.node import NodeOutput
from pipelines.dag.progress import Reporter
from pipelines.nodes.sample import Chunk, DrawingWorker, Job, chunks_of
from pipelines.nodes.train import find_micro_batch, make_forward
from spn.checkpoint import save_checkpoint
from spn.config import TrainConfig
from spn.model import SPN
from spn.training import Batch, TrainState, train_step

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
SHARE = 4096


@pytest.fixture
def limit() -> Iterator[Callable[[float], None]]:
    """limit(gib): this process may use so much of the GPU."""
    total = torch.cuda.get_device_properties(0).total_memory / 2**30
    yield lambda gib: torch.cuda.set_per_process_memory_fraction(gib / total)
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


@pytest.mark.parametrize("compiled", [False, True])
def test_a_training_runs_with_the_micro_batch_that_it_found(
    compiled: bool, limit: Callable[[float], None], tiny_config: Callable[..., Any]
) -> None:
    decoder = dict(num_layers=8, conv_channels=96, residual_channels=480)
    model = SPN(tiny_config("size_upscale", image_size=32, scaling_factor=2, num_bits=8, decoder=decoder)).cuda()
    config = TrainConfig(batch_size=SHARE, precision="bfloat16", compile=compiled)
    limit(2)
    state, forward = TrainState.create(model, config), make_forward(model, config)
    random_state, tried = torch.cuda.get_rng_state(), []

    def counted(slices: torch.Tensor, *inputs: torch.Tensor | None) -> torch.Tensor:
        tried.append(len(slices))
        return forward(slices, *inputs)

    size = find_micro_batch(model, counted, config, share=SHARE, trying=True)
    assert not compiled or len(tried) <= 2, "each is compiled for itself"
    assert 1 < size < SHARE and SHARE % size == 0
    assert torch.equal(torch.cuda.get_rng_state(), random_state)
    for step in range(2):
        image = torch.randint(256, (SHARE, 3, 32, 32), device="cuda")
        index = torch.randint(4, (SHARE,), device="cuda")
        parts = zip(image.split(size), index.split(size), strict=True)
        train_step(state, [Batch(x, i, None, ["a"], step) for x, i in parts], config=config, forward=forward)
    state.check()


def test_a_gpu_that_holds_not_even_one_slice_is_refused(
    limit: Callable[[float], None], tiny_config: Callable[..., Any]
) -> None:
    model = SPN(tiny_config("size_upscale", image_size=32, scaling_factor=2, num_bits=8)).cuda()
    config = TrainConfig(batch_size=SHARE)
    limit(0.05)
    with pytest.raises(UserError, match="^size_upscale cannot train on this GPU"):
        find_micro_batch(model, make_forward(model, config), config, share=SHARE, trying=True)


def test_a_worker_draws_as_many_images_at_once_as_it_found(
    limit: Callable[[float], None], tiny_spn: Callable[..., SPN], tmp_path: Path
) -> None:
    decoder = dict(num_attn_layers=2, num_attn_heads=8, attn_head_dim=64)
    model = tiny_spn("first_slice", seed=0, image_size=64, scaling_factor=2, num_bits=3, decoder=decoder).float()
    (tmp_path / "checkpoint").mkdir()
    save_checkpoint(tmp_path / "checkpoint", model=model, ema=model, trainer={})
    config = SampleNodeConfig(
        stages=("first_slice",),
        num_images=1024,
        batch_size=None,
        seed=0,
        temperature={"first_slice": 1.0},
        top_p={"first_slice": None},
        precision="bfloat16",
        decoder="auto",
        resources=NodeResources(use_gpu=True),
    )
    inputs = {"train_first_slice": NodeOutput(str(tmp_path), {"checkpoint": "checkpoint"}, "a")}
    limit(2)
    worker = DrawingWorker(Job(config, inputs, str(tmp_path / "samples")), Reporter("sample"), 1)
    size = worker.largest_batch(1024)
    assert 1 < size < 1024
    images = Chunk(tuple(f"{number}" for number in range(size)), tuple(range(size)))
    worker.draw(chunks_of(images, size=size)[0])
    assert len(list((tmp_path / "samples/images").glob("*.png"))) == size
