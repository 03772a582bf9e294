"""The networks that train nodes left on storage, loaded on this machine."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from data_prep.files import join, open_store
from pipelines.dag.node import NodeOutput
from spn.checkpoint import CONFIG, EMA, load_config, load_model
from spn.config import SPNConfig
from spn.model import SPN


def load_stages(inputs: Mapping[str, NodeOutput], stages: Sequence[str], *, device: str) -> dict[str, SPN]:
    """{stage: network on Polyak-averaged weights}, in the order of `stages`, from their train nodes' outputs."""
    models = {}
    for stage in stages:
        output = inputs[f"train_{stage}"]
        store = open_store(output.uri).sub(output.named["checkpoint"])
        with tempfile.TemporaryDirectory() as folder:
            for name in (CONFIG, EMA):  # all that is needed: no optimiser state travels
                store.download(name, Path(folder) / name)
            models[stage] = load_model(Path(folder), device=device)
    return models


def checkpoint_uri(output: NodeOutput) -> str:
    """Folder of the checkpoint that a train node chose."""
    return join(output.uri, output.named["checkpoint"])


def checkpoint_step(output: NodeOutput) -> int:
    """Optimiser steps behind the checkpoint that a train node chose."""
    return int(output.named["checkpoint"].rsplit("-", 1)[1])


def load_stage_configs(inputs: Mapping[str, NodeOutput], stages: Sequence[str]) -> dict[str, SPNConfig]:
    """{stage: configuration of its network}, in the order of `stages`, without loading any weights."""
    configs = {}
    for stage in stages:
        output = inputs[f"train_{stage}"]
        with tempfile.TemporaryDirectory() as folder:
            open_store(output.uri).sub(output.named["checkpoint"]).download(CONFIG, Path(folder) / CONFIG)
            configs[stage] = load_config(Path(folder))
    return configs
