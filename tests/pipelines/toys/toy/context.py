"""What a node function is given, outside of any run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipelines.dag.node import NodeContext, NodeOutput
from pipelines.dag.progress import Reporter
from pipelines.tracking import RunHandle


def context(
    node: str,
    config: Any,
    out: Path | str,
    inputs: Mapping[str, NodeOutput] | None = None,
    *,
    fingerprint: str = "f",
    attempt: str = "a",
) -> NodeContext:
    return NodeContext(node, fingerprint, attempt, config, inputs or {}, str(out), RunHandle(), Reporter(node))
