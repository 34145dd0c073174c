"""Local disks in the plan and in the user data; test_local_disk_mounts.py runs the script."""

from __future__ import annotations

import base64
import shutil
import subprocess
from dataclasses import replace

import pytest
from pulumi import Output

from infra.definitions.local_disks import MOVE, move_docker
from infra.definitions.user_data import INSTANCE_DIR, MOST_BYTES, encoded, user_data
from infra.errors import Refusal
from infra.types import NodeSpec
from ray_on_ecs.contract import LOCAL_DISKS_FILE
from tests.infra.fake_aws import Cloud, instance_type, node_spec
from tests.infra.stacks import KEY
from tests.infra.test_node_group import GPU, node_group
from tests.infra.test_plan import plan

# GB, as EC2 describes the types.
SIZES = [
    ("g4dn.xlarge", 125),
    ("g5.xlarge", 250),
    ("g5.12xlarge", 3800),
    ("g6.xlarge", 250),
    ("p4d.24xlarge", 8000),
    ("p5.48xlarge", 30400),
    ("m5.large", 0),
    ("d3.xlarge", 0),  # disks of the type hdd, slower than the root volume
]


@pytest.mark.parametrize(("name", "gb"), SIZES)
def test_plan_knows_the_ssds_of_a_type(cloud: Cloud, name: str, gb: int) -> None:
    pool = {"instance_types": [name], "max": 1}
    planned = plan(cloud, worker_pools={"one": pool}, check_quotas=False)
    assert planned.nodes["one-workers"].instances[0].local_disk_gb == gb


@pytest.mark.parametrize("key", [KEY, Output.from_input(KEY)], ids=["text", "output"])
def test_disks_are_not_used_with_a_kms_key(cloud: Cloud, key: str) -> None:
    pools = {
        "one": {"instance_types": ["p5.48xlarge"], "max": 1},
        "prep": {"instance_types": ["m5d.4xlarge"], "max": 1},
    }
    settings = {"head_instance_type": "m5d.4xlarge", "worker_pools": pools, "check_quotas": False}
    used = {kind: node.local_disk_gb > 0 for kind, node in plan(cloud, **settings).nodes.items()}
    assert set(used.values()) == {True}
    with_key = plan(cloud, **settings, kms_key_arn=key).nodes
    assert {kind: node.local_disk_gb > 0 for kind, node in with_key.items()} == dict.fromkeys(used, False)


def spec(*gb: int, root_gib: int = 100) -> NodeSpec:
    """Nodes of types with such local disks."""
    instances = tuple(
        replace(instance_type(f"g5.{number}xlarge"), local_disk_gb=size) for number, size in enumerate(gb)
    )
    return replace(node_spec("g5.xlarge", 2, gpus=1, pool="default"), instances=instances, disk_gib=root_gib)


NODES = [
    (spec(0), 0),
    (spec(250), 250),
    (spec(0, 250), 250),  # the script finds no disk on the first type
    (spec(600, 250), 600),
    (spec(50), 0),
    (spec(50, 250), 250),
    (spec(107), 0),  # 99.65 GiB
    (spec(108), 108),
    (spec(250, root_gib=233), 0),
    (spec(250, root_gib=232), 250),
]


@pytest.mark.parametrize(("node", "gb"), NODES)
def test_disks_below_the_root_volume_are_not_used(cloud: Cloud, node: NodeSpec, gb: int) -> None:
    assert node.local_disk_gb == gb
    node_group(cloud, {**GPU, "node": node})
    text = base64.b64decode(cloud.resources["head-template"].inputs["userData"]).decode()
    assert text == user_data("ray-cluster", local_disks=gb > 0)
    assert (MOVE in text) == (gb > 0)


def test_script_and_workers_name_the_same_file() -> None:
    assert f" {INSTANCE_DIR}/{LOCAL_DISKS_FILE};" in MOVE
    assert f"mkdir -p {INSTANCE_DIR} " in MOVE


def test_user_data_leaves_half_of_its_limit() -> None:
    assert len(user_data("a" * 255, local_disks=True)) < MOST_BYTES // 2


@pytest.mark.parametrize("text", ["a" * MOST_BYTES, "é" * (MOST_BYTES // 2)])
def test_user_data_up_to_the_limit_is_encoded(text: str) -> None:
    assert base64.b64decode(encoded(text)).decode() == text


@pytest.mark.parametrize("text", ["a" * (MOST_BYTES + 1), "é" * (MOST_BYTES // 2 + 1)])
def test_user_data_above_the_limit_is_refused(text: str) -> None:
    with pytest.raises(
        Refusal, match=f"^user data: {len(text.encode())} bytes are more than the 16384 that EC2 takes;"
    ):
        encoded(text)


def test_preview_refuses_user_data_above_the_limit(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infra.definitions.local_disks.MOVE", "#" * MOST_BYTES)
    with pytest.raises(Refusal, match="more than the 16384 that EC2 takes"):
        node_group(cloud, {**GPU, "node": spec(250)})


@pytest.mark.parametrize("script", [MOVE, f"#!/bin/bash\n{move_docker()}"], ids=["script", "user data"])
def test_script_has_no_faults_of_the_shell(script: str) -> None:
    subprocess.run(["bash", "-n"], input=script, text=True, check=True, timeout=60)
    if shutil.which("shellcheck"):
        checked = subprocess.run(["shellcheck", "-"], input=script, text=True, capture_output=True, check=False)
        assert not checked.stdout
