"""Progress of long work: tasks and train workers report to one small actor, and the driver shows it.

A `Reporter` is cheap to call in a loop: it sends at most two updates per second and never waits for an answer.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import IO, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.text import Text

SEND_SEC = 0.5  # shortest time between two updates of one reporter
LINE_SEC = 5.0  # shortest time between two plain lines of one node
_ANSWER_SEC = 1.0  # longest wait for the hub, which takes a moment to start
_SPEED_SEC = 60.0  # speed is that of the last minute


@dataclass(frozen=True)
class Update:
    """How far a node is."""

    done: float
    total: float
    unit: str = "images"
    note: str = ""


class Reporter:
    """Sends a node's progress to the hub; without a hub it is silent. Picklable."""

    def __init__(self, node: str, hub: Any = None, *, name: str = "") -> None:
        self.node, self.hub, self.name = node, hub, name
        self._last = 0.0

    def part(self, name: str) -> Reporter:
        """A reporter for one part of the node's work: the parts are shown as one sum."""
        return Reporter(self.node, self.hub, name=name)

    def update(self, done: float, total: float, *, unit: str = "images", note: str = "") -> None:
        """Says that `done` of `total` units are done. The last one (done >= total) is always sent."""
        now = time.monotonic()
        if self.hub is None or (now - self._last < SEND_SEC and done < total):
            return
        self._last = now
        try:
            self.hub.update.remote(self.node, Update(done, total, unit, note), self.name)
        except Exception:  # the actor is gone: the work continues without a display
            self.hub = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_last": 0.0}  # another machine has another clock


class Board:
    """The state behind the hub: the newest update of every node."""

    def __init__(self) -> None:
        self.updates: dict[str, Update] = {}
        self._done: dict[str, dict[str, float]] = {}  # by node and part

    def update(self, node: str, update: Update, part: str = "") -> None:
        parts = self._done.setdefault(node, {})
        if not part:
            parts.clear()  # the node itself says how much is done: at its start, or when it starts again
        # A part that another worker does again counts only once it is further than before.
        parts[part] = max(update.done, parts.get(part, 0.0)) if part else update.done
        self.updates[node] = replace(update, done=sum(parts.values()))

    def snapshot(self) -> dict[str, Update]:
        return self.updates


class Hub:
    """Driver's side of the actor, which starts with the first node. That needs a Ray session."""

    def __init__(self) -> None:
        import ray

        self._ray = ray
        self._actor: Any = None

    def reporter(self, node: str) -> Reporter:
        if self._actor is None:
            self._actor = self._ray.remote(num_cpus=0)(Board).remote()
        return Reporter(node, self._actor)

    def poll(self) -> Mapping[str, Update]:
        """The newest updates; none from an actor that is gone or does not answer."""
        if self._actor is None:
            return {}
        try:
            return self._ray.get(self._actor.snapshot.remote(), timeout=_ANSWER_SEC)
        except self._ray.exceptions.RayError:
            return {}

    def close(self) -> None:
        if self._actor is not None:
            self._ray.kill(self._actor)


class Display:
    """What the driver shows: bars that are redrawn in place on a terminal; otherwise, for logs and jobs, at most one
    line per node every few seconds."""

    def __init__(self, stream: IO[str] | None = None, *, now: Callable[[], float] = time.monotonic) -> None:
        stream = stream or sys.stdout
        self._live, self._now = stream.isatty(), now
        self._numbers = _Numbers()
        columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=24), self._numbers)
        self._progress = Progress(
            *columns, console=Console(file=stream), transient=True, get_time=now, speed_estimate_period=_SPEED_SEC
        )
        if self._live:
            self._progress.start()
        self._tasks: dict[str, TaskID] = {}
        self._shown: dict[str, tuple[float, Update]] = {}

    def line(self, text: str) -> None:
        self._progress.console.print(text, markup=False, emoji=False, highlight=False, soft_wrap=True)

    def show(self, updates: Mapping[str, Update]) -> None:
        for node, update in updates.items():
            if node not in self._tasks:
                self._tasks[node] = self._progress.add_task(node, total=update.total, update=update)
            self._progress.update(self._tasks[node], completed=update.done, total=update.total, update=update)
            if not self._live and self._is_due(node, update):
                task = next(task for task in self._progress.tasks if task.id == self._tasks[node])
                self.line(f"[{node}] {self._numbers.render(task)}")

    def end(self, node: str) -> None:
        """Removes the bar of a node that has ended. A node that starts again gets a new one."""
        if node in self._tasks:
            self._progress.remove_task(self._tasks.pop(node))

    def close(self) -> None:
        self._progress.stop()

    def _is_due(self, node: str, update: Update) -> bool:
        now = self._now()
        at, last = self._shown.get(node, (float("-inf"), None))
        has_finished = update.done >= update.total and last is not None and last.done < last.total
        if update == last or not (has_finished or now - at >= LINE_SEC):
            return False
        self._shown[node] = (now, update)
        return True


class _Numbers(ProgressColumn):
    """E.g. "120/400 steps  31.2 slices/s  0:42 left  valid 1.83"; speed and time left are rich's."""

    def render(self, task: Task) -> Text:
        update: Update = task.fields["update"]
        parts = [f"{update.done:_.0f}/{update.total:_.0f} {update.unit}"]
        if task.speed:
            parts.append(f"{_rate(task.speed)} {update.unit}/s")
        if task.time_remaining and not task.finished:
            parts.append(f"{clock(task.time_remaining)} left")
        return Text("  ".join([*parts, update.note] if update.note else parts))


def clock(seconds: float) -> str:
    """42 -> "0:00:42"."""
    return str(timedelta(seconds=round(seconds)))


def _rate(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2g}"
