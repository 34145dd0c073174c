"""Worker pools from a stack's configuration, from Python and from other languages: values and one-line errors."""

from __future__ import annotations

import json
import re
from typing import Any

import pulumi
import pytest

from component.__main__ import Host
from component.ray_cluster import RayCluster as HostedCluster
from infra.config import RayClusterArgs
from infra.config.args import defaults
from infra.config.worker_pool import OF_CLUSTER, WorkerPoolArgs, pool_defaults
from infra.errors import Refusal, SettingError
from infra.types import kind_of
from tests.infra.fake_aws import Cloud, later

P5 = "p5.48xlarge"


def load(cloud: Cloud, pools: Any, **config: str) -> RayClusterArgs:
    """The arguments of a stack with these pools, as JSON, or as text."""
    cloud.config = {"workerPools": pools if isinstance(pools, str) else json.dumps(pools), **config}
    return cloud.run(RayClusterArgs.from_config)


def pool(**keys: Any) -> Any:
    """One pool, h100, with keys beside its type."""
    return {"h100": {"instanceTypes": [P5], **keys}}


def in_python(**keys: Any) -> Any:
    return {"h100": {"instance_types": [P5], **keys}}


ALL = {
    "instanceTypes": [P5, "p5e.48xlarge"],
    "zones": ["us-west-2c", "us-west-2a"],
    "min": 1,
    "initial": 2,
    "max": 4,
    "spot": True,
    "onDemand": 1,
    "rootVolumeGib": 500,
    "efa": "auto",
    "capacityReservationId": "",  # excludes several types and spot
}
MADE = WorkerPoolArgs(
    instance_types=(P5, "p5e.48xlarge"),
    zones=("us-west-2c", "us-west-2a"),
    min=1,
    initial=2,
    max=4,
    spot=True,
    on_demand=1,
    root_volume_gib=500,
    efa="auto",
)


def test_every_key_of_a_pool_is_read(cloud: Cloud) -> None:
    assert len(ALL) == len(pool_defaults())
    assert load(cloud, {"h100": ALL}).pools["h100"] == MADE
    assert RayClusterArgs(worker_pools={"h100": MADE}).pools["h100"] == MADE
    assert RayClusterArgs(worker_pools={"h100": vars(MADE)}).pools["h100"] == MADE


def test_texts_in_place_of_values_are_read(cloud: Cloud) -> None:
    stored = {
        **{key: str(value).lower() for key, value in ALL.items()},
        "instanceTypes": f"{P5}, p5e.48xlarge",
        "zones": "us-west-2c,us-west-2a,",
    }
    assert load(cloud, {"h100": stored}).pools["h100"] == MADE
    assert load(cloud, {"h100": {**ALL, "max": 4.0}}).pools["h100"] == MADE


@pytest.mark.parametrize("value", ["{}", "null", " { } "])
def test_no_pools_are_the_default(cloud: Cloud, value: str) -> None:
    assert load(cloud, value).pools.keys() == {"default"}
    assert vars(load(cloud, value)) == vars(RayClusterArgs())


def test_pools_have_the_order_of_their_names(cloud: Cloud) -> None:
    given = {name: {"instanceTypes": [P5], "zones": [f"us-west-2{name}"]} for name in "cab"}
    cpu = {"cpuWorkerInstanceTypes": "c6i.large", "cpuWorkerCount": "1"}
    assert list(load(cloud, given, **cpu).pools) == ["default", "cpu", "a", "b", "c"]


def test_spot_leaves_the_on_demand_part() -> None:
    pools = RayClusterArgs(worker_pools=in_python(max=4, spot=True, on_demand=1)).pools
    assert (pools["h100"].spot_count, pools["default"].spot_count) == (3, 0)


