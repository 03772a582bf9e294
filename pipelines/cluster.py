"""The Ray session of a launch: its own on this machine or an existing cluster; and which commit the code is from.

A session of our own (embedded) listens on 127.0.0.1 only, answers nobody without its token, and keeps its sockets and
logs in a folder that is closed to other accounts. Ray decides much of that when it is imported, so `connect` comes
before any `import ray`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from data_prep.files import UserError, naming_full_disk

ROOT = Path(__file__).resolve().parents[1]  # the folder that holds the packages
_OBJECT_STORE_BYTES = 300_000_000  # nodes hand over paths, so little travels through Ray's shared memory
_MAX_FOLDER_BYTES = 43  # the path of a socket may have 107, of which Ray's own names take 64
_JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # Ray sets this variable for the entry point of a submitted job

_EVERYWHERE = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DATA_USE_DATASOURCE_V2": "0",  # the newer Parquet reader takes seconds per epoch on small data
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # train workers stay in the driver's working directory
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "604800",  # a week: trainers wait in Ray's queue for their resources
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",  # the end of a training is seen two looks after it, and the next waits
    "RAY_WARN_BLOCKING_GET_INSIDE_ASYNC": "0",  # what Ray Train's controller does
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "TOKENIZERS_PARALLELISM": "false",
}
_EMBEDDED = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # "no cluster": all of Ray's servers bind to 127.0.0.1
    "RAY_AUTH_MODE": "token",  # loopback is open to every account of this machine
    "RAY_AUTH_TOKEN": secrets.token_hex(32),  # this process's own; before a token file that another cluster left
    "RAY_DEDUP_LOGS": "0",
    "RAY_worker_maximum_startup_concurrency": "8",  # a trainer is many small processes; fewer and Ray warns of each
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # a process per training; nobody takes this machine away
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # Ray's future default; silences one warning per task
}

# Of the user's variables, what a cluster's workers get too; an embedded session's get all.
_PASSED_ON = (
    "SPN_GIT_COMMIT",
    "TORCHINDUCTOR_CACHE_DIR",
    "TORCHINDUCTOR_COORDINATE_DESCENT_TUNING",
    "TORCHINDUCTOR_MAX_AUTOTUNE",
    "TRITON_CACHE_DIR",
)


@dataclass(frozen=True)
class ClusterInfo:
    """What a session has now, e.g. {"CPU": 2.0}; capacity: what nodes that run side by side share of it, None on a
    cluster, which may grow: there Ray's queue decides."""

    resources: Mapping[str, float]
    capacity: Mapping[str, float] | None


NONE = ClusterInfo({}, {})  # no session: nothing has to run


def in_ray_job() -> bool:
    """True in the entry point of `ray job submit`: its working directory may be a throw-away copy."""
    return _JOB_CONFIG in os.environ


def joins() -> bool:
    """Whether `connect` joins a cluster that is there, instead of starting a session of its own."""
    return in_ray_job() or os.environ.get("RAY_ADDRESS", "") not in ("", "local")


def connect(*, num_cpus: float | None = None, num_gpus: float | None = None) -> ClusterInfo:
    """Joins the job's or $RAY_ADDRESS's cluster, else starts an embedded session. Call it once, before ray is used.

    num_cpus, num_gpus: of an embedded session only; None lets Ray count.
    Raises UserError when the cluster at $RAY_ADDRESS does not answer.
    """
    for key, value in _EVERYWHERE.items():
        os.environ.setdefault(key, value)
    os.environ.setdefault("SPN_GIT_COMMIT", git_commit())
    if joins():
        _check_answers(os.environ.get("RAY_ADDRESS", ""))
        _join()
        import ray

        return ClusterInfo(dict(ray.cluster_resources()), None)
    assert "ray" not in sys.modules, "Ray reads its settings on import: call connect before"
    os.environ.pop("RAY_ADDRESS", None)
    os.environ.update(_EMBEDDED)
    temporary = tempfile.gettempdir() if len(os.fsencode(tempfile.gettempdir())) < _MAX_FOLDER_BYTES - 12 else "/tmp"
    folder = os.environ.setdefault("RAY_TMPDIR", str(private_folder(Path(temporary))))
    if len(os.fsencode(folder)) > _MAX_FOLDER_BYTES:
        raise UserError(f"RAY_TMPDIR is {folder}; the sockets there allow {_MAX_FOLDER_BYTES} bytes: set a shorter one")
    paths = [str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(path for path in paths if path))
    import ray

    with naming_full_disk(folder):
        ray.init(
            address="local",
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            object_store_memory=_OBJECT_STORE_BYTES,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            configure_logging=False,
        )
    found = dict(ray.cluster_resources())
    return ClusterInfo(found, found)


def disconnect() -> None:
    """Ends an embedded session, leaves a cluster."""
    if "ray" in sys.modules:
        sys.modules["ray"].shutdown()


def private_folder(parent: Path) -> Path:
    """Where sessions of this account have their sockets and logs: Ray makes its own folders writable by everybody."""
    folder = parent / f"spn-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise UserError(f"{folder} is open to other accounts of this machine; remove it, or set RAY_TMPDIR")
    return folder


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


def _join() -> None:
    import ray

    job = json.loads(os.environ.get(_JOB_CONFIG, "{}")).get("runtime_env") or {}
    theirs = job.get("env_vars") or {}
    ours = {key: os.environ[key] for key in (*_EVERYWHERE, *_PASSED_ON) if key in os.environ}
    if "working_dir" not in job:  # with one, Ray puts its copy on every worker's path itself
        ours["PYTHONPATH"] = str(ROOT)
    # Ray refuses a variable that the job sets too; the job's own value stands.
    env_vars = {key: value for key, value in ours.items() if key not in theirs}
    try:
        ray.init(runtime_env={"env_vars": env_vars}, log_to_driver=False, logging_level=logging.WARNING)
    except ConnectionError as error:
        raise UserError(f"no Ray cluster answers (RAY_ADDRESS): {str(error).splitlines()[0]}") from error


def git_commit(root: Path = ROOT) -> str:
    """Of the project's checkout, with -dirty if files were changed; else $SPN_GIT_COMMIT (for jobs), else "unknown"."""
    if (root / ".git").exists():
        command = ["git", "-C", str(root), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
        try:
            return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
        except (OSError, subprocess.SubprocessError):
            pass
    return os.environ.get("SPN_GIT_COMMIT") or "unknown"
