"""What decides whether an output is still valid: a hash of its config, its code and the contents of what was read.

The ingredients are stored beside the output (in _SUCCESS.json), so that a later start can say in words what changed.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.dag.masking import mask_uris
from pipelines.dag.node import Node

SCHEMA = 3  # a higher number makes every node run again
# Reviewed edits that change no result: module -> hash of its code now, hash under which finished outputs know it. An
# entry goes when its module is edited in a way that does change results.
SAME_RESULTS: dict[str, tuple[str, str]] = {
    "data_prep.ingest": ("8389514f7a694333", "0167c7c4122c2a78"),
    "data_prep.parquet": ("b80274e58b11f09c", "435be5d4abadaa34"),
    "pipelines.nodes.evaluate": ("f64981df2c79bb91", "122b6cf6fe801dc5"),
    "pipelines.nodes.histogram": ("481e2eee00f9c525", "64803a3d91dda875"),
    "pipelines.nodes.train": ("224c564c596555a9", "8a81c3de44809aaf"),
    "pipelines.nodes.trained": ("51f00d3beac18b33", "d45150094715133a"),
    "spn.bitdepth": ("81b4a497dec3e73a", "6306faab69520e7f"),
    "spn.checkpoint": ("d4c1f0015807433e", "a458ba45294ab503"),
    "spn.config": ("6cdae60c3796f82d", "f4bb1f5d039fe460"),
    "spn.gpu.kernels": ("2cdf17b6f237bdd4", "58fd0935e9cfb1ef"),
    "spn.gpu.training": ("71af2c8feb4cb410", "373ef72168f40160"),
    "spn.layers": ("9d88e576f5f4d93e", "59001b8749e32e25"),
    "spn.model": ("c87710854712249d", "018ef26db86a07f6"),
    "spn.modern": ("e70eed331510494a", "2c4daf736331a568"),
    "spn.optimizers": ("670abf2c8f45310b", "2d995974c127f105"),
    "spn.training": ("c126421d0bbb47dc", "c2695a8cdee36f94"),
}
_MAX_CHANGES = 4  # named in an explanation; the rest is counted
_MAX_CHARS = 200  # of a value in it: one is a whole configuration


@dataclass(frozen=True)
class Sources:
    """The code that counts: packages below `root`, without the modules that are known not to decide any result."""

    root: Path
    packages: tuple[str, ...]
    not_semantic: frozenset[str] = frozenset()


def canonical(value: Any, *, where: str = "config") -> Any:
    """Plain JSON value of a config value: dataclasses and mappings as dicts, sequences as lists.

    Without dataclass fields that carry metadata={"semantic": False}, at any depth: resources, paths, logging.
    Without logins and tokens of URIs: the config is stored beside outputs, and new credentials change no result.
    Raises ValueError naming the place for values without a meaning outside this process (objects, functions).
    """
    if isinstance(value, str):
        return mask_uris(value)
    if value is None or isinstance(value, bool | int | float):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [f.name for f in dataclasses.fields(value) if f.metadata.get("semantic", True)]
        return {name: canonical(getattr(value, name), where=f"{where}.{name}") for name in fields}
    if isinstance(value, Mapping):
        return {str(key): canonical(value[key], where=f"{where}.{key}") for key in sorted(value, key=str)}
    if isinstance(value, list | tuple):
        return [canonical(item, where=f"{where}.{i}") for i, item in enumerate(value)]
    raise ValueError(f"{where} is a {type(value).__name__}; it must be a plain value, a dataclass, a mapping or a list")


def digest(value: Any) -> str:
    """Hex SHA-256 of a config value."""
    text = json.dumps(canonical(value), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def flatten(value: Any, *, prefix: str = "") -> dict[str, Any]:
    """Nested config value -> {"train.num_steps": 100, ...}; lists of plain values stay whole."""
    value = canonical(value, where=prefix or "config")
    if not isinstance(value, dict):
        return {prefix: value}
    flat: dict[str, Any] = {} if value or not prefix else {prefix: {}}
    for key, item in value.items():
        flat.update(flatten(item, prefix=f"{prefix}.{key}" if prefix else key))
    return flat


def code_hashes(modules: Iterable[str], sources: Sources) -> dict[str, str]:
    """Hash of the syntax tree of each module and of every project module that they import, at any depth.

    Imports inside functions count; imports for type checkers only do not. Comments, docstrings and layout do not
    matter. A module in `sources.not_semantic` is left out, and its imports are not followed.
    Raises ValueError for a relative import, and for one of `modules` in none of the packages or without a source file.
    """
    hashes: dict[str, str] = {}
    queue: list[str] = []
    for module in modules:
        if module.split(".")[0] not in sources.packages:
            raise ValueError(f"module {module} is in none of the packages {', '.join(sources.packages)}")
        if _source(module, root=sources.root) is None:
            raise ValueError(f"module {module} has no source file below {sources.root}")
        queue += _with_parents(module)
    skipped = set(sources.not_semantic)
    while queue:
        name = queue.pop()
        if name in hashes or name in skipped or name.split(".")[0] not in sources.packages:
            continue
        file = _source(name, root=sources.root)
        if file is None:
            skipped.add(name)
            continue
        hashes[name], imported = _parsed(file.read_text(encoding="utf-8"), name)
        queue += imported
    return dict(sorted(hashes.items()))


def changed(code: Mapping[str, str], root: Path) -> list[str]:
    """Modules of `code` whose source below `root` no longer has the hash that is given there."""
    files = {name: _source(name, root=root) for name in code}
    texts = {name: file.read_text(encoding="utf-8") for name, file in files.items() if file is not None}
    return [name for name, known in code.items() if name not in texts or _parsed(texts[name], name)[0] != known]


def hash_of(tree: ast.Module) -> str:
    """16 hex digits, the same whatever comments, docstrings and layout the module has."""
    return hashlib.sha256(_text(tree).encode()).hexdigest()[:16]


@functools.lru_cache(maxsize=1024)
def _parsed(text: str, module: str) -> tuple[str, tuple[str, ...]]:
    """(hash of the syntax tree, names that it may import) of a module's source text."""
    tree = ast.parse(text)
    imported = (name for each in _imports(tree, module) for name in _with_parents(each))
    now, before = SAME_RESULTS.get(module, ("", ""))
    known = hash_of(tree)
    return before if known == now else known, tuple(dict.fromkeys(imported))


