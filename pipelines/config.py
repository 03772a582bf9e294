"""The experiment's configuration and what follows from it: stages, their networks, batches, rules.

Every room owns the dataclasses of its part; `ExperimentConfig` sums them up. Plain dataclasses: `config.py` fills them.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from data_prep.config import DataConfig
from data_prep.files import UserError
from spn.config import PRECISIONS, STAGES, DecoderConfig, EmbedderConfig, SPNConfig, TrainConfig

if TYPE_CHECKING:
    from pipelines.nodes.own_images import OwnImages
    from pipelines.nodes.training_samples import TrainingSamples

NOT_SEMANTIC = {"semantic": False}  # metadata of a field that decides no result: fingerprints leave it out
SYSTEMS = (  # the paper's: decoder baseline, SPN, size, depth, and full multidimensional upscaling
    ("baseline",),
    ("size_upscale",),
    ("first_slice", "size_upscale"),
    ("size_upscale", "depth_upscale"),
    ("first_slice", "size_upscale", "depth_upscale"),
)


USES = ("size_upscale", "depth_upscale", "complete")  # what can be made of given images
OF_OWN_IMAGES = ("use", "num_draws", "num_given_slices", "num_given_rows")  # of `sample`, for `images` alone


def _at_least(owner: object, least: float, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if value is not None and not value >= least:
            raise ValueError(f"{name} is {value}; it must be at least {least}")


@dataclass(frozen=True)
class ModelConfig:
    """Networks of every stage; `per_stage` changes single ones. Stages without a slice embedder ignore that part."""

    decoder: DecoderConfig = field(default_factory=DecoderConfig)
    embedder: EmbedderConfig = field(default_factory=EmbedderConfig)


@dataclass(frozen=True)
class EvaluateConfig:
    batch_size: int = 64  # images; all slices of each are scored

    def __post_init__(self) -> None:
        _at_least(self, 1, "batch_size")


@dataclass(frozen=True)
class SampleConfig:
    num_images: int = 16
    batch_size: int | None = None  # images drawn at once; None: what fits the GPU, or 16 on a CPU
    seed: int = 0
    temperature: dict[str, float] = field(default_factory=dict)  # by stage, divides the logits; 1.0 where not named
    top_p: dict[str, float] = field(default_factory=dict)  # by stage, mass of the nucleus drawn from; all if not named
    precision: str = "bfloat16"  # of the networks on a GPU, or float32; on a CPU they are float32
    # With `images` and sample.py alone: what is made of the user's own images (docs/sampling.md).
    use: str | None = None  # size_upscale, depth_upscale or complete
    num_draws: int = 1  # for each image
    num_given_slices: int | None = None  # complete: how many slices are given, in subscale order
    num_given_rows: int | None = None  # complete, baseline: how many rows are given, from the top

    def __post_init__(self) -> None:
        _at_least(self, 1, "num_images", "batch_size", "num_draws", "num_given_slices", "num_given_rows")
        _at_least(self, 0, "seed")
        for stage, value in self.temperature.items():
            if not 0 < value < math.inf:
                raise ValueError(f"temperature.{stage} is {value}; it must be above 0")
        for stage, value in self.top_p.items():
            if not 0 < value <= 1:
                raise ValueError(f"top_p.{stage} is {value}; it must be above 0 and at most 1")
        for name, allowed in (("precision", PRECISIONS), ("use", (None, *USES))):
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(filter(None, allowed))}")


@dataclass(frozen=True)
class NodeResources:
    """What a node may take, and how often it is started again. Never part of a fingerprint: the same results come from
    other machines (where not, what differs is: `sample_precision`). `resources` sets it for all nodes,
    `resources.per_node` for single ones."""

    num_workers: int = 1  # Ray Train workers of a train node, which share each batch; workers that draw samples
    cpus_per_worker: float = 1.0  # in per_node of another node: CPUs of that node (prepare_data: of each shard)
    use_gpu: bool = False
    gpus_per_worker: float = 1.0  # only with use_gpu
    num_to_keep: int = 2  # checkpoints kept beside the best
    max_failures: int = 3  # times a node starts again after a fault of the infrastructure; its own errors end it
    retry_wait_sec: float = 5.0  # before the first of these; doubles from time to time

    def __post_init__(self) -> None:
        _at_least(self, 1, "num_workers", "num_to_keep")
        _at_least(self, 0, "max_failures")
        for name in ("cpus_per_worker", "gpus_per_worker"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be above 0")
        if not 0 <= self.retry_wait_sec < math.inf:
            raise ValueError(f"retry_wait_sec is {self.retry_wait_sec}; it must be at least 0")

    @property
    def device(self) -> str:
        """Torch's name of what evaluation and sampling run on: a GPU only where one was asked for."""
        return "cuda" if self.use_gpu else "cpu"


