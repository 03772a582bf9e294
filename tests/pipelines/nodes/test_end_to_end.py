"""The pipeline as a user starts it: config `debug` with two of its stages, then started again in several ways.

What is the first slice's alone is in test_train.py, test_evaluate.py and test_sample.py.

python -m pytest tests/pipelines/nodes/test_end_to_end.py
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

from data_prep import ray_compat
from data_prep.files import open_store
from pipelines import cli, cluster
from pipelines.nodes.trained import start_weights_of
from pipelines.pipeline import CHECKPOINT

ROOT = Path(__file__).parents[3]
TRAINS = ["train_size_upscale", "train_depth_upscale"]
NODES = ["prepare_data", *TRAINS, "evaluate", "sample", "report"]
CONFIG = ["--config", "debug", "stages=[size_upscale,depth_upscale]"]
pytestmark = pytest.mark.slow


def start(storage: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """One start with config debug, from a folder that is not the project's."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "MLFLOW_", "SPN_"))}
    command = [sys.executable, str(ROOT / "pipelines/full_multidim.py"), *CONFIG, f"storage={storage}", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=storage, env=environment | variables, timeout=600
    )


def attempts(storage: Path) -> Counter[str]:
    """Finished attempts by node."""
    found = (storage / "debug" / "nodes").glob("*/*/*/_SUCCESS.json")
    return Counter(path.parts[-4] for path in found)


def planned(output: str) -> dict[str, str]:
    """{node: run | skip | ...} as the plan was printed last."""
    return dict(re.findall(r"^(\w+) +(run|skip|wait|keep|-) +\S", output, flags=re.MULTILINE))


def plan_of(output: str) -> list[str]:
    """The plan's lines, less how long ago something was finished."""
    lines = re.findall(r"^\w+ +(?:run|skip|wait|keep|-) +\S.*", output, flags=re.MULTILINE)
    return [re.sub(r"finished [^;]* ago", "finished", line) for line in lines]


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("storage")


