"""The DAG: which nodes a configuration has, what each reads of it and what it needs. The wiring, and nothing else.

prepare_data -> train_<stage> (one each) -> evaluate, sample -> report
                                         -> sample_images, score_images   (only when started with images=...)
"""

from __future__ import annotations

import dataclasses
from typing import Any

from data_prep.files import UserError
from data_prep.plan import check_id
from data_prep.sources import identify
from pipelines.config import (
    ExperimentConfig,
    NodeResources,
    ResourcesConfig,
    TrackingConfig,
    node_names,
    node_resources,
    sample_precision,
    stage_model_config,
    stage_names,
    stage_temperature,
    stage_top_p,
    stage_train_config,
    train_node,
)
from pipelines.dag.node import Node
from pipelines.loading import preset_names, to_yaml
from pipelines.nodes.own_images import SAMPLE, SCORE, OwnImages
from pipelines.nodes.training_samples import TrainingSamples

__all__ = ["node_names", "nodes"]
INGEST_CPUS = 0.25  # a train node's read tasks, beside its workers


def nodes(config: ExperimentConfig, *, own: OwnImages | None = None) -> list[Node]:
    """All nodes of the pipeline; with own images the one node that reads them, and those above it.

    Raises UserError when the source of images is missing or empty, or its data set has the id of another.
    """
    if own is not None:
        trains = [_train(config, stage) for stage in own.stages]
        reads_them = _score_images if own.node == SCORE else _sample_images
        return [_prepare_data(config), *trains, reads_them(config, own)]
    stages = stage_names(config)
    trains = tuple(train_node(stage) for stage in stages)
    return [
        _prepare_data(config),
        *(_train(config, stage) for stage in stages),
        Node(
            name="evaluate",
            function="pipelines.nodes.evaluate:run",
            needs=("prepare_data", *trains),
            config={"stages": stages, "batch_size": config.evaluate.batch_size},
            **_single_process(config, "evaluate"),
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
                **_tempering(config, stages),
            },
            **_drawing(config, "sample"),
        ),
        Node(
            name="report",
            function="pipelines.nodes.report:run",
            needs=("prepare_data", *trains, "evaluate", "sample"),
            config={
                "name": config.name,
                "preset": config.name if config.name in preset_names() else None,
                "stages": stages,
                "yaml": _semantic_yaml(config),
            },
            num_cpus=node_resources(config, "report").cpus_per_worker,
            **_retries(node_resources(config, "report")),
        ),
    ]


def _sample_images(config: ExperimentConfig, own: OwnImages) -> Node:
    stages, drawing = list(own.stages), _drawing(config, "sample")  # what per_node says of the pipeline's own samples
    return Node(
        name=SAMPLE,
        function="pipelines.nodes.sample_images:run",
        needs=tuple(f"train_{stage}" for stage in stages),
        config={
            "use": own.use,
            "num_given": own.num_given,
            "given_bits": own.num_bits,
            "stages": stages,
            "num_draws": config.sample.num_draws,
            "batch_size": config.sample.batch_size,
            "seed": config.sample.seed,
            **_tempering(config, stages),
        },
        source=own.digest,
        tags={"use": own.use or ""},
        **{**drawing, "options": {**drawing["options"], "images": own}},
    )


def _score_images(config: ExperimentConfig, own: OwnImages) -> Node:
    alone = _single_process(config, "evaluate")
    return Node(
        name=SCORE,
        function="pipelines.nodes.score_images:run",
        needs=tuple(f"train_{stage}" for stage in own.stages),
        config={"stages": list(own.stages), "bits": own.num_bits, "batch_size": config.evaluate.batch_size},
        source=own.digest,
        **{**alone, "options": {**alone["options"], "images": own}},
    )


