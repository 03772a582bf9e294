"""Plans: which nodes run, which are skipped, and the reason given.  python -m pytest tests/pipelines/dag/test_plan.py

Nodes run in this process, without Ray.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from toy.diamond import carry_out, decided, diamond, will_run
from toy.nodes import Toy

from data_prep.files import Store, UserError
from pipelines.dag import attempts
from pipelines.dag.plan import Plan


def ids(made: Plan) -> dict[str, str | None]:
    return {d.node.name: d.success and d.success.attempt for d in made.decisions}


def actions(made: Plan) -> dict[str, str]:
    return {d.node.name: d.action for d in made.decisions}


def test_on_an_empty_store_all_runs_and_nothing_is_written(store: Store) -> None:
    made = decided(store)
    assert actions(made) == dict.fromkeys(("prepare", "left", "right", "join"), "run")
    assert made["prepare"].reason == "no output yet"
    assert made["join"].reason == "because left and right run"
    assert made["left"].fingerprint is None
    assert store.list() == []


def test_up_to_date_nodes_are_skipped_with_attempt_and_age(finished: Store) -> None:
    made = decided(finished)
    assert set(actions(made).values()) == {"skip"} and will_run(made) == ()
    attempt = made["left"].success.attempt
    assert re.fullmatch(rf"up to date: attempt {attempt}, finished .* ago", made["left"].reason)
    assert carry_out(made) == []
    assert made.lines()[0].split()[:4] == ["prepare", "skip", "up", "to"]


def test_a_config_value_reruns_its_node_and_those_downstream(finished: Store) -> None:
    made = decided(finished, diamond(left={"config": Toy("new")}))
    assert will_run(made) == ("left", "join") and made["right"].action == "skip"
    assert made["left"].reason == "config changed: value left -> new"
    assert made["join"].reason == "only if the new output of left differs from what it has read"
    assert carry_out(made) == ["left", "join"]
    assert will_run(decided(finished, diamond(left={"config": Toy("new")}))) == ()
    assert will_run(decided(finished)) == ()  # both outputs are kept: going back runs nothing


def test_the_reason_is_what_differs_from_the_most_similar_output(finished: Store) -> None:
    """Not from the newest one: that may have been a trial of something else."""
    carry_out(decided(finished, diamond(left={"config": Toy("trial", place="x"), "function": "toy.nodes:stamp"})))
    assert decided(finished, diamond(left={"config": Toy("new")}))["left"].reason == "config changed: value left -> new"


def test_what_is_not_semantic_reruns_nothing(finished: Store) -> None:
    changes = {
        "config": Toy("left", place="elsewhere"),
        "cost": {"CPU": 2},
        "num_cpus": 0,
        "tags": {"a": "b"},
    }
    assert will_run(decided(finished, diamond(left=changes))) == ()


def test_a_rerun_that_makes_equal_files_leaves_those_downstream_as_they_are(finished: Store) -> None:
    before = ids(decided(finished))
    made = decided(finished, rerun=["prepare"])
    assert actions(made) == {"prepare": "run", "left": "wait", "right": "wait", "join": "wait"}
    assert made["left"].reason == "only if the new output of prepare differs from what it has read"
    assert made["join"].reason.startswith("only if the new output of left and right differs")
    assert carry_out(made) == ["prepare"]
    after = decided(finished)
    assert will_run(after) == ()
    assert [name for name in before if ids(after)[name] != before[name]] == ["prepare"]
    assert after["left"].reason.endswith(f"; attempt {ids(after)['prepare']} of prepare made equal files")
    assert "made equal files" not in after["join"].reason  # what it read is still there


def test_only_the_files_that_a_node_reads_decide(store: Store) -> None:
    nodes = diamond(prepare={"function": "toy.nodes:curve"}, left={"reads": {"prepare": ("value",)}})
    carry_out(decided(store, nodes))
    assert carry_out(decided(store, nodes, rerun=["prepare"])) == ["prepare", "right"]  # right reads the curve, too
    nothing = diamond(prepare={"function": "toy.nodes:curve"}, left={"reads": {"prepare": ("value", "no such file")}})
    carry_out(decided(store, nothing))
    assert "left" in carry_out(decided(store, nothing, rerun=["prepare"]))  # a wrong pattern hides no change


def test_from_makes_a_node_and_all_below_anew(finished: Store) -> None:
    before = ids(decided(finished))
    made = decided(finished, start_from=["left"])
    assert will_run(made) == ("left", "join") and made["left"].reason == "requested by --from left"
    assert carry_out(made) == ["left", "join"]
    after = ids(decided(finished))
    assert [name for name in before if after[name] != before[name]] == ["left", "join"]
    assert will_run(decided(finished, start_from=["prepare"])) == ("prepare", "left", "right", "join")


def test_only_takes_exactly_the_named_nodes(finished: Store) -> None:
    changed = diamond(left={"config": Toy("new")})
    assert actions(decided(finished, changed, only=["right"])) == {
        "prepare": "not selected",
        "left": "not selected",
        "right": "skip",
        "join": "not selected",
    }
    made = decided(finished, changed, only=["left"])
    assert will_run(made) == ("left",)
    assert carry_out(made) == ["left"]
    assert will_run(decided(finished, changed)) == ("join",)
    assert decided(finished, changed)["join"].reason == "new output of left"


def test_only_without_its_inputs_names_one_and_what_makes_it(finished: Store) -> None:
    changed = diamond(prepare={"config": Toy("new")})
    with pytest.raises(UserError) as refusal:
        decided(finished, changed, only=["join"])
    assert str(refusal.value) == (
        "join: its input left has no finished output for this configuration (its input prepare is not finished); "
        "full_multidim.py makes it"
    )


def test_unknown_names_are_refused_with_the_nearest(finished: Store) -> None:
    for option, key in (("only", "only"), ("rerun", "rerun"), ("keep", "keep"), ("from", "start_from")):
        with pytest.raises(UserError, match=rf"--{option} lefd: .* no such node; nearest: left"):
            decided(finished, **{key: ["lefd"]})
    with pytest.raises(UserError, match="--from left and --keep join exclude"):
        decided(finished, start_from=["left"], keep=["join"])
    with pytest.raises(UserError, match="--from left runs all nodes downstream"):
        decided(finished, start_from=["left"], only=["left"])
    with pytest.raises(UserError, match="--rerun left: --only leaves this node out"):
        decided(finished, only=["right"], rerun=["left"])
    with pytest.raises(UserError, match="exclude each other"):
        decided(finished, keep=["left"], rerun=["left"])


def test_keep_adopts_the_newest_output_and_records_it(finished: Store) -> None:
    changed = diamond(left={"config": Toy("new")})
    made = decided(finished, changed, keep=["left"])
    assert actions(made) == {"prepare": "skip", "left": "keep", "right": "skip", "join": "skip"}
    assert "in spite of: config changed: value left -> new" in made["left"].reason
    assert carry_out(made) == []
    again = decided(finished, changed)
    assert will_run(again) == () and "kept in spite of" in again["left"].reason
    record = again["left"].success
    assert record is not None and record.adopted is not None
    assert record.attempt == ids(decided(finished))["left"]
    assert Path(record.output(finished).uri, record.named["value"]).read_text() == "left(prepare())"


def test_keep_below_a_node_that_runs(finished: Store) -> None:
    changed = diamond(prepare={"config": Toy("new")})
    made = decided(finished, changed, keep=["left", "right"])
    assert actions(made) == {"prepare": "run", "left": "keep", "right": "keep", "join": "skip"}
    assert carry_out(made) == ["prepare"]
    assert will_run(decided(finished, changed)) == ()
    twice = decided(finished, diamond(prepare={"config": Toy("newer")}), keep=["left", "right"])
    assert carry_out(twice) == ["prepare"]  # an adopted output can be adopted again


def test_keep_without_any_output_is_refused(store: Store) -> None:
    with pytest.raises(UserError, match="--keep left: it has no finished output"):
        decided(store, keep=["left"])


def test_an_interrupted_attempt_is_continued(finished: Store) -> None:
    changed = diamond(left={"config": Toy("new")})
    carry_out(decided(finished, changed), broken=["left"])
    made = decided(finished, changed)
    unfinished = next(a for a in attempts.history(finished, "left") if a.success is None)
    assert made["left"].attempt == unfinished.attempt
    assert made["left"].reason == f"attempt {unfinished.attempt} was interrupted; continues it"
    for option in ("rerun", "start_from"):
        assert decided(finished, changed, **{option: ["left"]})["left"].attempt == unfinished.attempt
    finished.write_text(f"{unfinished.folder}/{attempts.ERROR}", "RuntimeError")
    assert decided(finished, changed, rerun=["left"])["left"].attempt is None  # what failed may fail again


def test_an_interrupted_rerun_of_a_finished_node_is_continued_by_the_same_command(finished: Store) -> None:
    carry_out(decided(finished, rerun=["left"]), broken=["left"])
    (unfinished,) = (a for a in attempts.history(finished, "left") if a.success is None)
    made = decided(finished, rerun=["left"])["left"]
    assert made.action == "run" and made.attempt == unfinished.attempt
    assert made.reason == f"requested by --rerun; attempt {unfinished.attempt} was interrupted; continues it"
    assert will_run(decided(finished)) == ()  # the output of before is up to date
    carry_out(decided(finished, rerun=["left"]))
    assert decided(finished, rerun=["left"])["left"].attempt is None  # once it has finished, another one


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: (folder / "value.txt").unlink(), "value.txt is missing"),
        (lambda folder: (folder / "value.txt").write_text("longer than it was"), "value.txt has 18 bytes instead of"),
        *(
            (lambda folder, text=text: (folder / "_SUCCESS.json").write_text(text), "_SUCCESS.json is not readable")
            for text in ("", "{", "[]", "{}", '{"node": "left", "other": 2}')
        ),
    ],
)
def test_a_damaged_output_is_made_anew_and_never_continued(finished: Store, damage: Any, words: str) -> None:
    folder = Path(decided(finished)["left"].success.output(finished).uri)
    damage(folder)
    made = decided(finished)
    assert will_run(made) == ("left", "join")
    assert words in made["left"].reason and made["left"].attempt is None


def test_an_older_intact_attempt_serves_when_the_newest_is_damaged(finished: Store) -> None:
    first = ids(decided(finished))["left"]
    carry_out(decided(finished, rerun=["left"]))
    second = decided(finished)["left"]
    Path(second.success.output(finished).uri, "value.txt").unlink()
    assert ids(decided(finished))["left"] == first != second.success.attempt


@pytest.mark.parametrize(
    ("finished_at", "words"),
    [
        ("2026-01-01T09:58:01+00:00", "2 h ago"),
        ("2026-01-01T11:59:30+00:00", "less than a minute ago"),
        ("2025-12-29T12:00:00+00:00", "3 d ago"),
        ("2026-01-01T11:55:00+00:00", "5 min ago"),
        ("yesterday", "at an unknown time"),
    ],
)
def test_ages(finished_at: str, words: str) -> None:
    assert attempts.age(finished_at, now=datetime(2026, 1, 1, 12, tzinfo=UTC)) == words
