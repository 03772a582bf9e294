"""The Ray session: loopback only, clusters that do not answer, and the commit that a start is of.

python -m pytest tests/pipelines/cluster/test_cluster.py
"""

from __future__ import annotations

import ipaddress
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from data_prep.files import UserError
from pipelines.cluster import connect, git_commit, in_ray_job, private_folder

ROOT = Path(__file__).parents[3]


def test_a_job_is_known_by_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not in_ray_job()
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    assert in_ray_job()


@pytest.mark.parametrize("there", ["a folder open to others", "a link", "a file", "nothing", "our folder"])
def test_sockets_and_logs_lie_where_only_this_account_may_enter(there: str, tmp_path: Path) -> None:
    folder = tmp_path / f"spn-{os.getuid()}"
    if there in ("a folder open to others", "our folder"):
        folder.mkdir()
        folder.chmod(0o700 if there == "our folder" else 0o777)
    elif there == "a link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        folder.symlink_to("elsewhere")
    elif there == "a file":
        folder.touch()
    if there in ("nothing", "our folder"):
        assert private_folder(tmp_path) == folder and folder.stat().st_mode & 0o777 == 0o700
    else:
        with pytest.raises(UserError, match="is open to other accounts"):
            private_folder(tmp_path)


def test_a_folder_too_long_for_sockets_is_refused_in_one_line(tmp_path: Path) -> None:
    code = "from pipelines.cluster import connect; connect()"
    environment = {**os.environ, "RAY_TMPDIR": f"{tmp_path}/{'x' * 90}", "PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert "UserError: RAY_TMPDIR is" in run.stderr.splitlines()[-1]


def is_loopback(address: str) -> bool:
    parsed = ipaddress.ip_address(address)
    return (getattr(parsed, "ipv4_mapped", None) or parsed).is_loopback


# What somebody without the token is answered at each port: {"port method": gRPC status, "port path": HTTP status}.
STRANGER = """
import json, sys, urllib.error, urllib.request
import grpc

methods = ("NodeInfoGcsService/GetAllNodeInfo", "NodeManagerService/GetNodeStats", "ObjectManagerService/Pull")
methods += ("CoreWorkerService/PushTask", "ReporterService/ReportOCMetrics")
answers = {}
for port in sys.argv[1:]:
    for method in methods:
        call = grpc.insecure_channel("127.0.0.1:" + port).unary_unary("/ray.rpc." + method)
        try:
            call(b"", timeout=60)
            answers[port + " " + method] = "OK"
        except grpc.RpcError as error:
            answers[port + " " + method] = error.code().name
    for path in ("/api/job_agent/jobs/", "/get_or_create_runtime_env"):
        try:
            with urllib.request.urlopen("http://127.0.0.1:" + port + path, timeout=60) as answer:
                answers[port + " " + path] = answer.headers["Content-Type"].partition(";")[0]
        except urllib.error.HTTPError as error:
            answers[port + " " + path] = str(error.code)
        except Exception:
            answers[port + " " + path] = "no HTTP"
print(json.dumps(answers))
"""
PROBE = """
import json, os, subprocess, sys
from pipelines.cluster import connect, disconnect
info = connect(num_cpus=2, num_gpus=3)
import psutil, ray

@ray.remote(num_cpus=1)
def where():
    import os, pipelines
    names = ("RAY_CHDIR_TO_TRIAL_DIR", "RAY_DATA_USE_DATASOURCE_V2", "SPN_GIT_COMMIT")
    return os.getcwd(), pipelines.__file__, {name: os.environ.get(name) for name in names}

@ray.remote(num_cpus=0)
class Idle:
    def ready(self):
        return True

actor = Idle.remote()  # a worker with a port, which stays
ray.get(actor.ready.remote())
seen = ray.get(where.remote())
everyone = [psutil.Process(), *psutil.Process().children(recursive=True)]
names, open_to = [], []
for process in everyone:
    try:
        names.append(process.name())
        open_to += [[process.name(), *c.laddr] for c in process.net_connections("inet") if c.status == "LISTEN"]
    except psutil.NoSuchProcess:
        pass
ports = sorted({port for _, _, port, *_ in open_to})
stranger = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
command = [sys.executable, "-c", sys.argv[1], *map(str, ports)]
answers = json.loads(subprocess.run(command, env=stranger, capture_output=True, check=True).stdout)
folder = os.environ["RAY_TMPDIR"]
disconnect()
has = [info.resources["CPU"], info.resources["GPU"]]
found = {"own": info.capacity == info.resources, "has": has, "names": names, "open": open_to, "seen": seen}
print(json.dumps(found | {"answers": answers, "folder": folder}))
"""


@pytest.mark.slow
def test_an_embedded_session_is_closed_to_other_machines_and_accounts(tmp_path: Path) -> None:
    drop = ("RAY_", "PYTHONPATH", "SPN_")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(drop)}
    environment["PYTHONPATH"] = str(ROOT)
    run = subprocess.run(
        [sys.executable, "-c", PROBE, STRANGER],
        capture_output=True,
        text=True,
        timeout=180,
        cwd=tmp_path,
        env=environment,
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["own"] and found["has"] == [2, 3]
    assert {"gcs_server", "raylet"} <= set(found["names"])
    assert {name for name, *_ in found["open"]} >= {"gcs_server", "raylet"}
    assert [entry for entry in found["open"] if not is_loopback(entry[1])] == []
    # Ray's metrics are plain text for everybody; every service that does something asks for the token.
    refused = {"UNAUTHENTICATED", "UNIMPLEMENTED", "UNAVAILABLE", "401", "404", "no HTTP", "text/plain"}
    assert {at: answer for at, answer in found["answers"].items() if answer not in refused} == {}
    asked = {at.partition(" ")[2] for at, answer in found["answers"].items() if answer in ("UNAUTHENTICATED", "401")}
    assert asked >= {
        "NodeInfoGcsService/GetAllNodeInfo",
        "NodeManagerService/GetNodeStats",
        "CoreWorkerService/PushTask",
    }
    assert asked >= {"ObjectManagerService/Pull", "ReporterService/ReportOCMetrics", "/api/job_agent/jobs/"}
    assert os.stat(found["folder"]).st_mode & 0o077 == 0
    directory, package, variables = found["seen"]
    assert directory == str(tmp_path) and Path(package).parents[1] == ROOT
    assert variables["RAY_CHDIR_TO_TRIAL_DIR"] == "0" and variables["RAY_DATA_USE_DATASOURCE_V2"] == "0"
    assert variables["SPN_GIT_COMMIT"]


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("127.0.0.1:1", "no Ray cluster answers at 127.0.0.1:1"),
        ("ray://127.0.0.1:10001", "it must be HOST:PORT"),
        ("http://127.0.0.1:8265", "it must be HOST:PORT"),
    ],
)
def test_a_cluster_that_does_not_answer_is_the_users_mistake(
    address: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {**os.environ, "RAY_ADDRESS": address})
    with pytest.raises(UserError, match=words):
        connect()


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