def ingredients(node: Node, *, code: Mapping[str, str], upstream: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """All that a node's output depends on. upstream: {node: {"reads": patterns, "content": digest}}."""
    return {
        "schema": SCHEMA,
        "function": node.function,
        "config": canonical(node.config),
        "code": dict(sorted(code.items())),
        "upstream": canonical(upstream),
        "source": node.source,
    }


def fingerprint(parts: Mapping[str, Any]) -> str:
    """Short name of the ingredients: 16 hex digits."""
    return digest(parts)[:16]


def code_hash(parts: Mapping[str, Any]) -> str:
    """One hash over all modules of the ingredients."""
    return digest(parts["code"])[:16]


def distance(old: Mapping[str, Any], new: Mapping[str, Any]) -> int:
    """In how many settings, modules and contents two sets of ingredients differ."""
    return len(_differing(flatten(old), flatten(new)))


def explain(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """What changed between two sets of ingredients, in words."""
    reasons = []
    if old.get("schema") != new["schema"]:
        reasons.append("fingerprint rules changed")
    if old.get("function") != new["function"]:
        reasons.append(f"function changed: {old.get('function')} -> {new['function']}")
    before, after = flatten(old.get("config", {})), flatten(new["config"])
    changes = [_change(key, before, after) for key in _differing(before, after)]
    if changes:
        reasons.append(f"config changed: {_some(changes)}")
    modules = _differing(old.get("code", {}), new["code"])
    if modules:
        reasons.append(f"code changed: {_some(modules)}")
    before, after = old.get("upstream", {}), new["upstream"]
    if upstream := [node for node in _differing(before, after) if node in before and node in after]:
        reasons.append(f"new output of {_some(upstream)}")
    if more := sorted(after.keys() - before.keys()):
        reasons.append(f"now also reads {_some(more)}")
    if fewer := sorted(before.keys() - after.keys()):
        reasons.append(f"no longer reads {_some(fewer)}")
    if old.get("source", "") != new["source"]:
        reasons.append("external files changed")
    return "; ".join(reasons) or "nothing that can be named"


def _differing(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    missing = object()
    return sorted(key for key in {*old, *new} if old.get(key, missing) != new.get(key, missing))


def _change(key: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    if key in old and key in new:
        change = f"{old[key]} -> {new[key]}"
        return f"{key} {change}" if len(change) < _MAX_CHARS else key
    return f"{key} is gone" if key in old else f"{key} = {str(new[key])[:_MAX_CHARS]} is new"


def _some(names: list[str]) -> str:
    rest = len(names) - _MAX_CHANGES
    return ", ".join(names[:_MAX_CHANGES]) + (f" and {rest} more" if rest > 0 else "")


def _source(module: str, *, root: Path) -> Path | None:
    base = root.joinpath(*module.split("."))
    for file in (base / "__init__.py", base.with_name(base.name + ".py")):
        if file.is_file():
            return file
    return None


def _with_parents(module: str) -> list[str]:
    parts = module.split(".")  # importing a.b.c runs a/__init__.py and a/b/__init__.py too
    return [".".join(parts[:n]) for n in range(1, len(parts) + 1)]


def _imports(tree: ast.Module, module: str) -> Iterator[str]:
    """Absolute names that may be modules; `from a import b` gives a and a.b, of which a.b may be a plain name."""
    queue: list[ast.AST] = [tree]
    while queue:
        node = queue.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            queue.extend(node.orelse)
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise ValueError(f"{module}, line {node.lineno}: relative imports are not followed; name the package")
            yield from (str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names))
        queue.extend(ast.iter_child_nodes(node))


def _text(node: Any) -> str:
    """Syntax tree as text without bare strings and empty fields (Python versions differ in which empty ones exist)."""
    if isinstance(node, list):
        bare = [isinstance(n, ast.Expr) and isinstance(getattr(n.value, "value", None), str) for n in node]
        return "[" + ",".join(_text(item) for item, is_bare in zip(node, bare, strict=True) if not is_bare) + "]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = ((name, value) for name, value in ast.iter_fields(node) if value not in (None, []))
    return type(node).__name__ + "(" + ",".join(f"{name}={_text(value)}" for name, value in fields) + ")"
