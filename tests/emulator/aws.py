"""AWS in this process: moto, with what it lacks for this stack and with what AWS refuses and moto takes."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
import uuid
from collections import defaultdict
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

os.environ.setdefault("MOTO_IAM_LOAD_MANAGED_POLICIES", "true")  # before moto is imported

import boto3
import jmespath
from moto.applicationautoscaling.models import ApplicationAutoscalingBackend, FakeApplicationAutoscalingPolicy
from moto.applicationautoscaling.responses import ApplicationAutoScalingResponse
from moto.autoscaling.models import AutoScalingBackend, autoscaling_backends
from moto.autoscaling.responses import AutoScalingResponse
from moto.budgets.responses import BudgetsResponse
from moto.codebuild import responses as codebuild
from moto.codebuild.models import CodeBuildBackend
from moto.codebuild.responses import CodeBuildResponse
from moto.core.exceptions import ServiceException
from moto.core.responses import ActionResult
from moto.ec2.models import EC2Backend
from moto.ec2.models.instance_types import INSTANCE_TYPE_OFFERINGS
from moto.ec2.models.vpcs import VPCBackend
from moto.ec2.responses import EC2Response
from moto.ecs.models import EC2ContainerServiceBackend
from moto.ecs.responses import EC2ContainerServiceResponse
from moto.iam.access_control import PermissionResult
from moto.iam.models import SERVICE_NAME_CONVERSION
from moto.kms.models import kms_backends
from moto.logs.responses import LogsResponse
from moto.moto_server.werkzeug_app import DomainDispatcherApplication
from moto.s3.models import FakeBucket, FakeDeleteMarker
from moto.servicediscovery.models import ServiceDiscoveryBackend
from moto.servicequotas.responses import ServiceQuotasResponse
from moto.ssm.models import ParameterDict, ssm_backends

from tests.aws import environment, moto_server
from tests.emulator import file_systems
from tests.emulator.monitor import ACCOUNT

# On-demand Linux in USD an hour, rounded, and other products of the price list.
UNITS = {"Provisioned Throughput": "GiBps-mo", "Storage": "GB-Mo"}
PRICES = {
    "Provisioned Throughput": 40.96,
    "Storage": 0.08,
    "NAT Gateway": 0.045,
    "VpcEndpoint": 0.01,
    "t4g.nano": 0.0042, "m5.large": 0.096, "m5.xlarge": 0.192, "m5.2xlarge": 0.384, "m6i.xlarge": 0.192,
    "c6i.2xlarge": 0.34, "g4dn.xlarge": 0.526,
    "g5.xlarge": 1.006, "g5.12xlarge": 5.672, "g6.xlarge": 0.805, "g6e.xlarge": 1.861, "p4d.24xlarge": 21.957,
    "p5.48xlarge": 55.04,
}  # fmt: skip
VCPU_QUOTA = 64.0
KEY = f"arn:aws:kms:us-west-2:{ACCOUNT}:key/1a2b3c4d-0000-4000-8000-000000000000"
BOUNDARY = f"arn:aws:iam::{ACCOUNT}:policy/boundary"
# The region whose machine images and instance types moto records, for those where it records none.
RECORDED = "us-west-2"
OTHER_PARTITIONS = ("us-gov-west-1", "us-gov-east-1", "cn-north-1", "cn-northwest-1")


@contextmanager
def running(region: str, log: Path) -> Generator[str]:
    """Run AWS with an empty account and its own log, lead this process and its children to it, and yield its URL."""
    server = logging.getLogger("werkzeug")
    server.addHandler(logging.FileHandler(log))
    server.propagate = False
    with moto_server() as url:
        os.environ.update({**environment(url), "AWS_REGION": region, "AWS_DEFAULT_REGION": region})
        yield url


def create_prerequisites() -> None:
    """Create what the stack with everything on finds in its account: KEY, BOUNDARY and service-linked roles."""
    backend = kms_backends[ACCOUNT][KEY.split(":")[3]]
    key = backend.create_key(None, "ENCRYPT_DECRYPT", "SYMMETRIC_DEFAULT", "of the emulator", [])
    del backend.keys[key.id]
    key.id, key.arn = KEY.rpartition("/")[2], KEY
    backend.keys[key.id] = key
    iam = boto3.client("iam")
    allow = {"Effect": "Allow", "Action": "*", "Resource": "*"}
    document = json.dumps({"Version": "2012-10-17", "Statement": [allow]})
    iam.create_policy(PolicyName=BOUNDARY.rpartition("/")[2], PolicyDocument=document)
    SERVICE_NAME_CONVERSION.update({"ecs": "ECS", "spot": "EC2Spot"})
    for service in ("autoscaling", "ecs", "spot"):
        iam.create_service_linked_role(AWSServiceName=f"{service}.amazonaws.com")
    file_systems.create(os.environ["AWS_REGION"])


def inventory() -> set[str]:
    """Names of all that is in the account and would be billed, or be in the way of another stack."""

    def ask(service: str, operation: str, path: str, **arguments: Any) -> list[str]:
        return jmespath.search(path, getattr(boto3.client(service), operation)(**arguments)) or []

    clusters = ask("ecs", "list_clusters", "clusterArns")
    return {
        *ask("s3", "list_buckets", "Buckets[].Name"),
        *ask("ecs", "describe_clusters", "clusters[?status=='ACTIVE'].clusterArn", clusters=clusters),
        *ask("autoscaling", "describe_auto_scaling_groups", "AutoScalingGroups[].AutoScalingGroupName"),
        *ask("ec2", "describe_instances", "Reservations[].Instances[?State.Name!='terminated'][].InstanceId"),
        *ask("ec2", "describe_launch_templates", "LaunchTemplates[].LaunchTemplateName"),
        *ask("ec2", "describe_placement_groups", "PlacementGroups[].GroupName"),
        *ask("ec2", "describe_vpcs", "Vpcs[].VpcId"),
        *ask("ec2", "describe_security_groups", "SecurityGroups[].GroupId"),
        *ask("ec2", "describe_nat_gateways", "NatGateways[?State!='deleted'].NatGatewayId"),
        *ask("ec2", "describe_addresses", "Addresses[].AllocationId"),
        *ask("codebuild", "list_projects", "projects"),
        *ask("ecr", "describe_repositories", "repositories[].repositoryName"),
        *ask("iam", "list_roles", "Roles[].RoleName"),
        *ask("iam", "list_instance_profiles", "InstanceProfiles[].InstanceProfileName"),
        *ask("logs", "describe_log_groups", "logGroups[].logGroupName"),
        *ask("servicediscovery", "list_namespaces", "Namespaces[].Name"),
        *ask("cloudwatch", "describe_alarms", "MetricAlarms[].AlarmName"),
        *ask("cloudwatch", "list_dashboards", "DashboardEntries[].DashboardName"),
        *ask("sns", "list_topics", "Topics[].TopicArn"),
        *ask("ssm", "list_documents", "DocumentIdentifiers[].Name", Filters=[{"Key": "Owner", "Values": ["Self"]}]),
        *ask("ssm", "describe_parameters", "Parameters[?!starts_with(Name, '/aws/')].Name"),
    }


class AwsError(ServiceException):
    """An error with a code and a message; outside moto's modules, so that it takes the form of the called service."""


