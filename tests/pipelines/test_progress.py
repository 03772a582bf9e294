"""Progress: rates, time left, and lines that do not flood a log.  python -m pytest tests/pipelines/test_progress.py"""

from __future__ import annotations

import io
import pickle
from typing import Any

import pytest

from pipelines.dag import progress
from pipelines.dag.progress import Meter, PlainDisplay, Reporter, Update, clock, line_of


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
    assert pickle.loads(pickle.dumps(reporter)).node == "a"


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


def test_a_reporter_names_its_part_wherever_it_travels() -> None:
    part = pickle.loads(pickle.dumps(Reporter("sample").part("chunk 1")))
    assert (part.node, part.name) == ("sample", "chunk 1")


def test_rate_and_time_left_come_from_the_newest_updates() -> None:
    meter = Meter()
    assert meter.rate is None and meter.left_sec(100) is None
    for second in range(100):
        meter.add(second if second < 50 else 50 + 10 * (second - 50), float(second))
    assert meter.rate == pytest.approx(10, rel=0.01)
    assert meter.left_sec(640) == pytest.approx(10, rel=0.01)


def test_going_back_to_a_checkpoint_starts_a_new_rate() -> None:
    meter = Meter()
    meter.add(100, 0.0)
    meter.add(200, 1.0)
    meter.add(150, 2.0)
    assert meter.rate is None
    meter.add(160, 3.0)
    assert meter.rate == pytest.approx(10)


def test_a_line_has_place_rate_time_left_and_note() -> None:
    meter = Meter()
    meter.add(100, 0.0)
    meter.add(120, 3.0)
    update = Update(120, 400, "steps", "valid 1.83", "31.2 slices/s")
    assert line_of("train_size_upscale", update, meter) == (
        "[train_size_upscale] 120/400 steps  31.2 slices/s  0:42 left  valid 1.83"
    )
    assert line_of("a", Update(120, 400), meter) == "[a] 120/400 images  6.7 images/s  0:42 left"
    assert line_of("a", Update(0, 40_000), Meter()) == "[a] 0/40_000 images"


def test_clock() -> None:
    assert [clock(s) for s in (0, 42.4, 61, 3700, -5)] == ["0:00", "0:42", "1:01", "1:01:40", "0:00"]


def test_plain_lines_come_every_five_seconds_when_something_changed() -> None:
    stream, now = io.StringIO(), Clock()
    display = PlainDisplay(stream, now)
    for second in range(21):
        update = Update(min(second, 12), 12, "images")
        display.show({"a": update, "still": Update(1, 5)})
        now.time += 1.0
    lines = stream.getvalue().splitlines()
    assert [line.split()[1] for line in lines if "[a]" in line] == ["0/12", "5/12", "10/12", "12/12"]
    assert len([line for line in lines if "[still]" in line]) == 1


def test_live_display_draws_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    display = progress.LiveDisplay()
    display.show({"a": Update(1, 2, "images", "[not markup]")})
    display.line("[a] says [/this]")
    display.end("a")
    display.close()
    assert "[a] says [/this]" in capsys.readouterr().out


def test_a_node_that_starts_again_has_a_bar_again() -> None:
    display = progress.LiveDisplay()
    for _ in range(2):
        display.show({"a": Update(1, 2)})
        assert [task.visible for task in display._progress.tasks] == [True]
        display.end("a")
        assert display._progress.tasks == []
    display.close()
