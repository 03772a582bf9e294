"""Which commit of the project runs."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from pipelines.dag.fingerprint import ROOT


def git_commit(root: Path = ROOT) -> str:
    """Commit of the project's checkout, else $SPN_GIT_COMMIT (set it for jobs, which get a copy), else "unknown"."""
    if (root / ".git").exists():
        command = ["git", "-C", str(root), "rev-parse", "HEAD"]
        try:
            return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
        except (OSError, subprocess.SubprocessError):
            pass
    return os.environ.get("SPN_GIT_COMMIT") or "unknown"
