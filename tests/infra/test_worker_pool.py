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
from infra.config.worker_pool import WorkerPoolArgs, pool_defaults
from infra.errors import Refusal, SettingError
from infra.types import Scale, kind_of
from tests.infra.fake_aws import Cloud

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
)


def test_every_key_of_a_pool_is_read(cloud: Cloud) -> None:
    assert len(ALL) == len(pool_defaults())
    assert load(cloud, {"h100": ALL}).pools["h100"] == MADE
    assert RayClusterArgs(worker_pools={"h100": MADE}).pools["h100"] == MADE
    assert RayClusterArgs(worker_pools={"h100": vars(MADE)}).pools["h100"] == MADE


def test_pulumi_may_store_texts_in_place_of_values(cloud: Cloud) -> None:
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


@pytest.mark.parametrize(
    ("keys", "scale"),
    [
        ({}, Scale(initial_count=0, min_count=0, max_count=0, default_job_count=0, idle_minutes=30)),
        ({"max": 4}, Scale(initial_count=0, min_count=0, max_count=4, default_job_count=4, idle_minutes=30)),
        ({"initial": 2}, Scale(initial_count=2, min_count=0, max_count=2, default_job_count=2, idle_minutes=30)),
        ({"min": 1}, Scale(initial_count=1, min_count=1, max_count=1, default_job_count=1, idle_minutes=30)),
        ({"min": 1, "max": 3}, Scale(initial_count=1, min_count=1, max_count=3, default_job_count=1, idle_minutes=30)),
    ],
)
def test_numbers_of_a_pool_give_its_scale(keys: dict[str, int], scale: Scale) -> None:
    assert RayClusterArgs(worker_pools=in_python(**keys)).scale("h100") == scale


def test_spot_leaves_the_on_demand_part() -> None:
    pools = RayClusterArgs(worker_pools=in_python(max=4, spot=True, on_demand=1)).pools
    assert (pools["h100"].spot_count, pools["default"].spot_count) == (3, 0)


