"""Networks on storage: those that train nodes left, and a checkpoint that a training starts from."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from data_prep.files import UserError, open_store
from pipelines.dag.node import NodeOutput
from spn.checkpoint import CONFIG, EMA, MODEL, check_start, load_config, load_model, load_weights
from spn.config import SPNConfig
from spn.model import SPN

T = TypeVar("T")
_KEPT = " (gone after the training? --keep with the node's name adopts what it made)"


def checkpoint_step(output: NodeOutput) -> int:
    """Optimiser steps behind the checkpoint that a train node chose."""
    return int(output.named["checkpoint"].rsplit("-", 1)[1])


def load_stages(
    inputs: Mapping[str, NodeOutput], stages: Sequence[str], *, averaged: bool = True, device: str
) -> dict[str, SPN]:
    """{stage: network}, in the order of `stages`, from their train nodes' outputs.

    averaged: on Polyak-averaged weights, else on those that the last step left.
    """
    load = functools.partial(load_model, averaged=averaged, device=device)
    return {
        stage: _read(inputs[f"train_{stage}"].place("checkpoint"), load, EMA if averaged else MODEL) for stage in stages
    }


def load_stage_configs(inputs: Mapping[str, NodeOutput], stages: Sequence[str]) -> dict[str, SPNConfig]:
    """{stage: configuration of its network}, in the order of `stages`, without loading any weights."""
    return {stage: _read(inputs[f"train_{stage}"].place("checkpoint"), load_config) for stage in stages}


def start_weights_of(uri: str, config: SPNConfig) -> dict[str, Tensor]:
    """Averaged weights of the checkpoint folder at a path or URI. Raises UserError for no checkpoint or that of another
    network."""

    def load(folder: Path) -> dict[str, Tensor]:
        check_start(folder, config)
        return load_weights(folder, averaged=True)

    for name in (CONFIG, EMA):
        if not open_store(uri).exists(name):
            raise UserError(f"train.init_from: {uri} has no {name}; it must be the folder of a checkpoint{_KEPT}")
    try:
        return _read(uri, load, EMA)
    except (ValueError, KeyError, TypeError) as error:  # also of a config.json that is something else
        raise UserError(f"train.init_from: {uri}: {error}") from error


def _read(uri: str, load: Callable[[Path], T], *names: str) -> T:
    """What `load` makes of a folder of this machine that has a checkpoint's configuration and these files alone."""
    store = open_store(uri)
    with tempfile.TemporaryDirectory() as folder:
        for name in (CONFIG, *names):
            store.download(name, Path(folder) / name)
        return load(Path(folder))