TYPES: Any = {"instanceTypes": [P5]}
# A value of each kind that is refused, with its field, and parts of the line.
BAD: list[tuple[Any, str, str]] = [
    ("h100=p5.48xlarge", "workerPools", "is not an object"),
    ([pool()], "workerPools", "is not an object"),
    ({"h100": None}, "workerPools.h100", "is not an object; use one with instanceTypes and max"),
    ({"h100": P5}, "workerPools.h100", "is not an object"),
    ({"h100": {}}, "workerPools.h100.instanceTypes", "is missing"),
    ({"h100": {"instanceTypes": " , "}}, "workerPools.h100.instanceTypes", "is empty"),
    ({"h100": {"instanceTypes": None}}, "workerPools.h100.instanceTypes", "is not a list"),
    ({"h100": {"instanceTypes": [5]}}, "workerPools.h100.instanceTypes", "5 is not a string"),
    ({"h100": {"instanceTypes": [P5, P5]}}, "workerPools.h100.instanceTypes", "contains a value twice"),
    ({"h100": {"instanceTypes": f'["{P5}"]'}}, "workerPools.h100.instanceTypes", "is in brackets"),
    (pool(zones="us-west-2a,us-west-2a"), "workerPools.h100.zones", "contains a value twice"),
    *[
        (pool(**{key: value}), f"workerPools.h100.{key}", "is not an integer")
        for key in ("min", "initial", "max", "onDemand", "rootVolumeGib")
        for value in ("few", "", "1.5", "٣", 1.5, True, None)
    ],
    *[(pool(**{key: "-1"}), f"workerPools.h100.{key}", "negative") for key in ("min", "initial", "max", "onDemand")],
    *[(pool(rootVolumeGib=size), "workerPools.h100.rootVolumeGib", "must be 50 ") for size in (-1, 49, 16385)],
    *[(pool(spot=value), "workerPools.h100.spot", "is not a boolean") for value in ("yes", "True", 1, None)],
    (pool(initial=3, max=2), "workerPools.h100.max", "must be at least workerPools.h100.initial (3)"),
    (pool(min=3, max=2), "workerPools.h100.max", "must be at least workerPools.h100.min (3)"),
    (pool(max=2, onDemand=1), "workerPools.h100.onDemand", "requires workerPools.h100.spot"),
    (pool(max=2, spot=True, onDemand=3), "workerPools.h100.onDemand", "must not exceed the maximum of 2 workers"),
    *[
        ({name: TYPES}, "workerPools", "is not a name of a pool")
        for name in ("H100", "h_100", "100h", "h100-", "", "h 100", "h.100", "h100\n", "größe", 33 * "h")
    ],
    ({"default": TYPES}, "workerPools", "is a reserved name; its key is workerInstanceTypes"),
    ({"cpu": TYPES}, "workerPools", "is a reserved name; its key is cpuWorkerInstanceTypes"),
    *[({name: TYPES}, "workerPools", "reserved name; use another") for name in ("head", "cpu-workers", "ray")],
]


@pytest.mark.parametrize(("pools", "field", "part"), BAD)
def test_a_bad_pool_is_refused_in_one_line(cloud: Cloud, pools: Any, field: str, part: str) -> None:
    with pytest.raises(Refusal) as refused:
        load(cloud, pools)
    assert str(refused.value).startswith(f"{field}: ")
    assert part in str(refused.value)
    assert re.search("; [a-z]+ ", str(refused.value))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["a", "h100", "a1-b2-c3", "spot", "max", "workers", 32 * "h"])
def test_names_of_pools(cloud: Cloud, name: str) -> None:
    assert name in load(cloud, {name: TYPES}).pools
    with pytest.raises(SettingError, match=f"^workerPools.{name}.rootVolumeGib: 1 must be 50 "):
        load(cloud, {name: {**TYPES, "rootVolumeGib": 1}})


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("instance_types", "did you mean instanceTypes?"),
        ("InstanceType", "did you mean instanceTypes?"),
        ("maximum", "did you mean max?"),
        ("maxWorkers", "did you mean max?"),
        ("max_count", "did you mean max?"),
        ("minCpuWorkers", "did you mean min?"),
        ("workerCount", "did you mean initial?"),
        ("initialWorkers", "did you mean initial?"),
        ("availabilityZones", "did you mean zones?"),
        ("availabilityZone", "did you mean zones?"),
        ("workerInstanceTypes", "did you mean instanceTypes?"),
        ("types", "did you mean instanceTypes?"),
        ("spotWorkers", "did you mean spot?"),
        ("ondemand", "did you mean onDemand?"),
        ("onDemandWorkers", "did you mean onDemand?"),
        ("rootVolumeGiB", "did you mean rootVolumeGib?"),
        ("idleTimeoutMinutes", "it is a key of the cluster, and holds for all pools"),
        ("maxHourlyUsd", "it is a key of the cluster, and holds for all pools"),
        (
            "tenancy",
            "use instanceTypes, zones, min, initial, max, spot, onDemand, rootVolumeGib, efa, capacityReservationId",
        ),
    ],
)
def test_unknown_keys_of_a_pool_are_refused(cloud: Cloud, key: str, hint: str) -> None:
    with pytest.raises(pulumi.RunError, match=rf"^workerPools\.h100\.{key}: unknown key of a pool; {re.escape(hint)}$"):
        load(cloud, pool(**{key: "secret"}))


