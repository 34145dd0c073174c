"""What an account holds of a stack, found by the tags that all of it carries, and the commands that delete it.

Each service is asked itself: AWS's tagging API knows neither Auto Scaling groups nor roles, and lists for hours what is
deleted already.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import boto3

Client = Any
# Services that have no regions.
ACCOUNT_WIDE = "a stack of this name in another region would have one, too"


@dataclass(frozen=True, kw_only=True)
class Found:
    """One resource.

    Attributes:
        kind: What it is, such as subnet.
        id: Its ID, name or ARN, by which Pulumi knows it, too.
        commands: What deletes it, without `aws`, profile and region, in this order.
        doubt: Why a person has to decide first, or nothing.
    """

    kind: str
    id: str
    commands: tuple[str, ...]
    doubt: str = ""


@dataclass(frozen=True, kw_only=True)
class Stack:
    """Whose resources are looked for.

    Attributes:
        tags: The tags that all of them carry.
        prefix: What their names begin with.
        session: The credentials and the region.
    """

    tags: dict[str, str]
    prefix: str
    session: boto3.Session

    def client(self, service: str) -> Client:
        """A client of a service, in the stack's region."""
        return self.session.client(service)

    @property
    def filters(self) -> list[dict[str, Any]]:
        """The tags as EC2 and Auto Scaling filter by them."""
        return [{"Name": f"tag:{key}", "Values": [value]} for key, value in self.tags.items()]

    def owns(self, tags: Iterable[dict[str, str]] | dict[str, str]) -> bool:
        """Whether a resource with these tags is the stack's; services write them in three ways."""
        if not isinstance(tags, dict):
            tags = {each.get("Key") or each["key"]: each.get("Value", each.get("value", "")) for each in tags}
        return self.tags.items() <= tags.items()


Listing = Callable[[Stack], Iterable[Found]]


def listings() -> dict[str, Listing]:
    """How each kind is listed, in the order in which they can be deleted."""
    return {
        "ECS services": _services,
        "scaling groups": _scaling_groups,
        "instances": _instances,
        "launch templates": _launch_templates,
        "ECS clusters": _clusters,
        "capacity providers": _capacity_providers,
        "task definitions": _task_definitions,
        "names in DNS": _namespaces,
        "route tables": _route_tables,
        **{each.plural: partial(_of_ec2, kind=each) for each in EC2_KINDS},
        "instance profiles": _instance_profiles,
        "roles": _roles,
        "parameters": _parameters,
        "repositories": _repositories,
        "alarms": _alarms,
        "dashboards": _dashboards,
        "topics": _topics,
        "budgets": _budgets,
        "log groups": _log_groups,
        "buckets": _buckets,
    }


def _all(client: Client, method: str, key: str, **arguments: Any) -> Iterator[Any]:
    """All items of a listing, which AWS may give in several pages."""
    pages = client.get_paginator(method).paginate(**arguments) if client.can_paginate(method) else None
    for page in pages or [getattr(client, method)(**arguments)]:
        yield from page[key]


class Ec2Kind(NamedTuple):
    """A kind of resource that EC2 lists by tags.

    Attributes:
        kind: What it is.
        listed_by: The method that lists it.
        key: Where that puts the items.
        id: Where an item has its ID.
        commands: What deletes it, without `ec2`, with the item's fields in braces.
        is_there: Whether an item is there and nobody's part.
        argument: What the method calls its filters.
    """

    kind: str
    listed_by: str
    key: str
    id: str
    commands: tuple[str, ...]
    is_there: Callable[[dict[str, Any]], bool] = lambda item: True
    argument: str = "Filters"

    @property
    def plural(self) -> str:
        """What several of them are."""
        return f"{self.kind}{'es' if self.kind.endswith('s') else 's'}"


def _is_in_state(*states: str) -> Callable[[dict[str, Any]], bool]:
    return lambda item: item.get("State", item.get("Status", "")).lower() in states


