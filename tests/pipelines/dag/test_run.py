"""Runs of tiny nodes as Ray tasks: success, failure, resuming, stopping.

python -m pytest tests/pipelines/dag/test_run.py
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from toy.diamond import decided
from toy.nodes import Toy
from toy.silent import SilentTracker

from data_prep.files import Store
from data_prep.lock import Lock
from pipelines import tracking
from pipelines.dag import attempts
from pipelines.dag import run as runner
from pipelines.dag.node import Node
from pipelines.dag.progress import Display, Reporter, Update
from pipelines.dag.run import NodeReport, Stopped, run, shortfalls
from pipelines.tracking import PARENT_TAG, Ledger, default_uri

TWO_CPUS = {"CPU": 2.0}

pytestmark = pytest.mark.usefixtures("ray_session")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short waits, and no actor that collects progress: each is a process."""
    monkeypatch.setattr(runner, "_POLL_SEC", 0.05)
    monkeypatch.setattr(runner, "Hub", lambda: SimpleNamespace(reporter=Reporter, poll=dict, close=lambda: None))


@pytest.fixture
def flag(tmp_path: Path) -> Path:
    """Nodes that look at it are broken while it exists."""
    path = tmp_path / "broken"
    path.touch()
    return path


def node(
    name: str, function: str = "write", needs: Sequence[str] = (), *, config: Toy | None = None, **fields: Any
) -> Node:
    return Node(name, f"toy.nodes:{function}", tuple(needs), config or Toy(name), **{"num_cpus": 0.5, **fields})


def go(
    store: Store,
    nodes: Sequence[Node],
    *,
    tracker: Any = None,
    capacity: dict[str, float] | None = TWO_CPUS,
    **options: Any,
) -> tuple[dict[str, NodeReport], list[str]]:
    """Plans and runs; returns the report and the lines that were shown."""
    stream = io.StringIO()
    made = decided(store, nodes, **options)
    report = run(made, tracker=tracker or SilentTracker(), display=Display(stream), capacity=capacity)
    return report, stream.getvalue().splitlines()


def states(report: dict[str, NodeReport]) -> dict[str, str]:
    return {name: entry.state for name, entry in report.items()}


def all_well(report: dict[str, NodeReport]) -> bool:
    return {"failed", "blocked"}.isdisjoint(states(report).values())


def attempt(report: dict[str, NodeReport], name: str) -> str:
    return Path(report[name].uri or "").name


def test_nodes_run_in_order_and_hand_over_paths(store: Store) -> None:
    nodes = [node("a"), node("b", needs=["a"], cost={"CPU": 1}), node("c", needs=["a", "b"])]
    report, lines = go(store, nodes)
    assert all_well(report) and set(states(report).values()) == {"executed"}
    assert Path(report["c"].uri or "", "value.txt").read_text() == "c(a(),b(a()))"
    assert report["c"].success.metrics == {"value": 2.0, "length": 2.0}
    assert "[a] starts: no output yet" in lines and "[b] starts: because a runs" in lines
    again, lines = go(store, nodes)
    assert set(states(again).values()) == {"skipped"}
    assert {n: attempt(again, n) for n in "abc"} == {n: attempt(report, n) for n in "abc"}


def test_an_attempt_keeps_its_log_and_lists_its_outputs_with_checksums(store: Store) -> None:
    report, _ = go(store, [node("a")])
    folder = Path(report["a"].uri or "")
    log = (folder / "log.txt").read_text()
    assert "a printed line of a" in log and "INFO toy: a logged line of a" in log
    success = attempts.Success.from_bytes((folder / "_SUCCESS.json").read_bytes())
    assert list(success.outputs) == ["value.txt"] and success.outputs["value.txt"]["bytes"] == 3
    assert success.outputs["value.txt"]["sha256"] == hashlib.sha256(b"a()").hexdigest()
    assert attempts.problems(store, success) == []
    assert success.ingredients["config"] == {"value": "a"}
    assert folder == Path(store.path(), "nodes", "a", success.fingerprint, success.attempt)


