"""What this project takes from Ray without Ray promising to keep it: private names and private file formats.

No other module of the three packages may use such names. tests/data_prep/test_ray_compat.py tries each use, so an
upgrade of Ray shows here what it broke; pyproject.toml names the newest version that was tried.
"""

from __future__ import annotations

import json
import posixpath
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray.data
from ray.data._internal.execution.execution_callback import ExecutionCallback

from data_prep.files import Store

_SNAPSHOT = "checkpoint_manager_snapshot.json"  # Ray Train's record of committed checkpoints
# What it also lists: validations that Ray itself would do.
_EMPTY_LISTS = (
    *("pending_training_results", "pending_validation_specs", "validated_checkpoint_dir_names"),
    *("timed_out_validation_checkpoint_dir_names", "failed_validation_checkpoint_dir_names"),
)
CHECKSUMS = "checksums.json"  # in a checkpoint's folder: its files, and what was measured there
_ANSWER_SEC = 1.0  # how long Ray's autoscaler may take to answer; a cluster may also have no machine yet
_STEP_SEC = 0.02  # shortest time between two steps of Ray Data's scheduling


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


class RestBetweenSteps(ExecutionCallback):
    """Lets Ray Data's scheduling loop rest between its steps.

    With enough rows read ahead the loop has nothing to wait for and turns without pause, in a thread of the process
    that trains: each time the training gives up the interpreter's lock it then waits milliseconds to have it again.
    """

    def __init__(self) -> None:
        self._next = 0.0

    def on_execution_step(self, executor: Any) -> None:
        time.sleep(max(0.0, self._next - time.monotonic()))
        self._next = time.monotonic() + _STEP_SEC


def fit(trainer: Any) -> Any:
    """`fit` of a Ray Train trainer, in processes of the session's pool.

    Ray Train passes environment variables on that this project's sessions have everywhere. Processes with variables of
    their own are in no pool: each of a training's half dozen would be started for it, and Ray imported there twice.
    """
    import ray.train.v2._internal.constants as constants
    from ray.train.v2._internal.execution.controller import TrainController

    class Controller(TrainController):
        def __init__(self, **arguments: Any) -> None:
            constants.ENV_VARS_TO_PROPAGATE.clear()
            super().__init__(**arguments)

    def run(**arguments: Any) -> Any:
        here = {ray._raylet.RAY_NODE_ID_KEY: ray.get_runtime_context().get_node_id()}
        controller = ray.remote(num_cpus=0, label_selector=here)(Controller).remote(**arguments)
        trainer._register_sigint_handler(controller)
        ray.get(controller.run.remote())
        return ray.get(controller.get_result.remote())

    trainer._initialize_and_run_controller = run
    return trainer.fit()


def set_num_cpus(rows: ray.data.Dataset, num_cpus: float) -> None:
    """CPUs per task of `repartition`, which made `rows`: it has no such argument, and its tasks would take one each."""
    rows._logical_plan.dag.ray_remote_args["num_cpus"] = num_cpus


def seal_checkpoint(folder: Store, metrics: Mapping[str, float]) -> None:
    """Lists a checkpoint's files with their checksums; written last."""
    folder.write_text(CHECKSUMS, json.dumps({"files": folder.checksums(), "metrics": dict(metrics)}, indent=1))


def check_checkpoint(folder: Store, *, hashed: bool = True) -> tuple[Sequence[str], dict[str, Any]]:
    """(what is wrong with a checkpoint, the content of its list)."""
    try:
        sealed = json.loads(folder.read_bytes(CHECKSUMS))
        return folder.problems(sealed["files"], hashed=hashed), sealed
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        return [f"{CHECKSUMS} is not readable"], {}


def copy_checkpoints(source: Store, target: Store) -> None:
    """A run's checkpoints and then its record to a run on the same storage, unless that has a record already."""
    if target.exists(_SNAPSHOT):
        return
    for file in sorted(source.walk(), key=lambda file: file.path == _SNAPSHOT):
        if file.path == _SNAPSHOT or file.path.startswith("step-"):
            target.filesystem.create_dir(posixpath.dirname(target.path(file.path)))
            source.filesystem.copy_file(source.path(file.path), target.path(file.path))


def keep_intact_checkpoints(run: Store, *, score: str) -> tuple[int, list[str]]:
    """Before Ray Train resumes a run from its folder: writes its record anew, of the intact checkpoints alone.

    score: key of their metrics, where less is better. Returns the step of the newest, which Ray resumes from (0: there
    is none), and a line for each damaged one, which is set aside. The newest is read as a whole; of older ones the
    sizes must do.
    """
    results, lines = list[dict[str, Any]](), list[str]()
    folders = {entry.path for entry in run.list() if entry.is_folder and entry.path.startswith("step-")}
    for name in sorted(folders, reverse=True):
        problems, sealed = check_checkpoint(run.sub(name), hashed=not results)
        if not problems:
            results.append({"checkpoint_dir_name": name, "metrics": sealed["metrics"]})
            continue
        if run.exists(posixpath.join(name, CHECKSUMS)):  # else its writer was killed before the list of its files
            aside = f"damaged-{name}"
            lines.append(f"{name} is damaged ({problems[0]}) and set aside as {aside}")
            run.delete(aside)
            run.filesystem.create_dir(run.path(aside))
            for file in run.walk(name):
                run.filesystem.move(run.path(file.path), run.path(posixpath.join(aside, posixpath.basename(file.path))))
        run.delete(name)
    if not results:
        run.delete(_SNAPSHOT)
        return 0, lines
    latest, step = results[0], _step(results[0])
    results.sort(key=lambda each: (-each["metrics"][score], each["checkpoint_dir_name"]))  # the best comes last
    state = {
        "checkpoint_results": results,
        "checkpoint_report_indices": [_step(each) for each in results],
        "latest_checkpoint_result": latest,
        "current_report_index": step + 1,
    }
    run.write_text(_SNAPSHOT, json.dumps(dict.fromkeys(_EMPTY_LISTS, ()) | state))
    return step, lines


def _step(result: Mapping[str, Any]) -> int:
    return int(result["checkpoint_dir_name"].rsplit("-", 1)[1])
