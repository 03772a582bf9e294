"""Fingerprints: what counts as a change, and how it is said.

python -m pytest tests/pipelines/dag/test_fingerprint.py
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pipelines.dag.fingerprint import (
    Sources,
    canonical,
    code_hashes,
    digest,
    explain,
    fingerprint,
    flatten,
    ingredients,
)
from pipelines.dag.node import Node


@dataclass(frozen=True)
class Inner:
    steps: int = 1
    sizes: tuple[int, ...] = (1, 2)


@dataclass(frozen=True)
class Outer:
    inner: Inner = field(default_factory=Inner)
    rates: dict[str, float] = field(default_factory=lambda: {"b": 2.0, "a": 1e-4})


READ = {"reads": ["*"], "content": "1"}


def parts(**changes: Any) -> dict[str, Any]:
    code, upstream = changes.pop("code", {"toy": "1"}), changes.pop("upstream", {})
    return ingredients(Node("a", **{"function": "toy.nodes:write", **changes}), code=code, upstream=upstream)


def test_dataclasses_mappings_and_sequences_become_plain() -> None:
    plain = {"x": {"inner": {"steps": 1, "sizes": [1, 2]}, "rates": {"a": 1e-4, "b": 2.0}}}
    assert canonical({"x": Outer()}) == plain


@dataclass(frozen=True)
class Placed:
    root: str = field(default="/a", metadata={"semantic": False})
    seed: int = 0


@dataclass(frozen=True)
class Holder:
    placed: Placed
    log_every_steps: int = field(default=1, metadata={"semantic": False})


def test_fields_that_decide_nothing_are_left_out_at_every_depth() -> None:
    assert canonical([{"x": Holder(Placed("/b", seed=1), 2)}]) == [{"x": {"placed": {"seed": 1}}}]
    assert digest(Holder(Placed())) == digest(Holder(Placed("/b"), 9)) != digest(Holder(Placed(seed=1)))


def test_order_of_keys_does_not_matter_and_values_do() -> None:
    assert digest({"a": 1, "b": [1, 2]}) == digest({"b": (1, 2), "a": 1})
    assert len({digest({"a": v}) for v in (1, 2, "1", None, True, [1], {"b": 1}, 1.5)}) == 8


def test_a_value_without_meaning_is_named() -> None:
    with pytest.raises(ValueError, match=r"config\.a\.1 is a object"):
        canonical({"a": [1, object()]})


def test_flatten_gives_dotted_names() -> None:
    assert flatten({"x": Outer().inner, "empty": {}}) == {"x.steps": 1, "x.sizes": [1, 2], "empty": {}}


def package(root: Path, *, folders: dict[str, str] | None = None, **files: str) -> Path:
    """Writes toy/<name>.py; folders: {path below toy: text}."""
    for name, text in {"__init__": "", **files, **(folders or {})}.items():
        file = root / "toy" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


def hashes(root: Path, module: str = "toy.main", *, not_semantic: tuple[str, ...] = ()) -> dict[str, str]:
    return code_hashes([module], Sources(root, ("toy",), frozenset(not_semantic)))


def test_all_ways_to_import_are_followed(tmp_path: Path) -> None:
    package(
        tmp_path,
        main="""
import toy.plain
import os, numpy
from toy.named import value
from toy.sub import inside
def late():
    from toy import in_function
""",
        plain="",
        named="from toy.chained import x",
        chained="from toy import main",
        in_function="",
        unused="",
        folders={"sub/__init__": "from toy.above import y", "sub/inside": ""},
        above="y = 1",
    )
    names = "above chained in_function main named plain sub sub.inside".split()
    assert list(hashes(tmp_path)) == ["toy", *(f"toy.{name}" for name in names)]


def test_a_relative_import_is_refused(tmp_path: Path) -> None:
    package(tmp_path, main="import toy.sub", folders={"sub/__init__": "x = 1\nfrom . import inside", "sub/inside": ""})
    with pytest.raises(ValueError, match="toy.sub, line 2: relative imports"):
        hashes(tmp_path)


def test_imports_for_type_checkers_do_not_count(tmp_path: Path) -> None:
    text = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import toy.a\nelse:\n    import toy.b\n"
    assert list(hashes(package(tmp_path, main=text, a="", b=""))) == ["toy", "toy.b", "toy.main"]


CODE = '''"""Doc."""
def f(x):
    """Doc of f."""
    return x + 1  # why
'''


@pytest.mark.parametrize(
    "same",
    [
        "def f(x):\n    return x + 1\n",
        "# comment\n\n\ndef f(x):\n    '''Other\n    words.'''\n\n    return (\n        x + 1\n    )\n",
    ],
)
def test_comments_docstrings_and_layout_do_not_matter(tmp_path: Path, same: str) -> None:
    before = hashes(package(tmp_path, main=CODE))
    assert hashes(package(tmp_path, main=same)) == before


@pytest.mark.parametrize("other", [CODE.replace("1 ", "2 "), CODE.replace("(x)", "(x=0)"), CODE + "g = 'text'\n"])
def test_meaning_matters(tmp_path: Path, other: str) -> None:
    before = hashes(package(tmp_path, main=CODE))
    after = hashes(package(tmp_path, main=other))
    assert after["toy.main"] != before["toy.main"] and after["toy"] == before["toy"]


def test_a_module_outside_the_packages_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="os is in none of"):
        hashes(tmp_path, "os")
    with pytest.raises(ValueError, match="has no source file"):
        hashes(package(tmp_path), "toy.missing")


def test_a_module_that_decides_nothing_counts_neither_itself_nor_through_its_imports(tmp_path: Path) -> None:
    package(tmp_path, main="import toy.log, toy.deep", log="import toy.text, toy.deep", text="", deep="")
    assert list(hashes(tmp_path)) == ["toy", "toy.deep", "toy.log", "toy.main", "toy.text"]
    assert list(hashes(tmp_path, not_semantic=("toy.log",))) == ["toy", "toy.deep", "toy.main"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ""),
        ({"config": {"train": {"num_steps": 200}}}, "config changed: train.num_steps 100 -> 200"),
        ({"config": {"train": {"num_steps": "long " * 99}}}, "config changed: train.num_steps"),  # not its value
        ({"config": {}}, "config changed: train.num_steps is gone"),
        ({"code": {"toy": "1", "toy.model": "2"}}, "code changed: toy.model"),
        ({"upstream": {"prepare": READ | {"content": "2"}}}, "new output of prepare"),
        ({"upstream": {"prepare": READ, "other": READ}}, "now also reads other"),
        ({"upstream": {"other": READ}}, "now also reads other; no longer reads prepare"),
        ({"source": "other"}, "external files changed"),
        ({"function": "toy.nodes:other"}, "function changed: toy.nodes:write -> toy.nodes:other"),
        ({"source": "other", "code": {}}, "code changed: toy; external files changed"),
        ({"code": {"toy": "1", **{f"toy.m{i}": "1" for i in range(6)}}}, "toy.m0, toy.m1, toy.m2, toy.m3 and 2 more"),
    ],
)
def test_changes_are_said_in_words_and_change_the_fingerprint(changes: dict[str, Any], words: str) -> None:
    base = {"config": {"train": {"num_steps": 100}}, "upstream": {"prepare": READ}}
    old, new = parts(**base), parts(**{**base, **changes})
    assert explain(old, new).endswith(words)
    assert (fingerprint(old) == fingerprint(new)) == (not changes) == (explain(old, new) == "nothing that can be named")