def instead_of(owner: type | ModuleType, *names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Put a function in the place of methods, which it gets as its first argument (None if there was none)."""

    def put(function: Callable[..., Any]) -> Callable[..., Any]:
        for name in names:
            setattr(owner, name, _method(function, getattr(owner, name, None)))
        return function

    return put


def _method(function: Callable[..., Any], original: Any) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(original, self, *args, **kwargs)

    return method


# EC2: placement groups, which moto lacks.


def _placement_groups(response: EC2Response) -> dict[str, dict[str, Any]]:
    return vars(response.ec2_backend).setdefault("placement_groups", {})


@instead_of(EC2Response, "create_placement_group")
def _create_placement_group(_: None, self: Any) -> ActionResult:
    name = self._get_param("GroupName")
    tags = self._parse_tag_specification("placement-group").get("placement-group", {})
    group = {
        "GroupName": name,
        "GroupId": f"pg-{uuid.uuid4().hex[:17]}",
        "GroupArn": f"arn:aws:ec2:{self.region}:{self.current_account}:placement-group/{name}",
        "Strategy": self._get_param("Strategy") or "cluster",
        "State": "available",
        "Tags": [{"Key": key, "Value": value} for key, value in tags.items()],
    }
    _placement_groups(self)[name] = group
    return ActionResult({"PlacementGroup": group})


@instead_of(EC2Response, "describe_placement_groups")
def _describe_placement_groups(_: None, self: Any) -> ActionResult:
    names = self._get_param("GroupNames", [])
    found = [group for name, group in _placement_groups(self).items() if not names or name in names]
    if names and not found:
        raise AwsError("InvalidPlacementGroup.Unknown", "The placement group is unknown.")
    return ActionResult({"PlacementGroups": found})


@instead_of(EC2Response, "delete_placement_group")
def _delete_placement_group(_: None, self: Any) -> ActionResult:
    name = self._get_param("GroupName")
    groups = autoscaling_backends[self.current_account][self.region].autoscaling_groups.values()
    if any(group.placement_group == name and group.instance_states for group in groups):
        raise AwsError("InvalidPlacementGroup.InUse", f"The placement group {name} is in use and may not be deleted.")
    _placement_groups(self).pop(name, None)
    return ActionResult({})


@instead_of(VPCBackend, "describe_vpc_endpoint_services")
def _describe_vpc_endpoint_services(original: Any, self: Any, *, filters: list[dict[str, Any]], **asked: Any) -> Any:
    # Moto reads "Value", and gets "Values".
    return original(self, filters=[{**given, "Value": given["Values"]} for given in filters], **asked)


@instead_of(EC2Response, "create_tags")
def _create_tags(original: Any, self: Any) -> ActionResult:
    return _change_tags(original, self, keep=True)


@instead_of(EC2Response, "delete_tags")
def _delete_tags(original: Any, self: Any) -> ActionResult:
    return _change_tags(original, self, keep=False)


def _change_tags(original: Any, self: Any, *, keep: bool) -> ActionResult:
    asked = self._get_param("Resources", [])
    mine = [group for group in _placement_groups(self).values() if group["GroupId"] in asked]
    given = self._get_param("Tags", [])
    for group in mine:
        keys = {tag["Key"] for tag in given}
        group["Tags"] = [tag for tag in group["Tags"] if tag["Key"] not in keys] + (list(given) if keep else [])
    return ActionResult({}) if mine else original(self)


# EC2: refusals, and images that a launch template names by a parameter.


@instead_of(EC2Backend, "create_nat_gateway")
def _create_nat_gateway(original: Any, self: Any, subnet_id: str, allocation_id: str, *args: Any, **kwargs: Any) -> Any:
    for gateway in self.nat_gateways.values():
        taken = {address.get("allocationId") for address in gateway.address_set}
        if allocation_id in taken and gateway.state != "deleted":
            raise AwsError("Resource.AlreadyAssociated", f"Elastic IP address [{allocation_id}] is already associated.")
    return original(self, subnet_id, allocation_id, *args, **kwargs)


@instead_of(EC2Backend, "run_instances")
def _run_instances(original: Any, self: Any, image_id: str, *args: Any, **kwargs: Any) -> Any:
    if image_id.startswith("resolve:ssm:"):
        parameters = ssm_backends[self.account_id][self.region_name]._parameters
        name = image_id.removeprefix("resolve:ssm:")
        if name not in parameters:
            raise AwsError("InvalidParameterValue", f"The parameter {name} of {image_id} can't be found.")
        image_id = parameters[name][-1].value
    return original(self, image_id, *args, **kwargs)


for _by_region in INSTANCE_TYPE_OFFERINGS.values():
    for _region in OTHER_PARTITIONS:
        _offers = [{**each, "Location": each["Location"].replace(RECORDED, _region)} for each in _by_region[RECORDED]]
        _by_region.setdefault(_region, _offers)


@instead_of(ParameterDict, "_load_tree_parameters")
def _load_tree_parameters(original: Any, self: Any, path: str) -> None:
    region = RECORDED if self.region_name in OTHER_PARTITIONS else self.region_name
    original(self, path.replace(self.region_name, region))


# EC2: capacity reservations, which moto lacks: two p5.48xlarge on demand, and in a Capacity Block.

RESERVATIONS = {"cr-0dc00000000000000": "default", "cr-0b10c000000000000": "capacity-block"}


@instead_of(EC2Response, "describe_capacity_reservations")
def _describe_capacity_reservations(_: None, self: Any) -> ActionResult:
    [name] = self._get_param("CapacityReservationIds")
    if name not in RESERVATIONS:
        raise AwsError("InvalidCapacityReservationId.NotFound", f"The capacity reservation ID '{name}' does not exist.")
    now = datetime.now(UTC)
    reservation = {
        "CapacityReservationId": name,
        "OwnerId": self.current_account,
        "InstanceType": "p5.48xlarge",
        "InstancePlatform": "Linux/UNIX",
        "AvailabilityZone": f"{self.region}a",
        "Tenancy": "default",
        "TotalInstanceCount": 2,
        "AvailableInstanceCount": 2,
        "State": "active",
        "StartDate": now - timedelta(days=1),
        "InstanceMatchCriteria": "targeted",
        "ReservationType": RESERVATIONS[name],
        "Interruptible": False,
    }
    if RESERVATIONS[name] == "capacity-block":
        reservation["EndDate"] = now + timedelta(days=2)
    return ActionResult({"CapacityReservations": [reservation]})


# Auto Scaling: instances that are protected, instance refreshes, and what an update forgets.


@instead_of(AutoScalingBackend, "delete_auto_scaling_group")
def _delete_auto_scaling_group(original: Any, self: Any, group_name: str) -> None:
    _unprotect(self.autoscaling_groups.get(group_name))
    original(self, group_name)


@instead_of(AutoScalingResponse, "start_instance_refresh")
def _start_instance_refresh(_: None, self: Any) -> ActionResult:
    """Replace all instances at once."""
    group = self.autoscaling_backend.autoscaling_groups[self._get_param("AutoScalingGroupName")]
    number = group.desired_capacity
    _unprotect(group)
    group.set_desired_capacity(0)
    group.set_desired_capacity(number)
    group.refresh_id = str(uuid.uuid4())
    return ActionResult({"InstanceRefreshId": group.refresh_id})


@instead_of(AutoScalingResponse, "describe_instance_refreshes")
def _describe_instance_refreshes(_: None, self: Any) -> ActionResult:
    name = self._get_param("AutoScalingGroupName")
    number = getattr(self.autoscaling_backend.autoscaling_groups[name], "refresh_id", None)
    refresh = {"AutoScalingGroupName": name, "Status": "Successful", "PercentageComplete": 100}
    return ActionResult({"InstanceRefreshes": [{**refresh, "InstanceRefreshId": number}] if number else []})


@instead_of(AutoScalingResponse, "update_auto_scaling_group")
def _update_auto_scaling_group(original: Any, self: Any) -> Any:
    group = self.autoscaling_backend.autoscaling_groups[self._get_param("AutoScalingGroupName")]
    mixed = group.mixed_instances_policy
    result = original(self)
    if self._get_param("MixedInstancesPolicy") is None and self._get_param("LaunchTemplate") is None:
        group.mixed_instances_policy = mixed
    if (placement_group := self._get_param("PlacementGroup")) is not None:
        group.placement_group = placement_group
    return result


@instead_of(AutoScalingBackend, "put_scaling_policy")
def _put_group_policy(original: Any, self: Any, **of_policy: Any) -> Any:
    policy = original(self, **of_policy)
    policy.enabled = True
    policy.predictive_scaling_configuration = policy.predictive_scaling_configuration or None
    return policy


def _unprotect(group: Any) -> None:
    for state in group.instance_states if group else []:
        state.protected_from_scale_in = False


@instead_of(ApplicationAutoscalingBackend, "put_scaling_policy")
def _put_scaling_policy(original: Any, self: Any, **of_policy: Any) -> Any:
    """Keep the ARN of a policy that is changed."""
    parts = (of_policy[part] for part in ("service_namespace", "resource_id", "scalable_dimension", "policy_name"))
    before = self.policies.get(FakeApplicationAutoscalingPolicy.formulate_key(*parts))
    policy = original(self, **of_policy)
    if before:
        policy._guid, policy.policy_arn = before._guid, before.policy_arn
    return policy


# ECS: what a service forgets.


@instead_of(EC2ContainerServiceResponse, "create_service")
def _create_service(original: Any, self: Any) -> Any:
    result = original(self)
    service = result._result["service"] if hasattr(result, "_result") else result.result["service"]
    service.capacity_provider_strategy = self._get_param("capacityProviderStrategy") or []
    service.deployment_configuration = self._get_param("deploymentConfiguration") or {}
    service.enable_execute_command = bool(self._get_param("enableExecuteCommand"))
    service.availability_zone_rebalancing = self._get_param("availabilityZoneRebalancing") or "DISABLED"
    if service.capacity_provider_strategy:
        service.launch_type = None
    if not self._get_param("deploymentController"):
        service.deployment_controller = None
    return result


@instead_of(EC2ContainerServiceBackend, "update_service")
def _update_service(original: Any, self: Any, properties: dict[str, Any]) -> Any:
    """Leave what an update does not name."""
    service = self._get_service(properties.get("cluster", "default"), properties["service"].split("/")[-1])
    if changed := properties.get("deployment_configuration"):
        properties["deployment_configuration"] = {**getattr(service, "deployment_configuration", {}), **changed}
    return original(self, properties)


# CodeBuild: projects without a source, changes of a project, and builds that leave an image.


@instead_of(codebuild, "_validate_required_params_source")
def _check_source(original: Any, source: dict[str, Any]) -> None:
    if source["type"] != "NO_SOURCE":
        original(source)


@instead_of(CodeBuildResponse, "update_project")
def _update_project(_: None, self: Any) -> ActionResult:
    project = self.codebuild_backend.codebuild_projects[self._get_param("name")].project_metadata
    for name in ("description", "environment", "logsConfig", "serviceRole", "source", "tags", "timeoutInMinutes"):
        project[name] = self._get_param(name) or project.get(name)
    return ActionResult({"project": project})


@instead_of(CodeBuildBackend, "delete_project")
def _delete_project(original: Any, self: Any, name: str) -> None:
    original(self, name.rpartition("/")[2])  # the provider gives the ARN


@instead_of(CodeBuildResponse, "start_build")
def _start_build(original: Any, self: Any) -> ActionResult:
    given = {each["name"]: each["value"] for each in self._get_param("environmentVariablesOverride")}
    bucket, _, key = given["SOURCE"].removeprefix("s3://").partition("/")
    source = boto3.client("s3").get_object(Bucket=bucket, Key=key)["Body"].read()
    if hashlib.sha256(source).hexdigest() != given["SHA256"]:
        raise AwsError("InvalidInputException", f"{given['SOURCE']} is not the source of this build.")
    kind = "application/vnd.oci.image.manifest.v1+json"
    manifest = json.dumps(
        {"schemaVersion": 2, "mediaType": kind, "config": {"digest": given["SHA256"], "size": 2}, "layers": []}
    )
    name = given["REPOSITORY"].partition("/")[2]
    boto3.client("ecr").put_image(repositoryName=name, imageManifest=manifest, imageTag=given["TAG"])
    print("   CodeBuild builds", given["TAG"])
    return original(self)


# Other services.


@instead_of(FakeBucket, "get_permission")
def _get_permission(*_: Any) -> PermissionResult:
    """Moto does not read the condition of the policy that refuses requests without TLS."""
    return PermissionResult.NEUTRAL


@instead_of(FakeDeleteMarker, "dispose")
def _dispose(*_: Any) -> None:
    """A marker has no file; moto calls this for the versions of a deleted object."""


@instead_of(LogsResponse, "associate_kms_key", "disassociate_kms_key")
def _change_key(_: Any, self: Any) -> str:
    group = self._get_param("logGroupName") or self._get_param("resourceIdentifier")
    name = group.split(":log-group:")[-1].removesuffix(":*")
    self.logs_backend.groups[name].kms_key_id = self._get_param("kmsKeyId")
    return ""


@instead_of(ServiceDiscoveryBackend, "create_private_dns_namespace")
def _create_private_dns_namespace(original: Any, self: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    if any(not 0 < len(label) < 64 for label in name.split(".")):
        raise AwsError("InvalidInput", f"The domain name {name} has a label of more than 63 characters.")
    return original(self, name, *args, **kwargs)


@instead_of(ServiceQuotasResponse, "get_service_quota", "get_aws_default_service_quota")
def _get_service_quota(_: Any, self: Any) -> str:
    service, code = self._get_param("ServiceCode"), self._get_param("QuotaCode")
    arn = f"arn:aws:servicequotas:{self.region}:{self.current_account}:{service}/{code}"
    names = {"QuotaCode": code, "ServiceCode": service, "ServiceName": service, "QuotaName": code, "QuotaArn": arn}
    return json.dumps(
        {"Quota": {**names, "Value": VCPU_QUOTA, "Unit": "None", "Adjustable": True, "GlobalQuota": False}}
    )


@instead_of(BudgetsResponse, "describe_subscribers_for_notification")
def _describe_subscribers(_: None, self: Any) -> str:
    asked = self._get_param("Notification")
    budget = self.backend.budgets[self._get_param("AccountId")][self._get_param("BudgetName")]
    same = ("NotificationType", "ComparisonOperator", "Threshold")
    found = [
        notification
        for notification in budget.notifications
        if all(notification.details.get(key) == asked.get(key) for key in same)
    ]
    return json.dumps({"Subscribers": found[0].subscribers if found else []})


# Tags of budgets and scalable targets by ARN, which moto drops.
_TAGS: dict[str, dict[str, str]] = {}
_TAG_LISTS = {ApplicationAutoScalingResponse: ("Tags", "TagKeys"), BudgetsResponse: ("ResourceTags", "ResourceTagKeys")}


def _tag(original: Any, self: Any) -> str:
    added = self._get_param(_TAG_LISTS[type(self)][0])
    _TAGS.setdefault(self._get_param("ResourceARN"), {}).update(_pairs(added))
    return "{}"


def _untag(original: Any, self: Any) -> str:
    for key in self._get_param(_TAG_LISTS[type(self)][1]):
        _TAGS[self._get_param("ResourceARN")].pop(key, None)
    return "{}"


def _list_tags(original: Any, self: Any) -> str:
    tags: Any = _TAGS.get(self._get_param("ResourceARN"), {})
    if isinstance(self, BudgetsResponse):
        tags = [{"Key": key, "Value": value} for key, value in tags.items()]
    return json.dumps({_TAG_LISTS[type(self)][0]: tags})


def _pairs(tags: Any) -> dict[str, str]:
    """Tags from a mapping, or from the list of pairs of AWS Budgets."""
    return tags if isinstance(tags, dict) else {tag["Key"]: tag["Value"] for tag in tags or ()}


for _response in _TAG_LISTS:
    instead_of(_response, "tag_resource")(_tag)
    instead_of(_response, "untag_resource")(_untag)
    instead_of(_response, "list_tags_for_resource")(_list_tags)


@instead_of(ApplicationAutoScalingResponse, "register_scalable_target")
def _register_scalable_target(original: Any, self: Any) -> str:
    answer = original(self)
    _TAGS.setdefault(json.loads(answer)["ScalableTargetARN"], {}).update(_pairs(self._get_param("Tags")))
    return answer


@instead_of(BudgetsResponse, "create_budget")
def _create_budget(original: Any, self: Any) -> str:
    name, account = self._get_param("Budget")["BudgetName"], self._get_param("AccountId")
    _TAGS[f"arn:aws:budgets::{account}:budget/{name}"] = _pairs(self._get_param("ResourceTags"))
    return original(self)


# By invocation ID: status, headers and body of each request that has succeeded, and a lock for the time of its work.
_ANSWERS: dict[str, tuple[str, list[tuple[str, str]], bytes]] = {}
_IN_WORK: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)


@instead_of(DomainDispatcherApplication, "__call__")
def _call(original: Any, self: Any, environ: dict[str, Any], start_response: Callable[..., Any]) -> list[bytes]:
    """Answer a request; one that is sent again, since its answer was lost, gets the first answer if it succeeded.

    Moto would create a second resource, or not find the one that it has deleted.
    """
    invocation = environ.get("HTTP_AMZ_SDK_INVOCATION_ID") or str(uuid.uuid4())
    with _IN_WORK[invocation]:
        if invocation not in _ANSWERS:
            head: list[Any] = []
            body = b"".join(_answer(original, self, environ, lambda *given: head.extend(given)))
            answer = head[0], head[1], body
            if head[0].startswith("2"):
                _ANSWERS[invocation] = answer
        else:
            answer = _ANSWERS[invocation]
    start_response(*answer[:2])
    return [answer[2]]


def _answer(original: Any, self: Any, environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
    """Answer the price list, which moto does not have."""
    if environ.get("HTTP_X_AMZ_TARGET") != "AWSPriceListService.GetProducts":
        return original(self, environ, start_response)
    asked = json.loads(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"])))
    wanted = {each["Field"]: each["Value"] for each in asked["Filters"]}
    name = wanted.get("instanceType") or wanted["productFamily"]
    price, unit = PRICES.get(name), UNITS.get(name, "Hrs")
    offer = {"priceDimensions": {"d": {"unit": unit, "pricePerUnit": {"USD": f"{price}"}}}}
    product = {"product": {"attributes": wanted}, "terms": {"OnDemand": {"o": offer}}}
    body = json.dumps({"FormatVersion": "aws_v1", "PriceList": [json.dumps(product)] if price else []}).encode()
    start_response("200 OK", [("Content-Type", "application/x-amz-json-1.1"), ("Content-Length", str(len(body)))])
    return [body]
