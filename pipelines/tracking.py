"""MLflow, where people see what was run and compare it. The only file that imports mlflow.

MLflow mirrors what storage holds, and it never holds up the work. Metrics go through MLflow's own asynchronous queue;
every other call takes half a minute at most. A server that fails costs one warning, and nobody calls it for a minute.
At the end of the node it gets the runs and metrics that it missed; pictures, texts and models are not sent again.

The driver opens and ends runs through its `Ledger`; tasks and train workers get a picklable `RunHandle` and log through
the `NodeRun` that it opens.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import logging
import os
import shlex
import sqlite3
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from PIL import Image

from data_prep.files import Store, UserError
from pipelines.dag import fingerprint
from pipelines.dag.masking import mask, mask_uris, plain_uri
from pipelines.dag.node import Picture
from pipelines.dag.plan import nearest

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

    from data_prep.parquet import Dataset

log = logging.getLogger(__name__)
_QUEUE_LOG = logging.getLogger("mlflow.utils.async_logging.async_logging_queue")

UI = "http://127.0.0.1:5000"  # where `make ui` and the command of `RunHandle.links` show a SQLite file
PARENT_TAG, NAME, NOTE = "mlflow.parentRunId", "mlflow.runName", "mlflow.note.content"
_PARENT = "pipeline"  # tag `node` of the parent run
# Of the stores that MLflow brings; plugins have others.
SCHEMES = ("http", "https", "sqlite", "postgresql", "mysql", "mssql", "file", "databricks", "databricks-uc", "uc")
# A server's login, as MLflow itself reads it.
LOGIN = ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN")
# Unless the user has set them; MLflow reads them on use. Its own defaults would wait for hours.
_SETTINGS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
}
PAUSE_SEC = 60.0  # for which a server that failed is not called
LOCKED_SEC = 2.0  # longest wait for a SQLite file that another process has locked
CLOSE_SEC = 20.0  # longest wait for the metrics in MLflow's queue when a run is closed
KILLED_SEC = 1.0  # longest wait of a launch that was stopped: Ray kills a stopped job 3 s after SIGTERM
_PARAM_CHARS, _TAG_CHARS, _METRIC_BATCH = 500, 5000, 1000  # MLflow's limits
_ARTIFACTS = "mlartifacts"  # folder of artifacts beside a SQLite file: MLflow's default is the working directory

Call = Callable[["MlflowClient"], object]


def default_uri(store: Store, *, name: str, configured: str | None = None) -> str:
    """Tracking URI for a run folder.

    In this order: the configured server, $MLFLOW_TRACKING_URI, a SQLite file in the run folder. SQLite needs a local
    disk, so for a run folder on an object store it lies in ~/spn_runs/<name>. Raises UserError for a URI of no kind
    that MLflow has, and for a server's that holds a login: whatever names the server would show it.
    """
    given = configured or os.environ.get("MLFLOW_TRACKING_URI") or ""
    file = sqlite_file(given) if given else (store.local() or Path.home() / "spn_runs" / name) / "mlflow.db"
    if file is None:
        if is_server(given) and "@" in urlsplit(given).netloc:
            raise UserError(f"the address {mask(given)} holds a login; set {LOGIN[0]} and {LOGIN[1]} instead")
        scheme = given.partition("://")[0].partition("+")[0]  # of a database, a driver may follow
        known = [*SCHEMES, *(plugin.name for plugin in entry_points(group="mlflow.tracking_store"))]
        if "://" in given and scheme not in known:
            raise UserError(f"tracking.uri, or MLFLOW_TRACKING_URI, is {mask(given)}; {nearest(scheme, known)}")
        return given
    if "?" in given:
        raise UserError(f"tracking.uri, or MLFLOW_TRACKING_URI, is {given}; SQLite takes no options here: end at '?'")
    place = str(file.absolute())  # workers have another working directory
    return "sqlite:///" + place.replace("%", "%25").replace("?", "%3F")  # it is decoded; options follow a "?"


def _page(uri: str, page: str) -> str:
    """Address of a page of the UI in its view for model training; its default view is the one for language models."""
    base = plain_uri(uri).rstrip("/") if is_server(uri) else UI
    return f"{base}/#/{page}{'&' if '?' in page else '?'}workflowType=machine_learning"


def is_server(uri: str) -> bool:
    return uri.startswith(("http://", "https://"))


def sqlite_file(uri: str) -> Path | None:
    return Path(unquote(uri.removeprefix("sqlite:///"))) if uri.startswith("sqlite:///") else None


def make_client(uri: str) -> MlflowClient:
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    from mlflow.tracking import MlflowClient
    from mlflow.utils.file_utils import ExclusiveFileLock

    for name in ("alembic", "mlflow.store.db.utils", "mlflow.system_metrics", "urllib3.connectionpool"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # `_Server.failed` warns once
    if (file := sqlite_file(uri)) is None:
        return MlflowClient(tracking_uri=uri)
    with ExclusiveFileLock(str(file.with_suffix(".lock"))):  # one process makes the tables of a new database
        if not file.exists() or not file.stat().st_size:  # half of the tables, after a kill, could not be completed
            new = Path(f"{file}.new")
            new.unlink(missing_ok=True)
            MlflowClient(tracking_uri=f"{uri}.new")
            new.replace(file)
        client = MlflowClient(tracking_uri=uri)
        _follow_move(file.absolute())
        return client


def _follow_move(file: Path) -> None:
    """A database that was moved or copied with its folder holds addresses in the old one: now they are in this one."""
    new = file.parent
    ours = (
        "SELECT DISTINCT artifact_location FROM experiments JOIN runs USING (experiment_id) JOIN tags USING (run_uuid) "
        f"WHERE key = 'run_folder' AND artifact_location LIKE 'file:///%/{_ARTIFACTS}'"
    )
    columns = "SELECT t.name, c.name FROM sqlite_master t, pragma_table_info(t.name) c WHERE t.type = 'table'"
    with contextlib.closing(sqlite3.connect(file, timeout=LOCKED_SEC)) as database, database:
        for (place,) in database.execute(ours).fetchall():
            old = Path(unquote(urlsplit(place).path)).parent
            if old.resolve() == new.resolve():
                continue
            for before, after in ((old.as_uri(), new.as_uri()), (str(old), str(new))):
                for table, column in database.execute(columns).fetchall():
                    change = f'"{column}" = ?2 || substr("{column}", length(?1) + 1)'
                    where = f"substr(\"{column}\" || '/', 1, length(?1) + 1) = ?1 || '/'"
                    database.execute(f'UPDATE "{table}" SET {change} WHERE {where}', (before, after))


def check_usable(uri: str) -> None:
    """Raises ConnectionError for a SQLite file that is missing (opening it creates one), locked or damaged.

    MLflow itself would retry for minutes.
    """
    file = sqlite_file(uri)
    if file is None:
        return
    if not file.exists():
        raise ConnectionError(f"{uri} is not on this machine; set MLFLOW_TRACKING_URI to a server for several machines")
    try:
        with contextlib.closing(sqlite3.connect(file, timeout=LOCKED_SEC)) as database:
            database.execute("BEGIN IMMEDIATE")
    except sqlite3.Error as error:
        raise ConnectionError(str(error)) from error


class _Server:
    """A tracking server or database as this process uses it: a failure is one warning and a pause, never an error."""

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self._client: MlflowClient | None = None
        self._lock = threading.Lock()  # one thread makes the client
        self._warned, self.paused_until = False, 0.0

    def send(self, call: Call) -> bool:
        """Makes a call; False if the same call may work later, True if it worked or MLflow refuses it for good."""
        if time.monotonic() < self.paused_until:
            return False
        try:
            check_usable(self.uri)
            with self._lock:
                self._client = self._client or make_client(self.uri)
            call(self._client)
        except Exception as error:  # whatever goes wrong with the mirror must not stop the work
            again = is_unreachable(error)
            self.failed(str(error) or type(error).__name__, pause=again)
            return not again
        return True

    def failed(self, why: str, *, pause: bool) -> None:
        if pause:
            self.paused_until = time.monotonic() + PAUSE_SEC
        if not self._warned:
            self._warned = True
            why = mask(" ".join(why.split()))[:300]
            log.warning("MLflow at %s does not record (%s); the work continues", mask(self.uri), why)


_server = functools.cache(_Server)


def is_unreachable(error: BaseException | None) -> bool:
    """True when the same call may work later; a call that MLflow refuses would be refused again."""
    while error is not None:
        module, name = type(error).__module__, type(error).__name__
        busy = getattr(error, "error_code", "") in ("TEMPORARILY_UNAVAILABLE", "REQUEST_LIMIT_EXCEEDED")
        locked = name == "OperationalError"  # SQLite's "database is locked"
        network = isinstance(error, ConnectionError | TimeoutError) or module == "requests.exceptions"
        if busy or locked or (network and name != "HTTPError"):  # HTTPError: the server did answer
            return True
        error = error.__cause__ or error.__context__
    return False


@dataclass(frozen=True)
class RunHandle:
    """Points to an MLflow run; without run_id it opens a silent run. Picklable.

    It carries the server's login to other machines: Ray shows a job's environment variables to everybody who can see
    its dashboard, and this to nobody.
    """

    uri: str = field(default="", repr=False)  # a database's may hold its password
    run_id: str | None = None
    experiment_id: str | None = None
    login: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)  # environment variables

    def open(self) -> NodeRun:
        """The run, to log to. Close it, or use it in a `with` block."""
        for name, value in self.login.items():
            os.environ.setdefault(name, value)
        return NodeRun(self)

    def at(self, run_id: str | None) -> RunHandle:
        """Another run of the same experiment; a silent one without run_id or without tracking."""
        return replace(self, run_id=run_id) if self.uri and run_id else RunHandle()

    def link(self, run_id: str) -> str:
        """Address of a run of this experiment in the UI."""
        return _page(self.uri, f"experiments/{self.experiment_id}/runs/{run_id}")

    def links(self) -> dict[str, str]:
        """{what: where it is in the UI}: this run, charts that compare the bits/dim of the stages, over all launches of
        the experiment; for a SQLite file first the command that starts the UI."""
        serve = f"-m mlflow ui --backend-store-uri {shlex.quote(self.uri)} --host 127.0.0.1 --port 5000"
        links = {} if is_server(self.uri) else {"MLflow": f"{shlex.quote(sys.executable)} {serve}"}
        curves = f"experiments/{self.experiment_id}/runs?viewStateShareKey=stages&compareRunsMode=CHART"
        return links | {"run": self.link(self.run_id), "curves": _page(self.uri, curves)} if self.run_id else links


class NodeRun(contextlib.AbstractContextManager["NodeRun"]):
    """Logs to one run. No call raises, and none but `close` waits for metrics that are on their way."""

    def __init__(self, handle: RunHandle) -> None:
        self.handle = handle
        self._sent: deque[Any] = deque(maxlen=100)  # MLflow's handles of the newest batches of metrics
        self._monitor: Any = None
        self._watch = threading.Thread()  # starts the monitor

    def __exit__(self, *_: object) -> None:
        self.close()

    def log_metrics(self, metrics: Mapping[str, float], step: int = 0, *, time_ms: int | None = None) -> None:
        """time_ms: when they were measured, since 1970; None: now."""
        run_id, points = self.handle.run_id, [{**metrics, "step": step, "time_ms": time_ms or _now_ms()}]
        _QUEUE_LOG.addFilter(self._is_foreign)
        self.send(lambda client: self._sent.append(client.log_batch(run_id, _metrics(points), synchronous=False)))

    def log_history(self, history: Iterable[Mapping[str, float]]) -> None:
        """Entries {"step": ..., "time_ms": ..., metric: value}; MLflow adds the points that the run does not have."""
        self.send(lambda client: _add(client, self.handle.run_id, history))

    def log_image(self, image: Any, *, key: str, step: int = 0) -> None:
        """A picture with a step slider in the UI: (H, W, C) uint8 array or PIL image."""
        self.send(lambda client: client.log_image(self.handle.run_id, image, key=key, step=step, synchronous=True))

    def log_text(self, text: str, file: str) -> None:
        self.send(lambda client: client.log_text(self.handle.run_id, mask(text), file))

    def log_dataset(self, dataset: Dataset, *, resolution: int, bits: int, split: str, context: str) -> None:
        """A split that the run read. context: MLflow's word for its purpose, e.g. "training"."""

        def send(client: MlflowClient) -> None:
            from mlflow.entities import Dataset as Entity
            from mlflow.entities import DatasetInput, InputTag

            entity = Entity(
                name=f"{dataset.manifest.dataset}-{resolution}px-{bits}bit-{split}",
                digest=dataset.split_digest(resolution=resolution, bits=bits, split=split),
                source_type=dataset.uri.partition("://")[0] if "://" in dataset.uri else "local",
                source=json.dumps({"uri": plain_uri(dataset.uri)}),
                profile=json.dumps({"num_rows": dataset.num_images(split), "bits": bits}),
            )
            tags = [InputTag("mlflow.data.context", context)]
            client.log_inputs(self.handle.run_id, datasets=[DatasetInput(entity, tags)])

        self.send(send)

    def set_tags(self, tags: Mapping[str, str]) -> None:
        self.send(lambda client: client.log_batch(self.handle.run_id, tags=_tags(tags)))

    def watch_machine(self, *, name: str = "") -> None:
        """Logs this machine's load as system/<metric>, or system/<name>/<metric>, until the run is closed. MLflow's
        monitor stops for good when the server does not answer. It is started in a thread: importing MLflow takes
        seconds."""

        def start(client: MlflowClient) -> None:
            from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

            self._monitor = SystemMetricsMonitor(
                self.handle.run_id, resume_logging=True, node_id=name or None, tracking_uri=self.handle.uri
            )
            self._monitor.start()

        self._watch = threading.Thread(target=self.send, args=(start,), daemon=True)
        self._watch.start()

    def close(self) -> None:
        """Waits until MLflow's queue has sent the metrics, CLOSE_SEC at most."""
        if (self._sent or self._watch.ident) and not _done_within(CLOSE_SEC, self._finish):
            _server(self.handle.uri).failed(f"no answer for {CLOSE_SEC:g} s", pause=True)

    def _finish(self) -> None:
        while self._sent:
            with contextlib.suppress(Exception):  # `_is_foreign` has warned
                self._sent.popleft().wait()
        if self._watch.ident:
            self._watch.join()
        if self._monitor is not None:
            self._monitor.finish()
            self._monitor = None

    def _is_foreign(self, record: logging.LogRecord) -> bool:
        """MLflow's queue drops a batch that it cannot send, and its only sign that does not block is an error in its
        log. A filter of this log: for batches of this run, a warning per server and a pause take that error's place."""
        text = record.getMessage()
        if f"Run Id {self.handle.run_id}:" not in text:
            return True
        _server(self.handle.uri).failed(text.partition("Exception: ")[2] or text, pause=True)
        return False

    def send(self, call: Call) -> None:
        """A call of MLflow's client that is none of the above."""
        if self.handle.run_id:
            _server(self.handle.uri).send(call)


