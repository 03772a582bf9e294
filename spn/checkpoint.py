"""What a stage leaves on disk: config.json, model.safetensors, ema.safetensors, trainer.pt. No pickled code anywhere.

model.safetensors holds the raw weights, ema.safetensors their Polyak average (what evaluation and sampling use),
trainer.pt the optimiser, step and random states for resuming (loaded with weights_only=True).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from spn.config import DecoderConfig, EmbedderConfig, SPNConfig
from spn.model import SPN

CONFIG, MODEL, EMA, TRAINER = "config.json", "model.safetensors", "ema.safetensors", "trainer.pt"


def save_checkpoint(folder: Path, *, model: SPN, ema: SPN, trainer: Mapping[str, Any]) -> None:
    """Write the four files of a checkpoint into an existing folder."""
    (folder / CONFIG).write_text(json.dumps({"model": asdict(model.config)}, indent=2) + "\n")
    for network, file in ((model, MODEL), (ema, EMA)):
        save_file({k: v.contiguous() for k, v in network.state_dict().items()}, folder / file)
    torch.save(dict(trainer), folder / TRAINER)


def load_config(folder: Path) -> SPNConfig:
    """The network's configuration from config.json."""
    fields = json.loads((folder / CONFIG).read_text())["model"]
    embedder = fields.pop("embedder")
    return SPNConfig(
        **{**fields, "decoder": DecoderConfig(**fields["decoder"])},
        embedder=None if embedder is None else EmbedderConfig(**embedder),
    )


def load_weights(folder: Path, *, averaged: bool, device: str = "cpu") -> dict[str, Tensor]:
    """State dict of the network: the Polyak average or the raw weights."""
    return load_file(folder / (EMA if averaged else MODEL), device=device)


def load_model(folder: Path, *, averaged: bool = True, device: str = "cpu") -> SPN:
    """The network ready for evaluation and sampling."""
    with torch.random.fork_rng(devices=[]):  # initial weights are drawn, then overwritten: leave the caller's stream
        model = SPN(load_config(folder)).to(device)
    model.load_state_dict(load_weights(folder, averaged=averaged, device=device))
    return model.eval()


def load_chain(folder: Path | str, *, device: str = "cpu") -> dict[str, SPN]:
    """{stage: network}, in the order of generation, of a folder with one checkpoint folder per stage (`--export`).

    Raises ValueError where a stage between two others is missing.
    """
    models = [load_model(path.parent, device=device) for path in Path(folder).glob(f"*/{CONFIG}")]
    if not models:
        raise FileNotFoundError(f"{folder} has no folder of a stage, with {CONFIG} and {EMA}")
    models.sort(key=lambda model: (model.config.num_given_bits, model.config.stage))  # first_slice, then size_upscale
    depth = models[0].config.num_given_bits
    for config in (model.config for model in models):
        if config.num_given_bits not in (0, depth):
            raise ValueError(f"{folder}: {config.stage} is given {config.num_given_bits} bits, which no stage makes")
        depth = config.num_given_bits + config.num_bits
    return {model.config.stage: model for model in models}


def check_start(folder: Path, config: SPNConfig) -> None:
    """Raises ValueError if the checkpoint's network is none of `config`. It needs the checkpoint's config alone.

    The stage's name may differ (a chain's depth_upscale and another chain's depth_upscale_8), and so may the dropout.
    """
    ours, theirs = _shape(config), _shape(load_config(folder))
    for name in sorted({*ours, *theirs}):
        if ours.get(name) != theirs.get(name):
            raise ValueError(f"{name} is {ours.get(name)} here, {theirs.get(name)} in the checkpoint")


def _shape(config: SPNConfig) -> dict[str, Any]:
    """What decides which weights the network has and what they mean, by its key in a configuration."""
    fields = asdict(config)
    parts = {part: fields.pop(part) or {} for part in ("decoder", "embedder")}
    fields |= {f"{part}.{name}": value for part, inner in parts.items() for name, value in inner.items()}
    return {name: value for name, value in fields.items() if name != "stage" and not name.endswith(".dropout")}


def load_trainer(folder: Path) -> dict[str, Any]:
    """Optimiser, step and random states, on the CPU."""
    return torch.load(folder / TRAINER, map_location="cpu", weights_only=True)
