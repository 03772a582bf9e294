"""What people install, and the files beside it.  python -m pytest tests/spn/test_package.py"""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NOT_OTHERS = {*sys.stdlib_module_names, "spn", "data_prep", "pipelines", "triton"}  # torch brings triton, for GPUs
DISTRIBUTIONS = {"PIL": "pillow", "yaml": "pyyaml", "pynvml": "nvidia-ml-py"}


def imported(package: str) -> set[str]:
    """Names of what the package imports from others, also inside functions."""
    found = set()
    for file in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                found.add((node.module or "").split(".")[0])
    return {DISTRIBUTIONS.get(name, name) for name in found - NOT_OTHERS}


def test_the_wheel_holds_spn_alone(tmp_path: Path) -> None:
    """No `pipelines` or `data_prep` that could collide with somebody's own; all of spn, and its types for checkers."""
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "spn", tmp_path / "spn", ignore=shutil.ignore_patterns("__pycache__"))
    for room in ("data_prep", "pipelines", "tests"):
        (tmp_path / room).mkdir()
        (tmp_path / room / "__init__.py").touch()
    build = "import setuptools.build_meta as build; build.build_wheel('.')"
    subprocess.run([sys.executable, "-c", build], cwd=tmp_path, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        files = {file for file in archive.namelist() if ".dist-info/" not in file}
    sources = {str(file.relative_to(ROOT)) for file in (ROOT / "spn").rglob("*.py")}
    assert files == {*sources, "spn/py.typed"}


@pytest.mark.parametrize(("package", "extra"), [("spn", None), ("data_prep", "pipelines"), ("pipelines", "pipelines")])
def test_every_import_is_a_declared_dependency(package: str, extra: str | None) -> None:
    """`spn` needs what a plain install brings, the rest of the checkout what the extra adds."""
    declared = PROJECT["dependencies"] + PROJECT["optional-dependencies"].get(extra, [])
    names = {re.split(r"[^\w.-]", each)[0] for each in declared}
    assert "numpy" in imported(package) and imported(package) <= names


def test_the_declared_pythons_are_tested_and_chosen() -> None:
    """By the workflow, which runs `.ci/run` with each, and by `make`."""
    declared = [each.rpartition(" ")[2] for each in PROJECT["classifiers"] if ":: Python ::" in each]
    assert declared == ["3.11", "3.12", "3.13"] and PROJECT["requires-python"] == f">={declared[0]}"
    (job,) = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"].values()
    assert job["strategy"]["matrix"] == {"python": declared}
    assert job["steps"][-1] == {"run": ".ci/run", "env": {"PYTHON": "python${{ matrix.python }}"}}
    chosen = re.search(r"for python in (.*) python3;", (ROOT / "Makefile").read_text())
    assert chosen and chosen[1].split() == [f"python{version}" for version in declared]


def test_the_container_has_what_the_cluster_installs() -> None:
    text = (ROOT / "Dockerfile").read_text()
    copied = [path for line in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE) for path in line.split()]
    assert {"spn", "data_prep", "pipelines"} <= set(copied) and all((ROOT / path).exists() for path in copied)
    listing = re.search(r"print\(\*project.*chr\(10\)\)", (ROOT / "ray_cluster.yaml").read_text())
    assert listing and listing[0] in text


def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (PROJECT["version"], PROJECT["license"])
    paper = citation["references"][0]["title"]
    assert paper in " ".join((ROOT / "README.md").read_text().split())
