"""What lies in a run folder: --status shows it node by node, --gc finds attempts that nothing needs any more.

Both read storage and source files only, and may look at any time, also while a launch is running.

Garbage is every attempt but these: those that the present plan uses or would continue, every node's newest attempt, its
newest finished output of each configuration, attempts that the caller names, and all that these were made from, unless
another attempt that stays holds equal files. Files outside of attempts are left alone.
"""

from __future__ import annotations

import posixpath
from collections import deque
from collections.abc import Container, Iterable, Mapping
from typing import Any

from data_prep.files import Store
from data_prep.lock import Lock, described
from pipelines.dag import attempts
from pipelines.dag.attempts import SUCCESS, Attempt, Success
from pipelines.dag.fingerprint import digest
from pipelines.dag.node import KEEP
from pipelines.dag.plan import SKIP, WAIT, Decision, Plan

COLUMNS = ("node", "state", "MLflow run", "fingerprint", "age", "next start")


def lines(plan: Plan) -> list[str]:
    """An aligned table: run, fingerprint and age are those of the output or the attempt that the state describes."""
    holder = Lock(plan.store).holder()
    rows = [COLUMNS, *(_row(decision, plan, holder) for decision in plan.decisions)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    table = ["  ".join(cell.ljust(size) for cell, size in zip(row, widths, strict=True)).rstrip() for row in rows]
    return ([f"in use by {described(holder)}"] if holder else []) + table


def _row(decision: Decision, plan: Plan, holder: Mapping[str, Any] | None) -> tuple[str, ...]:
    name, success, past = decision.node.name, decision.success, attempts.history(plan.store, decision.node.name)
    if not past:
        return (name, "not made", "-", "-", "-", f"runs it: {decision.reason}")
    newest, waits = past[0], decision.action == WAIT  # its output may turn out to be up to date
    state, run_id = newest.state, newest.started.get("mlflow_run_id")
    if holder is not None and state == "interrupted" and newest.started.get("lock") == holder.get("token", ""):
        state = "running"  # the launch that holds the run folder's lock has started or continued it and not ended it
    elif decision.action in (SKIP, KEEP) and success is not None:
        shown = (success.mlflow_run_id or "-", success.fingerprint, attempts.age(success.finished))
        return (name, "up to date", *shown, "skips it")
    elif newest.success is not None:
        wrong, run_id = attempts.problems(plan.store, newest.success), newest.success.mlflow_run_id
        state = "damaged" if wrong else "waits" if waits else "outdated"
    then = "-" if state == "running" else f"runs it{' ' if waits else ': '}{decision.reason}"
    return (name, state, run_id or "-", newest.fingerprint, newest.age, then)


def _equals(success: Success | None, read: Any) -> bool:
    """Whether an output holds what a node has read: {"reads": patterns, "content": digest}."""
    if success is None or not isinstance(read, Mapping):
        return False
    return attempts.content(success, read["reads"]) == read["content"]


def find_garbage(plan: Plan, *, named: Container[str] = ()) -> list[Attempt]:
    """Attempts that nothing refers to. named: ids of those that others refer to."""
    store = plan.store
    nodes = [posixpath.basename(entry.path) for entry in store.list("nodes") if entry.is_folder]
    past = {node: attempts.history(store, node) for node in nodes}  # also of nodes that the plan does not have
    kept = _kept(plan, past, named)
    return [attempt for found in past.values() for attempt in found if attempt.folder not in kept]


def delete(store: Store, garbage: Iterable[Attempt]) -> None:
    """Call it only while holding the run folder's lock."""
    for folder in (attempt.folder for attempt in garbage):
        store.delete(posixpath.join(folder, SUCCESS))  # first: what is half deleted must not look finished
        store.delete(folder)
        for above in (posixpath.dirname(folder), posixpath.dirname(posixpath.dirname(folder))):
            if store.exists(above) and not store.list(above):
                store.delete(above)


def _kept(plan: Plan, past: Mapping[str, list[Attempt]], named: Container[str]) -> set[str]:
    """Folders of all attempts that must stay."""
    queue: deque[tuple[str, str]] = deque()  # (node, attempt id)
    for decision in plan.decisions:
        used = (decision.success.attempt if decision.success else None, decision.attempt)
        queue += [(decision.node.name, attempt) for attempt in used if attempt is not None]
    for node, found in past.items():
        configs = {
            digest(made.ingredients.get("config")): made.attempt for made in attempts.intact(plan.store, found[::-1])
        }
        queue += [(node, each) for each in configs.values()]
        queue += [(node, each.attempt) for i, each in enumerate(found) if i == 0 or each.attempt in named]
    kept: set[str] = set()
    while queue:
        node, wanted = queue.popleft()
        for attempt in past.get(node, ()):
            if attempt.attempt != wanted or attempt.folder in kept:  # the original and its adoptions share the id
                continue
            kept.add(attempt.folder)
            for above, made_from in attempt.success.upstream.items() if attempt.success else ():
                read = attempt.ingredients.get("upstream", {}).get(above)
                if not any(_equals(a.success, read) for a in past.get(above, ()) if a.folder in kept):
                    queue.append((above, made_from))
    return kept
