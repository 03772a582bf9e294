"""Configs: presets load, layers override each other in order, and every mistake is one line that names its place.

python -m pytest tests/pipelines/test_config.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from data_prep.config import CROPS, PROFILES, SOURCES, SPLIT_RULES
from data_prep.files import UserError
from data_prep.plan import COUNTS, check_id
from pipelines import loading as configs
from pipelines.config import (
    USES,
    stage_model_config,
    stage_names,
    stage_temperature,
    stage_train_config,
    validate,
)
from pipelines.loading import load, outdone, resolve_storage, to_yaml
from pipelines.pipeline import nodes
from spn import config
from spn.config import RECIPES

FULL_CHAIN = ["first_slice", "size_upscale", "depth_upscale"]


@pytest.fixture(autouse=True)
def outside_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_JOB_CONFIG_JSON_ENV_VAR", raising=False)
    monkeypatch.delenv("SPN_STORAGE", raising=False)


def error_of(name: str, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load(name, overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("name", configs.preset_names())
def test_preset_loads_and_keeps_its_name(name: str) -> None:
    assert load(name).name == name


def test_presets_of_the_paper_are_there() -> None:
    table_4 = {"imagenet32", "imagenet64", "imagenet128", "imagenet256", "celebahq256"}
    ours = {"cifar10", "cifar10_modern", "imagenet64_modern", "faces64", "demo", "debug"}
    assert table_4 | ours == set(configs.preset_names())


@pytest.mark.parametrize("name", ["imagenet32", "imagenet64", "imagenet128", "imagenet256", "celebahq256"])
def test_presets_of_the_paper_have_its_slices_and_optimiser(name: str) -> None:
    config = load(name)
    assert config.data.image_size == 32 * config.scaling_factor  # slices are always 32 x 32
    train = stage_train_config(config, stage_names(config)[-1])
    assert (train.optimizer, train.momentum, train.decay, train.epsilon) == ("rmsprop", 0.9, 0.95, 1e-8)
    assert (train.polyak_decay, train.polyak_warmup) == (0.9999, False)


@pytest.mark.parametrize(
    ("name", "dataset", "source"),
    [
        ("imagenet32", "imagenet_oord", "imagenet_oord"),
        ("imagenet64", "imagenet_oord", "imagenet_oord"),
        ("imagenet128", "imagenet_area", "auto"),
        ("imagenet256", "imagenet_area", "auto"),
        ("celebahq256", "celebahq", "celebahq"),
        ("cifar10", "cifar10", "cifar10"),
        ("cifar10_modern", "cifar10", "cifar10"),
        ("imagenet64_modern", "imagenet_oord", "imagenet_oord"),
    ],
)
def test_presets_name_the_data_set_that_their_source_makes(name: str, dataset: str, source: str) -> None:
    data = load(name).data
    assert (data.dataset, data.source) == (dataset, source) and dataset in COUNTS
    assert data.num_valid_photos > 0 and data.num_test_photos == 0  # the sources have test splits of their own
    if source != "auto":
        check_id(data, source)


@pytest.mark.parametrize(
    ("name", "rate", "batch_size"),
    [
        ("imagenet32", 1e-4, 1024),
        ("imagenet64", 1e-4, 2048),
        ("imagenet128", 1e-5, 2048),
        ("imagenet256", 1e-5, 2048),
        ("celebahq256", 5e-5, 256),
    ],
)
def test_rates_and_batches_of_table_4(name: str, rate: float, batch_size: int) -> None:
    train = load(name).train
    assert (train.learning_rate, train.batch_size) == (rate, batch_size)
    if rate == 1e-4:
        assert (train.lr_boundaries, train.lr_values) == ([50_000, 100_000], [3e-5, 1e-5])


# ---- the demo is the paper's pipeline made small --------------------------------------------------------------------

DEMO_MAY_CHANGE = {
    "name",
    *(f"data.{key}" for key in ("dataset", "root", "crop", "tile_size", "tile_stride", "num_valid_photos")),
    *(f"data.{key}" for key in ("num_test_photos", "rows_per_shard", "row_group_rows", "source", "resolutions")),
    *(f"model.decoder.{key}" for key in ("num_layers", "conv_channels", "residual_channels", "num_attn_layers")),
    *(f"model.decoder.{key}" for key in ("num_attn_heads", "attn_head_dim", "num_memory_rows")),
    *(f"model.embedder.{key}" for key in ("num_conv_layers", "conv_channels", "residual_channels", "num_attn_layers")),
    *(f"model.embedder.{key}" for key in ("num_attn_heads", "attn_head_dim", "num_memory_rows")),
    *(f"train.{key}" for key in ("num_steps", "batch_size", "micro_batch_size", "polyak_warmup")),
    *(f"train.{key}" for key in ("optimizer", "learning_rate", "schedule", "lr_boundaries", "lr_values")),
    *(f"train.{key}" for key in ("warmup_steps", "weight_decay", "grad_clip")),
    *(f"train.{key}" for key in ("eval_every_steps", "num_valid_images", "checkpoint_every_steps", "log_every_steps")),
    "train.precision",
    "train.compile",
    "per_stage",  # imagenet64 has none
    "evaluate.batch_size",
    "sample.num_images",
    "sample.batch_size",
    *(f"per_stage.{stage}.train.num_steps" for stage in ("first_slice", "depth_upscale")),
    *(f"resources.{key}" for key in ("num_workers", "use_gpu", "cpus_per_worker", "num_cpus")),
}


def flat(node: dict, prefix: str = "") -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in node.items():
        path = f"{prefix}{key}"
        found |= flat(value, f"{path}.") if isinstance(value, dict) and value else {path: value}
    return found


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


def test_demo_differs_from_imagenet64_only_where_it_may_and_says_so() -> None:
    demo, paper = (flat(yaml.safe_load(to_yaml(load(name)))) for name in ("demo", "imagenet64"))
    changed = {key for key in demo | paper if demo.get(key) != paper.get(key)}
    assert changed - DEMO_MAY_CHANGE == set()
    lines = lines_by_key(configs.PRESETS / "demo.yaml")
    for key in sorted(changed):
        silent = ("train.eval_", "train.num_valid", "train.checkpoint_", "train.log_", "train.micro_", "train.lr_")
        silent += ("train.precision", "train.compile")
        if key.startswith(("model.", "train.")) and not key.startswith(silent):
            value = "null" if paper[key] is None else str(paper[key]).lower()
            stated = lines[key].partition("# paper: ")[2].split(" ")[0].replace("_", "")
            assert stated and yaml.safe_load(f"v: {stated}") is not None, f"{key} lacks its `# paper:` mark"
            assert stated == value or float(stated) == float(value), f"{key}: marked {stated}, imagenet64 has {value}"


# ---- layers ---------------------------------------------------------------------------------------------------------


def test_command_line_overrides_file_overrides_defaults(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text((configs.PRESETS / "debug.yaml").read_text().replace("num_steps: 12", "num_steps: 34"))
    assert load(str(file)).train.num_steps == 34
    assert load(str(file), ["train.num_steps=56"]).train.num_steps == 56
    assert load(str(file), ["train.num_steps=56", "train.num_steps=78"]).train.num_steps == 78
    assert load(str(file)).train.momentum == 0.9


def test_exponent_without_a_dot_is_a_number(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text((configs.PRESETS / "debug.yaml").read_text().replace("5e-3", "3e-4"))
    assert load(str(file)).train.learning_rate == 3e-4
    assert load("debug", ["train.learning_rate=2e-3"]).train.learning_rate == 2e-3
    overrides = ["per_stage.first_slice.train.learning_rate=1e-3"]
    assert stage_train_config(load("debug", overrides), "first_slice").learning_rate == 1e-3


def test_a_printed_config_loads_to_the_same_config(tmp_path: Path) -> None:
    for name, overrides in (("imagenet128", []), ("debug", ["bits=[1,3,8]", "sample.temperature.depth_upscale_3=0.9"])):
        config = load(name, overrides)
        file = tmp_path / "config.yaml"
        file.write_text(to_yaml(config))
        assert load(str(file)) == config


def test_a_value_may_hold_an_equals_sign_and_a_comma() -> None:
    assert load("debug", ["data.root=s3://bucket/a=1,b"]).data.root == "s3://bucket/a=1,b"


# ---- stages ---------------------------------------------------------------------------------------------------------


def test_stage_names_follow_stages_and_bits() -> None:
    assert stage_names(load("debug")) == FULL_CHAIN
    assert stage_names(load("debug", ["bits=[1,3,8]"])) == [*FULL_CHAIN[:2], "depth_upscale_3", "depth_upscale_8"]
    assert stage_names(load("debug", ["stages=[depth_upscale,size_upscale]"])) == FULL_CHAIN[1:]  # chain order
    assert stage_names(load("imagenet32")) == ["baseline"]


def test_bits_of_each_stage() -> None:
    config = load("debug", ["bits=[1,3,8]"])
    bits = {name: stage_model_config(config, name) for name in stage_names(config)}
    assert {name: (c.num_given_bits, c.num_bits) for name, c in bits.items()} == {
        "first_slice": (0, 1),
        "size_upscale": (0, 1),
        "depth_upscale_3": (1, 2),
        "depth_upscale_8": (3, 5),
    }
    assert bits["first_slice"].embedder is None and bits["depth_upscale_8"].embedder is not None
    depth = stage_model_config(load("debug"), "depth_upscale")
    assert (depth.num_given_bits, depth.num_bits, depth.scaling_factor, depth.image_size) == (3, 5, 2, 16)


def test_per_stage_settings_reach_only_their_stage() -> None:
    config = load("imagenet128", ["per_stage.depth_upscale.train.learning_rate=5e-6"])
    channels = [stage_model_config(config, name).decoder.conv_channels for name in stage_names(config)]
    assert channels == [256, 384, 384]
    assert [stage_train_config(config, name).learning_rate for name in stage_names(config)] == [1e-5, 1e-5, 5e-6]


def test_per_stage_of_depth_upscale_reaches_every_depth_and_a_single_one_wins() -> None:
    overrides = ["per_stage.depth_upscale.train.num_steps=5", "per_stage.depth_upscale_8.train.num_steps=6"]
    config = load("debug", ["bits=[1,3,8]", *overrides])
    assert [stage_train_config(config, name).num_steps for name in stage_names(config)] == [12, 12, 5, 6]


def test_an_override_that_per_stage_outdoes_is_named() -> None:
    """Once for each; nothing where it reaches all stages, or where the stage's own value is set beside it."""

    def lines(*overrides: str) -> list[str]:
        return outdone(load("demo", overrides), overrides)

    stays = "train.num_steps is for stages that have none of their own; these stay: "
    first, depth = (f"per_stage.{stage}.train.num_steps" for stage in ("first_slice", "depth_upscale"))
    assert lines("train.num_steps=500", "seed=1") == [f"{stays}{first}=200, {depth}=150"]
    assert lines("train.num_steps=500", f"{first}=500") == [f"{stays}{depth}=150"]
    assert lines("train.num_steps=500", f"{first}=500", f"{depth}=500") == lines("train.learning_rate=1e-3") == []


