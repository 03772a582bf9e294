"""Several Ray nodes: training workers on different ones, shared storage as a path and on S3, MLflow over HTTP.

The nodes are processes of this machine. Nodes of the pipeline wait for each other's CPUs, a Ray node is killed, storage
goes away for a moment; the losses stay those of a run without any of it.

    python -m pytest tests/pipelines/dag/test_multi_node.py
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from mlflow.tracking import MlflowClient
from toy import training
from toy.training import NODE, MlflowServer

from data_prep.files import Store, open_store

pytestmark = pytest.mark.faults
# Two of these workers do not fit on one node of one CPU, and two stages not on both nodes. What they leave over on each
# is less than the share of a CPU that is set aside for reading.
WORKERS = ["train.num_steps=120", "resources.num_workers=2", "resources.cpus_per_worker=0.85"]
WORKERS += ["model.decoder.dropout=0.2", "model.embedder.dropout=0.2"]  # masks are drawn again as they were, too


@pytest.fixture(scope="module")
def mlflow_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowServer]:
    server = MlflowServer(tmp_path_factory.mktemp("mlflow")).start(wait=False)
    yield server
    server.kill()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head without CPUs and two nodes of one CPU each."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "test")
        folder = tempfile.mkdtemp(prefix="ray")  # paths of sockets below it may have 107 characters
        head = {"num_cpus": 0, "include_dashboard": False, "temp_dir": folder, "object_store_memory": 100 * 2**20}
        started = Cluster(initialize_head=True, head_node_args=head)
        for _ in range(2):
            add_node(started)
        yield started
        started.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def add_node(cluster: Any) -> None:
    cluster.add_node(num_cpus=1, object_store_memory=100 * 2**20)


def nodes_with_workers(cluster: Any) -> list[Any]:
    """The Ray nodes on which training workers run: a worker's parent is the raylet of its node."""
    parents = {worker.ppid() for worker in training.train_workers(os.getpid())}
    return [node for node in cluster.worker_nodes if node.all_processes["raylet"][0].process.pid in parents]


