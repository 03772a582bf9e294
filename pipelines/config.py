"""What can be configured: the sections of an experiment, what each node gets of them, and the rules between fields.

Plain frozen dataclasses that check themselves; every package owns those of its part, `ExperimentConfig` sums them up.
`loading` fills them from presets, files and the command line.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from data_prep.config import NOT_SEMANTIC, DataConfig, at_least, one_of
from pipelines.dag.plan import nearest
from spn.config import DECODERS, PRECISIONS, STAGES, DecoderConfig, EmbedderConfig, SPNConfig, TrainConfig

if TYPE_CHECKING:  # an object that can draw: code that makes pictures must not count where networks train
    from pipelines.nodes.pictures import TrainingSamples

SYSTEMS = (  # the paper's: decoder baseline, SPN, size, depth, and full multidimensional upscaling
    ("baseline",),
    ("baseline", "depth_upscale"),  # over the plain raster order
    ("size_upscale",),
    ("first_slice", "size_upscale"),
    ("size_upscale", "depth_upscale"),
    ("first_slice", "size_upscale", "depth_upscale"),
)
SAMPLE_IMAGES, SCORE_IMAGES = "sample_images", "score_images"  # nodes that read the user's images
USES = ("size_upscale", "depth_upscale", "complete")  # what can be made of the user's images


# ---- sections of an experiment ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelConfig:
    decoder: DecoderConfig = field(default_factory=DecoderConfig)
    embedder: EmbedderConfig = field(default_factory=EmbedderConfig)  # ignored by stages without a slice embedder


@dataclass(frozen=True)
class StageConfig:
    """What one stage may have of its own."""

    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)


@dataclass(frozen=True)
class EvaluateConfig:
    batch_size: int = 64  # images at once; all slices of each are scored
    precision: str = "bfloat16"  # of the networks on a GPU, or float32; on a CPU they are float32

    def __post_init__(self) -> None:
        at_least(self, 1, "batch_size")
        one_of("precision", self.precision, PRECISIONS)


@dataclass(frozen=True)
class SampleConfig:
    num_images: int = 16
    batch_size: int | None = None  # most images drawn at once; None: as many as the GPU's memory holds, 16 on a CPU
    seed: int = 0
    temperature: dict[str, float] = field(default_factory=dict)  # per stage, divides the logits; default 1.0
    top_p: dict[str, float | None] = field(default_factory=dict)  # per stage, mass of the nucleus; default null: all
    precision: str = "bfloat16"  # of the networks on a GPU, or float32; on a CPU they are float32
    decoder: str = "auto"  # fused: the GPU kernels, where they cover the network; plain: PyTorch; jacobi: many at once
    # For sample.py with `images`: what is made of the user's images (docs/sampling.md).
    use: str | None = None  # size_upscale, depth_upscale or complete
    num_draws: int = 1  # per image
    num_given: int | None = None  # complete: how many slices are given, in subscale order; of a baseline how many rows

    def __post_init__(self) -> None:
        at_least(self, 1, "num_images", "batch_size", "num_draws", "num_given")
        at_least(self, 0, "seed")
        for stage, value in self.temperature.items():
            if not 0 < value < math.inf:
                raise ValueError(f"temperature.{stage} is {value}; it must be above 0")
        for stage, mass in self.top_p.items():
            if mass is not None and not 0 < mass <= 1:
                raise ValueError(f"top_p.{stage} is {mass}; it must be above 0 and at most 1")
        one_of("precision", self.precision, PRECISIONS)
        one_of("decoder", self.decoder, DECODERS)
        if self.use is not None:
            one_of("use", self.use, USES)

    def set_for_images(self) -> dict[str, object]:
        """Settings that need `images` and are not at their default."""
        chosen = {key: getattr(self, key) for key in ("use", "num_draws", "num_given")}
        return {key: value for key, value in chosen.items() if value != getattr(SampleConfig, key)}


@dataclass(frozen=True)
class NodeResources:
    """What a node may take, and how often it is retried."""

    num_workers: int = 1  # Ray Train workers of a train node, which share each batch; workers that draw or score
    cpus_per_worker: float = 1.0  # per_node, nodes without workers: CPUs of the node (prepare_data: of each shard)
    use_gpu: bool = False
    gpus_per_worker: float = 1.0  # only with use_gpu
    num_to_keep: int = 2  # checkpoints: so many of the best are kept, and the newest
    max_failures: int = 3  # retries after a fault of the infrastructure; a node's own errors end it
    retry_wait_sec: float = 5.0  # before the first retry; doubles with each

    def __post_init__(self) -> None:
        at_least(self, 1, "num_workers", "num_to_keep")
        at_least(self, 0, "max_failures")
        for name in ("cpus_per_worker", "gpus_per_worker"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be above 0")
        if not 0 <= self.retry_wait_sec < math.inf:
            raise ValueError(f"retry_wait_sec is {self.retry_wait_sec}; it must be at least 0")

    @property
    def device(self) -> str:
        """Torch's name of what evaluation and sampling run on: a GPU only where one was asked for."""
        return "cuda" if self.use_gpu else "cpu"

    @property
    def num_threads(self) -> int:
        """Of torch, in one worker."""
        return max(1, int(self.cpus_per_worker))

    @property
    def worker(self) -> dict[str, float]:
        """What one worker takes."""
        return {"CPU": self.cpus_per_worker, **({"GPU": self.gpus_per_worker} if self.use_gpu else {})}


