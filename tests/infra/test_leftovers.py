"""What the account holds of a stack that its state does not know: found by tag, in an order in which it can go."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.stub import Stubber

from infra.definitions import policies
from infra.leftovers import __main__ as leftovers
from infra.leftovers import account
from infra.leftovers.state import known_ids
from infra.tags import name_prefix
from tests.aws import REGION, environment, moto_server

ROOT = Path(__file__).parents[2]
TRUST = json.dumps(policies.assumed_by("ecs-tasks.amazonaws.com"))
POLICY = json.dumps(policies.tls_only(bucket_arn="arn:aws:s3:::b"))


def prefix_of(tags: dict[str, str]) -> str:
    """What the names of a stack's parts begin with."""
    return name_prefix(f"{tags['project']}-{tags['stack']}")


def pairs(tags: dict[str, str], *, lower: bool = False) -> list[dict[str, str]]:
    """Tags as most services take them."""
    key, value = ("key", "value") if lower else ("Key", "Value")
    return [{key: name, value: each} for name, each in tags.items()]


@pytest.fixture
def account_url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with moto_server() as url:
        for name, value in environment(url).items():
            monkeypatch.setenv(name, value)
        yield url


@pytest.fixture
def tags() -> dict[str, str]:
    """Tags of a stack of this test alone: all of moto's servers in a process have one account."""
    return {"project": "ray-on-ecs", "stack": f"t{secrets.token_hex(3)}"}


