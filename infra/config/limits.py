"""Limits of AWS that a setting can exceed: AWS itself would refuse in the middle of `pulumi up`.

No setting changes the size of user data, trust, endpoint and bucket policies, dashboard, alarms, session documents, or
the number of rules, capacity providers and subnets (one in each zone).
https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_iam-quotas.html
https://docs.aws.amazon.com/autoscaling/ec2/APIReference/API_LaunchTemplateOverrides.html
https://docs.aws.amazon.com/systems-manager/latest/userguide/parameter-store-advanced-parameters.html
https://docs.aws.amazon.com/general/latest/gr/ecs-service.html
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from infra.config.args import RayClusterArgs
from infra.definitions import policies
from infra.errors import Refusal
from infra.types import Location, NodeSpec, known
from ray_on_ecs.contract import secrets_prefix

# The most tags that the stack and ECS add to one resource, e.g. Name, project and stack.
OWN_TAGS = 6
# Sizes of a task definition without `environment`, and of ClusterInfo's parameter without types and zones.
OWN_DEFINITION, OWN_PARAMETER = 6000, 500
# The longest that Pulumi and the program add to a cluster's prefix in a name: "-cluster-info-parameter-1a2b3c4".
SUFFIX = 32 * "x"


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
    nodes: Sequence[NodeSpec],
    default_tags: Mapping[str, str],
) -> None:
    """Raise a Refusal for a setting beyond a limit; `nodes` are head and workers, and Outputs are not counted."""
    name = prefix + SUFFIX
    for limit in (*_of_roles(args, name, location, nodes), *_of_nodes(name, location, nodes)):
        _compare(limit)
    tags = len({*args.tags, *default_tags})
    less = "use fewer, here or in the AWS provider's default tags (aws:defaultTags)"
    _compare(Limit("tags", tags, tags + OWN_TAGS, 50, "tags of a resource", less))
    variables = [{"name": name, "value": known(value)} for name, value in args.environment.items()]
    size = OWN_DEFINITION + len(json.dumps(variables))
    less = "use shorter ones, or put them into the image"
    _compare(Limit("environment", len(variables), size, 64 * 1024, "bytes of a task definition", less))


def _compare(limit: Limit) -> None:
    if limit.size > limit.most:
        text = f"its {limit.count} values make {limit.size} {limit.what}, of at most {limit.most}; {limit.hint}"
        raise Refusal(limit.field, text)


def _of_nodes(name: str, location: Location, nodes: Sequence[NodeSpec]) -> Iterator[Limit]:
    for node in nodes:
        count = len(node.instances)
        yield Limit(node.key, count, count, 40, "instance types of an Auto Scaling group")
    _, workers, *_ = nodes
    types = [kind for node in nodes[1:] for kind in node.instance_types]
    zone = {"zone": "ap-southeast-2a", "subnet_id": f"subnet-{17 * '0'}", "placement_group": name}
    parts = [workers.instance_types, dict.fromkeys(types, 123.456), [zone] * len(location.worker_zones)]
    parts.append([name, name] * len(nodes[1:]))  # groups and capacity providers
    size = OWN_PARAMETER + len(json.dumps(parts))
    yield Limit(workers.key, len(types), size, 4096, "characters of the cluster's SSM parameter")


def _of_roles(args: RayClusterArgs, name: str, location: Location, nodes: Sequence[NodeSpec]) -> Iterator[Limit]:
    for field in ("task_policy_arns", "instance_policy_arns"):
        count = len(getattr(args, field))
        # https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_iam-quotas.html: 10, and up to 25 on request.
        most, less = (10, "combine policies, or set check_quotas to false if your account's quota is higher")
        yield Limit(field, count, count, most if args.check_quotas else 25, "managed policies of a role", less)
    buckets, secrets = (
        [known(value) for value in values if known(value)] for values in (args.data_buckets, args.job_secrets)
    )
    here = f"{location.region}:{location.account}"
    ssm = f"arn:{location.partition}:ssm:{here}:parameter"
    cluster = f"arn:{location.partition}:ecs:{here}:cluster/{name}"
    group = f"arn:{location.partition}:autoscaling:{here}:autoScalingGroup:{36 * 'x'}:autoScalingGroupName/{name}"
    # The head's task role has the longest policies: one for tasks, and one for each kind of worker.
    policy = policies.training(
        partition=location.partition,
        bucket_arn=f"arn:{location.partition}:s3:::{known(args.bucket_name) or name}",
        tasks_arn=f"arn:{location.partition}:ecs:{here}:task/{name}/*",
        metrics_namespace=f"ray-on-ecs/{name}",
        parameter_arn=f"{ssm}/{name}",
        cluster_arn=cluster,
        data_buckets=buckets,
        secrets_arn=f"{ssm}{secrets_prefix(name)}/*",
        writes_secrets=True,
        job_secrets=secrets,
        kms_key_arn=known(args.kms_key_arn),
    )
    scaling = policies.scaling(cluster_arn=cluster, service_name=name, group_arn=group)
    # IAM does not count white space.
    size = sum(len("".join(json.dumps(each).split())) for each in (policy, *[scaling] * (len(nodes) - 1)))
    what = "characters of a role's inline policies"
    less = "use fewer, whole buckets in place of prefixes, or a managed policy (task_policy_arns)"
    if len("".join(buckets)) > len("".join(secrets)):
        yield Limit("data_buckets", len(buckets), size, 10240, what, less)
    yield Limit("job_secrets", len(secrets), size, 10240, what, less)