def test_per_stage_values_are_typed() -> None:
    config = load("debug", ["per_stage.first_slice.train.learning_rate=1"])
    assert isinstance(stage_train_config(config, "first_slice").learning_rate, float)


def test_settings_of_a_preset_fall_away_with_the_stage() -> None:
    config = load("imagenet128", ["stages=[size_upscale]", "bits=[8]"])
    assert config.per_stage == {}
    assert "no stage 'first_slice'" in error_of(
        "imagenet128", "stages=[size_upscale]", "bits=[8]", "per_stage.first_slice.train.num_steps=3"
    )


def test_resources_of_one_node_are_its_own_and_no_part_of_what_it_computes() -> None:
    changes = ["train_size_upscale.num_workers=2", "train_size_upscale.cpus_per_worker=3", "evaluate.use_gpu=true"]
    changes += ["sample.cpus_per_worker=4", "sample.num_workers=3", "prepare_data.max_failures=9"]
    plain = {node.name: node for node in nodes(load("debug"))}
    changed = {node.name: node for node in nodes(load("debug", [f"resources.per_node.{c}" for c in changes]))}
    assert {name: node.config for name, node in plain.items()} == {name: node.config for name, node in changed.items()}
    cost = {name: node.total_cost for name, node in changed.items()}
    assert cost["train_first_slice"] == {"CPU": 0.75} and cost["train_size_upscale"] == {"CPU": 6.25}
    assert cost["evaluate"] == {"CPU": 1, "GPU": 1} and cost["sample"] == {"CPU": 12}
    assert (changed["sample"].num_workers, changed["sample"].worker_cost) == (3, {"CPU": 4, "GPU": 0}), "one must fit"
    assert changed["sample"].options["resources"].cpus_per_worker == 4
    assert changed["evaluate"].options["device"] == "cuda" and plain["evaluate"].options["device"] == "cpu"
    assert changed["sample"].options["resources"].device == "cpu", "a GPU is taken only where one was asked for"
    assert [changed[name].max_failures for name in ("prepare_data", "train_size_upscale")] == [9, 3]
    trained = [changed[name].options["resources"] for name in ("train_first_slice", "train_size_upscale")]
    assert [resources.num_workers for resources in trained] == [1, 2]