def make_stack(tags: dict[str, str]) -> dict[str, str]:
    """Make one of each kind, and return their IDs as Pulumi knows them."""
    prefix = prefix_of(tags)
    ec2 = boto3.client("ec2")

    def spec(kind: str) -> list[dict[str, Any]]:
        return [{"ResourceType": kind, "Tags": pairs(tags)}]

    made = {"VPC": ec2.create_vpc(CidrBlock="10.0.0.0/16", TagSpecifications=spec("vpc"))["Vpc"]["VpcId"]}
    subnet = ec2.create_subnet(VpcId=made["VPC"], CidrBlock="10.0.0.0/24", TagSpecifications=spec("subnet"))
    made["subnet"] = subnet["Subnet"]["SubnetId"]
    group = ec2.create_security_group(
        GroupName="g", Description="d", VpcId=made["VPC"], TagSpecifications=spec("security-group")
    )
    made["security group"] = group["GroupId"]
    every = [{"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": group["GroupId"]}]}]
    ingress = ec2.authorize_security_group_ingress(
        GroupId=group["GroupId"], IpPermissions=every, TagSpecifications=spec("security-group-rule")
    )
    made["ingress rule"] = ingress["SecurityGroupRules"][0]["SecurityGroupRuleId"]
    egress = ec2.authorize_security_group_egress(
        GroupId=group["GroupId"], IpPermissions=every, TagSpecifications=spec("security-group-rule")
    )
    made["egress rule"] = egress["SecurityGroupRules"][0]["SecurityGroupRuleId"]
    table = ec2.create_route_table(VpcId=made["VPC"], TagSpecifications=spec("route-table"))
    made["route table"] = table["RouteTable"]["RouteTableId"]
    ec2.associate_route_table(RouteTableId=made["route table"], SubnetId=made["subnet"])
    endpoint = ec2.create_vpc_endpoint(
        VpcId=made["VPC"], ServiceName=f"com.amazonaws.{REGION}.s3", TagSpecifications=spec("vpc-endpoint")
    )
    made["VPC endpoint"] = endpoint["VpcEndpoint"]["VpcEndpointId"]
    interface = ec2.create_network_interface(SubnetId=made["subnet"], TagSpecifications=spec("network-interface"))
    made["network interface"] = interface["NetworkInterface"]["NetworkInterfaceId"]
    made["volume"] = ec2.create_volume(
        AvailabilityZone=subnet["Subnet"]["AvailabilityZone"], Size=1, TagSpecifications=spec("volume")
    )["VolumeId"]
    lone = ec2.run_instances(
        ImageId="ami-12c6146b", MinCount=1, MaxCount=1, SubnetId=made["subnet"], TagSpecifications=spec("instance")
    )
    made["instance"] = lone["Instances"][0]["InstanceId"]
    gateway = ec2.create_internet_gateway(TagSpecifications=spec("internet-gateway"))
    made["internet gateway"] = gateway["InternetGateway"]["InternetGatewayId"]
    ec2.attach_internet_gateway(VpcId=made["VPC"], InternetGatewayId=made["internet gateway"])
    address = ec2.allocate_address(Domain="vpc", TagSpecifications=spec("elastic-ip"))
    made["Elastic IP address"] = address["AllocationId"]
    nat = ec2.create_nat_gateway(
        SubnetId=made["subnet"], AllocationId=address["AllocationId"], TagSpecifications=spec("natgateway")
    )
    made["NAT gateway"] = nat["NatGateway"]["NatGatewayId"]
    template = ec2.create_launch_template(
        LaunchTemplateName=f"{prefix}-head-template-1a2b3c4",
        LaunchTemplateData={
            "InstanceType": "m5.large",
            "ImageId": "ami-12c6146b",
            "TagSpecifications": [{"ResourceType": "instance", "Tags": pairs(tags)}],
        },
    )
    made["launch template"] = template["LaunchTemplate"]["LaunchTemplateId"]
    made["scaling group"] = f"{prefix}-head-group"
    boto3.client("autoscaling").create_auto_scaling_group(
        AutoScalingGroupName=made["scaling group"],
        MinSize=1,
        MaxSize=1,
        VPCZoneIdentifier=made["subnet"],
        LaunchTemplate={"LaunchTemplateId": made["launch template"], "Version": "$Latest"},
        Tags=[{**each, "PropagateAtLaunch": True} for each in pairs(tags)],
    )
    ecs = boto3.client("ecs")
    cluster = ecs.create_cluster(clusterName=f"{prefix}-ray-c0ffee", tags=pairs(tags, lower=True))
    made["ECS cluster"] = cluster["cluster"]["clusterArn"]
    ecs.register_task_definition(
        family=f"{prefix}-head-task",
        containerDefinitions=[{"name": "head", "image": "x", "memory": 64}],
        tags=pairs(tags, lower=True),
    )
    made["task definition"] = ecs.list_task_definitions(familyPrefix=f"{prefix}-head-task")["taskDefinitionArns"][0]
    service = ecs.create_service(
        cluster=made["ECS cluster"], serviceName=f"{prefix}-head", taskDefinition=f"{prefix}-head-task", desiredCount=0
    )
    made["ECS service"] = service["service"]["serviceArn"]
    made["role"] = f"{prefix}-head-task-role"
    iam = boto3.client("iam")
    iam.create_role(RoleName=made["role"], AssumeRolePolicyDocument=TRUST, Tags=pairs(tags))
    iam.put_role_policy(RoleName=made["role"], PolicyName="inline", PolicyDocument=POLICY)
    made["instance profile"] = f"{prefix}-head-instance-profile"
    iam.create_instance_profile(InstanceProfileName=made["instance profile"], Tags=pairs(tags))
    iam.add_role_to_instance_profile(InstanceProfileName=made["instance profile"], RoleName=made["role"])
    account_id = boto3.client("sts").get_caller_identity()["Account"]
    budget = f"{prefix}-monitoring-budget-1a2b3c4"
    boto3.client("budgets").create_budget(
        AccountId=account_id,
        Budget={
            "BudgetName": budget,
            "BudgetLimit": {"Amount": "1", "Unit": "USD"},
            "BudgetType": "COST",
            "TimeUnit": "MONTHLY",
        },
    )
    made["budget"] = f"{account_id}:{budget}"
    made["parameter"] = f"{prefix}-auth-parameter"
    boto3.client("ssm").put_parameter(Name=made["parameter"], Value="x", Type="String", Tags=pairs(tags))
    made["repository"] = f"{prefix}-image-repository"
    boto3.client("ecr").create_repository(repositoryName=made["repository"], tags=pairs(tags))
    made["log group"] = f"/aws/ecs/containerinsights/{prefix}-ray-c0ffee/performance"
    boto3.client("logs").create_log_group(logGroupName=made["log group"], tags=tags)
    made["topic"] = boto3.client("sns").create_topic(Name=f"{prefix}-alerts", Tags=pairs(tags))["TopicArn"]
    made["alarm"] = f"{prefix}-head-alarm"
    cloudwatch = boto3.client("cloudwatch")
    cloudwatch.put_metric_alarm(
        AlarmName=made["alarm"],
        ComparisonOperator="LessThanThreshold",
        EvaluationPeriods=1,
        MetricName="m",
        Namespace="n",
        Period=60,
        Statistic="Maximum",
        Threshold=1,
        Tags=pairs(tags),
    )
    made["dashboard"] = f"{prefix}-ray-c0ffee"
    cloudwatch.put_dashboard(DashboardName=made["dashboard"], DashboardBody=json.dumps({"widgets": []}))
    namespaces = boto3.client("servicediscovery")
    namespaces.create_private_dns_namespace(Name=f"{prefix}.internal", Vpc=made["VPC"], Tags=pairs(tags))
    [namespace] = [each for each in namespaces.list_namespaces()["Namespaces"] if each["Name"] == f"{prefix}.internal"]
    made["DNS namespace"] = namespace["Id"]
    service = namespaces.create_service(Name="head", NamespaceId=namespace["Id"], Tags=pairs(tags))
    made["name in DNS"] = service["Service"]["Id"]
    address = {"AWS_INSTANCE_IPV4": "10.0.0.9"}
    namespaces.register_instance(ServiceId=made["name in DNS"], InstanceId="task", Attributes=address)
    made["bucket"] = f"{prefix}-storage-bucket"
    boto3.client("s3").create_bucket(Bucket=made["bucket"])
    boto3.client("s3").put_bucket_tagging(Bucket=made["bucket"], Tagging={"TagSet": pairs(tags)})
    return made