@dataclass(frozen=True)
class ResourcesConfig(NodeResources):
    """Of all nodes, and of the machine."""

    num_cpus: int | None = None  # logical CPUs of the embedded Ray; None: the machine's
    num_gpus: int | None = None  # GPUs of the embedded Ray; None: those that Ray finds
    per_node: dict[str, Any] = field(default_factory=dict)  # {node: what is different there}

    def __post_init__(self) -> None:
        super().__post_init__()
        _at_least(self, 1, "num_cpus")
        _at_least(self, 0, "num_gpus")


@dataclass(frozen=True)
class TrackingConfig:
    uri: str | None = None  # None: $MLFLOW_TRACKING_URI, or sqlite in the run folder
    sample_every_steps: int | None = None  # of training: a grid at the next validation; all its workers wait for it
    num_sample_images: int = 8  # in each of these grids

    def __post_init__(self) -> None:
        _at_least(self, 1, "sample_every_steps", "num_sample_images")


@dataclass(frozen=True)
class ExperimentConfig:
    name: str  # run folder and MLflow experiment
    scaling_factor: int  # S: S * S slices; 1 for the baseline
    bits: list[int]  # bits a channel after the first stages, then after each depth upscaling: [8], [3, 8], ...
    stages: list[str]  # one of SYSTEMS
    data: DataConfig
    seed: int = 0
    images: str | None = None  # the user's own, for sample.py and evaluate.py: a file, folder or pattern, path or URI
    image_bits: int | None = None  # of their values: 8, or below 8 files of 0 .. 2^bits - 1; None: 8, unless in doubt
    storage: str | None = None  # folder or URI that holds run folders; None: `resolve_storage`
    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    per_stage: dict[str, Any] = field(default_factory=dict)  # {stage: {model: ..., train: ...}} over the two above
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    sample: SampleConfig = field(default_factory=SampleConfig)
    resources: ResourcesConfig = field(default_factory=ResourcesConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)


@dataclass(frozen=True)
class StageConfig:
    """What `per_stage` may change for one stage."""

    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)


# ---- what each node gets ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PrepareDataNodeConfig:
    data: DataConfig
    num_cpus: float = field(metadata=NOT_SEMANTIC)  # per task, that is, per shard


@dataclass(frozen=True, kw_only=True)
class TrainNodeConfig:
    stage: str
    model: SPNConfig
    train: TrainConfig
    stored_bits: int  # bit depth of the Parquet files that are read
    seed: int
    resources: NodeResources = field(metadata=NOT_SEMANTIC)
    samples: TrainingSamples | None = field(default=None, metadata=NOT_SEMANTIC)


@dataclass(frozen=True, kw_only=True)
class EvaluateNodeConfig:
    stages: tuple[str, ...]  # in chain order
    batch_size: int  # images
    num_threads: int = field(metadata=NOT_SEMANTIC)
    device: str = field(metadata=NOT_SEMANTIC)


