"""A diamond of four toy nodes, planned and run in this process, without Ray."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data_prep.files import Store
from pipelines.dag import attempts
from pipelines.dag.node import Node
from pipelines.dag.plan import Plan, decide, plan
from pipelines.dag.progress import Reporter
from pipelines.dag.task import adopt, execute, make_task
from pipelines.tracking import RunHandle

TOYS = Path(__file__).parents[1]


def diamond(**changes: dict[str, Any]) -> list[Node]:
    """prepare -> left, right -> join; changes: {node: fields}."""
    needs = {"prepare": (), "left": ("prepare",), "right": ("prepare",), "join": ("left", "right")}
    nodes = [Node(name, "toy.nodes:write", above, {"value": name}) for name, above in needs.items()]
    return [dataclasses.replace(node, **changes.get(node.name, {})) for node in nodes]


def decided(store: Store, nodes: Sequence[Node] | None = None, *, root: Path = TOYS, **options: Any) -> Plan:
    return plan(nodes or diamond(), store, packages=("toy",), root=root, **options)


def carry_out(made: Plan, *, broken: Sequence[str] = (), lock: str | None = None) -> list[str]:
    """Runs a plan in this process as the runner does, leaving `broken` nodes unfinished; returns what ran.

    lock: token of the run folder's lock, which the runner writes down.
    """
    store, ran = made.store, []
    outputs = {d.node.name: d.success.output(store) for d in made.decisions if d.success}
    for decision in made.decisions:
        node = decision.node
        if decision.action in ("skip", "not selected") or not all(need in outputs for need in node.needs):
            continue
        if decision.fingerprint is None:
            decision = decide(node, {need: outputs[need].attempt for need in node.needs}, made)
        assert decision.fingerprint and decision.ingredients is not None
        if decision.action == "keep":
            adopt(store, decision.success, fingerprint=decision.fingerprint, ingredients=decision.ingredients, why="x")
            continue
        attempt = decision.attempt or attempts.new_attempt_id(decision.known_attempts)
        folder = attempts.attempt_folder(node.name, decision.fingerprint, attempt)
        if node.name in broken:
            now = attempts.utc_now()
            started = {"ingredients": decision.ingredients, "starts": [now], "mlflow_run_id": "run7", "lock": lock}
            store.write_text(f"{folder}/{attempts.STARTED}", json.dumps(started))
            continue
        task = make_task(
            decision,
            attempt=attempt,
            store=store,
            outputs=outputs,
            run=RunHandle(),
            progress=Reporter(node.name),
            git_commit="unknown",
        )
        outcome = execute(task)
        assert outcome.success is not None, outcome.error
        outputs[node.name] = outcome.success.output(store)
        ran.append(node.name)
    return ran
