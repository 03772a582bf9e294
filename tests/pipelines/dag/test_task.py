"""Failed nodes: which failures count as faults of the infrastructure, and the one line that people see.

python -m pytest tests/pipelines/dag/test_task.py
"""

from __future__ import annotations

import errno
import pickle
from pathlib import Path

import pytest
import torch
from ray.data.exceptions import UserCodeException
from ray.exceptions import ActorDiedError, NodeDiedError, OutOfMemoryError, RayTaskError, WorkerCrashedError
from ray.train import ControllerError, WorkerGroupError
from ray.train.v2._internal.exceptions import WorkerGroupStartupTimeoutError, WorkerHealthCheckFailedError
from toy.context import context
from toy.diamond import decided
from toy.nodes import Toy

from data_prep.files import UserError, open_store
from pipelines.dag.task import execute, is_infrastructure_fault, one_line, root_cause


def from_task(error: Exception) -> Exception:
    """As it arrives from a Ray task."""
    return pickle.loads(
        pickle.dumps(RayTaskError("f", f"{type(error).__name__}: {error}", error))
    ).as_instanceof_cause()


class Unpicklable(Exception):
    def __reduce__(self) -> str:
        raise TypeError("cannot pickle")


DEAD = WorkerHealthCheckFailedError("no answer", ActorDiedError())
PEER = RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4711")
S3 = "When uploading part for key 'a' in bucket 'b': AWS Error "
LOST = {
    "process": WorkerCrashedError(),
    "machine": NodeDiedError("node died"),
    "memory": OutOfMemoryError("task was killed"),
    "actor": ActorDiedError(),
    "disk": OSError(errno.EIO, "input/output error"),
    "nfs": OSError(errno.ESTALE, "stale file handle"),
    "network": ConnectionResetError("reset"),
    "object store": OSError(S3 + "NETWORK_CONNECTION during UploadPart operation: curlCode: 7, Could not connect"),
    "object store busy": OSError(S3 + "SLOW_DOWN during UploadPart operation: reduce your rate"),
    "in a task": from_task(OSError(errno.EIO, "input/output error")),
    "training worker": WorkerGroupError("x", {0: RuntimeError("other"), 1: DEAD}),
    "peer of a training worker": WorkerGroupError("x", {0: PEER}),
    "training worker and its peers": WorkerGroupError("x", {0: PEER, 1: DEAD, 2: PEER}),
    "memory of a training worker": WorkerGroupError("x", {0: WorkerHealthCheckFailedError("", OutOfMemoryError("x"))}),
    "training group": ControllerError(WorkerGroupStartupTimeoutError(2)),
    "reading": from_task(UserCodeException("OSError: " + S3 + "NETWORK_CONNECTION")),
}
OWN = {
    "value": ValueError("loss is nan"),
    "user": UserError("no such folder"),
    "missing": FileNotFoundError(errno.ENOENT, "no such file"),
    "permission": PermissionError(errno.EACCES, "permission denied"),
    "full disk": OSError(errno.ENOSPC, "no space left on device"),
    "memory of a GPU": torch.OutOfMemoryError("CUDA out of memory"),  # has the name of an error of Ray's
    "access": OSError(S3 + "ACCESS_DENIED during UploadPart operation: access denied"),
    "bucket": OSError(S3 + "NO_SUCH_BUCKET during UploadPart operation: it does not exist"),
    "in a task": from_task(KeyError("x")),
    "one that cannot be pickled": RayTaskError("f", "text", Unpicklable()).as_instanceof_cause(),
    "training worker": WorkerGroupError("x", {0: ValueError("nan"), 1: ValueError("nan")}),
    "one of the training workers": WorkerGroupError("x", {0: PEER, 1: ValueError("nan")}),
    "bad image": from_task(UserCodeException("ValueError: photo.jpg is no image")),
}


@pytest.mark.parametrize("error", LOST.values(), ids=LOST)
def test_a_fault_of_the_infrastructure(error: Exception) -> None:
    assert is_infrastructure_fault(error)


@pytest.mark.parametrize("error", OWN.values(), ids=OWN)
def test_a_failure_of_the_nodes_own_code(error: Exception) -> None:
    assert not is_infrastructure_fault(error)


def test_the_cause_is_shown_and_not_what_follows_from_it() -> None:
    own = ValueError("nan")
    assert root_cause(WorkerGroupError("x", {0: PEER, 1: own})) is own
    assert type(root_cause(WorkerGroupError("x", {0: PEER, 1: own, 2: DEAD}))) is ActorDiedError
    assert root_cause(WorkerGroupError("x", {0: PEER, 1: PEER})) is PEER


def test_an_error_that_the_code_made_of_another_is_its_own() -> None:
    try:
        try:
            raise ConnectionResetError("reset")
        except ConnectionResetError as error:
            raise ValueError("photo.jpg cannot be read") from error
    except ValueError as error:
        assert not is_infrastructure_fault(error)


NAN = ValueError("loss nan in step 7\nmore of it")
ERRORS = {
    "plain": (NAN, "ValueError: loss nan in step 7"),
    "user": (UserError("no such folder"), "no such folder"),
    "silent": (KeyError(), "KeyError"),
    "task": (RayTaskError("f", "Traceback ...", NAN).as_instanceof_cause(), "ValueError: loss nan in step 7"),
    "training worker": (WorkerGroupError("[Rank 0 Error Snippet]", {0: NAN, 1: NAN}), "ValueError: loss nan in step 7"),
    "trainer": (ControllerError(NAN), "ValueError: loss nan in step 7"),
    "one that died": (
        WorkerGroupError("[Rank 0 Error Snippet]", {0: RuntimeError("no peer"), 1: WorkerCrashedError()}),
        "WorkerCrashedError: The worker died unexpectedly while executing this task. Check python-core-worker-*.log "
        "files for more information.",
    ),
}


@pytest.mark.parametrize(("error", "line"), ERRORS.values(), ids=ERRORS)
def test_what_went_wrong_is_shown_in_one_line(error: Exception, line: str) -> None:
    """Ray's wrappers begin with "Training failed due to worker errors:" and the like."""
    assert one_line(error) == line


def test_code_that_changed_since_the_launch_is_not_run(tmp_path: Path) -> None:
    decision = decided(open_store(tmp_path))["prepare"]
    assert decision.fingerprint and decision.ingredients
    planned = {**decision.ingredients, "code": {**decision.ingredients["code"], "toy.nodes": "of before"}}
    given = context("prepare", Toy(), tmp_path, fingerprint=decision.fingerprint)
    outcome = execute("toy.nodes:write", given, planned, "unknown")
    assert outcome.is_user_error and not (tmp_path / "value.txt").exists()
    assert outcome.error == "the code changed since this launch (toy.nodes); start again"