def test_more_unusable_photos_allowed_make_no_other_data_set() -> None:
    """A build that gave up goes on with its finished shards."""
    made = [nodes(load("debug", [f"data.max_quarantine_fraction={share}"]))[0] for share in (0.1, 0.2)]
    assert made[0].name == "prepare_data" and made[0].config == made[1].config
    assert [node.options["max_quarantine_fraction"] for node in made] == [0.1, 0.2]


def test_precision_of_samples_counts_where_it_has_an_effect() -> None:
    """On a CPU nothing is drawn anew, nor shown otherwise, for a setting that it does not heed."""

    def configs_of(*settings: str) -> dict[str, dict[str, Any]]:
        found = {node.name: node.config for node in nodes(load("debug", settings))}
        return {name: found[name] for name in ("sample", "report")}

    on_cpu = [configs_of(f"sample.precision={precision}") for precision in ("bfloat16", "float32")]
    assert on_cpu[0] == on_cpu[1] and on_cpu[0]["sample"]["precision"] == "float32"
    gpu = "resources.per_node.sample.use_gpu=true"
    on_gpu = [configs_of(gpu, f"sample.precision={precision}") for precision in ("bfloat16", "float32")]
    assert [each["sample"]["precision"] for each in on_gpu] == ["bfloat16", "float32"]
    assert all(on_gpu[0][name] != on_gpu[1][name] for name in on_gpu[0])
    assert on_gpu[1] == on_cpu[1]


