"""What a node is, what its function gets and what it returns. Node functions import from here and from nowhere else in
the engine, so that a change of the engine does not change their fingerprints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipelines.dag.progress import Reporter
    from pipelines.tracking import RunHandle


@dataclass(frozen=True)
class Node:
    """One step of the pipeline."""

    name: str
    function: str  # "package.module:function", imported inside the task
    needs: tuple[str, ...] = ()  # names of upstream nodes
    config: Any = field(default_factory=dict)  # frozen dataclass; what is not "semantic": False is fingerprinted
    options: Mapping[str, Any] = field(default_factory=dict)  # resources, paths, logging: never in the fingerprint
    source: str = ""  # hash of the listing of files from outside that the node reads
    num_cpus: float = 1  # of the coordinating task itself
    num_gpus: float = 0
    cost: Mapping[str, float] = field(default_factory=dict)  # all it takes, workers included; {}: the task's own
    num_workers: int = 0  # processes beside the task's own, each of which must fit on one machine
    worker_cost: Mapping[str, float] = field(default_factory=dict)  # what each of them takes
    max_failures: int = 0  # times it starts again after a fault of the infrastructure
    retry_wait_sec: float = 0.0  # before the first of these; doubles from time to time
    resumable: bool = False  # continues its newest unfinished attempt
    tags: Mapping[str, str] = field(default_factory=dict)  # more tags of its MLflow run, e.g. {"stage": ...}

    def __post_init__(self) -> None:
        assert self.name.isidentifier(), f"{self.name!r} must be an identifier: it names folders and MLflow runs"
        assert self.function.count(":") == 1, f"{self.function!r} must be module:function"

    @property
    def module(self) -> str:
        return self.function.split(":")[0]

    @property
    def total_cost(self) -> dict[str, float]:
        """Resources that the scheduler sets aside while the node runs."""
        own = {"CPU": self.num_cpus, "GPU": self.num_gpus}
        return {name: amount for name, amount in dict(self.cost or own).items() if amount > 0}


@dataclass(frozen=True)
class NodeOutput:
    """A finished attempt, as nodes below see it."""

    uri: str  # the attempt's folder
    named: Mapping[str, str]  # name -> path relative to uri
    metrics: Mapping[str, float]
    attempt: str  # the output's id
    mlflow_run_id: str | None = None


@dataclass(frozen=True)
class NodeContext:
    """All that a node function knows. Picklable."""

    node: str
    fingerprint: str
    attempt: str
    config: Any
    options: Mapping[str, Any]
    inputs: Mapping[str, NodeOutput]  # by upstream node
    out: str  # absolute path or URI of the attempt's folder, which exists if local
    run: RunHandle
    progress: Reporter
    fresh: bool  # False: continues an unfinished attempt, whose files are still in `out`
    restarts: int = 0  # times that it was started before with the same fingerprint and did not end well


@dataclass(frozen=True)
class NodeResult:
    """What a node function returns."""

    outputs: Mapping[str, str]  # name -> path relative to out; a folder means all files below
    metrics: Mapping[str, float] = field(default_factory=dict)
    sha256: Mapping[str, str] = field(default_factory=dict)  # relative path -> digest where the node knows it already
