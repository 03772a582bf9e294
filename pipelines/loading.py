"""Load and print configurations: defaults < preset or file < `key.sub=value` on the command line.

Layers are merged into typed dataclasses, so that no misspelt key or wrong type passes; each error says in one line
what is wrong, where it was set and which valid name is nearest. The only file that imports OmegaConf.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from data_prep.config import DataConfig
from data_prep.files import UserError
from pipelines.cluster import in_ray_job
from pipelines.config import (
    ExperimentConfig,
    NodeResources,
    StageConfig,
    broken_rules,
    concrete_stages,
    nearest,
    train_node,
)

PROJECT_ROOT = Path(__file__).resolve().parents[1]
TYPED_ENTRIES = {"per_stage": StageConfig, "resources.per_node": NodeResources}  # sections by stage or node
PRESETS = Path(__file__).resolve().parent / "configs"


def preset_names() -> list[str]:
    return sorted(path.stem for path in PRESETS.glob("*.yaml"))


def load(name_or_path: str, overrides: Sequence[str] = ()) -> ExperimentConfig:
    """A preset's name or a YAML file, then `key.sub=value` strings. Raises UserError: what, where, nearest name."""
    path = _find(name_or_path)
    shown = str(path.relative_to(PROJECT_ROOT)) if path.is_relative_to(PROJECT_ROOT) else str(path)
    in_file = f"in {shown}"
    config = _merge(_defaults(), _read(path, shown), where=in_file)
    from_file = config
    set_by: dict[str, str] = {}
    for override in overrides:
        key, fragment = _parse(override)
        set_by[key] = f"on the command line: {override}"
        config = _merge(config, fragment, where=set_by[key])

    def blame(*keys: str, section: str = "") -> str:
        """The last override of one of these keys, of what is below it or of what holds it; else the file.

        Where the file's own `section` is sound, an override of anything in it broke the rule.
        """
        related = _touching(set_by, keys)
        if not related and section and _is_sound(OmegaConf.select(from_file, section)):
            related = _touching(set_by, [section])
        return related[-1] if related else in_file

    loaded = _instantiate(config, blame)
    left_out = _known_stages(from_file) - _known_stages(config)
    loaded = _without_stages(
        loaded,
        stages={stage for stage in left_out if blame(f"per_stage.{stage}") == in_file},
        nodes={node for node in map(train_node, left_out) if blame(f"resources.per_node.{node}") == in_file},
    )
    stage_base = StageConfig(model=loaded.model, train=loaded.train)
    node_base = NodeResources(**{f.name: getattr(loaded.resources, f.name) for f in dataclasses.fields(NodeResources)})
    per_stage = _typed_entries("per_stage", loaded.per_stage, stage_base, blame)
    per_node = _typed_entries("resources.per_node", loaded.resources.per_node, node_base, blame)
    resources = dataclasses.replace(loaded.resources, per_node=per_node)
    loaded = dataclasses.replace(loaded, per_stage=per_stage, resources=resources)
    for keys, message in broken_rules(loaded):
        raise UserError(f"{message} ({blame(*keys)})")
    try:
        resolve_storage(loaded)
    except ValueError as error:
        raise UserError(f"{error} ({blame('storage')})") from None
    return loaded


def outdone(config: ExperimentConfig, overrides: Sequence[str]) -> list[str]:
    """A line for each override that some stages do not get, since the file's `per_stage` sets the same value there."""
    chosen = {override.partition("=")[0] for override in overrides}
    lines = []
    for key in sorted(chosen):
        kept = []
        for stage, value in config.per_stage.items():
            for part in key.split("."):
                value = value.get(part) if isinstance(value, dict) else None
            if value is not None and f"per_stage.{stage}.{key}" not in chosen:
                kept.append(f"per_stage.{stage}.{key}={value}")
        if kept:
            lines.append(f"{key} is for stages that have none of their own; these stay: {', '.join(kept)}")
    return lines


def resolve_storage(config: ExperimentConfig) -> str:
    """Absolute folder or URI of all run folders.

    Inside a Ray job the working directory may be a copy that is thrown away: the default is then $SPN_STORAGE, or
    ~/spn_runs on the head node, and a relative path raises ValueError.
    """
    key, storage = "storage", config.storage
    if storage is None and in_ray_job():
        key, storage = "$SPN_STORAGE", os.environ.get("SPN_STORAGE") or "~/spn_runs"
    if storage is None:
        return str(PROJECT_ROOT / "runs")
    if "://" in storage:
        return storage.rstrip("/")
    path = Path(storage).expanduser()
    if not path.is_absolute() and in_ray_job():
        raise ValueError(
            f"{key} is {storage!r}; inside a Ray job it must be an absolute path or a URI such as s3://..."
        )
    return str(path.absolute())