def test_resources_of_a_node_come_back_from_yaml_and_fall_away_with_its_stage(tmp_path: Path) -> None:
    config = load("debug", ["resources.per_node.train_depth_upscale.num_workers=2"])
    file = tmp_path / "own.yaml"
    file.write_text(configs.to_yaml(config))
    assert load(str(file)) == config
    smaller = load(str(file), ["stages=[first_slice,size_upscale]", "bits=[8]"])
    assert smaller.resources.per_node == {}


def test_temperature_by_stage() -> None:
    config = load("debug", ["sample.temperature.first_slice=0.99"])
    assert [stage_temperature(config, name) for name in stage_names(config)] == [0.99, 1.0, 1.0]


@pytest.mark.parametrize(
    "overrides",
    [
        ("stages=[baseline]", "bits=[8]", "scaling_factor=1"),
        ("stages=[size_upscale]", "bits=[5]"),
        ("stages=[first_slice,size_upscale]", "bits=[8]"),
        ("stages=[size_upscale,depth_upscale]",),
        ("stages=[size_upscale,depth_upscale]", "bits=[2,5]"),
        (),
    ],
)
def test_the_systems_of_the_paper_are_allowed(overrides: tuple[str, ...]) -> None:
    validate(load("debug", overrides))


# ---- mistakes, one line each ----------------------------------------------------------------------------------------

