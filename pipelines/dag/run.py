"""Runs a plan: nodes as Ray tasks, side by side where resources allow, scheduled from the driver.

The driver hands out paths and ids only. A node that a fault of the infrastructure ended (its process, its machine or
storage went away) starts again after a while, and goes on where it can. A failed node stops what depends on it; the
others go on.
"""

from __future__ import annotations

import contextlib
import json
import posixpath
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from data_prep.files import Store
from data_prep.lock import Lock
from pipelines.cluster import ClusterInfo
from pipelines.dag import attempts, fingerprint
from pipelines.dag.attempts import Success
from pipelines.dag.faults import is_infrastructure
from pipelines.dag.git import git_commit
from pipelines.dag.masking import mask
from pipelines.dag.node import Node, NodeOutput
from pipelines.dag.plan import KEEP, NOT_SELECTED, RUN, SKIP, WAIT, Decision, Plan, decide
from pipelines.dag.progress import Hub, LiveDisplay, PlainDisplay, clock
from pipelines.dag.task import Outcome, adopt, execute, make_task, one_line
from pipelines.ledger import Ledger
from pipelines.tracking import RunHandle

EXECUTED, SKIPPED, FAILED, BLOCKED = "executed", "skipped", "failed", "blocked"
MAX_CALLS = 1  # nodes a process serves: with one, its memory and its global state go when the node ends
_POLL_SEC = 0.5
_LONGEST_WAIT_SEC = 300.0  # between two tries of a node
_CANCEL_SEC = 1.0  # Ray kills a stopped job 3 s after SIGTERM, and there is more to do in that time


class Stopped(KeyboardInterrupt):
    """The start was told to end (SIGTERM), or lost its lock."""


@dataclass(frozen=True)
class NodeReport:
    """How one node ended. Plain values."""

    state: str  # executed | skipped | failed | blocked | not selected
    attempt: str | None = None
    uri: str | None = None  # of the attempt's folder
    metrics: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    mlflow_run_id: str | None = None  # of the run that made the output
    error: str = ""  # failed: one line; blocked: what it waited for
    mistaken: bool = False  # failed by a mistake of the user's, which `error` tells


@dataclass(frozen=True)
class RunReport:
    """How a start ended."""

    nodes: Mapping[str, NodeReport]

    @property
    def ok(self) -> bool:
        return not any(node.state in (FAILED, BLOCKED) for node in self.nodes.values())

    def named(self, state: str) -> list[str]:
        return [name for name, node in self.nodes.items() if node.state == state]


def run(
    plan: Plan,
    *,
    cluster: ClusterInfo,
    ledger: Ledger,
    display: PlainDisplay | LiveDisplay,
    lock: Lock | None = None,
) -> RunReport:
    """Carries out a plan in the connected Ray session; the ledger's pipeline run must be open and is not closed here.

    Raises UserError before anything starts if a node can never fit into the cluster. On KeyboardInterrupt and SIGTERM
    it cancels the tasks, closes their MLflow runs as KILLED and raises on.
    """
    check_fits(plan, cluster)
    engine = _Engine(plan, cluster, ledger, display, lock)
    with _sigterm_stops():
        try:
            return engine.run()
        except BaseException:
            engine.cancel()
            raise
        finally:
            engine.hub.close()


def check_fits(plan: Plan, cluster: ClusterInfo) -> None:
    """Raises UserError if a node that is to run can never get what it takes."""
    for decision in plan.decisions:
        if decision.action in (RUN, WAIT):
            node = decision.node
            own = {"CPU": node.num_cpus, "GPU": node.num_gpus}
            need = {name: max(own.get(name, 0), amount) for name, amount in node.total_cost.items()}
            each = node.worker_cost if node.num_workers else own
            cluster.check_fits(node.name, need, num_workers=max(node.num_workers, 1), each=each)


@dataclass
class _Running:
    decision: Decision
    handle: RunHandle
    attempt: str
    since: float
    failures: int  # of the infrastructure, in this start, before this try


@dataclass(frozen=True)
class _Retry:
    """A node that waits to be started again."""

    decision: Decision
    handle: RunHandle
    failures: int
    due: float  # time.monotonic()


