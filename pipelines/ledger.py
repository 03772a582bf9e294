"""The driver's side of MLflow: experiment, one parent run for a start of the pipeline, one child run for each node.

Every call is made at once, or, while the server is away, kept in its order and made by a thread when it is back: at the
very start too, when there is no run yet to log to.
"""

from __future__ import annotations

import collections
import logging
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from pipelines import tracking
from pipelines.dag.masking import mask, mask_uris
from pipelines.mlflow_uri import login_of
from pipelines.tracking import KEY, KEY_TAG, PARENT_TAG, RunHandle

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

log = logging.getLogger(__name__)

_KEPT = object()  # result of a call that waits for the server
_Call = Callable[["MlflowClient"], Any]


class Ledger:
    """Never raises for a missing server, and waits for one only in `close`."""

    def __init__(self, uri: str, *, experiment: str, run_folder: str, artifacts: str | None = None) -> None:
        """artifacts: absolute place of the experiment's artifacts; None leaves it to the server."""
        self.uri, self.run_folder = uri, mask_uris(run_folder).replace("'", "")
        self.experiment, self.artifacts = experiment, artifacts
        self.experiment_id: str | None = None
        self.parent_id: str | None = None
        self._refused = not uri  # nothing is recorded then
        self._client: MlflowClient | None = None
        self._parent = RunHandle()
        self._ids: dict[str, str] = {}  # key -> run
        self._waiting: collections.deque[_Call] = collections.deque()
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._send(lambda client: None)  # opens the experiment

    def start_pipeline(self, *, tags: Mapping[str, str], params: Mapping[str, Any], files: Mapping[str, str]) -> None:
        """Closes what a killed driver left open, then opens the parent run. files: {name: text} artifacts."""
        self.reconcile()
        self._parent = self._create("pipeline", {"node": "pipeline", **tags}, params)
        for name, text in files.items():
            self._send(lambda client, name=name, text=text: client.log_text(self._id(self._parent), mask(text), name))

    def start_node(
        self, node: str, *, tags: Mapping[str, str], params: Mapping[str, Any], continue_id: str | None = None
    ) -> RunHandle:
        """Child run of a node; continue_id refers to the run of the unfinished attempt that goes on, if any."""
        if continue_id is not None:
            handle = self._reopen(continue_id, tags)
            if handle is not None:
                return handle
        return self._create(node, {"node": node, **tags}, params)

    def reuse_node(self, node: str, *, tags: Mapping[str, str], reused_run: str | None) -> RunHandle:
        """Child run of a skipped node: no numbers, only a pointer to the run that made its output."""
        note = f"Up to date; made by run {reused_run}" if reused_run else "Up to date"
        more = {"reused_run": reused_run or "unknown", "mlflow.note.content": note}
        handle = self._create(node, {"node": node, **tags, **more}, {})
        self._terminate(handle, "FINISHED")
        return handle

    def finish(self, handle: RunHandle, status: str, *, metrics: Mapping[str, float] | None = None) -> None:
        """status: FINISHED, FAILED or KILLED. Metrics that the node logged itself are left alone."""
        if metrics and handle.reference:
            now = int(time.time() * 1000)

            def add_missing(client: MlflowClient) -> None:
                run_id = self._id(handle)
                logged = set(client.get_run(run_id).data.metrics)
                missing = {key: value for key, value in metrics.items() if key not in logged}
                if missing:
                    client.log_batch(run_id, metrics=tracking.metric_entities(missing, step=0, time_ms=now))

            self._send(add_missing)
        self._terminate(handle, status)

    def close(self, status: str) -> None:
        """Ends the parent run; waits a while for a server that does not answer."""
        self._terminate(self._parent, status)
        deadline = time.monotonic() + tracking.CLOSE_SEC
        while self._waiting and time.monotonic() < deadline:
            time.sleep(0.1)
        self._closing.set()
        if self._waiting:
            log.warning("MLflow at %s: %d entries were not recorded", mask(self.uri), len(self._waiting))

    def reconcile(self) -> list[str]:
        """Marks runs of this run folder that are still RUNNING as KILLED: their driver is gone. Returns their ids.

        Call it only while holding the run folder's lock, before this start has opened runs of its own.
        """
        query = f"attributes.status = 'RUNNING' and tags.run_folder = '{self.run_folder}'"

        def close_them(client: MlflowClient) -> list[str]:
            found = client.search_runs([self.experiment_id], query, max_results=1000)
            for run in found:
                client.set_terminated(run.info.run_id, "KILLED")
            return [run.info.run_id for run in found]

        closed = self._send(close_them)
        return closed if isinstance(closed, list) else []

    def handle(self, run_id: str | None) -> RunHandle:
        if not run_id:
            return RunHandle()
        return RunHandle(self.uri, run_id, self.experiment_id, login=login_of(self.uri))

    def _create(self, name: str, tags: Mapping[str, str], params: Mapping[str, Any]) -> RunHandle:
        key, tried = uuid.uuid4().hex, False

        def create(client: MlflowClient) -> str:
            nonlocal tried
            more = {"run_folder": self.run_folder, KEY_TAG: key}
            if self.parent_id is not None:
                more[PARENT_TAG] = self.parent_id
            # A server that did not answer in time may have opened the run all the same.
            found = tracking.runs_with_key(client, self.experiment_id, key) if tried else []
            tried = True
            if found:
                run_id = found[0].info.run_id
            else:
                values = {tag.key: tag.value for tag in tracking.tag_entities({**more, **tags})}
                run_id = client.create_run(self.experiment_id, run_name=name, tags=values).info.run_id
            self._ids[key] = run_id
            if self.parent_id is None:
                self.parent_id = run_id
            return run_id

        made = self._send(create)
        if made is None:
            return RunHandle()
        for batch in tracking.param_batches(params):
            self._send(lambda client, batch=batch: client.log_batch(self._ids[key], params=batch))
        return self._to_come(key) if made is _KEPT else self.handle(made)

    def _to_come(self, key: str) -> RunHandle:
        return RunHandle(self.uri, key=key, experiment=self.experiment, login=login_of(self.uri))

    def _reopen(self, reference: str, tags: Mapping[str, str]) -> RunHandle | None:
        """Makes a closed run RUNNING again, under this start's parent, so that its curves go on. None: no such run."""
        key = reference.removeprefix(KEY) if reference.startswith(KEY) else ""

        def reopen(client: MlflowClient) -> str:
            if key and key not in self._ids:
                found = tracking.runs_with_key(client, self.experiment_id, key)
                if not found:
                    raise ValueError(f"no run has the key {key}")
                self._ids[key] = found[0].info.run_id
            run_id = self._ids[key] if key else reference
            client.update_run(run_id, status="RUNNING")  # refused for a run that was deleted
            client.log_batch(run_id, tags=tracking.tag_entities({**tags, PARENT_TAG: self.parent_id or ""}))
            return run_id

        run_id = self._send(reopen, quiet=True)  # a new database does not know the old run: a new one is as good
        if run_id is _KEPT:  # the run is there, and will take what is sent to it later
            return self._to_come(key) if key else self.handle(reference)
        return self.handle(run_id) if run_id else None

    def _terminate(self, handle: RunHandle, status: str) -> None:
        if handle.reference:
            self._send(lambda client: client.set_terminated(self._id(handle), status))

    def _id(self, handle: RunHandle) -> str:
        return handle.run_id or self._ids[handle.key]

    def _send(self, call: _Call, *, quiet: bool = False) -> Any:
        """The call's result, _KEPT if it waits for the server, None if MLflow refused it (quiet: without a warning)."""
        if self._refused:
            return None
        with self._lock:
            if self._waiting:
                self._waiting.append(call)
                return _KEPT
        try:
            return call(self._connected())
        except Exception as error:  # whatever goes wrong with the mirror must not stop the work
            again = tracking.is_unreachable(error)
            if again or not quiet:
                tracking.warn_once(self.uri, error)
            if not again:
                self._refused = self.experiment_id is None
                return None
        with self._lock:
            self._waiting.append(call)
            threading.Thread(target=self._send_waiting, name="mlflow-ledger", daemon=True).start()
        return _KEPT

    def _send_waiting(self) -> None:
        """Makes the calls that wait, in their order, as soon as the server answers; ends when none is left."""
        failures = 1
        while True:
            if failures and self._closing.wait(tracking.RETRY_SEC[min(failures, len(tracking.RETRY_SEC)) - 1]):
                return
            try:
                self._waiting[0](self._connected())
            except Exception as error:
                if tracking.is_unreachable(error):
                    failures += 1
                    continue
                tracking.warn_once(self.uri, error)
            failures = 0
            with self._lock:
                self._waiting.popleft()
                if not self._waiting:
                    return

    def _connected(self) -> MlflowClient:
        """Raises what MLflow raises, while it cannot be reached or does not open the experiment."""
        if self._client is None:
            self._client = tracking.make_store(self.uri)
        if self.experiment_id is None:
            self.experiment_id = tracking.open_experiment(self._client, self.experiment, self.artifacts)
        return self._client


def silent_ledger() -> Ledger:
    """Records nothing."""
    return Ledger("", experiment="", run_folder="")
