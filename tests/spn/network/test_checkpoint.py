"""Checkpoints: four files, no pickled code, everything back bit for bit.

python -m pytest tests/spn/network/test_checkpoint.py
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from spn.checkpoint import load_chain, load_model, load_trainer, load_weights, save_checkpoint
from spn.model import SPN
from spn.training import TrainState, train_step
from tests.spn.whole_images import logits_of


@pytest.fixture
def trained(network, settings, batches_from) -> Callable[..., TrainState]:
    """trained(stage, S, optimizer=...) -> the state after three steps: weights and their average differ."""

    def build(stage: str, scaling_factor: int, *, optimizer: str = "rmsprop") -> TrainState:
        model, config = network(stage, scaling_factor, dropout=0.1).train(), settings(optimizer=optimizer)
        state, batches = TrainState.create(model, config), batches_from(model, 0)
        for _ in range(3):
            train_step(state, next(batches), config=config, forward=model)
        return state

    return build


def save(folder: Path, state: TrainState) -> Path:
    save_checkpoint(folder, model=state.model, ema=state.ema, trainer=state.trainer_dict())
    return folder


def parameters(model: SPN) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()}


def test_round_trip_bit_for_bit(trained, network, settings, snapshot, assert_bitwise, tmp_path):
    """Weights, average, optimiser and step come back into a network that began elsewhere, also from a checkpoint of
    before there were several optimisers. Random states and all that follows: test_training_loop.py."""
    state = trained("depth_upscale", 2, optimizer="adamw")
    save(tmp_path, state)
    weights, average = (load_weights(tmp_path, averaged=averaged) for averaged in (False, True))
    assert_bitwise(weights, state.model.state_dict())
    assert_bitwise(average, state.ema.state_dict())
    trainer = load_trainer(tmp_path)
    for saved in (trainer, trainer | {"optimizer": trainer["optimizer"]["0"]}):
        other = TrainState.create(network("depth_upscale", 2, seed=8), settings(optimizer="adamw"))
        other.load(weights=weights, ema=average, trainer=saved)
        assert other.step == 3
        assert_bitwise(snapshot(other), snapshot(state))


def test_four_files_of_documented_names(trained, tmp_path):
    state = trained("size_upscale", 2)
    save(tmp_path, state)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "config.json",
        "ema.safetensors",
        "model.safetensors",
        "trainer.pt",
    ]
    # The weights can be read without this project.
    assert load_file(tmp_path / "ema.safetensors").keys() == state.ema.state_dict().keys()
    assert json.loads((tmp_path / "config.json").read_text()) == {"model": asdict(state.model.config)}


class Intruder:
    """What a hostile file would hold: code that runs when it is unpickled."""

    ran = False

    def __reduce__(self) -> tuple:
        return setattr, (Intruder, "ran", True)


def test_pickled_code_in_trainer_is_refused(trained, tmp_path):
    save(tmp_path, trained("baseline", 1))
    torch.save({"step": 1, "optimizer": Intruder()}, tmp_path / "trainer.pt")
    with pytest.raises(pickle.UnpicklingError):
        load_trainer(tmp_path)
    assert not Intruder.ran


def test_load_model_is_ready_for_evaluation(trained, make_batch, assert_bitwise, tmp_path):
    """The average, in evaluation mode; same logits as the network that was saved. Random states stay as they were."""
    state = trained("depth_upscale", 2)
    save(tmp_path, state)
    random_state = torch.get_rng_state()
    model = load_model(tmp_path)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert model.config == state.model.config
    assert not any(m.training for m in model.modules())
    assert_bitwise(parameters(model), parameters(state.ema))
    batch = make_batch(state.model, 0, 3)
    with torch.no_grad():
        expected = logits_of(state.ema, batch.image, batch.index, batch.given)
        assert torch.equal(logits_of(model, batch.image, batch.index, batch.given), expected)


def test_loading_needs_every_weight(trained, tmp_path):
    """A file that lacks a weight is an error, not a network with some initial values left in it."""
    state = trained("baseline", 1)
    save(tmp_path, state)
    weights = {name: w for name, w in load_weights(tmp_path, averaged=True).items() if name != "decoder.head.bias"}
    save_file(weights, tmp_path / "ema.safetensors")
    with pytest.raises(RuntimeError, match="decoder.head.bias"):
        load_model(tmp_path)


def test_a_chain_loads_in_its_order_of_generation(tiny_chain, tmp_path):
    """Whatever the folders' names, from configurations and averaged weights alone; not without one in between."""
    models = tiny_chain(1, 3, 8)
    order = ("first_slice", "size_upscale", "depth_upscale_3", "depth_upscale_8")
    for name, stage in zip("abcd", reversed(order), strict=True):
        model = models[stage]
        (tmp_path / name).mkdir()
        save_checkpoint(tmp_path / name, model=model, ema=model, trainer={})
        for file in ("model.safetensors", "trainer.pt"):
            (tmp_path / name / file).unlink()
    chain = load_chain(str(tmp_path))
    assert tuple(chain) == order and all(model.config.stage == stage for stage, model in chain.items())
    (tmp_path / "b" / "config.json").unlink()
    with pytest.raises(ValueError, match="depth_upscale_8 is given 3 bits, which no stage makes"):
        load_chain(tmp_path)
    with pytest.raises(FileNotFoundError, match="has no folder of a stage"):
        load_chain(tmp_path / "a")
