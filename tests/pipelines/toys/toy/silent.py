"""Tracking that records nothing: what the engine needs, without MLflow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any


class SilentRun:
    run_id = None

    @contextmanager
    def open(self) -> Iterator[SilentRun]:
        yield self

    def set_tags(self, tags: Mapping[str, str]) -> None:
        pass

    def log_metrics(self, metrics: Mapping[str, float], step: int = 0) -> None:
        pass


class SilentTracker:
    """Remembers how each node's run ended: {node: [FINISHED, ...]}."""

    def __init__(self) -> None:
        self.ended: dict[str, list[str]] = {}

    def start_node(self, node: str, **_: Any) -> SilentRun:
        return SilentRun()

    reuse_node = start_node

    def show(self, *_: Any) -> None:
        pass

    def finish(self, node: str, status: str, **_: Any) -> None:
        self.ended.setdefault(node, []).append(status)