@dataclass(frozen=True, kw_only=True)
class DrawingConfig:
    """What `sample` and `sample_images` have in common."""

    stages: tuple[str, ...]  # those that draw, in chain order
    batch_size: int | None  # images drawn at once; None: found by trying
    seed: int
    temperature: Mapping[str, float]  # by stage
    top_p: Mapping[str, float | None]  # by stage
    precision: str
    decoder: str = "auto"  # auto, fused or plain
    resources: NodeResources = field(metadata=NOT_SEMANTIC)


@dataclass(frozen=True, kw_only=True)
class SampleNodeConfig(DrawingConfig):
    num_images: int


@dataclass(frozen=True, kw_only=True)
class SampleImagesNodeConfig(DrawingConfig):
    use: str  # one of USES
    num_given: int  # of use complete: slices in subscale order, or rows of a baseline
    given_bits: int  # bit depth of the given images
    num_draws: int  # per image
    images: OwnImages = field(metadata=NOT_SEMANTIC, compare=False)  # the node's `source` is their digest


@dataclass(frozen=True, kw_only=True)
class ScoreImagesNodeConfig:
    stages: tuple[str, ...]  # in chain order
    bits: int  # bit depth of the images
    batch_size: int  # images
    num_threads: int = field(metadata=NOT_SEMANTIC)
    device: str = field(metadata=NOT_SEMANTIC)
    images: OwnImages = field(metadata=NOT_SEMANTIC, compare=False)


@dataclass(frozen=True, kw_only=True)
class ReportNodeConfig:
    name: str
    preset: str | None  # None: the config is a file of the user
    stages: tuple[str, ...]
    yaml: str  # the settings that decide results


# ---- what follows from a config ---------------------------------------------------------------------------------


def stage_kind(stage: str) -> str:
    """The network of a concrete stage: depth_upscale_3 -> depth_upscale."""
    return "depth_upscale" if stage.startswith("depth_upscale_") else stage


def stage_names(config: ExperimentConfig) -> list[str]:
    """Concrete stages in chain order: one depth_upscale, or a depth_upscale_<bits> for each further bit depth."""
    return concrete_stages(config.stages, config.bits)


def concrete_stages(stages: Sequence[str], bits: Sequence[int]) -> list[str]:
    names = []
    for kind in STAGES:
        if kind in stages:
            names += [f"{kind}_{d}" for d in bits[1:]] if kind == "depth_upscale" and len(bits) > 2 else [kind]
    return names


def stage_model_config(config: ExperimentConfig, stage: str) -> SPNConfig:
    """The network of one of `stage_names(config)`."""
    model = _stage_config(config, stage).model
    kind, high, low = stage_kind(stage), 0, config.bits[0]
    if kind == "depth_upscale":
        step = config.bits.index(int(stage.rsplit("_", 1)[1])) if stage != kind else 1
        high, low = config.bits[step - 1], config.bits[step] - config.bits[step - 1]
    return SPNConfig(
        stage=stage,
        image_size=config.data.image_size,
        scaling_factor=config.scaling_factor,
        num_bits=low,
        num_given_bits=high,
        decoder=model.decoder,
        embedder=model.embedder if kind in ("size_upscale", "depth_upscale") else None,
    )


def stage_train_config(config: ExperimentConfig, stage: str) -> TrainConfig:
    return _stage_config(config, stage).train


def node_names(config: ExperimentConfig) -> list[str]:
    """Names of the DAG's nodes in running order."""
    return ["prepare_data", *(train_node(stage) for stage in stage_names(config)), "evaluate", "sample", "report"]


def train_node(stage: str) -> str:
    return f"train_{stage}"


def node_resources(config: ExperimentConfig, node: str) -> NodeResources:
    """What one node may take. Train nodes and those that draw samples have workers; the CPUs of others are set by
    `per_node` alone."""
    common = {f.name: getattr(config.resources, f.name) for f in dataclasses.fields(NodeResources)}
    if not _has_workers(node):
        common |= {"num_workers": 1, "cpus_per_worker": 1.0}
    return NodeResources(**common | config.resources.per_node.get(node, {}))