def _rules(way: str, *, is_egress: bool) -> Ec2Kind:
    """The rules of security groups for one way."""
    revoke = f"revoke-security-group-{way} --group-id {{GroupId}} --security-group-rule-ids {{SecurityGroupRuleId}}"
    listed = "describe_security_group_rules", "SecurityGroupRules", "SecurityGroupRuleId"
    return Ec2Kind(f"{way} rule", *listed, (revoke,), lambda item: item["IsEgress"] == is_egress)


GATEWAY = "--internet-gateway-id {InternetGatewayId}"
EC2_KINDS = (
    Ec2Kind(
        "NAT gateway", "describe_nat_gateways", "NatGateways", "NatGatewayId",
        ("delete-nat-gateway --nat-gateway-id {NatGatewayId}",
         "wait nat-gateway-deleted --nat-gateway-ids {NatGatewayId}"),
        _is_in_state("pending", "available", "failed"), "Filter",
    ),
    Ec2Kind(
        "Elastic IP address", "describe_addresses", "Addresses", "AllocationId",
        ("release-address --allocation-id {AllocationId}",),
    ),
    Ec2Kind(
        "VPC endpoint", "describe_vpc_endpoints", "VpcEndpoints", "VpcEndpointId",
        ("delete-vpc-endpoints --vpc-endpoint-ids {VpcEndpointId}",),
        _is_in_state("pending", "available", "failed"),
    ),
    Ec2Kind(
        "placement group", "describe_placement_groups", "PlacementGroups", "GroupName",
        ("delete-placement-group --group-name {GroupName}",), _is_in_state("pending", "available"),
    ),
    # Interfaces and volumes that are attached go with what they are attached to.
    Ec2Kind(
        "network interface", "describe_network_interfaces", "NetworkInterfaces", "NetworkInterfaceId",
        ("delete-network-interface --network-interface-id {NetworkInterfaceId}",), _is_in_state("available"),
    ),
    Ec2Kind(
        "volume", "describe_volumes", "Volumes", "VolumeId",
        ("delete-volume --volume-id {VolumeId}",), _is_in_state("available"),
    ),
    _rules("ingress", is_egress=False),
    _rules("egress", is_egress=True),
    # The default group goes with its VPC.
    Ec2Kind(
        "security group", "describe_security_groups", "SecurityGroups", "GroupId",
        ("delete-security-group --group-id {GroupId}",), lambda item: item["GroupName"] != "default",
    ),
    Ec2Kind("subnet", "describe_subnets", "Subnets", "SubnetId", ("delete-subnet --subnet-id {SubnetId}",)),
    Ec2Kind(
        "internet gateway", "describe_internet_gateways", "InternetGateways", "InternetGatewayId",
        (f"detach-internet-gateway {GATEWAY} --vpc-id {{Attachments[0][VpcId]}}", f"delete-internet-gateway {GATEWAY}"),
    ),
    Ec2Kind("VPC", "describe_vpcs", "Vpcs", "VpcId", ("delete-vpc --vpc-id {VpcId}",)),
)  # fmt: skip


def _of_ec2(stack: Stack, kind: Ec2Kind) -> Iterator[Found]:
    for item in _all(stack.client("ec2"), kind.listed_by, kind.key, **{kind.argument: stack.filters}):
        if kind.is_there(item) and stack.owns(item.get("Tags") or item.get("TagSet") or []):
            # A gateway that is attached to nothing has no such field, and no need of that command.
            commands = [each for each in kind.commands if "Attachments" not in each or item["Attachments"]]
            yield Found(
                kind=kind.kind, id=item[kind.id], commands=tuple(f"ec2 {each.format(**item)}" for each in commands)
            )


def _route_tables(stack: Stack) -> Iterator[Found]:
    for item in _all(stack.client("ec2"), "describe_route_tables", "RouteTables", Filters=stack.filters):
        name = item["RouteTableId"]
        disassociate = (
            f"ec2 disassociate-route-table --association-id {each['RouteTableAssociationId']}"
            for each in item["Associations"]
        )
        delete = f"ec2 delete-route-table --route-table-id {name}"
        yield Found(kind="route table", id=name, commands=(*disassociate, delete))


