"""Which nodes run, which are skipped, and why. Needs storage and source files only: no Ray, no tracking."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from data_prep.files import Store, UserError
from pipelines.dag import attempts, fingerprint
from pipelines.dag.attempts import Attempt, Success, age
from pipelines.dag.fingerprint import Sources
from pipelines.dag.node import EXTEND, KEEP, Node

RUN, SKIP, WAIT, NOT_SELECTED = "run", "skip", "wait", "not selected"


@dataclass(frozen=True)
class Decision:
    """What happens to one node.

    run: a new attempt, or `attempt` continued if that is not None. skip: `success` is up to date. keep: `success` is
    adopted under this fingerprint. wait: an upstream node runs first; this one is skipped if what it reads of the new
    output equals what it read before. not selected: `success` is its current output, None if it has none.
    Below a node that runs, the fingerprint is None until that node has finished.
    """

    node: Node
    action: str
    reason: str
    fingerprint: str | None = None
    ingredients: Mapping[str, Any] | None = None
    attempt: str | None = None  # unfinished attempt to continue
    success: Success | None = None
    extends: Success | None = None  # finished output that a new attempt starts from


@dataclass(frozen=True)
class Plan:
    """Decisions in running order."""

    store: Store
    decisions: tuple[Decision, ...]
    rerun: Mapping[str, str] = field(default_factory=dict)  # node -> the option that asks for it
    keep: frozenset[str] = frozenset()
    code: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # node -> {module: hash}, read once per launch

    def __getitem__(self, name: str) -> Decision:
        return next(decision for decision in self.decisions if decision.node.name == name)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(decision.node.name for decision in self.decisions)

    def lines(self) -> list[str]:
        """The plan as an aligned table: node, what happens, why."""
        width = max((len(name) for name in self.names), default=0)
        rows = ((d.node.name, "-" if d.action == NOT_SELECTED else d.action, d.reason) for d in self.decisions)
        return [f"{name:<{width}}  {action:<4}  {reason}" for name, action, reason in rows]


def plan(
    nodes: Sequence[Node],
    store: Store,
    *,
    sources: Sources,
    only: Sequence[str] = (),
    rerun: Sequence[str] = (),
    keep: Sequence[str] = (),
    start_from: Sequence[str] = (),
) -> Plan:
    """Compares every node's ingredients with the outputs on storage and decides. Writes nothing.

    nodes: in an order in which they can run. sources: whose code enters the fingerprints. only: consider exactly these
    nodes. rerun: a new attempt of these even if up to date, or their newest one continued if it was interrupted.
    start_from: the same of these and of all nodes downstream. keep: adopt their newest output whatever has changed.
    Raises UserError for names that are no nodes and for --only without the inputs that it needs.
    """
    asked = requested(nodes, only=only, rerun=rerun, keep=keep, start_from=start_from)
    code = {node.name: fingerprint.code_hashes((node.module, *node.modules), sources) for node in nodes}
    draft = Plan(store, (), asked, frozenset(keep), code)
    made: dict[str, Decision] = {}
    for node in nodes:
        assert node.name not in made and made.keys() >= {*node.needs}, f"{node.name}: name or order"
        selected = not only or node.name in only
        known = {need: success for need in node.needs if (success := made[need].success)}
        unknown = [need for need in node.needs if need not in known]
        absent = next((need for need in unknown if made[need].action == NOT_SELECTED), None)
        if unknown and not selected:
            reason = f"not selected; its input {unknown[0]} is not finished"
            made[node.name] = Decision(node, NOT_SELECTED, reason)
        elif absent is not None:
            why = made[absent].reason.removeprefix("not selected; ")
            what = f"{node.name}: its input {absent} has no finished output for this configuration ({why})"
            raise UserError(f"{what}; full_multidim.py makes it")
        elif unknown:
            made[node.name] = _before_upstream(node, known, unknown, draft)
        else:
            decision = decide(node, known, draft)
            if not selected:
                done = decision.action == SKIP
                why = decision.reason if done else f"not up to date: {decision.reason}"
                success = decision.success if done else None
                decision = Decision(node, NOT_SELECTED, f"not selected; {why}", success=success)
            made[node.name] = decision
    return replace(draft, decisions=tuple(made.values()))


def decide(node: Node, upstream: Mapping[str, Success], plan: Plan) -> Decision:
    """Decides on a node whose upstream outputs are all known."""
    store = plan.store
    parts = fingerprint.ingredients(
        node, code=plan.code[node.name], upstream={need: _content(node, need, upstream[need]) for need in node.needs}
    )
    name = fingerprint.fingerprint(parts)
    past = attempts.history(store, node.name)
    facts: dict[str, Any] = {"fingerprint": name, "ingredients": parts}
    here = [attempt for attempt in past if attempt.fingerprint == name]
    if node.unreadable:
        made = (s for s in attempts.intact(store, past) if s.ingredients["config"] == parts["config"])
        if node.name in plan.rerun or (current := next(made, None)) is None:
            raise UserError(node.unreadable)
        reason = f"{_up_to_date(current, upstream)}; {node.unreadable}"
        return Decision(node, SKIP, reason, current.fingerprint, current.ingredients, success=current)
    if node.name in plan.rerun:
        reason = f"requested by {plan.rerun[node.name]}"
        unfinished = here[0].attempt if here and here[0].state == "interrupted" else None
        if unfinished is not None:
            reason += f"; attempt {unfinished} was interrupted; continues it"
        return Decision(node, RUN, reason, attempt=unfinished, **facts)
    if current := next(attempts.intact(store, here), None):
        return Decision(node, SKIP, _up_to_date(current, upstream), success=current, **facts)
    if node.name in plan.keep:
        kept = _newest(store, past, node)
        change = fingerprint.explain(kept.ingredients, parts)
        return Decision(node, KEEP, f"attempt {kept.attempt} by --keep, in spite of: {change}", success=kept, **facts)
    how, reusable = _reusable(node, attempts.intact(store, past), parts)
    if how == KEEP and reusable is not None:
        change = fingerprint.explain(reusable.ingredients, parts)
        return Decision(node, KEEP, f"attempt {reusable.attempt} is as good: {change}", success=reusable, **facts)
    extends = reusable if how == EXTEND else None
    begun = next((a for a in here if a.success is None and not a.damage), None)
    if begun is not None:
        what = "failed" if begun.failed else "was interrupted"
        reason = f"attempt {begun.attempt} {what}; continues it"
        return Decision(node, RUN, reason, attempt=begun.attempt, extends=extends, **facts)
    known = [a for a in past if a.success is not None] or [a for a in past if a.ingredients][:1]
    nearest = min(known, key=lambda a: fingerprint.distance(a.ingredients, parts), default=None)
    reason = _damage(store, here) or (fingerprint.explain(nearest.ingredients, parts) if nearest else "no output yet")
    if how and reusable is not None:
        reason = fingerprint.explain(reusable.ingredients, parts)
        reason += f"; extends attempt {reusable.attempt}" if extends else f"; from the beginning, because {how}"
    return Decision(node, RUN, reason, extends=extends, **facts)


def _reusable(node: Node, made: Iterable[Success], parts: Mapping[str, Any]) -> tuple[str, Success | None]:
    """(KEEP, EXTEND or why neither, finished output): the best of those that differ in their config alone."""
    if node.reuse is None:
        return "", None
    # What --keep adopted was made under another config than it says; the original may still be alike.
    alike = [s for s in made if not s.adopted and {**s.ingredients, "config": None} == {**parts, "config": None}]
    found = [(node.reuse(success.ingredients["config"], parts["config"]), success) for success in alike]
    return max(found, key=lambda each: (each[0] == KEEP, each[0] == EXTEND, each[0] != ""), default=("", None))


def _before_upstream(node: Node, known: Mapping[str, Success], unknown: Sequence[str], plan: Plan) -> Decision:
    """Decides on a node of whose upstream nodes some (`unknown`) run first."""
    past = attempts.history(plan.store, node.name)
    if node.name in plan.rerun:
        return Decision(node, RUN, f"requested by {plan.rerun[node.name]}")
    if node.name in plan.keep:
        kept = _newest(plan.store, past, node)
        return Decision(node, KEEP, f"attempt {kept.attempt} by --keep", success=kept)
    names = f"{', '.join(unknown[:-1])} and {unknown[-1]}" if len(unknown) > 1 else unknown[0]
    contents = {need: _content(node, need, success) for need, success in known.items()}
    for attempt in past:
        before = attempt.ingredients.get("upstream", {})
        if attempt.success is not None and all(need in before for need in unknown):
            unchanged = fingerprint.ingredients(
                node, code=plan.code[node.name], upstream=contents | {need: before[need] for need in unknown}
            )
            if fingerprint.fingerprint(unchanged) == attempt.fingerprint:
                reason = f"only if the new output of {names} differs from what it has read"
                return Decision(node, WAIT, reason)
    reason = f"because {names} {'runs' if len(unknown) == 1 else 'run'}"
    return Decision(node, RUN, reason)


def _content(node: Node, need: str, success: Success) -> dict[str, Any]:
    reads = node.reads.get(need, ("*",))
    return {"reads": list(reads), "content": attempts.content(success, reads)}


def _up_to_date(current: Success, upstream: Mapping[str, Success]) -> str:
    reason = f"up to date: attempt {current.attempt}, finished {age(current.finished)}"
    newer = [need for need, success in upstream.items() if current.upstream.get(need) != success.attempt]
    if current.adopted:
        reason += f" and kept in spite of: {current.adopted['in_spite_of']}"
    elif newer:
        reason += f"; attempt {upstream[newer[0]].attempt} of {newer[0]} made equal files"
    return reason


def _damage(store: Store, here: list[Attempt]) -> str:
    """What is wrong with the newest finished attempt of one fingerprint, none of which is intact; "" without one."""
    for attempt in here:
        wrong = [attempt.damage] if attempt.damage else attempt.success and attempts.problems(store, attempt.success)
        if wrong:
            return f"output of attempt {attempt.attempt} is damaged: {wrong[0]}"
    return ""


def _newest(store: Store, past: list[Attempt], node: Node) -> Success:
    for success in attempts.intact(store, past):
        return success
    raise UserError(f"--keep {node.name}: it has no finished output that could be kept")


def downstream(nodes: Sequence[Node], first: str) -> list[str]:
    """`first` and all nodes that depend on it, in running order."""
    found = [first]
    for node in nodes:
        if node.name != first and any(need in found for need in node.needs):
            found.append(node.name)
    return found


def nearest(name: str, valid: Sequence[str]) -> str:
    """What a message about a wrong name says of the valid ones."""
    close = difflib.get_close_matches(name, valid, n=1, cutoff=0.5)
    return f"nearest: {close[0]}" if close else f"valid: {', '.join(valid)}"


def requested(
    nodes: Sequence[Node],
    *,
    only: Sequence[str] = (),
    rerun: Sequence[str] = (),
    keep: Sequence[str] = (),
    start_from: Sequence[str] = (),
) -> dict[str, str]:
    """{node that is to run again: the option that asks for it}. Raises UserError for names that are no nodes, and for
    options that exclude each other."""
    names = [node.name for node in nodes]
    for option, values in (("--only", only), ("--rerun", rerun), ("--keep", keep), ("--from", start_from)):
        for value in values:
            if value not in names:
                raise UserError(f"{option} {value}: this configuration has no such node; {nearest(value, names)}")
    if only and start_from:
        raise UserError(
            f"--from {start_from[0]} runs all nodes downstream, --only leaves nodes out; use --rerun with --only"
        )
    for option, values in (("--rerun", rerun), ("--keep", keep)):
        if outside := [name for name in values if only and name not in only]:
            raise UserError(f"{option} {outside[0]}: --only leaves this node out; name it there too")
    asked = {name: f"--from {first}" for first in start_from for name in downstream(nodes, first)}
    asked |= dict.fromkeys(rerun, "--rerun")
    if both := [name for name in keep if name in asked]:
        raise UserError(f"{asked[both[0]]} and --keep {both[0]} exclude each other")
    return asked