def to_yaml(config: ExperimentConfig) -> str:
    """Every value in use; `load` reads it back to an equal config."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def _defaults() -> DictConfig:
    sections = {"data": OmegaConf.structured(DataConfig)}  # has fields without default, so the class has none for it
    return OmegaConf.merge(OmegaConf.structured(ExperimentConfig), sections)


def _find(name_or_path: str) -> Path:
    if name_or_path.endswith((".yaml", ".yml")) or os.sep in name_or_path:
        path = Path(name_or_path).expanduser().absolute()
        if not path.is_file():
            raise UserError(f"config file {name_or_path} does not exist; presets: {', '.join(preset_names())}")
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
    return read


def _parse(override: str) -> tuple[str, DictConfig]:
    key, equals, _ = override.partition("=")
    if not equals or not re.fullmatch(r"\w+(\.\w+)*", key):
        hint = f"; a config is chosen by --config {override}" if override in preset_names() else ""
        raise UserError(f"cannot read {override!r} on the command line: it must be key.sub=value{hint}")
    try:
        return key, OmegaConf.from_dotlist([override])
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise UserError(f"cannot read the value of {override!r} on the command line: {_one_line(error)}") from None


def _merge(base: DictConfig, layer: DictConfig, *, where: str, prefix: str = "") -> DictConfig:
    """Merge into the typed config, so that an unknown key or a wrong type is an error of this layer."""
    _check_keys(base, layer, where, prefix)
    for section, kind in {} if prefix else TYPED_ENTRIES.items():
        entries = OmegaConf.select(layer, section)
        for name in entries if isinstance(entries, DictConfig) else ():  # a plain dict: its entries are typed here
            _merge(OmegaConf.structured(kind), entries._get_node(name), where=where, prefix=f"{section}.{name}")
    try:
        return OmegaConf.merge(base, layer)
    except OmegaConfBaseException as error:
        raise UserError(f"{_describe(error, prefix)} ({where})") from None


def _check_keys(base: DictConfig, layer: Any, where: str, prefix: str = "") -> None:
    if not isinstance(layer, DictConfig) or layer._is_none():
        inside = ", ".join(str(key) for key in base)
        raise UserError(f"{prefix} is a section, not a value; set {prefix}.KEY, with KEY one of {inside} ({where})")
    for key in layer:
        path = f"{prefix}.{key}" if prefix else str(key)
        if key not in base.keys():  # `in base` is false for a value that is still missing
            raise UserError(f"unknown key {path}; {_nearest_key(path, base, prefix)} ({where})")
        inner, given = base._get_node(key), layer._get_node(key)
        if isinstance(inner, ListConfig) and not isinstance(given, ListConfig):
            raise UserError(f"{path} must be a list, e.g. {path}=[...] ({where})")
        if isinstance(inner, DictConfig) and not isinstance(given, DictConfig) and not _is_section(inner):
            entry = "NODE" if key == "per_node" else "STAGE"
            raise UserError(f"{path} must be a mapping; set {path}.{entry} ({where})")
        if isinstance(given, ListConfig) and any(OmegaConf.is_config(item) for item in given):
            raise UserError(f"{path} must be a flat list ({where})")  # OmegaConf lets [3, [4]] pass as a list of int
        if _is_section(inner):
            _check_keys(inner, given, where, path)


def _nearest_key(path: str, section: DictConfig, prefix: str) -> str:
    """A close name in the same section, else that very name in another one, else what the section has.

    At the top level that very name in a section comes first: image_size is data.image_size, not images.
    """
    leaf, here = path.rsplit(".", 1)[-1], [str(key) for key in section.keys()]
    elsewhere = [key for key in _all_keys(_defaults()) if key.rsplit(".", 1)[-1] == leaf]
    if elsewhere and not prefix:
        return f"nearest: {' or '.join(elsewhere)}"
    if close := difflib.get_close_matches(leaf, here, n=1, cutoff=0.6):
        return f"nearest: {prefix}.{close[0]}" if prefix else f"nearest: {close[0]}"
    return f"nearest: {' or '.join(elsewhere)}" if elsewhere else f"valid: {', '.join(here)}"


def _all_keys(node: DictConfig, prefix: str = "") -> Iterator[str]:
    for key in node:
        inner = node._get_node(key)
        if _is_section(inner):
            yield from _all_keys(inner, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def _is_section(node: Any) -> bool:
    return isinstance(node, DictConfig) and dataclasses.is_dataclass(OmegaConf.get_type(node))


def _touching(set_by: dict[str, str], keys: Sequence[str]) -> list[str]:
    """Where values were set that are one of `keys`, lie below one or hold one."""
    return [
        where
        for name, where in set_by.items()
        if any(name == key or name.startswith(f"{key}.") or key.startswith(f"{name}.") for key in keys)
    ]


def _is_sound(node: Any) -> bool:
    try:
        return _is_section(node) and OmegaConf.to_object(node) is not None
    except (OmegaConfBaseException, ValueError):
        return False


def _known_stages(config: DictConfig) -> set[str]:
    """Kinds and concrete names that sections by stage may use."""
    if OmegaConf.is_missing(config, "stages") or OmegaConf.is_missing(config, "bits"):
        return set()
    return {*config.stages, *concrete_stages(config.stages, config.bits)}


def _without_stages(config: ExperimentConfig, *, stages: set[str], nodes: set[str]) -> ExperimentConfig:
    """A preset's settings for stages that the command line left out, and for their nodes, fall away with them."""

    def kept(mapping: dict[str, Any], gone: set[str]) -> dict[str, Any]:
        return {name: value for name, value in mapping.items() if name not in gone}

    sample = dataclasses.replace(
        config.sample,
        temperature=kept(config.sample.temperature, stages),
        top_p=kept(config.sample.top_p, stages),
    )
    resources = dataclasses.replace(config.resources, per_node=kept(config.resources.per_node, nodes))
    return dataclasses.replace(config, per_stage=kept(config.per_stage, stages), sample=sample, resources=resources)


