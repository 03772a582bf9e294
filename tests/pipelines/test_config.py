"""Configs: presets load, layers override each other in order, and every mistake is one line that names its place.

python -m pytest tests/pipelines/test_config.py
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import yaml

from data_prep.config import SOURCES, DataConfig
from data_prep.files import UserError
from data_prep.plan import COUNTS, check_id
from pipelines import cli, loading
from pipelines.cluster import ROOT
from pipelines.config import (
    DECODERS,
    USES,
    EvaluateNodeConfig,
    ExperimentConfig,
    PrepareDataNodeConfig,
    ReportNodeConfig,
    SampleNodeConfig,
    TrainNodeConfig,
    stage_model_config,
    stage_names,
)
from pipelines.dag.fingerprint import canonical, flatten
from pipelines.loading import load, resolve_storage, to_yaml
from pipelines.pipeline import nodes
from spn.config import (
    OPTIMIZERS,
    PRECISIONS,
    RECIPES,
    SCHEDULES,
    SLICES,
    DecoderConfig,
    EmbedderConfig,
    SPNConfig,
    TrainConfig,
)

FULL_CHAIN = ["first_slice", "size_upscale", "depth_upscale"]
DEBUG = (loading.PRESETS / "debug.yaml").read_text()


def error_of(name: str, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load(name, overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


# ---- presets --------------------------------------------------------------------------------------------------------

PAPER = {  # table 4: learning rate, batch size
    "imagenet32": (1e-4, 1024),
    "imagenet64": (1e-4, 2048),
    "imagenet128": (1e-5, 2048),
    "imagenet256": (1e-5, 2048),
    "celebahq256": (5e-5, 256),
}
DATASETS = {  # id, source
    "imagenet32": ("imagenet_oord", "imagenet_oord"),
    "imagenet64": ("imagenet_oord", "imagenet_oord"),
    "imagenet128": ("imagenet_area", "auto"),
    "imagenet256": ("imagenet_area", "auto"),
    "celebahq256": ("celebahq", "celebahq"),
    "cifar10": ("cifar10", "auto"),
    "cifar10_modern": ("cifar10", "auto"),
}


def test_presets_load_and_keep_their_names() -> None:
    assert {*PAPER, *DATASETS, "faces64", "faces256", "demo", "demo_paper", "debug"} == set(loading.preset_names())
    assert [load(name).name for name in loading.preset_names()] == loading.preset_names()


@pytest.mark.parametrize("name", PAPER)
def test_presets_of_the_paper_have_its_slices_and_its_optimisation(name: str) -> None:
    config = load(name)
    assert config.data.image_size == 32 * config.scaling_factor  # slices are always 32 x 32
    for stage in config.per_stage.values():
        train = stage.train
        assert (train.optimizer, train.momentum, train.decay, train.epsilon) == ("rmsprop", 0.9, 0.95, 1e-8)
        assert (train.polyak_decay, train.polyak_warmup) == (0.9999, False)
    assert (config.train.learning_rate, config.train.batch_size) == PAPER[name]
    if config.train.learning_rate == 1e-4:
        assert (config.train.lr_boundaries, config.train.lr_values) == ([50_000, 100_000], [3e-5, 1e-5])


@pytest.mark.parametrize("name", DATASETS)
def test_presets_name_the_dataset_that_their_source_makes(name: str) -> None:
    data = load(name).data
    assert (data.dataset, data.source) == DATASETS[name] and data.dataset in COUNTS
    assert data.num_valid_photos > 0 and data.num_test_photos == 0  # the sources have test splits of their own
    if data.source != "auto":
        check_id(data, data.source)


# ---- demo_paper is the paper's pipeline made small -----------------------------------------------------------------

DEMO_KEEPS = ("scaling_factor", "bits", "stages", "seed", "tracking", "model.decoder.recipe", "model.embedder.recipe")


def lines_by_key(path: Path) -> dict[str, str]:
    """{dotted key: its line in the YAML file}."""
    lines = path.read_text().splitlines()

    def walk(node: yaml.MappingNode, prefix: str) -> dict[str, str]:
        found = {}
        for key, value in node.value:
            name = f"{prefix}{key.value}"
            found[name] = lines[key.start_mark.line]
            if isinstance(value, yaml.MappingNode):
                found |= walk(value, f"{name}.")
        return found

    return walk(yaml.compose(path.read_text()), "")


def test_demo_paper_differs_from_imagenet64_only_where_it_may_and_says_so() -> None:
    modern, demo, paper = (
        flatten(yaml.safe_load(to_yaml(load(name)))) for name in ("demo", "demo_paper", "imagenet64")
    )
    other = {key for key in modern | demo if modern.get(key) != demo.get(key)}
    assert [key for key in other if not key.startswith(("name", "storage", "model.", "train.", "per_stage."))] == []
    changed = {key for key in demo | paper if demo.get(key) != paper.get(key)}
    assert [key for key in changed if key.startswith(DEMO_KEEPS) or "dropout" in key] == []
    lines = lines_by_key(loading.PRESETS / "demo_paper.yaml")
    for key in sorted(changed):
        silent = ("train.eval_", "train.num_valid", "train.checkpoint_", "train.log_", "train.micro_", "train.lr_")
        silent += ("train.precision", "train.compile")
        if key.startswith(("model.", "train.")) and not key.startswith(silent):
            value = "null" if paper[key] is None else str(paper[key]).lower()
            stated = lines[key].partition("# paper: ")[2].split(" ")[0].replace("_", "")
            assert stated and yaml.safe_load(f"v: {stated}") is not None, f"{key} lacks its `# paper:` mark"
            assert stated == value or float(stated) == float(value), f"{key}: marked {stated}, imagenet64 has {value}"


# ---- layers ---------------------------------------------------------------------------------------------------------


def written(folder: Path, *changes: tuple[str, str]) -> str:
    """The path of a copy of debug.yaml with some text replaced."""
    text = DEBUG
    for old, new in changes:
        assert old in text
        text = text.replace(old, new, 1)
    file = folder / "mine.yaml"
    file.write_text(text)
    return str(file)


def test_command_line_overrides_file_overrides_defaults(tmp_path: Path) -> None:
    file = written(tmp_path, ("num_steps: 12", "num_steps: 34"), ("5e-3", "3e-4"))
    assert (load(file).train.num_steps, load(file).train.momentum) == (34, 0.9)
    assert load(file).train.learning_rate == 3e-4, "an exponent without a dot is a number"
    assert load(file, ["train.num_steps=56", "train.num_steps=78"]).train.num_steps == 78
    assert load(file, ["data.image_size=32"]).data.resolutions == [32], "it follows unless it is set"
    assert load(file, ["data.root=s3://bucket/a=1,b"]).data.root == "s3://bucket/a=1,b"


TEXTS = ["photos #1", "2023_10_05", "1.10", "no", "1e3", "007", "1:30", "*.png", "[a]", "a: b", "~", "- x", "'q'", " x"]


def test_text_on_the_command_line_is_taken_as_it_is(tmp_path: Path) -> None:
    for text, other in zip(TEXTS[::2], TEXTS[1::2], strict=True):
        config = load("debug", [f"data.root={text}", f"images={other}", "sample.use=complete"])
        assert (config.data.root, config.images) == (text, other)
        (tmp_path / "config.yaml").write_text(to_yaml(config))
        assert load(str(tmp_path / "config.yaml")) == config
    assert load("debug", ["data.root=null"]).data.root is None


def test_text_in_a_file_needs_quotes_where_yaml_reads_something_else(tmp_path: Path) -> None:
    for text, shown in (("2023_10_05", "20231005"), ("1.10", "1.1"), ("no", "False")):
        file = written(tmp_path, ("data:", f"name: '{text}'\ndata:\n  root: '{text}'"))
        config = load(file)
        assert (config.name, config.data.root) == (text, text)
        assert yaml.safe_load(to_yaml(config))["name"] == text, "others read the run folder's file too"
        file = written(tmp_path, ("train:", f"per_stage: {{first_slice: {{train: {{init_from: {text}}}}}}}\ntrain:"))
        assert error_of(file).startswith(f"per_stage.first_slice.train.init_from is {shown} in YAML; text that looks")


def test_an_interpolation_may_wait_for_the_command_line(tmp_path: Path) -> None:
    file = written(tmp_path, ("stages: [first_slice, size_upscale, depth_upscale]", "stages: ${nothing}"))
    assert "nothing" in error_of(file)
    assert list(load(file, ["stages=[size_upscale]", "bits=[8]"]).per_stage) == ["size_upscale"]


def test_common_settings_then_those_of_a_kind_then_those_of_a_stage() -> None:
    steps = ["train.num_steps=4", "per_stage.depth_upscale.train.num_steps=5"]
    config = load("debug", ["bits=[1,3,8]", "per_stage.depth_upscale_8.train.num_steps=6", *steps])
    assert {name: stage.train.num_steps for name, stage in config.per_stage.items()} == {
        "first_slice": 4,
        "size_upscale": 4,
        "depth_upscale_3": 5,
        "depth_upscale_8": 6,
    }
    config = load("imagenet128", ["per_stage.depth_upscale.train.learning_rate=1"])
    assert [stage.model.decoder.conv_channels for stage in config.per_stage.values()] == [256, 384, 384]
    rates = [stage.train.learning_rate for stage in config.per_stage.values()]
    assert rates == [1e-5, 1e-5, 1.0] and isinstance(rates[2], float)
    config = load("demo", ["train.num_steps=7", "per_stage.depth_upscale.train.num_steps=8"])
    assert [stage.train.num_steps for stage in config.per_stage.values()] == [7, 7, 8], "what is typed beats the file"
    config = load("debug", ["sample.temperature.depth_upscale=0.99", "sample.top_p.first_slice=0.9"])
    assert config.sample.temperature == dict(zip(FULL_CHAIN, [1.0, 1.0, 0.99], strict=True))
    assert config.sample.top_p == dict(zip(FULL_CHAIN, [0.9, None, None], strict=True))


def test_a_printed_config_loads_to_the_same_config(tmp_path: Path) -> None:
    own = ["bits=[1,3,8]", "sample.temperature.depth_upscale_3=0.9", "sample.top_p.size_upscale=0.5", "image_bits=8"]
    own += ["per_stage.depth_upscale.train.lr_boundaries=[3]", "per_stage.depth_upscale.train.lr_values=[1]"]
    own += ["resources.per_node.train_depth_upscale_3.num_workers=2", "resources.use_gpu=true", "images=a.png"]
    for name, overrides in (("imagenet128", []), ("faces64", []), ("faces256", []), ("debug", own)):
        config = load(name, overrides)
        (tmp_path / "config.yaml").write_text(to_yaml(config))
        assert load(str(tmp_path / "config.yaml")) == config
    smaller = load(str(tmp_path / "config.yaml"), ["stages=[first_slice,size_upscale]", "bits=[8]"])
    assert list(smaller.per_stage) == list(smaller.sample.temperature) == FULL_CHAIN[:2]
    assert "train_depth_upscale_3" not in smaller.resources.per_node, "settings of left-out stages fall away"


# ---- stages and nodes -----------------------------------------------------------------------------------------------

SYSTEMS = {  # overrides of debug -> {stage: (bits given, bits generated)}
    (): {"first_slice": (0, 3), "size_upscale": (0, 3), "depth_upscale": (3, 5)},
    ("stages=[baseline]", "bits=[8]", "scaling_factor=1"): {"baseline": (0, 8)},
    ("stages=[baseline,depth_upscale]", "scaling_factor=1"): {"baseline": (0, 3), "depth_upscale": (3, 5)},
    ("stages=[size_upscale]", "bits=[5]"): {"size_upscale": (0, 5)},
    ("stages=[first_slice,size_upscale]", "bits=[8]"): {"first_slice": (0, 8), "size_upscale": (0, 8)},
    ("stages=[depth_upscale,size_upscale]", "bits=[2,5]"): {"size_upscale": (0, 2), "depth_upscale": (2, 3)},
    ("bits=[1,3,8]",): {
        "first_slice": (0, 1),
        "size_upscale": (0, 1),
        "depth_upscale_3": (1, 2),
        "depth_upscale_8": (3, 5),
    },
}


@pytest.mark.parametrize(("overrides", "bits"), SYSTEMS.items(), ids=[" ".join(key) for key in SYSTEMS])
def test_stages_follow_the_systems_of_the_paper_and_the_bits(
    overrides: tuple[str, ...], bits: dict[str, tuple[int, int]]
) -> None:
    config = load("debug", overrides)
    networks = {stage: stage_model_config(config, stage) for stage in stage_names(config)}
    assert list(networks) == list(config.per_stage) == list(bits)  # in chain order
    assert {stage: (network.num_given_bits, network.num_bits) for stage, network in networks.items()} == bits
    for stage, network in networks.items():
        assert (network.embedder is None) == (stage in ("baseline", "first_slice"))
        assert (network.image_size, network.scaling_factor) == (16, config.scaling_factor)


def test_resources_of_one_node_are_its_own_and_no_part_of_what_it_computes() -> None:
    changes = ["train_size_upscale.num_workers=2", "train_size_upscale.cpus_per_worker=3", "evaluate.use_gpu=true"]
    changes += ["sample.cpus_per_worker=4", "sample.num_workers=3", "prepare_data.max_failures=9"]
    config = load("debug", ["evaluate.precision=float32", *(f"resources.per_node.{change}" for change in changes)])
    plain, changed = ({node.name: node for node in nodes(each)} for each in (load("debug"), config))
    assert {name: canonical(node.config) for name, node in plain.items()} == {
        name: canonical(node.config) for name, node in changed.items()
    }
    cost = {name: node.total_cost for name, node in changed.items()}
    assert cost["train_first_slice"] == {"CPU": 0.75} and cost["train_size_upscale"] == {"CPU": 6.25}
    assert cost["evaluate"] == {"CPU": 0.5, "GPU": 1} and cost["sample"] == {"CPU": 12}
    assert [changed[name].max_failures for name in ("prepare_data", "train_size_upscale")] == [9, 3]
    own = config.resources.per_node
    assert own["evaluate"].device == "cuda"
    assert own["sample"].device == "cpu", "a GPU is taken only where one was asked for"
    assert load("debug", ["resources.cpus_per_worker=4"]).resources.per_node["report"].cpus_per_worker == 1, "no worker"


def semantic(*overrides: str) -> dict[str, object]:
    return {node.name: canonical(node.config) for node in nodes(load("debug", overrides))}


def test_what_decides_no_result_is_in_no_fingerprint() -> None:
    changes = ["storage=/elsewhere", "tracking.uri=http://x", "tracking.sample_every_steps=5", "resources.num_cpus=3"]
    changes += ["train.log_every_steps=3", "train.micro_batch_size=2", "resources.max_failures=1"]
    changes += ["data.max_quarantine_fraction=0.2"]  # a build that gave up resumes with its finished shards
    assert semantic(*changes) == semantic()
    assert semantic("train.checkpoint_every_steps=12") != semantic(), "the best checkpoint is what is handed over"
    on_gpu = ["sample.precision=float32", "sample.decoder=plain", "evaluate.precision=float32"]
    assert semantic(*on_gpu) == semantic(), "a CPU heeds none of these"
    gpu = "resources.per_node.sample.use_gpu=true"
    drawn = [semantic(gpu, *more) for more in ((), ("sample.precision=float32",), ("sample.decoder=plain",))]
    assert all(one["sample"] != other["sample"] for one, other in zip(drawn, drawn[1:], strict=False))
    assert all(one["report"] != other["report"] for one, other in zip(drawn, drawn[1:], strict=False))


RESOURCES = {"resources"}
DECIDES_NOTHING = {  # an addition lets changed results be skipped, so it needs a reason that is more than speed
    TrainConfig: {"micro_batch_size", "compile", "recompute_activations", "log_every_steps"},
    SPNConfig: set(),
    DecoderConfig: set(),
    EmbedderConfig: set(),
    DataConfig: {"root", "max_quarantine_fraction"},
    PrepareDataNodeConfig: {"num_cpus", "listing_hash"},
    TrainNodeConfig: RESOURCES | {"samples", "init_from"},
    SampleNodeConfig: RESOURCES | {"images"},
    EvaluateNodeConfig: RESOURCES | {"images"},
    ReportNodeConfig: set(),
}


@pytest.mark.parametrize(("config", "names"), DECIDES_NOTHING.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_fields_that_no_fingerprint_counts(config: type, names: set[str]) -> None:
    assert {field.name for field in dataclasses.fields(config) if not field.metadata.get("semantic", True)} == names


# ---- overrides without effect ---------------------------------------------------------------------------------------

ALL = ("", "prepare_data", "train_size_upscale", "evaluate", "sample")  # nodes that a command runs; "": all
EFFECTIVE = {  # override -> commands on which it has an effect
    ("sample.num_images=3",): ("", "sample"),
    ("evaluate.batch_size=3",): ("", "evaluate"),
    ("seed=3",): ("", "train_size_upscale", "evaluate", "sample"),
    ("train.num_steps=3",): ("", "train_size_upscale", "evaluate", "sample"),
    ("tracking.uri=http://x",): ALL,
    ("data.seed=3",): ALL,
    ("storage=/tmp/elsewhere",): ALL,
    ("seed=0",): ALL,  # repeats what is set
    ("resources.per_node.evaluate.max_failures=1",): ("", "evaluate"),
    ("resources.num_workers=2",): ("", "train_size_upscale", "evaluate", "sample"),
    ("resources.num_to_keep=3",): ("", "train_size_upscale"),
    ("resources.use_gpu=true",): ("", "train_size_upscale", "evaluate", "sample"),
    ("per_stage.first_slice.train.num_steps=3",): ("", "evaluate", "sample"),
    ("per_stage.first_slice.model.embedder.num_attn_layers=2",): ("",),  # it has none: only the report shows it
    ("train.slices=first",): ("", "evaluate", "sample"),
    ("train.cooldown=0.3",): ("",),
    ("train.adamw_learning_rate=1",): ("",),
    ("train.adamw_learning_rate=1", "train.optimizer=muon"): ("", "train_size_upscale", "evaluate", "sample"),
    ("train.weight_decay=0.1",): ("", "train_size_upscale", "evaluate", "sample"),
    ("train.weight_decay=0.1", "train.optimizer=rmsprop"): ("",),
    ("tracking.num_sample_images=3",): (),
    ("tracking.num_sample_images=3", "tracking.sample_every_steps=100"): ("", "train_size_upscale"),
    ("sample.seed=3",): ("", "sample"),
    ("sample.precision=float32",): (),  # a CPU has no other
    ("sample.decoder=jacobi",): ("", "sample"),
}


@functools.cache
def loaded_once(name: str, overrides: tuple[str, ...]) -> ExperimentConfig:
    return load(name, overrides)


@pytest.fixture
def cached_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same config is compared for many commands."""

    def cached(name: str, overrides: Sequence[str] = ()) -> ExperimentConfig:
        return loaded_once(name, tuple(overrides))

    monkeypatch.setattr(cli, "load", cached)