@dataclass(frozen=True)
class ResourcesConfig(NodeResources):
    """Defaults of all nodes, and the machine."""

    num_cpus: int | None = None  # logical CPUs of the embedded Ray; None: the machine's
    num_gpus: int | None = None  # GPUs of the embedded Ray; None: those that Ray finds
    per_node: dict[str, NodeResources] = field(default_factory=dict)  # in a file: what differs; loaded: all of a node

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 1, "num_cpus")
        at_least(self, 0, "num_gpus")


@dataclass(frozen=True)
class TrackingConfig:
    uri: str | None = None  # None: $MLFLOW_TRACKING_URI, or sqlite in the run folder
    sample_every_steps: int | None = None  # of training: a grid at the next validation; all its workers wait for it
    num_sample_images: int = 8  # in each of these grids

    def __post_init__(self) -> None:
        at_least(self, 1, "sample_every_steps", "num_sample_images")


@dataclass(frozen=True)
class ExperimentConfig:
    name: str  # run folder and MLflow experiment; a file that has none is named as it is called
    scaling_factor: int  # S: S * S slices; 1 for the baseline
    bits: list[int]  # bits per channel after the first stages, then after each depth upscaling: [8], [3, 8], ...
    stages: list[str]  # one of SYSTEMS
    data: DataConfig
    seed: int = 0
    # The user's images, for sample.py and evaluate.py: a file, folder or pattern, as a path or URI.
    images: str | None = field(default=None, metadata=NOT_SEMANTIC)
    image_fit: str = field(default="data", metadata=NOT_SEMANTIC)  # cropped and resized as the dataset's, or: exact
    # Depth of their values: 8, or below 8 files of 0 .. 2^bits - 1; None: 8, unless in doubt.
    image_bits: int | None = field(default=None, metadata=NOT_SEMANTIC)
    storage: str | None = field(default=None, metadata=NOT_SEMANTIC)  # folder or URI that holds the run folders
    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    per_stage: dict[str, StageConfig] = field(default_factory=dict)  # in a file: what differs; loaded: all of a stage
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    sample: SampleConfig = field(default_factory=SampleConfig)
    resources: ResourcesConfig = field(default_factory=ResourcesConfig, metadata=NOT_SEMANTIC)
    tracking: TrackingConfig = field(default_factory=TrackingConfig, metadata=NOT_SEMANTIC)


