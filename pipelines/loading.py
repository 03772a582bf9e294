"""Load and print configurations: defaults < file (all stages < a kind of stage < one stage) < command line (likewise).

Each layer is merged into typed dataclasses by OmegaConf, which only this file imports. The sections per stage and per
node are resolved here, once. On the command line text is taken as it is written: 1.10, no, a #1; YAML needs quotes.
A mistake is one line: what, where it was set, and the nearest valid name.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import os
import re
import typing
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from data_prep.config import DataConfig
from data_prep.files import UserError
from pipelines.cluster import ROOT, in_ray_job
from pipelines.config import (
    ExperimentConfig,
    NodeResources,
    StageConfig,
    broken_rules,
    concrete_stages,
    node_names,
    settable_resources,
    stage_kind,
)
from pipelines.dag.fingerprint import canonical
from pipelines.dag.plan import nearest

PRESETS = ROOT / "pipelines" / "configs"


class _Mistake(Exception):
    """What is wrong; `load` finds out where it was set."""


def preset_names() -> list[str]:
    return sorted(path.stem for path in PRESETS.glob("*.yaml"))


def load(name_or_path: str, overrides: Sequence[str] = ()) -> ExperimentConfig:
    """A preset's name or a YAML file, then `key.sub=value` strings. Raises UserError: what, where, nearest name."""
    path = _find(name_or_path)
    shown = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)
    file = _read(path, shown)
    layers = [_parse(override) for override in overrides]
    try:
        return _build(file, layers)
    except _Mistake as mistake:
        at_fault = _at_fault(str(mistake), file, layers, overrides)
        where = f"on the command line: {at_fault}" if at_fault else f"in {shown}"
        raise UserError(f"{mistake} ({where})") from None


def key_of(override: str) -> str:
    return override.partition("=")[0]


def resolve_storage(config: ExperimentConfig) -> str:
    """Absolute folder or URI of all run folders.

    Inside a Ray job the working directory may be a copy that is thrown away: the default is then $SPN_STORAGE, or
    ~/spn_runs on the head node, and a relative path raises ValueError.
    """
    key, storage = "storage", config.storage
    if storage is None and in_ray_job():
        key, storage = "$SPN_STORAGE", os.environ.get("SPN_STORAGE") or "~/spn_runs"
    if storage is None:
        return str(ROOT / "runs")
    if "://" in storage:
        if not storage.partition("://")[2].strip("/"):
            raise ValueError(f"{key} is {storage!r}; it names no bucket or folder")
        return storage.rstrip("/")
    path = Path(storage).expanduser()
    if not path.is_absolute() and in_ray_job():
        raise ValueError(
            f"{key} is {storage!r}; inside a Ray job it must be an absolute path or a URI such as s3://..."
        )
    return str(path.absolute())


def to_yaml(config: ExperimentConfig, *, semantic_only: bool = False) -> str:
    """Every value in use; `load` reads it back to an equal config. semantic_only: what decides results."""
    values = canonical(config) if semantic_only else dataclasses.asdict(config)
    common = {"model": values["model"], "train": values["train"]}
    values["per_stage"] = _differing(values["per_stage"], dict.fromkeys(values["per_stage"], common))
    if not semantic_only:
        resources = values["resources"]
        per_node = {node: _node_base(resources, node) for node in resources["per_node"]}
        resources["per_node"] = _differing(resources["per_node"], per_node)
    return OmegaConf.to_yaml(OmegaConf.create(values))


# ---- layers -----------------------------------------------------------------------------------------------------


def _find(name_or_path: str) -> Path:
    if name_or_path.endswith((".yaml", ".yml")) or os.sep in name_or_path:
        path = Path(name_or_path).expanduser().absolute()
        if not path.is_file():
            near = [os.path.join(os.path.dirname(name_or_path), each.name) for each in path.parent.glob("*.y*ml")]
            hint = nearest(name_or_path, [*near, *preset_names()])
            if (path / "config.yaml").is_file():  # a run folder's
                hint = f"nearest: {os.path.join(name_or_path, 'config.yaml')}"
            what = "is a folder" if path.is_dir() else "does not exist"
            raise UserError(f"config file {name_or_path} {what}; {hint}")
        return path
    if name_or_path not in preset_names():
        raise UserError(f"unknown config {name_or_path!r}; {nearest(name_or_path, preset_names())}")
    return PRESETS / f"{name_or_path}.yaml"