Said = Callable[..., list[str]]


@pytest.fixture
def said(cached_load: None, capsys: pytest.CaptureFixture[str]) -> Said:
    """said(*overrides, only=node) -> the keys that are said to have no effect."""

    def say(*overrides: str, only: str = "") -> list[str]:
        arguments = argparse.Namespace(config="debug", overrides=overrides, command="it")
        cli.print_notes(loaded_once("debug", overrides), arguments, only=(only,) if only else ())
        err = capsys.readouterr().err
        keys = re.fullmatch(r"(?:note: (.*) (?:has|have) no effect on what it does\n)?", err)
        assert keys is not None
        return keys[1].split(", ") if keys[1] else []

    return say


@pytest.mark.parametrize(("overrides", "effective"), EFFECTIVE.items(), ids=[" ".join(key) for key in EFFECTIVE])
def test_an_override_without_effect_is_said(overrides: tuple[str, ...], effective: tuple[str, ...], said: Said) -> None:
    key = overrides[0].partition("=")[0]
    assert {only for only in ALL if key in said(*overrides, only=only)} == set(ALL) - set(effective)


@pytest.mark.parametrize(
    ("overrides", "note"),
    [
        (("stages=[baseline]", "bits=[8]", "scaling_factor=1"), "8 slices of 16x16 has 4 times the pixels of debug's"),
        (("scaling_factor=4",), "8 slices of 4x4 has 0.25 times the pixels of debug's; train.batch_size=32 keeps them"),
        (("scaling_factor=4", "train.batch_size=32"), ""),
        (("train.batch_size=32",), ""),
    ],
)
def test_a_batch_of_other_slices_keeps_the_pixels_or_that_is_said(
    overrides: tuple[str, ...], note: str, cached_load: None, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = argparse.Namespace(config="debug", overrides=overrides, command="it")
    cli.print_notes(loaded_once("debug", overrides), arguments)
    err = capsys.readouterr().err
    assert note in err and bool(err) == bool(note)


def test_notes_on_several_overrides_and_on_the_machine_of_a_cluster(
    said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = ["evaluate.batch_size", "sample.num_images"]
    assert said(*(f"{key}=3" for key in two), only="prepare_data") == two
    assert said("resources.num_cpus=3") == []
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")
    assert said("resources.num_cpus=3") == ["resources.num_cpus"]


# ---- mistakes, one line each ----------------------------------------------------------------------------------------

MISTAKES = {
    # what is not there
    "train.num_step=5": "unknown key train.num_step; nearest: train.num_steps",
    "scaling_factor=2 image_size=16": "unknown key image_size; nearest: data.image_size",
    "decoder.num_layers=2": "unknown key decoder; nearest: model.decoder or sample.decoder",
    "lr=1": "unknown key lr; valid: name, scaling_factor, bits, stages, data, seed, images, image_fit, image_bits, "
    "storage, model, train, per_stage, evaluate, sample, resources, tracking",
    "per_stage.first_slice.trains.num_steps=5": "unknown key per_stage.first_slice.trains; nearest: "
    "per_stage.first_slice.train",
    "per_stage.first_slic.train.num_steps=5": "per_stage: the config has no stage 'first_slic'; nearest: first_slice",
    "per_stage.baseline.train.num_steps=5": "per_stage: the config has no stage 'baseline'; valid: first_slice, "
    "size_upscale, depth_upscale",
    "sample.temperature.depth_upscale_8=0.9": "sample.temperature: the config has no stage 'depth_upscale_8'; "
    "nearest: depth_upscale",
    "resources.per_node.train_size_upscal.num_workers=2": "resources.per_node: the config has no node "
    "'train_size_upscal'; nearest: train_size_upscale",
    "resources.per_node.report.num_workers=2": "resources.per_node.report.num_workers has no effect; valid: "
    "cpus_per_worker, max_failures, retry_wait_sec",
    "resources.per_node.sample.num_to_keep=2": "resources.per_node.sample.num_to_keep has no effect; valid: "
    "cpus_per_worker, max_failures, retry_wait_sec, "
    "num_workers, use_gpu, gpus_per_worker",
    "resources.per_node.report.retry_wait_sec=-1": "resources.per_node.report.retry_wait_sec is -1.0; it must be at "
    "least 0",
    "resources.per_node.train_size_upscale.num_workers=3": "train.batch_size is 8; "
    "resources.per_node.train_size_upscale.num_workers, 3, must divide it",
    # types
    "train.num_steps=abc": "train.num_steps is 'abc'; it must be an integer",
    "train.num_steps=null": "train.num_steps is null; it must be an integer",
    "train.learning_rate=fast": "train.learning_rate is 'fast'; it must be a number",
    "train.horizontal_flip=maybe": "train.horizontal_flip is 'maybe'; it must be true or false",
    "train.lr_values=[1e-3,x]": "train.lr_values[1] is 'x'; it must be a number",
    "stages=size_upscale": "stages must be a flat list, e.g. stages=[...]",
    "bits=[3,[8]]": "bits must be a flat list, e.g. bits=[...]",
    "resources=3": "resources is a section, not a value; set resources.KEY, with KEY one of num_workers, "
    "cpus_per_worker, use_gpu, gpus_per_worker, num_to_keep, max_failures, retry_wait_sec, num_cpus, "
    "num_gpus, per_node",
    "train=[1]": "Cannot merge incompatible container types",
    # values of one field
    "model.decoder.num_layers=0": "model.decoder.num_layers is 0; it must be at least 1",
    "per_stage.first_slice.model.decoder.num_layers=0": "per_stage.first_slice.model.decoder.num_layers is 0; it must "
    "be at least 1",
    "evaluate.batch_size=0": "evaluate.batch_size is 0; it must be at least 1",
    "sample.num_images=0": "sample.num_images is 0; it must be at least 1",
    "sample.seed=-1": "sample.seed is -1; it must be at least 0",
    "sample.temperature.first_slice=0": "sample.temperature.first_slice is 0.0; it must be above 0",
    "sample.top_p.depth_upscale=1.5": "sample.top_p.depth_upscale is 1.5; it must be above 0 and at most 1",
    "sample.top_p.depth=0.9": "sample.top_p: the config has no stage 'depth'; nearest: depth_upscale",
    "sample.temperature.first_slice=nan": "sample.temperature.first_slice is nan; it must be above 0",
    "resources.num_workers=0": "resources.num_workers is 0; it must be at least 1",
    "resources.cpus_per_worker=0": "resources.cpus_per_worker is 0.0; it must be above 0",
    "data.bits=[3]": "data.bits is [3]; it must contain 8",
    "sample.decoder=fused": "sample.decoder is 'fused', which needs a GPU; set resources.use_gpu=true, or "
    "sample.decoder=auto",
    "image_bits=3": "image_bits is 3, but images is not set; images=FILE says which images",
    "sample.use=complete": "sample.use is complete, but images is not set; images=FILE says which images",
    "sample.num_draws=4": "sample.num_draws is 4, but images is not set; images=FILE says which images",
    "sample.num_given=1": "sample.num_given is 1, but images is not set; images=FILE says which images",
    "seed=-1": "seed is -1; it must be at least 0 and below 2**63",
    f"seed={2**63}": f"seed is {2**63}; it must be at least 0 and below 2**63",
    "name=a/b": "name is 'a/b'; it becomes a folder: at most 100 letters, digits, '.', '_' and '-'",
    # fields against each other
    "data.resolutions=[15] data.image_size=15": "data.image_size is 15; scaling_factor, 2, must divide it (nearest: "
    "14)",
    "data.resolutions=[16] data.image_size=32": "data.resolutions is [16]; it must contain 32, the image_size",
    "bits=[3,9]": "bits is [3, 9]; each must be from 1 to 8",
    "bits=[8,3]": "bits is [8, 3]; it must rise from entry to entry, e.g. [3, 8]",
    "bits=[]": "bits is []; it must rise from entry to entry, e.g. [3, 8]",
    "bits=[3]": "bits is [3]; depth_upscale needs at least two entries, e.g. [3, 8]",
    "stages=[size_upscale]": "bits is [3, 8]; without depth_upscale in stages it has one entry, e.g. [8]",
    "stages=[size_upscal]": "stages: unknown stage 'size_upscal'; nearest: size_upscale",
    "stages=[depth_upscale]": "stages is [depth_upscale]; allowed: [baseline], [baseline, depth_upscale], "
    "[size_upscale], [first_slice, size_upscale], [size_upscale, depth_upscale], [first_slice, size_upscale, "
    "depth_upscale]",
    "stages=[baseline,depth_upscale]": "scaling_factor is 2; the baseline models the image whole: scaling_factor=1",
    "scaling_factor=1": "scaling_factor is 1; slices need at least 2 (or baseline in stages)",
    "train.batch_size=8 resources.num_workers=3": "train.batch_size is 8; resources.num_workers, 3, must divide it",
    "data.root=": "data.root is empty; it needs a value, or null where that is allowed",
    "resources.num_workers=2 per_stage.first_slice.train.batch_size=9": "train.batch_size is 9; "
    "resources.num_workers, 2, must divide it (stage first_slice)",
}


@pytest.mark.parametrize(("overrides", "message"), MISTAKES.items(), ids=MISTAKES)
def test_mistake_on_the_command_line_is_one_line_with_its_place(overrides: str, message: str) -> None:
    assert error_of("debug", *overrides.split()) == f"{message} (on the command line: {overrides.split()[-1]})"


CHOICES = {
    "data.source": SOURCES,  # data_prep tests its other choices
    "model.decoder.recipe": RECIPES,
    "model.embedder.recipe": RECIPES,
    "train.optimizer": OPTIMIZERS,
    "train.schedule": SCHEDULES,
    "train.slices": SLICES,
    "train.precision": PRECISIONS,
    "sample.precision": PRECISIONS,
    "sample.decoder": DECODERS,
    "sample.use": USES,
}


@pytest.mark.parametrize(("key", "allowed"), CHOICES.items(), ids=CHOICES)
def test_a_setting_with_few_choices_names_them_all(key: str, allowed: tuple[str, ...]) -> None:
    """However close the value is to one of them: names of files, keys, nodes and stages alone get the nearest."""
    wrong = allowed[0][:-1]
    message = f"{key} is '{wrong}'; it must be one of {', '.join(allowed)}"
    assert error_of("debug", f"{key}={wrong}") == f"{message} (on the command line: {key}={wrong})"


IN_A_FILE = {
    ("num_steps: 12", "num_step: 12"): "unknown key train.num_step; nearest: train.num_steps",
    ("  image_size: 16\n", ""): "data.image_size is not set",
    ("train:", "per_stage:\n  first_slice:\ntrain:"): "per_stage.first_slice is a section, not a value; set "
    "per_stage.first_slice.KEY, with KEY one of model, train",
    (
        "train:",
        "data.root: /photos\ntrain:",
    ): "unknown key data.root; sections of a file are nested: data: {root: ...",
    ("data:", "name: ${nothing}\ndata:"): "name: Interpolation key 'nothing' not found",
}


def test_mistake_in_a_file_names_the_file_and_no_override(tmp_path: Path) -> None:
    for change, message in IN_A_FILE.items():
        file = written(tmp_path, change)
        assert error_of(file, "train.momentum=0.8") == f"{message} (in {file})"


def test_unreadable_files(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    for text in ("a: [1", "a: 1\na: 2", "- 1\n- 2", "name: ${nothing}\n", "\x00"):
        file.write_text(text)
        assert str(file) in error_of(str(file))
    assert "does not exist" in error_of(str(tmp_path / "other.yaml"))
    assert "is a folder; valid: " in error_of(str(tmp_path))
    (tmp_path / "config.yaml").write_text("")
    assert error_of(f"{tmp_path}/") == f"config file {tmp_path}/ is a folder; nearest: {tmp_path}/config.yaml"


def test_unknown_config() -> None:
    assert error_of("imagent64") == "unknown config 'imagent64'; nearest: imagenet64"
    assert error_of("zzz") == f"unknown config 'zzz'; valid: {', '.join(loading.preset_names())}"


@pytest.mark.parametrize("override", ["train.num_steps", "=3", "a..b=3", "a-b=3", ".a=3", "bits[0]=3"])
def test_override_that_is_none(override: str) -> None:
    assert error_of("debug", override) == f"cannot read {override!r} on the command line: it must be key.sub=value"


def test_override_that_is_a_config() -> None:
    assert error_of("debug", "demo").endswith("it must be key.sub=value; a config is chosen by --config demo")


def test_override_whose_value_is_no_yaml() -> None:
    assert error_of("debug", "bits=[3").startswith("cannot read the value of 'bits=[3' on the command line: ")
    for value in ("010", "1:30"):  # 8 and 90 in YAML 1.1
        where = f"cannot read the value of 'train.num_steps={value}' on the command line: "
        assert error_of("debug", f"train.num_steps={value}").startswith(where)


# ---- storage --------------------------------------------------------------------------------------------------------


def test_storage_by_default_and_by_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve_storage(load("debug")) == str(ROOT / "runs")
    assert resolve_storage(load("debug", ["storage=here"])) == str(tmp_path / "here")
    assert resolve_storage(load("debug", ["storage=~/there"])) == str(Path.home() / "there")
    assert resolve_storage(load("debug", ["storage=s3://bucket/runs/"])) == "s3://bucket/runs"
    assert error_of("debug", "storage=s3://").startswith("storage is 's3://'; it names no bucket or folder (")


def test_storage_inside_a_ray_job_outlives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    assert resolve_storage(load("debug")) == str(Path.home() / "spn_runs")
    monkeypatch.setenv("SPN_STORAGE", "/mnt/spn")
    assert resolve_storage(load("debug")) == "/mnt/spn"
    assert resolve_storage(load("debug", ["storage=gs://bucket/runs"])) == "gs://bucket/runs"
    rule = "inside a Ray job it must be an absolute path or a URI such as s3://..."
    assert error_of("debug", "storage=runs") == f"storage is 'runs'; {rule} (on the command line: storage=runs)"
    monkeypatch.setenv("SPN_STORAGE", "runs")
    assert error_of("debug").startswith(f"$SPN_STORAGE is 'runs'; {rule}")


def test_a_tag_that_would_run_code_makes_a_config_unreadable(tmp_path: Path) -> None:
    tagged = f"!!python/object/apply:os.mkdir ['{tmp_path}/mark']"
    (tmp_path / "own.yaml").write_text(f"name: {tagged}\n")
    for file, settings in ((str(tmp_path / "own.yaml"), []), ("debug", [f"seed={tagged}"])):
        with pytest.raises(UserError, match="cannot read"):
            load(file, settings)
    assert not (tmp_path / "mark").exists()
