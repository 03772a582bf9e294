"""MLflow as the ledger that people see: the only file that imports mlflow.

It mirrors what storage holds. When it cannot be reached, one warning appears, numbers are kept for a while and sent
later, and the work goes on.

The driver opens and ends runs (ledger.py); tasks and train workers get a picklable `RunHandle` and log through the
`NodeRun` that it opens.
"""

from __future__ import annotations

import atexit
import collections
import json
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipelines import registry
from pipelines.dag import fingerprint
from pipelines.dag.masking import mask, plain_uri
from pipelines.mlflow_uri import compare_link, run_link

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

log = logging.getLogger(__name__)

_VALUE_CHARS = 500  # MLflow's limit for a parameter
_TAG_CHARS = 5000
_BATCH = 100  # parameters in one call
_METRIC_BATCH = 1000  # metrics in one call; MLflow's limit
_MAX_WAITING = 10_000  # calls kept while the server is away; the oldest go first
RETRY_SEC = (1, 2, 5, 10, 30)
CLOSE_SEC = 20.0  # how long closing a run waits for what was not sent yet
PARENT_TAG = "mlflow.parentRunId"
KEY_TAG, KEY = "run_key", "key:"  # by which a run is found whose id is not known; such a reference's beginning


@dataclass(frozen=True)
class RunHandle:
    """Points to an MLflow run; without run_id and key it points nowhere and opens a silent run. Picklable.

    A run that could not be opened yet, since the server was away, is known by a key that it will have as a tag.
    It carries the server's login to other machines: Ray shows environment variables of a job to everybody who may look
    at its dashboard, and this to nobody.
    """

    uri: str = ""
    run_id: str | None = None
    experiment_id: str | None = None
    key: str = ""
    experiment: str = ""  # its name, beside a key
    login: Mapping[str, str] = field(default_factory=dict, compare=False)  # environment variables

    def __repr__(self) -> str:
        return f"RunHandle({mask(self.uri)!r}, {self.reference!r})"

    @property
    def reference(self) -> str | None:
        """What another start finds the run by; None if it points nowhere."""
        return self.run_id or (f"{KEY}{self.key}" if self.key else None)

    def open(self) -> NodeRun:
        """The run, to log to. Close it, or use it in a `with` block."""
        return NodeRun(self) if self.uri and self.reference else NullRun()

    def at(self, run_id: str | None) -> RunHandle:
        """Another run of the same experiment; nowhere if there is none, or if this handle points nowhere."""
        return replace(self, run_id=run_id, key="") if self.reference and run_id else RunHandle()

    def known(self) -> RunHandle:
        """With its run_id, if the run has been opened by now; asks the server once, and never raises."""
        if self.run_id or not self.key:
            return self
        try:
            return self.found(make_client(self.uri))
        except Exception as error:  # the mirror must not stop the work
            warn_once(self.uri, error)
            return self

    def close_open_runs(self) -> None:
        """Flushes and closes every run that this process has open."""
        flush_open_runs()

    def found(self, client: MlflowClient) -> RunHandle:
        """With its run_id. Raises ConnectionError while the run has not been opened."""
        if self.run_id:
            return self
        experiment = client.get_experiment_by_name(self.experiment)
        runs = [] if experiment is None else runs_with_key(client, experiment.experiment_id, self.key)
        if not runs:
            raise ConnectionError("the run could not be opened yet")
        return replace(self, run_id=runs[0].info.run_id, experiment_id=experiment.experiment_id, key="")

    def link(self, run_id: str) -> str:
        """Address of a run of this experiment in the UI."""
        return run_link(self.uri, run_id=run_id, experiment_id=self.experiment_id or "")

    def compare_link(self, run_ids: Iterable[str]) -> str:
        """Address of the UI's compare page over runs of this experiment."""
        return compare_link(self.uri, run_ids=run_ids, experiment_id=self.experiment_id or "")


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
        now = int(time.time() * 1000) if time_ms is None else time_ms
        entities = metric_entities(metrics, step=step, time_ms=now)
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

    def log_image(self, image: Any, *, key: str, step: int = 0) -> None:
        """A picture with a step slider in the UI: (H, W, C) uint8 array or PIL image."""
        image = np.array(image)  # a copy: the caller may go on with its buffer
        self._put(lambda client: client.log_image(self.handle.run_id, image, key=key, step=step))

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
        entities = tag_entities(tags)
        self._put(lambda client: client.log_batch(self.handle.run_id, tags=entities))

    def flush(self, *, timeout_sec: float = CLOSE_SEC) -> bool:
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
        # A server that this process has waited for in vain once is not given the whole time again.
        sent = self.flush(timeout_sec=1.0 if self.handle.uri in _away else CLOSE_SEC)
        _away.discard(self.handle.uri) if sent else _away.add(self.handle.uri)
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
                client = client or make_client(self.handle.uri)
                self.handle = self.handle.found(client)
                call(client)
                failures = 0
            except Exception as error:  # whatever goes wrong with the mirror must not stop the work
                client = None
                again = is_unreachable(error)
                warn_once(self.handle.uri, error)
                with self._wake:
                    if again and len(self._calls) < _MAX_WAITING:
                        self._calls.appendleft(call)
                    else:
                        self._lost += 1
                    self._busy = False
                    if again and not self._closing:
                        self._wake.wait(timeout=RETRY_SEC[min(failures, len(RETRY_SEC) - 1)])
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
        self._monitor = SystemMetricsMonitor(run.handle.run_id or "", tracking_uri=run.handle.uri)
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


