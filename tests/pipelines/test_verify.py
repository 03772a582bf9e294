"""prepare_data.py: the counts it prints and logs, and --verify.  python -m pytest tests/pipelines/test_verify.py"""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pipelines import prepare_data

ROOT = Path(__file__).parents[2]
Command = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("storage")


@pytest.fixture
def command(storage: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    """command(*arguments) -> (exit code, stdout, stderr) of prepare_data.py on the debug config."""

    def call(*arguments: str) -> tuple[int, str, str]:
        code = prepare_data.main(["--config", "debug", *arguments, f"storage={storage}"])
        return code, *capsys.readouterr()

    return call


def test_there_must_be_a_data_set(command: Command, tmp_path: Path) -> None:
    code, out, err = command("--verify")
    assert (code, out) == (2, "")
    assert err == "error: --verify: config debug has no finished dataset (no output yet); build it first\n"
    code, out, err = command("--verify", str(tmp_path))
    note, error = err.splitlines()  # `command` says where its runs are
    assert (code, out) == (2, "") and note.startswith("note: storage=") and "no effect" in note
    assert error == f"error: --verify {tmp_path}: {tmp_path} is not a finished dataset: it has no manifest.json"
    code, _, err = command("--verify", "data.sed=3")
    assert code == 2 and "unknown key data.sed" in err


@pytest.fixture(scope="module")
def built(storage: Path) -> str:
    """What a build prints."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "MLFLOW_", "SPN_"))}
    command = [sys.executable, str(ROOT / "pipelines/prepare_data.py"), "--config", "debug", f"storage={storage}"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_a_build_says_what_it_used_and_what_not(built: str, storage: Path) -> None:
    lines = built.splitlines()
    (first,) = [i for i, line in enumerate(lines) if line.startswith("dataset demo_photos: ")]
    assert "train, " in lines[first] and " images (" in lines[first]
    assert lines[first + 1].startswith("converted: ") and lines[first + 2] == "quarantined: 0"
    assert lines[first + 3] == "skipped: 1 (1 not_a_data_file)"  # the photos' ATTRIBUTION.md
    with sqlite3.connect(storage / "debug" / "mlflow.db") as ledger:
        logged = dict(ledger.execute("select key, value from latest_metrics"))
    assert logged["images/quarantined"] == 0 and logged["data_bytes"] > 0
    assert f"({logged['images/train']:.0f} train" in lines[first]


@pytest.mark.slow
def test_verify(built: str, command: Command, storage: Path) -> None:
    code, out, err = command("--verify")
    assert (code, err) == (0, "") and out.splitlines()[-1].startswith("intact: ")
    assert "quarantined: 0" in out.splitlines()
    (manifest,) = (storage / "debug").glob("nodes/prepare_data/*/*/dataset/manifest.json")
    dataset = manifest.parent
    assert command("--verify", str(dataset))[0] == 0
    assert "has no finished dataset" in command("--verify", "data.seed=5")[2]
    victim = next(dataset.glob("res=*/bits=3/valid-*.parquet"))
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    code, out, _ = command("--verify")
    assert code == 1
    assert out.splitlines()[-2:] == [
        f"{victim.relative_to(dataset)}: sha256 differs from the manifest",
        f"damaged: {dataset} (problems: 1; to build it anew: --rerun prepare_data)",
    ]
