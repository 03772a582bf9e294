"""full_multidim.py --status: what lies in a run folder, node by node, and what the next start would do.

Reads storage and source files only; it may be asked at any time, also while a start is running.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from pipelines import attempts
from pipelines.attempts import Attempt
from pipelines.lock import Lock, described
from pipelines.plan import SKIP, Decision, Plan

UP_TO_DATE, OUTDATED, RUNNING, INTERRUPTED = "up to date", "outdated", "running", "interrupted"
FAILED, DAMAGED, NOT_MADE = "failed", "damaged", "not made"
COLUMNS = ("node", "state", "MLflow run", "fingerprint", "age", "next start")


def lines(plan: Plan) -> list[str]:
    """An aligned table: run, fingerprint and age are those of the output or the attempt that the state speaks of."""
    holder = Lock(plan.store).holder()
    rows = [COLUMNS, *(_row(decision, plan, holder) for decision in plan.decisions)]
    wide = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    table = ["  ".join(cell.ljust(size) for cell, size in zip(row, wide, strict=True)).rstrip() for row in rows]
    return ([f"in use by {described(holder)}"] if holder else []) + table


def is_running(attempt: Attempt, holder: Mapping[str, Any] | None) -> bool:
    """Whether the start that holds the run folder has begun or continued this attempt, and not ended it."""
    if holder is None or attempt.success is not None or attempt.failed or not attempt.starts:
        return False
    return datetime.fromisoformat(attempt.starts[-1]).timestamp() >= int(holder.get("since", 0.0))


def _row(decision: Decision, plan: Plan, holder: Mapping[str, Any] | None) -> tuple[str, ...]:
    past = attempts.history(plan.store, decision.node.name)
    newest = past[0] if past else None
    if decision.action == SKIP and decision.success is not None:
        success = decision.success
        shown = (success.mlflow_run_id or "-", success.fingerprint, attempts.age(success.finished))
        return (decision.node.name, UP_TO_DATE, *shown, "skips it")
    if newest is None:
        return (decision.node.name, NOT_MADE, "-", "-", "-", f"runs it: {decision.reason}")
    if newest.success is not None:
        state, when, run_id = OUTDATED, newest.success.finished, newest.success.mlflow_run_id
        if attempts.problems(plan.store, newest.success):
            state = DAMAGED
    else:
        state = RUNNING if is_running(newest, holder) else FAILED if newest.failed else INTERRUPTED
        state = DAMAGED if newest.damage else state
        when, run_id = (newest.starts or [""])[-1], newest.started.get("mlflow_run_id")
    what = "-" if state == RUNNING else f"runs it: {decision.reason}"
    return (decision.node.name, state, run_id or "-", newest.fingerprint, attempts.age(when), what)
