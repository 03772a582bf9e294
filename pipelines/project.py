"""This project as the DAG engine sees it: where its code lies, and which modules do not decide any result."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from pipelines.dag.fingerprint import Sources

ROOT = Path(__file__).resolve().parents[1]  # the folder that holds the packages

# Module -> why a change of its code cannot change what a node makes. A node does not rerun when only these change, so
# an entry needs care: what is missing here costs a rerun, what is wrong here skips one that is needed. The imports of
# such a module do not count through it, but they do count if a node also reaches them in another way.
NOT_SEMANTIC = {
    "data_prep.card": "text about a finished dataset, logged to MLflow",
    "data_prep.files": "moves bytes as they are; checksums of all outputs are in _SUCCESS.json",
    "data_prep.layouts": "names what can be read; the module that reads the recognised layout counts itself",
    "data_prep.lock": "keeps two writers out of one folder",
    "data_prep.ray_compat": "when Ray Data starts and rests, and where Ray keeps what it does not publish",
    "pipelines.cluster": "starts or joins a Ray session",
    "pipelines.config": "a node's values, computed by these rules, are fingerprinted themselves",
    "pipelines.dag.masking": "hides secrets in what people read",
    "pipelines.dag.node": "carries what a node function gets and returns",
    "pipelines.dag.progress": "shows progress",
    "pipelines.nodes.memory": "asks how much a GPU holds at once; the attempt records the answer",
    "pipelines.registry": "names models in MLflow's registry",
    "pipelines.tracking": "logs to MLflow",
    "spn.gpu.flops": "counts FLOPs for a logged utilisation",
}
SOURCES = Sources(ROOT, ("spn", "data_prep", "pipelines"), frozenset(NOT_SEMANTIC))


def git_commit(root: Path = ROOT) -> str:
    """Commit of the project's checkout, else $SPN_GIT_COMMIT (set it for jobs, which get a copy), else "unknown"."""
    if (root / ".git").exists():
        command = ["git", "-C", str(root), "rev-parse", "HEAD"]
        try:
            return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
        except (OSError, subprocess.SubprocessError):
            pass
    return os.environ.get("SPN_GIT_COMMIT") or "unknown"