@pytest.fixture(scope="module")
def ray_folder() -> Iterator[Path]:
    """Of the first start. Sockets allow short paths alone."""
    with tempfile.TemporaryDirectory(prefix="spn-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def first(storage: Path, ray_folder: Path) -> subprocess.CompletedProcess[str]:
    """Later starts draw no grids in training, which is no reason to train again."""
    return start(storage, "tracking.sample_every_steps=12", "tracking.num_sample_images=2", RAY_TMPDIR=str(ray_folder))


def test_first_start_runs_every_node(first: subprocess.CompletedProcess[str], storage: Path) -> None:
    assert first.returncode == 0, first.stdout[-3000:] + first.stderr[-3000:]
    assert planned(first.stdout) == dict.fromkeys(NODES, "run")
    assert attempts(storage) == dict.fromkeys(NODES, 1)
    for node in NODES:
        assert f"[{node}]" in first.stdout, "every node shows its progress"
    assert re.search(r"^\[train_size_upscale\] \d+/96 slices", first.stdout, flags=re.MULTILINE), first.stdout
    records = (storage / "debug/nodes").glob("train_*/*/*/micro_batch.json")
    assert [json.loads(record.read_text()) for record in records] == [{"micro_batch_size": 8}] * 2


def test_processes_of_a_training_come_from_the_pool(first: subprocess.CompletedProcess[str], ray_folder: Path) -> None:
    """With environment variables of their own Ray would start each anew, and import itself there twice."""
    assert list(ray_folder.glob("ray/session_*/logs/raylet.out"))
    assert not list(ray_folder.glob("ray/session_*/logs/runtime_env_setup-*"))


def test_the_last_checkpoint_is_found_and_intact(first: subprocess.CompletedProcess[str], storage: Path) -> None:
    folders = list((storage / "debug/nodes").glob("train_*/*/*"))
    assert len(folders) == 2
    for folder in folders:
        (run,) = (path.parent for path in folder.glob("*/checkpoint_manager_snapshot.json"))
        assert ray_compat.keep_intact_checkpoints(open_store(run), score="valid/bits_per_dim") == (12, [])
        assert (run / "step-00000012" / ray_compat.CHECKSUMS).is_file()


def test_it_ends_with_bits_per_dim_and_where_to_look(first: subprocess.CompletedProcess[str], storage: Path) -> None:
    total = re.search(r"total\D+([\d.]+)\D+[\d.]+\D+[\d.]+", first.stdout)
    assert total, first.stdout[-2000:]
    results = json.loads(next((storage / "debug/nodes/evaluate").glob("*/*/results.json")).read_text())
    assert float(total[1]) == pytest.approx(results["total"]["bits_per_dim"], abs=6e-4)
    for path in ("samples/chain.png", "report.html"):
        assert str(storage / "debug" / path) in first.stdout
        assert (storage / "debug" / path).is_file()
    assert f"mlflow ui --backend-store-uri sqlite:///{storage}/debug/mlflow.db --host 127.0.0.1" in first.stdout


def test_samples_are_whole_images(first: subprocess.CompletedProcess[str], storage: Path) -> None:
    images = sorted((storage / "debug/samples/images").glob("*.png"))
    assert len(images) == 4
    assert {Image.open(path).size for path in images} == {(16, 16)}
    grids = {path.name for path in (storage / "debug/samples").glob("*.png")}
    assert grids == {"chain.png", "size_upscale.png", "depth_upscale.png"}


def test_report_is_one_file(first: subprocess.CompletedProcess[str], storage: Path) -> None:
    page = (storage / "debug/report.html").read_text()
    assert page.count(' src="data:image/png;base64,') == 4
    assert page.count(' src="data:image/webp;base64,') == 1
    assert page.count("src=") == 5
    assert "<link" not in page and "url(" not in page, "everything is inside the file"
    links = re.findall(r'href="([^"]*)"', page)
    assert len(links) == 6 and all(link.startswith("http://127.0.0.1:5000/#/") for link in links), "MLflow alone"
    for needed in ("Bits/dim", "Samples", "Learning curves", "--rerun train_depth_upscale", "scaling_factor: 2"):
        assert needed in page


def test_mlflow_has_comparable_stages(first: subprocess.CompletedProcess[str], storage: Path) -> None:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{storage}/debug/mlflow.db")
    experiment = client.get_experiment_by_name("debug")
    runs = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    assert set(NODES) <= set(runs)
    for node in NODES:
        run = runs[node]
        assert run.info.status == "FINISHED"
        assert {"node", "fingerprint", "code_hash", "git_commit"} <= set(run.data.tags)
    for node in TRAINS:
        metrics = runs[node].data.metrics
        wanted = {"train/bits_per_dim", "valid/bits_per_dim", "test/bits_per_dim", "train/lr", "train/grad_norm"}
        assert wanted | {"train/slices_per_sec", "images_seen", "valid/bits_per_dim/all_slices"} <= set(metrics), node
        assert runs[node].data.tags["stage"] == node.removeprefix("train_")
        assert runs[node].data.params["train.num_steps"] == "12"
        grids = [file.path for file in client.list_artifacts(runs[node].info.run_id, "images")]
        assert any(path.startswith("images/training_samples+step+12+") for path in grids), grids
        curve = client.get_metric_history(runs[node].info.run_id, "valid/bits_per_dim")
        assert {point.step for point in curve} == {6, 12}
    assert len({runs[node].data.tags["valid_images"] for node in TRAINS}) == 1, "of both bit depths"
    for node in TRAINS:
        read = {data.tags[0].value: data.dataset for data in runs[node].inputs.dataset_inputs}
        assert set(read) == {"training", "validation"} and read["training"].digest != read["validation"].digest
        pictures = client.list_artifacts(runs[node].info.run_id, "images")
        assert any(picture.path.startswith("images/samples+") for picture in pictures)
        (version,) = client.search_model_versions(f"name = 'debug.{node.removeprefix('train_')}'")
        assert version.run_id == runs[node].info.run_id
        assert {"config.json", "ema.safetensors", "model.safetensors"} <= set(os.listdir(version.source))
        aliases = client.get_registered_model(version.name).aliases
        assert set(aliases) == {"candidate", "champion"}
    (test,) = runs["evaluate"].inputs.dataset_inputs
    assert version.tags["test_set"] == test.dataset.digest
    total = runs["evaluate"].data.metrics["test/bits_per_dim/total"]
    parts = [runs["evaluate"].data.metrics[f"test/bits_per_dim/{n.removeprefix('train_')}"] for n in TRAINS]
    assert sum(parts) == pytest.approx(total)
    (launch,) = [run for run in runs.values() if run.data.tags["node"] == "pipeline"]
    assert launch.data.metrics["test/bits_per_dim/total"] == pytest.approx(total)
    assert any(each.path.startswith("images/samples") for each in client.list_artifacts(launch.info.run_id, "images"))
    shown = client.list_artifacts(runs["sample"].info.run_id, "images")
    assert any(picture.path.startswith("images/samples~chain+") for picture in shown)


def test_equal_shards_from_a_forced_rerun_leave_the_trainings_standing(
    first: subprocess.CompletedProcess[str],
    storage: Path,
    ray_session: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And everything else. The dry run prints the plan that the next start carries out; the one after has nothing to do
    and says why. Both are in this process: the starts above and below it are commands."""
    monkeypatch.setattr(cluster, "connect", lambda **_: cluster.ClusterInfo({"CPU": 2.0}, {"CPU": 2.0}))
    monkeypatch.setattr(cluster, "disconnect", lambda: None)

    def start_here(*arguments: str) -> str:
        assert cli.main([*CONFIG, f"storage={storage}", *arguments]) == 0
        return capsys.readouterr().out

    plan = start_here("--rerun", "prepare_data", "--dry-run")
    assert planned(plan) == {"prepare_data": "run"} | dict.fromkeys(NODES[1:], "wait")
    before = attempts(storage)
    again = start_here("--rerun", "prepare_data")
    assert plan_of(again) == plan_of(plan)
    assert attempts(storage) - before == {"prepare_data": 1}
    for node in NODES[1:]:
        assert f"\n[{node}] skipped: up to date: attempt " in again
    assert again.count(" of prepare_data made equal files") == len(NODES) - 2, "sample does not read the shards"
    before = attempts(storage)
    idle = start_here()
    assert planned(idle) == dict.fromkeys(NODES, "skip")
    assert idle.count("up to date: attempt") >= len(NODES)
    assert attempts(storage) == before and "total" in idle


def test_an_export_loads_as_its_card_says(
    first: subprocess.CompletedProcess[str],
    storage: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Without pickled code, with scores, and trainings can start from it. What is there already stays."""
    folder, command = tmp_path / "hub", [*CONFIG, f"storage={storage}", "--export", str(tmp_path / "hub")]
    assert cli.main(command) == 0 and cli.main(command) == 2
    out, err = capsys.readouterr()
    assert (
        out == f"exported: {folder}\n"
        and err == f"error: --export: {folder} exists; remove it or choose another name\n"
    )
    found = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.*"))
    stages = ("depth_upscale", "size_upscale")
    assert found == ["README.md", *(f"{stage}/{name}" for stage in stages for name in CHECKPOINT)]
    _, matter, text = (folder / "README.md").read_text().split("---\n", 2)
    assert yaml.safe_load(matter)["pipeline_tag"] == "unconditional-image-generation"
    results = json.loads(next((storage / "debug/nodes/evaluate").glob("*/*/results.json")).read_text())
    total = results["total"]
    assert f"| total | {total['bits_per_dim']:.3f} | {total['standard_error']:.3f} |\n" in text
    monkeypatch.chdir(folder)
    names: dict[str, Any] = {}
    exec(re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0], names)  # load, draw, score
    assert names["images"].shape == (4, 3, 16, 16) and 7 < float(capsys.readouterr().out) < 9
    for stage, model in names["models"].items():
        assert start_weights_of(str(folder / stage), model.config).keys() == model.state_dict().keys()
    nothing = [*CONFIG, f"storage={tmp_path}", "--export", str(tmp_path / "other")]
    assert cli.main(nothing) == 2 and "has no finished output" in capsys.readouterr().err


# ---- the dataset that it made ---------------------------------------------------------------------------------------


def test_a_build_says_what_it_used_and_what_not(first: subprocess.CompletedProcess[str], storage: Path) -> None:
    lines = first.stdout.splitlines()
    (counts,) = [i for i, line in enumerate(lines) if line.startswith("dataset demo_photos: ")]
    assert "train, " in lines[counts] and " images (" in lines[counts]
    assert lines[counts + 1].startswith("converted: ") and lines[counts + 2] == "quarantined: 0"
    assert lines[counts + 3] == "skipped: 1 (1 not_a_data_file)"  # the photos' ATTRIBUTION.md
    with sqlite3.connect(storage / "debug" / "mlflow.db") as ledger:
        logged = dict(ledger.execute("select key, value from latest_metrics"))
    assert logged["images/quarantined"] == 0 and logged["data_bytes"] > 0
    assert f"({logged['images/train']:.0f} train" in lines[counts]


def test_verify(
    first: subprocess.CompletedProcess[str], storage: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (success,) = sorted((storage / "debug/nodes/prepare_data").glob("*/*/_SUCCESS.json"))[:1]
    attempt = success.parent.relative_to(storage)
    shutil.copytree(storage / attempt, tmp_path / attempt)  # a run folder with this node alone, to be damaged

    def verify(*arguments: str) -> tuple[int, str, str]:
        code = cli.main([*CONFIG, "--verify", *arguments, f"storage={tmp_path}"], prog="prepare_data.py")
        return code, *capsys.readouterr()

    code, out, err = verify()
    assert (code, err) == (0, "") and out.splitlines()[-1].startswith("intact: ")
    assert "quarantined: 0" in out.splitlines()
    dataset = tmp_path / attempt / "dataset"
    assert verify(str(dataset))[0] == 0
    assert "has no finished dataset" in verify("data.seed=5")[2]
    victim = next(dataset.glob("res=*/bits=3/valid-*.parquet"))
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    code, out, _ = verify()
    assert code == 1
    assert out.splitlines()[-2:] == [
        f"{victim.relative_to(dataset)} does not match its checksum",
        f"damaged: {dataset} (problems: 1; to build it anew: --rerun prepare_data)",
    ]
