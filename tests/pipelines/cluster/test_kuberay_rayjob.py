"""kuberay_rayjob.yaml says what ray_cluster.yaml says.

python -m pytest tests/pipelines/cluster/test_kuberay_rayjob.py
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[3]
MANIFEST, LAUNCHER = "kuberay_rayjob.yaml", "ray_cluster.yaml"


@pytest.fixture
def job() -> dict[str, Any]:
    return yaml.safe_load((ROOT / MANIFEST).read_text())


@pytest.fixture(scope="module")
def launcher() -> dict[str, Any]:
    return yaml.safe_load((ROOT / LAUNCHER).read_text())


def groups(job: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """{name in ray_cluster.yaml: group}."""
    spec = job["spec"]["rayClusterSpec"]
    return {"head": spec["headGroupSpec"]} | {g["groupName"].replace("-", "_"): g for g in spec["workerGroupSpecs"]}


def container(group: dict[str, Any]) -> dict[str, Any]:
    (only,) = group["template"]["spec"]["containers"]
    return only


def test_images_limits_and_patience_are_the_launchers(job: dict[str, Any], launcher: dict[str, Any]) -> None:
    assert set(groups(job)) == set(launcher["available_node_types"])
    for name, group in groups(job).items():
        theirs = launcher["available_node_types"][name]
        image = theirs.get("docker", {}).get("worker_image", launcher["docker"]["image"])
        assert container(group)["image"] == image
        if name != launcher["head_node_type"]:
            assert (group["minReplicas"], group["maxReplicas"]) == (theirs["min_workers"], theirs["max_workers"])
    cluster = job["spec"]["rayClusterSpec"]
    assert f"rayproject/ray:{cluster['rayVersion']}-" in launcher["docker"]["image"]
    assert cluster["enableInTreeAutoscaling"] is True
    assert cluster["autoscalerOptions"]["idleTimeoutSeconds"] == 60 * launcher["idle_timeout_minutes"]


def test_resources_are_the_launchers_machines(job: dict[str, Any]) -> None:
    """ray_cluster.yaml says of each machine what it has; pods leave a tenth or so of it to Kubernetes."""
    text = (ROOT / LAUNCHER).read_text()
    machines = re.findall(r"^  (\w+):\n(?:(?!^  \w).*\n)*?      InstanceType: \S+ # ([^\n;]*)", text, re.M)
    assert [name for name, _ in machines] == ["head", "cpu_group", "gpu_group"]
    for name, has in machines:
        cpus, memory = int(re.search(r"(\d+) vCPU", has)[1]), int(re.search(r"(\d+) GiB", has)[1])
        gpus = int(re.search(r"(\d+) A10G", has)[1]) if "A10G" in has else 0
        group = groups(job)[name]
        asked = container(group)["resources"]
        assert asked["requests"] == asked["limits"], "Ray counts on what it was told, so nothing may be shared"
        assert 0.85 * cpus <= int(asked["limits"]["cpu"]) < cpus
        assert 0.85 * memory <= int(asked["limits"]["memory"].removesuffix("Gi")) < memory
        assert int(asked["limits"].get("nvidia.com/gpu", 0)) == gpus
        told = {key: int(value) for key, value in group["rayStartParams"].items()}
        if name == "head":
            assert told == {"num-cpus": 0}, "work on the head takes memory from Ray's control plane"
        else:
            assert told == {"num-cpus": cpus} | ({"num-gpus": gpus} if gpus else {})


def test_the_setup_is_the_launchers(job: dict[str, Any], launcher: dict[str, Any]) -> None:
    assert job["metadata"]["annotations"] == {"ray.io/overwrite-container-cmd": "true"}
    for group in groups(job).values():
        assert group["template"]["metadata"]["annotations"] == job["metadata"]["annotations"]
        assert container(group)["command"] == ["/bin/bash", "-c", "--"]
        (script,) = container(group)["args"]
        subprocess.run(["bash", "-nc", script], check=True)
        steps = script.removeprefix("set -e; ").split("; ulimit")[0]
        assert steps == "; ".join(launcher["setup_commands"])
        assert script.endswith('exec /bin/bash -c "$KUBERAY_GEN_RAY_START_CMD"')
        environment = {entry["name"]: entry["value"] for entry in container(group)["env"]}
        theirs = dict(re.findall(r"-e (\w+)=(\S+)", " ".join(launcher["docker"]["run_options"])))
        theirs.pop("RAY_AUTH_MODE")  # ssh is the launcher's way in, and the token; here the namespace is the door
        assert environment == theirs
        mounted = {mount["name"]: mount["mountPath"] for mount in container(group)["volumeMounts"]}
        volumes = {volume["name"] for volume in group["template"]["spec"]["volumes"]}
        assert set(mounted) == volumes and mounted["requirements"] == "/home/ray/spn"


def test_the_commands_of_the_header_give_what_the_pods_read(job: dict[str, Any]) -> None:
    text = (ROOT / MANIFEST).read_text()
    files = dict(re.findall(r"--from-file=(?:(\S+)=)?(\S+)", text))
    assert files == {"": "pyproject.toml", "constraints.txt": ".ci/constraints.txt"}
    assert all((ROOT / path).is_file() for path in files.values())
    read = set(re.findall(r"/home/ray/spn/([\w.]+)", container(groups(job)["head"])["args"][0]))
    assert read == {"pyproject.toml", "constraints.txt"}
    assert f"rayjob {job['metadata']['name']} " in text and f"job-name={job['metadata']['name']} " in text
    for group in groups(job).values():
        (secret,) = container(group)["envFrom"]
        assert f"secret generic {secret['secretRef']['name']} " in text and secret["secretRef"]["optional"]
