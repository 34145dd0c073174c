"""The deployer's policies: the IAM actions of `pulumi preview`, `up`, `refresh` and `destroy`, and no others."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from botocore.session import get_session

from infra.tags import PROJECT_TAG
from tests.iam import as_list
from tests.infra.fake_aws import ACCOUNT, CLUSTER, Cloud
from tests.infra.stacks import STACKS, deploy, deployed, takes_tags

ROOT = Path(__file__).parents[1]
# A managed policy takes few characters, without spaces, so that there are several.
# https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_iam-quotas.html
MOST_CHARACTERS = 6144
PLACEHOLDERS = {
    "ACCOUNT": ACCOUNT,
    "PROJECT": 34 * "p",
    "KEY_ID": 36 * "0",
    "SECRET_NAME": 64 * "s",
}
FILES = ("deployer", "deployer-instances", "deployer-image", "deployer-sleep", "deployer-file-systems")
POLICIES = [json.loads((ROOT / "docs" / "policies" / f"{name}.json").read_text()) for name in FILES]
# Actions that tag and untag: the AWS provider puts its default tags on all taggable resources.
TAGGING = {
    "AddTagsToResource": "RemoveTagsFromResource",
    "CreateOrUpdateTags": "DeleteTags",
    "CreateProject": "UpdateProject",
    "CreateTags": "DeleteTags",
    "TagInstanceProfile": "UntagInstanceProfile",
    "TagResource": "UntagResource",
    "TagRole": "UntagRole",
}
TAGGED = "ListTagsForResource TagResource UntagResource"
EC2_TAGGED = "CreateTags DeleteTags"
# The AWS provider's calls to create, read, update and delete each type, by service, as recorded on an emulated AWS, and
# additional actions that AWS's services require of the caller.
# https://docs.aws.amazon.com/service-authorization/latest/reference/
ACTIONS: dict[str, dict[str, str]] = {
    "aws:appautoscaling/policy:Policy": {
        "application-autoscaling": "DeleteScalingPolicy DescribeScalingPolicies PutScalingPolicy",
    },
    "aws:appautoscaling/target:Target": {
        "application-autoscaling": (
            f"DeregisterScalableTarget DescribeScalableTargets RegisterScalableTarget {TAGGED}"
        ),
    },
    "aws:autoscaling/group:Group": {
        "autoscaling": (
            "CancelInstanceRefresh CreateAutoScalingGroup CreateOrUpdateTags DeleteAutoScalingGroup DeleteTags "
            "DescribeAutoScalingGroups DescribeInstanceRefreshes DescribeScalingActivities "
            "DisableMetricsCollection EnableMetricsCollection StartInstanceRefresh UpdateAutoScalingGroup"
        ),
        # A group that launches from a template needs the caller's right to do so.
        "ec2": "CreateTags RunInstances",
        "iam": "CreateServiceLinkedRole PassRole",
        # Everyone who uses a template that names a parameter in place of a machine image.
        # https://docs.aws.amazon.com/autoscaling/ec2/userguide/using-systems-manager-parameters.html
        "ssm": "GetParameters",
    },
    "aws:autoscaling/policy:Policy": {"autoscaling": "DeletePolicy DescribePolicies PutScalingPolicy"},
    "aws:budgets/budget:Budget": {"budgets": f"ModifyBudget ViewBudget {TAGGED}"},
    "aws:cloudwatch/dashboard:Dashboard": {"cloudwatch": "DeleteDashboards GetDashboard PutDashboard"},
    "aws:cloudwatch/logGroup:LogGroup": {
        "logs": (
            "AssociateKmsKey CreateLogGroup DeleteLogGroup DescribeLogGroups DisassociateKmsKey "
            f"PutRetentionPolicy {TAGGED}"
        ),
    },
    "aws:cloudwatch/metricAlarm:MetricAlarm": {
        "cloudwatch": f"DeleteAlarms DescribeAlarms PutMetricAlarm {TAGGED}",
    },
    "aws:codebuild/project:Project": {
        "codebuild": "BatchGetProjects CreateProject DeleteProject UpdateProject",
        "iam": "PassRole",
    },
    "aws:ec2/defaultSecurityGroup:DefaultSecurityGroup": {
        "ec2": f"DescribeSecurityGroups RevokeSecurityGroupEgress RevokeSecurityGroupIngress {EC2_TAGGED}",
    },
    "aws:ec2/launchTemplate:LaunchTemplate": {
        "ec2": (
            "CreateLaunchTemplate CreateLaunchTemplateVersion DeleteLaunchTemplate DescribeLaunchTemplateVersions "
            f"DescribeLaunchTemplates ModifyLaunchTemplate {EC2_TAGGED}"
        ),
        "ssm": "GetParameters",
    },
    "aws:ec2/networkInterface:NetworkInterface": {
        # Destroy detaches it from an instance that EC2 has not ended yet.
        "ec2": (
            "CreateNetworkInterface DeleteNetworkInterface DescribeNetworkInterfaces DetachNetworkInterface "
            f"ModifyNetworkInterfaceAttribute {EC2_TAGGED}"
        ),
    },
    "aws:ec2/placementGroup:PlacementGroup": {
        "ec2": f"CreatePlacementGroup DeletePlacementGroup DescribePlacementGroups {EC2_TAGGED}",
    },
    "aws:ec2/securityGroup:SecurityGroup": {
        "ec2": (
            "CreateSecurityGroup DeleteSecurityGroup DescribeNetworkInterfaces DescribeSecurityGroups "
            f"RevokeSecurityGroupEgress RevokeSecurityGroupIngress {EC2_TAGGED}"
        ),
    },
    "aws:ec2/vpcEndpoint:VpcEndpoint": {
        "ec2": (
            "CreateVpcEndpoint DeleteVpcEndpoints DescribeNetworkInterfaces DescribePrefixLists "
            f"DescribeSecurityGroups DescribeVpcEndpoints ModifyVpcEndpoint {EC2_TAGGED}"
        ),
        "route53": "AssociateVPCWithHostedZone",
    },
    "aws:ecr/lifecyclePolicy:LifecyclePolicy": {
        "ecr": "DeleteLifecyclePolicy GetLifecyclePolicy PutLifecyclePolicy",
    },
    "aws:ecr/repository:Repository": {
        "ecr": (
            "CreateRepository DeleteRepository DescribeRepositories PutImageScanningConfiguration "
            f"PutImageTagMutability {TAGGED}"
        ),
        "kms": "CreateGrant DescribeKey RetireGrant",
    },
    "aws:ecs/capacityProvider:CapacityProvider": {
        "autoscaling": "CreateOrUpdateTags",
        "ecs": (
            f"CreateCapacityProvider DeleteCapacityProvider DescribeCapacityProviders UpdateCapacityProvider {TAGGED}"
        ),
    },
    "aws:ecs/cluster:Cluster": {
        "ecs": f"CreateCluster DeleteCluster DescribeClusters UpdateCluster {TAGGED}",
        "iam": "CreateServiceLinkedRole",
    },
    "aws:ecs/clusterCapacityProviders:ClusterCapacityProviders": {
        # Before a provider leaves the cluster, its services are deleted (infra/config/services.py).
        "ecs": (
            "DeleteService DescribeClusters DescribeServices GetTaskProtection ListServices ListTasks "
            "PutClusterCapacityProviders"
        ),
    },
    "aws:ecs/service:Service": {
        # Before an update that switches sleep off, the head is started (infra/config/services.py).
        "application-autoscaling": "DescribeScalableTargets RegisterScalableTarget",
        "ecs": f"CreateService DeleteService DescribeServices UpdateService {TAGGED}",
        "iam": "PassRole",
    },
    "aws:ecs/taskDefinition:TaskDefinition": {
        "ecs": f"DeregisterTaskDefinition DescribeTaskDefinition RegisterTaskDefinition {TAGGED}",
        "iam": "PassRole",
    },
    # The caller also creates and fills the role by which FSx reaches the bucket.
    # https://docs.aws.amazon.com/fsx/latest/LustreGuide/setting-up.html#fsx-adding-permissions-s3
    "aws:fsx/dataRepositoryAssociation:DataRepositoryAssociation": {
        "fsx": (
            "CreateDataRepositoryAssociation DeleteDataRepositoryAssociation DescribeDataRepositoryAssociations "
            f"UpdateDataRepositoryAssociation {TAGGED}"
        ),
        "iam": "AttachRolePolicy CreateServiceLinkedRole PutRolePolicy",
    },
    "aws:fsx/lustreFileSystem:LustreFileSystem": {
        "ec2": "GetSecurityGroupsForVpc",
        "fsx": f"CreateFileSystem DeleteFileSystem DescribeFileSystems UpdateFileSystem {TAGGED}",
        "iam": "CreateServiceLinkedRole",
    },
    "aws:iam/instanceProfile:InstanceProfile": {
        "iam": (
            "AddRoleToInstanceProfile CreateInstanceProfile DeleteInstanceProfile GetInstanceProfile PassRole "
            "RemoveRoleFromInstanceProfile TagInstanceProfile UntagInstanceProfile"
        ),
    },
    "aws:iam/role:Role": {
        "iam": (
            "CreateRole DeleteRole DeleteRolePermissionsBoundary DeleteRolePolicy DetachRolePolicy GetRole "
            "ListAttachedRolePolicies ListInstanceProfilesForRole ListRolePolicies PutRolePermissionsBoundary "
            "RemoveRoleFromInstanceProfile TagRole UntagRole UpdateAssumeRolePolicy"
        ),
    },
    "aws:iam/rolePolicy:RolePolicy": {"iam": "DeleteRolePolicy GetRolePolicy PutRolePolicy"},
    "aws:iam/rolePolicyAttachment:RolePolicyAttachment": {
        "iam": "AttachRolePolicy DetachRolePolicy ListAttachedRolePolicies",
    },
    "aws:kms/grant:Grant": {"kms": "CreateGrant ListGrants RevokeGrant"},
    "aws:s3/bucket:Bucket": {
        "s3": (
            "CreateBucket DeleteBucket DeleteObject DeleteObjectVersion GetAccelerateConfiguration GetBucketAcl "
            "GetBucketCORS GetBucketLogging GetBucketObjectLockConfiguration GetBucketPolicy "
            "GetBucketRequestPayment GetBucketTagging GetBucketVersioning GetBucketWebsite "
            "GetEncryptionConfiguration GetLifecycleConfiguration GetReplicationConfiguration ListBucket "
            f"ListBucketVersions PutBucketTagging {TAGGED}"
        ),
    },
    "aws:s3/bucketLifecycleConfiguration:BucketLifecycleConfiguration": {
        "s3": "GetLifecycleConfiguration PutLifecycleConfiguration",
    },
    "aws:s3/bucketOwnershipControls:BucketOwnershipControls": {
        "s3": "GetBucketOwnershipControls PutBucketOwnershipControls",
    },
    "aws:s3/bucketPolicy:BucketPolicy": {"s3": "DeleteBucketPolicy GetBucketPolicy PutBucketPolicy"},
    "aws:s3/bucketPublicAccessBlock:BucketPublicAccessBlock": {
        "s3": "GetBucketPublicAccessBlock PutBucketPublicAccessBlock",
    },
    "aws:s3/bucketServerSideEncryptionConfiguration:BucketServerSideEncryptionConfiguration": {
        "s3": "GetEncryptionConfiguration PutEncryptionConfiguration",
    },
    "aws:s3/bucketVersioning:BucketVersioning": {"s3": "GetBucketVersioning PutBucketVersioning"},
    "aws:servicediscovery/privateDnsNamespace:PrivateDnsNamespace": {
        "ec2": "DescribeRegions DescribeVpcs",
        "route53": "AssociateVPCWithHostedZone CreateHostedZone DeleteHostedZone GetHostedZone ListHostedZonesByName",
        "servicediscovery": (
            f"CreatePrivateDnsNamespace DeleteNamespace GetNamespace GetOperation UpdatePrivateDnsNamespace {TAGGED}"
        ),
    },
    "aws:servicediscovery/service:Service": {
        "route53": "ChangeResourceRecordSets GetHostedZone",
        "servicediscovery": (
            "CreateService DeleteService DeregisterInstance GetOperation GetService ListInstances UpdateService "
            f"{TAGGED}"
        ),
    },
    "aws:sns/topic:Topic": {"sns": f"CreateTopic DeleteTopic GetTopicAttributes SetTopicAttributes {TAGGED}"},
    "aws:sns/topicSubscription:TopicSubscription": {
        "sns": "GetSubscriptionAttributes SetSubscriptionAttributes Subscribe Unsubscribe",
    },
    "aws:ssm/document:Document": {
        "ssm": (
            "AddTagsToResource CreateDocument DeleteDocument DescribeDocument DescribeDocumentPermission "
            "GetDocument ListTagsForResource RemoveTagsFromResource UpdateDocument UpdateDocumentDefaultVersion"
        ),
    },
    "aws:ssm/parameter:Parameter": {
        "kms": "Decrypt Encrypt",
        "ssm": (
            "AddTagsToResource DeleteParameter DescribeParameters GetParameter ListTagsForResource PutParameter "
            "RemoveTagsFromResource"
        ),
    },
    "aws:vpc/securityGroupEgressRule:SecurityGroupEgressRule": {
        "ec2": (
            "AuthorizeSecurityGroupEgress DescribeSecurityGroupRules ModifySecurityGroupRules "
            f"RevokeSecurityGroupEgress {EC2_TAGGED}"
        ),
    },
    "aws:vpc/securityGroupIngressRule:SecurityGroupIngressRule": {
        "ec2": (
            "AuthorizeSecurityGroupIngress DescribeSecurityGroupRules ModifySecurityGroupRules "
            f"RevokeSecurityGroupIngress {EC2_TAGGED}"
        ),
    },
    "aws:ec2/eip:Eip": {
        "ec2": (
            "AllocateAddress DescribeAddresses DescribeAddressesAttribute DisassociateAddress ReleaseAddress "
            f"{EC2_TAGGED}"
        ),
    },
    "aws:ec2/internetGateway:InternetGateway": {
        "ec2": (
            "AttachInternetGateway CreateInternetGateway DeleteInternetGateway DescribeInternetGateways "
            f"DetachInternetGateway {EC2_TAGGED}"
        ),
    },
    "aws:ec2/natGateway:NatGateway": {
        "ec2": f"CreateNatGateway DeleteNatGateway DescribeNatGateways {EC2_TAGGED}",
    },
    "aws:ec2/route:Route": {"ec2": "CreateRoute DeleteRoute DescribeRouteTables ReplaceRoute"},
    "aws:ec2/routeTable:RouteTable": {
        "ec2": f"CreateRouteTable DeleteRouteTable DescribeRouteTables {EC2_TAGGED}",
    },
    "aws:ec2/routeTableAssociation:RouteTableAssociation": {
        "ec2": "AssociateRouteTable DescribeRouteTables DisassociateRouteTable",
    },
    "aws:ec2/subnet:Subnet": {
        "ec2": (
            f"CreateSubnet DeleteSubnet DescribeNetworkInterfaces DescribeSubnets ModifySubnetAttribute {EC2_TAGGED}"
        ),
    },
    "aws:ec2/vpc:Vpc": {
        "ec2": (
            "CreateVpc DeleteVpc DescribeNetworkAcls DescribeRouteTables DescribeSecurityGroups DescribeVpcAttribute "
            f"DescribeVpcs ModifyVpcAttribute {EC2_TAGGED}"
        ),
    },
    "awsx:ecr:Image": {
        "ecr": (
            "BatchCheckLayerAvailability BatchDeleteImage BatchGetImage CompleteLayerUpload GetAuthorizationToken "
            "GetDownloadUrlForLayer InitiateLayerUpload PutImage UploadLayerPart"
        ),
    },
    "random:index/randomId:RandomId": {},
    "random:index/randomPassword:RandomPassword": {},
}
# Calls of a preview.
QUESTIONS: dict[str, dict[str, str]] = {
    "aws:ec2/getAmi:getAmi": {"ec2": "DescribeImages"},
    "aws:ec2/getEips:getEips": {"ec2": "DescribeAddresses"},
    "aws:ec2/getInstanceType:getInstanceType": {"ec2": "DescribeInstanceTypes"},
    "aws:ec2/getInstanceTypeOfferings:getInstanceTypeOfferings": {"ec2": "DescribeInstanceTypeOfferings"},
    "aws:ec2/getInstances:getInstances": {"ec2": "DescribeInstances"},
    "aws:ec2/getRouteTable:getRouteTable": {"ec2": "DescribeRouteTables"},
    "aws:ec2/getSecurityGroups:getSecurityGroups": {"ec2": "DescribeSecurityGroups"},
    "aws:ec2/getSubnet:getSubnet": {"ec2": "DescribeSubnets"},
    "aws:ec2/getVpc:getVpc": {"ec2": "DescribeRouteTables DescribeVpcAttribute DescribeVpcs"},
    "aws:ec2/getVpcDhcpOptions:getVpcDhcpOptions": {"ec2": "DescribeDhcpOptions"},
    "aws:ec2/getVpcEndpointService:getVpcEndpointService": {"ec2": "DescribeVpcEndpointServices"},
    "aws:ec2/getVpcs:getVpcs": {"ec2": "DescribeVpcs"},
    "aws:ecr/getImage:getImage": {"ecr": "DescribeImages DescribeRepositories"},
    "aws:iam/getPolicy:getPolicy": {"iam": "GetPolicy GetPolicyVersion"},
    "aws:iam/getRole:getRole": {"iam": "GetRole"},
    "aws:index/getAvailabilityZones:getAvailabilityZones": {"ec2": "DescribeAvailabilityZones"},
    "aws:index/getCallerIdentity:getCallerIdentity": {},  # requires no permission
    "aws:index/getDefaultTags:getDefaultTags": {},
    "aws:index/getPartition:getPartition": {},
    "aws:index/getRegion:getRegion": {},
    "aws:kms/getKey:getKey": {"kms": "DescribeKey"},
    "aws:s3/getBucket:getBucket": {"s3": "ListBucket"},
    "aws:s3/getObjects:getObjects": {"s3": "ListBucket"},
    "aws:secretsmanager/getSecret:getSecret": {"secretsmanager": "DescribeSecret GetResourcePolicy"},
    "aws:servicequotas/getServiceQuota:getServiceQuota": {
        "servicequotas": "GetAWSDefaultServiceQuota GetServiceQuota",
    },
    "aws:ssm/getParameter:getParameter": {"ssm": "GetParameter"},
    # infra/config/buckets.py, prices.py, file_systems.py, reservations.py and code_build.py, and infra/image_build.py,
    # with boto3
    "buckets": {
        "s3": (
            "GetBucketObjectLockConfiguration GetBucketVersioning GetEncryptionConfiguration GetLifecycleConfiguration "
            "ListBucket"
        ),
    },
    "builds": {
        "codebuild": "BatchGetBuilds BatchGetProjects ListBuildsForProject StartBuild",
        "ecr": "DescribeImages",
        "kms": "GenerateDataKey",
        "logs": "GetLogEvents",
        "s3": "DeleteObject PutObject",
    },
    "file systems": {
        "ec2": "DescribeNetworkInterfaces",
        "elasticfilesystem": "DescribeFileSystems DescribeMountTargets",
        "fsx": "DescribeFileSystems",
    },
    "prices": {"ec2": "DescribeSpotPriceHistory", "pricing": "GetProducts"},
    "reservations": {"ec2": "DescribeCapacityReservations"},
}


def actions(table: dict[str, dict[str, str]]) -> set[str]:
    """The actions of a table, with their services."""
    return {f"{service}:{name}" for each in table.values() for service, names in each.items() for name in names.split()}


STATEMENTS = [statement for policy in POLICIES for statement in policy["Statement"]]


def allowed() -> Iterator[tuple[str, dict[str, Any]]]:
    """Each action of the policies, with its statement."""
    for statement in STATEMENTS:
        for action in as_list(statement["Action"]):
            yield action, statement


@pytest.fixture(scope="module")
def clouds() -> list[Cloud]:
    """The accounts of all stacks of these tests."""
    return [deployed(name) for name in STACKS]


def test_table_covers_all_resources_and_calls(clouds: list[Cloud]) -> None:
    types = {resource.type for cloud in clouds for resource in cloud.resources.values()}
    assert {name for name in types if not name.startswith("ray-on-ecs:")} == ACTIONS.keys()
    previews = [deploy(preview=True), deploy(preview=True, is_up=True)]
    asked = {token for cloud in [*clouds, *previews] for token, _ in cloud.calls}
    assert asked | {"buckets", "builds", "file systems", "prices", "reservations"} == QUESTIONS.keys()


@pytest.mark.parametrize("kind", [each for each in ACTIONS if each.startswith("aws:") and takes_tags(each)])
def test_taggable_resources_may_be_tagged(kind: str) -> None:
    names = {name for each in ACTIONS[kind].values() for name in each.split()}
    assert any({tag, untag} <= names for tag, untag in TAGGING.items()), "`aws:defaultTags` would fail"


def test_deployer_policies_allow_exactly_the_required_actions() -> None:
    assert {action for action, _ in allowed()} == actions(ACTIONS) | actions(QUESTIONS)


@pytest.mark.parametrize("policy", POLICIES, ids=FILES)
def test_each_policy_fits_a_managed_policy_in_each_region(policy: dict[str, Any]) -> None:
    session = get_session()
    for partition in ("aws", "aws-cn", "aws-us-gov", "aws-eusc"):
        regions = session.get_available_regions("ecs", partition_name=partition)
        assert regions
        for region in regions:
            text = json.dumps(policy, separators=(",", ":")).replace("arn:aws:", f"arn:{partition}:")
            for word, value in (PLACEHOLDERS | {"REGION": region}).items():
                text = text.replace(word, value)
            assert len(text) <= MOST_CHARACTERS, region


def test_keys_and_secrets_are_named() -> None:
    """A deployer with access to each key or secret would reach other teams' data."""
    for action, statement in allowed():
        if action.startswith(("kms:", "secretsmanager:")):
            assert re.search("KEY_ID$|SECRET_NAME-\\*$", statement["Resource"]), f"{action} reaches everything"


