"""EFA of a pool: its choice by key, types and network; interfaces, security group, devices and driver."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from infra.config import RayClusterArgs
from infra.config.plan import Plan, make_plan
from infra.definitions import efa
from infra.definitions.user_data import user_data
from infra.errors import Refusal, SettingError
from tests.infra.fake_aws import CLUSTER, Cloud
from tests.infra.stacks import deployed

P4D, P5 = "p4d.24xlarge", "p5.48xlarge"
NETWORK = {"vpc_id": "vpc-0a1b", "subnet_ids": ("subnet-0c2d",)}
ONLY = "efa-only"


def plan(cloud: Cloud, *types: str, count: int = 2, **settings: Any) -> Plan:
    """Plan with these types in the default pool, whose EFA is `auto` if it is not given."""
    args: dict[str, Any] = {"worker_instance_types": types, "worker_count": count, "check_quotas": False}
    args |= {"worker_efa": "auto", **settings}
    return cloud.run(lambda: make_plan(RayClusterArgs(**args), CLUSTER))


def cards(cloud: Cloud, *types: str, **settings: Any) -> tuple[int, ...]:
    """Network cards of the default pool that have an EFA."""
    return plan(cloud, *types, **settings).nodes["workers"].efa_cards


@pytest.mark.parametrize(
    ("name", "interfaces"),
    [
        ("g5.xlarge", {0: "interface"}),
        ("g4dn.8xlarge", {0: "efa"}),
        ("g5.12xlarge", {0: "efa"}),
        ("p5.4xlarge", {0: "efa"}),
        ("g6e.24xlarge", {0: "efa", 1: ONLY}),
        ("g6e.48xlarge", {0: "efa", 1: ONLY, 2: ONLY, 3: ONLY}),
        (P4D, {0: "efa", 1: ONLY, 2: ONLY, 3: ONLY}),
        (P5, {0: "efa", **dict.fromkeys(range(1, 32), ONLY)}),
        ("p5en.48xlarge", {0: "efa", **dict.fromkeys(range(1, 16), ONLY)}),
        ("p6-b200.48xlarge", {0: "efa", **dict.fromkeys(range(1, 8), ONLY)}),
        ("p6-b300.48xlarge", {0: "interface", **dict.fromkeys(range(1, 17), ONLY)}),
    ],
)
def test_interfaces_of_each_type(cloud: Cloud, name: str, interfaces: dict[int, str]) -> None:
    assert efa.interfaces(cards(cloud, name)) == interfaces


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"interfaces": 4, "network_cards": 4, "slots": 2}, (0, 1, 2, 3)),
        ({"interfaces": 4, "network_cards": 4, "slots": 1}, ()),
        ({"interfaces": 4, "network_cards": 4, "slots": 0}, ()),
        ({"interfaces": 16, "network_cards": 17, "slots": 4}, tuple(range(1, 17))),
        ({"interfaces": 2, "network_cards": 4, "slots": 4}, ()),
        ({"interfaces": 5, "network_cards": 4, "slots": 4}, ()),
        ({"interfaces": 0, "network_cards": 1, "slots": 4}, ()),
    ],
)
def test_cards_leave_a_slot_for_the_task(facts: dict[str, int], expected: tuple[int, ...]) -> None:
    assert efa.cards(**facts) == expected


@pytest.mark.parametrize(
    ("key", "count", "is_on"),
    [
        ("auto", 0, False),
        ("auto", 1, False),
        ("auto", 2, True),
        ("true", 1, True),
        ("true", 2, True),
        ("false", 2, False),
    ],
)
def test_auto_needs_two_workers(cloud: Cloud, warnings: list[str], key: str, count: int, is_on: bool) -> None:
    on = plan(cloud, P4D, count=count, worker_efa=key).nodes["workers"].efa_cards
    assert bool(on) == is_on
    assert not [line for line in warnings if "efa" in line.lower()]


def test_each_pool_has_its_own_choice(cloud: Cloud) -> None:
    pool = {"instance_types": [P5], "max": 2, "efa": "auto"}
    pools = {
        "a": pool,
        "b": {**pool, "efa": "false"},
        "c": {"instance_types": ["c6i.large"], "max": 2, "efa": "auto"},
        "d": {"instance_types": [P5], "max": 3},
        "z": {**pool, "zones": ["us-west-2a", "us-west-2b"]},
    }
    nodes = plan(cloud, "g5.12xlarge", worker_pools=pools).nodes
    numbers = {kind: len(node.efa_cards) for kind, node in nodes.items()}
    assert numbers == {
        "head": 0,
        "workers": 1,
        "a-workers": 32,
        "b-workers": 0,
        "c-workers": 0,
        "d-workers": 0,
        "z-workers-a": 32,
        "z-workers-b": 32,
    }


MIXED = "needs types with the same EFA interfaces: "
ALONE = "use one of them, and a pool for each other"
# Types and settings without EFA: the problem, the way out, and whether `auto` warns of it.
LACKS: list[tuple[tuple[str, ...], dict[str, Any], str, str, bool]] = [
    (("g5.xlarge",), {}, "needs a type with EFA, which g5.xlarge can't have", "use a larger type", False),
    (("g5.xlarge", "g5.2xlarge"), {}, "which g5.xlarge and g5.2xlarge can't have", "use a larger type", False),
    (("g4dn.xlarge",), {}, "which g4dn.xlarge can't have", "use a larger type", False),
    (("g5.xlarge", "g5.8xlarge"), {}, f"{MIXED}g5.xlarge has 0, g5.8xlarge has 1", ALONE, True),
    (("g5.8xlarge", "g5.xlarge"), {}, f"{MIXED}g5.8xlarge has 1, g5.xlarge has 0", ALONE, True),
    (("g6e.12xlarge", "g6e.24xlarge"), {}, f"{MIXED}g6e.12xlarge has 1, g6e.24xlarge has 2", ALONE, True),
    (("p5e.48xlarge", "p5en.48xlarge"), {}, f"{MIXED}p5e.48xlarge has 32, p5en.48xlarge has 16", ALONE, True),
    ((P5, "p6-b200.48xlarge"), {}, f"{MIXED}{P5} has 32, p6-b200.48xlarge has 8", ALONE, True),
    (
        (P4D,),
        {"spread_zones": True, "availability_zones": ("us-west-2a", "us-west-2b")},
        "needs workers in one zone, and spread_zones lets a job span several",
        "set spread_zones to false",
        True,
    ),
    ((P4D,), NETWORK, "subnet-0c2d assigns a public address, for one alone", "--subnet-id subnet-0c2d), or", True),
    (("p6-b300.48xlarge",), NETWORK, "subnet-0c2d assigns a public address", "turn that off (aws ec2 modify-", True),
]


@pytest.mark.parametrize(("types", "settings", "problem", "way_out", "_"), LACKS)
def test_true_is_refused_without_efa(
    cloud: Cloud, types: tuple[str, ...], settings: dict[str, Any], problem: str, way_out: str, _: bool
) -> None:
    cloud.subnet = {"mapPublicIpOnLaunch": True}
    with pytest.raises(SettingError) as refused:
        plan(cloud, *types, worker_efa="true", **settings)
    line = str(refused.value)
    assert line.startswith("worker_efa: 'true' ")
    assert problem in line
    assert way_out in line
    assert line.endswith(", or set it to false")


@pytest.mark.parametrize(("types", "settings", "problem", "way_out", "warns"), LACKS)
def test_auto_is_off_without_efa(
    cloud: Cloud,
    warnings: list[str],
    types: tuple[str, ...],
    settings: dict[str, Any],
    problem: str,
    way_out: str,
    warns: bool,
) -> None:
    cloud.subnet = {"mapPublicIpOnLaunch": True}
    assert cards(cloud, *types, **settings) == ()
    lines = [line for line in warnings if line.startswith("worker_efa: EFA is off: 'auto' ")]
    assert len(lines) == warns
    for line in lines:
        assert problem in line
        assert way_out in line


@pytest.mark.parametrize("name", ["c6i.32xlarge", "hpc7a.96xlarge", "c6i.large"])
def test_a_pool_without_gpus_has_no_efa(cloud: Cloud, warnings: list[str], name: str) -> None:
    pool = {"instance_types": [name], "max": 2, "efa": "auto"}
    assert not plan(cloud, "g5.xlarge", worker_pools={"hpc": pool}).nodes["hpc-workers"].efa_cards
    assert not [line for line in warnings if "EFA" in line]
    with pytest.raises(SettingError, match=rf"^worker_pools\.hpc\.efa: 'true' connects GPUs, and {name} has none; "):
        plan(cloud, "g5.xlarge", worker_pools={"hpc": {**pool, "efa": "true"}})


def test_one_interface_needs_no_private_subnet(cloud: Cloud) -> None:
    cloud.subnet = {"mapPublicIpOnLaunch": True}
    assert cards(cloud, "g5.12xlarge", worker_efa="true", **NETWORK) == (0,)


def test_types_with_equal_efa_share_a_pool(cloud: Cloud) -> None:
    assert cards(cloud, "g5.12xlarge", "g5.24xlarge", worker_efa="true") == (0,)


@pytest.mark.parametrize(
    ("stored", "read"), [("auto", "auto"), ("true", "true"), ("false", "false"), (True, "true"), (False, "false")]
)
def test_booleans_and_texts_are_read(cloud: Cloud, stored: Any, read: str) -> None:
    cloud.config = {"workerPools": json.dumps({"h100": {"instanceTypes": [P5], "efa": stored}})}
    cloud.config |= {"workerEfa": str(stored).lower()}
    args = cloud.run(RayClusterArgs.from_config)
    assert (args.pools["h100"].efa, args.pools["default"].efa) == (read, read)
    assert RayClusterArgs(worker_efa=stored).worker_efa == read


@pytest.mark.parametrize("value", ["", "yes", "True", "TRUE", "on", "1", "auto,true", "enabled", "efa-only"])
def test_other_texts_are_refused(cloud: Cloud, value: str) -> None:
    for config in ({"workerEfa": value}, {"workerPools": json.dumps({"a": {"instanceTypes": [P5], "efa": value}})}):
        cloud.config = config
        with pytest.raises(SettingError, match=r"fa: '.*' must be auto, true or false; use one of these"):
            cloud.run(RayClusterArgs.from_config)


@pytest.mark.parametrize("value", [1, 0, 1.0, None, [True], {}])
def test_other_types_are_refused(cloud: Cloud, value: Any) -> None:
    cloud.config = {"workerPools": json.dumps({"a": {"instanceTypes": [P5], "efa": value}})}
    with pytest.raises(SettingError, match=r"^workerPools\.a\.efa: .* (is not a string|must be auto, true or false); "):
        cloud.run(RayClusterArgs.from_config)


def template(cloud: Cloud, kind: str) -> list[dict[str, Any]]:
    """Network interfaces of a launch template."""
    return cloud.resources[f"{kind}-template"].inputs["networkInterfaces"]


def test_each_card_has_an_interface() -> None:
    first, *others = template(deployed("pools"), "h100-workers-a")
    assert first == {
        "deviceIndex": 0.0,
        "interfaceType": "efa",
        "securityGroups": ["ray-on-ecs-network-instances-group-id", "ray-on-ecs-network-efa-group-id"],
        "deleteOnTermination": "true",
    }
    assert others == [
        {
            "deviceIndex": 0.0,
            "networkCardIndex": card,
            "interfaceType": "efa-only",
            "securityGroups": ["ray-on-ecs-network-efa-group-id"],
            "deleteOnTermination": "true",
        }
        for card in range(1, 32)
    ]


def test_one_interface_has_no_public_address() -> None:
    [interface] = template(deployed("large workers"), "workers")
    assert (interface["interfaceType"], interface["associatePublicIpAddress"]) == ("efa", "false")


@pytest.mark.parametrize("kind", ["head", "workers", "l4-workers", "prep-workers"])
def test_other_nodes_have_no_efa(kind: str) -> None:
    [interface] = template(deployed("pools"), kind)
    assert interface.keys().isdisjoint({"interfaceType", "networkCardIndex"})
    assert interface["securityGroups"] == ["ray-on-ecs-network-instances-group-id"]


def test_efa_interfaces_admit_each_other_both_ways() -> None:
    resources = deployed("pools").resources
    group = "ray-on-ecs-network-efa-group-id"
    for way in ("ingress", "egress"):
        rule = resources[f"network-efa-{way}"].inputs
        assert (rule["securityGroupId"], rule["referencedSecurityGroupId"], rule["ipProtocol"]) == (group, group, "-1")


def test_efa_has_no_group_without_its_types() -> None:
    assert "network-efa-group" not in deployed("default").resources


def container(stack: str, task: str) -> dict[str, Any]:
    """Container definition of a stack's task."""
    [definition] = json.loads(deployed(stack).resources[f"{task}-definition"].inputs["containerDefinitions"])
    return definition


