"""Progress: rates, time left, and lines that do not flood a log.

python -m pytest tests/pipelines/dag/test_progress.py
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import pytest

from pipelines.dag import progress
from pipelines.dag.progress import Display, Reporter, Update


class FakeHub:
    def __init__(self) -> None:
        self.got: list[tuple[str, Update]] = []
        self.update = self

    def remote(self, node: str, update: Update, part: str) -> None:
        assert part == ""
        self.got.append((node, update))


class Clock:
    def __init__(self) -> None:
        self.time = 1000.0

    def __call__(self) -> float:
        return self.time


def test_a_reporter_sends_twice_a_second_at_most_and_always_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    hub, now = FakeHub(), Clock()
    monkeypatch.setattr(progress.time, "monotonic", now)
    reporter = Reporter("train", hub)
    for step in range(1, 101):
        reporter.update(step, 100, unit="steps")
        now.time += 0.1
    sent = [update.done for _, update in hub.got]
    assert sent[0] == 1 and sent[-1] == 100
    assert 20 <= len(sent) <= 22


def test_a_reporter_without_a_hub_or_with_a_dead_one_is_silent() -> None:
    Reporter("a").update(1, 2)

    class Dead:
        @property
        def update(self) -> Any:
            raise RuntimeError("actor is gone")

    reporter = Reporter("a", Dead())
    reporter.update(1, 2)
    assert reporter.hub is None
    part = pickle.loads(pickle.dumps(reporter.part("chunk 1")))
    assert (part.node, part.name) == ("a", "chunk 1")


def test_parts_of_a_node_are_shown_as_one_sum() -> None:
    """Chunks drawn by several workers; one that is drawn again, after a crash, neither counts twice nor goes back."""
    board = progress.Board()
    board.update("sample", Update(100, 1000, "pixels"))  # from before this start
    board.update("sample", Update(30, 1000, "pixels"), "chunk 1")
    board.update("sample", Update(20, 1000, "pixels"), "chunk 2")
    board.update("train", Update(7, 10))
    assert board.snapshot() == {"sample": Update(150, 1000, "pixels"), "train": Update(7, 10)}
    for done, total in ((5, 150), (30, 150), (50, 170)):
        board.update("sample", Update(done, 1000, "pixels"), "chunk 1")
        assert board.snapshot()["sample"].done == total
    board.update("train", Update(3, 10))  # back to a checkpoint
    assert board.snapshot()["train"].done == 3
    board.update("sample", Update(170, 1000, "pixels"))  # lost and started again: both chunks were finished
    board.update("sample", Update(10, 1000, "pixels"), "chunk 3")
    assert board.snapshot()["sample"].done == 180


def shown(updates: list[Update], *, every_sec: float = 1.0) -> list[str]:
    """Lines of a display without a terminal that gets one update after another."""
    stream, now = io.StringIO(), Clock()
    display = Display(stream, now=now)
    for update in updates:
        display.show({"a": update})
        now.time += every_sec
    return stream.getvalue().splitlines()


def test_speed_and_time_left_are_those_of_the_last_minute() -> None:
    slow, fast = range(0, 100), range(100, 1401, 10)
    last = shown([Update(done, 2000) for done in (*slow, *fast)])[-1]
    assert last == "[a] 1_400/2_000 images  10.0 images/s  0:01:00 left"


def test_a_line_has_place_rate_time_left_and_note() -> None:
    updates = [
        Update(100, 400, "steps"),
        Update(120, 400, "steps"),
        Update(140, 400, "steps", "valid 1.83"),
    ]
    first, second, third = shown(updates, every_sec=5)
    assert (first, second) == ("[a] 100/400 steps", "[a] 120/400 steps  4.0 steps/s  0:01:10 left")
    assert third == "[a] 140/400 steps  4.0 steps/s  0:01:05 left  valid 1.83"


def test_plain_lines_come_every_five_seconds_when_something_changed() -> None:
    stream, now = io.StringIO(), Clock()
    display = Display(stream, now=now)
    for second in range(21):
        display.show({"a": Update(min(second, 12), 12, "images"), "still": Update(1, 5)})
        now.time += 1.0
    lines = stream.getvalue().splitlines()
    assert [line.split()[1] for line in lines if "[a]" in line] == ["0/12", "5/12", "10/12", "12/12"]
    assert len([line for line in lines if "[still]" in line]) == 1


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_bars_and_a_node_that_starts_again_gets_a_new_one() -> None:
    stream = Terminal()
    display = Display(stream)
    for _ in range(2):
        display.show({"a": Update(1, 2, "images", "[not markup]")})
        display._progress.refresh()
        display.line("[a] says [/this]")
        assert len(display._progress.tasks) == 1
        display.end("a")
        assert display._progress.tasks == []
    display.close()
    assert "[a] says [/this]" in stream.getvalue() and "1/2 images  [not markup]" in stream.getvalue()