class Proxy:
    """Passes bytes on to another port of this machine, or refuses to."""

    def __init__(self, target: int) -> None:
        self.target, self.away, self.refused = target, False, 0
        self.open: list[socket.socket] = []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def break_down(self) -> None:
        """Ends every connection and takes none until some were refused."""
        self.away, self.refused = True, 0
        for each in self.open:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        deadline = time.monotonic() + 60
        while self.refused < 4:
            assert time.monotonic() < deadline, "nobody asked"
            time.sleep(0.05)
        self.away = False

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:  # closed: the test is over
                return
            if self.away:
                self.refused += 1
                client.close()
                continue
            server = socket.create_connection(("127.0.0.1", self.target))
            self.open = [*self.open[-50:], client, server]
            for pair in ((client, server), (server, client)):
                threading.Thread(target=self._pass_on, args=pair, daemon=True).start()

    @staticmethod
    def _pass_on(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def bucket(s3: Callable[[str], str], s3_endpoint: str) -> Iterator[tuple[str, str, Proxy]]:
    """The same bucket twice: as the pipeline sees it, through a proxy, and as the test does; and the proxy."""
    proxy, direct = Proxy(int(s3_endpoint.rpartition(":")[2])), s3("runs/all")
    yield direct.replace(s3_endpoint, f"127.0.0.1:{proxy.port}"), direct, proxy
    proxy.listener.close()


def launch(cluster: Any, storage: Path | str, server: MlflowServer, *arguments: str) -> subprocess.Popen[str]:
    options = [*WORKERS, "resources.retry_wait_sec=0.5", f"tracking.uri={server.uri}", "bits=[8]", *arguments]
    variables = {"RAY_ADDRESS": cluster.address, "RAY_AUTH_MODE": "disabled", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    return training.launch(storage, *options, script="full_multidim.py", **variables)


def finished(store: Store) -> dict[str, dict[str, Any]]:
    """{node: content of its _SUCCESS.json}"""
    files = [file.path for file in store.walk("debug/nodes") if file.path.endswith("_SUCCESS.json")]
    return {path.split("/")[2]: json.loads(store.read_bytes(path)) for path in files}


def losses(store: Store) -> dict[tuple[int, str], float]:
    """{(step, metric): bits/dim} of the whole training, over all slices, whichever the chain takes."""
    lines, keys = history(store, finished(store)[NODE]), ("train/bits_per_dim", "valid/bits_per_dim/all_slices")
    return {(line["step"], key): line[key] for line in lines for key in keys if key in line}


def history(store: Store, entry: dict[str, Any]) -> list[dict[str, Any]]:
    folder = f"debug/nodes/{entry['node']}/{entry['fingerprint']}/{entry['attempt']}"
    return json.loads(store.read_bytes(f"{folder}/{entry['named']['history']}"))


def trained(store: Store, entry: dict[str, Any]) -> tuple[int, int]:
    """When a training logged first and last: its task starts before Ray has its workers' CPUs."""
    times = [line["time_ms"] for line in history(store, entry)]
    return min(times), max(times)


@pytest.fixture(scope="module")
def undisturbed(
    cluster: Any, mlflow_server: MlflowServer, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Store, int]:
    """A run folder on a shared path, trained without a fault, and on how many Ray nodes its workers were."""
    storage = tmp_path_factory.mktemp("shared")
    mlflow_server.wait()
    only = "prepare_data,train_first_slice,train_size_upscale"
    run = launch(
        cluster,
        storage,
        mlflow_server,
        "stages=[first_slice,size_upscale]",
        "per_stage.first_slice.train.num_steps=20",
        f"--only={only}",
    )
    training.wait_for_step(storage, 20, run)
    with training.held(training.train_workers(os.getpid())):
        used = len(nodes_with_workers(cluster))
    training.finish(run)
    return open_store(storage), used


def test_workers_are_on_different_nodes_and_stages_wait_for_their_cpus(undisturbed: tuple[Store, int]) -> None:
    store, used = undisturbed
    assert used == 2
    trains = [entry for node, entry in finished(store).items() if node.startswith("train_")]
    assert len(trains) == 2
    (_, first), (second, _) = sorted(trained(store, entry) for entry in trains)
    assert first <= second, "both together need more CPUs than there are"


def test_on_s3_with_a_killed_node_and_storage_that_fails_the_losses_are_the_same(
    cluster: Any, mlflow_server: MlflowServer, undisturbed: tuple[Store, int], bucket: tuple[str, str, Proxy]
) -> None:
    through_proxy, direct, proxy = bucket
    arguments = (through_proxy, mlflow_server, "stages=[size_upscale]")
    run = launch(cluster, *arguments)
    training.wait_for_step(direct, 20, run)
    proxy.break_down()
    training.wait_for_step(direct, training.committed(direct) + 20, run)
    with training.held(training.train_workers(os.getpid())):
        cluster.remove_node(nodes_with_workers(cluster)[-1], allow_graceful=False)
    add_node(cluster)
    second = training.finish(launch(cluster, *arguments), code=2)
    assert "is in use by process" in second
    output = training.finish(run)
    assert f"[{NODE}] lost (" in output

    store = open_store(direct)
    assert set(finished(store)) == {"prepare_data", NODE, "evaluate", "sample", "report"}
    assert store.exists("debug/report.html") and not store.exists("debug/run.lock")
    assert losses(store) == pytest.approx(losses(undisturbed[0]), abs=1e-6)
    client = MlflowClient(mlflow_server.uri)
    experiment = client.get_experiment_by_name("debug")
    query = f"tags.node = '{NODE}' and tags.run_folder like 's3:%'"
    (train,) = client.search_runs([experiment.experiment_id], query)
    assert train.info.status == "FINISHED" and int(train.data.tags["restarts"]) >= 1
    steps = {point.step for point in client.get_metric_history(train.info.run_id, "train/bits_per_dim")}
    assert steps == {step for step, key in losses(store) if key == "train/bits_per_dim"}