# Services whose resources in the stack all have names, and actions that change a resource without its name.
NAMED = {"autoscaling", "budgets", "cloudwatch", "codebuild", "ecr", "ecs", "iam", "logs", "s3", "sns", "ssm"}
UNNAMED = {
    "ecs:CreateCapacityProvider": "lists of IAM's actions differ on its resource, and one without a group runs nothing",
    "ecs:DeregisterTaskDefinition": "IAM knows no resource of it, and running tasks go on",
    "sns:SetSubscriptionAttributes": "IAM knows no resource of it",
    "sns:Unsubscribe": "IAM knows no resource of it",
    "iam:CreateServiceLinkedRole": "a condition names the services",
}


def test_named_resources_have_the_prefix_of_the_cluster() -> None:
    for action, statement in allowed():
        service, verb = action.split(":")
        if service in NAMED and not verb.startswith(("Describe", "Get", "List")) and action not in UNNAMED:
            for resource in as_list(statement["Resource"]):
                is_of_aws = ":role/aws-service-role/" in resource
                assert is_of_aws or f"{CLUSTER}-*" in resource, f"{action} reaches {resource}"


def test_names_of_the_program_match_the_policies(clouds: list[Cloud]) -> None:
    """The others are derived from logical names, which begin in the same way."""
    given = [
        (made.type, made.inputs[key])
        for cloud in clouds
        for made in cloud.resources.values()
        for key in ("name", "family", "dashboardName")
        if key in made.inputs and not made.type.startswith("aws:servicediscovery/")
    ]
    assert given
    for kind, name in given:
        beginning = "/aws/ecs/containerinsights/" if name.startswith("/") else ""
        assert name.startswith(f"{beginning}{CLUSTER}-"), f"a deployer may not make this {kind}"