ONE_STAGE = ("stages=[size_upscale]", "bits=[8]")
MISTAKES = {
    # what is not there
    ("train.num_step=5",): "unknown key train.num_step; nearest: train.num_steps",
    ("tran.num_steps=5",): "unknown key tran; nearest: train",
    ("scaling_factor=2", "image_size=16"): "unknown key image_size; nearest: data.image_size",
    ("lr=1",): "unknown key lr; valid: name, scaling_factor, bits, stages, data, seed, images, image_bits, "
    "storage, model, train, per_stage, evaluate, sample, resources, tracking",
    ("model.decoder.layers=3",): "unknown key model.decoder.layers; nearest: model.decoder.num_layers",
    (
        "per_stage.first_slice.train.num_step=5",
    ): "unknown key per_stage.first_slice.train.num_step; nearest: per_stage.first_slice.train.num_steps",
    (
        "per_stage.first_slice.trains.num_steps=5",
    ): "unknown key per_stage.first_slice.trains; nearest: per_stage.first_slice.train",
    (
        "per_stage.first_slic.train.num_steps=5",
    ): "per_stage: the config has no stage 'first_slic'; nearest: first_slice",
    ("per_stage.baseline.train.num_steps=5",): "per_stage: the config has no stage 'baseline'; valid: first_slice, "
    "size_upscale, depth_upscale",
    (
        "sample.temperature.depth_upscale_8=0.9",
    ): "sample.temperature: the config has no stage 'depth_upscale_8'; nearest: depth_upscale",
    (
        "resources.per_node.train_size_upscal.num_workers=2",
    ): "resources.per_node: the config has no node 'train_size_upscal'; nearest: train_size_upscale",
    (
        "resources.per_node.evaluate.num_worker=2",
    ): "unknown key resources.per_node.evaluate.num_worker; nearest: resources.per_node.evaluate.num_workers",
    (
        "resources.per_node.evaluate.num_workers=2",
    ): "resources.per_node.evaluate.num_workers has no effect: evaluate has no workers; valid: cpus_per_worker, "
    "max_failures, retry_wait_sec, use_gpu, gpus_per_worker",
    (
        "resources.per_node.sample.num_to_keep=2",
    ): "resources.per_node.sample.num_to_keep has no effect: sample keeps no checkpoints; valid: num_workers, "
    "cpus_per_worker, use_gpu, gpus_per_worker, max_failures, retry_wait_sec",
    (
        "resources.per_node.report.use_gpu=true",
    ): "resources.per_node.report.use_gpu has no effect: report uses no GPU; valid: cpus_per_worker, max_failures, "
    "retry_wait_sec",
    ("resources.per_node=3",): "resources.per_node must be a mapping; set resources.per_node.NODE",
    (
        "resources.per_node.report.retry_wait_sec=-1",
    ): "resources.per_node.report.retry_wait_sec is -1.0; it must be at least 0",
    (
        "resources.per_node.train_size_upscale.num_workers=x",
    ): "resources.per_node.train_size_upscale.num_workers is 'x'; it must be an integer",
    (
        "resources.per_node.train_size_upscale.num_workers=3",
    ): "train.batch_size is 8; resources.per_node.train_size_upscale.num_workers, 3, must divide it",
    # types
    ("train.num_steps=abc",): "train.num_steps is 'abc'; it must be an integer",
    ("train.num_steps=1.5",): "train.num_steps is '1.5'; it must be an integer",
    ("train.num_steps=null",): "train.num_steps is null; it must be an integer",
    ("train.learning_rate=fast",): "train.learning_rate is 'fast'; it must be a number",
    ("train.horizontal_flip=maybe",): "train.horizontal_flip is 'maybe'; it must be true or false",
    ("train.lr_values=[1e-3,x]",): "train.lr_values[1] is 'x'; it must be a number",
    ("train.num_steps={a: 1}",): "train.num_steps is \"{'a': 1}\"; it must be an integer",
    ("stages=size_upscale",): "stages must be a list, e.g. stages=[...]",
    ("bits=[3,[8]]",): "bits must be a flat list",
    ("resources=3",): "resources is a section, not a value; set resources.KEY, with KEY one of num_workers, "
    "cpus_per_worker, use_gpu, gpus_per_worker, num_to_keep, max_failures, retry_wait_sec, num_cpus, "
    "num_gpus, per_node",
    (
        "per_stage.first_slice=3",
    ): "per_stage.first_slice is a section, not a value; set per_stage.first_slice.KEY, with KEY one of model, train",
    ("per_stage=3",): "per_stage must be a mapping; set per_stage.STAGE",
    ("per_stage.first_slice.train.num_steps=x",): "per_stage.first_slice.train.num_steps is 'x'; it must be an integer",
    # values of one field
    ("model.decoder.num_layers=0",): "model.decoder.num_layers is 0; it must be at least 1",
    (
        "per_stage.first_slice.model.decoder.num_layers=0",
    ): "per_stage.first_slice.model.decoder.num_layers is 0; it must be at least 1",
    ("evaluate.batch_size=0",): "evaluate.batch_size is 0; it must be at least 1",
    ("sample.num_images=0",): "sample.num_images is 0; it must be at least 1",
    ("sample.seed=-1",): "sample.seed is -1; it must be at least 0",
    ("sample.temperature.first_slice=0",): "sample.temperature.first_slice is 0.0; it must be above 0",
    ("sample.temperature.first_slice=nan",): "sample.temperature.first_slice is nan; it must be above 0",
    ("resources.num_workers=0",): "resources.num_workers is 0; it must be at least 1",
    ("resources.cpus_per_worker=0",): "resources.cpus_per_worker is 0.0; it must be above 0",
    ("data.crop=tile",): "data.crop is 'tile'; it must be one of center, squash, random, tiles",
    ("data.bits=[3]",): "data.bits is [3]; it must contain 8",
    ("seed=-1",): "seed is -1; it must be at least 0",
    ("name=a/b",): "name is 'a/b'; it becomes a folder: letters, digits, '.', '_' and '-' only",
    # fields against each other
    (
        "data.resolutions=[15]",
        "data.image_size=15",
    ): "data.image_size is 15; scaling_factor, 2, must divide it (nearest: 14)",
    ("data.image_size=32",): "data.resolutions is [16]; it must contain 32",
    ("bits=[3,9]",): "bits is [3, 9]; each must be from 1 to 8",
    ("bits=[0,8]",): "bits is [0, 8]; each must be from 1 to 8",
    ("bits=[8,3]",): "bits is [8, 3]; it must rise from entry to entry, e.g. [3, 8]",
    ("bits=[3,3]",): "bits is [3, 3]; it must rise from entry to entry, e.g. [3, 8]",
    ("bits=[]",): "bits is []; it must rise from entry to entry, e.g. [3, 8]",
    ("bits=[3]",): "bits is [3]; depth_upscale needs at least two entries, e.g. [3, 8]",
    ("stages=[size_upscale]",): "bits is [3, 8]; without depth_upscale in stages it has one entry, e.g. [8]",
    ("stages=[size_upscal]",): "stages: unknown stage 'size_upscal'; nearest: size_upscale",
    ("stages=[depth_upscale]",): "stages is [depth_upscale]; allowed: [baseline], [size_upscale], "
    "[first_slice, size_upscale], [size_upscale, depth_upscale], [first_slice, size_upscale, depth_upscale]",
    ("stages=[baseline,depth_upscale]",): "stages is [baseline, depth_upscale]; allowed: [baseline], [size_upscale], "
    "[first_slice, size_upscale], [size_upscale, depth_upscale], [first_slice, size_upscale, depth_upscale]",
    (
        "bits=[8]",
        "stages=[baseline]",
    ): "scaling_factor is 2; the baseline models the image whole: scaling_factor=1",
    ("scaling_factor=1",): "scaling_factor is 1; slices need at least 2 (or stages=[baseline])",
    (
        "train.batch_size=8",
        "resources.num_workers=3",
    ): "train.batch_size is 8; resources.num_workers, 3, must divide it",
    ("train.optimizer=rmsprob",): "train.optimizer is 'rmsprob'; it must be one of rmsprop, adamw, muon",
    (
        "resources.num_workers=2",
        "per_stage.first_slice.train.batch_size=9",
    ): "train.batch_size is 9; resources.num_workers, 2, must divide it (stage first_slice)",
}