def test_all_unknown_keys_of_a_pool_are_named(cloud: Cloud) -> None:
    with pytest.raises(pulumi.RunError) as refused:
        load(cloud, pool(maxWorkers=2, tenancy="secret", availabilityZones="us-west-2c"))
    assert str(refused.value) == (
        "workerPools.h100: unknown keys of a pool: maxWorkers (did you mean max?), tenancy, availabilityZones (did you "
        "mean zones?); use instanceTypes, zones, min, initial, max, spot, onDemand, rootVolumeGib, efa, "
        "capacityReservationId"
    )


def test_keys_of_the_cluster_are_its_fields() -> None:
    assert {*OF_CLUSTER} <= defaults().keys()


def test_python_has_its_own_spelling_of_keys() -> None:
    with pytest.raises(pulumi.RunError, match=r"^worker_pools\.h100\.onDemand: .* did you mean on_demand\?$"):
        RayClusterArgs(worker_pools=in_python(onDemand=1))


@pytest.mark.parametrize(
    ("path", "make"),
    [
        ("worker_pools", lambda: later({})),
        ("worker_pools.h100", lambda: {"h100": later({})}),
        ("worker_pools.h100.instance_types", lambda: {"h100": {"instance_types": later([P5])}}),
        ("worker_pools.h100.instance_types", lambda: {"h100": WorkerPoolArgs(instance_types=[later(P5)])}),  # type: ignore
        ("worker_pools.h100.max", lambda: in_python(max=pulumi.Output.secret(2))),
    ],
)
def test_outputs_in_a_pool_are_refused(path: str, make: Any) -> None:
    with pytest.raises(Refusal, match=f"^{path}: must be known while Pulumi plans, and "):
        RayClusterArgs(worker_pools=make())


@pytest.mark.parametrize(
    ("pools", "line"),
    [
        (None, "worker_pools: None is not an object; "),
        ({5: in_python()}, "worker_pools: 5 is not a name of a pool; "),
        ({"h100": P5}, "worker_pools.h100: 'p5.48xlarge' is not an object; use one with instance_types and max"),
        (in_python(max="2"), "worker_pools.h100.max: '2' is not an integer; "),
        ({"h100": WorkerPoolArgs()}, "worker_pools.h100.instance_types: '' is empty; "),
        (in_python(max=2, on_demand=1), "worker_pools.h100.on_demand: 1 requires worker_pools.h100.spot; "),
    ],
)
def test_messages_for_python_name_its_fields(pools: Any, line: str) -> None:
    with pytest.raises(SettingError, match=f"^{re.escape(line)}"):
        RayClusterArgs(worker_pools=pools)


def test_a_secret_in_a_pool_is_refused_and_not_shown(cloud: Cloud) -> None:
    cloud.secret_keys = ("workerPools",)  # of an object with a secret anywhere, Pulumi reports the whole
    with pytest.raises(
        Refusal, match=r"^workerPools: is stored as a secret, .*; `pulumi config rm workerPools`"
    ) as refused:
        load(cloud, pool())
    assert P5 not in str(refused.value)