def test_task_has_all_efa_devices() -> None:
    definition = container("pools", "h100-worker-a-task")
    paths = [f"/dev/infiniband/uverbs{number}" for number in range(32)]
    devices = definition["linuxParameters"]["devices"]
    assert [device["hostPath"] for device in devices] == [device["containerPath"] for device in devices] == paths
    assert {tuple(device["permissions"]) for device in devices} == {("read", "write", "mknod")}
    assert {"name": "memlock", "softLimit": -1, "hardLimit": -1} in definition["ulimits"]
    assert not [entry for entry in definition["environment"] if entry["name"].startswith(("FI_", "NCCL_"))]


@pytest.mark.parametrize("task", ["head-task", "worker-task", "l4-worker-task"])
def test_other_tasks_have_no_efa_devices(task: str) -> None:
    definition = container("pools", task)
    assert "devices" not in definition["linuxParameters"]
    assert [limit["name"] for limit in definition["ulimits"]] == ["nofile"]


def test_devices_count_in_the_size_of_a_task(cloud: Cloud) -> None:
    environment = {"LONG": 57_000 * "x"}
    plan(cloud, P4D, environment=environment)
    with pytest.raises(
        Refusal, match=r"^environment: its 1 values make \d+ bytes of a task definition, of at most 65536"
    ):
        plan(cloud, P5, environment=environment)


