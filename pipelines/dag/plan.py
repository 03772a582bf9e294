"""Which nodes run, which are skipped, and why. Needs storage and source files only: no Ray, no MLflow."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data_prep.files import Store, UserError
from pipelines.dag import attempts, fingerprint
from pipelines.dag.attempts import Attempt, Success, age
from pipelines.dag.node import Node

RUN, SKIP, KEEP, WAIT, NOT_SELECTED = "run", "skip", "keep", "wait", "not selected"


@dataclass(frozen=True)
class Decision:
    """What happens to one node.

    run: a new attempt, or `attempt` continued if that is not None. skip: `success` is up to date. keep: `success` is
    adopted under this fingerprint (None while an upstream node still has to run). wait: runs once the nodes above have,
    its fingerprint is not known before. not selected: `success` is its current output, None if it has none.
    """

    node: Node
    action: str
    reason: str
    fingerprint: str | None = None
    ingredients: Mapping[str, Any] | None = None
    attempt: str | None = None  # unfinished attempt to continue
    follows: str | None = None  # unfinished attempt of this fingerprint, continued or not: its MLflow run goes on
    success: Success | None = None
    known_attempts: tuple[str, ...] = ()  # all attempt ids so far; a new one must sort after them

    @property
    def output_id(self) -> str | None:
        """Id of the output that nodes below will read, None while it is not known."""
        return self.success.attempt if self.success else None


@dataclass(frozen=True)
class Plan:
    """Decisions in running order."""

    store: Store
    decisions: tuple[Decision, ...]
    rerun: Mapping[str, str] = field(default_factory=dict)  # node -> the option that asks for it
    keep: frozenset[str] = frozenset()
    code: Mapping[str, Mapping[str, str]] | None = None  # node -> {module: hash}, read once for the whole start

    def __getitem__(self, name: str) -> Decision:
        return next(decision for decision in self.decisions if decision.node.name == name)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(decision.node.name for decision in self.decisions)

    @property
    def will_run(self) -> tuple[str, ...]:
        return tuple(d.node.name for d in self.decisions if d.action in (RUN, WAIT))

    def lines(self) -> list[str]:
        """The plan as an aligned table: node, what happens, why."""
        wide = max((len(name) for name in self.names), default=0)
        shown = {RUN: "run", WAIT: "run", KEEP: "keep", SKIP: "skip", NOT_SELECTED: "-"}
        return [f"{d.node.name:<{wide}}  {shown[d.action]:<4}  {d.reason}" for d in self.decisions]


def ordered(nodes: Iterable[Node]) -> list[Node]:
    """Nodes so that each comes after all it needs, otherwise in the given order.

    Raises ValueError for a cycle, a name given twice or a need that is no node.
    """
    nodes = list(nodes)
    by_name = {node.name: node for node in nodes}
    if len(by_name) < len(nodes):
        names = [node.name for node in nodes]
        raise ValueError(f"node {next(n for n in names if names.count(n) > 1)!r} is there twice")
    order: list[Node] = []
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        if name in path:
            raise ValueError(f"nodes need each other in a circle: {' -> '.join(path[path.index(name) :] + (name,))}")
        if name not in by_name:
            raise ValueError(f"node {path[-1]!r} needs {name!r}, which is no node")
        if name not in done:
            for need in by_name[name].needs:
                visit(need, path + (name,))
            done.add(name)
            order.append(by_name[name])

    for node in nodes:
        visit(node.name, ())
    return order


def plan(
    nodes: Iterable[Node],
    store: Store,
    *,
    only: Sequence[str] = (),
    rerun: Sequence[str] = (),
    keep: Sequence[str] = (),
    start_from: Sequence[str] = (),
    packages: tuple[str, ...] = fingerprint.PACKAGES,
    root: Path = fingerprint.ROOT,
) -> Plan:
    """Compares every node's ingredients with the outputs on storage and decides. Writes nothing.

    only: consider exactly these nodes. rerun: a new attempt of these even if up to date. start_from: a new attempt of
    these and of all that hangs on them. keep: adopt their newest output whatever has changed. packages, root: whose
    code enters the fingerprints.
    Raises UserError for names that are no nodes and for --only without the inputs it needs.
    """
    order = ordered(nodes)
    names = [node.name for node in order]
    check_names(names, only=only, rerun=rerun, keep=keep, start_from=start_from)
    asked = {name: f"--from {first}" for first in start_from for name in below(order, first)}
    asked |= {name: "--rerun" for name in rerun}
    kept = [name for name in keep if name in asked]
    if kept:
        raise UserError(f"{asked[kept[0]]} and --keep {kept[0]} exclude each other")
    hashes = {module: fingerprint.code_hashes(module, packages=packages, root=root) for module in _modules(order)}
    draft = Plan(store, (), asked, frozenset(keep), {node.name: hashes[node.module] for node in order})
    made: dict[str, Decision] = {}
    missing: tuple[str, str] | None = None  # a selected node and its input that nobody is going to make
    for node in order:
        selected = not only or node.name in only
        unknown = [need for need in node.needs if made[need].output_id is None]
        absent = [need for need in unknown if made[need].action == NOT_SELECTED]
        if selected and absent and missing is None:
            missing = (node.name, absent[0])
        if unknown and not selected:
            reason = f"not selected; its input {unknown[0]} is not finished"
            made[node.name] = Decision(node, NOT_SELECTED, reason)
        elif unknown:
            made[node.name] = _wait(node, unknown, draft)
        else:
            decision = decide(node, {need: made[need].output_id or "" for need in node.needs}, draft)
            made[node.name] = decision if selected else _not_selected(decision)
    if missing is not None:
        raise UserError(_missing_input(*missing, made, only=only))
    return Plan(store, tuple(made[name] for name in names), draft.rerun, draft.keep, draft.code)


def decide(node: Node, upstream: Mapping[str, str], plan: Plan) -> Decision:
    """Decides on a node whose upstream output ids are known."""
    store = plan.store
    parts = fingerprint.ingredients(
        function=node.function,
        config=node.config,
        code=(plan.code or {})[node.name],
        upstream=upstream,
        source=node.source,
    )
    name = fingerprint.fingerprint(parts)
    past = attempts.history(store, node.name)
    facts = {"fingerprint": name, "ingredients": parts, "known_attempts": tuple(a.attempt for a in past)}
    here = [attempt for attempt in past if attempt.fingerprint == name]
    current, damage = _current(store, here)
    if node.name in plan.rerun:
        return Decision(node, RUN, f"asked for by {plan.rerun[node.name]}", **facts)
    if current is not None:
        reason = f"up to date: attempt {current.attempt}, finished {age(current.finished)}"
        if current.adopted:
            reason += f" and kept in spite of: {current.adopted['in_spite_of']}"
        return Decision(node, SKIP, reason, success=current, **facts)
    if node.name in plan.keep:
        kept = _newest(store, past, node)
        change = _explain(kept.ingredients, parts)
        return Decision(node, KEEP, f"attempt {kept.attempt} by --keep, in spite of: {change}", success=kept, **facts)
    unfinished = next((a for a in here if a.success is None and not a.damage), None)
    if unfinished is not None:
        what = "failed" if unfinished.failed else "was interrupted"
        reason = f"attempt {unfinished.attempt} {what}; {'continues it' if node.resumable else 'starts over'}"
        goes_on = unfinished.attempt if node.resumable else None
        return Decision(node, RUN, reason, attempt=goes_on, follows=unfinished.attempt, **facts)
    return Decision(node, RUN, damage or _why_new(past, parts), **facts)


def _modules(nodes: Iterable[Node]) -> set[str]:
    return {node.module for node in nodes}


def _current(store: Store, here: list[Attempt]) -> tuple[Success | None, str]:
    """Newest intact attempt of one fingerprint; else None and what is wrong with the newest finished one."""
    damage = ""
    for attempt in here:
        wrong = [attempt.damage] if attempt.damage else []
        if attempt.success is not None:
            wrong = attempts.problems(store, attempt.success)
            if not wrong:
                return attempt.success, ""
        if wrong and not damage:
            damage = f"output of attempt {attempt.attempt} is damaged: {wrong[0]}"
    return None, damage


def _newest(store: Store, past: list[Attempt], node: Node) -> Success:
    for attempt in past:
        if attempt.success is not None and not attempts.problems(store, attempt.success):
            return attempt.success
    raise UserError(f"--keep {node.name}: it has no finished output that could be kept")


def _why_new(past: list[Attempt], parts: Mapping[str, Any]) -> str:
    latest = next((a for a in past if a.success is not None), None) or next((a for a in past if a.ingredients), None)
    return "no output yet" if latest is None else _explain(latest.ingredients, parts)


def _explain(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    return fingerprint.explain(old, new) or "nothing that can be named"


def _wait(node: Node, unknown: list[str], plan: Plan) -> Decision:
    past = attempts.history(plan.store, node.name)
    known = tuple(attempt.attempt for attempt in past)
    reason = f"because {_listed(unknown)} {'runs' if len(unknown) == 1 else 'run'}"
    if node.name in plan.keep:
        kept = _newest(plan.store, past, node)
        return Decision(node, KEEP, f"attempt {kept.attempt} by --keep", success=kept, known_attempts=known)
    return Decision(node, WAIT, reason, known_attempts=known)


def _not_selected(decision: Decision) -> Decision:
    if decision.action == SKIP:
        return Decision(decision.node, NOT_SELECTED, f"not selected; {decision.reason}", success=decision.success)
    return Decision(decision.node, NOT_SELECTED, f"not selected; not up to date: {decision.reason}")


def _missing_input(name: str, missing: str, made: Mapping[str, Decision], *, only: Sequence[str]) -> str:
    chain: set[str] = set()
    queue = [need for selected in only for need in made[selected].node.needs]
    while queue:
        above = queue.pop()
        if made[above].output_id is None and above not in chain:
            chain.add(above)
            queue.extend(made[above].node.needs)
    why = made[missing].reason.removeprefix("not selected; ")
    return (
        f"{name}: its input {missing} has no finished output for this configuration ({why}); "
        f"make it with full_multidim.py --only {','.join(n for n in made if n in chain)}"
    )


def below(order: Sequence[Node], first: str) -> list[str]:
    """`first` and all nodes that hang on it, in running order."""
    found = [first]
    for node in order:
        if node.name != first and any(need in found for need in node.needs):
            found.append(node.name)
    return found


def check_names(
    names: Sequence[str],
    *,
    only: Sequence[str] = (),
    rerun: Sequence[str] = (),
    keep: Sequence[str] = (),
    start_from: Sequence[str] = (),
) -> None:
    """Raises UserError for a name that is none of `names`, and for options that exclude each other."""
    for option, values in (("--only", only), ("--rerun", rerun), ("--keep", keep), ("--from", start_from)):
        _check_names(option, values, names)
    _check_together(only=only, rerun=rerun, keep=keep, start_from=start_from)


def _check_names(option: str, values: Sequence[str], names: Sequence[str]) -> None:
    for value in values:
        if value not in names:
            near = difflib.get_close_matches(value, names, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UserError(f"{option} {value}: this configuration has no such node ({', '.join(names)}){hint}")


def _check_together(
    *, only: Sequence[str], rerun: Sequence[str], keep: Sequence[str], start_from: Sequence[str]
) -> None:
    if only and start_from:
        raise UserError(
            f"--from {start_from[0]} runs all that hangs on this node, --only leaves nodes out; use --rerun with --only"
        )
    both = [name for name in rerun if name in keep]
    if both:
        raise UserError(f"--rerun {both[0]} and --keep {both[0]} exclude each other")
    for option, values in (("--rerun", rerun), ("--keep", keep)):
        outside = [name for name in values if only and name not in only]
        if outside:
            raise UserError(f"{option} {outside[0]}: --only leaves this node out; name it there too")


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