BAD: list[tuple[Any, str]] = [
    ("h100", "workerPools: 'h100' is not an object; "),
    ("{", "workerPools: '{' is not an object; "),
    ("h100=p5.48xlarge", "workerPools: 'h100=p5.48xlarge' is not an object; "),
    ("5", "workerPools: 5 is not an object; "),
    ("true", "workerPools: true is not an object; "),
    ([], "workerPools: [] is not an object; "),
    ([pool()], "workerPools: [{"),
    ('"h100"', "workerPools: 'h100' is not an object; "),
    ({"h100": None}, "workerPools.h100: None is not an object; use one with instanceTypes and max"),
    ({"h100": P5}, f"workerPools.h100: '{P5}' is not an object; "),
    ({"h100": [P5]}, f"workerPools.h100: ['{P5}'] is not an object; "),
    ({"h100": 2}, "workerPools.h100: 2 is not an object; "),
    ({"h100": True}, "workerPools.h100: true is not an object; "),
    ({"h100": {}}, "workerPools.h100.instanceTypes: '' is empty; use a family and a size"),
    ({"h100": {"instanceTypes": []}}, "workerPools.h100.instanceTypes: '' is empty; "),
    ({"h100": {"instanceTypes": ""}}, "workerPools.h100.instanceTypes: '' is empty; "),
    ({"h100": {"instanceTypes": " , "}}, "workerPools.h100.instanceTypes: '' is empty; "),
    ({"h100": {"instanceTypes": None}}, "workerPools.h100.instanceTypes: None is not a list; "),
    ({"h100": {"instanceTypes": {"a": P5}}}, "workerPools.h100.instanceTypes: {'a': 'p5.48xlarge'} is not a list; "),
    ({"h100": {"instanceTypes": 5}}, "workerPools.h100.instanceTypes: 5 is not a list; "),
    ({"h100": {"instanceTypes": [5]}}, "workerPools.h100.instanceTypes: 5 is not a string; "),
    ({"h100": {"instanceTypes": [None]}}, "workerPools.h100.instanceTypes: None is not a string; "),
    ({"h100": {"instanceTypes": [[P5]]}}, "workerPools.h100.instanceTypes: ['p5.48xlarge'] is not a string; "),
    ({"h100": {"instanceTypes": [P5, P5]}}, "workerPools.h100.instanceTypes: 'p5.48xlarge,p5.48xlarge' contains a v"),
    ({"h100": {"instanceTypes": f'["{P5}"]'}}, "workerPools.h100.instanceTypes: '[\"p5.48xlarge\"]' is JSON; "),
    (pool(zones=["us-west-2a", "us-west-2a"]), "workerPools.h100.zones: 'us-west-2a,us-west-2a' contains a value twi"),
    (pool(zones="us-west-2a,us-west-2a"), "workerPools.h100.zones: 'us-west-2a,us-west-2a' contains a value twice; "),
    (pool(zones=True), "workerPools.h100.zones: true is not a list; "),
    *[
        (pool(**{key: value}), f"workerPools.h100.{key}: {shown} {problem}; ")
        for key in ("min", "initial", "max", "onDemand", "rootVolumeGib")
        for value, shown, problem in [
            ("few", "'few'", "is not an integer"),
            ("", "''", "is not an integer"),
            ("1.5", "'1.5'", "is not an integer"),
            ("0x1", "'0x1'", "is not an integer"),
            ("٣", "'٣'", "is not an integer"),
            (1.5, "1.5", "is not an integer"),
            (True, "true", "is not an integer"),
            ("true", "'true'", "is not an integer"),
            (None, "None", "is not an integer"),
            ([1], "[1]", "is not an integer"),
            ({}, "{}", "is not an integer"),
        ]
    ],
    *[
        (pool(**{key: value}), f"workerPools.h100.{key}: -1 must not be negative; ")
        for key in ("min", "initial", "max", "onDemand")
        for value in (-1, "-1")
    ],
    (pool(rootVolumeGib=-1), "workerPools.h100.rootVolumeGib: -1 must be 50 "),
    (pool(rootVolumeGib=49), "workerPools.h100.rootVolumeGib: 49 must be 50 "),
    (pool(rootVolumeGib=16385), "workerPools.h100.rootVolumeGib: 16385 must be 50 "),
    *[
        (pool(spot=value), f"workerPools.h100.spot: {shown} is not a boolean; use true or false")
        for value, shown in [("yes", "'yes'"), ("True", "'True'"), (1, "1"), ("1", "'1'"), (None, "None"), ([], "[]")]
    ],
    (pool(initial=3, max=2), "workerPools.h100.max: 2 must be at least workerPools.h100.initial (3); raise it, or"),
    (pool(min=3, max=2), "workerPools.h100.max: 2 must be at least workerPools.h100.min (3); "),
    (pool(max=2, onDemand=1), "workerPools.h100.onDemand: 1 requires workerPools.h100.spot; "),
    (pool(max=2, spot=True, onDemand=3), "workerPools.h100.onDemand: 3 must not exceed the maximum of 2 workers; "),
]  # fmt: skip


@pytest.mark.parametrize(("pools", "line"), BAD, ids=[line for _, line in BAD])
def test_a_bad_pool_is_refused_in_one_line(cloud: Cloud, pools: Any, line: str) -> None:
    with pytest.raises(SettingError) as refused:
        load(cloud, pools)
    assert str(refused.value).startswith(line)
    assert re.search("; [a-z]+ ", str(refused.value))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("instance_types", "did you mean instanceTypes?"),
        ("instanceType", "did you mean instanceTypes?"),
        ("InstanceTypes", "did you mean instanceTypes?"),
        ("instance-types", "did you mean instanceTypes?"),
        ("workerInstanceTypes", "did you mean instanceTypes?"),
        ("zone", "did you mean zones?"),
        ("maximum", "did you mean max?"),
        ("Max", "did you mean max?"),
        ("intial", "did you mean initial?"),
        ("on_demand", "did you mean onDemand?"),
        ("ondemand", "did you mean onDemand?"),
        ("rootVolumeGiB", "did you mean rootVolumeGib?"),
        ("Spot", "did you mean spot?"),
        ("", "use instanceTypes, zones, min, initial, max, spot, onDemand, rootVolumeGib"),
        ("efa", "use instanceTypes, zones, min, initial, max, spot, onDemand, rootVolumeGib"),
    ],
)
def test_unknown_keys_of_a_pool_are_refused(cloud: Cloud, key: str, hint: str) -> None:
    with pytest.raises(pulumi.RunError) as refused:
        load(cloud, pool(**{key: "secret"}))
    assert str(refused.value) == f"workerPools.h100.{key}: unknown key of a pool; {hint}"