class Ledger:
    """One parent run per launch of the pipeline, one child run per node. Without a URI it records nothing.

    No call raises. What the server misses is kept in its order, with its times, and sent with the next call that the
    server answers, `close` at the latest.
    """

    def __init__(self, uri: str = "", *, experiment: str = "", run_folder: str = "") -> None:
        self.uri, self.experiment, self.run_folder = uri, experiment, mask_uris(run_folder).replace("'", "")
        self.experiment_id: str | None = None
        self._ids: dict[str, str | None] = {_PARENT: None}  # runs of this launch by node; None: not opened yet
        self._calls: deque[Call] = deque()
        if file := sqlite_file(uri):
            with contextlib.suppress(OSError):  # the first call will say so
                file.parent.mkdir(parents=True, exist_ok=True)
                file.touch()

    @property
    def parent(self) -> RunHandle:
        return RunHandle(self.uri, self._ids[_PARENT], self.experiment_id)

    def start_pipeline(self, *, tags: Mapping[str, str], params: Mapping[str, Any], config: str) -> None:
        """Opens the parent run. Runs of this run folder that are RUNNING become KILLED: the caller holds the folder's
        lock, so their driver is gone. config: text of its config.yaml."""
        query = f"attributes.status = 'RUNNING' and tags.run_folder = '{self.run_folder}'"

        def close_abandoned(client: MlflowClient) -> None:
            for run in client.search_runs([self.experiment_id], query, max_results=1000):
                client.set_terminated(run.info.run_id, "KILLED")

        self._send(close_abandoned)
        self._open(_PARENT, tags, params)
        self._send(lambda client: client.log_text(self._ids[_PARENT], mask(config), "config.yaml"))

    def start_node(
        self, node: str, *, tags: Mapping[str, str], params: Any, continue_id: str | None = None
    ) -> RunHandle:
        """The node's child run. A retry continues it, as it continues `continue_id`, the run of an earlier launch."""
        self._ids.setdefault(node, continue_id)
        self._open(node, tags, params)
        login = {name: os.environ[name] for name in LOGIN if name in os.environ}
        return RunHandle(self.uri, self._ids[node], self.experiment_id, login)

    def reuse_node(self, node: str, *, tags: Mapping[str, str], reused_run: str | None) -> None:
        """Child run of a skipped node: no numbers, only a pointer to the run that made its output."""
        self.start_node(node, tags={**tags, "reused_run": reused_run or "unknown"}, params={})
        self.finish(node, "FINISHED")
        query = f"attributes.run_id = '{reused_run}' and attributes.status != 'FINISHED'"

        def finish_late(client: MlflowClient) -> None:
            for run in client.search_runs([self.experiment_id], query):  # its launch died before it could say so
                client.set_terminated(run.info.run_id, "FINISHED")

        self._send(finish_late)

    def show(self, node: str, picture: Picture, png: bytes) -> None:
        """Adds a picture to the run of a node, or to the run that it names."""
        self._send(
            lambda client: client.log_image(
                picture.run_id or self._ids[node],
                Image.open(io.BytesIO(png)),
                key=picture.key,
                step=picture.step,
                synchronous=True,
            )
        )

    def finish(
        self,
        node: str,
        status: str,
        *,
        metrics: Mapping[str, float] | None = None,
        history: Sequence[Mapping[str, float]] = (),
    ) -> str | None:
        """Ends the run of a node, if this launch opened one, with its recorded history (`NodeRun.log_history`) and the
        results that are in no curve. Returns its id if MLflow has it. KILLED is sent by `close`."""
        if node not in self._ids:
            return None
        now, curves = _now_ms(), {key for entry in history for key in entry}
        results = {key: value for key, value in (metrics or {}).items() if key not in curves}
        points = [*history, {"step": 0, "time_ms": now, **results}]
        if history or results:
            self._send(lambda client: _add(client, self._ids[node], points))
        end = functools.partial(self._end, node, status, now)
        if status == "KILLED":
            self._calls.append(end)
        else:
            self._send(end)
        return self._ids[node]

    def close(self, status: str) -> None:
        """Ends the parent run; asks the server once more, whatever happened before.

        KILLED: waits KILLED_SEC at most; runs that are open after that, the next launch closes (`start_pipeline`).
        """
        _server(self.uri).paused_until = 0.0
        end = functools.partial(self._end, _PARENT, status, _now_ms())
        _done_within(KILLED_SEC if status == "KILLED" else None, lambda: self._send(end))

    def _end(self, name: str, status: str, now_ms: int, client: MlflowClient) -> None:
        client.set_terminated(self._ids[name], status, now_ms)

    def _open(self, name: str, tags: Mapping[str, str], params: Any) -> None:
        """Creates the run or, if it exists, makes it RUNNING again under this launch's parent run."""
        start_ms = _now_ms()

        def open_run(client: MlflowClient) -> None:
            from mlflow.tracking.context import git_context, registry

            context = registry.resolve_tags(ignore=[git_context.GitRunContext])  # user, source
            parent = {PARENT_TAG: above} if (above := self._ids[_PARENT]) and name != _PARENT else {}
            own = {NAME: name, "run_folder": self.run_folder, "node": name}
            own["mlflow.source.git.commit"] = tags.get("git_commit", "unknown")
            if reused := tags.get("reused_run"):
                page = f"#/experiments/{self.experiment_id}/runs/{reused}/model-metrics?workflowType=machine_learning"
                own[NOTE] = f"Up to date: see [the charts of the run that made it]({page})"
            labels = _tags({**context, **own, **parent, **tags})
            run_id = self._ids[name]
            if run_id is not None:
                try:
                    client.update_run(run_id, status="RUNNING")  # refused for a run that was deleted
                    return client.log_batch(run_id, tags=labels)
                except Exception as error:
                    if is_unreachable(error):
                        raise
            values = {tag.key: tag.value for tag in labels}
            made = client.create_run(self.experiment_id, start_time=start_ms, tags=values)
            self._ids[name] = made.info.run_id

        self._send(open_run)
        self._send(lambda client: client.log_batch(self._ids[name], params=_params(params)))

    def _send(self, call: Call) -> None:
        if self.uri:
            self._calls.append(call)
            while self._calls and _server(self.uri).send(self._make_first):
                self._calls.popleft()

    def _make_first(self, client: MlflowClient) -> None:
        if self.experiment_id is None:
            found = client.get_experiment_by_name(self.experiment)
            if found is None:
                file = sqlite_file(self.uri)
                place = (file.parent / _ARTIFACTS).as_uri() if file else None
                found = client.get_experiment(client.create_experiment(self.experiment, artifact_location=place))
            elif found.lifecycle_stage == "deleted":
                client.restore_experiment(found.experiment_id)
            self.experiment_id = found.experiment_id
            for key, value in _views(found.experiment_id).items():
                if key not in found.tags:
                    client.set_experiment_tag(found.experiment_id, key, value)
        self._calls[0](client)