def _has_workers(node: str) -> bool:
    return node.startswith((train_node(""), "sample"))


def settable_resources(node: str) -> tuple[str, ...]:
    """Keys that `resources.per_node.<node>` may have: those that make a difference there."""
    every_node = ("cpus_per_worker", "max_failures", "retry_wait_sec")
    if node.startswith(train_node("")):
        return tuple(f.name for f in dataclasses.fields(NodeResources))
    if _has_workers(node):
        return tuple(f.name for f in dataclasses.fields(NodeResources) if f.name != "num_to_keep")
    return (*every_node, "use_gpu", "gpus_per_worker") if node == "evaluate" else every_node


def _lacks(key: str) -> str:
    """What a node is without for which `key` is not settable."""
    lacks = {"num_workers": "has no workers", "num_to_keep": "keeps no checkpoints"}
    return lacks.get(key, "uses no GPU")


def set_for_own_images(sample: SampleConfig) -> dict[str, Any]:
    """Settings of OF_OWN_IMAGES that are not as by default."""
    default = SampleConfig()
    return {key: getattr(sample, key) for key in OF_OWN_IMAGES if getattr(sample, key) != getattr(default, key)}


def stage_temperature(config: ExperimentConfig, stage: str) -> float:
    chosen = config.sample.temperature
    return chosen.get(stage, chosen.get(stage_kind(stage), 1.0))


def stage_top_p(config: ExperimentConfig, stage: str) -> float | None:
    chosen = config.sample.top_p
    return chosen.get(stage, chosen.get(stage_kind(stage)))


def sample_precision(config: ExperimentConfig) -> str:
    """What samples are drawn in: a CPU computes in float32 whatever `sample.precision` says."""
    return config.sample.precision if node_resources(config, "sample").use_gpu else "float32"


def _stage_config(config: ExperimentConfig, stage: str) -> StageConfig:
    assert stage in stage_names(config), stage
    chosen = StageConfig(model=config.model, train=config.train)
    for key in dict.fromkeys((stage_kind(stage), stage)):  # all depth stages first, then the single one
        chosen = _replaced(chosen, config.per_stage.get(key, {}))
    return chosen


T = TypeVar("T")


def _replaced(value: T, changes: Mapping[str, Any]) -> T:
    """A nested dataclass with the named fields changed, each level's own checks run again."""
    return dataclasses.replace(
        value,
        **{
            name: _replaced(getattr(value, name), new) if isinstance(new, Mapping) else new
            for name, new in changes.items()
        },
    )


def _resource_key(config: ExperimentConfig, node: str, name: str) -> str:
    """Where a node's resource is set."""
    own = name in config.resources.per_node.get(node, {})
    return f"resources.per_node.{node}.{name}" if own else f"resources.{name}"


# ---- cross-field checks -----------------------------------------------------------------------------------------


def validate(config: ExperimentConfig) -> None:
    """Rules between fields (those of one field live in its dataclass). Raises UserError with the first broken one."""
    for _, message in broken_rules(config):
        raise UserError(message)


