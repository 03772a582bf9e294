"""The Ray session of a start: its own on this machine, or the cluster that it was given.

A session of our own (embedded) listens on 127.0.0.1 only. Ray decides that when it is imported, so import ray only
after `connect`, or inside functions.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from data_prep.files import UserError
from pipelines import orphans
from pipelines.dag.fingerprint import ROOT
from pipelines.dag.git import git_commit

OBJECT_STORE_BYTES = 300_000_000  # nodes hand over paths, so little travels through Ray's shared memory
_watcher: subprocess.Popen | None = None  # beside an embedded session
_JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # Ray sets this variable for the entry point of a submitted job

_EVERYWHERE = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DATA_USE_DATASOURCE_V2": "0",  # the newer Parquet reader takes seconds an epoch on small data
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # train workers stay in the driver's working directory
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "TOKENIZERS_PARALLELISM": "false",
}
_EMBEDDED = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # "no cluster": all of Ray's servers bind to 127.0.0.1
    "RAY_AUTH_MODE": "disabled",  # loopback only; a token file left by another cluster would lock us out
    "RAY_DEDUP_LOGS": "0",
    "RAY_worker_maximum_startup_concurrency": "8",  # a trainer is many small processes; fewer and Ray warns of each
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # the coming default; silences a warning of every task
}


@dataclass(frozen=True)
class ClusterInfo:
    """What the session is and has."""

    mode: str  # embedded | job | cluster
    resources: Mapping[str, float]  # now, e.g. {"CPU": 2.0}
    machines: tuple[Mapping[str, float], ...] = ()  # what each of them has; (): not looked at
    limit: Mapping[str, float] | None = None  # with all machines that autoscaling may add; None: unknown
    autoscales: bool = False

    def budget(self, resource: str) -> float:
        """How much of a resource may be promised to nodes that run side by side."""
        if not self.autoscales:
            return self.resources.get(resource, 0.0)
        if self.limit is None:
            return float("inf")
        return max(self.limit.get(resource, 0.0), self.resources.get(resource, 0.0))

    def check_fits(self, name: str, cost: Mapping[str, float], *, num_workers: int = 0, each: Any = None) -> None:
        """Raises UserError if the cluster can never give a node what it takes.

        cost: in all. num_workers, each: processes of which every one must find its place on a single machine.
        """
        for resource, amount in cost.items():
            if amount > self.budget(resource) + 1e-9:
                has = f"{self.resources.get(resource, 0):g} {resource}"
                if self.autoscales:
                    has += f" and can grow to {self.budget(resource):g}"
                raise UserError(
                    f"{name} needs {amount:g} {resource}, the cluster has {has}; ask for fewer or smaller workers"
                )
        places = self._places({key: amount for key, amount in (each or {}).items() if amount > 0})
        if places is not None and places < num_workers:
            one = " and ".join(f"{amount:g} {key}" for key, amount in each.items() if amount > 0)
            raise UserError(
                f"{name} needs {num_workers} x {one}, each on one machine; there is room for {places}; "
                "ask for fewer or smaller workers"
            )

    def _places(self, each: Mapping[str, float]) -> int | None:
        """How many processes of this size the machines hold, None if that is not known or not limited."""
        if self.autoscales or not self.machines or not each:
            return None
        return sum(
            int(min(machine.get(key, 0.0) / amount + 1e-9 for key, amount in each.items())) for machine in self.machines
        )


def in_ray_job() -> bool:
    """True in the entry point of `ray job submit`: its working directory may be a throw-away copy."""
    return _JOB_CONFIG in os.environ


def joins() -> bool:
    """Whether `connect` joins a cluster that is there, instead of starting a session of its own."""
    return in_ray_job() or os.environ.get("RAY_ADDRESS", "") not in ("", "local")


def connect(
    *,
    num_cpus: float | None = None,
    num_gpus: float | None = None,
    object_store_bytes: int = OBJECT_STORE_BYTES,
    python_path: tuple[Path, ...] = (ROOT,),
) -> ClusterInfo:
    """Joins the job's or $RAY_ADDRESS's cluster, else starts an embedded session. Call it once, before ray is used.

    num_cpus, num_gpus, object_store_bytes: of an embedded session only; None lets Ray count.
    python_path: folders that tasks import from.
    Raises UserError when the cluster at $RAY_ADDRESS does not answer.
    """
    for key, value in _EVERYWHERE.items():
        os.environ.setdefault(key, value)
    os.environ.setdefault("SPN_GIT_COMMIT", git_commit())
    if joins():
        _check_answers(os.environ.get("RAY_ADDRESS", ""))
        _join(python_path)
        return _describe("job" if in_ray_job() else "cluster")
    os.environ.pop("RAY_ADDRESS", None)
    os.environ.update(_EMBEDDED)
    paths = [str(path) for path in python_path] + os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(path for path in paths if path))
    ray = _import_ray()
    ray.init(
        address="local",
        num_cpus=num_cpus,
        num_gpus=num_gpus,
        object_store_memory=object_store_bytes,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        configure_logging=False,
    )
    global _watcher
    _watcher = orphans.watch()
    return _describe("embedded")


def disconnect() -> None:
    """Ends an embedded session, leaves a cluster."""
    global _watcher
    if "ray" in sys.modules:
        sys.modules["ray"].shutdown()
    orphans.dismiss(_watcher)
    _watcher = None


def _import_ray() -> Any:
    import ray
    from ray._private import ray_constants

    # If something imported ray earlier, the environment variable came too late for it.
    ray_constants.ENABLE_RAY_CLUSTER = False
    return ray


def _check_answers(address: str) -> None:
    """Ray's own wait for a missing cluster ends by killing this process, so the door is tried before."""
    if address.startswith(("ray://", "http://", "https://")):
        raise UserError(f"RAY_ADDRESS is {address}; it must be HOST:PORT of the head node, or use `ray job submit`")
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return  # "auto": Ray looks for a cluster on this machine
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except OSError as error:
        raise UserError(f"no Ray cluster answers at {address} (RAY_ADDRESS): {error}") from error


