"""What a node is, what its function gets and returns, and what the engine asks of experiment tracking.

Node functions import from here and from nowhere else in the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from data_prep.files import join

if TYPE_CHECKING:
    from pipelines.dag.progress import Reporter

ConfigT = TypeVar("ConfigT")
KEEP, EXTEND = "keep", "extend"  # a finished output under another config: it is as good, or the node can start from it


@dataclass(frozen=True)
class Node:
    """One step of the pipeline. A retry or a later start continues its newest unfinished attempt in the same folder."""

    name: str
    function: str  # "package.module:function", imported inside the task
    needs: tuple[str, ...] = ()  # names of upstream nodes
    config: Any = field(default_factory=dict)  # frozen dataclass; what is not "semantic": False is fingerprinted
    # Upstream node -> patterns of the files that this node reads of it, as "<output's name>/<path inside>" (fnmatch).
    # Only these enter the fingerprint; a node that is not named here is read as a whole.
    reads: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    modules: tuple[str, ...] = ()  # modules that the function imports by name: their code counts too
    source: str = ""  # hash of the listing of external files that the node reads
    num_cpus: float = 1  # of the coordinating task itself
    num_gpus: float = 0
    cost: Mapping[str, float] = field(default_factory=dict)  # all that the node occupies, its workers included
    max_failures: int = 0  # how often it is retried after an infrastructure fault
    retry_wait_sec: float = 0.0  # before the first retry; doubles with each further one
    unreadable: str = ""  # why the external files cannot be listed: then any output of this config stays valid
    # (config of a finished output, present config) -> KEEP, EXTEND, why neither, or "": no relation.
    reuse: Callable[[Mapping[str, Any], Mapping[str, Any]], str] | None = None
    tags: Mapping[str, str] = field(default_factory=dict)  # more tags of its tracked run, e.g. {"stage": ...}

    def __post_init__(self) -> None:
        assert self.name.isidentifier(), f"{self.name!r} must be an identifier: it names folders and tracked runs"
        assert self.function.count(":") == 1, f"{self.function!r} must be module:function"

    @property
    def module(self) -> str:
        return self.function.split(":")[0]

    @property
    def total_cost(self) -> dict[str, float]:
        """Resources that the node occupies while it runs."""
        total = {"CPU": self.num_cpus, "GPU": self.num_gpus, **self.cost}
        return {name: amount for name, amount in total.items() if amount > 0}


@dataclass(frozen=True)
class NodeOutput:
    """A finished attempt, as downstream nodes see it."""

    uri: str  # the attempt's folder
    named: Mapping[str, str]  # name -> path relative to uri
    attempt: str
    mlflow_run_id: str | None = None

    def place(self, name: str) -> str:
        """Path or URI of an output."""
        return join(self.uri, self.named[name])


@dataclass(frozen=True)
class NodeContext(Generic[ConfigT]):
    """All that a node function knows. Picklable."""

    node: str
    fingerprint: str
    attempt: str
    config: ConfigT
    inputs: Mapping[str, NodeOutput]  # by upstream node
    out: str  # absolute path or URI of the attempt's folder, which exists if local
    run: Any  # the tracked run, picklable: open() gives what set_tags and the node functions log to; run_id, or None
    progress: Reporter
    extends: NodeOutput | None = None  # a finished output to start from
    restarts: int = 0  # how often it was started before under the same fingerprint without finishing


@dataclass(frozen=True)
class Picture:
    """A PNG file that the tracker is to show."""

    path: str  # relative to out
    key: str
    step: int = 0
    run_id: str | None = None  # of another node; None: of the node itself


@dataclass(frozen=True)
class NodeResult:
    """What a node function returns."""

    outputs: Mapping[str, str]  # name -> path relative to out; a folder stands for all files below it
    metrics: Mapping[str, float] = field(default_factory=dict)
    sha256: Mapping[str, str] = field(default_factory=dict)  # relative path -> digest, where the node knows it already
    pictures: Sequence[Picture] = ()


class Tracker(Protocol):
    """Records one run per node. No call raises when the tracking server is down."""

    def start_node(self, node: str, *, tags: Mapping[str, str], params: Any, continue_id: str | None = None) -> Any:
        """The node's run, as nodes get it: it has a run_id and open()."""

    def reuse_node(self, node: str, *, tags: Mapping[str, str], reused_run: str | None) -> None: ...

    def show(self, node: str, picture: Picture, png: bytes) -> None: ...

    def finish(
        self,
        node: str,
        status: str,
        *,
        metrics: Mapping[str, float] | None = None,
        history: Sequence[Mapping[str, float]] = (),
    ) -> str | None:
        """history: the node's output of this name, all points that it measured. Returns the run's id if it is known.

        status: FINISHED, FAILED or KILLED, which must not wait for a server.
        """
