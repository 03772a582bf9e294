"""A diamond of four toy nodes, planned and run in this process, without Ray."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from data_prep.files import Store
from pipelines.dag import attempts
from pipelines.dag.fingerprint import Sources
from pipelines.dag.node import Node
from pipelines.dag.plan import Plan, decide, plan
from pipelines.dag.task import adopt, execute
from toy.context import context
from toy.nodes import Toy

TOYS = Path(__file__).parents[1]
SOURCES = Sources(TOYS, ("toy",))


def diamond(**changes: dict[str, Any]) -> list[Node]:
    """prepare -> left, right -> join; changes: {node: fields}."""
    needs = {"prepare": (), "left": ("prepare",), "right": ("prepare",), "join": ("left", "right")}
    nodes = [Node(name, "toy.nodes:write", above, Toy(name)) for name, above in needs.items()]
    return [dataclasses.replace(node, **changes.get(node.name, {})) for node in nodes]


def decided(store: Store, nodes: Sequence[Node] | None = None, *, sources: Sources = SOURCES, **options: Any) -> Plan:
    return plan(nodes or diamond(), store, sources=sources, **options)


def will_run(made: Plan) -> tuple[str, ...]:
    """Nodes that run, or may run once a node upstream has."""
    return tuple(decision.node.name for decision in made.decisions if decision.action in ("run", "wait"))


def carry_out(made: Plan, *, broken: Sequence[str] = (), lock: str | None = None) -> list[str]:
    """Runs a plan in this process as the engine does, leaving `broken` nodes unfinished; returns what ran.

    lock: token of the run folder's lock, which the engine writes down.
    """
    store, ran = made.store, []
    known = {d.node.name: d.success for d in made.decisions if d.success}
    for decision in made.decisions:
        node = decision.node
        if decision.action in ("skip", "not selected") or not all(need in known for need in node.needs):
            continue
        if decision.fingerprint is None:
            decision = decide(node, {need: known[need] for need in node.needs}, made)
        assert decision.fingerprint and decision.ingredients is not None
        if decision.action == "skip":
            known[node.name] = decision.success
            continue
        if decision.action == "keep":
            adopt(store, decision.success, fingerprint=decision.fingerprint, ingredients=decision.ingredients, why="x")
            continue
        attempt = decision.attempt or attempts.new_attempt_id(store, node.name)
        folder = attempts.attempt_folder(node.name, decision.fingerprint, attempt)
        if node.name in broken:
            now = attempts.utc_now()
            started = {"ingredients": decision.ingredients, "starts": [now], "mlflow_run_id": "run7", "lock": lock}
            store.write_text(f"{folder}/{attempts.STARTED}", json.dumps(started))
            continue
        inputs = {need: known[need].output(store) for need in node.needs}
        names = dict(fingerprint=decision.fingerprint, attempt=attempt)
        given = context(node.name, node.config, store.uri_of(folder), inputs, **names)
        outcome = execute(node.function, given, decision.ingredients, "unknown")
        assert outcome.success is not None, outcome.error
        known[node.name] = outcome.success
        ran.append(node.name)
    return ran


def seal(made: Plan, files: Mapping[str, Mapping[str, str | bytes]] | None = None) -> list[str]:
    """Finishes what a plan runs without calling any function; returns the nodes.

    files: {node: {path of an output: its content}}; each output is named by the first part of its path.
    """
    known: dict[str, attempts.Success] = {}
    ran = []
    for decision in made.decisions:
        node = decision.node
        decision = decide(node, {need: known[need] for need in node.needs}, made)
        if decision.action == "skip":
            known[node.name] = decision.success
            continue
        assert decision.fingerprint and decision.ingredients is not None
        attempt = attempts.new_attempt_id(made.store, node.name)
        folder = attempts.attempt_folder(node.name, decision.fingerprint, attempt)
        written = (files or {}).get(node.name, {"file": node.name})
        for path, content in written.items():
            made.store.write_bytes(f"{folder}/{path}", content.encode() if isinstance(content, str) else content)
        named = {path.split("/")[0]: path.split("/")[0] for path in written}
        success = attempts.Success(
            node=node.name,
            fingerprint=decision.fingerprint,
            attempt=attempt,
            started=attempts.utc_now(),
            finished=attempts.utc_now(),
            outputs=attempts.measure(made.store.sub(folder), named, {}),
            named=named,
            upstream={need: known[need].attempt for need in node.needs},
            ingredients=decision.ingredients,
            metrics={},
            mlflow_run_id=None,
            git_commit="unknown",
        )
        made.store.write_bytes(f"{folder}/{attempts.SUCCESS}", success.to_bytes())
        known[node.name] = success
        ran.append(node.name)
    return ran
