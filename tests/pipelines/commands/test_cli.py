"""The command line: what it refuses (one line, exit code 2, nothing written), what it hands on, how it ends.

python -m pytest tests/pipelines/commands/test_cli.py
"""

from __future__ import annotations

import errno
import functools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from toy.diamond import carry_out, seal

from data_prep.files import UserError, open_store
from data_prep.lock import Lock
from data_prep.sources import BUILT_IN_PHOTOS
from pipelines import cli, cluster, pipeline, start
from pipelines.config import node_names, stage_names
from pipelines.dag.plan import plan
from pipelines.dag.run import NodeReport
from pipelines.loading import load, to_yaml
from pipelines.tracking import Ledger, RunHandle

ROOT = Path(__file__).parents[3]
NODES = ["prepare_data", "train_first_slice", "train_size_upscale", "train_depth_upscale", "evaluate", "sample"]
NODES += ["report"]
SCRIPTS = ("full_multidim", "prepare_data", "train_stage", "evaluate", "sample", "describe")

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def handed_on(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What `start` would have got."""
    seen: dict[str, Any] = {}

    def record(config: Any, **options: Any) -> int:
        seen.update(options, config=config)
        return 0

    monkeypatch.setattr(cli, "start", record)
    return seen


# ---- refused -------------------------------------------------------------------------------------------------------

NO_NODE = "this configuration has no such node"
REFUSED = {
    ("--dryrun",): "unknown option --dryrun; nearest: --dry-run",
    ("--onli=evaluate",): "unknown option --onli=evaluate; nearest: --only",
    ("--only",): "argument --only: expected one argument (see full_multidim.py --help)",
    ("--only", "sample, evalute"): f"--only evalute: {NO_NODE}; nearest: evaluate",
    ("--rerun", "zzz"): f"--rerun zzz: {NO_NODE}; valid: {', '.join(NODES)}",
    ("--status", "--gc"): "argument --gc: not allowed with argument --status (see full_multidim.py --help)",
    ("--gc", "--dry-run"): "argument --dry-run: not allowed with argument --gc (see full_multidim.py --help)",
    ("--status", "--only", "sample"): "--only sample excludes --status: leave one out",
    ("--gc", "--from", "sample"): "--from sample excludes --gc: leave one out",
    ("--status", "images=a.png"): "images is for sample.py, which starts from them, and evaluate.py, which scores them",
    ("--yes",): "--yes belongs to --gc, which deletes what is no longer needed",
    ("--only", ""): f"--only : {NO_NODE}; valid: {', '.join(NODES)}",
    ("data.dataset=my_photos",): "data.root is not set: name the folder with the images of my_photos",
    ("--config", "demo.yml"): "config file demo.yml does not exist; nearest: demo",
    ("--config", "docs/own_data"): "config file docs/own_data does not exist; nearest: docs/own_data.yaml",
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.items(), ids=[" ".join(key) for key in REFUSED])
def test_refused_in_one_line_before_anything_is_printed_or_written(
    arguments: tuple[str, ...], message: str, command: Command, tmp_path: Path
) -> None:
    code, out, err = command("full_multidim.py", *arguments)
    assert (code, out, err) == (2, "", f"error: {message}\n")
    assert list(tmp_path.iterdir()) == []


def test_what_is_verified_must_be_a_dataset(command: Command, tmp_path: Path) -> None:
    for arguments, message in (
        ((), "config debug has no finished dataset (no output yet); build it first"),
        ((str(tmp_path),), f"{tmp_path} is not a finished dataset: it has no manifest.json"),
    ):
        code, out, err = command("prepare_data.py", "--verify", *arguments)
        assert (code, out, err) == (2, "", f"error: {' '.join(('--verify', *arguments))}: {message}\n")
    assert "unknown key data.sed" in command("prepare_data.py", "--verify", "data.sed=3")[2], "an override, no place"


def test_names_of_nodes_are_those_of_the_wiring() -> None:
    config = load("debug")
    assert [node.name for node in pipeline.nodes(config)] == node_names(stage_names(config)) == NODES


def test_an_unknown_node_is_told_even_where_the_data_is_missing(command: Command) -> None:
    code, _, err = command("full_multidim.py", "data.root=/nowhere/at/all", "--rerun", "train_baseline")
    assert code == 2 and "train_baseline: this configuration has no such node" in err


def test_data_without_images_is_refused_by_its_place(command: Command, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for folder in ("missing", "empty"):
        code, out, err = command("full_multidim.py", f"data.root={tmp_path / folder}")
        assert (code, out, err.count("\n")) == (2, "", 1) and str(tmp_path / folder) in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty"]


def test_an_override_without_effect_is_told(command: Command, handed_on: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    Image.new("RGB", (16, 16)).save(file)
    overrides, given = ("sample.num_images=3", "train.num_steps=7"), (f"images={file}", "sample.use=depth_upscale")
    overrides += (f"data.root={BUILT_IN_PHOTOS}",)  # without which a run folder of these photos would be refused
    for script, more, idle in (
        ("full_multidim.py", (), ""),
        ("evaluate.py", (), "sample.num_images has no effect on what evaluate.py does"),
        ("prepare_data.py", (), "sample.num_images, train.num_steps have no effect on what prepare_data.py does"),
        ("sample.py", (*given, "sample.num_draws=2"), "sample.num_images has no effect on what sample.py does"),
    ):
        code, _, err = command(script, *overrides, *more)
        assert (code, err) == (0, f"note: {idle}\n" if idle else "")
    assert handed_on["config"].sample.num_images == 3


def test_stage_that_the_config_has_not(command: Command) -> None:
    code, _, err = command("train_stage.py", "--stage", "size_upscal")
    assert code == 2
    assert err == ("error: --stage size_upscal: config debug has no such stage; nearest: size_upscale\n")
    assert command("train_stage.py")[2].startswith("error: the following arguments are required: --stage")


def test_run_folder_of_another_config(command: Command, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "debug"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("name: other\n")
    code, _, err = command("full_multidim.py")
    assert code == 2
    assert err == f"error: {folder} is the run folder of config 'other', not of 'debug'; choose another storage\n"
    assert [path.name for path in folder.iterdir()] == ["config.yaml"]


@pytest.mark.parametrize("look", ["--dry-run", "--status", "--gc"])
def test_forgotten_overrides_never_bring_other_photos_into_a_run_folder(
    look: str, command: Command, tmp_path: Path
) -> None:
    photos, file = tmp_path / "photos", tmp_path / "runs/debug/config.yaml"
    shutil.copytree(ROOT / "data_prep/demo_photos", photos)
    file.parent.mkdir(parents=True)
    file.write_text(f"name: debug\ndata: {{root: {photos}}}\n")
    code, out, err = command("full_multidim.py", look)
    assert (code, out) == (2, "")
    assert err == (
        f"error: {file.parent} was made from data.root={photos}, this command has data.root=None; --config {file} "
        "goes on with those photos; data.root=... says which you mean\n"
    )
    for meant in (str(photos), "null"):
        assert command("full_multidim.py", look, f"data.root={meant}")[0] == 0


def test_a_run_folder_among_the_photos_is_refused(command: Command, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "data_prep/demo_photos", tmp_path / "photos")
    code, _, err = command("full_multidim.py", f"data.root={tmp_path}")
    folder = tmp_path / "runs/debug"
    assert code == 2
    assert err == (f"error: storage: {folder} is below data.root, {tmp_path}; its pictures would be taken for photos\n")


def test_scores_that_were_kept_are_not_exported(command: Command, tmp_path: Path) -> None:
    """They may be those of other networks."""
    store = open_store(tmp_path / "runs/debug")
    seal(plan(pipeline.nodes(load("debug")), store, sources=pipeline.SOURCES))
    changed = pipeline.nodes(load("debug", ["evaluate.batch_size=5"]))
    carry_out(plan(changed, store, sources=pipeline.SOURCES, only=["evaluate"], keep=["evaluate"]))
    code, _, err = command("full_multidim.py", "evaluate.batch_size=5", "--export", str(tmp_path / "out"))
    assert code == 2 and err.startswith("error: --export: evaluate was kept by --keep, so its scores may be ")


def test_photos_that_are_gone_are_not_missed_once_the_dataset_is_built(command: Command, tmp_path: Path) -> None:
    photos, store = tmp_path / "photos", open_store(tmp_path / "runs/debug")
    shutil.copytree(ROOT / "data_prep/demo_photos", photos)
    config = load("debug", [f"storage={tmp_path / 'runs'}", f"data.root={photos}"])
    seal(plan(pipeline.nodes(config), store, sources=pipeline.SOURCES))
    store.write_text("config.yaml", to_yaml(config))
    shutil.rmtree(photos)
    code, out, _ = command("sample.py", f"data.root={photos}", "--dry-run")
    assert code == 0 and re.search(
        r"\nprepare_data .* not selected; up to date: .*; data.root is .* no such folder", out
    )
    assert re.search(r"\nsample +skip +up to date", out)
    code, _, err = command("full_multidim.py", f"data.root={tmp_path / 'others'}", "--dry-run")
    assert code == 2 and err.startswith(f"error: data.root is '{tmp_path / 'others'}'; there is no such folder; ")


def test_a_run_folder_in_use_is_refused_before_ray_starts(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "connect", lambda **_: pytest.fail("Ray was started"))
    folder = tmp_path / "runs" / "debug"
    with Lock(open_store(folder)):
        code, out, err = command("full_multidim.py")
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert err.startswith(f"error: {folder} is in use by process {os.getpid()} on ")
        code, out, _ = command("full_multidim.py", "--dry-run")
        assert code == 0 and f"\nin use by process {os.getpid()} on " in out
    assert "in use" not in command("full_multidim.py", "--dry-run")[1]


@pytest.mark.parametrize("arguments", [(), ("--dry-run",), ("--status",)], ids=str)
def test_run_folder_that_cannot_be_read(arguments: tuple[str, ...], command: Command, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "debug"
    (folder / "run.lock").mkdir(parents=True)
    code, out, err = command("full_multidim.py", *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"error: cannot read the run folder {folder}: ") and "run.lock" in err


def test_data_set_id_of_another_source(command: Command) -> None:
    for looks in ([], ["--status"]):
        code, out, err = command(
            "full_multidim.py", "data.dataset=imagenet_oord", f"data.root={BUILT_IN_PHOTOS}", *looks
        )
        assert (code, out) == (2, "")
        assert err == (
            "error: data.dataset is 'imagenet_oord'; source folder holds other pixels: name it otherwise, or set "
            "data.source to imagenet_oord\n"
        )


@pytest.fixture
def small_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster of 4 CPUs that nobody can run anything on."""
    monkeypatch.setattr(cluster, "connect", lambda **_: cluster.ClusterInfo({"CPU": 4.0}, {"CPU": 4.0}))
    monkeypatch.setattr(cluster, "disconnect", lambda: None)


def test_more_workers_than_the_cluster_has(command: Command, tmp_path: Path, small_cluster: None) -> None:
    code, _, err = command("full_multidim.py", "resources.num_workers=8")
    assert code == 2
    assert err == "error: train_first_slice needs 4.25 CPU, this session has 4 CPU; ask for fewer or smaller workers\n"
    code, _, err = command("full_multidim.py", "resources.use_gpu=true")
    assert code == 2 and err.endswith(" needs 1 GPU, this session has 0 GPU; set use_gpu=false\n")
    code, _, err = command("full_multidim.py", "resources.num_gpus=99")
    assert code == 2 and err.startswith("error: resources.num_gpus is 99; PyTorch can use ")
    assert list(tmp_path.iterdir()) == []


def test_a_cluster_that_may_grow_is_waited_for(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a job the same shortfall is a note for each training, and the start goes on."""
    monkeypatch.setattr(cluster, "connect", lambda **_: cluster.ClusterInfo({"CPU": 4.0}, None))
    monkeypatch.setattr(cluster, "disconnect", lambda: None)
    monkeypatch.setattr(start, "_ledger", lambda *_: Ledger())
    monkeypatch.setattr(start, "_run", lambda plan, *_: {})
    monkeypatch.setattr(start, "_sum_up", lambda *_, **__: 0)
    code, out, err = command("full_multidim.py", "resources.num_workers=8")
    assert (code, err) == (0, "")
    assert "\nnote: train_first_slice needs 4.25 CPU, the cluster has 4 CPU now; it waits until there is more\n" in out
    assert "\ntrain_first_slice    run   because prepare_data runs" in out


def test_storage_that_cannot_be_written(command: Command, tmp_path: Path, small_cluster: None) -> None:
    (tmp_path / "runs").write_text("a file where the folder should be")
    code, _, err = command("full_multidim.py")
    assert code == 2 and err.count("\n") == 1 and str(tmp_path / "runs") in err


# ---- handed on -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("write", ["data_prep.lock.Lock._content", "data_prep.files.os.fsync"])
def test_a_full_disk_at_the_start_is_one_line_with_the_path(
    write: str, command: Command, tmp_path: Path, small_cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # of itself it names no path

    monkeypatch.setattr(write, full)
    code, _, err = command("full_multidim.py")
    folder = tmp_path / "runs" / "debug"
    assert (code, err) == (1, f"error: no space left on {folder}; the same command resumes once there is room\n")
    assert not (folder / "config.yaml").exists()


def test_demo_is_the_default(handed_on: dict[str, Any]) -> None:
    assert cli.main([]) == 0
    assert handed_on["config"].name == "demo"
    assert (handed_on["only"], handed_on["rerun"], handed_on["keep"], handed_on["dry_run"]) == ((), (), (), False)


def test_options_and_overrides_in_any_order(handed_on: dict[str, Any]) -> None:
    arguments = "seed=3 --only sample,report --rerun sample train.num_steps=7 --only evaluate --keep=report --dry-run"
    arguments += " --from evaluate,sample --from report"
    assert cli.main(["--config", "debug", *arguments.split(), "--rerun", "evaluate, report", "bits=[1,3,8]"]) == 0
    config = handed_on.pop("config")
    assert (config.seed, config.train.num_steps, config.bits) == (3, 7, [1, 3, 8])
    assert handed_on == {
        "only": ("sample", "report", "evaluate"),
        "rerun": ("sample", "evaluate", "report"),
        "keep": ("report",),
        "start_from": ("evaluate", "sample", "report"),
        "dry_run": True,
        "images": None,
        "overrides": ["seed=3", "train.num_steps=7", "bits=[1,3,8]"],
    }


def test_entry_points_of_single_nodes(handed_on: dict[str, Any]) -> None:
    for node in ("prepare_data", "evaluate", "sample"):
        assert cli.main(["--config", "debug", "--rerun", node], prog=f"{node}.py") == 0
        assert (handed_on["only"], handed_on["rerun"]) == ((node,), (node,))
    for stage in ("size_upscale", "depth_upscale_3"):
        assert cli.main(["--config", "debug", "bits=[1,3,8]", "--stage", stage], prog="train_stage.py") == 0
        assert handed_on["only"] == (f"train_{stage}",)


def test_dry_run_prints_config_and_plan_and_writes_nothing(command: Command, tmp_path: Path) -> None:
    code, out, err = command("full_multidim.py", "--dry-run", "train.num_steps=77")
    assert (code, err, list(tmp_path.iterdir())) == (0, "", [])
    assert out.count("num_steps: 77") == 1 and out.count("\nname: debug") + out.startswith("name: debug") == 1
    plan_lines = out.strip().splitlines()[-len(NODES) :]
    assert [line.split()[:2] for line in plan_lines] == [[name, "run"] for name in NODES]


def test_status_and_garbage_of_a_run_folder_that_is_not_there(command: Command, tmp_path: Path) -> None:
    code, out, err = command("full_multidim.py", "--status")
    assert (code, err) == (0, "")
    rows = [line.split() for line in out.splitlines()[-len(NODES) :]]
    assert [row[:6] for row in rows] == [[name, "not", "made", "-", "-", "-"] for name in NODES]
    for arguments in (["--gc"], ["--gc", "--yes"]):
        code, out, err = command("full_multidim.py", *arguments)
        assert (code, err) == (0, "") and "0 attempts, 0 bytes" in out
    assert list(tmp_path.iterdir()) == []


def test_a_mistake_and_the_status_need_no_heavy_packages(tmp_path: Path) -> None:
    code = "import sys, pipelines.cli as m; m.main(['--config', 'debug', 'train.num_step=3'])"
    code += f"; m.main(['--config', 'debug', '--status', 'storage={tmp_path}'])"
    code += "; print([name for name in ('ray', 'mlflow', 'torch') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]" and "unknown key train.num_step" in done.stderr


def test_scripts_find_the_project_and_do_not_hide_packages(tmp_path: Path) -> None:
    """Run from anywhere, not installed; pipelines/git.py must not become the top-level module `git`."""
    for script in SCRIPTS[:-1]:
        assert len((ROOT / "pipelines" / f"{script}.py").read_text().splitlines()) < 40
    code = """
import runpy, sys
folder, *scripts = sys.argv[1:]
for script in scripts:
    sys.path[0] = folder  # as `python folder/script.py` sets it
    sys.argv = [f"{folder}/{script}.py", "--config", "dbug"]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        print(script, end.code, folder in sys.path)
"""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(ROOT / "pipelines"), *SCRIPTS],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == [f"{script} 2 False" for script in SCRIPTS]
    assert done.stderr.count("unknown config 'dbug'; nearest: debug") == len(SCRIPTS) - 1  # train_stage wants --stage


# ---- how it ends ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("why", [(), ("another start took over /runs/demo",)])
def test_an_interrupt_is_no_traceback(
    why: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object, **__: object) -> int:
        raise KeyboardInterrupt(*why)

    monkeypatch.setattr(cli, "start", interrupt)
    assert cli.main(["--config", "debug"]) == 130
    expected = f"{': '.join(['interrupted', *why])}; the same command resumes from here\n"
    assert capsys.readouterr().err == expected


def test_a_mistake_stays_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> int:
        raise UserError("first\n  second")

    assert cli.run_guarded(fail) == 2
    assert capsys.readouterr().err == "error: first second\n"


@pytest.mark.parametrize("others", ["blocked", "failed"])
def test_a_mistake_that_only_a_node_could_find_is_one_too(others: str, tmp_path: Path) -> None:
    """Where another node failed of itself, that is what the command ends with."""
    nodes = {
        "a": NodeReport("failed", error="data.root: it is cut off", is_user_error=True),
        "b": NodeReport(others, error="needs a"),
        "c": NodeReport("executed"),
    }
    end = functools.partial(start._sum_up, nodes, open_store(tmp_path), RunHandle(), whole=True)
    if others == "failed":
        assert end() == 1
    else:
        with pytest.raises(UserError, match="^a: data.root: it is cut off$"):
            end()


def test_a_bug_keeps_its_traceback() -> None:
    def fail() -> int:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError):
        cli.run_guarded(fail)


# ---- what can be read ----------------------------------------------------------------------------------------------


def test_sources_are_listed_without_a_config(command: Command, handed_on: dict[str, Any]) -> None:
    from data_prep.config import SOURCES

    code, out, err = command("prepare_data.py", "--list-sources")
    assert (code, err, handed_on) == (0, "", {})
    for name in SOURCES:
        assert f"data.source={name}" in out
    assert out.count("expected:") == len(SOURCES) - 1  # auto has no layout of its own
    assert command("full_multidim.py", "--list-sources")[0] == 2
