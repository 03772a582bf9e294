"""MLflow as the ledger that people see: the only file that imports mlflow.

It mirrors what storage holds. When it cannot be reached, one warning appears, numbers are kept for a while and sent
later, and the work goes on.

The driver owns a `Ledger` (one parent run for a start of the pipeline, one child run for each node); tasks and train
workers get a picklable `RunHandle` and log through the `NodeRun` that it opens.
"""

from __future__ import annotations

import atexit
import collections
import json
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote, urlsplit

import numpy as np

from pipelines import fingerprint, registry
from pipelines.masking import mask, mask_uris, plain_uri
from pipelines.storage import Store

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

log = logging.getLogger(__name__)

_VALUE_CHARS = 500  # MLflow's limit for a parameter
_TAG_CHARS = 5000
_BATCH = 100  # parameters in one call
_METRIC_BATCH = 1000  # metrics in one call; MLflow's limit
_MAX_WAITING = 10_000  # calls kept while the server is away; the oldest go first
_RETRY_SEC = (1, 2, 5, 10, 30)
_CLOSE_SEC = 20.0  # how long closing a run waits for what was not sent yet
PARENT_TAG = "mlflow.parentRunId"
UI = "http://127.0.0.1:5000"  # where `make ui` and `ui_command` show a SQLite file
# A server's login, as MLflow itself reads it.
_USER, _PASSWORD = "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"
_LOGIN = (_USER, _PASSWORD, "MLFLOW_TRACKING_TOKEN")


@dataclass(frozen=True)
class RunHandle:
    """Points to an MLflow run; without run_id it points nowhere and opens a silent run. Picklable.

    It carries the server's login to other machines: Ray shows environment variables of a job to everybody who may look
    at its dashboard, and this to nobody.
    """

    uri: str = ""
    run_id: str | None = None
    experiment_id: str | None = None
    login: Mapping[str, str] = field(default_factory=dict, compare=False)  # environment variables

    def __repr__(self) -> str:
        return f"RunHandle({mask(self.uri)!r}, {self.run_id!r})"

    def open(self) -> NodeRun:
        """The run, to log to. Close it, or use it in a `with` block."""
        return NodeRun(self) if self.uri and self.run_id else NullRun()

    def at(self, run_id: str | None) -> RunHandle:
        """Another run of the same experiment; nowhere if there is none, or if this handle points nowhere."""
        return replace(self, run_id=run_id) if self.run_id and run_id else RunHandle()

    def link(self, run_id: str) -> str:
        """Address of a run of this experiment in the UI."""
        return _page(_ui_of(self.uri), f"experiments/{self.experiment_id}/runs/{run_id}")

    def compare_link(self, run_ids: Iterable[str]) -> str:
        """Address of the UI's compare page over runs of this experiment."""
        return compare_link(_ui_of(self.uri), run_ids=run_ids, experiment_id=self.experiment_id or "")