def _read(path: Path, shown: str) -> DictConfig:
    try:
        read = OmegaConf.load(path)  # not PyYAML: there 3e-4 is a string
    except (yaml.YAMLError, OmegaConfBaseException, UnicodeDecodeError, OSError) as error:
        raise UserError(f"cannot read {shown}: {_one_line(error)}") from None
    if not isinstance(read, DictConfig):
        raise UserError(f"cannot read {shown}: it must be a mapping of keys to values")
    read = typing.cast(DictConfig, OmegaConf.merge({"name": path.stem}, read))
    if path.name == "config.yaml" and (path.parent / "nodes").is_dir():  # a run folder's, which may have moved
        if path.parent.name != read.name:
            raise UserError(f"{path.parent} is a run folder of config {read.name!r}: its last part must be that name")
        read.storage = str(path.parent.parent)
        for section in (read, *read.get("per_stage", {}).values()):  # a setting of earlier versions, which wrote all
            section.get("train", {}).pop("compile_mode", None)
    return read


def _parse(override: str) -> DictConfig:
    key, equals, text = override.partition("=")
    if not equals or not re.fullmatch(r"\w+(\.\w+)*", key):
        hint = f"; a config is chosen by --config {override}" if override in preset_names() else ""
        raise UserError(f"cannot read {override!r} on the command line: it must be key.sub=value{hint}")
    try:
        override.encode()  # bytes of the command line that are no UTF-8 fail here
        if _kind(key) in (int, int | None) and re.fullmatch(r"[-+]?0[\d_]+|.*:.*", text):
            what = "YAML would read another number; write it without leading zeros and colons"
            raise UserError(f"cannot read the value of {override!r} on the command line: {what}")
        if _kind(key) not in _TEXT:
            return OmegaConf.from_dotlist([override])
        layer = OmegaConf.create()
        OmegaConf.update(layer, key, None if text == "null" else text)
        return layer
    except (yaml.YAMLError, OmegaConfBaseException, UnicodeEncodeError) as error:
        raise UserError(f"cannot read the value of {override!r} on the command line: {_one_line(error)}") from None


def _at_fault(message: str, file: DictConfig, layers: Sequence[DictConfig], overrides: Sequence[str]) -> str | None:
    """The last override without which there would be no mistake, or another one; None: it is in the file."""
    for override in reversed(overrides):
        kept = [layer for layer, other in zip(layers, overrides, strict=True) if key_of(other) != key_of(override)]
        try:
            _build(file, kept)
        except _Mistake as mistake:
            if str(mistake) == message:
                continue
        return override
    return None


# ---- from layers to a config ------------------------------------------------------------------------------------


