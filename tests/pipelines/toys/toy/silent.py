"""Tracking that records nothing: what the engine needs, without MLflow."""

from __future__ import annotations

from typing import Any

from pipelines.tracking import RunHandle


class SilentTracker:
    """Remembers how each node's run ended: {node: [FINISHED, ...]}."""

    def __init__(self) -> None:
        self.ended: dict[str, list[str]] = {}

    def start_node(self, node: str, **_: Any) -> RunHandle:
        return RunHandle()

    reuse_node = start_node

    def show(self, *_: Any) -> None:
        pass

    def finish(self, node: str, status: str, **_: Any) -> None:
        self.ended.setdefault(node, []).append(status)
