"""Deliberate mistakes, one for each mask of the networks: what the proofs of causality and likelihood must notice.

Each breaks a finished network in place. The names are the mistakes; a test says which of them its case can show.
Below them, what the tests of training and checkpoints share: networks as initialised, and batches that follow from a
seed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from spn.config import TrainConfig
from spn.layers import channel_groups, rgb_mask
from spn.model import SPN
from spn.training import Batch, TrainState


def mask_b_on_first_layer(model: SPN) -> None:
    """The first layer reads the current pixel's own channel."""
    layer = model.decoder.layers[0]
    half = channel_groups(layer.up.in_features)
    layer.current.mask = rgb_mask(torch.cat([half, half]), model.decoder.intensity.groups(), strict=False)


def gate_halves_not_grouped(model: SPN) -> None:
    """RGB groups run over both halves of the gate: tanh[k] and sigmoid[k] belong to two groups."""
    for layer in model.decoder.layers:
        half = channel_groups(layer.up.in_features)
        local = model.decoder.intensity.groups() if layer.is_first else half
        layer.current.mask = rgb_mask(channel_groups(2 * len(half)), local, strict=layer.is_first)


def down_not_masked(model: SPN) -> None:
    for layer in model.decoder.layers[1:]:
        layer.down.mask = torch.ones_like(layer.down.mask)


def up_not_masked(model: SPN) -> None:
    for layer in model.decoder.layers:
        layer.up.mask = torch.ones_like(layer.up.mask)


def head_not_masked(model: SPN) -> None:
    model.decoder.head.mask = torch.ones_like(model.decoder.head.mask)


def left_reads_current_pixel(model: SPN) -> None:
    """The horizontal stack is not shifted: its unmasked part reads the pixel itself."""
    for layer in model.decoder.layers:
        layer.left.register_forward_pre_hook(lambda _, args: (F.pad(args[0], (0, 0, -1, 1)),))


def vertical_reads_own_row(model: SPN) -> None:
    """The vertical stack is one row too low: it reads rows h - 1 and h, the pixel to the right too."""
    for layer in model.decoder.layers:
        layer.vertical.register_forward_pre_hook(lambda _, args: (F.pad(args[0], (0, 0, -1, 1)),))


def attention_not_shifted(model: SPN) -> None:
    """Position t of the decoder's attention is given pixel t itself."""
    seen: list[Tensor] = []

    def keep(module: object, args: object, output: Tensor) -> None:
        seen[:] = [output.flatten(1, 2)]

    model.decoder.intensity.register_forward_hook(keep)
    model.decoder.attention.project.register_forward_pre_hook(lambda _, args: (seen[0],))


def attention_not_causal(model: SPN) -> None:
    for layer in model.decoder.attention.layers:
        getattr(layer, "attn", layer).causal = False  # a layer of recipe modern is its own attention


