"""Settings on the command line that change nothing about what a command does: told, so that nobody waits for an effect.

They are no mistakes: a script may well give several commands the same settings. What would mislead is refused elsewhere
(experiment.py's rules, own_images.py). A setting of the training is part of what its node's fingerprint covers, whether
the training has a use for it or not: that is told, too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from pipelines import cluster
from pipelines.config import (
    ExperimentConfig,
    NodeResources,
    node_names,
    node_resources,
    settable_resources,
    stage_kind,
    stage_names,
    stage_train_config,
    train_node,
)
from spn.config import TrainConfig

ANEW = "; another value of it makes another training all the same"

# Sections that a command has no use for: neither its own nodes nor those that made their inputs read them.
UNREAD = {
    "prepare_data.py": (
        *("scaling_factor", "bits", "stages", "seed", "model", "train", "per_stage", "evaluate", "sample"),
        *("tracking.sample_every_steps", "tracking.num_sample_images"),
    ),
    "train_stage.py": ("evaluate", "sample"),
    "evaluate.py": ("sample", "tracking.sample_every_steps", "tracking.num_sample_images"),
    "sample.py": ("evaluate", "tracking.sample_every_steps", "tracking.num_sample_images"),
    "describe.py": ("seed", "images", "image_bits", "evaluate", "sample", "tracking"),
}
NODES = {"prepare_data.py": "prepare_data", "evaluate.py": "evaluate", "sample.py": "sample"}
OF_TRAINING: dict[str, tuple[Callable[[TrainConfig], bool], str]] = {
    "weight_decay": (lambda train: train.optimizer != "rmsprop", "train.optimizer=adamw and muon"),
    "adamw_learning_rate": (lambda train: train.optimizer == "muon", "train.optimizer=muon"),
    "cooldown": (lambda train: train.schedule == "linear", "train.schedule=linear"),
    "compile_mode": (lambda train: train.compile, "train.compile=true"),
}


def without_effect(
    config: ExperimentConfig, overrides: Sequence[str], *, command: str, stage: str | None = None
) -> list[str]:
    """A line for each reason. command: the script's name; stage: the one that train_stage.py trains."""
    keys = dict.fromkeys(override.partition("=")[0] for override in overrides)
    node = train_node(stage) if stage is not None else NODES.get(command)
    found: dict[str, list[str]] = {}
    for key in keys:
        found.setdefault(_not_read(key, config, command, node) or _no_use(key, config), []).append(key)
    return [
        f"{', '.join(keys)} {'has' if len(keys) == 1 else 'have'} no effect: {why}"
        for why, keys in found.items()
        if why
    ]


def _not_read(key: str, config: ExperimentConfig, command: str, node: str | None) -> str:
    """Why the command does not read it, "" if it does. node: the only one that it runs."""
    parts = key.split(".")
    if command == "train_stage.py" and key == "sample.seed" and config.tracking.sample_every_steps is not None:
        return ""
    if any(key == section or key.startswith(f"{section}.") for section in UNREAD.get(command, ())):
        return f"not read by {command}"
    if command == "sample.py" and key == "sample.num_images" and config.images is not None:
        return "with images it is sample.num_draws, of each"
    if node is None:
        return ""
    if parts[0] == "per_stage" and len(parts) > 1 and command == "train_stage.py":
        stage = node.removeprefix(train_node(""))
        return "" if parts[1] in (stage, stage_kind(stage)) else f"{node} is not of that stage"
    if parts[:2] == ["resources", "per_node"] and len(parts) > 2:
        return "" if parts[2] == node else f"only {node} runs"
    if parts[0] == "resources" and parts[-1] in (field.name for field in dataclasses.fields(NodeResources)):
        if parts[-1] not in settable_resources(node):
            return f"{node} has no use for it"
        if parts[-1] == "cpus_per_worker" and "num_workers" not in settable_resources(node):
            return f"{node} has no workers; resources.per_node.{node}.cpus_per_worker sets its CPUs"
    return ""


def _no_use(key: str, config: ExperimentConfig) -> str:
    """What else would have to be set, "" for nothing."""
    parts = key.split(".")
    stages = stage_names(config)
    if parts[0] == "per_stage" and len(parts) > 2:
        stages, parts = [stage for stage in stages if parts[1] in (stage, stage_kind(stage))], parts[2:]
    if parts[0] == "train" and parts[-1] in OF_TRAINING:
        uses, what = OF_TRAINING[parts[-1]]
        return "" if any(uses(stage_train_config(config, stage)) for stage in stages) else f"it is for {what}{ANEW}"
    if parts[:2] == ["model", "embedder"]:
        kinds = {stage_kind(stage) for stage in stages}
        return "" if kinds & {"size_upscale", "depth_upscale"} else f"{' and '.join(stages)} has no slice embedder"
    if parts == ["train", "slices"]:
        return "" if "first_slice" in stages else f"it is for the stage first_slice{ANEW}"
    if key == "tracking.num_sample_images" and config.tracking.sample_every_steps is None:
        return "it is for tracking.sample_every_steps"
    if key in ("resources.num_cpus", "resources.num_gpus") and cluster.joins():
        return "the cluster that is joined has its own"
    if parts[0] == "resources" and parts[-1] == "gpus_per_worker":
        named = [parts[2]] if parts[1] == "per_node" else node_names(config)
        nodes = [node for node in named if parts[-1] in settable_resources(node)]
        return "" if any(node_resources(config, node).use_gpu for node in nodes) else "it is for use_gpu=true"
    return ""