class NodeRun:
    """Logs to one run from a background thread, in order; a call never waits for the server and never raises."""

    def __init__(self, handle: RunHandle) -> None:
        # Here, not in two threads at once: mlflow's modules import each other in circles.
        import mlflow.entities
        import mlflow.tracking  # noqa: F401

        self.handle = handle
        self._calls: collections.deque[Callable[[MlflowClient], object]] = collections.deque(maxlen=_MAX_WAITING)
        self._wake = threading.Condition()
        self._closing = False
        self._busy = False
        self._lost = 0
        self._watch: _MachineWatch | None = None
        for name, value in handle.login.items():
            os.environ.setdefault(name, value)
        self._thread = threading.Thread(target=self._send_all, name="mlflow", daemon=True)
        self._thread.start()
        _open_runs.add(self)

    def __enter__(self) -> NodeRun:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def log_metrics(self, metrics: Mapping[str, float], step: int = 0, *, time_ms: int | None = None) -> None:
        """time_ms: when they were measured, since 1970; None: now."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000) if time_ms is None else time_ms
        entities = [Metric(key, float(value), now, step) for key, value in metrics.items()]
        self._put(lambda client: client.log_batch(self.handle.run_id, metrics=entities))

    def log_history(self, history: Iterable[Mapping[str, float]]) -> None:
        """Sends entries {"step": ..., "time_ms": ..., metric: value} again; MLflow keeps one of equal points, so only
        those are added that were lost with a process or a server."""
        from mlflow.entities import Metric

        metrics = [
            Metric(key, float(value), int(entry["time_ms"]), int(entry["step"]))
            for entry in history
            for key, value in entry.items()
            if key not in ("step", "time_ms")
        ]
        for start in range(0, len(metrics), _METRIC_BATCH):
            batch = metrics[start : start + _METRIC_BATCH]
            self._put(lambda client, batch=batch: client.log_batch(self.handle.run_id, metrics=batch))

    def log_params(self, params: Mapping[str, Any]) -> None:
        """Nested values are flattened; a parameter that is there already keeps its value."""
        for batch in _param_batches(params):
            self._put(lambda client, batch=batch: client.log_batch(self.handle.run_id, params=batch))

    def log_image(self, image: Any, *, key: str, step: int = 0) -> None:
        """A picture with a step slider in the UI: (H, W, C) uint8 array or PIL image."""
        image = np.array(image)  # a copy: the caller may go on with its buffer
        self._put(lambda client: client.log_image(self.handle.run_id, image, key=key, step=step))

    def log_figure(self, figure: Any, file: str) -> None:
        """A matplotlib figure as artifact."""
        self._put(lambda client: client.log_figure(self.handle.run_id, figure, file))

    def log_artifact(self, path: Path | str, folder: str | None = None) -> None:
        """A local file; it must stay in place until the run is closed or flushed."""
        self._put(lambda client: client.log_artifact(self.handle.run_id, str(path), folder))

    def log_text(self, text: str, file: str) -> None:
        self._put(lambda client: client.log_text(self.handle.run_id, mask(text), file))

    def log_dataset(
        self, *, name: str, digest: str, uri: str, context: str, shape: Sequence[int], profile: Mapping[str, Any]
    ) -> None:
        """uint8 images that the run read. digest: at most 36 characters; context: what for, e.g. "training"."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        scheme = uri.partition("://")[0] if "://" in uri else "local"
        source = json.dumps({"uri": plain_uri(uri)})
        pixels = {"name": "px", "type": "tensor", "tensor-spec": {"dtype": "uint8", "shape": list(shape)}}
        schema = {"mlflow_tensorspec": {"features": json.dumps([pixels]), "targets": None}}
        data = Dataset(name, digest, scheme, source, json.dumps(schema), json.dumps(dict(profile)))
        tagged = DatasetInput(data, [InputTag("mlflow.data.context", context)])
        self._put(lambda client: client.log_inputs(self.handle.run_id, datasets=[tagged]))

    def register_model(self, model: registry.StageModel) -> None:
        """The network that this run trained as a version in the model registry, with its aliases."""
        self._put(lambda client: registry.record(client, self.handle.run_id, model))

    def watch_machine(self, step: Callable[[], int], *, name: str = "") -> None:
        """Until the run is closed: CPU, memory, disk, network and GPUs of this machine as system/<metric>.

        step: of the training, so that these curves lie beside the others. name: of the machine, as system/<name>/....
        """
        self._watch = _MachineWatch(self, step, prefix=f"system/{name}/" if name else "system/")

    def set_tags(self, tags: Mapping[str, str]) -> None:
        entities = _tags(tags)
        self._put(lambda client: client.log_batch(self.handle.run_id, tags=entities))

    def flush(self, *, timeout_sec: float = _CLOSE_SEC) -> bool:
        """Waits until all is sent; False if the server stayed away."""
        deadline = time.monotonic() + timeout_sec
        with self._wake:
            self._wake.notify_all()  # ends a pause between two tries
            while (self._calls or self._busy) and time.monotonic() < deadline:
                self._wake.wait(timeout=min(0.2, timeout_sec))
            return not (self._calls or self._busy)

    def close(self) -> None:
        """Flushes and stops; what could not be sent is counted in one warning."""
        if self._watch is not None:
            self._watch.stop()
        sent = self.flush()
        with self._wake:
            self._closing = True
            left = len(self._calls)
            self._wake.notify_all()
        _open_runs.discard(self)
        if not sent or self._lost:
            log.warning("MLflow at %s: %d entries were not recorded", mask(self.handle.uri), left + self._lost)

    def _put(self, call: Callable[[MlflowClient], object]) -> None:
        with self._wake:
            self._lost += len(self._calls) == _MAX_WAITING
            self._calls.append(call)
            self._wake.notify_all()

    def _send_all(self) -> None:
        client, failures = None, 0
        while True:
            with self._wake:
                while not self._calls and not self._closing:
                    self._wake.wait()
                if self._closing:
                    return
                call = self._calls.popleft()
                self._busy = True
            try:
                client = client or _client(self.handle.uri)
                call(client)
                failures = 0
            except Exception as error:  # whatever goes wrong with the mirror must not stop the work
                client = None
                again = _is_unreachable(error)
                _warn_once(self.handle.uri, error)
                with self._wake:
                    if again and len(self._calls) < _MAX_WAITING:
                        self._calls.appendleft(call)
                    else:
                        self._lost += 1
                    self._busy = False
                    if again and not self._closing:
                        self._wake.wait(timeout=_RETRY_SEC[min(failures, len(_RETRY_SEC) - 1)])
                failures += 1
                continue
            with self._wake:
                self._busy = False
                self._wake.notify_all()