def _build(file: DictConfig, layers: Sequence[DictConfig]) -> ExperimentConfig:
    """Raises _Mistake."""
    try:
        given = typing.cast(DictConfig, OmegaConf.merge({}, *layers))
        merged = OmegaConf.merge({}, file, *layers)
        raw: dict[Any, Any] = OmegaConf.to_container(merged, resolve=True)  # type: ignore[assignment]  # a mapping
    except (OmegaConfBaseException, TypeError) as error:
        raise _Mistake(_one_line(error)) from None
    _check(raw, ExperimentConfig)
    typed = _typed(raw)
    missing = OmegaConf.missing_keys(typed)
    for key in sorted(missing - {"data.resolutions"}):
        raise _Mistake(f"{key} is not set")
    values: dict[str, Any] = OmegaConf.to_container(typed)  # type: ignore[assignment]  # a mapping
    if missing:
        values["data"]["resolutions"] = [values["data"]["image_size"]]
    per_node = raw.get("resources", {}).get("per_node", {})
    stages = concrete_stages(values["stages"], values["bits"])
    plain = typing.cast(dict[str, Any], OmegaConf.to_container(file))  # an interpolation may wait for an override
    before = concrete_stages(plain.get("stages", []), plain.get("bits", []))
    for section in ("per_stage", "sample.temperature", "sample.top_p"):
        valid = list(dict.fromkeys([*stages, *map(stage_kind, stages)]))
        _check_names(section, "stage", raw, given, valid, [*before, *map(stage_kind, before)])
    _check_names("resources.per_node", "node", raw, given, node_names(stages), node_names(before))
    for node, changes in per_node.items():
        settable = settable_resources(node)
        for key in (key for key in changes if key not in settable):
            raise _Mistake(f"resources.per_node.{node}.{key} has no effect; valid: {', '.join(settable)}")
    temperature, top_p = values["sample"]["temperature"], values["sample"]["top_p"]
    values["sample"]["temperature"] = {s: temperature.get(s, temperature.get(stage_kind(s), 1.0)) for s in stages}
    values["sample"]["top_p"] = {s: top_p.get(s, top_p.get(stage_kind(s))) for s in stages}
    typed_stages, typed_nodes = values["per_stage"], values["resources"]["per_node"]
    values["per_stage"], values["resources"]["per_node"] = {}, {}
    config = _construct(ExperimentConfig, values)
    for stage in stages:
        resolved = {"model": values["model"], "train": values["train"]}
        for layer in map(OmegaConf.to_container, (file, given)):  # what is typed comes after all that the file says
            assert isinstance(layer, dict)
            resolved = _overlaid(resolved, {key: layer[key] for key in resolved if key in layer}, values)
            for name in dict.fromkeys((stage_kind(stage), stage)):
                resolved = _overlaid(resolved, (layer.get("per_stage") or {}).get(name, {}), typed_stages.get(name, {}))
        config.per_stage[stage] = _construct(StageConfig, resolved, f"per_stage.{stage}")
    for node in node_names(stages):
        resolved = _node_base(values["resources"], node)
        if node in per_node:
            resolved = _overlaid(resolved, per_node[node], typed_nodes[node])
        config.resources.per_node[node] = _construct(NodeResources, resolved, f"resources.per_node.{node}")
    for message in broken_rules(config):
        raise _Mistake(message)
    try:
        resolve_storage(config)
    except ValueError as error:
        raise _Mistake(str(error)) from None
    return config


@functools.cache
def _defaults() -> DictConfig:
    sections = {"data": OmegaConf.structured(DataConfig)}  # has fields without default, so the class has none for it
    return typing.cast(DictConfig, OmegaConf.merge(OmegaConf.structured(ExperimentConfig), sections))


def _typed(raw: dict[str, Any]) -> DictConfig:
    try:
        return typing.cast(DictConfig, OmegaConf.merge(_defaults(), raw))
    except OmegaConfBaseException as error:
        key = error.full_key or ""
        value = OmegaConf.select(OmegaConf.create(raw), key)
        shown = "null" if value is None else repr(OmegaConf.to_object(value) if OmegaConf.is_config(value) else value)
        wanted, *_ = (WANTED[kind] for kind in (*typing.get_args(_kind(key)), _kind(key)) if kind in WANTED)
        raise _Mistake(f"{key} is {shown}; it must be {wanted}") from None


def _overlaid(base: dict[str, Any], named: dict[str, Any], typed: dict[str, Any]) -> dict[str, Any]:
    """base with the values of `typed` at the keys that `named` has."""
    return base | {
        key: _overlaid(base[key], value, typed[key]) if isinstance(value, dict) else typed[key]
        for key, value in named.items()
    }


def _node_base(resources: dict[str, Any], node: str) -> dict[str, Any]:
    """A node's resources before those of its own: what has an effect on it. The CPUs of nodes without workers are set
    by per_node alone."""
    taken = set(settable_resources(node))
    if "num_workers" not in taken:
        taken.discard("cpus_per_worker")
    return {f.name: resources[f.name] if f.name in taken else f.default for f in dataclasses.fields(NodeResources)}


def _construct(cls: type, values: Any, path: str = "") -> Any:
    """The dataclass, inner sections first; what its checks refuse is reported with the whole key."""
    types = typing.get_type_hints(cls)
    inner = {key: _construct(types[key], values[key], _join(path, key)) for key in types if _is_section(types[key])}
    try:
        return cls(**values | inner)
    except ValueError as error:
        at_field = re.split(r"\W", str(error), maxsplit=1)[0] in types
        raise _Mistake(_one_line(_join(path, str(error)) if at_field else f"{path}: {error}")) from None


