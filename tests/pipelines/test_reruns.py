"""What a change of the project's code reruns in a finished run: tried on a copy of the sources, without training.

python -m pytest tests/pipelines/test_reruns.py
"""

from __future__ import annotations

import ast
import dataclasses
import shutil
from pathlib import Path

import pytest
from toy.diamond import carry_out, seal

from data_prep.config import SPLITS
from data_prep.files import Store, UserError, open_store
from pipelines import pipeline
from pipelines.cluster import ROOT
from pipelines.dag import fingerprint
from pipelines.dag.fingerprint import canonical
from pipelines.dag.node import Node
from pipelines.dag.plan import Plan, plan
from pipelines.loading import load
from pipelines.pipeline import NOT_SEMANTIC_MODULES, SOURCES

TRAINS = ["train_first_slice", "train_size_upscale", "train_depth_upscale"]
ALL = ["prepare_data", *TRAINS, "evaluate", "sample", "report"]
WEIGHTS = {"checkpoint/config.json": "{}", "checkpoint/ema.safetensors": "1", "history.json": "[]"}


class Project:
    """A copy of the sources, and a finished run that was made with it."""

    def __init__(self, folder: Path, store: Store) -> None:
        self.sources, self.store = dataclasses.replace(SOURCES, root=folder), store
        for package in SOURCES.packages:
            for file in (ROOT / package).rglob("*.py"):
                copy = folder / file.relative_to(ROOT)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, copy)
        config = load("debug", [])
        self.nodes = pipeline.nodes(config)
        shards = {
            f"dataset/res={resolution}/bits={bits}/{split}-00000-of-00001.parquet": "pixels"
            for resolution in config.data.resolutions
            for bits in config.data.bits
            for split in SPLITS
        }
        self.files = {"prepare_data": {"dataset/manifest.json": "{}", **shards}, **dict.fromkeys(TRAINS, WEIGHTS)}
        assert seal(self.plan(), self.files) == ALL
        self.assert_whole()

    def plan(self, **options: list[str]) -> Plan:
        return plan(self.nodes, self.store, sources=self.sources, **options)

    def edit(self, file: str, old: str, new: str) -> None:
        path = self.sources.root / file
        text = path.read_text()
        assert old in text, f"{file} has no {old!r} any more: choose another text to change"
        path.write_text(text.replace(old, new))

    def assert_whole(self) -> None:
        assert {
            decision.node.name: decision.reason for decision in self.plan().decisions if decision.action != "skip"
        } == {}


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path / "project", open_store(tmp_path / "run"))


def test_what_decides_nothing_leaves_a_finished_run_whole(project: Project) -> None:
    project.edit("spn/gpu/flops.py", "H100", "H101")  # a new card
    project.edit("data_prep/files.py", "raise UserError(", "raise UserError('reworded: ' + ")
    project.edit("pipelines/dag/progress.py", " left", " to go")
    (project.sources.root / "data_prep/sources/new.py").write_text("def recognise(): ...\n")  # a new source of images
    project.edit("data_prep/sources/celebahq.py", "def ", "def _")  # the reader of another source
    project.assert_whole()


CHANGES = {
    "forward": ("spn/model.py", "def forward(", "def forward_(", [*TRAINS, "evaluate", "sample"]),
    "loss": ("spn/training.py", "def fit(", "def fit_(", TRAINS),
    "optimiser": ("spn/optimizers.py", "import torch", "import torch as t", TRAINS),
    "sampler": ("spn/sampling.py", "import torch", "import torch as t", ["sample"]),
    # Imported inside functions.
    "kernels of the sampler": ("spn/gpu/fused.py", "import torch", "import torch as t", ["sample"]),
    "products of the sampler": ("spn/gpu/sampling_kernels.py", "def _tanh(", "def _tanh_(", ["sample"]),
    "fast training": ("spn/gpu/training.py", "def speed_up(", "def speed_up_(", [*TRAINS, "evaluate", "sample"]),
    "resize": ("data_prep/resize.py", "def resize_area(", "def resize_area_(", ["prepare_data"]),
    "reader": ("data_prep/sources/folder.py", "def index(", "def index_(", ["prepare_data"]),
    "report": ("pipelines/nodes/report.py", "Learning curves", "Curves", ["report"]),
}


@pytest.mark.parametrize(("file", "old", "new", "reruns"), CHANGES.values(), ids=CHANGES)
def test_a_change_reruns_exactly_what_depends_on_it(
    project: Project, file: str, old: str, new: str, reruns: list[str]
) -> None:
    project.edit(file, old, new)
    made = project.plan()
    assert [d.node.name for d in made.decisions if d.action == "run"] == reruns
    assert made[reruns[0]].reason == f"code changed: {file.removesuffix('.py').replace('/', '.')}"
    assert seal(made, project.files) == reruns  # all made equal files, so nothing else had to run
    project.assert_whole()


