"""What this project takes from Ray without Ray promising to keep it: private names and private file formats.

Nothing else may import `ray._private` or `ray.*._internal` in this package. tests/pipelines/test_ray_compat.py tries
each use, so an upgrade of Ray shows here what it broke; pyproject.toml names the newest version that was tried.
"""

from __future__ import annotations

import json
import posixpath

from data_prep.files import Store

_SNAPSHOT = "checkpoint_manager_snapshot.json"  # Ray Train's record of committed checkpoints


def bind_to_loopback() -> None:
    """Makes Ray's servers of an embedded session listen on 127.0.0.1 only, also where `ray` was imported before
    RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER was set: Ray reads that variable on import."""
    from ray._private import ray_constants

    ray_constants.ENABLE_RAY_CLUSTER = False


def committed_checkpoint(store: Store, run_name: str) -> str | None:
    """Folder name of the last checkpoint that Ray Train has committed under this run name; None without one."""
    path = posixpath.join(run_name, _SNAPSHOT)
    if not store.exists(path):
        return None
    latest = json.loads(store.read_bytes(path))["latest_checkpoint_result"]
    return None if latest is None else latest["checkpoint_dir_name"]