def _instances(stack: Stack) -> Iterator[Found]:
    """Those that no group started: a group's go with it."""
    for reservation in _all(stack.client("ec2"), "describe_instances", "Reservations", Filters=stack.filters):
        for item in reservation["Instances"]:
            tags = {each["Key"] for each in item["Tags"]}
            if item["State"]["Name"] not in ("shutting-down", "terminated") and "aws:autoscaling:groupName" not in tags:
                name = item["InstanceId"]
                commands = (
                    f"ec2 terminate-instances --instance-ids {name}",
                    f"ec2 wait instance-terminated --instance-ids {name}",
                )
                yield Found(kind="instance", id=name, commands=commands)


def _launch_templates(stack: Stack) -> Iterator[Found]:
    """Launch templates carry no tags, but what starts from them will."""
    client = stack.client("ec2")
    filters = [{"Name": "launch-template-name", "Values": [f"{stack.prefix}-*"]}]
    for item in _all(client, "describe_launch_templates", "LaunchTemplates", Filters=filters):
        name = item["LaunchTemplateId"]
        [latest] = client.describe_launch_template_versions(LaunchTemplateId=name, Versions=["$Latest"])[
            "LaunchTemplateVersions"
        ]
        given = latest["LaunchTemplateData"].get("TagSpecifications", [])
        if any(stack.owns(each["Tags"]) for each in given):
            delete = f"ec2 delete-launch-template --launch-template-id {name}"
            yield Found(kind="launch template", id=name, commands=(delete,))


def _scaling_groups(stack: Stack) -> Iterator[Found]:
    client = stack.client("autoscaling")
    for item in _all(client, "describe_auto_scaling_groups", "AutoScalingGroups", Filters=stack.filters):
        name = item["AutoScalingGroupName"]
        delete = f"autoscaling delete-auto-scaling-group --auto-scaling-group-name {name} --force-delete"
        ids = " ".join(each["InstanceId"] for each in item["Instances"])
        wait = (f"ec2 wait instance-terminated --instance-ids {ids}",) if ids else ()
        yield Found(kind="scaling group", id=name, commands=(delete, *wait))


def _own_clusters(stack: Stack) -> Iterator[str]:
    client = stack.client("ecs")
    for arn in _all(client, "list_clusters", "clusterArns"):
        for cluster in client.describe_clusters(clusters=[arn], include=["TAGS"])["clusters"]:
            if cluster["status"] != "INACTIVE" and stack.owns(cluster.get("tags", [])):
                yield arn


def _services(stack: Stack) -> Iterator[Found]:
    """Services go first: without instances ECS never learns that their tasks have stopped."""
    for cluster in _own_clusters(stack):
        for service in _all(stack.client("ecs"), "list_services", "serviceArns", cluster=cluster):
            delete = f"ecs delete-service --cluster {cluster} --service {service} --force"
            wait = f"ecs wait services-inactive --cluster {cluster} --services {service}"
            yield Found(kind="ECS service", id=service, commands=(delete, wait))


def _clusters(stack: Stack) -> Iterator[Found]:
    for arn in _own_clusters(stack):
        yield Found(kind="ECS cluster", id=arn, commands=(f"ecs delete-cluster --cluster {arn}",))


def _capacity_providers(stack: Stack) -> Iterator[Found]:
    client = stack.client("ecs")
    answer: dict[str, Any] = {}
    while not answer or answer.get("nextToken"):  # boto3 has no paginator of these
        token = {"nextToken": answer["nextToken"]} if answer else {}
        answer = client.describe_capacity_providers(include=["TAGS"], **token)
        for item in answer["capacityProviders"]:
            if item.get("status", "ACTIVE") == "ACTIVE" and stack.owns(item.get("tags", [])):
                arn = item["capacityProviderArn"]
                delete = f"ecs delete-capacity-provider --capacity-provider {arn}"
                yield Found(kind="capacity provider", id=arn, commands=(delete,))


