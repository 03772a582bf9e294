"""Carries out a plan: nodes as Ray tasks, side by side where resources allow, scheduled from the driver.

The driver hands out paths and ids only. A node that meets a fault of the infrastructure (its process, its machine or
storage is gone) is retried after a while and resumes where it can. A failed node stops all nodes downstream; the others
run to their end.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from data_prep.files import UserError
from data_prep.lock import Lock
from pipelines.dag import attempts, fingerprint
from pipelines.dag.attempts import Success
from pipelines.dag.node import KEEP, NodeContext, Tracker
from pipelines.dag.plan import NOT_SELECTED, RUN, SKIP, Decision, Plan, decide
from pipelines.dag.progress import Display, Hub, clock
from pipelines.dag.task import Outcome, adopt, execute, failed, one_line

EXECUTED, SKIPPED, FAILED, BLOCKED = "executed", "skipped", "failed", "blocked"
_POLL_SEC = 0.5
_LONGEST_WAIT_SEC = 300.0  # before a retry
_CANCEL_SEC = 1.0  # Ray kills a stopped job 3 s after SIGTERM, and there is more to do in that time
Warm = tuple[Hub, list[Any]]  # and references, of which the last one is ready when the imports are done


class Stopped(KeyboardInterrupt):
    """The launch received SIGTERM, or lost its lock."""


@dataclass(frozen=True)
class NodeReport:
    """How one node ended. Plain values."""

    state: str  # executed | skipped | failed | blocked | not selected
    uri: str | None = None  # of the attempt's folder
    success: Success | None = None  # its output
    error: str = ""  # failed: one line; blocked: which input is missing
    is_user_error: bool = False  # failed because of the user's data or configuration, as `error` says


def shortfalls(decisions: Iterable[Decision], resources: Mapping[str, float], where: str = "the cluster") -> list[str]:
    """One line for each node that is sure to run and needs more than the `resources` of `where`."""
    return [
        f"{decision.node.name} needs {amount:g} {resource}, {where} has {resources.get(resource, 0):g} {resource}"
        for decision in decisions
        if decision.action == RUN
        for resource, amount in decision.node.total_cost.items()
        if amount > resources.get(resource, 0) + 1e-9
    ]


def refuse(decisions: Iterable[Decision], capacity: Mapping[str, float] | None) -> None:
    """Raises UserError for a node that is sure to run and never fits; without `capacity` every node may fit one day."""
    for shortfall in () if capacity is None else shortfalls(decisions, capacity, "this session"):
        has_none = shortfall.endswith(" 0 GPU")
        raise UserError(f"{shortfall}; {'set use_gpu=false' if has_none else 'ask for fewer or smaller workers'}")


def warm_up(plan: Plan) -> Warm:
    """Starts the hub, and in an idle process of the Ray session the imports of the first node. They take seconds, in
    which the driver opens MLflow. The node gets that process: Ray takes the one that became idle last."""
    import ray

    hub, first = Hub(), [decision.node for decision in plan.decisions if decision.action == RUN][:1]
    hub.reporter("")
    return hub, [ray.remote(num_cpus=0)(_import).remote(node.module) for node in first]


def _import(module: str) -> None:
    with contextlib.suppress(Exception):  # the node itself will say so
        importlib.import_module(module)


def run(
    plan: Plan,
    *,
    tracker: Tracker,
    display: Display,
    capacity: Mapping[str, float] | None,
    git_commit: str = "unknown",
    lock: Lock | None = None,
    warm: Warm | None = None,
) -> dict[str, NodeReport]:
    """Carries out a plan in the connected Ray session. Returns how each node ended.

    capacity: resources that nodes share while they run side by side; None submits every node that is ready, and Ray's
    queue decides. warm: what `warm_up` returned. The tracker's pipeline run must be open and is not closed here. On
    KeyboardInterrupt and SIGTERM the tasks are cancelled, their tracked runs end as KILLED and the exception is raised
    again.
    """
    engine = _Engine(plan, tracker, display, capacity, git_commit, lock, *(warm or (Hub(), [])))
    with _sigterm_raises():
        try:
            return engine.run()
        except BaseException:
            engine.cancel()
            raise
        finally:
            engine.hub.close()


@dataclass(frozen=True)
class _Try:
    """One try of a node: it runs, or waits to be retried."""

    decision: Decision
    attempt: str
    since: float  # time.monotonic() of its start; of a retry: when it is due
    faults: int = 0  # of the infrastructure, in this launch, before it


@dataclass
class _Engine:
    """State of one launch."""

    plan: Plan
    tracker: Tracker
    display: Display
    capacity: Mapping[str, float] | None
    git_commit: str
    lock: Lock | None
    hub: Hub
    imports: list[Any]  # nodes start after them
    running: dict[Any, _Try] = field(default_factory=dict)  # by Ray's reference
    retries: dict[str, _Try] = field(default_factory=dict)
    decided: dict[str, Decision] = field(default_factory=dict)  # once what they read is known
    reports: dict[str, NodeReport] = field(default_factory=dict)

    def __post_init__(self) -> None:
        import ray

        self.ray = ray

    def run(self) -> dict[str, NodeReport]:
        for decision in self.plan.decisions:
            if decision.action == NOT_SELECTED:
                self._finish(decision.node.name, decision.success, NOT_SELECTED)
        while len(self.reports) < len(self.plan.decisions):
            if self.lock is not None and self.lock.lost:
                raise Stopped(f"another start took over {self.plan.store.uri}")
            for decision in self.plan.decisions:
                try:
                    self._advance(decision)
                except (OSError, UserError) as error:  # storage fails, or the node never fits: the others run on
                    self._fail(decision.node.name, error)
            if self.running:
                ready, _ = self.ray.wait(list(self.running), num_returns=1, timeout=_POLL_SEC)
                updates = self.hub.poll().items()  # before those that are ready end, so that their last one is seen
                self.display.show({name: update for name, update in updates if name in self._active()})
                for reference in ready:
                    self._collect(reference)
            elif len(self.reports) < len(self.plan.decisions):
                time.sleep(_POLL_SEC)
        return {name: self.reports[name] for name in self.plan.names}

    @property
    def made(self) -> dict[str, Success]:
        """Outputs that are there."""
        return {name: report.success for name, report in self.reports.items() if report.success is not None}

    def cancel(self) -> None:
        """Ends all tasks: first asks them to, then kills their processes with all that they started."""
        for reference in self.running:
            with contextlib.suppress(Exception):
                self.ray.cancel(reference, force=False)
        if self.running:
            _, alive = self.ray.wait(list(self.running), num_returns=len(self.running), timeout=_CANCEL_SEC)
            for reference in alive:
                with contextlib.suppress(Exception):
                    self.ray.cancel(reference, force=True)
        for running in self.running.values():
            self.display.line(f"[{running.decision.node.name}] stopped; attempt {running.attempt} is unfinished")
        for name in self._active() | self.retries.keys():
            self.tracker.finish(name, "KILLED")

    def _active(self) -> set[str]:
        return {running.decision.node.name for running in self.running.values()}

    def _advance(self, decision: Decision) -> None:
        """Starts, skips or blocks a node if that can be done now."""
        node = decision.node
        if node.name in self.reports or node.name in self._active():
            return
        broken = [n for n in node.needs if n in self.reports and self.reports[n].state in (FAILED, BLOCKED)]
        if broken:
            self.reports[node.name] = NodeReport(BLOCKED, error=f"needs {broken[0]}")
            self.display.line(f"[{node.name}] not started: it needs {broken[0]}")
            return
        if any(need not in self.made for need in node.needs):
            return
        if node.name in self.retries:
            if time.monotonic() >= self.retries[node.name].since and self._has_room(decision):
                retry = self.retries.pop(node.name)
                self._submit(retry.decision, faults=retry.faults)
            return
        if decision.fingerprint is None:  # now it is known what the node reads
            if node.name not in self.decided:
                self.decided[node.name] = self._decide(decision)
            decision = self.decided[node.name]
        if decision.action == RUN:
            refuse([decision], self.capacity)
            if self._has_room(decision):
                self._submit(decision)
        elif decision.action == KEEP:
            self._keep(decision)
        else:
            self._reuse(decision)

    def _decide(self, decision: Decision) -> Decision:
        node = decision.node
        decided = decide(node, {need: self.made[need] for need in node.needs}, self.plan)
        if decided.action == SKIP:
            self.display.line(f"[{node.name}] skipped: {decided.reason}")
        elif decided.action == RUN and decision.action == RUN and decided.attempt is None:
            decided = replace(decided, reason=decision.reason)
        return decided

    def _fail(self, name: str, error: Exception) -> None:
        """A node that could not be started."""
        self.tracker.finish(name, "FAILED")
        self.retries.pop(name, None)
        self.reports[name] = NodeReport(FAILED, error=one_line(error), is_user_error=isinstance(error, UserError))
        self.display.line(f"[{name}] FAILED: {one_line(error)}")

    def _has_room(self, decision: Decision) -> bool:
        if self.capacity is None:
            return True
        taken = [running.decision.node.total_cost for running in self.running.values()]
        return all(
            amount + sum(cost.get(name, 0) for cost in taken) <= self.capacity.get(name, 0) + 1e-9
            for name, amount in decision.node.total_cost.items()
        )

    def _submit(self, decision: Decision, *, faults: int = 0) -> None:
        node, store = decision.node, self.plan.store
        assert decision.fingerprint is not None and decision.ingredients is not None
        attempt = decision.attempt or attempts.new_attempt_id(store, node.name)
        out = store.sub(attempts.attempt_folder(node.name, decision.fingerprint, attempt))
        before: dict[str, Any] = {}
        if decision.attempt:
            with contextlib.suppress(FileNotFoundError, ValueError):
                before = json.loads(out.read_bytes(attempts.STARTED))
        starts = before.get("starts", [])
        handle = self.tracker.start_node(
            node.name,
            tags=self._tags(decision, attempt),
            params=node.config,
            continue_id=before.get("mlflow_run_id"),
        )
        started = {
            "starts": [*starts, attempts.utc_now()],  # the first, and after each interruption
            "ingredients": decision.ingredients,
            "mlflow_run_id": handle.run_id,
            "lock": self.lock.token if self.lock is not None else None,  # whose work it is
        }
        out.write_text(attempts.STARTED, json.dumps(started, indent=1))
        context = NodeContext[Any](
            node=node.name,
            fingerprint=decision.fingerprint,
            attempt=attempt,
            config=node.config,
            inputs={need: self.made[need].output(store) for need in node.needs},
            out=out.uri,
            run=handle,
            progress=self.hub.reporter(node.name),
            extends=decision.extends.output(store) if decision.extends else None,
            restarts=len(starts),
        )
        # The next node may use the process, whose imports take seconds. After a GPU's node Ray ends it: memory is free.
        remote = self.ray.remote(max_retries=0, num_cpus=node.num_cpus, num_gpus=node.num_gpus)(execute)
        named = remote.options(name=f"node:{node.name}")
        reference = named.remote(node.function, context, decision.ingredients, self.git_commit, *self.imports)
        self.running[reference] = _Try(decision, attempt, time.monotonic(), faults)
        self.display.line(f"[{node.name}] starts: {decision.reason}")

    def _collect(self, reference: Any) -> None:
        running = self.running.pop(reference)
        node, made_by = running.decision.node, running.decision.fingerprint or ""
        out = self.plan.store.sub(attempts.attempt_folder(node.name, made_by, running.attempt))
        try:
            outcome: Outcome = self.ray.get(reference)
        except self.ray.exceptions.RayError as error:  # its process died and could not write error.txt itself
            outcome = failed(out, error, f"{type(error).__name__}: {error}\n")
        seconds = time.monotonic() - running.since
        self.display.end(node.name)
        if outcome.success is not None:
            for picture in outcome.pictures:  # by the driver, which has opened MLflow anyway
                with contextlib.suppress(OSError):
                    self.tracker.show(node.name, picture, out.read_bytes(picture.path))
            self._finish(node.name, self._recorded(outcome.success), EXECUTED)
            self.display.line(f"[{node.name}] done in {clock(seconds)}")
        elif outcome.is_fault and running.faults < node.max_failures:
            self._retry_later(running, outcome.error)
        else:
            self.tracker.finish(node.name, "FAILED")
            self.reports[node.name] = NodeReport(FAILED, out.uri, None, outcome.error, outcome.is_user_error)
            self.display.line(f"[{node.name}] FAILED after {clock(seconds)}: {outcome.error}")
            self.display.line(f"[{node.name}] see {out.uri_of(attempts.ERROR)}")

    def _recorded(self, success: Success) -> Success:
        """Ends the tracked run. Returns the success with its id, which the task did not know if the tracking server
        could not open the run at the node's start."""
        history = []
        if "history" in success.named:
            with contextlib.suppress(OSError, ValueError):  # storage may be down; the work is done all the same
                history = json.loads(self.plan.store.sub(success.folder).read_bytes(success.named["history"]))
        run_id = self.tracker.finish(success.node, "FINISHED", metrics=success.metrics, history=history)
        return replace(success, mlflow_run_id=success.mlflow_run_id or run_id)

    def _retry_later(self, running: _Try, error: str) -> None:
        """The retry continues the same attempt and the same tracked run."""
        node, faults = running.decision.node, running.faults + 1
        wait_sec = min(node.retry_wait_sec * 2 ** (faults - 1), _LONGEST_WAIT_SEC)
        reason = f"try {faults + 1} of {node.max_failures + 1}"
        decision = replace(running.decision, reason=reason, attempt=running.attempt)
        self.retries[node.name] = replace(running, decision=decision, since=time.monotonic() + wait_sec, faults=faults)
        self.display.line(f"[{node.name}] lost ({error}); retries in {wait_sec:g} s")

    def _keep(self, decision: Decision) -> None:
        assert decision.success is not None and decision.fingerprint and decision.ingredients is not None
        parts = decision.ingredients
        why = fingerprint.explain(decision.success.ingredients, parts)
        record = adopt(self.plan.store, decision.success, fingerprint=decision.fingerprint, ingredients=parts, why=why)
        self._reuse(replace(decision, success=record))

    def _reuse(self, decision: Decision) -> None:
        success = decision.success
        assert success is not None
        tags = self._tags(decision, success.attempt)
        if success.adopted:
            tags["adopted"] = success.adopted["in_spite_of"]
        self.tracker.reuse_node(decision.node.name, tags=tags, reused_run=success.mlflow_run_id)
        self._finish(decision.node.name, success, SKIPPED)

    def _finish(self, name: str, success: Success | None, state: str) -> None:
        uri = None if success is None else self.plan.store.uri_of(success.folder)
        self.reports[name] = NodeReport(state, uri, success)

    def _tags(self, decision: Decision, attempt: str) -> dict[str, str]:
        return {
            "stage": decision.node.name,
            "fingerprint": decision.fingerprint or "",
            "code_hash": fingerprint.code_hash(decision.ingredients) if decision.ingredients else "",
            "git_commit": self.git_commit,
            "attempt": attempt,
            **decision.node.tags,
        }


@contextlib.contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Turns SIGTERM into an exception in the driver's main thread; elsewhere signals cannot be caught."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise Stopped("received SIGTERM")

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before if before is not None else signal.SIG_DFL)