@pytest.mark.parametrize("key", ["workerPools.h100.max", "workerPools.h100.instanceTypes[0]", "workerPools[0]"])
def test_a_path_without_its_flag_is_refused(cloud: Cloud, key: str) -> None:
    cloud.config = {key: "2"}
    with pytest.raises(pulumi.RunError) as refused:
        cloud.run(RayClusterArgs.from_config)
    line = f"{key}: unknown configuration key; set it with `pulumi config set --path '{key}' VALUE`. Remove it: "
    assert str(refused.value).startswith(line)


@pytest.mark.parametrize(
    ("keys", "is_alike"),
    [
        ({}, True),
        ({"max": 9, "rootVolumeGib": 100}, True),
        ({"max": 0}, False),
        ({"rootVolumeGib": 200}, False),
        ({"zones": ["us-west-2a"]}, False),
        ({"spot": True}, False),
        ({"efa": True}, False),
        ({"instanceTypes": [P5, "p5e.48xlarge"]}, False),
    ],
)
def test_pools_that_nothing_distinguishes_are_warned_about(
    cloud: Cloud, warnings: list[str], keys: dict[str, Any], is_alike: bool
) -> None:
    one = {"instanceTypes": [P5], "max": 2}
    load(cloud, {"a": one, "b": {**one, **keys}})
    lines = [line for line in warnings if line.startswith("workerPools.b.instanceTypes: are those of the pool a, ")]
    assert len(lines) == len(warnings) == is_alike


@pytest.mark.parametrize(
    ("config", "is_alike"),
    [
        ({}, True),
        ({"availabilityZones": "us-west-2b"}, True),
        ({"availabilityZones": "us-west-2b,us-west-2c"}, False),
        ({"workerCount": "0"}, False),
    ],
)
def test_a_pool_like_the_default_one_is_warned_about(
    cloud: Cloud, warnings: list[str], config: dict[str, str], is_alike: bool
) -> None:
    load(cloud, {"more": {"instanceTypes": ["g5.xlarge"], "max": 2}}, **config)
    assert [line.partition(",")[0] for line in warnings] == [
        "workerPools.more.instanceTypes: are those of the pool default"
    ] * is_alike


def test_other_languages_have_the_keys_of_the_configuration(cloud: Cloud) -> None:
    """The schema has a type for a pool; the provider host maps its keys, and integers arrive as floats."""
    host = Host([HostedCluster], "ray-on-ecs")
    schema = json.loads(host.schema or "")
    properties = schema["types"]["ray-on-ecs:index:WorkerPool"]["properties"]
    assert properties.keys() == ALL.keys()
    assert all(item["description"] for item in properties.values())
    inputs = schema["resources"]["ray-on-ecs:index:RayCluster"]["inputProperties"]["workerPools"]
    assert inputs["additionalProperties"]["$ref"] == "#/types/ray-on-ecs:index:WorkerPool"

    def construct(**keys: Any) -> None:
        cloud.run(lambda: host.construct("vision", "ray-on-ecs:index:RayCluster", {"workerPools": pool(**keys)}))

    for keys, path, reason in [
        ({"max": 1.5}, "workerPools.h100.max", "1.5 is not an integer; "),
        ({"max": 2.0, "zones": ["us-east-1a"]}, "workerPools.h100.zones", "'us-east-1a' is not an availability zone"),
    ]:
        with pytest.raises(pulumi.errors.InputPropertyError) as refused:
            construct(**keys)
        assert refused.value.property_path == path
        assert refused.value.reason.startswith(reason)


@pytest.mark.parametrize(
    ("of_pool", "zone", "kind"),
    [
        ("default", "", "workers"),
        ("default", "us-west-2b", "workers-b"),
        ("cpu", "", "cpu-workers"),
        ("h100", "", "h100-workers"),
        ("h100", "us-west-2c", "h100-workers-c"),
        ("h100", "us-gov-west-1a", "h100-workers-a"),
        ("h100", "ap-southeast-2b", "h100-workers-b"),
        ("default", "us-west-2-lax-1a", "workers-lax-1a"),
        ("default", "us-east-1-wl1-bos-wlz-1", "workers-wl1-bos-wlz-1"),
    ],
)
def test_kinds_of_node(of_pool: str, zone: str, kind: str) -> None:
    assert kind_of(of_pool, zone) == kind