def _join(python_path: tuple[Path, ...]) -> None:
    import ray

    job = json.loads(os.environ.get(_JOB_CONFIG, "{}")).get("runtime_env") or {}
    theirs = job.get("env_vars") or {}
    ours = {key: os.environ[key] for key in (*_EVERYWHERE, "SPN_GIT_COMMIT")}
    if "working_dir" not in job:  # with one, Ray puts its copy on every worker's path itself
        ours["PYTHONPATH"] = os.pathsep.join(str(path) for path in python_path)
    # Ray refuses a variable that the job sets too; the job's own value stands.
    env_vars = {key: value for key, value in ours.items() if key not in theirs}
    try:
        ray.init(runtime_env={"env_vars": env_vars}, log_to_driver=False, logging_level=logging.WARNING)
    except ConnectionError as error:
        raise UserError(f"no Ray cluster answers (RAY_ADDRESS): {str(error).splitlines()[0]}") from error


def _describe(mode: str) -> ClusterInfo:
    import ray

    machines = tuple(machine["Resources"] for machine in ray.nodes() if machine["Alive"])
    scales, limit = (False, None) if mode == "embedded" else _autoscaling()
    return ClusterInfo(mode, dict(ray.cluster_resources()), machines, limit, scales)


def _autoscaling() -> tuple[bool, dict[str, float] | None]:
    """(whether machines may still be added, all resources with them or None if that cannot be known).

    Ray has no public call for this. Some platforms leave the cluster's limits in its control store, which Ray Train
    asks too. The open-source launcher passes its YAML to a monitor process on the head node: a tiny task there reads
    it. Under KubeRay the limits are in a Kubernetes object that we cannot see.
    """
    import ray
    from ray._private.state import state

    known = state.get_max_resources_from_cluster_config()
    if known:
        return True, {name: float(amount) for name, amount in known.items()}
    ask = ray.remote(num_cpus=0, max_retries=0, resources={"node:__internal_head__": 0.001})(_head_autoscaler)
    try:
        found = ray.get(ask.remote(), timeout=60)
    except (ray.exceptions.RayError, TimeoutError):
        return False, None
    if found == "kuberay":
        return True, None
    return (True, limit_of(yaml.safe_load(found))) if found else (False, None)


def _head_autoscaler() -> str:
    """Runs on the head node: the launcher's YAML, "kuberay", or "" without autoscaling."""
    import psutil

    for process in psutil.process_iter(["cmdline"]):
        for word in process.info["cmdline"] or ():
            if word.startswith("--autoscaling-config=") and len(word) > len("--autoscaling-config="):
                return Path(word.partition("=")[2]).expanduser().read_text()
    return "kuberay" if os.environ.get("KUBERAY_GEN_RAY_START_CMD") else ""


def limit_of(config: Mapping[str, Any]) -> dict[str, float]:
    """All resources of a launcher YAML's cluster at full size: the head and max_workers of each type.

    Types compete for the YAML's overall max_workers; the largest machines are counted, separately for each resource.
    """
    types = config.get("available_node_types") or {}
    head = config.get("head_node_type")
    overall = config.get("max_workers", sum(kind.get("max_workers", 0) for kind in types.values()))
    names = {name for kind in types.values() for name in kind.get("resources") or {}}
    limit = {}
    for name in names:
        machines = []
        for key, kind in types.items():
            amount = float((kind.get("resources") or {}).get(name, 0))
            machines += [amount] * (kind.get("max_workers", 0) if key != head else 0)
        own = float(((types.get(head) or {}).get("resources") or {}).get(name, 0))
        limit[name] = own + sum(sorted(machines, reverse=True)[:overall])
    return limit