def test_settings_keep_a_training_extend_it_or_say_why_it_begins_anew(project: Project) -> None:
    def trains(*settings: str) -> tuple[str, str]:
        project.nodes = pipeline.nodes(load("debug", [f"train.{setting}" for setting in settings]))
        (action,) = {project.plan()[name].action for name in TRAINS}
        return action, project.plan()[TRAINS[0]].reason

    steps = project.nodes[1].config.train.num_steps
    old = f"attempt {project.plan()[TRAINS[0]].success.attempt}"
    action, reason = trains("checkpoint_every_steps=24")
    assert (action, reason[: len(old)]) == ("keep", old) and "train.checkpoint_every_steps" in reason
    assert all(project.plan()[name].action == "skip" for name in ("evaluate", "sample"))
    change = f"config changed: train.num_steps {steps} -> "
    assert trains("num_steps=1000") == ("run", f"{change}1000; extends {old}")
    assert project.plan()[TRAINS[0]].extends is not None
    assert trains("num_steps=1")[1].startswith(f"{change}1; from the beginning, because a shorter training ")
    assert trains("batch_size=2")[1] == "config changed: train.batch_size 8 -> 2"
    carry_out(project.plan(only=TRAINS, keep=TRAINS))
    assert "extends" not in trains("batch_size=2", "num_steps=1000")[1], "what --keep took was not trained so"
    project.nodes = pipeline.nodes(load("debug", ["train.schedule=linear"]))
    seal(project.plan(), project.files)
    _, reason = trains("num_steps=1000", "schedule=linear")
    why = "because the rates of train.schedule=linear depend on train.num_steps"
    assert reason == f"{change}1000; from the beginning, {why}" and project.plan()[TRAINS[0]].extends is None


def test_a_finished_dataset_does_without_its_raw_images(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    def nodes(*overrides: str) -> list[Node]:
        return pipeline.nodes(load("debug", overrides), may_be_gone=True)

    def gone(*_: object) -> None:
        raise OSError("gone")

    monkeypatch.setattr(pipeline, "identify", gone)
    message = "data.root is None; it cannot be read: gone"

    project.nodes = nodes()
    assert {decision.action for decision in project.plan().decisions} == {"skip"}
    assert project.plan()["prepare_data"].reason.endswith(f"; {message}")
    for options in ({"rerun": ["prepare_data"]}, {"start_from": ["prepare_data"]}):
        with pytest.raises(UserError, match=f"^{message}$"):
            project.plan(**options)
    project.nodes = nodes("data.tile_size=32")
    with pytest.raises(UserError, match=f"^{message}$"):
        project.plan()


LOW, HIGH = ["train_first_slice", "train_size_upscale"], ["train_depth_upscale"]  # the bits that they read
READERS = {
    "": [],  # another listing of the photos, in manifest.json, with equal shards
    "bits=3/train": LOW,
    "bits=3/valid": LOW,
    "bits=3/test": [],
    "bits=8/train": [*HIGH, "evaluate"],
    "bits=8/valid": HIGH,
    "bits=8/test": ["evaluate"],
}


def test_a_node_reads_the_shards_of_its_own_splits_size_and_depth(project: Project) -> None:
    data = project.files["prepare_data"]
    for shard, readers in READERS.items():
        changed = {path: "other" if f"/{shard}-" in path else text for path, text in data.items()}
        changed["dataset/manifest.json"] = f"of other {shard}"
        assert len(set(changed.items()) - set(data.items())) == 1 + bool(shard)
        ran = seal(project.plan(rerun=["prepare_data"]), {**project.files, "prepare_data": changed})
        assert ran == ["prepare_data", *readers, "report"], shard


DECIDE_NOTHING = {  # an addition lets changed results be skipped, so it needs a reason that is more than convenience
    *("data_prep.files", "data_prep.lock", "data_prep.verify"),
    *("pipelines.cluster", "pipelines.config", "data_prep.ray_compat", "pipelines.tracking"),
    *("pipelines.dag.masking", "pipelines.dag.node", "pipelines.dag.progress", "pipelines.nodes.memory"),
    *("pipelines.nodes.registry", "pipelines.nodes.workers", "spn.gpu.flops", "spn.gpu.jacobi", "spn.decoding.jacobi"),
}


def test_weights_to_start_from_count_by_their_contents(tmp_path: Path) -> None:
    """A folder may move; other weights under the same path train again, and so does a place without any."""

    def checkpoint(name: str, weights: str) -> tuple[str, object]:
        for file in pipeline.CHECKPOINT:
            open_store(tmp_path / name).write_text(file, weights)
        return planned(name)

    def planned(name: str) -> tuple[str, object]:
        node = pipeline.nodes(load("debug", [f"train.init_from={tmp_path / name}"]))[1]
        return node.source, canonical(node.config)

    first, moved, other = checkpoint("a", "1"), checkpoint("b", "1"), checkpoint("a", "2")
    assert first == moved and len({first[0], other[0], planned("c")[0], planned("d")[0], ""}) == 5
    assert canonical(pipeline.nodes(load("debug"))[1].config) == first[1], "nothing else tells"


def test_relative_paths_are_those_of_the_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node's task may have another working directory."""
    (tmp_path / "photos").symlink_to(ROOT / "data_prep/demo_photos")
    monkeypatch.chdir(tmp_path)
    prepare, train, *_ = pipeline.nodes(load("debug", ["data.root=photos", "train.init_from=start"]))
    assert prepare.config.data.root == str(tmp_path / "photos") and prepare.config.listing_hash == prepare.source
    assert train.config.init_from == str(tmp_path / "start")


def test_code_that_counts_as_an_earlier_one_is_in_use() -> None:
    for module, (now, _) in fingerprint.SAME_RESULTS.items():
        file = fingerprint._source(module, root=ROOT)
        found = fingerprint.hash_of(ast.parse(file.read_text()))
        assert found == now, f"{module} was edited: if that changes no result, {found} is its hash now; else no entry"


def test_every_module_that_decides_nothing_exists_and_says_why() -> None:
    assert set(NOT_SEMANTIC_MODULES) == DECIDE_NOTHING
    for module, why in NOT_SEMANTIC_MODULES.items():
        assert (ROOT / f"{module.replace('.', '/')}.py").is_file(), f"{module} has moved: this list must follow"
        assert why