def _differing(new: dict[str, Any], old: dict[str, Any]) -> dict[str, Any]:
    """What is different in `new`, level by level."""
    changes = {}
    for key, value in new.items():
        if isinstance(value, dict) and isinstance(old[key], dict):
            if inner := _differing(value, old[key]):
                changes[key] = inner
        elif value != old[key]:
            changes[key] = value
    return changes


# ---- checks of keys and types -----------------------------------------------------------------------------------


def _check(given: Any, kind: Any, path: str = "") -> None:
    """Unknown keys, and values where a section or a list belongs. OmegaConf checks and converts the rest."""
    outer, inner = typing.get_origin(kind), typing.get_args(kind)
    if _is_section(kind) or outer is dict:
        types = typing.get_type_hints(kind) if _is_section(kind) else {}
        if not isinstance(given, dict):
            choice = f", with KEY one of {', '.join(types)}" if types else ""
            raise _Mistake(f"{path} is a section, not a value; set {path}.KEY{choice}")
        for key, value in given.items():
            where = _join(path, str(key))
            if types and key not in types:
                nested = f"sections of a file are nested: {str(key).replace('.', ': {')}: ..."
                raise _Mistake(f"unknown key {where}; {nested if '.' in str(key) else _nearest_key(where, types)}")
            _check(value, types[key] if types else inner[1], where)
    elif outer is list:
        if not isinstance(given, list) or any(isinstance(item, list | dict) for item in given):
            raise _Mistake(f"{path} must be a flat list, e.g. {path}=[...]")
    elif kind in _TEXT and not isinstance(given, str | None):
        raise _Mistake(f"{path} is {given!r} in YAML; text that looks like something else needs quotes")
    elif isinstance(given, str) and given.strip() in ("", "???"):  # an unset variable of the shell, or OmegaConf's mark
        raise _Mistake(f"{path} is empty; it needs a value, or null where that is allowed")


def _check_names(
    section: str, what: str, raw: dict[str, Any], given: DictConfig, valid: Sequence[str], before: Sequence[str]
) -> None:
    """Entries per stage or node must be of the config. A file's entries fall away with stages that overrides leave out.

    before: the valid names of the file as it is.
    """
    entries = functools.reduce(lambda values, key: values.get(key, {}), section.split("."), raw)
    for name in entries:
        fell_away = name in before and OmegaConf.select(given, f"{section}.{name}") is None
        if name not in valid and not fell_away:
            raise _Mistake(f"{section}: the config has no {what} {name!r}; {nearest(name, valid)}")


def _nearest_key(path: str, here: Iterable[str]) -> str:
    """A close name in the same section, else that very name in another one, else what the section has.

    At the top level that very name in a section comes first: image_size is data.image_size, not images.
    """
    prefix, _, leaf = path.rpartition(".")
    elsewhere = [key for key in _all_keys(ExperimentConfig) if key.rpartition(".")[2] == leaf]
    close = [_join(prefix, key) for key in difflib.get_close_matches(leaf, here, n=1, cutoff=0.6)]
    found = (close or elsewhere) if prefix else (elsewhere or close)
    return f"nearest: {' or '.join(found)}" if found else f"valid: {', '.join(here)}"


def _all_keys(cls: type, prefix: str = "") -> Iterator[str]:
    for key, kind in typing.get_type_hints(cls).items():
        yield f"{prefix}{key}"
        if _is_section(kind):
            yield from _all_keys(kind, f"{prefix}{key}.")


_TEXT = (str, str | None)
WANTED = {int: "an integer", float: "a number", bool: "true or false", str: "a text"}


@functools.cache
def _kind(key: str) -> Any:
    """The type of a key such as data.root or bits[0], None of one that does not exist."""
    kind: Any = ExperimentConfig
    for part in re.findall(r"[^.\[\]]+", key):
        fields = typing.get_type_hints(kind) if _is_section(kind) else {}
        kind = typing.get_args(kind)[-1] if typing.get_origin(kind) in (dict, list) else fields.get(part)
    return kind


def _is_section(kind: Any) -> bool:
    return dataclasses.is_dataclass(kind)


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _one_line(error: object) -> str:
    """Of OmegaConf's messages the key first, and nothing of the types behind it."""
    text, _, rest = str(error).partition("\n    full_key: ")
    return " ".join([*(f"{key}:" for key in rest.split("\n")[:1] if key), *text.split()])
