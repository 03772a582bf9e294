"""The DAG: which nodes a configuration has, what each reads of it and what it needs. The wiring, and nothing else.

prepare_data -> train_<stage> (one each) -> evaluate, sample -> report
"""

from __future__ import annotations

import dataclasses

from data_prep.sources import listing_hash
from pipelines.config import to_yaml
from pipelines.errors import UserError
from pipelines.experiment import (
    ExperimentConfig,
    ResourcesConfig,
    TrackingConfig,
    batch_plan,
    stage_model_config,
    stage_names,
    stage_temperature,
    stage_train_config,
)
from pipelines.node import Node

INGEST_CPUS = 0.25  # a train node's read tasks, beside its workers
SHARD_CPUS = 1  # one shard of prepare_data; two at a time on a core are a quarter slower


def node_names(config: ExperimentConfig) -> list[str]:
    """Names of the nodes in running order, without looking at any file."""
    trains = [f"train_{stage}" for stage in stage_names(config)]
    return ["prepare_data", *trains, "evaluate", "sample", "report"]


def nodes(config: ExperimentConfig) -> list[Node]:
    """All nodes of the pipeline. Raises UserError when the source of images is missing or empty."""
    stages = stage_names(config)
    trains = tuple(f"train_{stage}" for stage in stages)
    threads = {"num_threads": 1}
    return [
        _prepare_data(config),
        *(_train(config, stage) for stage in stages),
        Node(
            name="evaluate",
            function="pipelines.nodes.evaluate:run",
            needs=("prepare_data", *trains),
            config={"stages": stages, "batch_size": config.evaluate.batch_size},
            options=threads,
            num_gpus=_gpus(config),
        ),
        Node(
            name="sample",
            function="pipelines.nodes.sample:run",
            needs=trains,
            config={
                "stages": stages,
                "num_images": config.sample.num_images,
                "batch_size": config.sample.batch_size,
                "seed": config.sample.seed,
                "temperature": {stage: stage_temperature(config, stage) for stage in stages},
            },
            options=threads,
            num_gpus=_gpus(config),
        ),
        Node(
            name="report",
            function="pipelines.nodes.report:run",
            needs=("prepare_data", *trains, "evaluate", "sample"),
            config={"name": config.name, "stages": stages, "yaml": _semantic_yaml(config)},
        ),
    ]


def _prepare_data(config: ExperimentConfig) -> Node:
    try:
        source = listing_hash(config.data)
    except (ValueError, OSError) as error:
        raise UserError(f"data.root: {error}") from error
    return Node(
        name="prepare_data",
        function="pipelines.nodes.prepare_data:run",
        config={"data": dataclasses.replace(config.data, root=None)},
        options={"root": config.data.root, "num_cpus": SHARD_CPUS},
        source=source,
        num_cpus=0,
        cost={"CPU": SHARD_CPUS},
        resumable=True,
    )


def _train(config: ExperimentConfig, stage: str) -> Node:
    model, train, resources = stage_model_config(config, stage), stage_train_config(config, stage), config.resources
    depth = model.num_given_bits + model.num_bits
    return Node(
        name=f"train_{stage}",
        function="pipelines.nodes.train:run",
        needs=("prepare_data",),
        config={
            "stage": stage,
            "model": model,
            "train": train,
            "stored_bits": min(bits for bits in config.data.bits if bits >= depth),
            "seed": config.seed,
        },
        options={"resources": resources, "plan": batch_plan(train, resources.num_workers)},
        num_cpus=0,
        cost={
            "CPU": resources.num_workers * resources.cpus_per_worker + INGEST_CPUS,
            "GPU": resources.num_workers * resources.gpus_per_worker if resources.use_gpu else 0,
        },
        resumable=True,
        tags={"stage": stage},
    )


def _gpus(config: ExperimentConfig) -> float:
    return config.resources.gpus_per_worker if config.resources.use_gpu else 0


def _semantic_yaml(config: ExperimentConfig) -> str:
    """The configuration as the report shows it: places and resources left out, they do not change the results."""
    data = dataclasses.replace(config.data, root=None)
    return to_yaml(
        dataclasses.replace(config, storage=None, resources=ResourcesConfig(), tracking=TrackingConfig(), data=data)
    )