def _task_definitions(stack: Stack) -> Iterator[Found]:
    client = stack.client("ecs")
    families = _all(
        client, "list_task_definition_families", "families", familyPrefix=f"{stack.prefix}-", status="ACTIVE"
    )
    for family in families:
        for arn in _all(client, "list_task_definitions", "taskDefinitionArns", familyPrefix=family, status="ACTIVE"):
            if stack.owns(client.list_tags_for_resource(resourceArn=arn)["tags"]):
                delete = f"ecs deregister-task-definition --task-definition {arn}"
                yield Found(kind="task definition", id=arn, commands=(delete,))


def _namespaces(stack: Stack) -> Iterator[Found]:
    client = stack.client("servicediscovery")
    for kind, method, key, command in (
        ("name in DNS", "list_services", "Services", "delete-service"),
        ("DNS namespace", "list_namespaces", "Namespaces", "delete-namespace"),
    ):
        for item in _all(client, method, key):
            if stack.owns(client.list_tags_for_resource(ResourceARN=item["Arn"])["Tags"]):
                name = item["Id"]
                inside = _all(client, "list_instances", "Instances", ServiceId=name) if "service" in command else []
                deregister = (
                    f"servicediscovery deregister-instance --service-id {name} --instance-id {each['Id']}"
                    for each in inside
                )
                yield Found(kind=kind, id=name, commands=(*deregister, f"servicediscovery {command} --id {name}"))


def _instance_profiles(stack: Stack) -> Iterator[Found]:
    client = stack.client("iam")
    for item in _all(client, "list_instance_profiles", "InstanceProfiles"):
        name = item["InstanceProfileName"]
        if not name.startswith(f"{stack.prefix}-"):
            continue
        if stack.owns(client.get_instance_profile(InstanceProfileName=name)["InstanceProfile"].get("Tags", [])):
            given = f"--instance-profile-name {name}"
            remove = [
                f"iam remove-role-from-instance-profile {given} --role-name {role['RoleName']}"
                for role in item["Roles"]
            ]
            delete = f"iam delete-instance-profile {given}"
            yield Found(kind="instance profile", id=name, commands=(*remove, delete), doubt=ACCOUNT_WIDE)


def _roles(stack: Stack) -> Iterator[Found]:
    client = stack.client("iam")
    for item in _all(client, "list_roles", "Roles"):
        name = item["RoleName"]
        if not name.startswith(f"{stack.prefix}-") or not stack.owns(client.list_role_tags(RoleName=name)["Tags"]):
            continue
        given = f"--role-name {name}"
        inline = _all(client, "list_role_policies", "PolicyNames", RoleName=name)
        attached = _all(client, "list_attached_role_policies", "AttachedPolicies", RoleName=name)
        commands = (
            *(f"iam delete-role-policy {given} --policy-name {each}" for each in inline),
            *(f"iam detach-role-policy {given} --policy-arn {each['PolicyArn']}" for each in attached),
            f"iam delete-role {given}",
        )
        yield Found(kind="role", id=name, commands=commands, doubt=ACCOUNT_WIDE)


def _parameters(stack: Stack) -> Iterator[Found]:
    filters = [{"Key": f"tag:{key}", "Values": [value]} for key, value in stack.tags.items()]
    for item in _all(stack.client("ssm"), "describe_parameters", "Parameters", ParameterFilters=filters):
        name = item["Name"]
        yield Found(kind="parameter", id=name, commands=(f"ssm delete-parameter --name {name}",))


def _repositories(stack: Stack) -> Iterator[Found]:
    client = stack.client("ecr")
    for item in _all(client, "describe_repositories", "repositories"):
        name = item["repositoryName"]
        if stack.owns(client.list_tags_for_resource(resourceArn=item["repositoryArn"])["tags"]):
            delete = f"ecr delete-repository --repository-name {name} --force"
            yield Found(kind="repository", id=name, commands=(delete,))