def broken_rules(config: ExperimentConfig) -> Iterator[tuple[tuple[str, ...], str]]:
    """(keys that could be at fault, message) of each broken rule; later ones may rely on earlier ones."""
    c, size = config, config.data.image_size
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", c.name):
        yield ("name",), f"name is {c.name!r}; it becomes a folder: letters, digits, '.', '_' and '-' only"
    if c.image_bits is not None and not 1 <= c.image_bits <= 8:
        yield ("image_bits",), f"image_bits is {c.image_bits}; it must be from 1 to 8, or null"
    of_images = {f"sample.{key}": value for key, value in set_for_own_images(c.sample).items()}
    if c.image_bits is not None:
        of_images["image_bits"] = c.image_bits
    for key, value in of_images.items():
        if c.images is None:
            yield (key,), f"{key} is {value}, but images is not set; images=FILE says of which images"
    if c.seed < 0:
        yield ("seed",), f"seed is {c.seed}; it must be at least 0"
    for stage in c.stages:
        if stage not in STAGES:
            yield ("stages",), f"stages: unknown stage {stage!r}; {nearest(stage, STAGES)}"
    chosen = tuple(kind for kind in STAGES if kind in c.stages)
    if chosen not in SYSTEMS or len(c.stages) != len(chosen):
        allowed = ", ".join(f"[{', '.join(system)}]" for system in SYSTEMS)
        yield ("stages",), f"stages is [{', '.join(c.stages)}]; allowed: {allowed}"
    for bits in c.bits:
        if not 1 <= bits <= 8:
            yield ("bits",), f"bits is {c.bits}; each must be from 1 to 8"
    if not c.bits or any(low >= high for low, high in zip(c.bits, c.bits[1:], strict=False)):
        yield ("bits",), f"bits is {c.bits}; it must rise from entry to entry, e.g. [3, 8]"
    if "depth_upscale" in chosen and len(c.bits) < 2:
        yield ("bits", "stages"), f"bits is {c.bits}; depth_upscale needs at least two entries, e.g. [3, 8]"
    if "depth_upscale" not in chosen and len(c.bits) > 1:
        yield ("stages", "bits"), f"bits is {c.bits}; without depth_upscale in stages it has one entry, e.g. [8]"
    if "baseline" in chosen and c.scaling_factor != 1:
        yield (
            ("scaling_factor", "stages"),
            f"scaling_factor is {c.scaling_factor}; the baseline models the image whole: scaling_factor=1",
        )
    if "baseline" not in chosen and c.scaling_factor < 2:
        yield (
            ("scaling_factor", "stages"),
            f"scaling_factor is {c.scaling_factor}; slices need at least 2 (or stages=[baseline])",
        )
    if size % c.scaling_factor:
        near = max(size // c.scaling_factor, 1) * c.scaling_factor
        yield (
            ("data.image_size", "scaling_factor"),
            f"data.image_size is {size}; scaling_factor, {c.scaling_factor}, must divide it (nearest: {near})",
        )
    names = stage_names(c)
    by_stage = {
        "per_stage": c.per_stage,
        "sample.temperature": c.sample.temperature,
        "sample.top_p": c.sample.top_p,
    }
    for section, mapping in by_stage.items():
        for stage in mapping:
            if stage not in names and stage not in chosen:
                yield (f"{section}.{stage}",), f"{section}: the config has no stage {stage!r}; {nearest(stage, names)}"
    nodes = node_names(c)
    for node, changes in c.resources.per_node.items():
        where = f"resources.per_node.{node}"
        if node not in nodes:
            yield (where,), f"resources.per_node: the config has no node {node!r}; {nearest(node, nodes)}"
        for key in changes:
            if key not in settable_resources(node):
                valid = ", ".join(settable_resources(node))
                yield (f"{where}.{key}",), f"{where}.{key} has no effect: {node} {_lacks(key)}; valid: {valid}"
    for stage in names:
        node = train_node(stage)
        key = _resource_key(c, node, "num_workers")
        batch_size, num_workers = stage_train_config(c, stage).batch_size, node_resources(c, node).num_workers
        if batch_size % num_workers:
            keys = ("train.batch_size", key, f"per_stage.{stage}.train")
            message = f"train.batch_size is {batch_size}; {key}, {num_workers}, must divide it"
            yield keys, message + (f" (stage {stage})" if stage in c.per_stage else "")


def nearest(name: str, valid: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, valid, n=1, cutoff=0.5)
    return f"nearest: {close[0]}" if close else f"valid: {', '.join(valid)}"
