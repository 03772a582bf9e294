"""What this project takes from Ray without Ray promising to keep it: private names and private file formats.

No other module of the three packages may use such names. tests/data_prep/test_ray_compat.py tries each use, so an
upgrade of Ray shows here what it broke; pyproject.toml names the newest version that was tried. Ray itself is imported
only inside functions: what it reads from the environment on import is set before by pipelines/cluster.py.
"""

from __future__ import annotations

import json
import posixpath
import time
from typing import TYPE_CHECKING, Any

from data_prep.files import Store

if TYPE_CHECKING:
    import ray.data

_SNAPSHOT = "checkpoint_manager_snapshot.json"  # Ray Train's record of committed checkpoints
_ANSWER_SEC = 1.0  # how long Ray's autoscaler may take to answer; a cluster may also have no machine yet
_STEP_SEC = 0.02  # shortest time between two steps of Ray Data's scheduling


class ExecutionCallback:
    """What Ray Data calls while it runs a job: the methods of its own class of this name."""

    def before_execution_starts(self, executor: Any) -> None: ...

    def on_execution_step(self, executor: Any) -> None: ...

    def after_execution_succeeds(self, executor: Any) -> None: ...

    def after_execution_fails(self, executor: Any, error: Exception) -> None: ...


class WaitForAutoscaler(ExecutionCallback):
    """Makes a Ray Data job start on all its cores.

    Ray Data asks the autoscaler for the job's share of the cluster without waiting for the answer, assumes that there
    is no core, starts a single task and asks again a second later. The answer takes some milliseconds.
    """

    def before_execution_starts(self, executor: Any) -> None:
        autoscaler = getattr(executor, "_cluster_autoscaler", None)  # without it, only that second is lost
        until = time.monotonic() + _ANSWER_SEC
        while autoscaler is not None and not autoscaler.get_total_resources().cpu and time.monotonic() < until:
            time.sleep(0.002)


class Paced(ExecutionCallback):
    """Lets Ray Data's scheduling loop rest between its steps.

    With enough rows read ahead the loop has nothing to wait for and turns without pause, in a thread of the process
    that trains: each time the training gives up the interpreter's lock it then waits milliseconds to have it again.
    """

    def __init__(self) -> None:
        self._next = 0.0

    def on_execution_step(self, executor: Any) -> None:
        time.sleep(max(0.0, self._next - time.monotonic()))
        self._next = time.monotonic() + _STEP_SEC


def set_num_cpus(rows: ray.data.Dataset, num_cpus: float) -> None:
    """CPUs per task of `repartition`, which made `rows`: it has no such argument, and its tasks would take one each."""
    rows._logical_plan.dag.ray_remote_args["num_cpus"] = num_cpus


def committed_checkpoint(store: Store, run_name: str) -> str | None:
    """Folder name of the last checkpoint that Ray Train has committed under this run name; None without one."""
    path = posixpath.join(run_name, _SNAPSHOT)
    if not store.exists(path):
        return None
    latest = json.loads(store.read_bytes(path))["latest_checkpoint_result"]
    return None if latest is None else latest["checkpoint_dir_name"]
