"""train_<stage>: one network of the chain, fitted by a TorchTrainer of its own, resumed where it was interrupted."""

from __future__ import annotations

import json

from data_prep import files as storage
from data_prep.parquet import open_dataset
from pipelines.dag.node import NodeContext, NodeResult
from pipelines.nodes.inputs import log_split
from pipelines.nodes.ray_train import fit_stage

HISTORY = "history.json"


def run(context: NodeContext) -> NodeResult:
    """config: stage, model (SPNConfig), train (TrainConfig), stored_bits, seed.

    options: resources (NodeResources), samples (TrainingSamples or None).
    """
    output = context.inputs["prepare_data"]
    dataset = open_dataset(storage.join(output.uri, output.named["dataset"]))
    with context.run.open() as run:
        size, bits = context.config["model"].image_size, context.config["stored_bits"]
        for split, purpose in (("train", "training"), ("valid", "validation")):
            log_split(run, dataset, resolution=size, bits=bits, split=split, context=purpose)
    fitted = fit_stage(context, dataset=dataset.uri)
    store = storage.open_store(context.out)
    store.write_text(HISTORY, json.dumps(fitted.history, indent=1))
    with context.run.open() as run:
        run.log_history(fitted.history)  # adds what the workers could not send
        run.log_text(store.read_bytes(f"{fitted.checkpoint}/config.json").decode(), "config.json")
    metrics = {"valid/bits_per_dim": fitted.valid_bits_per_dim, "images_seen": float(fitted.images_seen)}
    return NodeResult(outputs={"checkpoint": fitted.checkpoint, "history": HISTORY}, metrics=metrics)