# What moto does not list, and so is asked of stubs below.
NOT_IN_MOTO = {"capacity providers", "placement groups"}


def report(tags: dict[str, str], capsys: pytest.CaptureFixture[str], known: set[str]) -> str:
    """What the command prints of the stack."""
    stack = account.Stack(tags=tags, prefix=prefix_of(tags), session=boto3.Session(region_name=REGION))
    listings = {kinds: listing for kinds, listing in account.listings().items() if kinds not in NOT_IN_MOTO}
    assert leftovers.report(stack, known, listings) == 0
    printed = capsys.readouterr()
    assert not printed.err
    return printed.out


@pytest.mark.usefixtures("account_url")
def test_what_the_state_does_not_know_is_listed_with_commands_that_delete_it(
    tags: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    made = make_stack(tags)
    make_stack({**tags, "stack": f"{tags['stack']}-2"})
    out = report(tags, capsys, set())
    lines = out.splitlines()
    assert lines[0] == "export AWS_PAGER=", "the command of AWS would wait for a key after each"
    headings = [
        line[2:].partition(": ")[0] for line in lines if line.startswith("# ") and not line.startswith("# aws ")
    ]
    assert sorted(headings) == sorted(f"{kind} {name}" for kind, name in made.items()), "neither more nor less"
    order = [heading.rpartition(" ")[0] for heading in headings]
    for earlier, later in (
        ("ECS service", "scaling group"),
        ("ECS service", "ECS cluster"),
        ("ingress rule", "security group"),
        ("route table", "subnet"),
        ("instance profile", "role"),
        ("scaling group", "launch template"),
        ("scaling group", "ECS cluster"),
        ("name in DNS", "DNS namespace"),
        ("DNS namespace", "VPC"),
        ("NAT gateway", "Elastic IP address"),
        ("NAT gateway", "subnet"),
        ("security group", "VPC"),
        ("subnet", "VPC"),
        ("internet gateway", "VPC"),
    ):
        assert order.index(earlier) < order.index(later), f"AWS refuses to delete the {later} before the {earlier}"
    commands = [line for line in out.splitlines() if line.startswith("aws ")]
    assert all(line.startswith(f"aws --region {REGION} ") for line in commands)
    assert f"aws --region {REGION} ec2 delete-subnet --subnet-id {made['subnet']}" in commands
    assert any(
        f"deregister-instance --service-id {made['name in DNS']} --instance-id task" in each for each in commands
    )
    role = f"iam delete-role-policy --role-name {made['role']} --policy-name inline"
    assert f"# aws --region {REGION} {role}" in lines, "roles have no region, and may be another stack's"
    assert f"# aws --region {REGION} s3 rb s3://{made['bucket']} --force" in lines, "a shell must not run this one"
    kinds = {each.kind for each in account.EC2_KINDS} - {"placement group"}
    assert kinds <= made.keys(), "each kind is tried"


@pytest.mark.usefixtures("account_url")
def test_what_the_state_knows_is_nothing(tags: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    made = make_stack(tags)
    resources: list[dict[str, Any]] = [{"urn": "urn:component", "type": "ray-on-ecs:infra:Network"}]
    resources += [{"urn": f"urn:{kind}", "id": name, "outputs": {"tags": {}}} for kind, name in made.items()]
    # A task definition's ID is its family, and its ARN stands in its outputs.
    resources[-1] |= {"id": "other", "outputs": {"arn": made["bucket"]}}
    assert report(tags, capsys, known_ids({"deployment": {"resources": resources}})) == "# nothing\n"


class Stubbed:
    """A session whose one client answers as the service's own model says."""

    region_name = REGION
    profile_name = "default"

    def __init__(self, service: str) -> None:
        self._client = boto3.client(service, region_name=REGION, aws_access_key_id="-", aws_secret_access_key="-")
        self.stubs = Stubber(self._client)
        self.stubs.activate()

    def client(self, service: str) -> Any:
        return self._client


def provider(name: str, stack: str, status: str = "ACTIVE") -> dict[str, Any]:
    """A capacity provider as ECS describes it."""
    tags = pairs({"project": "ray-on-ecs", "stack": stack}, lower=True)
    return {"capacityProviderArn": f"arn:aws:ecs:{REGION}:1:capacity-provider/{name}", "status": status, "tags": tags}


def test_capacity_providers_are_listed_page_by_page(tags: dict[str, str]) -> None:
    session = Stubbed("ecs")
    first = {"capacityProviders": [{"name": "FARGATE", "status": "ACTIVE"}, provider("a", tags["stack"])]}
    session.stubs.add_response("describe_capacity_providers", {**first, "nextToken": "next"}, {"include": ["TAGS"]})
    rest = [provider("b", "other"), provider("c", tags["stack"]), provider("d", tags["stack"], "INACTIVE")]
    asked = {"include": ["TAGS"], "nextToken": "next"}
    session.stubs.add_response("describe_capacity_providers", {"capacityProviders": rest}, asked)
    stack = account.Stack(tags=tags, prefix=prefix_of(tags), session=session)  # ty: ignore[invalid-argument-type]
    found = list(account.listings()["capacity providers"](stack))
    assert [each.id.rpartition("/")[2] for each in found] == ["a", "c"]
    assert found[0].commands == (f"ecs delete-capacity-provider --capacity-provider {found[0].id}",)
    session.stubs.assert_no_pending_responses()


def test_placement_groups_are_listed_by_tag(tags: dict[str, str]) -> None:
    session = Stubbed("ec2")
    groups = [{"GroupName": "one", "State": "available", "Tags": pairs(tags)}]
    groups += [{"GroupName": "gone", "State": "deleted", "Tags": pairs(tags)}]
    filters = [{"Name": f"tag:{key}", "Values": [value]} for key, value in tags.items()]
    session.stubs.add_response("describe_placement_groups", {"PlacementGroups": groups}, {"Filters": filters})
    stack = account.Stack(tags=tags, prefix=prefix_of(tags), session=session)  # ty: ignore[invalid-argument-type]
    [found] = account.listings()["placement groups"](stack)
    assert (found.id, found.commands) == ("one", ("ec2 delete-placement-group --group-name one",))


def test_what_can_not_be_listed_is_said_and_no_reason_to_say_nothing(
    tags: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    session = Stubbed("sns")
    session.stubs.add_client_error("list_topics", "AccessDenied", "not for you")
    stack = account.Stack(tags=tags, prefix=prefix_of(tags), session=session)  # ty: ignore[invalid-argument-type]
    assert leftovers.report(stack, set(), {"topics": account.listings()["topics"]}) == 2
    printed = capsys.readouterr()
    assert printed.out == "", "nobody knows whether there is nothing"
    assert printed.err.startswith("leftovers: topics can't be listed: ")
    assert "not for you" in printed.err


@pytest.mark.usefixtures("account_url")
def test_the_state_of_a_stack_that_was_destroyed_knows_nothing(
    tags: dict[str, str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listings = {"VPCs": account.listings()["VPCs"]}
    monkeypatch.setattr(account, "listings", lambda: listings)
    monkeypatch.chdir(ROOT)
    (tmp_path / "state.json").write_text(json.dumps({"version": 3, "deployment": {"manifest": {}}}))
    given = ("--stack", tags["stack"], "--region", REGION, "--state", str(tmp_path / "state.json"))
    assert leftovers.main(given) == 0
    assert capsys.readouterr().out == "# nothing\n"
    vpc = make_stack(tags)["VPC"]
    assert leftovers.main(given) == 0
    assert (
        capsys.readouterr().out
        == f"export AWS_PAGER=\n# VPC {vpc}\naws --region {REGION} ec2 delete-vpc --vpc-id {vpc}\n"
    )


def command(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the command as `make leftovers` does."""
    return subprocess.run(
        [sys.executable, "-m", "infra.leftovers", *arguments],
        cwd=ROOT,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ((), "leftovers: Pulumi is not installed here; install it, or give --stack, --region and --state"),
        (("--state", "nothing.json"), "leftovers: --state nothing.json: can't be read ("),
        (("--state", "Pulumi.yaml"), "leftovers: --state Pulumi.yaml: can't be read ("),
        (("--state", "docs/dashboard.json"), "leftovers: --state docs/dashboard.json: "),
    ],
)
def test_what_can_not_be_read_is_one_line(account_url: str, arguments: tuple[str, ...], line: str) -> None:
    given = ("--stack", "dev", "--region", REGION, *arguments) if arguments else ()
    told = command(*given, PATH="/nowhere", **environment(account_url))
    assert (told.returncode, told.stdout) == (2, "")
    assert told.stderr.startswith(line)
    assert told.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("variables", "line"),
    [
        ({"AWS_PROFILE": "nobody"}, "leftovers: The config profile (nobody) could not be found\n"),
        ({"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, "leftovers: Could not connect to the endpoint URL"),
    ],
)
def test_an_account_that_can_not_be_asked_is_one_line(tmp_path: Path, variables: dict[str, str], line: str) -> None:
    (tmp_path / "state.json").write_text(json.dumps({"deployment": {}}))
    given = ("--stack", "dev", "--region", REGION, "--state", str(tmp_path / "state.json"))
    told = command(*given, **{"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", **variables})
    assert (told.returncode, told.stdout) == (2, "")
    assert told.stderr.startswith(line)
    assert told.stderr.count("\n") == 1