class _Engine:
    """State of one start."""

    def __init__(
        self,
        plan: Plan,
        cluster: ClusterInfo,
        ledger: Ledger,
        display: PlainDisplay | LiveDisplay,
        lock: Lock | None,
    ) -> None:
        import ray

        self.ray = ray
        self.plan, self.cluster, self.ledger, self.display, self.lock = plan, cluster, ledger, display, lock
        self.hub = Hub()
        self.commit = git_commit()
        self.remote = ray.remote(max_retries=0, max_calls=MAX_CALLS)(execute)
        self.running: dict[Any, _Running] = {}
        self.retries: dict[str, _Retry] = {}
        self.taken: dict[str, float] = {}
        self.reports: dict[str, NodeReport] = {}
        self.outputs: dict[str, NodeOutput] = {}

    def run(self) -> RunReport:
        for decision in self.plan.decisions:
            if decision.action == NOT_SELECTED:
                self._have(decision.node.name, decision.success, NOT_SELECTED)
        while len(self.reports) < len(self.plan.decisions):
            if self.lock is not None and self.lock.lost:
                raise Stopped(f"another start took over {self.plan.store.uri}")
            for decision in self.plan.decisions:
                self._advance(decision)
            if self.running:
                ready, _ = self.ray.wait(list(self.running), num_returns=1, timeout=_POLL_SEC)
                for reference in ready:
                    self._collect(reference)
            elif self.retries:
                time.sleep(_POLL_SEC)
            self.display.show({name: update for name, update in self.hub.poll().items() if name in self._active()})
        return RunReport({name: self.reports[name] for name in self.plan.names})

    def cancel(self) -> None:
        """Ends all tasks (first asking, then killing their processes, with all they started)."""
        for reference in self.running:
            with contextlib.suppress(Exception):
                self.ray.cancel(reference, force=False)
        if self.running:
            _, alive = self.ray.wait(list(self.running), num_returns=len(self.running), timeout=_CANCEL_SEC)
            for reference in alive:
                with contextlib.suppress(Exception):
                    self.ray.cancel(reference, force=True)
        for running in self.running.values():
            self.ledger.finish(running.handle, "KILLED")
            self.display.line(f"[{running.decision.node.name}] stopped; attempt {running.attempt} is unfinished")
        self.running.clear()
        for retry in self.retries.values():
            self.ledger.finish(retry.handle, "KILLED")
        self.retries.clear()

    def _active(self) -> set[str]:
        return {running.decision.node.name for running in self.running.values()}

    def _advance(self, decision: Decision) -> None:
        """Starts, skips or blocks a node if its time has come."""
        node = decision.node
        if node.name in self.reports or node.name in self._active():
            return
        broken = [need for need in node.needs if self._is_broken(need)]
        if broken:
            self.reports[node.name] = NodeReport(BLOCKED, error=f"needs {broken[0]}")
            self.display.line(f"[{node.name}] not started: it needs {broken[0]}")
            return
        if decision.action == SKIP:
            assert decision.success is not None
            self._reuse(decision, decision.success)
            return
        if any(need not in self.outputs for need in node.needs) or not self._fits(node):
            return
        if node.name in self.retries:
            if time.monotonic() >= self.retries[node.name].due:
                retry = self.retries.pop(node.name)
                self._submit(retry.decision, failures=retry.failures)
            return
        if decision.fingerprint is None:  # now the ids of what it is made from are known
            why = decision.reason
            upstream = {need: self.outputs[need].attempt for need in node.needs}
            decision = decide(node, upstream, self.plan)
            decision = decision if decision.action != RUN else replace(decision, reason=why)
        if decision.action == RUN:
            self._submit(decision)
        elif decision.action == KEEP:
            self._keep(decision)
        else:
            assert decision.success is not None
            self._reuse(decision, decision.success)

    def _is_broken(self, need: str) -> bool:
        return need in self.reports and self.reports[need].state in (FAILED, BLOCKED)

    def _fits(self, node: Node) -> bool:
        cost = node.total_cost.items()
        return all(self.taken.get(name, 0) + amount <= self.cluster.budget(name) + 1e-9 for name, amount in cost)

    def _submit(self, decision: Decision, *, failures: int = 0) -> None:
        node, store = decision.node, self.plan.store
        assert decision.fingerprint is not None and decision.ingredients is not None
        attempt = decision.attempt or attempts.new_attempt_id(decision.known_attempts)
        folder = attempts.attempt_folder(node.name, decision.fingerprint, attempt)
        before = _started(store, decision, decision.follows) if decision.follows else {}
        starts = before.get("starts", [])
        handle = self.ledger.start_node(
            node.name,
            tags=self._tags(decision, attempt),
            params=node.config,
            continue_id=before.get("mlflow_run_id"),
        )
        now = attempts.utc_now()
        started = {
            "node": node.name,
            "started": before.get("started") or now,
            "starts": [*starts, now],
            "ingredients": decision.ingredients,
            "mlflow_run_id": handle.reference,
            "lock": self.lock.token if self.lock is not None else None,  # whose work it is, whatever the clocks say
        }
        store.write_bytes(posixpath.join(folder, attempts.STARTED), json.dumps(started, indent=1).encode())
        task = make_task(
            decision,
            attempt=attempt,
            store=store,
            outputs=self.outputs,
            run=handle,
            progress=self.hub.reporter(node.name),
            git_commit=self.commit,
            restarts=len(starts),
        )
        options = {"name": f"node:{node.name}", "num_cpus": node.num_cpus, "num_gpus": node.num_gpus}
        reference = self.remote.options(**options).remote(task)
        self.running[reference] = _Running(decision, handle, attempt, time.monotonic(), failures)
        for name, amount in node.total_cost.items():
            self.taken[name] = self.taken.get(name, 0) + amount
        self.display.line(f"[{node.name}] starts: {decision.reason}")

    def _collect(self, reference: Any) -> None:
        running = self.running.pop(reference)
        node = running.decision.node
        for name, amount in node.total_cost.items():
            self.taken[name] -= amount
        folder = attempts.attempt_folder(node.name, running.decision.fingerprint or "", running.attempt)
        try:
            outcome: Outcome = self.ray.get(reference)
        except self.ray.exceptions.RayError as error:  # its process died: nobody else could write this down
            with contextlib.suppress(OSError):
                text = mask(f"{type(error).__name__}: {error}\n")
                self.plan.store.write_text(posixpath.join(folder, attempts.ERROR), text)
            outcome = Outcome(None, one_line(error), is_infrastructure(error))
        seconds = time.monotonic() - running.since
        self.display.end(node.name)
        if outcome.success is not None:
            self.ledger.finish(running.handle, "FINISHED", metrics=outcome.success.metrics)
            self._have(node.name, outcome.success, EXECUTED, seconds=seconds)
            self.display.line(f"[{node.name}] done in {clock(seconds)}")
            return
        if outcome.lost and running.failures < node.max_failures:
            self._try_again(running, outcome.error)
            return
        self.ledger.finish(running.handle, "FAILED")
        uri = self.plan.store.uri_of(folder)
        self.reports[node.name] = NodeReport(
            FAILED, running.attempt, uri, {}, seconds, running.handle.run_id, outcome.error, outcome.mistaken
        )
        self.display.line(f"[{node.name}] FAILED after {clock(seconds)}: {outcome.error}")
        self.display.line(f"[{node.name}] see {self.plan.store.uri_of(posixpath.join(folder, attempts.ERROR))}")

    def _try_again(self, running: _Running, error: str) -> None:
        """Lets the node wait its time and go on: in the same attempt if it can, in the same MLflow run in any case."""
        node, failures = running.decision.node, running.failures + 1
        wait_sec = min(node.retry_wait_sec * 2 ** (failures - 1), _LONGEST_WAIT_SEC)
        decision = replace(
            running.decision,
            reason=f"try {failures + 1} of {node.max_failures + 1}",
            attempt=running.attempt if node.resumable else None,
            follows=running.attempt,
            known_attempts=(*running.decision.known_attempts, running.attempt),
        )
        self.retries[node.name] = _Retry(decision, running.handle, failures, time.monotonic() + wait_sec)
        self.display.line(f"[{node.name}] lost ({error}); starts again in {wait_sec:g} s")

    def _keep(self, decision: Decision) -> None:
        assert decision.success is not None and decision.fingerprint and decision.ingredients is not None
        parts = decision.ingredients
        why = fingerprint.explain(decision.success.ingredients, parts) or "nothing that can be named"
        record = adopt(self.plan.store, decision.success, fingerprint=decision.fingerprint, ingredients=parts, why=why)
        self._reuse(decision, record)

    def _reuse(self, decision: Decision, success: Success) -> None:
        tags = self._tags(decision, success.attempt)
        if success.adopted:
            tags["adopted"] = success.adopted["in_spite_of"]
        self.ledger.reuse_node(decision.node.name, tags=tags, reused_run=success.mlflow_run_id)
        self._have(decision.node.name, success, SKIPPED)

    def _have(self, name: str, success: Success | None, state: str, *, seconds: float = 0.0) -> None:
        if success is None:
            self.reports[name] = NodeReport(state)
            return
        output = success.output(self.plan.store)
        self.outputs[name] = output
        self.reports[name] = NodeReport(
            state, success.attempt, output.uri, output.metrics, seconds, success.mlflow_run_id
        )

    def _tags(self, decision: Decision, attempt: str) -> dict[str, str]:
        return {
            "stage": decision.node.name,
            "fingerprint": decision.fingerprint or "",
            "code_hash": fingerprint.code_hash(decision.ingredients) if decision.ingredients else "",
            "git_commit": self.commit,
            "attempt": attempt,
            **decision.node.tags,
        }


def _started(store: Store, decision: Decision, attempt: str) -> dict[str, Any]:
    folder = attempts.attempt_folder(decision.node.name, decision.fingerprint or "", attempt)
    try:
        return json.loads(store.read_bytes(posixpath.join(folder, attempts.STARTED)))
    except (FileNotFoundError, ValueError):
        return {}


@contextlib.contextmanager
def _sigterm_stops() -> Iterator[None]:
    """Turns SIGTERM into an exception in the driver's main thread; elsewhere signals cannot be caught."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise Stopped("told to stop (SIGTERM)")

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before if before is not None else signal.SIG_DFL)
