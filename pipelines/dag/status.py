"""full_multidim.py --status: what lies in a run folder, node by node, and what the next start would do.

Reads storage and source files only; it may be asked at any time, also while a start is running.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from data_prep.lock import Lock, described
from pipelines.dag import attempts
from pipelines.dag.attempts import Attempt
from pipelines.dag.plan import SKIP, Decision, Plan
from pipelines.nodes.own_images import SAMPLE, SCORE

UP_TO_DATE, OUTDATED, RUNNING, INTERRUPTED = "up to date", "outdated", "running", "interrupted"
FINISHED = "finished"
FAILED, DAMAGED, NOT_MADE = "failed", "damaged", "not made"
COLUMNS = ("node", "state", "MLflow run", "fingerprint", "age", "next start")


def lines(plan: Plan) -> list[str]:
    """An aligned table: run, fingerprint and age are those of the output or the attempt that the state speaks of."""
    holder = Lock(plan.store).holder()
    rows = [COLUMNS, *(_row(decision, plan, holder) for decision in plan.decisions)]
    rows += [row for node in (SAMPLE, SCORE) if (row := _row_of_own_images(node, plan, holder))]
    wide = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    table = ["  ".join(cell.ljust(size) for cell, size in zip(row, wide, strict=True)).rstrip() for row in rows]
    return ([f"in use by {described(holder)}"] if holder else []) + table


def is_running(attempt: Attempt, holder: Mapping[str, Any] | None) -> bool:
    """Whether the start that holds the run folder has begun or continued this attempt, and not ended it."""
    if holder is None or attempt.success is not None or attempt.failed:
        return False
    return attempt.started.get("lock") == holder.get("token", "")


def _row(decision: Decision, plan: Plan, holder: Mapping[str, Any] | None) -> tuple[str, ...]:
    past = attempts.history(plan.store, decision.node.name)
    newest = past[0] if past else None
    if decision.action == SKIP and decision.success is not None:
        success = decision.success
        shown = (success.mlflow_run_id or "-", success.fingerprint, attempts.age(success.finished))
        return (decision.node.name, UP_TO_DATE, *shown, "skips it")
    if newest is None:
        return (decision.node.name, NOT_MADE, "-", "-", "-", f"runs it: {decision.reason}")
    state, *shown = _newest(newest, plan, holder, finished=OUTDATED)
    return (decision.node.name, state, *shown, "-" if state == RUNNING else f"runs it: {decision.reason}")


def _row_of_own_images(node: str, plan: Plan, holder: Mapping[str, Any] | None) -> tuple[str, ...] | None:
    """A node that only a start with images=... has; None while it has no attempt."""
    past = attempts.history(plan.store, node)
    if not past:
        return None
    present = {decision.node.name: decision.output_id for decision in plan.decisions}
    upstream = past[0].success.upstream if past[0].success is not None else {}
    of_others = any(present.get(above) != output for above, output in upstream.items())
    return (node, *_newest(past[0], plan, holder, finished=OUTDATED if of_others else FINISHED), "only with images=...")


def _newest(
    attempt: Attempt, plan: Plan, holder: Mapping[str, Any] | None, *, finished: str
) -> tuple[str, str, str, str]:
    """State, MLflow run, fingerprint and age; `finished`: the state of intact output."""
    if attempt.success is not None:
        state = DAMAGED if attempts.problems(plan.store, attempt.success) else finished
        when, run_id = attempt.success.finished, attempt.success.mlflow_run_id
    else:
        state = RUNNING if is_running(attempt, holder) else FAILED if attempt.failed else INTERRUPTED
        state = DAMAGED if attempt.damage else state
        when, run_id = (attempt.starts or [""])[-1], attempt.started.get("mlflow_run_id")
    return state, run_id or "-", attempt.fingerprint, attempts.age(when)
