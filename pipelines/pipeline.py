"""The DAG: which nodes a configuration has, what each reads of it and needs, and which code decides their results.

prepare_data -> train_<stage> (one each) -> evaluate, sample -> report
                                         -> sample_images, score_images   (only when started with images=...)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from data_prep.config import DataConfig
from data_prep.files import UserError, open_store
from data_prep.plan import check_id
from data_prep.sources import Unplannable, identify
from pipelines.cluster import ROOT
from pipelines.config import (
    SAMPLE_IMAGES,
    SCORE_IMAGES,
    EvaluateNodeConfig,
    ExperimentConfig,
    NodeResources,
    PrepareDataNodeConfig,
    ReportNodeConfig,
    SampleNodeConfig,
    TrainNodeConfig,
    UserImages,
    node_names,
    stage_model_config,
    stage_names,
    stage_train_config,
    train_node,
)
from pipelines.dag.fingerprint import Sources, digest, flatten
from pipelines.dag.masking import mask_uris
from pipelines.dag.node import EXTEND, KEEP, Node
from pipelines.loading import preset_names, to_yaml
from spn.config import first_given

# Of a train node's output, what networks are loaded from: no optimiser state, no learning curve.
CHECKPOINT = ("config.json", "ema.safetensors")
WEIGHTS = tuple(f"checkpoint/{name}" for name in CHECKPOINT)
INGEST_CPUS = 0.25  # a train node's read tasks, beside its workers

# Module -> why a change of its code cannot change what a node makes. A node does not rerun when only these change, so
# an entry needs care: what is missing here costs a rerun, what is wrong here skips one that is needed. The imports of
# such a module do not count through it, but they do count if a node also reaches them in another way.
NOT_SEMANTIC_MODULES = {
    "data_prep.files": "moves bytes as they are; checksums of all outputs are in _SUCCESS.json",
    "data_prep.lock": "keeps two writers out of one folder",
    "data_prep.ray_compat": "when Ray Data starts and rests, and where Ray keeps what it does not publish",
    "data_prep.verify": "describes and checks a finished dataset",
    "pipelines.cluster": "starts or joins a Ray session",
    "pipelines.config": "a node's values, computed by these rules, are fingerprinted themselves",
    "pipelines.dag.masking": "hides secrets in what people read",
    "pipelines.dag.node": "carries what a node function gets and returns",
    "pipelines.dag.progress": "shows progress",
    "pipelines.nodes.memory": "asks how much a GPU holds at once; the attempt records the answer",
    "pipelines.nodes.registry": "names models in MLflow's registry",
    "pipelines.nodes.workers": "starts workers and hands out chunks; which one gets which changes nothing",
    "pipelines.tracking": "logs to MLflow",
    "spn.gpu.flops": "counts FLOPs for a logged utilisation",
    "spn.decoding.jacobi": "draws what the network draws one value after the other; its passes only get there sooner",
    "spn.gpu.jacobi": "the same on a GPU",
}
SOURCES = Sources(ROOT, ("spn", "data_prep", "pipelines"), frozenset(NOT_SEMANTIC_MODULES))


def nodes(
    config: ExperimentConfig, *, images: UserImages | None = None, listed: bool = True, may_be_gone: bool = False
) -> list[Node]:
    """All nodes of the pipeline; with the user's images the one that reads them, and those upstream of it.

    listed: whether the raw images are listed and weights to start from are read, which fingerprints need. Raises
    UserError where there are no images, or where the dataset has the id of another; if they may_be_gone, a finished
    dataset will do.
    """
    config = _on_its_device(config)
    reader, source, unreadable = "", "", ""
    try:
        reader, source = _listing(config.data) if listed else ("", "")
    except UserError as error:
        if not may_be_gone:
            raise
        unreadable = str(error)
    prepare = dataclasses.replace(_prepare_data(config, reader, source), unreadable=unreadable)
    if images is not None:
        reads_them = _evaluate if images.node == SCORE_IMAGES else _sample
        trains = [_train(config, stage, listed) for stage in images.stages]
        return [prepare, *trains, reads_them(config, images.stages, images)]
    stages = stage_names(config)
    return [
        prepare,
        *(_train(config, stage, listed) for stage in stages),
        _evaluate(config, stages),
        _sample(config, stages),
        _report(config, stages),
    ]


def _listing(data: DataConfig) -> tuple[str, str]:
    """(module that reads the source of images, hash of the names, sizes and times of the source's files)."""
    try:
        name, listing_hash = identify(data)
        check_id(data, name)
    except OSError as error:
        raise UserError(f"data.root is {data.root!r}; it cannot be read: {error}") from error
    except Unplannable as error:
        raise UserError(f"data.{error}") from error
    except ValueError as error:
        raise UserError(f"data.root: {error}") from error
    return f"data_prep.sources.{name}", listing_hash


def _prepare_data(config: ExperimentConfig, reader: str, source: str) -> Node:
    resources, data = config.resources.per_node["prepare_data"], config.data
    if source and data.root is not None:  # a task has a working directory of its own
        data = dataclasses.replace(data, root=open_store(data.root).uri)
    return Node(
        name="prepare_data",
        function="pipelines.nodes.prepare_data:run",
        config=PrepareDataNodeConfig(data=data, listing_hash=source, num_cpus=resources.cpus_per_worker),
        modules=(reader,) if reader else (),  # readers of other sources do not count
        source=source,
        **_runs_on(resources),  # a whole CPU per shard: two at a time on a core are slower
    )


def _start_weights(uri: str) -> str:
    """Hash of the checkpoint's weights. They count instead of their place, so that a folder may move.

    Where there is no checkpoint the place counts: the training then runs, and says so, or is kept by --keep.
    """
    try:
        store = open_store(uri)
        if not all(store.exists(name) for name in CHECKPOINT):
            return f"no checkpoint at {mask_uris(uri)}"
        return digest([store.sha256(name) for name in CHECKPOINT])
    except (OSError, ValueError) as error:
        raise UserError(f"train.init_from is {uri!r}; it cannot be read: {error}") from error


def _train(config: ExperimentConfig, stage: str, listed: bool) -> Node:
    resources = config.resources.per_node[train_node(stage)]
    model, train = stage_model_config(config, stage), stage_train_config(config, stage)
    depth = model.num_given_bits + model.num_bits
    stored_bits = min(bits for bits in config.data.bits if bits >= depth)
    samples = None
    if config.tracking.sample_every_steps is not None:
        from pipelines.nodes.pictures import TrainingSamples  # torch

        samples = TrainingSamples(
            every_steps=config.tracking.sample_every_steps,
            num_images=config.tracking.num_sample_images,
            first_given="first_slice" in stage_names(config),
            seed=config.sample.seed,
        )
    init_from, source = train.init_from, ""
    if listed and init_from is not None:
        source, init_from = _start_weights(init_from), open_store(init_from).uri  # absolute, as data.root
    node = _runs_on(resources)
    node["cost"]["CPU"] += INGEST_CPUS
    return Node(
        name=train_node(stage),
        function="pipelines.nodes.train:run",
        needs=("prepare_data",),
        # It also reads manifest.json, which is not named: a new listing of the photos changes it, and equal shards must
        # not train again. What it takes from there (number of images, order of shards, rows of row groups) follows from
        # the shards' names and bytes; the dataset's id goes to MLflow alone.
        reads=_shards(model.image_size, stored_bits, "train", "valid"),
        config=TrainNodeConfig(
            stage=stage,
            model=model,
            train=dataclasses.replace(train, init_from=None),
            init_from=init_from,
            stored_bits=stored_bits,
            seed=config.seed,
            valid_seed=config.data.seed,
            first_given=first_given(stage, stage_names(config)),
            resources=resources,
            samples=samples,
        ),
        reuse=_finished_training,
        source=source,
        tags={"stage": stage},
        **node,
    )


def _finished_training(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """What a finished training is worth under another config: KEEP, EXTEND, why the steps begin anew, or nothing."""
    before, after = flatten(old), flatten(new)
    changed = {key for key in {*before, *after} if before.get(key) != after.get(key)}
    num_steps = "train.num_steps"
    if changed - {num_steps, "train.checkpoint_every_steps"}:
        return ""
    if num_steps not in changed:
        return KEEP
    if after[num_steps] < before[num_steps]:
        return "a shorter training would have stopped before the finished one did"
    if new["train"]["schedule"] != "piecewise":  # its rates are those of the step alone
        return f"the rates of train.schedule={new['train']['schedule']} depend on {num_steps}"
    return EXTEND


def _evaluate(config: ExperimentConfig, stages: Sequence[str], images: UserImages | None = None) -> Node:
    """evaluate; with the user's images score_images."""
    resources, trains = config.resources.per_node["evaluate"], tuple(map(train_node, stages))
    scoring = EvaluateNodeConfig(
        stages=tuple(stages),
        dataset=config.data.dataset if images is None else "",
        resources=resources,
        images=images,
        **vars(config.evaluate),
    )
    reads = _weights(stages)
    if images is None:
        reads = _weights(stages, "model.safetensors") | _shards(config.data.image_size, 8, "train", "test")
    return Node(
        name="evaluate" if images is None else SCORE_IMAGES,
        function="pipelines.nodes.evaluate:run" if images is None else "pipelines.nodes.images:score",
        needs=("prepare_data", *trains) if images is None else trains,
        reads=reads,
        config=scoring,
        source="" if images is None else images.digest,
        **_runs_on(resources, own_process=True),
    )


def _sample(config: ExperimentConfig, stages: Sequence[str], images: UserImages | None = None) -> Node:
    """sample; with the user's images sample_images."""
    sample, resources = config.sample, config.resources.per_node["sample"]
    chosen: dict[str, Any] = {
        **vars(sample),
        "num_images": sample.num_images if images is None else len(images.keys),
        "temperature": {stage: sample.temperature[stage] for stage in stages},
        "top_p": {stage: sample.top_p[stage] for stage in stages},
    }
    return Node(
        name="sample" if images is None else SAMPLE_IMAGES,
        function="pipelines.nodes.sample:run" if images is None else "pipelines.nodes.images:sample",
        needs=tuple(map(train_node, stages)),
        reads=_weights(stages),
        config=SampleNodeConfig(stages=tuple(stages), resources=resources, images=images, **chosen),
        source="" if images is None else images.digest,
        tags={} if images is None else {"use": str(sample.use)},
        **_runs_on(resources, own_process=True),
    )


def _on_its_device(config: ExperimentConfig) -> ExperimentConfig:
    """A CPU draws and scores in float32, whatever the config says, and auto means plain: there these settings change no
    fingerprint."""
    sample, evaluate = config.sample, config.evaluate
    if not config.resources.per_node["sample"].use_gpu:
        decoder = "jacobi" if sample.decoder == "jacobi" else "plain"
        sample = dataclasses.replace(sample, precision="float32", decoder=decoder)
    if not config.resources.per_node["evaluate"].use_gpu:
        evaluate = dataclasses.replace(evaluate, precision="float32")
    return dataclasses.replace(config, sample=sample, evaluate=evaluate)


def _weights(stages: Sequence[str], *more: str) -> dict[str, tuple[str, ...]]:
    """What a node that loads networks reads of the train nodes."""
    return {train_node(stage): (*WEIGHTS, *(f"checkpoint/{name}" for name in more)) for stage in stages}


def _shards(image_size: int, bits: int, *splits: str) -> dict[str, tuple[str, ...]]:
    """What a node reads of prepare_data."""
    return {"prepare_data": tuple(f"dataset/res={image_size}/bits={bits}/{split}-*.parquet" for split in splits)}


def _report(config: ExperimentConfig, stages: list[str]) -> Node:
    resources = config.resources.per_node["report"]
    return Node(
        name="report",
        function="pipelines.nodes.report:run",
        needs=tuple(node_names(stages)[:-1]),
        config=ReportNodeConfig(
            name=config.name,
            preset=config.name if config.name in preset_names() else None,
            stages=tuple(stages),
            yaml=to_yaml(config, semantic_only=True),
        ),
        **_runs_on(resources, own_process=True),
    )


def _runs_on(resources: NodeResources, *, own_process: bool = False) -> dict[str, Any]:
    """Fields of a node: what it occupies, its retries. own_process: with one worker the task does its work itself."""
    worker = resources.worker
    own = worker if own_process and resources.num_workers == 1 else {}
    return {
        "num_cpus": own.get("CPU", 0),
        "num_gpus": own.get("GPU", 0),
        "cost": {resource: resources.num_workers * amount for resource, amount in worker.items()},
        "max_failures": resources.max_failures,
        "retry_wait_sec": resources.retry_wait_sec,
    }