STUBS = "modprobe() { echo modprobe $1; }; udevadm() { :; }; shutdown() { echo shutdown $*; }"
DEVICES = [
    (2, ["uverbs0", "uverbs1"], None),
    (2, ["uverbs0", "uverbs1", "uverbs2", "rdma_cm"], None),
    (1, ["uverbs0"], None),
    (32, [f"uverbs{number}" for number in range(32)], None),
    (32, [f"uverbs{number}" for number in range(31)], 31),
    (2, ["uverbs0"], 1),
    (2, ["uverbs0", "rdma_cm", "umad0"], 1),
    (2, ["rdma_cm"], 0),
    (2, [], 0),  # an empty folder
    (1, None, 0),
]


@pytest.mark.parametrize(("number", "devices", "found"), DEVICES)
def test_instance_without_its_devices_does_not_join(
    tmp_path: Path, number: int, devices: list[str] | None, found: int | None
) -> None:
    (tmp_path / "modules-load.d").mkdir()
    if devices is not None:
        (tmp_path / "infiniband").mkdir()
    for device in devices or ():
        (tmp_path / "infiniband" / device).touch()
    script = efa.load_driver(number).replace("/etc", str(tmp_path)).replace("/dev/infiniband", f"{tmp_path}/infiniband")
    script = script.replace("/dev/console", f"{tmp_path}/console")
    done = subprocess.run(
        ["bash", "-c", f"{STUBS}\n{script}\necho joins"], text=True, capture_output=True, timeout=60, check=False
    )
    assert (tmp_path / "modules-load.d" / "efa.conf").read_text() == "efa\n"
    assert not done.stderr
    if found is None:
        assert (done.returncode, done.stdout) == (0, "modprobe efa\njoins\n")
        assert not (tmp_path / "console").exists()
    else:
        assert (done.returncode, done.stdout) == (1, "modprobe efa\nshutdown -h now\n")
        told = (tmp_path / "console").read_text()
        assert told == f"EFA: {found} of {number} devices: this instance does not join, and shuts down (docs/efa.md)\n"