def test_policies_are_limited_to_one_account_and_region() -> None:
    for statement in STATEMENTS:
        for resource in as_list(statement["Resource"]):
            if resource != "*":
                arn, partition, _, region, account, _ = resource.split(":", 5)
                assert (arn, partition) == ("arn", "aws")
                assert region in ("REGION", "")
                assert account in ("ACCOUNT", "")


def test_actions_that_grant_rights_have_conditions() -> None:
    conditions: dict[str, Any] = {action: statement.get("Condition") for action, statement in allowed()}
    passed_to = [f"{service}.amazonaws.com" for service in ("codebuild", "ec2", "ecs-tasks")]
    assert conditions["iam:PassRole"] == {"StringEquals": {"iam:PassedToService": passed_to}}
    assert conditions["iam:CreateServiceLinkedRole"]["StringEquals"].keys() == {"iam:AWSServiceName"}
    assert conditions["ec2:RunInstances"]["ArnLike"].keys() == {"ec2:LaunchTemplate"}


INTERFACE_CHANGES = ("DeleteNetworkInterface", "DetachNetworkInterface", "ModifyNetworkInterfaceAttribute")


def test_changed_network_interfaces_are_the_projects() -> None:
    """Each instance and load balancer in the account has one."""
    tagged = {"StringEquals": {f"aws:ResourceTag/{PROJECT_TAG}": "PROJECT"}}
    conditions: dict[str, Any] = {action: statement.get("Condition") for action, statement in allowed()}
    assert all(conditions[f"ec2:{verb}"] == tagged for verb in INTERFACE_CHANGES)


def test_changed_file_systems_are_the_projects() -> None:
    """An update sends the tags that change, and a creation all."""
    of_request, of_resource = (f"aws:{kind}Tag/{PROJECT_TAG}" for kind in ("Request", "Resource"))
    found: dict[str, set[str]] = {}
    for name, statement in allowed():
        if name.startswith("fsx:") and not name.startswith(("fsx:Describe", "fsx:List")):
            [(key, value)] = statement["Condition"]["StringEquals"].items()
            assert value == "PROJECT"
            found.setdefault(name, set()).add(key)
    assert found.pop("fsx:TagResource") == {of_request, of_resource}
    for name, keys in found.items():
        assert keys == {of_request if name.startswith("fsx:Create") else of_resource}, name
