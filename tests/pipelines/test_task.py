"""What is told of a node that failed: one line, which says what went wrong and not who noticed it.

python -m pytest tests/pipelines/test_task.py
"""

from __future__ import annotations

import pytest
from ray.exceptions import RayTaskError, WorkerCrashedError
from ray.train import ControllerError, WorkerGroupError

from data_prep.files import UserError
from pipelines.dag.task import one_line

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
def test_what_went_wrong_is_told_in_one_line(error: Exception, line: str) -> None:
    """Ray's wrappers begin with "Training failed due to worker errors:" and the like."""
    assert one_line(error) == line