# ---- what each node gets ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class UserImages:
    """Images that fit, and what is done with them. Picklable."""

    node: str  # SAMPLE_IMAGES or SCORE_IMAGES
    keys: tuple[str, ...]
    values: np.ndarray  # uint8 [N, h, w, 3] of `num_bits` bits
    num_bits: int
    stages: tuple[str, ...]  # to be run, in order
    num_fitted: int = 0  # of the images, those that were cropped or resized

    @property
    def digests(self) -> dict[str, str]:
        """By key: of each image's values, whatever its file is called."""
        found = (hashlib.sha256(value.tobytes()).hexdigest()[:16] for value in self.values)
        return dict(zip(self.keys, found, strict=True))

    @property
    def digest(self) -> str:
        parts = [str(self.num_bits), *(f"{key} {digest}" for key, digest in self.digests.items())]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def describe(self, *, num_draws: int) -> str:
        """One line: how many images, and what is made of them."""
        count = f"{len(self.keys)} image{'s' if len(self.keys) > 1 else ''}"
        count += f" ({self.num_fitted} cropped and resized)" if self.num_fitted else ""
        if self.node == SCORE_IMAGES:
            return f"{count} to score at {self.num_bits} bits per channel"
        draws = f"{num_draws} draw{'s' if num_draws > 1 else ''} each"
        return f"{count} at {self.num_bits} bits per channel, {draws} by {', '.join(self.stages)}"


@dataclass(frozen=True, kw_only=True)
class PrepareDataNodeConfig:
    data: DataConfig
    listing_hash: str = field(metadata=NOT_SEMANTIC)  # of the images that the launch found, the node's source
    num_cpus: float = field(metadata=NOT_SEMANTIC)  # per task, that is, per shard


@dataclass(frozen=True, kw_only=True)
class TrainNodeConfig:
    stage: str
    model: SPNConfig
    train: TrainConfig  # without init_from
    init_from: str | None = field(default=None, metadata=NOT_SEMANTIC)  # its weights are the node's source
    stored_bits: int  # bit depth of the Parquet files that are read
    seed: int
    valid_seed: int  # decides the validation images
    first_given: bool = False  # the chain takes slice (0, 0) from elsewhere
    resources: NodeResources = field(metadata=NOT_SEMANTIC)
    samples: TrainingSamples | None = field(default=None, metadata=NOT_SEMANTIC)


@dataclass(frozen=True, kw_only=True)
class EvaluateNodeConfig(EvaluateConfig):
    """Of the nodes evaluate and score_images."""

    stages: tuple[str, ...]  # in chain order
    dataset: str = ""  # evaluate: its id, which the results name
    resources: NodeResources = field(metadata=NOT_SEMANTIC)
    images: UserImages | None = field(default=None, metadata=NOT_SEMANTIC, compare=False)  # `source` is their digest


@dataclass(frozen=True, kw_only=True)
class SampleNodeConfig(SampleConfig):
    """Of the nodes sample and sample_images."""

    stages: tuple[str, ...]  # those that draw, in chain order
    resources: NodeResources = field(metadata=NOT_SEMANTIC)
    images: UserImages | None = field(default=None, metadata=NOT_SEMANTIC, compare=False)  # `source` is their digest


@dataclass(frozen=True, kw_only=True)
class ReportNodeConfig:
    name: str
    preset: str | None  # None: the config is a file of the user
    stages: tuple[str, ...]
    yaml: str  # the settings that decide results


# ---- stages and nodes -------------------------------------------------------------------------------------------


def stage_kind(stage: str) -> str:
    """The network of a concrete stage: depth_upscale_3 -> depth_upscale."""
    return "depth_upscale" if stage.startswith("depth_upscale_") else stage


def concrete_stages(stages: Sequence[str], bits: Sequence[int]) -> list[str]:
    """In chain order: one depth_upscale, or a depth_upscale_<bits> for each further bit depth."""
    names = []
    for kind in STAGES:
        if kind in stages:
            names += [f"{kind}_{d}" for d in bits[1:]] if kind == "depth_upscale" and len(bits) > 2 else [kind]
    return names


def stage_names(config: ExperimentConfig) -> list[str]:
    return concrete_stages(config.stages, config.bits)


def stage_model_config(config: ExperimentConfig, stage: str) -> SPNConfig:
    """The network of one of `stage_names(config)`."""
    model = config.per_stage[stage].model
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
    """The training of one of `stage_names(config)`. What it does not read has its default: a change trains nothing."""
    train = config.per_stage[stage].train
    reads = {
        "adamw_learning_rate": train.optimizer == "muon",
        "weight_decay": train.optimizer != "rmsprop",
        "cooldown": train.schedule == "linear",
        "slices": stage == "first_slice",
    }
    unread: dict[str, Any] = {f.name: f.default for f in dataclasses.fields(train) if not reads.get(f.name, True)}
    return dataclasses.replace(train, **unread)


