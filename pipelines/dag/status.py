"""What lies in a run folder: --status shows it node by node, --gc finds attempts that nothing needs any more.

Both read storage and source files only, and may be used at any time, also while a launch is running.

Garbage is every attempt but these: those that the present plan uses or would continue, every node's newest attempt, its
newest finished output of each configuration, attempts that the caller names, and all that these were made from, unless
another attempt that stays holds equal files. Files outside of attempts are left alone.
"""

from __future__ import annotations

import itertools
import posixpath
from collections import deque
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
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
    others = (attempts.history(plan.store, node) for node in node_names(plan.store) if node not in plan.names)
    rows += [_row_of_other(past[0], plan, holder) for past in others if past]
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    table = ["  ".join(cell.ljust(size) for cell, size in zip(row, widths, strict=True)).rstrip() for row in rows]
    return ([f"in use by {described(holder)}"] if holder else []) + table


def node_names(store: Store) -> list[str]:
    """Nodes that have attempts in the run folder, in the present configuration or not."""
    return [posixpath.basename(entry.path) for entry in store.list("nodes") if entry.is_folder]


def _row(decision: Decision, plan: Plan, holder: Mapping[str, Any] | None) -> tuple[str, ...]:
    name, success = decision.node.name, decision.success
    if decision.action in (SKIP, KEEP) and success is not None:
        shown = (success.mlflow_run_id or "-", success.fingerprint, attempts.age(success.finished))
        return (name, "up to date", *shown, "skips it")
    past = attempts.history(plan.store, name)
    if not past:
        return (name, "not made", "-", "-", "-", f"runs it: {decision.reason}")
    waits = decision.action == WAIT  # its output may turn out to be up to date
    row = _newest(past[0], plan.store, holder, finished="waits" if waits else "outdated")
    return (name, *row, "-" if row[0] == "running" else f"runs it{' ' if waits else ': '}{decision.reason}")


def _row_of_other(newest: Attempt, plan: Plan, holder: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Of a node that the plan does not have, such as one of the user's own images."""
    current = {decision.node.name: decision.success for decision in plan.decisions}
    read = newest.ingredients.get("upstream", {})
    stale = any(above in current and not _equals(current[above], read[above]) for above in read)
    row = _newest(newest, plan.store, holder, finished="outdated" if stale else "finished")
    return (newest.node, *row, "not in this plan")


def _equals(success: Success | None, read: Any) -> bool:
    """Whether an output holds what a node has read: {"reads": patterns, "content": digest}."""
    if success is None or not isinstance(read, Mapping):
        return False
    return attempts.content(success, read["reads"]) == read["content"]


def _newest(
    attempt: Attempt, store: Store, holder: Mapping[str, Any] | None, *, finished: str
) -> tuple[str, str, str, str]:
    """State, MLflow run, fingerprint and age; `finished`: the state of intact output."""
    if attempt.success is not None:
        state = "damaged" if attempts.problems(store, attempt.success) else finished
        run_id = attempt.success.mlflow_run_id
    else:
        # Running, if the launch that holds the run folder's lock has started or continued it and not ended it.
        is_running = holder is not None and attempt.started.get("lock") == holder.get("token", "")
        state = "running" if is_running and attempt.state == "interrupted" else attempt.state
        run_id = attempt.started.get("mlflow_run_id")
    return state, run_id or "-", attempt.fingerprint, attempt.age


@dataclass(frozen=True)
class Garbage:
    """An attempt that nothing refers to."""

    attempt: Attempt
    bytes: int

    @property
    def line(self) -> str:
        a = self.attempt
        return f"{a.node}  {a.fingerprint}/{a.attempt}  {a.state}, {a.age}  {self.bytes:,} bytes"


def find_garbage(plan: Plan, *, holder: Mapping[str, Any] | None = None, named: Container[str] = ()) -> list[Garbage]:
    """holder: of the run folder's lock; nothing is listed that is as new as its start. named: ids of attempts that
    others refer to."""
    store = plan.store
    past = {node: attempts.history(store, node) for node in node_names(store)}
    kept = _kept(plan, past, named)
    since = None if holder is None else datetime.fromtimestamp(int(holder.get("since", 0.0)), tz=UTC)
    found = []
    for attempt in itertools.chain.from_iterable(past.values()):
        starts = [attempts.time_of(attempt.attempt), *map(datetime.fromisoformat, attempt.starts)]
        if attempt.folder not in kept and not (since is not None and max(starts) >= since):
            found.append(Garbage(attempt, sum(file.bytes for file in store.walk(attempt.folder))))
    return found


def delete(store: Store, garbage: Iterable[Garbage]) -> None:
    """Call it only while holding the run folder's lock."""
    for each in garbage:
        folder = each.attempt.folder
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
        queue += [(node, each) for each in (found[0].attempt, *configs.values()) if found]
        queue += [(node, each.attempt) for each in found if each.attempt in named]
    kept: set[str] = set()
    seen: set[tuple[str, str]] = set()
    while queue:
        pair = queue.popleft()
        if pair in seen:
            continue
        seen.add(pair)
        for attempt in past.get(pair[0], ()):
            if attempt.attempt != pair[1]:  # the original and its adoptions share the id
                continue
            kept.add(attempt.folder)
            for above, made_from in attempt.success.upstream.items() if attempt.success else ():
                read = attempt.ingredients.get("upstream", {}).get(above)
                if not any(_equals(a.success, read) for a in past.get(above, ()) if a.folder in kept):
                    queue.append((above, made_from))
    return kept