@pytest.mark.parametrize(("overrides", "message"), MISTAKES.items(), ids=[" ".join(key) for key in MISTAKES])
def test_mistake_on_the_command_line_is_one_line_with_its_place(overrides: tuple[str, ...], message: str) -> None:
    assert error_of("debug", *overrides) == f"{message} (on the command line: {overrides[-1]})"


CHOICES = {
    "data.source": SOURCES,
    "data.crop": CROPS,
    "data.profile": tuple(PROFILES),
    "data.split": SPLIT_RULES,
    "model.decoder.recipe": RECIPES,
    "model.embedder.recipe": RECIPES,
    "train.optimizer": config.OPTIMIZERS,
    "train.schedule": config.SCHEDULES,
    "train.slices": config.SLICES,
    "train.precision": config.PRECISIONS,
    "sample.precision": config.PRECISIONS,
    "sample.use": USES,
}


@pytest.mark.parametrize(("key", "allowed"), CHOICES.items(), ids=CHOICES)
def test_a_setting_with_few_choices_names_them_all(key: str, allowed: tuple[str, ...]) -> None:
    """However close the value is to one of them: names of files, keys, nodes and stages alone get the nearest."""
    wrong = allowed[0][:-1]
    message = f"{key} is '{wrong}'; it must be one of {', '.join(allowed)}"
    assert error_of("debug", f"{key}={wrong}") == f"{message} (on the command line: {key}={wrong})"


