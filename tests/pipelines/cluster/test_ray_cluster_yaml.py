"""ray_cluster.yaml is what Ray's cluster launcher takes: what `ray up` checks before it talks to a cloud.

python -m pytest tests/pipelines/cluster/test_ray_cluster_yaml.py
"""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import boto3
import jsonschema
import pytest
import ray.autoscaler
import yaml
from moto import mock_aws

# Private, but the launcher has no public way without a cloud account; .ci/constraints.txt holds the version.
from ray.autoscaler._private.aws import node_provider
from ray.autoscaler._private.aws.config import bootstrap_aws
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.autoscaler.tags import TAG_RAY_USER_NODE_TYPE

ROOT = Path(__file__).parents[3]
SCHEMA = json.loads(Path(ray.autoscaler.__file__).with_name("ray-schema.json").read_text())


@pytest.fixture
def cluster() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "ray_cluster.yaml").read_text())


def pinned(package: str) -> str:
    """Exact version of `package` in .ci/constraints.txt."""
    return re.search(rf"(?m)^{package}==(\S+)$", (ROOT / ".ci" / "constraints.txt").read_text())[1]


def test_the_file_itself_satisfies_rays_schema(cluster: dict[str, Any]) -> None:
    # Before the launcher's defaults fill the gaps: they would hide a missing region or ssh_user.
    jsonschema.validate(cluster, SCHEMA)
    assert cluster["provider"]["region"] and cluster["auth"]["ssh_user"]


def test_the_launcher_accepts_it(cluster: dict[str, Any]) -> None:
    validate_config(prepare_config(copy.deepcopy(cluster)))


def test_what_the_launcher_starts_may_use_the_bucket(
    cluster: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ray up` and the head's autoscaler on an EC2 of this process: workers have the role that Ray makes for it."""
    monkeypatch.setenv("HOME", str(tmp_path))  # Ray keeps the machines' ssh key there
    monkeypatch.setattr(time, "sleep", lambda sec: None)
    with mock_aws():
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MOTO_IAM_LOAD_MANAGED_POLICIES", "true")  # slow: not while moto starts and ends
            config = bootstrap_aws(prepare_config(cluster))
        provider = node_provider.AWSNodeProvider(config["provider"], config["cluster_name"])
        for name, group in config["available_node_types"].items():
            provider.create_node(group["node_config"], {TAG_RAY_USER_NODE_TYPE: name}, count=1)
        iam, ec2 = boto3.client("iam"), boto3.resource("ec2", region_name=cluster["provider"]["region"])
        started = {
            tag["Value"]: each
            for each in ec2.instances.all()
            for tag in each.tags
            if tag["Key"] == TAG_RAY_USER_NODE_TYPE
        }
        assert set(started) == set(cluster["available_node_types"])
        for name, machine in started.items():
            assert machine.image_id.startswith(
                "resolve:ssm:/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver"
            )
            if name != cluster["head_node_type"]:
                assert machine.iam_instance_profile["Arn"] == config["head_node"]["IamInstanceProfile"]["Arn"]
        policies = iam.list_attached_role_policies(RoleName="ray-autoscaler-v1")["AttachedPolicies"]
        assert "AmazonS3FullAccess" in {policy["PolicyName"] for policy in policies}


def test_machines_have_the_cores_and_gpus_that_are_counted_on(
    cluster: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """moto carries Amazon's table of instance types; Ray derives each group's CPUs and GPUs from it."""
    from moto.ec2.models.instance_types import INSTANCE_TYPES  # takes a second, in every process that finds tests

    monkeypatch.setattr(node_provider, "list_ec2_instances", lambda *where: list(INSTANCE_TYPES.values()))
    filled = node_provider.AWSNodeProvider.fillout_available_node_types_resources(cluster)["available_node_types"]
    counts = {name: (group["resources"]["CPU"], group["resources"].get("GPU", 0)) for name, group in filled.items()}
    # Work on the head would take memory from Ray's control plane.
    assert counts == {"head": (0, 0), "cpu_group": (16, 0), "gpu_group": (48, 4)}


def test_images_hold_the_ray_that_the_constraints_pin(cluster: dict[str, Any]) -> None:
    groups = cluster["available_node_types"]
    assert cluster["docker"]["image"] == f"rayproject/ray:{pinned('ray')}-py311-cpu"
    assert groups["gpu_group"]["docker"]["worker_image"] == f"rayproject/ray:{pinned('ray')}-py311-gpu"


def test_groups_for_data_and_training_fit_the_limit(cluster: dict[str, Any]) -> None:
    groups = [each for name, each in cluster["available_node_types"].items() if name != cluster["head_node_type"]]
    assert all(0 <= group["min_workers"] <= group["max_workers"] for group in groups)
    assert sum(group["max_workers"] for group in groups) == cluster["max_workers"]


def test_setup_lists_the_projects_own_dependencies(cluster: dict[str, Any], tmp_path: Path) -> None:
    list_dependencies = cluster["setup_commands"][0]
    assert str(ROOT) not in list_dependencies
    command = list_dependencies.replace("/tmp/", f"{tmp_path}/").replace("/home/ray/spn/", f"{ROOT}/")
    subprocess.run(["bash", "-euc", command.replace("python ", f"{sys.executable} ", 1)], check=True)
    listed = (tmp_path / "requirements.txt").read_text().splitlines()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert listed == project["dependencies"] + project["optional-dependencies"]["pipelines"]


def test_mounted_files_are_there(cluster: dict[str, Any]) -> None:
    local = [path for path in cluster["file_mounts"].values() if not path.startswith("~")]
    assert local == ["pyproject.toml", ".ci/constraints.txt"]
    assert all((ROOT / path).is_file() for path in local)
    # Every path that the setup reads is one that was mounted.
    read = set(re.findall(r"/home/ray/spn/[\w.]+", " ".join(cluster["setup_commands"])))
    assert read == {path for path in cluster["file_mounts"] if path.startswith("/home/ray/spn/")}
