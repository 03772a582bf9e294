"""Each stage's networks as versions of one registered model, and which of them is the best: the rule of the aliases.

A model is named <experiment>.<stage>, a version is one finished training. Weights are not copied: a version points to
the checkpoint's folder of safetensors files. The aliases, set whenever the `evaluate` node has scored a stage:

    candidate   the version that was scored last
    champion    moves to the candidate only if it has strictly fewer bits/dim than the champion on the same test set
                (equal digest) and for the same dims (image size, slices, bits). What cannot be compared never moves it.

Takes an MLflow client and imports nothing of MLflow.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from pipelines.dag.masking import plain_uri

CANDIDATE, CHAMPION = "candidate", "champion"
SCORE, TEST_SET, DIMS = "test_bits_per_dim", "test_set", "scored_dims"
ATTEMPT, CHECKPOINT, VERDICT = "attempt", "checkpoint", "champion_rule"
POINTER = "checkpoint"  # folder among a run's artifacts, for servers that take no local path as source


@dataclass(frozen=True)
class StageModel:
    """A trained stage and its exact score. Plain values."""

    stage: str
    checkpoint: str  # folder with config.json, model.safetensors, ema.safetensors: local path or URI
    attempt: str  # of the train node: the same training is registered once
    bits_per_dim: float  # the stage's part, on all test images
    test_set: str  # digest of the test images' shards
    dims: str  # which dims of an image were scored, in words that are equal only for equal dims


def record(client: Any, run_id: str, model: StageModel) -> str:
    """Registers the network that a run trained, unless it is there, and sets the aliases. Returns the version.

    May be called again after it broke off: nothing is done twice.
    """
    run = client.get_run(run_id)
    name = f"{client.get_experiment(run.info.experiment_id).name}.{model.stage}"
    if not client.search_registered_models(filter_string=f"name = '{name}'"):
        client.create_registered_model(name, description=f"Stage {model.stage}: see docs/comparing_stages.md")
    known = client.search_model_versions(f"name = '{name}'")
    version = next((v.version for v in known if v.tags.get(ATTEMPT) == model.attempt), None)
    tags = {
        ATTEMPT: model.attempt,
        CHECKPOINT: plain_uri(model.checkpoint),
        SCORE: repr(model.bits_per_dim),
        TEST_SET: model.test_set,
        DIMS: model.dims,
    }
    if version is None:
        source = _source(client, run, model)
        version = client.create_model_version(name, source, run_id, tags=tags, await_creation_for=0).version
    else:
        for key, value in tags.items():
            client.set_model_version_tag(name, version, key, value)
    client.set_registered_model_alias(name, CANDIDATE, version)
    holder = {str(v.version): v.tags for v in known}.get(str(_holder(client, name)))
    moves, why = judge(model, None if holder is None or holder.get(ATTEMPT) == model.attempt else holder)
    client.set_model_version_tag(name, version, VERDICT, why)
    if moves:
        client.set_registered_model_alias(name, CHAMPION, version)
    return str(version)


def judge(model: StageModel, champion: dict[str, str] | None) -> tuple[bool, str]:
    """Whether a model becomes the champion, and why. champion: the tags of the one that is; None: there is no other."""
    if champion is None:
        return True, "champion: no other version holds the title"
    for key, own in ((TEST_SET, model.test_set), (DIMS, model.dims)):
        if champion.get(key) != own:
            return False, f"not compared: the champion's {key} is {champion.get(key)}, this one's {own}"
    best = float(champion[SCORE])
    if model.bits_per_dim < best:
        return True, f"champion: {model.bits_per_dim:.6f} bits/dim, before {best:.6f}"
    return False, f"champion stays: {best:.6f} bits/dim, this version {model.bits_per_dim:.6f}"


def _holder(client: Any, name: str) -> str | None:
    return client.get_registered_model(name).aliases.get(CHAMPION)


def _source(client: Any, run: Any, model: StageModel) -> str:
    """The checkpoint's folder; a server takes a local path only among a run's artifacts, so there a note lies.

    Such a note is the checkpoint's address in a file: weights of gigabytes stay where they are.
    """
    uri = plain_uri(model.checkpoint)
    if "://" in uri or not client.tracking_uri.startswith(("http://", "https://")):
        return uri
    client.log_text(run.info.run_id, json.dumps({"checkpoint": uri}, indent=1), f"{POINTER}/location.json")
    return f"runs:/{run.info.run_id}/{POINTER}"