def stem_reads_current_pixel(model: SPN) -> None:
    """Recipe modern: the middle of the window's last row is the pixel itself."""
    model.decoder.stem.mask[-1, model.decoder.stem.mask.shape[1] // 2] = 1


def norms_not_grouped(model: SPN) -> None:
    """Recipe modern: the stream is normed over all of its channels, so that groups see each other."""
    for norm in [layer.norm for layer in model.decoder.layers[1:]] + [model.decoder.norm]:
        norm.sizes = [norm.gain.numel(), 0, 0]


def embedder_reads_later_slice(model: SPN) -> None:
    """A slot that should hold padding for the first slice holds the last one."""
    model.embedder.sources[0, 0] = model.embedder.sources.shape[0] - 1


def embedder_reads_target(model: SPN) -> None:
    """A slot that should hold padding for the last slice but one holds the target itself."""
    index = model.embedder.sources.shape[0] - 2
    slot = int((model.embedder.sources[index] == model.embedder.sources.shape[0]).nonzero()[0])
    model.embedder.sources[index, slot] = index


@pytest.fixture(scope="session")
def break_mask() -> Callable[[str, SPN], SPN]:
    """break_mask(name, model) -> the same model with that mistake."""

    def apply(name: str, model: SPN) -> SPN:
        globals()[name](model)
        return model

    return apply


class StageCase(NamedTuple):
    """A stage at a tiny size, for tests of sampling."""

    stage: str
    scaling_factor: int
    slice_size: int
    num_given_bits: int
    num_bits: int


STAGE_CASES = {
    "baseline": StageCase("baseline", 1, 4, 0, 3),
    "first_slice_2": StageCase("first_slice", 2, 3, 0, 2),
    "first_slice_4": StageCase("first_slice", 4, 3, 0, 1),
    "size_upscale_2": StageCase("size_upscale", 2, 4, 0, 3),
    "size_upscale_4": StageCase("size_upscale", 4, 2, 0, 1),
    "depth_upscale_1": StageCase("depth_upscale", 1, 4, 2, 1),
    "depth_upscale_2": StageCase("depth_upscale", 2, 3, 3, 5),
    "depth_upscale_4": StageCase("depth_upscale", 4, 2, 1, 2),
}


@pytest.fixture(params=STAGE_CASES)
def case(request: pytest.FixtureRequest) -> str:
    """The name of every stage case in turn."""
    return request.param


@pytest.fixture(params=[name for name, case in STAGE_CASES.items() if case.scaling_factor < 4])
def small_case(request: pytest.FixtureRequest) -> str:
    """The same without the cases of 16 slices."""
    return request.param


@pytest.fixture(scope="session")
def stage_network(tiny_spn: Callable[..., SPN]) -> Callable[..., SPN]:
    """stage_network(name of a case, seed=..., decoder={...}) -> its re-randomised network in float64."""

    def build(name: str, *, seed: int, **changes: Any) -> SPN:
        case = STAGE_CASES[name]
        return tiny_spn(
            case.stage,
            seed=seed,
            image_size=case.slice_size * case.scaling_factor,
            scaling_factor=case.scaling_factor,
            num_bits=case.num_bits,
            num_given_bits=case.num_given_bits,
            **changes,
        )

    return build


@pytest.fixture(scope="session")
def tiny_chain(tiny_spn: Callable[..., SPN]) -> Callable[..., dict[str, SPN]]:
    """tiny_chain(3, 8, first="baseline", ...) -> {stage: re-randomised network} of these depths, at 4 x 4, S = 2.

    first: "first_slice", None, or "baseline" in place of all slices.
    """

    def build(*bits: int, first: str | None = "first_slice", image_size: int = 4, **changes: Any) -> dict[str, SPN]:
        stages = [
            (name, 0, bits[0])
            for name in (first, "size_upscale")
            if name and (name, first) != ("size_upscale", "baseline")
        ]
        for given, total in itertools.pairwise(bits):
            stages.append(("depth_upscale" if len(bits) == 2 else f"depth_upscale_{total}", given, total))
        return {
            name: tiny_spn(
                name,
                seed=seed,
                image_size=image_size,
                scaling_factor=1 if name == "baseline" else 2,
                num_bits=total - given,
                num_given_bits=given,
                **changes,
            )
            for seed, (name, given, total) in enumerate(stages, 1)
        }

    return build


@pytest.fixture(scope="session")
def network(tiny_config) -> Callable[..., SPN]:
    """network(stage, S, seed=..., dropout=...) -> a network as initialised, float32, at 4 x 4, 2 bits."""

    def build(stage: str, scaling_factor: int, *, seed: int = 0, dropout: float = 0.0) -> SPN:
        config = tiny_config(
            stage,
            image_size=4,
            scaling_factor=scaling_factor,
            num_bits=2,
            decoder=dict(dropout=dropout),
            embedder=dict(dropout=dropout),
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return SPN(config)

    return build


@pytest.fixture(scope="session")
def settings() -> Callable[..., TrainConfig]:
    """settings(**changes) -> a run of a few steps that learns something in them."""

    def build(**changes: Any) -> TrainConfig:
        base = dict(num_steps=6, batch_size=4, learning_rate=1e-2, polyak_decay=0.9, log_every_steps=2)
        return TrainConfig(**({**base, "eval_every_steps": 3, "checkpoint_every_steps": 3} | changes))

    return build


@pytest.fixture(scope="session")
def make_batch() -> Callable[[SPN, int, int], Batch]:
    """make_batch(model, seed, size) -> a micro-batch that follows from the seed alone."""

    def build(model: SPN, seed: int, size: int) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        config = model.config
        shape = (size, 3, config.image_size, config.image_size)
        image = torch.randint(config.num_values, shape, generator=generator)
        given = torch.randint(2**config.num_given_bits, shape, generator=generator) if config.num_given_bits else None
        last = 1 if config.stage == "first_slice" else config.num_slices
        index = torch.randint(last, (size,), generator=generator)
        return Batch(image, index, given, [f"photo-{seed}-{n}" for n in range(size)])

    return build


@pytest.fixture(scope="session")
def batches_from(make_batch: Callable[[SPN, int, int], Batch]) -> Callable[[SPN, int], Iterator[list[Batch]]]:
    """batches_from(model, step) -> the micro-batches of each step, two of two images, from `step` on."""

    def build(model: SPN, step: int) -> Iterator[list[Batch]]:
        while True:
            yield [make_batch(model, 2 * step, 2), make_batch(model, 2 * step + 1, 2)]
            step += 1

    return build


@pytest.fixture(scope="session")
def snapshot() -> Callable[[TrainState], dict[str, Tensor]]:
    """snapshot(state) -> every tensor of a run, copied: weights, average, optimiser."""

    def take(state: TrainState) -> dict[str, Tensor]:
        tensors = {f"weight/{name}": p for name, p in state.model.state_dict().items()}
        tensors |= {f"ema/{name}": p for name, p in state.ema.state_dict().items()}
        for each in state.optimizers:
            for number, entry in each.state_dict()["state"].items():
                tensors |= {f"{type(each).__name__}/{number}/{name}": value for name, value in entry.items()}
        return {name: t.detach().clone() for name, t in tensors.items()}

    return take


@pytest.fixture(scope="session")
def assert_bitwise() -> Callable[[dict[str, Tensor], dict[str, Tensor]], None]:
    """assert_bitwise(a, b): the same names with the same tensors, bit for bit."""

    def check(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
        assert a.keys() == b.keys()
        assert [name for name in a if not torch.equal(a[name], b[name])] == []

    return check
