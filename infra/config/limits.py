"""Limits of AWS that a setting can exceed: AWS itself would refuse in the middle of `pulumi up`.

No setting changes the size of user data, trust, endpoint and bucket policies, alarms, session documents, or the number
of rules and subnets (one in each zone).
https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_iam-quotas.html
https://docs.aws.amazon.com/autoscaling/ec2/APIReference/API_LaunchTemplateOverrides.html
https://docs.aws.amazon.com/systems-manager/latest/userguide/parameter-store-advanced-parameters.html
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from infra.config.args import RayClusterArgs
from infra.config.worker_pool import FIELD
from infra.definitions import efa, policies
from infra.definitions.cluster_info import document
from infra.errors import Refusal
from infra.types import Location, NodeSpec, Scale, known
from ray_on_ecs.contract import SETTINGS, WORKERS, secrets_prefix

# The most tags that the stack and ECS add to one resource, e.g. Name, project and stack.
OWN_TAGS = 6
# Size of a task definition without `environment` and EFA devices, of which a p5.48xlarge has 32.
OWN_DEFINITION = 6000
# The longest that Pulumi and the program add to a cluster's prefix in a name: "-cluster-info-parameter-1a2b3c4".
SUFFIX = 32 * "x"
# What they add to a prefix with a kind of worker in the names of group, capacity provider and service.
GROUP_SUFFIX, PROVIDER_SUFFIX, SERVICE_SUFFIX = "-group-1a2b3c4", "-capacity-provider-1a2b3c4", "-ray-service-1a2b3c4"
FEWER_POOLS = "use fewer pools, or fewer zones of a pool"


class Limit(NamedTuple):
    """Row of the table: `count` values of a setting make `size` of something, of which AWS takes `most`."""

    field: str
    count: int
    size: int
    most: int
    what: str
    hint: str = "use fewer"


def check(
    args: RayClusterArgs,
    prefix: str,
    location: Location,
    nodes: Mapping[str, NodeSpec],
    scales: Mapping[str, Scale],
    default_tags: Mapping[str, str],
) -> None:
    """Raise a Refusal for a setting beyond a limit; `nodes` are head and workers, and Outputs are not counted."""
    for limit in (*_of_roles(args, prefix, location, nodes), *_of_nodes(prefix, location, nodes, scales)):
        _compare(limit)
    tags = len({*args.tags, *default_tags})
    less = "use fewer, here or in the AWS provider's default tags (aws:defaultTags)"
    _compare(Limit("tags", tags, tags + OWN_TAGS, 50, "tags of a resource", less))
    variables = [{"name": name, "value": known(value)} for name, value in args.environment.items()]
    devices = efa.devices(max(len(node.efa_cards) for node in nodes.values()))
    size = OWN_DEFINITION + len(json.dumps([*variables, *devices]))
    less = "use shorter ones, or put them into the image"
    _compare(Limit("environment", len(variables), size, 64 * 1024, "bytes of a task definition", less))


def _compare(limit: Limit) -> None:
    if limit.size > limit.most:
        text = f"its {limit.count} values make {limit.size} {limit.what}, of at most {limit.most}; {limit.hint}"
        raise Refusal(limit.field, text)


def _of_nodes(
    prefix: str, location: Location, nodes: Mapping[str, NodeSpec], scales: Mapping[str, Scale]
) -> Iterator[Limit]:
    for node in nodes.values():
        count = len(node.instances)
        yield Limit(node.key, count, count, 40, "instance types of an Auto Scaling group")
    content = document(
        nodes,
        scales,
        cluster=prefix + SUFFIX,
        zone=f"{location.region}a",
        group_names={kind: f"{prefix}-{kind}{GROUP_SUFFIX}" for kind in nodes},
        provider_names={kind: f"{prefix}-{kind}{PROVIDER_SUFFIX}" for kind in nodes},
    )
    pools = {node.pool for node in nodes.values()} - SETTINGS.keys() - {""}
    workers = nodes[WORKERS]
    count = len(dict.fromkeys(name for node in nodes.values() if node.pool for name in node.instance_types))
    field, count, less = (FIELD, len(pools), FEWER_POOLS) if pools else (workers.key, count, "use fewer")
    yield Limit(field, count, len(content), 4096, "characters of the cluster's SSM parameter", less)


def _of_roles(args: RayClusterArgs, prefix: str, location: Location, nodes: Mapping[str, NodeSpec]) -> Iterator[Limit]:
    for field in ("task_policy_arns", "instance_policy_arns"):
        count = len(getattr(args, field))
        # https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_iam-quotas.html: 10, and up to 25 on request.
        most, less = (10, "combine policies, or set check_quotas to false if your account's quota is higher")
        yield Limit(field, count, count, most if args.check_quotas else 25, "managed policies of a role", less)
    buckets, secrets = (
        [known(value) for value in values if known(value)] for values in (args.data_buckets, args.job_secrets)
    )
    name = prefix + SUFFIX
    ssm, cluster = location.arn("ssm", "parameter"), location.arn("ecs", f"cluster/{name}")
    group = location.arn("autoscaling", f"autoScalingGroup:{36 * 'x'}:autoScalingGroupName/")
    # The head's task role has the longest policies: one for tasks, and one for each kind of worker.
    policy = policies.training(
        partition=location.partition,
        bucket_arn=f"arn:{location.partition}:s3:::{known(args.bucket_name) or name}",
        tasks_arn=location.arn("ecs", f"task/{name}/*"),
        metrics_namespace=f"ray-on-ecs/{name}",
        parameter_arn=f"{ssm}/{name}",
        cluster_arn=cluster,
        data_buckets=buckets,
        secrets_arn=f"{ssm}{secrets_prefix(name)}/*",
        writes_secrets=True,
        job_secrets=secrets,
        kms_key_arn=known(args.kms_key_arn),
    )
    # IAM does not count white space.
    own = _length(policy)
    scaling = [
        _length(
            policies.scaling(
                cluster_arn=cluster,
                service_name=f"{prefix}-{kind}{SERVICE_SUFFIX}",
                group_arn=f"{group}{prefix}-{kind}{GROUP_SUFFIX}",
            )
        )
        for kind, node in nodes.items()
        if node.pool
    ]
    parts = {"data_buckets": (buckets, len("".join(buckets))), "job_secrets": (secrets, len("".join(secrets)))}
    pools = [pool for pool in args.pools if pool not in SETTINGS]
    if pools:
        parts[FIELD] = (pools, sum(scaling))
    field = max(parts, key=lambda name: parts[name][1])
    less = "use fewer, whole buckets in place of prefixes, or a managed policy (task_policy_arns)"
    if field == FIELD:
        less = FEWER_POOLS
    what = "characters of a role's inline policies"
    yield Limit(field, len(parts[field][0]), own + sum(scaling), 10240, what, less)


def _length(policy: policies.Policy) -> int:
    return len("".join(json.dumps(policy).split()))
