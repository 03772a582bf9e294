"""score_images: exact bits/dim of the user's own images, of each part of the chain and in all."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import torch

from data_prep import files as storage
from pipelines.dag.node import NodeContext, NodeResult
from pipelines.nodes.trained import load_stages
from spn.evaluation import bits_per_dim, chain_nats

FOLDER, TABLE, CSV, RECORD = "own_images", "scores.parquet", "scores.csv", "record.json"


def run(context: NodeContext) -> NodeResult:
    """config: stages (in chain order), bits of the images' values, batch_size. options: num_threads, device, images."""
    torch.set_num_threads(context.options["num_threads"])
    stages, batch = context.config["stages"], context.config["batch_size"]
    own = context.options["images"]
    device = context.options["device"]
    models = load_stages(context.inputs, stages, device=device)
    size = models[stages[0]].config.image_size
    columns: dict[str, list[float]] = {stage: [] for stage in stages}
    for start in range(0, len(own.keys), batch):
        values = torch.from_numpy(own.values[start : start + batch].copy()).to(device).permute(0, 3, 1, 2).long()
        for stage, nats in chain_nats(models, values << (8 - own.num_bits)).items():
            columns[stage] += [bits_per_dim(n, num_images=1, image_size=size) for n in nats.tolist()]
        done = min(start + batch, len(own.keys))
        note = f"{sum(map(sum, columns.values())) / done:.3f} bits/dim"
        context.progress.update(done, len(own.keys), unit="images", note=note)
    total = [sum(parts) for parts in zip(*columns.values(), strict=True)]
    table = pa.table({"key": list(own.keys), **columns, "total": total})
    buffers = {TABLE: pa.BufferOutputStream(), CSV: pa.BufferOutputStream()}
    pq.write_table(table, buffers[TABLE])
    pyarrow.csv.write_csv(table, buffers[CSV])
    store = storage.open_store(context.out).sub(FOLDER)
    for name, buffer in buffers.items():
        store.write_bytes(name, buffer.getvalue().to_pybytes())
    networks = {stage: context.inputs[f"train_{stage}"].attempt for stage in stages}
    record = {**context.config, "use": "scores", "images": dict(zip(own.keys, own.digests, strict=True))}
    store.write_text(RECORD, json.dumps({**record, "networks": networks}, indent=1))
    metrics = {f"own_images/bits_per_dim/{stage}": sum(scores) / len(scores) for stage, scores in columns.items()}
    metrics["own_images/bits_per_dim/total"] = sum(total) / len(total)
    with context.run.open() as run:
        run.log_metrics(metrics)
    return NodeResult(outputs={"scores": FOLDER}, metrics=metrics)
