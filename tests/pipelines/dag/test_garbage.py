"""--gc: what may be deleted and what stays.  python -m pytest tests/pipelines/dag/test_garbage.py"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from toy.diamond import SOURCES, carry_out, decided, diamond, will_run
from toy.nodes import Toy

from data_prep.files import Store, UserError, open_store
from data_prep.lock import Lock
from pipelines import inspection, loading, pipeline, tracking
from pipelines.dag import status
from pipelines.dag.node import Node
from pipelines.nodes import registry

NEW = {"left": {"config": Toy("new")}}


def found(store: Store, **changes: dict[str, Any]) -> list[str]:
    return [each.node for each in status.find_garbage(decided(store, diamond(**changes)))]


def test_nothing_of_a_fresh_run_may_go(finished: Store) -> None:
    assert found(finished) == []
    assert found(finished, **NEW) == []  # outdated outputs, each the newest of its node: --keep may adopt them
    for file in [file.path for file in finished.walk("nodes/join") if file.path.endswith("value.txt")]:
        finished.delete(file)
    assert found(finished) == []  # damaged, but the newest
    for attempts in finished.list("nodes/join"):
        finished.delete(attempts.path)
    assert found(finished) == []  # a node without any attempt, as after deleting its only one


def test_what_was_replaced_may_go_and_the_rest_stays_up_to_date(finished: Store) -> None:
    carry_out(decided(finished, start_from=["left"]))
    old = status.find_garbage(decided(finished))
    assert [each.node for each in old] == ["join", "left"]
    going = {file.path for each in old for file in finished.walk(each.folder)}
    before = {file.path for file in finished.walk()}
    status.delete(finished, old)
    assert before - {file.path for file in finished.walk()} == going != set()
    assert will_run(decided(finished)) == () and found(finished) == []
    assert all(entry.path.count("/") == 4 for entry in finished.walk("nodes"))  # node/fingerprint/attempt/file


def test_an_attempt_may_go_once_another_one_made_equal_files(finished: Store) -> None:
    """Although what is downstream was made from the older one."""
    first = decided(finished)["prepare"].success
    carry_out(decided(finished, rerun=["prepare"]))
    assert [each.attempt for each in status.find_garbage(decided(finished))] == [first.attempt]


def test_outputs_of_own_images_stay_with_what_made_them(finished: Store) -> None:
    """Their nodes are in no plan of --gc, which has no images."""

    def own(value: str) -> list[Node]:
        return [*diamond(**NEW), Node("sample_images", "toy.nodes:write", ("left",), Toy(value))]

    for value in ("first", "second"):
        carry_out(decided(finished, own(value)))
    carry_out(decided(finished, diamond(left={"config": Toy("newer")})))
    assert found(finished) == ["join"], "left of NEW stays: sample_images was made from it"


def test_outputs_of_other_configurations_stay_with_their_reports(finished: Store) -> None:
    """Here `join` holds the whole configuration, as a report does."""

    def chain(value: str) -> list[Node]:
        return diamond(left={"config": Toy(value)}, join={"config": Toy(value)})

    for value in ("new", "newer"):
        carry_out(decided(finished, chain(value)))
    assert found(finished) == []
    for value in ("new", "newer"):
        status.delete(finished, status.find_garbage(decided(finished)))
        assert will_run(decided(finished, chain(value))) == ()
    carry_out(decided(finished, diamond(left={"config": Toy("newest")}, join={"config": Toy("newer")})))
    assert found(finished) == ["join"], "of one configuration the newest stays"


def test_attempts_that_others_refer_to_stay(finished: Store) -> None:
    old = decided(finished)["left"].success.attempt
    carry_out(decided(finished, start_from=["left"]))
    garbage = status.find_garbage(decided(finished), named={old})
    assert [each.node for each in garbage] == ["join"]


def test_an_interrupted_attempt_that_would_go_on_stays(finished: Store) -> None:
    changed = diamond(left={"config": Toy("new")})
    carry_out(decided(finished, changed), broken=["left"])
    carry_out(decided(finished, diamond(left={"config": Toy("newer")})))

    def unfinished(nodes: list[Node]) -> list[tuple[str, str]]:
        found = status.find_garbage(decided(finished, nodes))
        return [(each.node, each.state) for each in found if each.success is None]

    assert unfinished(changed) == []
    assert unfinished(diamond()) == [("left", "interrupted")]  # another configuration has no use for it


def test_what_a_kept_output_was_made_from_stays(finished: Store) -> None:
    stamped = {"left": {"function": "toy.nodes:stamp"}}
    carry_out(decided(finished, diamond(**stamped)))
    first = decided(finished, diamond(**stamped))["left"].success.attempt
    carry_out(decided(finished, diamond(**stamped), rerun=["left"], only=["left"]))
    changed = diamond(**stamped, join={"config": Toy("new")})
    carry_out(decided(finished, changed, keep=["join"], only=["join"]))
    assert first not in [each.attempt for each in status.find_garbage(decided(finished, changed))]


def test_an_adopted_output_keeps_its_files(finished: Store) -> None:
    carry_out(decided(finished, diamond(**NEW), keep=["left"]))
    status.delete(finished, status.find_garbage(decided(finished, diamond(**NEW))))
    made = decided(finished, diamond(**NEW))
    assert will_run(made) == ()
    assert Path(made["left"].success.output(finished).uri, "value.txt").exists()


@pytest.fixture
def toy_pipeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """Inspection sees the diamond in place of the pipeline's nodes."""
    monkeypatch.setattr(pipeline, "nodes", lambda config, **_: diamond())
    monkeypatch.setattr(pipeline, "SOURCES", SOURCES)
    store = open_store(tmp_path / "runs" / "debug")
    store.write_text("config.yaml", "name: debug\n")
    carry_out(decided(store))
    carry_out(decided(store, start_from=["left"]))
    return store


