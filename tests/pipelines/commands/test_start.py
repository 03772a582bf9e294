"""A start of toy nodes from end to end: exit codes, what is printed, what lies in the run folder, whose it is.

python -m pytest tests/pipelines/commands/test_start.py
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from toy.diamond import SOURCES
from toy.nodes import Toy

from data_prep.files import UserError, open_store
from pipelines import cluster, pipeline, start, tracking
from pipelines.dag.node import Node
from pipelines.loading import load
from pipelines.start import check_run_folder

Command = Callable[..., tuple[int, str, str]]


@pytest.mark.slow
def test_exit_codes_of_a_start(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ray_session: None
) -> None:
    """Runs three toy nodes: a failed one ends with 1, its log and the way on; the second start resumes."""
    broken = tmp_path / "broken"
    broken.touch()
    nodes = [
        Node("first", "toy.nodes:write", config=Toy("1")),
        Node("second", "toy.nodes:fail_while", needs=("first",), config=Toy(broken=str(broken))),
        Node("third", "toy.nodes:write", needs=("second",)),
    ]
    monkeypatch.setattr(pipeline, "nodes", lambda config, **_: nodes)
    monkeypatch.setattr(pipeline, "SOURCES", SOURCES)
    monkeypatch.setattr(cluster, "connect", lambda **_: cluster.ClusterInfo({"CPU": 2.0}, {"CPU": 2.0}))
    monkeypatch.setattr(cluster, "disconnect", lambda: None)

    code, out, _ = command("full_multidim.py")
    assert code == 1
    assert "second failed: RuntimeError: broken on purpose" in out and "third was not started" in out
    log = next(line.split("its log: ")[1] for line in out.splitlines() if "its log: " in line)
    assert "broken on purpose" in Path(log).read_text()
    folder = tmp_path / "runs" / "debug"
    assert "name: debug" in (folder / "config.yaml").read_text()
    assert not (folder / "run.lock").exists()

    broken.unlink()
    code, out, _ = command("full_multidim.py")
    assert code == 0
    assert out.count("curves       http://127.0.0.1:5000/#/experiments/1/runs?") == 2, "at the start and at the end"
    assert "first   skip  up to date" in out and f"mlflow ui --backend-store-uri sqlite:///{folder}/mlflow.db" in out

    code, out, _ = command("full_multidim.py", "--only", "third", "--rerun", "third")
    assert code == 0 and "third executed: " in out and "first executed" not in out

    with monkeypatch.context() as patched:
        patched.setattr(cluster, "connect", lambda **_: pytest.fail("Ray was started, and nothing had to run"))
        code, out, _ = command("full_multidim.py")
    assert code == 0 and "third   skip  up to date" in out

    nodes[0] = Node("first", "toy.nodes:mistake")
    code, out, err = command("full_multidim.py", "seed=7")
    assert "seed: 0" in (folder / "config.yaml").read_text(), "a mistake is not what a run folder goes on with"
    assert code == 2 and err.endswith("\nerror: first: the folder is empty\n")
    assert "[first] FAILED" in out and "was not started" not in out


def test_no_part_of_a_login_is_left_in_a_name_that_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = []
    ledger = SimpleNamespace(start_pipeline=lambda tags, **_: names.append(tags[tracking.NAME]))
    monkeypatch.setattr(tracking, "Ledger", lambda *_, **__: ledger)
    for long in range(220, 250, 3):
        words = [f"data.dataset={'x' * (long - 19)}", "data.root=s3://AKIA:SECRET@bucket"]
        start._ledger(load("debug"), open_store(tmp_path), "", words, [])
    assert len(set(names)) == 10 and not any("AKI" in name or len(name) > 250 for name in names)


def test_a_run_folder_among_the_photos_of_a_bucket_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "_roots", lambda *_: (None, ""))
    monkeypatch.setattr(pipeline, "nodes", lambda *_, **__: [])
    store = open_store("s3://bucket/runs/debug?region=eu")
    for root, refused in (("s3://bucket?region=eu", True), ("s3://bucket/photos?region=eu", False), ("/bucket", False)):
        with pytest.raises(UserError, match="is below data.root") if refused else contextlib.nullcontext():
            start.nodes_of(load("debug", [f"data.root={root}"]), store)


@pytest.mark.parametrize("content", ["just text", "seed: 1", "name: [1, 2", "\x00"])
def test_a_folder_with_a_foreign_config_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.yaml").write_text(content)
    with pytest.raises(UserError, match="does not look like a run folder"):
        check_run_folder(open_store(tmp_path), name="demo")