@pytest.mark.parametrize(
    ("key", "hint"), [("instanceTypes", "did you mean instance_types?"), ("onDemand", "did you mean on_demand?")]
)
def test_python_has_its_own_spelling_of_keys(key: str, hint: str) -> None:
    with pytest.raises(pulumi.RunError) as refused:
        RayClusterArgs(worker_pools=in_python(**{key: 1}))
    assert str(refused.value) == f"worker_pools.h100.{key}: unknown key of a pool; {hint}"


@pytest.mark.parametrize(
    "name",
    ["H100", "h_100", "100h", "-h100", "h100-", "-", "", " ", "h 100", "h.100", "h/100", "h100\n", "größe", "h²", "h:1",
     "a,b", "*"],
)  # fmt: skip
def test_what_is_no_name_of_a_pool_is_refused(cloud: Cloud, name: str) -> None:
    with pytest.raises(
        SettingError, match=rf"^workerPools: {re.escape(repr(name))} is not a name of a pool; use lower"
    ):
        load(cloud, {name: {"instanceTypes": [P5]}})


@pytest.mark.parametrize("name", ["a", "h100", "h100-large", "a1-b2-c3", "spot", "max", "worker-pools", "workers"])
def test_names_of_pools(cloud: Cloud, name: str) -> None:
    assert name in load(cloud, {name: {"instanceTypes": [P5]}}).pools
    with pytest.raises(SettingError, match=f"^workerPools.{name}.rootVolumeGib: 1 must be 50 "):
        load(cloud, {name: {"instanceTypes": [P5], "rootVolumeGib": 1}})


@pytest.mark.parametrize(
    ("name", "hint"),
    [("default", "its field is workerInstanceTypes"), ("cpu", "its field is cpuWorkerInstanceTypes"),
     ("head", "use another name"), ("cpu-workers", "use another name")],
)  # fmt: skip
def test_reserved_names_of_pools_are_refused(cloud: Cloud, name: str, hint: str) -> None:
    with pytest.raises(SettingError) as refused:
        load(cloud, {name: {"instanceTypes": [P5]}})
    assert str(refused.value) == f"workerPools: {name!r} is a reserved name; {hint}"


def later(value: Any) -> pulumi.Output[Any]:
    """An Output."""
    return pulumi.Output.from_input(value)


@pytest.mark.parametrize(
    ("path", "make"),
    [
        ("worker_pools", lambda: later({})),
        ("worker_pools.h100", lambda: {"h100": later({})}),
        ("worker_pools.h100.instance_types", lambda: {"h100": {"instance_types": later([P5])}}),
        ("worker_pools.h100.instance_types", lambda: {"h100": {"instance_types": [later(P5)]}}),
        ("worker_pools.h100.instance_types", lambda: {"h100": WorkerPoolArgs(instance_types=[later(P5)])}),  # type: ignore
        ("worker_pools.h100.zones", lambda: in_python(zones=[later("us-west-2a")])),
        ("worker_pools.h100.max", lambda: in_python(max=later(2))),
        ("worker_pools.h100.spot", lambda: in_python(spot=later(True))),
        ("worker_pools.h100.max", lambda: in_python(max=pulumi.Output.secret(2))),
    ],
)
def test_outputs_in_a_pool_are_refused(path: str, make: Any) -> None:
    with pytest.raises(Refusal, match=f"^{path}: must be known while Pulumi plans, and "):
        RayClusterArgs(worker_pools=make())


@pytest.mark.parametrize(
    ("pools", "line"),
    [
        (["h100"], "worker_pools: ['h100'] is not an object; "),
        (None, "worker_pools: None is not an object; "),
        ({5: in_python()}, "worker_pools: 5 is not a name of a pool; "),
        ({None: in_python()}, "worker_pools: None is not a name of a pool; "),
        ({"h100": P5}, "worker_pools.h100: 'p5.48xlarge' is not an object; use one with instance_types and max"),
        (in_python(max="2"), "worker_pools.h100.max: '2' is not an integer; "),
        (in_python(spot="true"), "worker_pools.h100.spot: 'true' is not a boolean; "),
        ({"h100": {"instance_types": P5}}, "worker_pools.h100.instance_types: 'p5.48xlarge' is not a list; "),
        ({"h100": WorkerPoolArgs()}, "worker_pools.h100.instance_types: '' is empty; "),
        ({"h100": WorkerPoolArgs(instance_types=[P5], root_volume_gib=1)}, "worker_pools.h100.root_volume_gib: 1 must"),
        (in_python(max=2, on_demand=1), "worker_pools.h100.on_demand: 1 requires worker_pools.h100.spot; "),
    ],
)
def test_python_is_told_of_its_pools(pools: Any, line: str) -> None:
    with pytest.raises(SettingError) as refused:
        RayClusterArgs(worker_pools=pools)
    assert str(refused.value).startswith(line)