def test_only_efa_instances_load_its_driver() -> None:
    assert "modprobe efa" in user_data("ray", efa_devices=4)
    assert "efa" not in user_data("ray")


def test_preview_counts_efa_interfaces(cloud: Cloud) -> None:
    cloud.preview = True
    plan(cloud, P4D)
    plan(cloud, P4D, worker_efa="false")
    with_efa, without = (line for line in cloud.messages if line.startswith("pool default: "))
    assert with_efa.startswith("pool default: 2 x p4d.24xlarge with 4 EFA each and 8,000 GB local disks, 2 on demand, ")
    assert "EFA" not in without


OFF = ": EFA, which {} has, is off; set it to auto to use it (docs/efa.md)"


@pytest.mark.parametrize(
    ("types", "settings", "is_told"),
    [
        ((P4D,), {}, True),
        ((P5,), {"worker_efa": "false"}, True),
        (("g5.12xlarge", "g5.24xlarge"), {}, True),
        ((P4D,), {"worker_count": 1}, False),
        ((P4D,), {"worker_count": 0}, False),
        ((P4D,), {"worker_count": 0, "max_workers": 2}, True),
        ((P4D,), {"worker_efa": "auto"}, False),
        ((P4D,), {"worker_efa": "true"}, False),
        (("g5.xlarge",), {}, False),
        (("g5.xlarge", "g5.8xlarge"), {}, False),
        ((P4D,), {"spread_zones": True, "availability_zones": ("us-west-2a", "us-west-2b")}, False),
        ((P4D,), NETWORK, False),
    ],
)
def test_preview_tells_of_efa_that_is_off(
    cloud: Cloud, warnings: list[str], types: tuple[str, ...], settings: dict[str, Any], is_told: bool
) -> None:
    cloud.preview, cloud.subnet = True, {"mapPublicIpOnLaunch": True}
    args: dict[str, Any] = {"worker_instance_types": types, "check_quotas": False, **settings}
    made = cloud.run(lambda: make_plan(RayClusterArgs(**args), CLUSTER))
    assert bool(made.nodes["workers"].efa_cards) == (settings.get("worker_efa") in ("auto", "true"))
    assert [line for line in cloud.messages if "EFA, which" in line] == is_told * ["worker_efa" + OFF.format(types[0])]
    assert not [line for line in warnings if "EFA" in line]


def test_preview_names_the_key_of_each_pool(cloud: Cloud) -> None:
    cloud.preview = True
    cloud.config = {"workerPools": json.dumps({"h100": {"instanceTypes": [P5], "max": 2}}), "checkQuotas": "false"}
    cloud.run(lambda: make_plan(RayClusterArgs.from_config(), CLUSTER))
    assert f"workerPools.h100.efa{OFF.format(P5)}" in cloud.messages