def test_independent_nodes_run_side_by_side(store: Store, tmp_path: Path) -> None:
    configs = {"a": Toy(place=str(tmp_path), other="b"), "b": Toy(place=str(tmp_path), other="a")}
    report, _ = go(store, [node(name, "meet", config=configs[name], cost={"CPU": 1}) for name in "ab"])
    assert all_well(report)  # each has seen the other running


def test_nodes_that_cost_all_run_one_after_another(store: Store) -> None:
    _, lines = go(store, [node(name, num_cpus=0, cost={"CPU": 1.5}) for name in "ab"])
    assert [line.split()[:2] for line in lines] == [
        ["[a]", "starts:"],
        ["[a]", "done"],
        ["[b]", "starts:"],
        ["[b]", "done"],
    ]


def test_the_last_progress_of_a_node_is_shown(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = SimpleNamespace(reporter=Reporter, poll=lambda: {"a": Update(1, 1, "values")}, close=lambda: None)
    monkeypatch.setattr(runner, "Hub", lambda: hub)
    _, lines = go(store, [node("a")])
    assert lines[1] == "[a] 1/1 values" and lines[2].startswith("[a] done in ")


def test_a_failure_stops_the_nodes_downstream_and_no_others(store: Store, flag: Path) -> None:
    broken = {"config": Toy("a", broken=str(flag))}
    nodes = [
        node("a", "fail_while", **broken),
        node("b"),
        node("below", needs=["a", "b"]),
        node("last", needs=["below"]),
        node("side", needs=["b"]),
    ]
    report, lines = go(store, nodes)
    assert not all_well(report)
    expected = {"a": "failed", "b": "executed", "below": "blocked", "last": "blocked", "side": "executed"}
    assert states(report) == expected
    assert report["a"].error == "RuntimeError: broken on purpose"
    text = Path(report["a"].uri or "", "error.txt").read_text()
    assert "Traceback" in text and "with a second line" in text
    assert "Traceback" in Path(report["a"].uri or "", "log.txt").read_text()
    assert any(line.startswith("[a] FAILED") for line in lines)
    assert any(line.startswith("[a] see ") and line.endswith("error.txt") for line in lines)
    assert "[below] not started: it needs a" in lines
    flag.unlink()
    report, lines = go(store, nodes)
    assert states(report) == {**expected, "a": "executed", "below": "executed", "last": "executed"} | {
        "b": "skipped",
        "side": "skipped",
    }
    assert any(line.startswith("[a] starts: attempt") and line.endswith("failed; continues it") for line in lines)


def test_a_process_that_had_a_gpu_ends_with_its_node(store: Store) -> None:
    report, _ = go(store, [node("a", "pid", num_gpus=1)], capacity=None)
    assert is_gone(int(report["a"].success.metrics["pid"]))


@pytest.mark.faults
def test_a_node_whose_process_dies_is_retried_so_often_and_then_fails(store: Store) -> None:
    report, lines = go(store, [node("a", "die", max_failures=1), node("b", needs=["a"]), node("c")])
    assert states(report) == {"a": "failed", "b": "blocked", "c": "executed"}
    assert "WorkerCrashed" in report["a"].error
    assert "WorkerCrashed" in Path(report["a"].uri or "", "error.txt").read_text()
    assert len(attempts.history(store, "a")) == 1
    assert "[a] starts: try 2 of 2" in lines


@pytest.mark.faults
def test_a_killed_node_resumes_in_its_attempt(store: Store) -> None:
    report, _ = go(store, [node("a", "die_once", max_failures=3)])
    assert all_well(report) and report["a"].success.metrics["restarts"] == 1
    assert len(attempts.history(store, "a")) == 1


def test_waits_grow_between_tries_after_storage_failed(store: Store, tmp_path: Path) -> None:
    config = Toy(place=str(tmp_path), times=2)
    report, lines = go(store, [node("a", "storage_fails", config=config, max_failures=2, retry_wait_sec=0.25)])
    assert all_well(report) and (tmp_path / "tries").read_text() == "xxx"
    waits = [line.rsplit(" in ", 1)[1] for line in lines if "lost" in line]
    assert waits == ["0.25 s", "0.5 s"]


def test_what_would_fail_again_is_not_tried_again(store: Store, tmp_path: Path) -> None:
    config = Toy(place=str(tmp_path), times=1, errno=errno.ENOSPC)
    report, _ = go(store, [node("a", "storage_fails", config=config, max_failures=3)])
    assert states(report) == {"a": "failed"} and len(attempts.history(store, "a")) == 1


def test_an_unfinished_attempt_resumes_in_place(store: Store, flag: Path) -> None:
    nodes = [node("a", "count", config=Toy(broken=str(flag)))]
    failed, _ = go(store, nodes)
    flag.unlink()
    report, lines = go(store, nodes)
    assert attempt(report, "a") == attempt(failed, "a")
    folder = Path(report["a"].uri or "")
    assert [(folder / f"step{i}.txt").read_text() for i in range(3)] == ["True", "True", "False"]
    assert not (folder / "error.txt").exists()
    assert (folder / "log.txt").read_text().count(" start") == 2
    assert any("continues it" in line for line in lines)
    again, _ = go(store, nodes, rerun=["a"])
    assert attempt(again, "a") != attempt(report, "a")
    assert Path(again["a"].uri or "", "step2.txt").read_text() == "True"


def test_rerun_only_and_keep_as_planned(store: Store) -> None:
    nodes = [node("a"), node("b", needs=["a"]), node("c", needs=["b"])]
    first, _ = go(store, nodes)
    rerun, lines = go(store, nodes, rerun=["b"])
    assert states(rerun) == {"a": "skipped", "b": "executed", "c": "skipped"}
    assert any(line.startswith("[c] skipped: up to date") and "made equal files" in line for line in lines)
    changed = [node("a", config=Toy("new")), *nodes[1:]]
    only, _ = go(store, changed, only=["a"])
    assert states(only) == {"a": "executed", "b": "not selected", "c": "not selected"}
    kept, _ = go(store, changed, keep=["b"])
    assert states(kept) == {"a": "skipped", "b": "skipped", "c": "skipped"}
    assert attempt(kept, "b") == attempt(rerun, "b") != attempt(first, "b")
    final, _ = go(store, changed)
    assert set(states(final).values()) == {"skipped"}


@pytest.mark.parametrize("function", ["write", "stamp"])
def test_a_node_that_may_stand_is_refused_only_when_it_has_to_run(store: Store, function: str) -> None:
    """write makes equal files again, and stamp does not."""
    nodes = [node("a", function), node("b", needs=["a"], cost={"CPU": 3}), node("c", needs=["a"])]
    go(store, nodes, capacity={"CPU": 4.0})
    assert shortfalls(decided(store, nodes, rerun=["a"]).decisions, TWO_CPUS) == []
    report, _ = go(store, nodes, rerun=["a"])
    if function == "write":
        assert states(report) == {"a": "executed", "b": "skipped", "c": "skipped"}
    else:
        assert states(report) == {"a": "executed", "b": "failed", "c": "executed"}
        assert report["b"].error.startswith("b needs 3 CPU, this session has 2 CPU; ")
        assert report["b"].is_user_error


def test_a_node_is_decided_once_however_long_it_waits_for_room(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    decide = runner.decide
    monkeypatch.setattr(runner, "decide", lambda node, *rest: (asked.append(node.name), decide(node, *rest))[1])
    report, _ = go(store, [node("a"), *(node(name, needs=["a"], cost={"CPU": 2}) for name in "bcd")])
    assert all_well(report) and sorted(asked) == ["b", "c", "d"]


def test_a_node_that_storage_does_not_let_start_fails_alone(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Store.write_bytes

    def full(self: Store, path: str, content: bytes) -> None:
        if "/nodes/b/" in self.path(path):
            raise OSError(errno.ENOSPC, "no space left on device")
        write(self, path, content)

    monkeypatch.setattr(Store, "write_bytes", full)
    tracker = SilentTracker()
    report, lines = go(store, [node("a"), node("b", needs=["a"]), node("c", needs=["a"])], tracker=tracker)
    assert states(report) == {"a": "executed", "b": "failed", "c": "executed"}
    assert report["b"].error == "OSError: [Errno 28] no space left on device"
    assert tracker.ended["b"] == ["FAILED"]


def test_on_a_cluster_every_ready_node_is_submitted(store: Store, tmp_path: Path) -> None:
    """Ray's queue decides: nodes whose cost together is more than there is are not held back here."""
    configs = {"a": Toy(place=str(tmp_path), other="b"), "b": Toy(place=str(tmp_path), other="a")}
    nodes = [node(name, "meet", config=configs[name], cost={"CPU": 2}) for name in "ab"]
    report, _ = go(store, nodes, capacity=None)
    assert all_well(report), report


def watch(place: Path, then: Any) -> threading.Thread:
    """Calls `then` when the waiting node runs."""

    def look() -> None:
        deadline = time.monotonic() + 60
        while not (place / "pid").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        then()

    thread = threading.Thread(target=look)
    thread.start()
    return thread


def is_gone(pid: int) -> bool:
    deadline = time.monotonic() + 60
    while psutil.pid_exists(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not psutil.pid_exists(pid)


@pytest.mark.faults
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_the_tasks_and_closes_their_runs(store: Store, tmp_path: Path, how: signal.Signals) -> None:
    before = signal.getsignal(signal.SIGTERM)
    nodes = [node("a", "wait_for_ever", config=Toy(place=str(tmp_path)), num_gpus=1), node("b", needs=["a"])]
    tracker = SilentTracker()
    thread = watch(tmp_path, lambda: os.kill(os.getpid(), how))
    with pytest.raises(KeyboardInterrupt):
        go(store, nodes, tracker=tracker, capacity=None)
    thread.join()
    assert is_gone(int((tmp_path / "pid").read_text()))
    assert signal.getsignal(signal.SIGTERM) == before
    assert tracker.ended == {"a": ["KILLED"]}
    (attempt,) = attempts.history(store, "a")
    assert attempt.success is None


def test_a_start_that_lost_its_lock_stops(store: Store, tmp_path: Path) -> None:
    nodes = [node("a", "wait_for_ever", config=Toy(place=str(tmp_path)))]
    with Lock(store) as lock:
        thread = watch(tmp_path, lambda: setattr(lock, "lost", True))
        made = decided(store, nodes)
        display = Display(io.StringIO())
        with pytest.raises(Stopped, match="another start took over"):
            run(made, tracker=SilentTracker(), display=display, capacity=TWO_CPUS, lock=lock)
        thread.join()
        (attempt,) = attempts.history(store, "a")
        assert attempt.started["lock"] == lock.token, "by it --status knows whose work this is"


@pytest.mark.slow
def test_mlflow_has_one_run_for_each_node_and_one_curve_over_two_starts(store: Store, flag: Path) -> None:
    nodes = [node("a", tags={"stage": "first"}), node("b", "count", ["a"], config=Toy(broken=str(flag)))]
    uri = default_uri(store, name="toy")

    def started() -> Ledger:
        ledger = Ledger(uri, experiment="toy", run_folder=store.uri)
        ledger.start_pipeline(tags={}, params={}, config="")
        return ledger

    client_runs: dict[str, list[Any]] = {}
    first = started()
    failed, _ = go(store, nodes, tracker=first)
    flag.unlink()
    second = started()
    done, _ = go(store, nodes, tracker=second)
    client = tracking.make_client(uri)
    for found in client.search_runs([second.experiment_id]):
        client_runs.setdefault(found.data.tags["node"], []).append(found)
    (curve,) = client_runs["b"]
    assert states(failed)["b"] == "failed" and curve.info.run_id == done["b"].success.mlflow_run_id
    assert curve.info.status == "FINISHED" and curve.data.tags[PARENT_TAG] == second.parent.run_id
    assert [m.step for m in client.get_metric_history(curve.info.run_id, "curve")] == [0, 1, 2]
    assert curve.data.tags["restarts"] == "1"
    reused, made = sorted(client_runs["a"], key=lambda r: "reused_run" not in r.data.tags)
    assert reused.data.tags["reused_run"] == made.info.run_id == done["a"].success.mlflow_run_id
    tags = made.data.tags
    assert tags["stage"] == "first" and tags["attempt"] == attempt(done, "a") and len(tags["fingerprint"]) == 16
    assert tags["code_hash"] and tags["git_commit"] and made.data.params == {"value": "a"}
    assert made.data.metrics == {"value": 1.0, "length": 0.0}  # the curve's own point stays
