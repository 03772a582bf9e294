"""Which commit a start is of.

python -m pytest tests/pipelines/cluster/test_git_commit.py
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from pipelines.cluster import git_commit


def test_git_commit_of_a_checkout_or_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPN_GIT_COMMIT", raising=False)
    assert git_commit(tmp_path) == "unknown"
    monkeypatch.setenv("SPN_GIT_COMMIT", "abc")
    assert git_commit(tmp_path) == "abc"
    author = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run(["git", "-C", tmp_path, "init", "-q"], check=True)
    (tmp_path / "file").touch()
    subprocess.run(["git", "-C", tmp_path, "add", "file"], check=True)
    subprocess.run(["git", "-C", tmp_path, *author, "commit", "-q", "-m", "x"], check=True)
    commit = git_commit(tmp_path)
    assert len(commit) == 40
    (tmp_path / "file").write_text("changed")
    assert git_commit(tmp_path) == f"{commit}-dirty"