def test_the_list_is_dry_and_yes_deletes(
    toy_pipeline: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = loading.load("debug", [f"storage={tmp_path / 'runs'}"])
    before = toy_pipeline.walk()
    monkeypatch.setattr(registry, "attempts_with_alias", lambda *_, **__: set())
    assert inspection.collect_garbage(chosen, delete=False) == 0
    listed = capsys.readouterr().out.splitlines()
    assert toy_pipeline.walk() == before and len(listed) == 4
    size = int(listed[-1].split(", ")[1].split()[0].replace(",", ""))
    assert listed[-1] == f"to be deleted by --gc --yes: 2 attempts, {size:,} bytes"
    assert inspection.collect_garbage(chosen, delete=True) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"deleted: 2 attempts, {size:,} bytes"
    freed = sum(file.bytes for file in before) - sum(file.bytes for file in toy_pipeline.walk())
    assert freed == size
    assert not toy_pipeline.exists("run.lock")


def test_nothing_is_deleted_while_a_start_is_running(toy_pipeline: Store, tmp_path: Path) -> None:
    before = len(toy_pipeline.walk("nodes"))
    with Lock(toy_pipeline):
        with pytest.raises(UserError, match="in use by process"):
            inspection.collect_garbage(loading.load("debug", [f"storage={tmp_path / 'runs'}"]), delete=True)
    assert len(toy_pipeline.walk("nodes")) == before


def test_nothing_is_deleted_while_mlflow_does_not_say_what_has_an_alias(
    toy_pipeline: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = len(toy_pipeline.walk("nodes"))
    chosen = loading.load("debug", [f"storage={tmp_path / 'runs'}"])
    with pytest.raises(UserError, match="does not say which model versions have an alias .the file does not exist"):
        inspection.collect_garbage(chosen, delete=True)
    toy_pipeline.write_text("config.yaml", "name: debug\ntracking: {uri: http://host:5000}\n")
    with pytest.raises(UserError, match="the last launch had tracking.uri=http://host:5000, this command has None"):
        inspection.collect_garbage(chosen, delete=True)
    toy_pipeline.write_text("config.yaml", "name: debug\n")
    toy_pipeline.write_text("mlflow.db", "damaged" * 100)
    monkeypatch.setattr(tracking, "make_client", lambda uri: pytest.fail("MLflow would try again for minutes"))
    with pytest.raises(UserError, match="does not say which model versions have an alias .file is not a database"):
        inspection.collect_garbage(chosen, delete=True)
    assert len(toy_pipeline.walk("nodes")) == before