def _views(experiment_id: str) -> dict[str, str]:
    """Tags of an experiment: a saved view, which the UI's menu "Views" offers, and a description that links it.

    Sorted by `start_time` in backticks, the UI does not fold a run's children away.
    """
    kinds = {"valid/bits_per_dim": "LINE", "train/bits_per_dim": "LINE", "test/bits_per_dim": "BAR"}
    state = {
        "searchFilter": "tags.node LIKE 'train_%' and tags.reused_run IS NULL",
        "orderByKey": "attributes.`start_time`",
        "compareRunSections": [{"uuid": "0", "name": "bits/dim", "display": True}],
        "compareRunCharts": [{"uuid": k, "metricKey": k, "type": v, "metricSectionId": "0"} for k, v in kinds.items()],
    }
    view = {"name": "bits/dim of the stages", "createdAt": 0, "updatedAt": 0, "state": json.dumps(state)}
    page = f"#/experiments/{experiment_id}/runs?workflowType=machine_learning&compareRunsMode=CHART"
    links = f"[Curves of the stages]({page}&viewStateShareKey=stages), "
    links += f"[totals and samples of the launches]({page}&searchFilter=tags.node%3D'{_PARENT}')"
    return {"mlflow.sharedViewState.stages": json.dumps(view), NOTE: links}


def _done_within(seconds: float | None, work: Callable[[], None]) -> bool:
    """Whether it ended in time, None: always; otherwise a thread goes on with it that ends with this process."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


def _add(client: MlflowClient, run_id: str | None, history: Iterable[Mapping[str, float]]) -> None:
    points = _metrics(history)
    for start in range(0, len(points), _METRIC_BATCH):
        client.log_batch(run_id, metrics=points[start : start + _METRIC_BATCH])


def _metrics(history: Iterable[Mapping[str, float]]) -> list[Any]:
    from mlflow.entities import Metric

    return [
        Metric(key, float(value), int(entry["time_ms"]), int(entry["step"]))
        for entry in history
        for key, value in entry.items()
        if key not in ("step", "time_ms")
    ]


def _tags(tags: Mapping[str, str]) -> list[Any]:
    from mlflow.entities import RunTag

    return [RunTag(key, mask(str(value))[:_TAG_CHARS]) for key, value in tags.items()]


def _params(params: Any) -> list[Any]:
    from mlflow.entities import Param

    return [Param(key, mask(str(value))[:_PARAM_CHARS]) for key, value in fingerprint.flatten(params).items()]


def _now_ms() -> int:
    return int(time.time() * 1000)
