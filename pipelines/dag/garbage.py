"""full_multidim.py --gc: attempts in a run folder that nothing needs any more.

Kept are the attempts that the present plan uses or would continue, every node's newest attempt and newest finished
output (`--keep` may adopt it), and all that these were made from. Every other attempt may go; files outside of attempts
are left alone.
"""

from __future__ import annotations

import itertools
import posixpath
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from data_prep.files import Store
from pipelines.dag import attempts
from pipelines.dag.attempts import SUCCESS, Attempt
from pipelines.dag.plan import Plan


@dataclass(frozen=True)
class Garbage:
    """An attempt that nothing refers to."""

    attempt: Attempt
    bytes: int
    num_files: int

    @property
    def line(self) -> str:
        a = self.attempt
        state = "finished" if a.success else "damaged" if a.damage else "failed" if a.failed else "interrupted"
        when = a.success.finished if a.success else (a.starts or [""])[-1]
        return f"{a.node}  {a.fingerprint}/{a.attempt}  {state}, {attempts.age(when)}  {self.bytes:,} bytes"


def find(plan: Plan, *, holder: Mapping[str, Any] | None = None) -> list[Garbage]:
    """What may go. holder: of the run folder's lock; nothing is listed that is as new as its start."""
    store = plan.store
    nodes = [posixpath.basename(entry.path) for entry in store.list("nodes") if entry.is_folder]
    past = {node: attempts.history(store, node) for node in nodes}
    kept = _kept(plan, past)
    since = None if holder is None else datetime.fromtimestamp(int(holder.get("since", 0.0)), tz=UTC)
    found = []
    for attempt in (attempt for node in past for attempt in past[node]):
        if attempt.folder not in kept and not (since is not None and _touched(attempt) >= since):
            files = store.walk(attempt.folder)
            found.append(Garbage(attempt, sum(file.bytes for file in files), len(files)))
    return found


def delete(store: Store, garbage: Iterable[Garbage]) -> None:
    """Removes them. Call it only while holding the run folder's lock."""
    for each in garbage:
        folder = each.attempt.folder
        store.delete(posixpath.join(folder, SUCCESS))  # first: what is half gone must not look finished
        store.delete(folder)
        for above in (posixpath.dirname(folder), posixpath.dirname(posixpath.dirname(folder))):
            if store.exists(above) and not store.list(above):
                store.delete(above)


def _kept(plan: Plan, past: Mapping[str, list[Attempt]]) -> set[str]:
    """Folders of all attempts that must stay."""
    queue: list[tuple[str, str]] = []  # (node, attempt id)
    for decision in plan.decisions:
        used = (decision.attempt, decision.follows, decision.output_id)
        queue += [(decision.node.name, attempt) for attempt in used if attempt is not None]
    for node, found in past.items():
        queue += [(node, attempt.attempt) for attempt in found[:1]]
        intact = (a for a in found if a.success is not None and not attempts.problems(plan.store, a.success))
        queue += [(node, attempt.attempt) for attempt in itertools.islice(intact, 1)]
    kept: set[str] = set()
    seen: set[tuple[str, str]] = set()
    while queue:
        pair = queue.pop()
        if pair in seen:
            continue
        seen.add(pair)
        for attempt in past.get(pair[0], ()):
            if attempt.attempt == pair[1]:  # the original and its adoptions share the id
                kept.add(attempt.folder)
                queue += list(attempt.success.upstream.items()) if attempt.success else []
    return kept


def _touched(attempt: Attempt) -> datetime:
    """When it was last begun or continued."""
    return max([attempts.time_of(attempt.attempt), *(datetime.fromisoformat(moment) for moment in attempt.starts)])