def runs_with_key(client: MlflowClient, experiment_id: str, key: str) -> list[Any]:
    """The run that was asked for under this key, if it has been opened."""
    return list(client.search_runs([experiment_id], f"tags.{KEY_TAG} = '{key}'", max_results=1))


def flush_open_runs() -> None:
    """Closes every run that this process still has open."""
    for run in list(_open_runs):
        run.close()


_open_runs: weakref.WeakSet[NodeRun] = weakref.WeakSet()
_warned: set[str] = set()
_away: set[str] = set()  # servers that did not answer while a run was closed
atexit.register(flush_open_runs)


def make_client(uri: str) -> MlflowClient:
    """Raises ConnectionError for a SQLite file that is not there: opening it would make an empty one."""
    # MLflow reads these on use; an unreachable server must fail fast instead of holding up training.
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    # What fails is repeated by those who call, who look first whether it had been done.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
    if uri.startswith("sqlite:///") and not Path(uri.removeprefix("sqlite:///")).exists():
        raise ConnectionError(f"{uri} is not on this machine; set MLFLOW_TRACKING_URI to a server for several machines")
    from mlflow.tracking import MlflowClient

    logging.getLogger("alembic").setLevel(logging.WARNING)
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)
    logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)  # it tells of each try; we warn once
    return MlflowClient(tracking_uri=uri)


def make_store(uri: str) -> MlflowClient:
    """Creates a SQLite schema here, once: several processes at once on a fresh file all fail."""
    if uri.startswith("sqlite:///"):
        file = Path(uri.removeprefix("sqlite:///"))
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    client = make_client(uri)
    client.search_experiments(max_results=1)
    return client


def open_experiment(client: MlflowClient, name: str, artifacts: str | None) -> str:
    """The id of the experiment of this name, made or restored if need be."""
    found = client.get_experiment_by_name(name)
    if found is None:
        place = Path(artifacts).absolute().as_uri() if artifacts else None
        return client.create_experiment(name, artifact_location=place)
    if found.lifecycle_stage == "deleted":
        client.restore_experiment(found.experiment_id)
    return found.experiment_id


def warn_once(uri: str, error: Exception) -> None:
    if uri not in _warned:
        _warned.add(uri)
        why = mask(next(iter(str(error).splitlines()), type(error).__name__))
        log.warning("MLflow at %s does not take records (%s); the run goes on", mask(uri), why)


def is_unreachable(error: BaseException | None) -> bool:
    """True when the same call may work later; a call that MLflow refuses would be refused again."""
    while error is not None:
        busy = getattr(error, "error_code", "") in ("TEMPORARILY_UNAVAILABLE", "REQUEST_LIMIT_EXCEEDED")
        if busy or isinstance(error, OSError) or type(error).__name__ == "OperationalError":
            return True  # OSError covers sockets and requests; OperationalError is SQLite's "database is locked"
        error = error.__cause__ or error.__context__
    return False


def metric_entities(metrics: Mapping[str, float], *, step: int, time_ms: int) -> list[Any]:
    from mlflow.entities import Metric

    return [Metric(key, float(value), time_ms, step) for key, value in metrics.items()]


def tag_entities(tags: Mapping[str, str]) -> list[Any]:
    from mlflow.entities import RunTag

    return [RunTag(key, mask(str(value))[:_TAG_CHARS]) for key, value in tags.items()]


def param_batches(params: Mapping[str, Any]) -> list[list[Any]]:
    from mlflow.entities import Param

    flat = [Param(key, mask(str(value))[:_VALUE_CHARS]) for key, value in fingerprint.flatten(params).items()]
    return [flat[i : i + _BATCH] for i in range(0, len(flat), _BATCH)]