def train_node(stage: str) -> str:
    return f"train_{stage}"


def node_names(stages: Sequence[str]) -> list[str]:
    """The pipeline's nodes in running order, for concrete stages."""
    return ["prepare_data", *(train_node(stage) for stage in stages), "evaluate", "sample", "report"]


def settable_resources(node: str) -> list[str]:
    """Keys that `resources.per_node.<node>` may have: those with an effect on it."""
    keys = ["cpus_per_worker", "max_failures", "retry_wait_sec"]
    if node.startswith("train_") or node in ("evaluate", "sample"):
        keys += ["num_workers", "use_gpu", "gpus_per_worker"]
    return [*keys, "num_to_keep"] if node.startswith("train_") else keys


# ---- rules between fields (those of one field are checked by its dataclass) ------------------------------------------


def broken_rules(config: ExperimentConfig) -> Iterator[str]:
    """A message per broken rule; later rules may rely on earlier ones."""
    c, size = config, config.data.image_size
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{,99}", c.name):
        yield f"name is {c.name!r}; it becomes a folder: at most 100 letters, digits, '.', '_' and '-'"
    if not 0 <= c.seed < 2**63:
        yield f"seed is {c.seed}; it must be at least 0 and below 2**63"
    if c.image_bits is not None and not 1 <= c.image_bits <= 8:
        yield f"image_bits is {c.image_bits}; it must be from 1 to 8, or null"
    if c.image_fit not in ("data", "exact"):
        yield f"image_fit is {c.image_fit!r}; it must be data or exact"
    of_images = {f"sample.{key}": value for key, value in c.sample.set_for_images().items()}
    of_images |= {"image_bits": c.image_bits, "image_fit": c.image_fit}
    for key, value in of_images.items():
        if c.images is None and value not in (None, "data"):
            yield f"{key} is {value}, but images is not set; images=FILE says which images"
    for stage in c.stages:
        if stage not in STAGES:
            yield f"stages: unknown stage {stage!r}; {nearest(stage, STAGES)}"
    chosen = tuple(kind for kind in STAGES if kind in c.stages)
    if chosen not in SYSTEMS or len(c.stages) != len(chosen):
        allowed = ", ".join(f"[{', '.join(system)}]" for system in SYSTEMS)
        yield f"stages is [{', '.join(c.stages)}]; allowed: {allowed}"
    if not all(1 <= bits <= 8 for bits in c.bits):
        yield f"bits is {c.bits}; each must be from 1 to 8"
    if not c.bits or c.bits != sorted(set(c.bits)):
        yield f"bits is {c.bits}; it must rise from entry to entry, e.g. [3, 8]"
    if "depth_upscale" in chosen and len(c.bits) < 2:
        yield f"bits is {c.bits}; depth_upscale needs at least two entries, e.g. [3, 8]"
    if "depth_upscale" not in chosen and len(c.bits) > 1:
        yield f"bits is {c.bits}; without depth_upscale in stages it has one entry, e.g. [8]"
    if "baseline" in chosen and c.scaling_factor != 1:
        yield f"scaling_factor is {c.scaling_factor}; the baseline models the image whole: scaling_factor=1"
    if "baseline" not in chosen and c.scaling_factor < 2:
        yield f"scaling_factor is {c.scaling_factor}; slices need at least 2 (or baseline in stages)"
    if size % c.scaling_factor:
        near = max(size // c.scaling_factor, 1) * c.scaling_factor
        yield f"data.image_size is {size}; scaling_factor, {c.scaling_factor}, must divide it (nearest: {near})"
    for stage in stage_names(c):
        batch, workers = c.per_stage[stage].train.batch_size, c.resources.per_node[train_node(stage)].num_workers
        if batch % workers:
            own = workers != c.resources.num_workers
            key = f"resources.per_node.{train_node(stage)}.num_workers" if own else "resources.num_workers"
            where = f" (stage {stage})" if batch != c.train.batch_size else ""
            yield f"train.batch_size is {batch}; {key}, {workers}, must divide it{where}"
    if c.sample.decoder == "fused" and not c.resources.per_node["sample"].use_gpu:
        yield "sample.decoder is 'fused', which needs a GPU; set resources.use_gpu=true, or sample.decoder=auto"