def _prepare_data(config: ExperimentConfig) -> Node:
    try:
        name, listing_hash = identify(config.data)
    except OSError as error:
        raise UserError(f"data.root is {config.data.root!r}; it cannot be read: {error}") from error
    except ValueError as error:
        raise UserError(f"data.root: {error}") from error
    try:
        check_id(config.data, name)
    except ValueError as error:
        raise UserError(f"data.{error}") from error
    resources = node_resources(config, "prepare_data")  # a whole CPU a shard: two at a time on a core are slower
    shard = {"CPU": resources.cpus_per_worker}
    return Node(
        name="prepare_data",
        function="pipelines.nodes.prepare_data:run",
        config={"data": dataclasses.replace(config.data, root=None, max_quarantine_fraction=None)},
        options={
            "root": config.data.root,
            "max_quarantine_fraction": config.data.max_quarantine_fraction,
            "num_cpus": resources.cpus_per_worker,
        },
        source=listing_hash,
        num_cpus=0,
        cost=shard,
        num_workers=1,
        worker_cost=shard,
        resumable=True,
        **_retries(resources),
    )


def _train(config: ExperimentConfig, stage: str) -> Node:
    model, train = stage_model_config(config, stage), stage_train_config(config, stage)
    resources = node_resources(config, train_node(stage))
    worker = {"CPU": resources.cpus_per_worker, "GPU": resources.gpus_per_worker if resources.use_gpu else 0}
    depth = model.num_given_bits + model.num_bits
    return Node(
        name=train_node(stage),
        function="pipelines.nodes.train:run",
        needs=("prepare_data",),
        config={
            "stage": stage,
            "model": model,
            "train": train,
            "stored_bits": min(bits for bits in config.data.bits if bits >= depth),
            "seed": config.seed,
        },
        options={
            "resources": resources,
            "samples": _training_samples(config),
        },
        num_cpus=0,
        cost={
            "CPU": resources.num_workers * worker["CPU"] + INGEST_CPUS,
            "GPU": resources.num_workers * worker["GPU"],
        },
        num_workers=resources.num_workers,
        worker_cost=worker,
        resumable=True,
        tags={"stage": stage},
        **_retries(resources),
    )


def _training_samples(config: ExperimentConfig) -> TrainingSamples | None:
    if config.tracking.sample_every_steps is None:
        return None
    return TrainingSamples(
        every_steps=config.tracking.sample_every_steps,
        num_images=config.tracking.num_sample_images,
        first_given="first_slice" in stage_names(config),
        seed=config.sample.seed,
    )


def _single_process(config: ExperimentConfig, name: str) -> dict[str, Any]:
    """Fields of a node whose work is done in the task's own process."""
    resources = node_resources(config, name)
    return {
        "options": {"num_threads": max(1, int(resources.cpus_per_worker)), "device": resources.device},
        "num_cpus": resources.cpus_per_worker,
        "num_gpus": resources.gpus_per_worker if resources.use_gpu else 0,
        **_retries(resources),
    }


def _retries(resources: NodeResources) -> dict[str, Any]:
    return {"max_failures": resources.max_failures, "retry_wait_sec": resources.retry_wait_sec}


def _tempering(config: ExperimentConfig, stages: list[str]) -> dict[str, Any]:
    return {
        "temperature": {stage: stage_temperature(config, stage) for stage in stages},
        "top_p": {stage: stage_top_p(config, stage) for stage in stages},
        "precision": sample_precision(config),
    }


def _drawing(config: ExperimentConfig, name: str) -> dict[str, Any]:
    """Fields of a node whose images are drawn by workers."""
    resources = node_resources(config, name)
    worker = {"CPU": resources.cpus_per_worker, "GPU": resources.gpus_per_worker if resources.use_gpu else 0}
    return {
        "options": {"resources": resources},
        "num_cpus": 0,
        "cost": {resource: resources.num_workers * amount for resource, amount in worker.items()},
        "num_workers": resources.num_workers,
        "worker_cost": worker,
        "resumable": True,
        **_retries(resources),
    }


def _semantic_yaml(config: ExperimentConfig) -> str:
    """The configuration as the report shows it: places and resources left out, they do not change the results."""
    changes = {
        "data": dataclasses.replace(config.data, root=None),
        "sample": dataclasses.replace(config.sample, precision=sample_precision(config)),
        "storage": None,
        "resources": ResourcesConfig(),
        "tracking": TrackingConfig(),
    }
    return to_yaml(dataclasses.replace(config, **changes))