def test_mistake_in_a_file_names_the_file(tmp_path: Path) -> None:
    good = (configs.PRESETS / "debug.yaml").read_text()
    changes = {
        ("num_steps: 12", "num_step: 12"): "unknown key train.num_step; nearest: train.num_steps",
        ("num_steps: 12", "num_steps: twelve"): "train.num_steps is 'twelve'; it must be an integer",
        ("batch_size: 8", "batch_size: 0"): None,
        ("bits: [3, 8]\nstages", "bits: [8, 3]\nstages"): "bits is [8, 3]; it must rise from entry to entry, "
        "e.g. [3, 8]",
        ("name: debug\n", ""): "name is not set",
        ("  image_size: 16\n", ""): "data.image_size is not set",
        ("train:", "per_stage:\n  baseline:\n    train:\n      num_steps: 3\ntrain:"): "per_stage: the config has no "
        "stage 'baseline'; valid: first_slice, size_upscale, depth_upscale",
        ("train:", "per_stage:\n  first_slice:\n    model: {layers: 3}\ntrain:"): "unknown key "
        "per_stage.first_slice.model.layers; valid: decoder, embedder",
        ("train:", "per_stage:\n  first_slice:\ntrain:"): "per_stage.first_slice is a section, not a value; set "
        "per_stage.first_slice.KEY, with KEY one of model, train",
    }
    for (old, new), message in changes.items():
        file = tmp_path / "mine.yaml"
        assert old in good
        file.write_text(good.replace(old, new, 1))
        said = error_of(str(file))
        assert said.endswith(f"(in {file})")
        assert message is None or said == f"{message} (in {file})"


def test_unrelated_override_is_not_blamed_for_the_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text((configs.PRESETS / "debug.yaml").read_text().replace("num_layers: 2", "num_layers: 0"))
    assert error_of(str(file), "model.decoder.conv_channels=6").endswith(f"(in {file})")


def test_unreadable_files(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    for text in ("a: [1", "a: 1\na: 2", "- 1\n- 2", "name: ${nothing}\n", "\x00"):
        file.write_text(text)
        assert str(file) in error_of(str(file))
    assert "does not exist" in error_of(str(tmp_path / "other.yaml"))
    assert "does not exist" in error_of(str(tmp_path))


def test_unknown_config() -> None:
    assert error_of("imagent64") == "unknown config 'imagent64'; nearest: imagenet64"
    assert error_of("zzz") == f"unknown config 'zzz'; valid: {', '.join(configs.preset_names())}"


@pytest.mark.parametrize("override", ["train.num_steps", "=3", "a..b=3", "a-b=3", ".a=3", "bits[0]=3"])
def test_override_that_is_none(override: str) -> None:
    assert error_of("debug", override) == f"cannot read {override!r} on the command line: it must be key.sub=value"


def test_override_that_is_a_config() -> None:
    assert error_of("debug", "demo").endswith("it must be key.sub=value; a config is chosen by --config demo")


def test_override_whose_value_is_no_yaml() -> None:
    assert error_of("debug", "bits=[3").startswith("cannot read the value of 'bits=[3' on the command line: ")


# ---- storage --------------------------------------------------------------------------------------------------------


def test_storage_by_default_and_by_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve_storage(load("debug")) == str(configs.PROJECT_ROOT / "runs")
    assert resolve_storage(load("debug", ["storage=here"])) == str(tmp_path / "here")
    assert resolve_storage(load("debug", ["storage=~/there"])) == str(Path.home() / "there")
    assert resolve_storage(load("debug", ["storage=s3://bucket/runs/"])) == "s3://bucket/runs"


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