def _alarms(stack: Stack) -> Iterator[Found]:
    client = stack.client("cloudwatch")
    for item in _all(client, "describe_alarms", "MetricAlarms", AlarmNamePrefix=f"{stack.prefix}-"):
        if stack.owns(client.list_tags_for_resource(ResourceARN=item["AlarmArn"])["Tags"]):
            name = item["AlarmName"]
            yield Found(kind="alarm", id=name, commands=(f"cloudwatch delete-alarms --alarm-names {name}",))


def _dashboards(stack: Stack) -> Iterator[Found]:
    """Dashboards carry no tags; one has the name of its cluster."""
    client = stack.client("cloudwatch")
    for item in _all(client, "list_dashboards", "DashboardEntries", DashboardNamePrefix=f"{stack.prefix}-ray-"):
        name = item["DashboardName"]
        if re.fullmatch(rf"{stack.prefix}-ray-[0-9a-f]+", name):
            delete = f"cloudwatch delete-dashboards --dashboard-names {name}"
            yield Found(kind="dashboard", id=name, commands=(delete,), doubt=ACCOUNT_WIDE)


def _topics(stack: Stack) -> Iterator[Found]:
    client = stack.client("sns")
    for item in _all(client, "list_topics", "Topics"):
        arn = item["TopicArn"]
        name = arn.rpartition(":")[2]
        if name.startswith(f"{stack.prefix}-") and stack.owns(client.list_tags_for_resource(ResourceArn=arn)["Tags"]):
            yield Found(kind="topic", id=arn, commands=(f"sns delete-topic --topic-arn {arn}",))


def _budgets(stack: Stack) -> Iterator[Found]:
    """Budgets carry no tags here; Pulumi knows one as account:name."""
    account = stack.client("sts").get_caller_identity()["Account"]
    pages = stack.client("budgets").get_paginator("describe_budgets").paginate(AccountId=account)
    for name in (each["BudgetName"] for page in pages for each in page.get("Budgets", [])):
        if re.fullmatch(rf"{stack.prefix}-monitoring-budget-[0-9a-f]+", name):
            delete = f"budgets delete-budget --account-id {account} --budget-name {name}"
            yield Found(kind="budget", id=f"{account}:{name}", commands=(delete,), doubt=ACCOUNT_WIDE)


def _log_groups(stack: Stack) -> Iterator[Found]:
    client = stack.client("logs")
    for prefix in (f"{stack.prefix}-", f"/aws/ecs/containerinsights/{stack.prefix}-"):
        for item in _all(client, "describe_log_groups", "logGroups", logGroupNamePrefix=prefix):
            name = item["logGroupName"]
            # Container Insights makes its group anew, without tags, where it still had to write something.
            is_insights = re.fullmatch(rf"/aws/ecs/containerinsights/{stack.prefix}-ray-[0-9a-f]+/performance", name)
            if is_insights or stack.owns(
                client.list_tags_for_resource(resourceArn=item["arn"].removesuffix(":*"))["tags"]
            ):
                delete = f"logs delete-log-group --log-group-name {name}"
                yield Found(kind="log group", id=name, commands=(delete,))


def _buckets(stack: Stack) -> Iterator[Found]:
    client = stack.client("s3")
    for item in client.list_buckets()["Buckets"]:
        name = item["Name"]
        if not name.startswith(f"{stack.prefix}-"):
            continue
        try:
            tags = client.get_bucket_tagging(Bucket=name)["TagSet"]
        except client.exceptions.ClientError as error:
            if error.response["Error"]["Code"] == "NoSuchTagSet":
                continue
            raise
        if stack.owns(tags):
            delete = f"s3 rb s3://{name} --force"
            yield Found(kind="bucket", id=name, commands=(delete,), doubt="the runs in it would be lost")
