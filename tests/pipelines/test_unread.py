"""Which overrides change nothing about what a command does.  python -m pytest tests/pipelines/test_unread.py"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import pytest

from pipelines import pipeline, unread
from pipelines.config import ExperimentConfig, train_node
from pipelines.loading import load
from pipelines.unread import without_effect

FULL = "full_multidim.py"
COMMANDS = (FULL, "prepare_data.py", "train_stage.py", "evaluate.py", "sample.py", "describe.py")
STAGE = "size_upscale"  # that train_stage.py trains


@pytest.fixture(autouse=True)
def a_session_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_JOB_CONFIG_JSON_ENV_VAR", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)


def idle(command: str, *overrides: str) -> list[str]:
    stage = STAGE if command == "train_stage.py" else None
    return without_effect(load("debug", overrides), overrides, command=command, stage=stage)


READ_BY = {
    "sample.num_images=3": (FULL, "sample.py"),
    "evaluate.batch_size=3": (FULL, "evaluate.py"),
    "seed=3": (FULL, "train_stage.py", "evaluate.py", "sample.py"),
    "train.num_steps=3": tuple(command for command in COMMANDS if command != "prepare_data.py"),
    "tracking.uri=http://x": tuple(command for command in COMMANDS if command != "describe.py"),
    "data.seed=3": COMMANDS,
    "storage=/tmp/elsewhere": COMMANDS,
    "resources.per_node.evaluate.max_failures=1": (FULL, "evaluate.py", "describe.py"),
    "resources.num_workers=2": (FULL, "train_stage.py", "sample.py", "describe.py"),
    "resources.num_to_keep=3": (FULL, "train_stage.py", "describe.py"),
    "resources.cpus_per_worker=0.5": (FULL, "train_stage.py", "sample.py", "describe.py"),
    "per_stage.first_slice.train.num_steps=3": (FULL, "evaluate.py", "sample.py", "describe.py"),
}


@pytest.mark.parametrize(("override", "readers"), READ_BY.items(), ids=READ_BY)
def test_what_a_command_does_not_read(override: str, readers: tuple[str, ...]) -> None:
    told = {command: idle(command, override) for command in COMMANDS}
    assert {command for command, lines in told.items() if not lines} == set(readers)
    key = override.partition("=")[0]
    assert all(line.startswith(f"{key} has no effect: ") for lines in told.values() for line in lines)


NEEDS = {  # what counts only with something else -> that
    "train.weight_decay=0.1": "train.optimizer=adamw",
    "train.adamw_learning_rate=0.1": "train.optimizer=muon",
    "train.cooldown=0.1": "train.schedule=linear",
    "train.compile_mode=tuned": "train.compile=true",
    "per_stage.size_upscale.train.weight_decay=0.1": "per_stage.size_upscale.train.optimizer=adamw",
    "tracking.num_sample_images=3": "tracking.sample_every_steps=100",
    "resources.gpus_per_worker=0.5": "resources.per_node.sample.use_gpu=true",
    "resources.per_node.sample.gpus_per_worker=0.5": "resources.use_gpu=true",
}


@pytest.mark.parametrize(("override", "partner"), NEEDS.items(), ids=NEEDS)
def test_what_counts_only_with_something_else(override: str, partner: str) -> None:
    (line,) = idle(FULL, "train.optimizer=rmsprop", override)
    assert line.startswith(f"{override.partition('=')[0]} has no effect: it is for ")
    assert idle(FULL, override, partner) == []


SPN = ("stages=[size_upscale]", "bits=[8]")


@pytest.mark.parametrize(("override", "others"), [*((o, ()) for o in NEEDS), ("train.slices=first", SPN)], ids=str)
def test_what_trains_anew_for_nothing_is_told(override: str, others: tuple[str, ...]) -> None:
    """Whoever reads "no effect" must not find days of training gone."""
    others = ("train.optimizer=rmsprop", *others)
    (line,) = idle(FULL, *others, override)
    plain, changed = (
        {node.name: node.config for node in pipeline.nodes(load("debug", settings))}
        for settings in (others, (*others, override))
    )
    assert ("makes another training" in line) == (plain != changed)


def test_a_stages_own_setting_counts_as_its_network_has_it() -> None:
    other = "per_stage.depth_upscale.train.optimizer=muon"
    assert idle(FULL, "train.optimizer=rmsprop", "train.weight_decay=0.1", other) == []
    own = "per_stage.first_slice.train.weight_decay=0.1"
    assert len(idle(FULL, "train.optimizer=rmsprop", own, other)) == 1


def test_parts_of_networks_that_no_stage_has() -> None:
    embedder = "model.embedder.num_attn_layers=1"
    assert idle(FULL, embedder) == [] and idle(FULL, f"per_stage.size_upscale.{embedder}") == []
    assert idle(FULL, f"per_stage.first_slice.{embedder}") == [
        "per_stage.first_slice.model.embedder.num_attn_layers has no effect: first_slice has no slice embedder"
    ]
    assert idle(FULL, "train.slices=first") == [] and len(idle(FULL, "train.slices=first", *SPN)) == 1


def test_a_machines_size_is_that_of_a_session_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert idle(FULL, "resources.num_cpus=2") == []
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")
    (line,) = idle(FULL, "resources.num_cpus=2")
    assert line == "resources.num_cpus has no effect: the cluster that is joined has its own"


def test_with_own_images_their_draws_count() -> None:
    own = ("images=a.png", "sample.use=depth_upscale")
    assert len(idle("sample.py", *own, "sample.num_images=3")) == 1
    assert idle("sample.py", *own, "sample.num_draws=3") == []


def test_seeds_of_grids_while_a_stage_trains() -> None:
    assert len(idle("train_stage.py", "sample.seed=3")) == 1
    assert idle("train_stage.py", "sample.seed=3", "tracking.sample_every_steps=100") == []


def changes_of(config: ExperimentConfig, section: str) -> list[tuple[str, ExperimentConfig]]:
    """The config with one number or switch of the section changed, each in turn."""
    value = getattr(config, section)
    if isinstance(value, int):
        return [(section, dataclasses.replace(config, **{section: value + 1}))]
    if not dataclasses.is_dataclass(value):
        return []
    found: list[tuple[str, ExperimentConfig]] = []
    for field in dataclasses.fields(value):
        old: Any = getattr(value, field.name)
        if isinstance(old, int | float) and (section, field.name) != ("train", "batch_size"):  # alone not valid
            new = not old if isinstance(old, bool) else old + 1 if isinstance(old, int) else old / 2 + 0.1
            with contextlib.suppress(ValueError):  # not valid alone
                changed = dataclasses.replace(value, **{field.name: new})
                found.append((field.name, dataclasses.replace(config, **{section: changed})))
    return found


@pytest.mark.parametrize("command", ["prepare_data.py", "train_stage.py", "evaluate.py", "sample.py"])
def test_nothing_that_a_node_or_one_above_it_reads_is_said_to_be_unread(command: str) -> None:
    config, tried = load("debug", []), 0
    only = train_node(STAGE) if command == "train_stage.py" else unread.NODES[command]

    def read(config: ExperimentConfig) -> list[Any]:
        nodes = {node.name: node for node in pipeline.nodes(config)}
        return [nodes[only], *(dataclasses.replace(nodes[name], options={}) for name in nodes[only].needs)]

    for section in unread.UNREAD[command]:
        if "." not in section and section != "scaling_factor":  # alone it would not be valid
            for key, other in changes_of(config, section):
                tried += 1
                assert read(other) == read(config), f"{section}.{key}"
    assert tried >= 1
