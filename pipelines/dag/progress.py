"""Progress of long work: tasks and train workers report to one small actor, the driver shows what it knows.

A `Reporter` is cheap to call in a loop: it sends at most two updates a second and never waits for an answer.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import IO, Any

SEND_SEC = 0.5  # shortest time between two updates of one reporter
LINE_SEC = 5.0  # shortest time between two plain lines of one node
_WINDOW_SEC = 30.0  # the rate is that of the last half minute


@dataclass(frozen=True)
class Update:
    """Where a node stands."""

    done: float
    total: float
    unit: str = "images"
    note: str = ""
    rate: str = ""  # shown instead of units per second, e.g. "31.2 slices/s"


class Reporter:
    """Sends a node's progress to the hub; without a hub it is silent. Picklable."""

    def __init__(self, node: str, hub: Any = None, *, name: str = "") -> None:
        self.node, self.hub, self.name = node, hub, name
        self._last = 0.0

    def part(self, name: str) -> Reporter:
        """A reporter of one part of the node's work: what parts have done is shown as one sum."""
        return Reporter(self.node, self.hub, name=name)

    def update(self, done: float, total: float, *, unit: str = "images", note: str = "", rate: str = "") -> None:
        """Says that `done` of `total` units are done. The last one (done >= total) is always sent."""
        now = time.monotonic()
        if self.hub is None or (now - self._last < SEND_SEC and done < total):
            return
        self._last = now
        try:
            self.hub.update.remote(self.node, Update(done, total, unit, note, rate), self.name)
        except Exception:  # the display is gone: work goes on without it
            self.hub = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_last": 0.0}  # another machine has another clock


class Board:
    """The state behind the hub: the newest update of every node."""

    def __init__(self) -> None:
        self.updates: dict[str, Update] = {}
        self._done: dict[str, dict[str, float]] = {}  # of each part of each node

    def update(self, node: str, update: Update, part: str = "") -> None:
        parts = self._done.setdefault(node, {})
        if not part:
            parts.clear()  # the node itself says how much is done: at its start, or when it starts again
        # A part that is done again, by another worker, counts once it is further than before.
        parts[part] = max(update.done, parts.get(part, 0.0)) if part else update.done
        self.updates[node] = replace(update, done=sum(parts.values()))

    def snapshot(self) -> dict[str, Update]:
        return self.updates


class Hub:
    """Driver's side of the actor. Needs a Ray session."""

    def __init__(self) -> None:
        import ray

        self._ray = ray
        self._actor = ray.remote(num_cpus=0)(Board).remote()
        self._asked: Any = None

    def reporter(self, node: str) -> Reporter:
        return Reporter(node, self._actor)

    def poll(self) -> Mapping[str, Update]:
        """What arrived since the last call, as far as the actor has answered; never waits."""
        answer: Mapping[str, Update] = {}
        try:
            if self._asked is not None:
                ready, _ = self._ray.wait([self._asked], timeout=0)
                if not ready:
                    return answer
                answer = self._ray.get(self._asked)
            self._asked = self._actor.snapshot.remote()
        except self._ray.exceptions.RayError:
            self._asked = None
        return answer

    def close(self) -> None:
        self._ray.kill(self._actor)


class Meter:
    """Rate and time left of one node, from the updates of the last half minute."""

    def __init__(self) -> None:
        self._seen: list[tuple[float, float]] = []  # (time, done)

    def add(self, done: float, now: float) -> None:
        if self._seen and done < self._seen[-1][1]:
            self._seen.clear()  # it went back to a checkpoint, or a new phase began
        if not self._seen or done > self._seen[-1][1]:
            self._seen.append((now, done))
        while len(self._seen) > 2 and now - self._seen[0][0] > _WINDOW_SEC:
            self._seen.pop(0)

    @property
    def rate(self) -> float | None:
        """Units a second, None before two updates."""
        if len(self._seen) < 2:
            return None
        (start, first), (end, last) = self._seen[0], self._seen[-1]
        return (last - first) / (end - start) if end > start else None

    def left_sec(self, total: float) -> float | None:
        return (total - self._seen[-1][1]) / self.rate if self.rate else None


def line_of(node: str, update: Update, meter: Meter) -> str:
    """E.g. "[train_size_upscale] 120/400 steps  31.2 slices/s  0:42 left  valid 1.83"."""
    parts = [f"[{node}] {_count(update.done)}/{_count(update.total)} {update.unit}"]
    if update.rate or meter.rate is not None:
        parts.append(update.rate or f"{_rate(meter.rate or 0.0)} {update.unit}/s")
    left = meter.left_sec(update.total)
    if left is not None and update.done < update.total:
        parts.append(f"{clock(left)} left")
    if update.note:
        parts.append(update.note)
    return "  ".join(parts)


def clock(seconds: float) -> str:
    """42 -> "0:42", 3700 -> "1:01:40"."""
    whole = max(0, round(seconds))
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


@dataclass
class PlainDisplay:
    """One line for a node at most every few seconds, when something changed: for logs and jobs."""

    stream: IO[str] = field(default_factory=lambda: sys.stdout)
    now: Any = time.monotonic

    def __post_init__(self) -> None:
        self._meters: dict[str, Meter] = {}
        self._shown: dict[str, tuple[float, Update]] = {}

    def line(self, text: str) -> None:
        print(text, file=self.stream, flush=True)

    def show(self, updates: Mapping[str, Update]) -> None:
        now = self.now()
        for node, update in updates.items():
            meter = self._meters.setdefault(node, Meter())
            meter.add(update.done, now)
            at, last = self._shown.get(node, (float("-inf"), None))
            due = now - at >= LINE_SEC or (update.done >= update.total and last is not None and last.done < last.total)
            if update != last and due:
                self._shown[node] = (now, update)
                self.line(line_of(node, update, meter))

    def end(self, node: str) -> None:
        """The node has ended: its bar goes."""

    def close(self) -> None:
        pass


class LiveDisplay:
    """Bars that are redrawn in place: for terminals."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, Progress, TextColumn

        columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=24))
        self._progress = Progress(*columns, TextColumn("{task.fields[text]}", markup=False), transient=True)
        self._progress.start()
        self._tasks: dict[str, Any] = {}
        self._meters: dict[str, Meter] = {}

    def line(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def show(self, updates: Mapping[str, Update]) -> None:
        for node, update in updates.items():
            meter = self._meters.setdefault(node, Meter())
            meter.add(update.done, time.monotonic())
            if node not in self._tasks:
                self._tasks[node] = self._progress.add_task(node, text="")
            text = line_of(node, update, meter).removeprefix(f"[{node}] ")
            self._progress.update(self._tasks[node], completed=update.done, total=update.total, text=text)

    def end(self, node: str) -> None:
        """The node has ended: its bar goes. A node that starts again gets a new one."""
        if node in self._tasks:
            self._progress.remove_task(self._tasks.pop(node))
            del self._meters[node]

    def close(self) -> None:
        self._progress.stop()


def make_display() -> PlainDisplay | LiveDisplay:
    """Live bars on a terminal, plain lines otherwise."""
    return LiveDisplay() if sys.stdout.isatty() else PlainDisplay()


def _count(value: float) -> str:
    return f"{value:,.0f}".replace(",", "_") if value == int(value) else f"{value:.1f}"


def _rate(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2g}"