def test_a_secret_in_a_pool_is_refused_and_not_shown(cloud: Cloud) -> None:
    cloud.secret_keys = ("workerPools",)  # of an object with a secret anywhere, Pulumi reports the whole
    with pytest.raises(
        Refusal, match=r"^workerPools: is stored as a secret, .*; `pulumi config rm workerPools`"
    ) as refused:
        load(cloud, pool())
    assert P5 not in str(refused.value)


@pytest.mark.parametrize("key", ["workerPools.h100.max", "workerPools.h100.instanceTypes[0]", "workerPools[0]"])
def test_a_path_without_path_is_told(cloud: Cloud, key: str) -> None:
    cloud.config = {key: "2"}
    with pytest.raises(pulumi.RunError) as refused:
        cloud.run(RayClusterArgs.from_config)
    line = f"{key}: unknown configuration key; set it with `pulumi config set --path '{key}' VALUE`. Remove it: "
    assert str(refused.value).startswith(line)


@pytest.mark.parametrize(
    ("keys", "is_alike"),
    [
        ({}, True),
        ({"max": 9, "rootVolumeGib": 200}, True),
        ({"zones": ["us-west-2a"]}, False),
        ({"spot": True}, False),
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


def test_a_pool_like_the_default_one_is_warned_about(cloud: Cloud, warnings: list[str]) -> None:
    load(cloud, {"more": {"instanceTypes": ["g5.xlarge"], "max": 2}})
    load(cloud, {"more": {"instanceTypes": ["g5.xlarge"], "max": 2}}, availabilityZones="us-west-2b")
    assert len(warnings) == 2
    assert warnings[0].startswith("workerPools.more.instanceTypes: are those of the pool default, ")
    load(cloud, {"more": {"instanceTypes": ["g5.xlarge"], "max": 2}}, availabilityZones="us-west-2b,us-west-2c")
    assert len(warnings) == 2


def test_other_languages_have_the_keys_of_the_configuration(cloud: Cloud) -> None:
    """The schema has a type for a pool; the provider host maps its keys, and integers arrive as floats."""
    host = Host([HostedCluster], "ray-on-ecs")
    schema = json.loads(host.schema or "")
    properties = schema["types"]["ray-on-ecs:index:WorkerPool"]["properties"]
    assert properties.keys() == ALL.keys()
    inputs = schema["resources"]["ray-on-ecs:index:RayCluster"]["inputProperties"]["workerPools"]
    assert inputs["additionalProperties"]["$ref"] == "#/types/ray-on-ecs:index:WorkerPool"

    def construct(**keys: Any) -> None:
        cloud.run(lambda: host.construct("vision", "ray-on-ecs:index:RayCluster", {"workerPools": pool(**keys)}))

    for keys, path, reason in [
        ({"max": 1.5}, "workerPools.h100.max", "1.5 is not an integer; "),
        ({"max": -1.0}, "workerPools.h100.max", "-1 must not be negative; "),
        ({"rootVolumeGib": 1.0}, "workerPools.h100.rootVolumeGib", "1 must be 50"),
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
    ],
)
def test_kinds_of_node(of_pool: str, zone: str, kind: str) -> None:
    assert kind_of(of_pool, zone) == kind


def test_messages_name_the_fields_of_each_pool() -> None:
    fields = [field_of(name, key) for name in ("default", "cpu", "h100") for key in ("max", "instance_types")]
    assert fields == [
        *("max_workers", "worker_instance_types", "max_cpu_workers", "cpu_worker_instance_types"),
        *("worker_pools.h100.max", "worker_pools.h100.instance_types"),
    ]
