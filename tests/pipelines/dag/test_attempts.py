"""Attempt folders and what they list.  python -m pytest tests/pipelines/dag/test_attempts.py"""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime

import pytest

from data_prep.files import Store
from pipelines.dag.attempts import measure, new_attempt_id


def test_attempt_ids_sort_by_time_even_if_the_clock_goes_back(store: Store) -> None:
    now = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    first = new_attempt_id(store, "a", now=now)
    assert first.startswith("20260102T030405-") and len(first) == len("20260102T030405-abcdef")
    ids = [first]
    store.write_text("nodes/a/f/backup/a", "")  # somebody's folder is no attempt
    for moment in (now, now, datetime(2020, 1, 1, tzinfo=UTC)):
        store.write_text(f"nodes/a/f/{ids[-1]}/_STARTED.json", "{}")
        ids.append(new_attempt_id(store, "a", now=moment))
    assert ids == sorted(set(ids))


def test_measure_lists_every_file_below_an_output(store: Store) -> None:
    store.write_text("f/one.txt", "1")
    store.write_text("f/many/a", "22")
    store.write_text("f/many/deep/b", "333")
    store.write_text("f/unlisted", "4")
    outputs = measure(store.sub("f"), {"one": "one.txt", "many": "many"}, {"many/a": "known before"})
    assert outputs == {
        "many/a": {"bytes": 2, "sha256": "known before"},
        "many/deep/b": {"bytes": 3, "sha256": hashlib.sha256(b"333").hexdigest()},
        "one.txt": {"bytes": 1, "sha256": hashlib.sha256(b"1").hexdigest()},
    }


def test_the_engines_own_files_are_no_outputs(store: Store) -> None:
    for name in ("log.txt", "_STARTED.json", "value", "deep/log.txt"):
        store.write_text(f"f/{name}", "1")
    assert list(measure(store.sub("f"), {"all": "."}, {})) == ["deep/log.txt", "value"]


def test_a_promised_output_that_is_not_there_fails(store: Store) -> None:
    store.write_text("f/x", "1")
    with pytest.raises(ValueError, match="output 'model': there is no file at 'model.bin'"):
        measure(store.sub("f"), {"model": "model.bin"}, {})
