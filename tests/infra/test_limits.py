"""Limits of AWS that a setting can exceed: each row one value below and one above, and its size against the program."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pulumi
import pytest

from infra.config import RayClusterArgs, limits
from infra.errors import Refusal
from infra.types import Location, NodeSpec, Price, Scale, kind_of
from tests.infra.fake_aws import ACCOUNT, REGION, Cloud, instance_type, node_spec
from tests.infra.stacks import EVERYTHING, STACKS, deploy

ZONES = tuple(f"{REGION}{letter}" for letter in "abcd")
LOCATION = Location(partition="aws", account=ACCOUNT, region=REGION, worker_zones=ZONES, zones=ZONES)
PREFIX = "ray-on-ecs"
HEAD = node_spec("m5.xlarge", 1, key="headInstanceType")
BUCKETS = [f"acme-ml-datasets-{number:02d}-us-west-2/curated/images/v{number}" for number in range(40)]
SECRETS = [f"arn:aws:secretsmanager:{REGION}:{ACCOUNT}:secret:team/token-{number:03d}-AbCdEf" for number in range(110)]
POLICIES = [f"arn:aws:iam::{ACCOUNT}:policy/{number}" for number in range(10)]


def of_types(count: int, key: str = "workerInstanceTypes", pool: str = "default") -> NodeSpec:
    """Nodes of a number of instance types."""
    types = tuple(instance_type(f"{key[0]}6e-flex.{number:02d}xlarge") for number in range(count))
    prices = {each.name: Price(on_demand=123.456) for each in types}
    return replace(node_spec(key=key, pool=pool), instances=types, prices=prices)


def scales_of(nodes: dict[str, NodeSpec]) -> dict[str, Scale]:
    scale = Scale(initial_count=0, min_count=0, max_count=100, default_job_count=100, idle_minutes=30)
    return {kind: scale for kind, node in nodes.items() if node.pool}


def check(
    *nodes: NodeSpec,
    default_tags: dict[str, str] | None = None,
    location: Location = LOCATION,
    **settings: Any,
) -> None:
    """Hold settings against the table."""
    nodes = nodes or (HEAD, node_spec(zones=ZONES[:1], pool="default"))
    by_kind = dict(zip(("head", "workers", "cpu-workers"), nodes, strict=False))
    limits.check(RayClusterArgs(**settings), PREFIX, location, by_kind, scales_of(by_kind), default_tags or {})


@pytest.mark.parametrize(
    ("below", "above", "line"),
    [
        (
            {"data_buckets": BUCKETS[:20]},
            {"data_buckets": BUCKETS[:28]},
            "data_buckets: its 28 values make 1",
        ),
        ({"job_secrets": SECRETS[:80]}, {"job_secrets": SECRETS}, "job_secrets: its 110 values make 1"),
        (
            {"data_buckets": BUCKETS[:12], "job_secrets": SECRETS[:30]},
            {"data_buckets": BUCKETS[:12], "job_secrets": SECRETS[:70]},
            "job_secrets: its 70 values make 1",
        ),
        ({"tags": {str(number): "x" for number in range(44)}}, {"tags": {str(number): "x" for number in range(45)}},
         "tags: its 45 values make 51 tags of a resource, of at most 50; use fewer, here or in the AWS provider's"),
        (
            {"tags": {"a": "x"}, "default_tags": {str(number): "x" for number in range(43)}},
            {"tags": {"a": "x"}, "default_tags": {str(number): "x" for number in range(44)}},
            "tags: its 45 values make 51",
        ),
        (
            {"environment": {"A": 59_000 * "x"}},
            {"environment": {"A": 65_000 * "x"}},
            "environment: its 1 values make 71028 bytes of a task definition, of at most 65536; use shorter",
        ),
        (
            {"environment": {f"VARIABLE_{number}": "x" for number in range(1000)}},
            {"environment": {f"VARIABLE_{number}": "x" for number in range(2000)}},
            "environment: its 2000 values make ",
        ),
        ({"nodes": (HEAD, of_types(40))}, {"nodes": (HEAD, of_types(41))},
         "workerInstanceTypes: its 41 values make 41 instance types of an Auto Scaling group, of at most 40"),
        (
            {"nodes": (HEAD, node_spec(pool="default"), of_types(40, "cpuWorkers", "cpu"))},
            {"nodes": (HEAD, node_spec(pool="default"), of_types(41, "cpuWorkers", "cpu"))},
            "cpuWorkers: its 41 values make 41",
        ),
        ({"nodes": (HEAD, replace(of_types(40), spread=True, zones=ZONES), of_types(10, "cpuWorkers", "cpu"))},
         {"nodes": (HEAD, replace(of_types(40), spread=True, zones=ZONES), of_types(40, "cpuWorkers", "cpu"))},
         "workerInstanceTypes: its 80 values make "),
    ],
)  # fmt: skip
def test_a_setting_up_to_the_limit_passes(below: dict[str, Any], above: dict[str, Any], line: str) -> None:
    check(*below.pop("nodes", ()), **below)
    with pytest.raises(Refusal) as refused:
        check(*above.pop("nodes", ()), **above)
    assert str(refused.value).startswith(line)


def with_pools(**zones: int) -> dict[str, Any]:
    """Nodes and settings of a stack with these pools in a number of zones each."""
    nodes = {"head": HEAD, "workers": node_spec(pool="default")}
    for name, count in zones.items():
        for number, zone in enumerate(ZONES[:count]):
            kind = kind_of(name, zone)
            nodes[kind] = node_spec("p5.48xlarge", pool=name, gpus=8, shares=number > 0, zones=(zone,))
    return {"nodes": nodes, "worker_pools": {name: {"instance_types": ["p5.48xlarge"]} for name in zones}}


def check_pools(*, nodes: dict[str, NodeSpec], **settings: Any) -> None:
    limits.check(RayClusterArgs(**settings), PREFIX, LOCATION, nodes, scales_of(nodes), {})


@pytest.mark.parametrize(
    ("below", "above", "line"),
    [
        (
            with_pools(**{f"p{number}": 1 for number in range(12)}),
            with_pools(**{f"p{number}": 1 for number in range(13)}),
            r"worker_pools: its 13 values make 4\d{3} characters of the cluster's SSM parameter, of at most 4096; use "
            r"fewer pools, or fewer zones of a pool",
        ),
        (
            with_pools(a=4, b=4, c=4),
            with_pools(a=4, b=4, c=4, d=1),
            r"worker_pools: its 4 values make 4\d{3} characters of the cl",
        ),
        (
            with_pools(a=4),
            with_pools(**{f"p{number}": 1 for number in range(19)}),
            r"worker_pools: its 19 values make \d+ ",
        ),
        (
            {**with_pools(a=4), "job_secrets": SECRETS[:40]},
            {**with_pools(a=4), "job_secrets": SECRETS[:90]},
            r"job_secrets: its 90 values make \d+ characters of a role's inline policies",
        ),
    ],
)
def test_pools_up_to_the_limits_pass(below: dict[str, Any], above: dict[str, Any], line: str) -> None:
    check_pools(**below)
    with pytest.raises(Refusal, match=f"^{line}"):
        check_pools(**above)


@pytest.mark.parametrize("field", ["task_policy_arns", "instance_policy_arns"])
def test_managed_policies_up_to_the_quota_pass(field: str) -> None:
    settings: dict[str, Any] = {field: POLICIES}
    rows = {row.field: row for row in limits._of_roles(RayClusterArgs(**settings), PREFIX, LOCATION, {})}
    assert (rows[field].size, rows[field].most) == (10, 10)


def test_outputs_are_not_counted(cloud: Cloud) -> None:
    def program() -> None:
        unknown = pulumi.Output.from_input(99_999 * "x")
        some = [pulumi.Output.from_input(bucket) for bucket in BUCKETS]
        check(data_buckets=some, environment={"A": unknown})

    cloud.run(program)


SEVERAL_POOLS = {
    "config": {
        **EVERYTHING,
        "checkQuotas": "false",
        "workerPools": json.dumps(
            {
                "h100": {"instanceTypes": ["p5.48xlarge"], "zones": ["us-west-2a", "us-west-2b"], "max": 2},
                "preprocessing": {"instanceTypes": ["c6i.8xlarge", "c6i.16xlarge"], "max": 100},
            }
        ),
    },
}
LISTS = {"dataBuckets": ",".join(BUCKETS[:5]), "jobSecrets": ",".join(SECRETS[:5])}


@pytest.mark.parametrize("stack", ["everything", "in China", "several pools"])
def test_the_table_knows_what_the_program_makes(stack: str, monkeypatch: pytest.MonkeyPatch) -> None:
    attributes: dict[str, Any] = {**STACKS, "several pools": SEVERAL_POOLS}[stack]
    rows: dict[str, limits.Limit] = {}
    monkeypatch.setattr(limits, "_compare", lambda row: rows.update({row.what: row}))
    partition = attributes.get("partition", "aws")
    lists = {name: text.replace("arn:aws:", f"arn:{partition}:") for name, text in LISTS.items()}
    setup: dict[str, Any] = {**attributes, "config": {**attributes["config"], **lists}}
    cloud = deploy(**setup)
    tagged = [resource.inputs.get("tags") or {} for resource in cloud.resources.values()]
    tags = [{tag["key"] if isinstance(tag, dict) else tag for tag in tags} for tags in tagged]
    definitions = [json.dumps(item.inputs) for item in cloud.of_type("aws:ecs/taskDefinition:TaskDefinition")]
    policies: Counter[str] = Counter()
    for item in cloud.of_type("aws:iam/rolePolicy:RolePolicy"):
        policies[item.inputs["role"]] += len("".join(item.inputs["policy"].split()))
    parameter = cloud.resources["cluster-info-parameter"].inputs["insecureValue"]
    sizes = {
        "tags of a resource": max(map(len, tags)),
        "bytes of a task definition": max(map(len, definitions)),
        "characters of a role's inline policies": max(policies.values()),
        "characters of the cluster's SSM parameter": len(parameter),
    }
    for what, size in sizes.items():
        assert size <= rows[what].size <= size + 0.1 * rows[what].most, what