class NullRun(NodeRun):
    """Takes everything, keeps nothing."""

    def __init__(self) -> None:
        self.handle = RunHandle()

    def flush(self, *, timeout_sec: float = 0.0) -> bool:
        return True

    def close(self) -> None:
        pass

    def watch_machine(self, step: Callable[[], int], *, name: str = "") -> None:
        pass

    def _put(self, call: Callable[[MlflowClient], object]) -> None:
        pass


class _MachineWatch:
    """Samples the machine in a thread. MLflow's own monitor collects, but gives up when the server is away once, so its
    numbers go the way of all others."""

    def __init__(self, run: NodeRun, step: Callable[[], int], *, prefix: str) -> None:
        from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

        self._run, self._step, self._prefix = run, step, prefix
        self._stopped = threading.Event()
        logging.getLogger("mlflow.system_metrics").setLevel(logging.WARNING)  # it tells every CPU machine of no GPU
        self._monitor = SystemMetricsMonitor(run.handle.run_id, tracking_uri=run.handle.uri)
        self._thread = threading.Thread(target=self._sample_all, name="mlflow-system", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends with a last sample."""
        self._stopped.set()
        self._thread.join()

    def _sample_all(self) -> None:
        try:
            self._sample()  # CPU use is measured from one call to the next, and the first has nothing before it
            while not self._stopped.wait(self._monitor.sampling_interval):
                self._run.log_metrics(self._sample(), step=self._step())
            self._run.log_metrics(self._sample(), step=self._step())
        except Exception as error:  # a sensor that fails must not end the work
            log.warning("no system metrics any more (%s: %s); the run goes on", type(error).__name__, error)

    def _sample(self) -> dict[str, float]:
        self._monitor.collect_metrics()
        found = {self._prefix + key: value for key, value in self._monitor.aggregate_metrics().items()}
        for sensor in self._monitor.monitors:
            sensor.clear_metrics()
        return found


class Ledger:
    """The driver's side: experiment, parent run, one child run for each node. Never raises for a missing server."""

    def __init__(self, uri: str, *, experiment: str, run_folder: str, artifacts: str | None = None) -> None:
        """artifacts: absolute place of the experiment's artifacts; None leaves it to the server."""
        self.uri, self.run_folder = uri, mask_uris(run_folder)
        self.parent_id: str | None = None
        self._endings: dict[str, str] = {}  # run -> status that MLflow has not been told yet
        self.experiment_id: str | None = ""  # None: could not be opened, nothing is recorded
        self._client = _try(uri, lambda: _make_store(uri)) if uri else None
        self.experiment_id = self._do(lambda client: _experiment(client, experiment, artifacts))

    def start_pipeline(self, *, tags: Mapping[str, str], params: Mapping[str, Any], files: Mapping[str, str]) -> None:
        """Closes what a killed driver left open, then opens the parent run. files: {name: text} artifacts."""
        self.reconcile()
        self.parent_id = self._create("pipeline", {"node": "pipeline", **tags})
        with self.handle(self.parent_id).open() as run:
            run.log_params(params)
            for name, text in files.items():
                run.log_text(text, name)

    def start_node(
        self, node: str, *, tags: Mapping[str, str], params: Mapping[str, Any], continue_id: str | None = None
    ) -> RunHandle:
        """Child run of a node; continue_id is the run of the unfinished attempt that goes on, if there was one."""
        if continue_id is not None and self._reopen(continue_id, tags):
            return self.handle(continue_id)
        handle = self.handle(self._create(node, {"node": node, **tags}))
        with handle.open() as run:
            run.log_params(params)
        return handle

    def reuse_node(self, node: str, *, tags: Mapping[str, str], reused_run: str | None) -> RunHandle:
        """Child run of a skipped node: no numbers, only a pointer to the run that made its output."""
        note = f"Up to date; made by run {reused_run}" if reused_run else "Up to date"
        more = {"reused_run": reused_run or "unknown", "mlflow.note.content": note}
        run_id = self._create(node, {"node": node, **tags, **more})
        self._terminate(run_id, "FINISHED")
        return self.handle(run_id)

    def finish(self, handle: RunHandle, status: str, *, metrics: Mapping[str, float] | None = None) -> None:
        """status: FINISHED, FAILED or KILLED. Metrics that the node logged itself are left alone."""
        if metrics and handle.run_id is not None:
            logged = self._do(lambda client: set(client.get_run(handle.run_id).data.metrics)) or set()
            missing = {key: value for key, value in metrics.items() if key not in logged}
            if missing:
                with handle.open() as run:
                    run.log_metrics(missing)
        self._terminate(handle.run_id, status)

    def close(self, status: str) -> None:
        """Ends the parent run; waits a while for a server that does not answer."""
        deadline = time.monotonic() + _CLOSE_SEC
        self._terminate(self.parent_id, status)
        while self._endings and time.monotonic() < deadline:
            time.sleep(_RETRY_SEC[0])
            self._send_endings()

    def reconcile(self) -> list[str]:
        """Marks runs of this run folder that are still RUNNING as KILLED: their driver is gone. Returns their ids.

        Call it only while holding the run folder's lock.
        """
        folder = self.run_folder.replace("'", "")
        query = f"attributes.status = 'RUNNING' and tags.run_folder = '{folder}'"
        found = self._do(lambda client: client.search_runs([self.experiment_id], query, max_results=1000)) or []
        for run in found:
            self._terminate(run.info.run_id, "KILLED")
        return [run.info.run_id for run in found]

    def handle(self, run_id: str | None) -> RunHandle:
        login = {name: os.environ[name] for name in _LOGIN if name in os.environ} if _is_server(self.uri) else {}
        return RunHandle(self.uri, run_id, self.experiment_id, login) if run_id else RunHandle()

    def _create(self, name: str, tags: Mapping[str, str]) -> str | None:
        more = {"run_folder": self.run_folder.replace("'", "")}
        if self.parent_id is not None:
            more[PARENT_TAG] = self.parent_id
        values = {key: mask(str(value))[:_TAG_CHARS] for key, value in {**more, **tags}.items()}
        run = self._do(lambda client: client.create_run(self.experiment_id, run_name=name, tags=values))
        return run.info.run_id if run is not None else None

    def _reopen(self, run_id: str, tags: Mapping[str, str]) -> bool:
        """Makes a closed run RUNNING again, under this start's parent, so that its curves go on."""
        self._endings.pop(run_id, None)
        if self._client is None:
            return False
        try:
            self._client.update_run(run_id, status="RUNNING")  # refused for a run that was deleted
            self._client.log_batch(run_id, tags=_tags({**tags, PARENT_TAG: self.parent_id or ""}))
        except Exception as error:  # a new database does not know the old run: a new one is as good
            return _is_unreachable(error)  # the run is there, and will take what is sent to it later
        return True

    def _terminate(self, run_id: str | None, status: str) -> None:
        if run_id is not None:
            self._endings[run_id] = status
        self._send_endings()

    def _send_endings(self) -> None:
        """Tells MLflow which runs have ended; what it cannot be told now stays for the next call."""
        for run_id, status in list(self._endings.items()):
            try:
                if self._client is not None:
                    self._client.set_terminated(run_id, status)
            except Exception as error:  # the mirror must not stop the work
                _warn_once(self.uri, error)
                if _is_unreachable(error):
                    return
            del self._endings[run_id]

    def _do(self, call: Callable[[MlflowClient], Any]) -> Any:
        client = None if self.experiment_id is None else self._client
        return None if client is None else _try(self.uri, lambda: call(client))


def silent_ledger() -> Ledger:
    """Records nothing."""
    return Ledger("", experiment="", run_folder="")


def default_uri(store: Store, *, name: str, configured: str | None = None) -> tuple[str, str | None]:
    """Tracking URI and artifact place for a run folder.

    In this order: the configured server, $MLFLOW_TRACKING_URI, a SQLite file in the run folder. SQLite needs a disk of
    this machine, so for a run folder on an object store it lies in ~/spn_runs/<name>. A server's URI is returned
    without its login, which moves to the environment variables that MLflow has for it.
    """
    given = configured or os.environ.get("MLFLOW_TRACKING_URI")
    if given:
        given = _take_login(given)
        if given.startswith("sqlite:///"):  # nobody else would choose the artifact place, and MLflow's is the cwd
            return given, str(Path(given.removeprefix("sqlite:///")).absolute().parent / "mlartifacts")
        return given, None
    folder = store.local() or Path.home() / "spn_runs" / name
    return f"sqlite:///{folder / 'mlflow.db'}", str(folder / "mlartifacts")


def ui_command(uri: str) -> str:
    """The line that opens the MLflow UI on this machine; for a server, its address."""
    if _is_server(uri):
        return _page(_ui_of(uri), "experiments")
    return f"{sys.executable} -m mlflow ui --backend-store-uri {uri} --host 127.0.0.1 --port 5000"


def compare_link(base: str, *, run_ids: Iterable[str], experiment_id: str) -> str:
    """Address of the UI's compare page over some runs; base is e.g. http://127.0.0.1:5000."""
    runs = quote("[" + ",".join(f'"{run_id}"' for run_id in run_ids) + "]")
    experiments = quote(f'["{experiment_id}"]')
    return _page(base, f"compare-runs?runs={runs}&experiments={experiments}")


def _page(base: str, page: str) -> str:
    """Address of a page of the UI in its view for model training; it opens with the one for language models else."""
    return f"{base.rstrip('/')}/#/{page}{'&' if '?' in page else '?'}workflowType=machine_learning"


def flush_open_runs() -> None:
    """Closes every run that this process still has open."""
    for run in list(_open_runs):
        run.close()


def _is_server(uri: str) -> bool:
    return uri.startswith(("http://", "https://"))


def _ui_of(uri: str) -> str:
    """Address of the UI: the server's, or the one where this machine shows a SQLite file."""
    return plain_uri(uri).rstrip("/") if _is_server(uri) else UI


def _take_login(uri: str) -> str:
    """The server's URI without user:password, which go to this process's environment. Other URIs stay as they are."""
    host = urlsplit(uri).netloc if _is_server(uri) else ""
    login, at, bare = host.rpartition("@")
    if not at:
        return uri
    user, _, password = login.partition(":")
    os.environ.update({_USER: unquote(user), _PASSWORD: unquote(password)})
    return uri.replace(host, bare, 1)


_open_runs: weakref.WeakSet[NodeRun] = weakref.WeakSet()
_warned: set[str] = set()
atexit.register(flush_open_runs)


def _client(uri: str) -> MlflowClient:
    """Raises ConnectionError for a SQLite file that is not there: opening it would make an empty one."""
    # MLflow reads these on use; an unreachable server must fail fast instead of holding up training.
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
    if uri.startswith("sqlite:///") and not Path(uri.removeprefix("sqlite:///")).exists():
        raise ConnectionError(f"{uri} is not on this machine; set MLFLOW_TRACKING_URI to a server for several machines")
    from mlflow.tracking import MlflowClient

    logging.getLogger("alembic").setLevel(logging.WARNING)
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)
    return MlflowClient(tracking_uri=uri)


