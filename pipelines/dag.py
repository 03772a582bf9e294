"""The DAG engine in one place: describe nodes, plan, run. It knows no stage of the pipeline.

    nodes = [Node("numbers", "pipelines.nodes.numbers:run"), Node("total", "pipelines.nodes.total:run", ("numbers",))]
    decided = plan(nodes, open_store("runs/demo"))          # what runs, what is skipped, and why
    report = run(decided, cluster=connect(), ledger=ledger, display=make_display())

A node is up to date when its folder holds a _SUCCESS.json for the fingerprint of its config, its code and the outputs
that it is made from. Read in this order: node.py, fingerprint.py, attempts.py, plan.py, runner.py, task.py.
Node functions import from node.py, not from here: what they import enters their fingerprint.
"""

from pipelines.node import Node, NodeContext, NodeOutput, NodeResult
from pipelines.plan import Decision, Plan, ordered, plan
from pipelines.runner import NodeReport, RunReport, Stopped, check_fits, run

__all__ = [
    "Decision",
    "Node",
    "NodeContext",
    "NodeOutput",
    "NodeReport",
    "NodeResult",
    "Plan",
    "RunReport",
    "Stopped",
    "check_fits",
    "ordered",
    "plan",
    "run",
]
