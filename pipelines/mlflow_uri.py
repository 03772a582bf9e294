"""Where MLflow is: the tracking URI of a start, a server's login, pages of the UI. Imports nothing of MLflow."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from data_prep.files import Store
from pipelines.dag.masking import plain_uri

UI = "http://127.0.0.1:5000"  # where `make ui` and `ui_command` show a SQLite file
# A server's login, as MLflow itself reads it.
_USER, _PASSWORD = "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"
LOGIN = (_USER, _PASSWORD, "MLFLOW_TRACKING_TOKEN")


def default_uri(store: Store, *, name: str, configured: str | None = None) -> tuple[str, str | None]:
    """Tracking URI and artifact place for a run folder.

    In this order: the configured server, $MLFLOW_TRACKING_URI, a SQLite file in the run folder. SQLite needs a disk of
    this machine, so for a run folder on an object store it lies in ~/spn_runs/<name>. A server's URI is returned
    without its login, which moves to the environment variables that MLflow has for it.
    """
    given = configured or os.environ.get("MLFLOW_TRACKING_URI")
    if given:
        given = _take_login(given)
        if given.startswith("sqlite:///"):  # nobody else would choose the artifact place, and MLflow's is the cwd
            return given, str(Path(given.removeprefix("sqlite:///")).absolute().parent / "mlartifacts")
        return given, None
    folder = store.local() or Path.home() / "spn_runs" / name
    return f"sqlite:///{folder / 'mlflow.db'}", str(folder / "mlartifacts")


def ui_command(uri: str) -> str:
    """The line that opens the MLflow UI on this machine; for a server, its address."""
    if _is_server(uri):
        return _page(_ui_of(uri), "experiments")
    return f"{sys.executable} -m mlflow ui --backend-store-uri {uri} --host 127.0.0.1 --port 5000"


def run_link(uri: str, *, run_id: str, experiment_id: str) -> str:
    """Address of a run in the UI of a tracking URI."""
    return _page(_ui_of(uri), f"experiments/{experiment_id}/runs/{run_id}")


def compare_link(uri: str, *, run_ids: Iterable[str], experiment_id: str) -> str:
    """Address of the compare page over some runs in the UI of a tracking URI."""
    runs = quote("[" + ",".join(f'"{run_id}"' for run_id in run_ids) + "]")
    experiments = quote(f'["{experiment_id}"]')
    return _page(_ui_of(uri), f"compare-runs?runs={runs}&experiments={experiments}")


def login_of(uri: str) -> dict[str, str]:
    """The environment variables with a server's login."""
    return {name: os.environ[name] for name in LOGIN if name in os.environ} if _is_server(uri) else {}


def _page(base: str, page: str) -> str:
    """Address of a page of the UI in its view for model training; it opens with the one for language models else."""
    return f"{base}/#/{page}{'&' if '?' in page else '?'}workflowType=machine_learning"


def _is_server(uri: str) -> bool:
    return uri.startswith(("http://", "https://"))


def _ui_of(uri: str) -> str:
    """Address of the UI: the server's, or the one where this machine shows a SQLite file."""
    return plain_uri(uri).rstrip("/") if _is_server(uri) else UI


def _take_login(uri: str) -> str:
    """The server's URI without user:password, which go to this process's environment. Other URIs stay as they are."""
    host = urlsplit(uri).netloc if _is_server(uri) else ""
    login, at, bare = host.rpartition("@")
    if not at:
        return uri
    user, _, password = login.partition(":")
    os.environ.update({_USER: unquote(user), _PASSWORD: unquote(password)})
    return uri.replace(host, bare, 1)