def _make_store(uri: str) -> MlflowClient:
    """Creates a SQLite schema here, once: several processes at once on a fresh file all fail."""
    if uri.startswith("sqlite:///"):
        file = Path(uri.removeprefix("sqlite:///"))
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    client = _client(uri)
    client.search_experiments(max_results=1)
    return client


def _experiment(client: MlflowClient, name: str, artifacts: str | None) -> str:
    found = client.get_experiment_by_name(name)
    if found is None:
        place = Path(artifacts).absolute().as_uri() if artifacts else None
        return client.create_experiment(name, artifact_location=place)
    if found.lifecycle_stage == "deleted":
        client.restore_experiment(found.experiment_id)
    return found.experiment_id


def _try(uri: str, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:  # the mirror must not stop the work
        _warn_once(uri, error)
        return None


def _warn_once(uri: str, error: Exception) -> None:
    if uri not in _warned:
        _warned.add(uri)
        why = mask(next(iter(str(error).splitlines()), type(error).__name__))
        log.warning("MLflow at %s does not take records (%s); the run goes on", mask(uri), why)


def _is_unreachable(error: BaseException | None) -> bool:
    """True when the same call may work later; a call that MLflow refuses would be refused again."""
    while error is not None:
        busy = getattr(error, "error_code", "") in ("TEMPORARILY_UNAVAILABLE", "REQUEST_LIMIT_EXCEEDED")
        if busy or isinstance(error, OSError) or type(error).__name__ == "OperationalError":
            return True  # OSError covers sockets and requests; OperationalError is SQLite's "database is locked"
        error = error.__cause__ or error.__context__
    return False


def _tags(tags: Mapping[str, str]) -> list[Any]:
    from mlflow.entities import RunTag

    return [RunTag(key, mask(str(value))[:_TAG_CHARS]) for key, value in tags.items()]


def _param_batches(params: Mapping[str, Any]) -> list[list[Any]]:
    from mlflow.entities import Param

    flat = [Param(key, mask(str(value))[:_VALUE_CHARS]) for key, value in fingerprint.flatten(params).items()]
    return [flat[i : i + _BATCH] for i in range(0, len(flat), _BATCH)]
