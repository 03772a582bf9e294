"""The commands of docs/cluster.md, as a shell runs them, are whole; kuberay_rayjob.yaml has the same job.

python -m pytest tests/pipelines/cluster/test_cluster_docs.py
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[3]
# Stands for ray, aws and mlflow: notes its arguments. `ray exec` runs its command, as the head would.
STUB = """#!/bin/bash
printf '%s\\0' "${0##*/}" "$@" >> "$CALLS"
printf '\\n' >> "$CALLS"
[ "$1" = exec ] && bash -c "$3
wait"
exit 0
"""


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """What sections 3 to 5 call, in order, each as a list of arguments."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    place = tmp_path_factory.mktemp("docs")
    for name in ("ray", "aws", "mlflow", "pip", "hostname"):
        (place / name).write_text(STUB)
        (place / name).chmod(0o755)
    page = (ROOT / "docs" / "cluster.md").read_text()
    sections = page[page.index("## 3. Machines") : page.index("## Kubernetes")]
    image = re.compile(r"^    FROM .*?\n\n", re.M | re.S)  # a Dockerfile, not commands
    script = "\n".join(line[4:] for line in image.sub("", sections).splitlines() if line.startswith("    "))
    env = {"PATH": f"{place}:/usr/bin:/bin", "HOME": str(place), "CALLS": str(place / "calls")}
    done = subprocess.run(["bash", "-euc", script], cwd=ROOT, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    return [line.rstrip("\0").split("\0") for line in re.split(r"(?<=\0)\n", (place / "calls").read_text()) if line]


def test_the_mlflow_server_of_the_head_gets_all_its_options(calls: list[list[str]]) -> None:
    (server,) = (call for call in calls if call[0] == "mlflow")
    options = dict(zip(server[2::2], server[3::2], strict=True))
    assert options["--artifacts-destination"] == "s3://BUCKET/mlflow"
    assert (options["--host"], options["--port"]) == ("0.0.0.0", "5000")


def test_the_head_may_start_machines_with_its_role(calls: list[list[str]]) -> None:
    (policy,) = (json.loads(call[-1]) for call in calls if call[:3] == ["aws", "iam", "put-role-policy"])
    assert {each["Action"] for each in policy["Statement"]} == {"iam:PassRole", "ssm:GetParameters"}


def test_a_stopped_job_is_deleted_before_its_id_is_used_again(calls: list[list[str]]) -> None:
    jobs = [
        call[2] for call in calls if call[:2] == ["ray", "job"] and call[-1] == "chain" or "--submission-id" in call
    ]
    assert jobs == ["submit", "logs", "status", "stop", "delete"]


def test_the_job_on_kubernetes_is_the_submitted_one(calls: list[list[str]]) -> None:
    spec = yaml.safe_load((ROOT / "kuberay_rayjob.yaml").read_text())["spec"]
    (submit,) = (call for call in calls if "--submission-id" in call)
    assert submit[submit.index("--") + 1 :] == shlex.split(spec["entrypoint"])
    submitted = json.loads(submit[submit.index("--runtime-env-json") + 1])
    environment = yaml.safe_load(spec["runtimeEnvYAML"])
    assert set(environment["env_vars"]) == set(submitted["env_vars"])
    assert re.fullmatch(r"[0-9a-f]{40}", submitted["env_vars"]["SPN_GIT_COMMIT"])
    assert all(isinstance(value, str) for value in environment["env_vars"].values())
    assert environment["working_dir"].endswith(".zip"), "Ray takes a folder from elsewhere as an archive only"
