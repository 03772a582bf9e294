"""--status: what lies in a run folder and what the next start would do.

python -m pytest tests/pipelines/dag/test_status.py
"""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

from toy.diamond import carry_out, decided, diamond
from toy.nodes import Toy

from data_prep.files import Store
from data_prep.lock import Lock
from pipelines.dag import attempts, status

CHANGED = {"left": {"config": Toy("new")}}


def rows(store: Store, **changes: dict) -> dict[str, str]:
    """{node: the rest of its line}"""
    lines = status.lines(decided(store, diamond(**changes)))
    assert lines[-5].split() == ["node", "state", "MLflow", "run", "fingerprint", "age", "next", "start"]
    return {line.split()[0]: line.split(maxsplit=1)[1] for line in lines[-4:]}


def test_a_finished_node_shows_run_fingerprint_and_age(finished: Store) -> None:
    (attempt,) = attempts.history(finished, "left")
    shown = rows(finished)["left"]
    assert shown.startswith("up to date") and shown.endswith("skips it")
    assert attempt.fingerprint in shown and " ago " in shown


def test_an_outdated_node_says_why_it_would_run(finished: Store) -> None:
    shown = rows(finished, **CHANGED)
    assert shown["left"].startswith("outdated")
    assert shown["left"].endswith("runs it: config changed: value left -> new")
    assert shown["join"].startswith("waits") and shown["right"].startswith("up to date")
    assert shown["join"].endswith("runs it only if the new output of left differs from what it has read")


def test_interrupted_failed_and_damaged(finished: Store) -> None:
    carry_out(decided(finished, diamond(**CHANGED)), broken=["left"])
    shown = rows(finished, **CHANGED)["left"]
    (unfinished,) = (a for a in attempts.history(finished, "left") if a.success is None)
    assert shown.startswith("interrupted") and "run7" in shown and unfinished.fingerprint in shown
    finished.write_text(f"{unfinished.folder}/{attempts.ERROR}", "RuntimeError")
    assert rows(finished, **CHANGED)["left"].startswith("failed")
    (right,) = attempts.history(finished, "right")
    finished.delete(f"{right.folder}/value.txt")
    assert rows(finished)["right"].startswith("damaged")
    assert "value.txt is missing" in rows(finished)["right"]


def test_what_a_living_start_works_on_is_running(finished: Store) -> None:
    with Lock(finished) as lock:
        carry_out(decided(finished, diamond(**CHANGED)), broken=["left"], lock=lock.token)
        lines = status.lines(decided(finished, diamond(**CHANGED)))
        assert lines[0].startswith("in use by process ")
        assert rows(finished, **CHANGED)["left"].startswith("running")
    assert rows(finished, **CHANGED)["left"].startswith("interrupted")
    with Lock(finished) as another:
        assert rows(finished, **CHANGED)["left"].startswith("interrupted"), "by an earlier start"
        (left,) = (a for a in attempts.history(finished, "left") if a.success is None)
        ahead = (datetime.now(tz=UTC) + timedelta(hours=1)).isoformat()  # that start's clock
        finished.write_text(f"{left.folder}/{attempts.STARTED}", json.dumps({**left.started, "starts": [ahead]}))
        assert rows(finished, **CHANGED)["left"].startswith("interrupted")
        finished.write_text(f"{left.folder}/{attempts.STARTED}", json.dumps({**left.started, "lock": another.token}))
        assert rows(finished, **CHANGED)["left"].startswith("running")


def test_a_rerun_of_a_finished_node_is_running_while_it_runs(finished: Store) -> None:
    with Lock(finished) as lock:
        carry_out(decided(finished, rerun=["left"]), broken=["left"], lock=lock.token)
        assert rows(finished)["left"].startswith("running")
    assert rows(finished)["left"].startswith("up to date")  # by its earlier attempt


def test_the_status_writes_nothing(finished: Store) -> None:
    before = finished.walk()
    rows(finished, **CHANGED)
    assert finished.walk() == before
