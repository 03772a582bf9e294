"""What `ray job submit --working-dir .` would upload: the code, and nothing that lies about beside it.

python -m pytest tests/pipelines/cluster/test_upload.py
"""

from __future__ import annotations

import re
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

# Private, but submitting needs a cluster; .ci/constraints.txt holds the version.
from ray._private.runtime_env.packaging import create_package

ROOT = Path(__file__).parents[3]
AT_HOME = [  # what users have in a checkout that they work in
    ".venv/bin/python",
    ".git/objects/pack/pack-1.pack",
    "runs/demo/mlflow.db",
    "runs/demo/nodes/train_first_slice/f/a/step-00000100/ema.safetensors",
    "data/imagenet/train/n01440764/n01440764_10026.JPEG",
    "ILSVRC2012_img_train.tar",
    "photos.zip",
    "cifar-10-binary.tar.gz",
    "spn/__pycache__/model.cpython-311.pyc",
    "subscale_pixel_networks.egg-info/PKG-INFO",
    "docs/images/compare.png",
]


@pytest.fixture(scope="module")
def uploaded(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The archive of a checkout (the files that git has here) with more beside it."""
    place = tmp_path_factory.mktemp("upload")
    listed = subprocess.run(["git", "-C", ROOT, "ls-files", "-z"], capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (place / "checkout" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, place / "checkout" / name)
    for name in AT_HOME:
        (place / "checkout" / name).parent.mkdir(parents=True, exist_ok=True)
        (place / "checkout" / name).write_bytes(b"0" * 1000)
    create_package(str(place / "checkout"), place / "package.zip", include_gitignore=True)
    return zipfile.ZipFile(place / "package.zip")


def test_nothing_that_lies_about_goes_up(uploaded: zipfile.ZipFile) -> None:
    names = {name for name in uploaded.namelist() if not name.endswith("/")}
    assert not names & set(AT_HOME)
    assert not any(name.startswith(("tests/", "runs/", "data/", ".git/", ".venv/")) for name in names)


def test_all_that_a_job_needs_does(uploaded: zipfile.ZipFile) -> None:
    names = set(uploaded.namelist())
    tracked = [
        path.relative_to(ROOT) for room in ("spn", "data_prep", "pipelines") for path in (ROOT / room).rglob("*")
    ]
    needed = {str(path) for path in tracked if (ROOT / path).is_file() and "__pycache__" not in path.parts}
    missing = needed - names
    assert not missing, "the code, the presets and the built-in photos"
    assert {"pyproject.toml", ".ci/constraints.txt", "docs/own_data.yaml"} <= names


def test_it_is_as_small_as_the_docs_say(uploaded: zipfile.ZipFile) -> None:
    """Ray refuses uploads of more than 100 MiB."""
    said = re.search(r"The upload is ([\d.]+) MB", (ROOT / "docs" / "cluster.md").read_text())
    assert sum(entry.compress_size for entry in uploaded.infolist()) == pytest.approx(1e6 * float(said[1]), abs=0.5e6)