def _typed_entries(section: str, entries: dict[str, Any], base: Any, blame: Callable[..., str]) -> dict[str, Any]:
    """The entries of a section by stage or node, checked over what they change: {name: its changes, typed}."""
    result = {}
    for name, changes in entries.items():
        typed = OmegaConf.merge(OmegaConf.structured(base), changes)
        _instantiate(typed, blame, prefix=f"{section}.{name}.")
        result[name] = _masked(OmegaConf.to_container(typed, resolve=True), changes)
    return result


def _masked(typed: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """The typed values of the keys that `changes` names."""
    return {
        key: _masked(typed[key], value) if isinstance(value, dict) else typed[key] for key, value in changes.items()
    }


def _instantiate(node: DictConfig, blame: Callable[..., str], *, prefix: str = "") -> Any:
    """The dataclass of a section; what its own checks refuse is reported with the whole key."""
    try:
        return OmegaConf.to_object(node)
    except OmegaConfBaseException as error:
        raise UserError(f"{_describe(error)} ({blame(error.full_key or '')})") from None
    except ValueError as error:
        for key in node:
            if _is_section(node._get_node(key)):  # a section below speaks for itself, with the longer key
                _instantiate(node._get_node(key), blame, prefix=f"{prefix}{key}.")
        name, section = re.split(r"\W", str(error), maxsplit=1)[0], prefix.rstrip(".")
        at_field = name in node
        message = _one_line(f"{prefix}{error}" if at_field else f"{section}: {error}")
        where = blame(f"{prefix}{name}" if at_field else section, section=section)
        raise UserError(f"{message} ({where})") from None


WANTED = {"int": "an integer", "Integer": "an integer", "float": "a number", "Float": "a number", "str": "a text"}


def _describe(error: OmegaConfBaseException, prefix: str = "") -> str:
    key, text = error.full_key or "", _one_line(str(error).split("\n")[0])
    key = f"{prefix}.{key}" if prefix else key
    if isinstance(error, MissingMandatoryValue):
        return f"{key} is not set"
    if found := re.match(r"Value '(.*)' of type '.*' could not be converted to (\w+)", text):
        value, wanted = found.groups()
        return f"{key} is {value!r}; it must be {WANTED.get(wanted, wanted)}"
    if found := re.match(r"Value '(.*)' is not a valid bool", text):
        return f"{key} is {found[1]!r}; it must be true or false"
    if found := re.match(r"Incompatible value 'None' for field of type '(\w+)'", text):
        return f"{key} is null; it must be {WANTED.get(found[1], found[1])}"
    return f"{key}: {text}"


def _one_line(error: object) -> str:
    return " ".join(str(error).split())
