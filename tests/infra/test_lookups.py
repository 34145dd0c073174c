"""Look-ups of existing resources: tests from the table of questions and rules."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache
from typing import Any

import pulumi
import pytest

from infra.config import RayClusterArgs, lookups
from infra.config.location import Caller
from infra.config.lookup_rules import Rule
from infra.config.lookups import IGNORE, REFUSE, WARN, Question
from infra.definitions.sizing import TaskSize
from infra.definitions.user_data import machine_image
from infra.errors import SettingError, is_absent
from infra.types import ExistingNetwork, NodeSpec
from tests.infra.fake_aws import ACCOUNT, DIGEST, PUBLIC_AMI, REGION, Cloud, instance_type

CALLER = Caller(account=ACCOUNT, region=REGION, partition="aws")
AMI, GPU_AMI = "ami-0123456789abcdef0", "ami-0123456789abcdef1"
POLICY = f"arn:aws:iam::{ACCOUNT}:policy/boundary"
KEY = f"arn:aws:kms:{REGION}:{ACCOUNT}:key/1"
SECRET = f"arn:aws:secretsmanager:{REGION}:{ACCOUNT}:secret:registry-abcdef"
ECR = f"{ACCOUNT}.dkr.ecr.{REGION}.amazonaws.com/team/ray"
OTHER_KEY = f"arn:aws:kms:{REGION}:{ACCOUNT}:key/2"
ALL: dict[str, Any] = {
    "permissions_boundary": POLICY,
    "task_policy_arns": (POLICY,),
    "instance_policy_arns": (POLICY,),
    "job_secrets": (SECRET,),
    "kms_key_arn": KEY,
    "spot": True,
    "bucket_name": "company-runs",
    "data_buckets": ("my-data/images",),
    "vpc_id": "vpc-0a1b",
    "subnet_ids": ("subnet-0c2d",),
}
REGISTRY = {"image_uri": f"registry.example/ray@{DIGEST}", "registry_secret_arn": SECRET}


def look_up(**settings: Any) -> tuple[Any, ExistingNetwork | None]:
    """All look-ups of settings that are otherwise the defaults: the image's URI, and the network."""
    chosen = RayClusterArgs(**settings)
    uri = lookups.check(chosen, CALLER)
    nodes = [node(chosen.head_ami_id, gpus=0), node(chosen.worker_ami_id, gpus=1)]
    lookups.check_machine_images(chosen, nodes)
    list(
        lookups.ask_all(
            lookups.instance_types("worker_instance_types", ["g5.xlarge"], REGION, ["on-demand", "spot"], grouped=True)
        )
    )
    return uri, lookups.existing_network(chosen, CALLER) if chosen.vpc_id else None


def node(ami_id: str, *, gpus: int) -> NodeSpec:
    """A node of a type that boots by BIOS, without a TPM."""
    kind = replace(instance_type("g5.xlarge", gpus=gpus), boot_modes=("legacy-bios",))
    task = TaskSize(vcpus=4, memory_mib=14336, gpus=gpus)
    image_id = ami_id or machine_image(gpu=bool(gpus))
    return NodeSpec(key="", instances=(kind,), task=task, max_count=1, zones=("us-west-2b",), ami_id=image_id)


@dataclass(frozen=True)
class Row:
    """A question, the provider's function that it calls ("S3" for boto3), and the answer's fields."""

    question: Question
    function: str
    fields: frozenset[str]

    def __str__(self) -> str:
        return f"{self.question.field}-{self.function}"


@cache
def rows() -> list[Row]:
    """The table: each question of all settings, once per setting, function and hint."""
    table: dict[str, Row] = {}
    cloud = Cloud(amis={AMI: {}, GPU_AMI: {}})
    original: Callable[..., Any] = lookups.judged

    def judged(question: Question, answer: Any) -> Any:
        before, answer = len(cloud.calls), original(question, answer)
        question.call(opts=None)
        asked = [token.rpartition(":")[2] for token, _ in cloud.calls[before:]]
        result = f"Get{asked[0][3:]}Result" if asked else ""
        kind = next((each for each in type(answer).__mro__ if each.__name__ == result), object)
        fields = [name for name, _ in inspect.getmembers(kind, lambda each: isinstance(each, property))]
        row = Row(question, asked[0] if asked else "S3", frozenset(fields))
        if question.action:
            table.setdefault(f"{row} {question.hint}", row)
        return answer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lookups, "judged", judged)
        cloud.run(lambda: look_up(**ALL, image_uri=f"{ECR}:v1", head_ami_id=AMI, worker_ami_id=GPU_AMI))
        cloud.run(lambda: look_up(**REGISTRY))
        cloud.run(lambda: look_up(spot=True))
    return list(table.values())


ROWS = rows()
RULES = [(row, rule) for row in ROWS for rule in row.question.rules]


def disks(root: dict[str, str], data: dict[str, str] | None = None) -> dict[str, Any]:
    """Disks of an AMI."""
    mappings = [{"deviceName": "/dev/xvda", "ebs": {"volume_size": "30", **root}}]
    if data:
        mappings.append({"deviceName": "/dev/xvdb", "ebs": data})
    return {"block_device_mappings": mappings}


def lifecycle(*rules: dict[str, Any]) -> dict[str, Any]:
    """Enabled lifecycle rules of a bucket."""
    return {"get_bucket_lifecycle_configuration": {"Rules": [{"Status": "Enabled", **rule} for rule in rules]}}


# Unfit answers by function and the rule's fields.
UNFIT: dict[tuple[str, str], list[dict[str, Any]]] = {
    ("getPolicy", "path"): [{"path": "/aws-service-role/"}],
    ("getSecret", "kms_key_id"): [{"kms_key_id": OTHER_KEY}],
    ("getKey", "key_spec"): [{"key_spec": "RSA_2048"}, {"key_spec": "HMAC_256"}],
    ("getKey", "key_usage"): [{"key_usage": "SIGN_VERIFY"}, {"key_usage": "KEY_AGREEMENT"}],
    ("getKey", "key_state enabled"): [
        {"key_state": state, "enabled": False}
        for state in ("Disabled", "PendingDeletion", "PendingImport", "PendingReplicaDeletion", "Unavailable")
    ],
    ("getKey", "key_manager"): [{"key_manager": "AWS"}],
    ("getKey", "valid_to"): [{"valid_to": "2027-01-01T00:00:00Z"}],
    ("getBucket", "bucket_region"): [{"bucket_region": "eu-west-1"}],
    ("S3", "is_own"): [{"head_bucket_by_owner": "403"}],
    ("S3", "versions_expire"): [
        {"get_bucket_versioning": {"Status": "Enabled"}},
        {
            "get_bucket_versioning": {"Status": "Enabled"},
            "get_bucket_lifecycle_configuration": {
                "Rules": [
                    {"Status": "Enabled", "Expiration": {"Days": 9}},
                    {"Status": "Disabled", "NoncurrentVersionExpiration": {"NoncurrentDays": 1}},
                ]
            },
        },
    ],
    ("S3", "retention"): [
        {"get_object_lock_configuration": {"ObjectLockConfiguration": {"Rule": {"DefaultRetention": retention}}}}
        for retention in ({"Mode": "COMPLIANCE", "Days": 30}, {"Mode": "GOVERNANCE", "Years": 1})
    ],
    ("S3", "kms_key"): [
        {
            "get_bucket_encryption": {
                "ServerSideEncryptionConfiguration": {
                    "Rules": [{"ApplyServerSideEncryptionByDefault": {"KMSMasterKeyID": OTHER_KEY}}]
                }
            }
        }
    ],
    ("S3", "expiration"): [
        lifecycle({"Expiration": {"Days": 7}}),
        lifecycle({"Expiration": {"Days": 7}, "Prefix": ""}),
        lifecycle({"Expiration": {"Days": 7}, "Prefix": "runs"}),
        lifecycle({"Expiration": {"Days": 7}, "Filter": {}}),
        lifecycle({"Expiration": {"Days": 7}, "Filter": {"Prefix": "runs/faces-"}}),
        lifecycle({"Expiration": {"Days": 7}, "Filter": {"ObjectSizeGreaterThan": 2**20}}),
        lifecycle({"Expiration": {"Days": 7}, "Filter": {"And": {"Prefix": "runs/", "ObjectSizeLessThan": 9}}}),
        lifecycle({"Expiration": {"Date": datetime(2027, 1, 1, tzinfo=UTC)}}),
    ],
    ("S3", "archive"): [
        lifecycle({"Transitions": [{"Days": 30, "StorageClass": name}]}) for name in ("GLACIER", "DEEP_ARCHIVE")
    ],
    ("S3", "payer"): [{"get_bucket_request_payment": {"Payer": "Requester"}}],
    ("getImage", "image_size_in_bytes"): [{"image_size_in_bytes": 40 * 2**30}],
    ("getAmi", "state"): [{"state": "pending"}, {"state": "deregistered"}],
    ("getAmi", "architecture"): [{"architecture": "arm64"}, {"architecture": "i386"}],
    ("getAmi", "platform"): [{"platform": "windows"}],
    ("getAmi", "virtualization_type"): [{"virtualization_type": "paravirtual"}],
    ("getAmi", "ena_support"): [{"ena_support": False}],
    ("getAmi", "root_device_type"): [{"root_device_type": "instance-store"}],
    ("getAmi", "root_device_name"): [{"root_device_name": "/dev/sda1"}],
    ("getAmi", "boot_mode"): [{"boot_mode": "uefi"}],
    ("getAmi", "tpm_support"): [{"tpm_support": "v2.0"}],
    ("getAmi", "name image_owner_alias"): [
        {"name": "al2023-ami-2023.9.20260901.0-kernel-6.1-x86_64"},
        {"name": "Deep Learning Base OSS Nvidia Driver GPU AMI (Amazon Linux 2023) 20260901"},
        {"name": "bottlerocket-aws-ecs-2-nvidia-gpu-x86_64-v1.45.0-abcdef01"},
        {"name": "amazon-eks-node-al2023-x86_64-nvidia-1.33-v20260901"},
    ],
    ("getAmi", "block_device_mappings root_device_name"): [disks({"volume_size": "200"})],
    ("getAmi", "image_owner_alias"): [{"image_owner_alias": ""}, {"image_owner_alias": "aws-marketplace"}],
    ("getAmi", "name image_owner_alias deprecation_time"): [
        {"deprecation_time": "2026-06-30T00:00:00.000Z"},
        {"name": "amzn2-ami-ecs-gpu-hvm-2.0.20251201-x86_64-ebs"},
    ],
    ("getAmi", "platform_details"): [{"platform_details": "Red Hat Enterprise Linux"}],
    ("getAmi", "product_codes"): [{"product_codes": [{"productCodeId": "1", "productCodeType": "marketplace"}]}],
    ("getAmi", "block_device_mappings root_device_name state"): [disks({}, {"delete_on_termination": "false"})],
    ("getAmi", "block_device_mappings"): [disks({"encrypted": "true"}), disks({}, {"encrypted": "true"})],
    ("getVpc", "state"): [{"state": "pending"}],
    ("getVpc", "owner_id"): [{"owner_id": "210987654321"}],
    ("getVpc", "enable_dns_support"): [{"enable_dns_support": False}],
    ("getVpc", "enable_dns_hostnames"): [{"enable_dns_hostnames": False}],
    ("getVpc", "instance_tenancy"): [{"instance_tenancy": "dedicated"}],
    ("getVpc", "cidr_block cidr_block_associations"): [
        {"cidr_block": "172.16.0.0/12"},
        {"cidr_block_associations": [{"cidrBlock": "10.0.0.0/16"}, {"cidrBlock": "172.17.4.0/24"}]},
    ],
    ("getVpcDhcpOptions", "domain_name_servers"): [{"domain_name_servers": ["10.1.0.2", "10.1.0.3"]}],
    ("getSubnet", "vpc_id"): [{"vpc_id": "vpc-2"}],
    ("getSubnet", "state"): [{"state": "pending"}, {"state": "unavailable"}],
    ("getSubnet", "outpost_arn"): [{"outpost_arn": "arn:aws:outposts:us-west-2:1:outpost/op-1"}],
    ("getSubnet", "ipv6_native"): [{"ipv6_native": True}],
    ("getSubnet", "map_public_ip_on_launch"): [{"map_public_ip_on_launch": True}],
    ("getSubnet", "cidr_block availability_zone"): [{"cidr_block": "10.0.0.0/29"}],
    ("getSubnet", "available_ip_address_count"): [{"available_ip_address_count": 1}],
    ("getRouteTable", "routes"): [{"routes": [{"cidrBlock": "10.0.0.0/16", "gatewayId": "local"}]}, {"routes": []}],
    ("getRouteTable", "routes gateway_id"): [{"routes": [{"cidrBlock": "0.0.0.0/0", "gatewayId": "igw-1"}]}],
    ("getInstanceType", "supported_usages_classes"): [
        {"supported_usages_classes": classes} for classes in (["on-demand"], ["spot"], ["capacity-block"])
    ],
    ("getInstanceType", "supported_placement_strategies gpuses"): [{"supported_placement_strategies": ["spread"]}],
}
# Fields of the answers that cannot make them unfit, or that the plan uses.
HARMLESS: dict[str, str] = {
    # A boundary's and a policy's content belongs to the company.
    "getPolicy": "arn attachment_count description id name path_prefix policy policy_id tags",
    # The ARN has account and region; a secret to be deleted is absent for the provider.
    "getSecret": "arn created_date description id last_changed_date name policy region tags type",
    # A replica of a multi-Region key is a key; custom key stores serve EBS, S3 and ECR.
    "getKey": "arn aws_account_id cloud_hsm_cluster_id creation_date custom_key_store_id customer_master_key_spec "
    "deletion_date description expiration_model grant_tokens id key_id multi_region "
    "multi_region_configurations origin pending_deletion_window_in_days region xks_key_configurations",
    # Service-linked roles have only one form.
    "getRole": "arn assume_role_policy create_date description id max_session_duration name path "
    "permissions_boundary role_last_useds tags unique_id",
    "getBucket": "arn bucket bucket_domain_name bucket_regional_domain_name hosted_zone_id id region website_domain "
    "website_endpoint",
    # Neither architecture nor media type is in the answer.
    "getImage": "id image_digest image_pushed_at image_tag image_tags image_uri most_recent region registry_id "
    "repository_name",
    "getParameter": "arn id insecure_value name region type value version with_decryption",
    # EC2 reports the hypervisor xen for every AMI; the template requires IMDSv2 of each; kernel and ramdisk belong to
    # paravirtual images; the price's platform is in platform_details.
    "getAmi": "allow_unsafe_filter arn creation_date description executable_users filters hypervisor id image_id "
    "image_location image_type imds_support include_deprecated kernel_id last_launched_time most_recent "
    "name_regex owner_id owners public ramdisk_id region root_snapshot_id sriov_net_support state_reason "
    "tags uefi_data usage_operation",
    # The default VPC serves with private subnets.
    "getVpc": "arn default dhcp_options_id enable_network_address_usage_metrics filters id ipv6_association_id "
    "ipv6_cidr_block ipv6_cidr_block_associations main_route_table_id region tags",
    "getVpcDhcpOptions": "arn dhcp_options_id domain_name filters id ipv6_address_preferred_lease_time "
    "netbios_name_servers "
    "netbios_node_type ntp_servers owner_id region tags",
    # A shared subnet is in a shared VPC.
    "getSubnet": "arn assign_ipv6_address_on_creation availability_zone_id customer_owned_ipv4_pool "
    "default_for_az enable_dns64 enable_lni_at_device_index enable_resource_name_dns_a_record_on_launch "
    "enable_resource_name_dns_aaaa_record_on_launch filters id ipv6_cidr_block "
    "ipv6_cidr_block_association_id map_customer_owned_ip_on_launch owner_id "
    "private_dns_hostname_type_on_launch region tags",
    "getRouteTable": "arn associations filters id owner_id region route_table_id subnet_id tags vpc_id",
    # CPU, memory, architecture, GPUs and other accelerators are sizing.py's; boot modes and TPM are compared with the
    # AMI's, and EFA is the pool's choice. Every type starts an HVM image from an encrypted EBS volume and has two
    # network interfaces.
    "getInstanceType": "auto_recovery_supported bandwidth_weightings bare_metal boot_modes "
    "burstable_performance_supported "
    "current_generation dedicated_hosts_supported default_cores default_network_card_index "
    "default_threads_per_core default_vcpus ebs_encryption_support ebs_nvme_support ebs_optimized_support "
    "ebs_performance_baseline_bandwidth ebs_performance_baseline_iops ebs_performance_baseline_throughput "
    "ebs_performance_maximum_bandwidth ebs_performance_maximum_iops ebs_performance_maximum_throughput "
    "efa_maximum_interfaces efa_supported ena_srd_supported ena_support encryption_in_transit_supported "
    "fpgas free_tier_eligible hibernation_supported hypervisor id inference_accelerators "
    "instance_disks instance_storage_supported instance_type ipv6_supported "
    "maximum_ipv4_addresses_per_interface maximum_ipv6_addresses_per_interface maximum_network_cards "
    "maximum_network_interfaces media_accelerators memory_size network_cards network_performance "
    "neuron_devices nitro_enclaves_support nitro_tpm_support nitro_tpm_supported_versions phc_support "
    "region supported_architectures supported_cpu_features supported_root_device_types "
    "supported_virtualization_types sustained_clock_speed total_fpga_memory total_gpu_memory "
    "total_inference_memory total_instance_storage total_media_memory total_neuron_device_memory "
    "valid_cores valid_threads_per_cores",
}


def told(consequence: str, cloud: Cloud, warnings: list[str], question: Question, *, problem: str, hint: str) -> None:
    """Ask, and expect one line with this problem and hint as the consequence says."""
    cloud.amis = {AMI: {}, GPU_AMI: {}}
    if consequence == REFUSE:
        with pytest.raises(SettingError) as refused:
            cloud.run(lambda: next(lookups.ask_all([question])))
        lines = [str(refused.value)]
    else:
        cloud.run(lambda: next(lookups.ask_all([question])))
        lines = [line for line in warnings if problem in line]
    assert len(lines) == (0 if consequence == IGNORE else 1)
    for line in lines:
        assert line.startswith(f"{question.field}: {question.value!r} ")
        assert problem in line
        assert line.endswith(f"; {hint}")
        assert "\n" not in line


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_good_answers_need_no_line(cloud: Cloud, warnings: list[str], row: Row) -> None:
    cloud.amis = {AMI: {}, GPU_AMI: {}}
    assert cloud.run(lambda: next(lookups.ask_all([row.question])))
    assert not warnings


@pytest.mark.parametrize("row", [row for row in ROWS if row.function != "S3"], ids=str)
def test_absent_resources(cloud: Cloud, warnings: list[str], row: Row) -> None:
    cloud.absent = (row.function,)
    question = row.question
    told(question.absent, cloud, warnings, question, problem="could not be found (", hint=question.hint)


KMS_DENIES = (
    "AccessDeniedException: User: arn:aws:iam::1:user/a is not authorized to perform: kms:DescribeKey because the "
    "resource does not exist in this Region, no resource-based policies allow access, or one denies it"
)


@pytest.mark.parametrize("text", ["AccessDenied: not authorized", KMS_DENIES, "StatusCode: 403, Forbidden"])
@pytest.mark.parametrize("row", [row for row in ROWS if row.function != "S3"], ids=str)
def test_denied_calls_name_the_permission(cloud: Cloud, warnings: list[str], row: Row, text: str) -> None:
    cloud.silent, cloud.silence = (row.function,), text
    question = row.question
    hint = f"grant the caller {question.action}, or try again"
    told(question.denied, cloud, warnings, question, problem=f"could not be looked up ({question.action}: ", hint=hint)


@pytest.mark.parametrize(
    "reason",
    [
        "NoSuchEntity: Policy arn:aws:iam::1:policy/a does not exist or is not attachable.",
        "operation error S3: HeadBucket, StatusCode: 404, api error NotFound: Not Found",
        "NoSuchBucket: The specified bucket does not exist",
        "couldn't find resource",
        "empty result",
        "Your query returned no results. Please change your search criteria and try again.",
        "no matching EC2 VPC found",
        "InvalidInstanceType: The following supplied instance types do not exist: [g99.huge]",
        "ResourceNotFoundException: Secrets Manager can't find the specified secret.",
        "ParameterNotFound: ",
        "RepositoryNotFoundException: The repository with name 'a' does not exist in the registry",
        'InvalidVpcID.Malformed: Invalid id: "vpc-x"',
        "ValidationError: Invalid ARN:  Could not be parsed!",
    ],
)
def test_absent_and_impossible_names_are_recognized(reason: str) -> None:
    assert is_absent(reason)


@pytest.mark.parametrize(
    "reason",
    [
        KMS_DENIES,
        "UnauthorizedOperation: You are not authorized to perform this operation.",
        "AccessDenied: User a is not authorized to perform: iam:GetPolicy on resource: policy not found",
        "operation error S3: HeadBucket, StatusCode: 403, api error Forbidden: Forbidden",
        "ExpiredToken: The security token included in the request is expired",
        "ThrottlingException: Rate exceeded",
        "RequestError: send request failed, dial tcp: i/o timeout",
        "InternalError: An internal error has occurred",
    ],
)
def test_other_failures_do_not_mean_absence(reason: str) -> None:
    assert not is_absent(reason)


def test_only_the_plan_insists_on_an_answer() -> None:
    needed = {row.function for row in ROWS if row.question.denied == REFUSE}
    assert needed == {"getSubnet", "getInstanceType"}


@pytest.mark.parametrize(("row", "rule"), RULES, ids=[f"{row}-{rule.fields}" for row, rule in RULES])
def test_unfit_answers(cloud: Cloud, warnings: list[str], row: Row, rule: Rule) -> None:
    for answer in UNFIT[row.function, rule.fields]:
        warnings.clear()
        if row.function == "S3":
            cloud.s3_answers = answer
        else:
            cloud.answers = {row.function: {_camel(name): value for name, value in answer.items()}}
        hint = rule.hint or row.question.hint
        problem = rule.problem.partition("{}")[0]
        told(WARN if rule.is_warning else REFUSE, cloud, warnings, row.question, problem=problem, hint=hint)


def _camel(name: str) -> str:
    return re.sub("_(.)", lambda found: found[1].upper(), name)


def test_each_example_belongs_to_a_rule() -> None:
    assert {(row.function, rule.fields) for row, rule in RULES} == UNFIT.keys()


@pytest.mark.parametrize("row", [row for row in ROWS if row.function != "S3"], ids=str)
def test_each_field_of_an_answer_is_judged_or_harmless(row: Row) -> None:
    judged = {field for rule in row.question.rules for field in rule.fields.split()}
    assert row.fields - judged == set(HARMLESS[row.function].split())


def test_silent_s3_says_nothing(cloud: Cloud, warnings: list[str]) -> None:
    calls = (
        *("bucket_versioning", "bucket_lifecycle_configuration", "object_lock_configuration", "bucket_encryption"),
        "bucket_request_payment",
    )
    cloud.s3_answers = {"head_bucket": "403", "head_bucket_by_owner": "403"} | {f"get_{call}": "403" for call in calls}
    for row in [row for row in ROWS if row.function == "S3"]:
        cloud.run(lambda row=row: next(lookups.ask_all([row.question])))
    cloud.s3_answers = {**cloud.s3_answers, "get_bucket_versioning": {"Status": "Enabled"}}
    for row in [row for row in ROWS if row.function == "S3"]:
        cloud.run(lambda row=row: next(lookups.ask_all([row.question])))
    assert not warnings


VERSIONS_EXPIRE = {"NoncurrentVersionExpiration": {"NoncurrentDays": 7}}


@pytest.mark.parametrize(
    "rules",
    [
        lifecycle(VERSIONS_EXPIRE),
        lifecycle({**VERSIONS_EXPIRE, "Prefix": ""}),
        lifecycle({**VERSIONS_EXPIRE, "Filter": {"Prefix": "runs/"}}),
        lifecycle(VERSIONS_EXPIRE, {"Expiration": {"Days": 7}, "Filter": {"Prefix": "logs/"}}),
        lifecycle(VERSIONS_EXPIRE, {"Expiration": {"Days": 7}, "Filter": {"Tag": {"Key": "a", "Value": "b"}}}),
        lifecycle(VERSIONS_EXPIRE, {"Expiration": {"ExpiredObjectDeleteMarker": True}}),
        lifecycle(VERSIONS_EXPIRE, {"Status": "Disabled", "Expiration": {"Days": 7}}),
        lifecycle(VERSIONS_EXPIRE, {"Transitions": [{"Days": 30, "StorageClass": "STANDARD_IA"}]}),
        lifecycle(VERSIONS_EXPIRE, {"Transitions": [{"Days": 0, "StorageClass": "INTELLIGENT_TIERING"}]}),
        lifecycle(VERSIONS_EXPIRE, {"Transitions": [{"Days": 30, "StorageClass": "GLACIER_IR"}]}),
        lifecycle(VERSIONS_EXPIRE, {"AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 7}}),
    ],
)
def test_a_bucket_that_keeps_runs_and_ends_versions_is_fit(
    cloud: Cloud, warnings: list[str], rules: dict[str, Any]
) -> None:
    cloud.s3_answers = {
        "get_bucket_versioning": {"Status": "Enabled"},
        **rules,
        "get_object_lock_configuration": {"ObjectLockConfiguration": {"ObjectLockEnabled": "Enabled"}},
    }
    cloud.run(lambda: look_up(bucket_name="company-runs"))
    assert not warnings


@pytest.mark.parametrize(
    "where", [{"Prefix": "logs/"}, {"Filter": {"Prefix": "runs/a"}}, {"Filter": {"Tag": {"Key": "a", "Value": "b"}}}]
)
def test_a_rule_for_other_objects_ends_no_versions_of_runs(
    cloud: Cloud, warnings: list[str], where: dict[str, Any]
) -> None:
    rule = lifecycle({**VERSIONS_EXPIRE, **where})
    cloud.s3_answers = {"get_bucket_versioning": {"Status": "Enabled"}, **rule}
    cloud.run(lambda: look_up(bucket_name="company-runs"))
    [line] = warnings
    assert "keeps noncurrent versions for ever" in line


def test_an_alias_is_that_of_its_key(cloud: Cloud, warnings: list[str]) -> None:
    cloud.answers = {"getSecret": {"kmsKeyId": "alias/teams"}, "getKey": {"arn": KEY}}
    cloud.run(lambda: look_up(**REGISTRY, kms_key_arn=KEY))
    assert not warnings
    cloud.answers["getKey"] = {"arn": OTHER_KEY}
    with pytest.raises(SettingError, match=r"^registry_secret_arn: .* is encrypted with the KMS key .*key/2, "):
        cloud.run(lambda: look_up(**REGISTRY))
    cloud.silent = ("getKey",)
    assert cloud.run(lambda: look_up(**REGISTRY))


FOREIGN = [
    ("arn:aws:", "arn:aws-cn:", "aws-cn"),
    (f":{REGION}:", ":eu-west-1:", "eu-west-1"),
    (ACCOUNT, "2" * 12, "2222"),
]


@pytest.mark.parametrize(("part", "other", "name"), FOREIGN, ids=["partition", "region", "account"])
@pytest.mark.parametrize("field", ["permissions_boundary", "task_policy_arns", "registry_secret_arn", "kms_key_arn"])
def test_foreign_arns_are_recognized_before_a_call(
    cloud: Cloud, warnings: list[str], field: str, part: str, other: str, name: str
) -> None:
    settings = {**ALL, **REGISTRY}[field]
    value = (settings[0] if isinstance(settings, tuple) else settings).replace(part, other)
    more: dict[str, Any] = {**REGISTRY} if field.startswith("registry") else {}
    more[field] = (value,) if isinstance(settings, tuple) else value
    if (field.endswith("arns") or field.startswith("permissions")) and part == f":{REGION}:":
        return  # IAM has no region
    if part == ACCOUNT and field in ("registry_secret_arn", "kms_key_arn"):
        cloud.run(lambda: look_up(**more))
        assert [line for line in warnings if name in line and "policy admits the stack's roles" in line]
        return
    with pytest.raises(SettingError, match=f"^{field}: '{value}' .*{name}"):
        cloud.run(lambda: look_up(**more))
    assert not cloud.calls


def test_policies_of_aws_are_attached_in_every_account(cloud: Cloud, warnings: list[str]) -> None:
    cloud.run(lambda: look_up(task_policy_arns=("arn:aws:iam::aws:policy/AmazonSSMReadOnlyAccess",)))
    assert not warnings


@pytest.mark.parametrize("key", ["", KEY, "alias/aws/secretsmanager", KEY.replace("key/1", "alias/aws/secretsmanager")])
def test_secrets_under_a_usable_key(cloud: Cloud, warnings: list[str], key: str) -> None:
    cloud.answers = {"getSecret": {"kmsKeyId": key}}
    cloud.run(lambda: look_up(job_secrets=(SECRET,), kms_key_arn=KEY))
    assert not warnings


def test_an_output_may_be_the_key_of_a_secret(cloud: Cloud, warnings: list[str]) -> None:
    cloud.answers = {"getSecret": {"kmsKeyId": OTHER_KEY}}
    cloud.run(lambda: look_up(**REGISTRY, kms_key_arn=pulumi.Output.from_input(OTHER_KEY)))
    assert not warnings


def test_a_redirect_of_s3_is_another_region(cloud: Cloud, warnings: list[str]) -> None:
    cloud.bucket_region = "eu-west-1"
    cloud.run(lambda: look_up(data_buckets=("my-data",)))
    [line] = warnings
    assert line.startswith("data_buckets: 'my-data' is in another region, but the stack is in us-west-2; ")
    for unreachable in ({"bucket_name": "runs"}, {"data_buckets": ("my-data",), "nat_gateway": False}):
        with pytest.raises(SettingError, match=r"is in another region.*; use one in us-west-2, which the nodes reach"):
            cloud.run(lambda settings=unreachable: look_up(**settings))


def test_spot_needs_its_role_for_a_key(cloud: Cloud, warnings: list[str]) -> None:
    cloud.absent = ("getRole",)
    cloud.run(lambda: look_up(spot=True))
    [line] = warnings
    assert line.startswith("spot: 'AWSServiceRoleForEC2Spot' could not be found (")
    assert line.endswith("create it: `aws iam create-service-linked-role --aws-service-name spot.amazonaws.com`")
    with pytest.raises(SettingError, match=r"^kms_key_arn: 'AWSServiceRoleForAutoScaling' could not be found"):
        cloud.run(lambda: look_up(kms_key_arn=KEY))


def test_images_of_other_registries_are_not_looked_up(cloud: Cloud, warnings: list[str]) -> None:
    for uri in (f"{ECR}@{DIGEST}".replace(ACCOUNT, "2" * 12), f"public.example/ray@{DIGEST}"):
        assert cloud.run(lambda uri=uri: look_up(image_uri=uri))[0] == uri
    assert not [token for token, _ in cloud.calls if token.endswith("getImage")]
    assert not warnings
    cloud.run(lambda: look_up(image_uri="public.example/ray:latest"))
    [line] = warnings
    assert line.startswith("image_uri: ECS keeps the image that public.example/ray:latest names at this `pulumi up`: ")


def test_a_tag_in_this_accounts_ecr_is_pinned(cloud: Cloud, warnings: list[str]) -> None:
    pinned = {f"{ECR}:v1": f"{ECR}@{DIGEST}", f"{ECR}@{DIGEST}": f"{ECR}@{DIGEST}"}
    pinned[f"{ECR}:v1@{DIGEST}"] = f"{ECR}:v1@{DIGEST}"
    assert [cloud.run(lambda uri=uri: look_up(image_uri=uri))[0] for uri in pinned] == list(pinned.values())
    asked = [item for token, item in cloud.calls if token.endswith("getImage")]
    assert [(item.get("imageTag"), item.get("imageDigest")) for item in asked] == [
        ("v1", None),
        (None, DIGEST),
        (None, DIGEST),
    ]
    assert {item["repositoryName"] for item in asked} == {"team/ray"}
    assert not warnings
    cloud.silent = ("getImage",)
    assert cloud.run(lambda: look_up(image_uri=f"{ECR}:v1"))[0] == f"{ECR}:v1"
    assert len(warnings) == 2


def test_images_of_another_region_need_a_nat_gateway(cloud: Cloud) -> None:
    uri = f"{ECR}@{DIGEST}".replace(REGION, "eu-west-1")
    with pytest.raises(SettingError, match=r"^nat_gateway: False leaves the image in eu-west-1 unreachable"):
        cloud.run(lambda: look_up(image_uri=uri, nat_gateway=False))


GPU_LESS = "al2023-ami-ecs-hvm-2023.0.20260901-kernel-6.1-x86_64"


def test_amazons_ami_without_gpus_serves_only_the_head(cloud: Cloud, warnings: list[str]) -> None:
    cloud.amis = {AMI: {"name": GPU_LESS}}
    cloud.run(lambda: look_up(head_ami_id=AMI))
    assert not warnings
    with pytest.raises(SettingError, match="which is not Amazon Linux for ECS with GPUs; "):
        cloud.run(lambda: look_up(worker_ami_id=AMI))


def test_a_companys_ami_may_have_any_name(cloud: Cloud, warnings: list[str]) -> None:
    cloud.amis = {AMI: {"name": "golden", "imageOwnerAlias": ""}}
    cloud.run(lambda: look_up(worker_ami_id=AMI))
    [line] = warnings
    assert (
        "is not Amazon's; without the ECS agent and the NVIDIA driver (580 or later) its instances never join" in line
    )


@pytest.mark.parametrize(
    ("created", "is_old"), [("2025-11-09T23:59:59.000Z", True), ("2025-11-10T00:00:00.000Z", False)]
)
def test_ami_without_mountpoints_package_is_named(
    cloud: Cloud, warnings: list[str], created: str, *, is_old: bool
) -> None:
    cloud.amis = {AMI: {"name": GPU_LESS, "creationDate": created}}
    cloud.run(lambda: look_up(head_ami_id=AMI))
    assert not warnings
    cloud.run(lambda: look_up(head_ami_id=AMI, mounts={"data": "s3://my-data"}))
    assert ["head_ami_id" in line and "older than mount-s3" in line for line in warnings] == [True] * is_old


@pytest.mark.parametrize(("key", "is_named"), [(KEY, True), ("", False), ("alias/aws/s3", False)])
def test_key_of_a_bucket_for_fsx_is_named(cloud: Cloud, warnings: list[str], key: str, *, is_named: bool) -> None:
    rule = {"ApplyServerSideEncryptionByDefault": {"KMSMasterKeyID": key}}
    cloud.s3_answers = {"get_bucket_encryption": {"ServerSideEncryptionConfiguration": {"Rules": [rule]}}}
    cloud.run(lambda: look_up(bucket_name="my-runs", kms_key_arn=KEY))
    assert not warnings
    cloud.run(lambda: look_up(bucket_name="my-runs", kms_key_arn=KEY, fsx_lustre_gib=1200))
    assert ["admits AWSServiceRoleForFSxS3Access_fs-*" in line for line in warnings] == [True] * is_named


def test_the_public_parameters_ami_is_judged(cloud: Cloud, warnings: list[str]) -> None:
    cloud.run(look_up)
    parameters = {item["name"] for token, item in cloud.calls if token.endswith("getParameter")}
    assert parameters == {
        f"/aws/service/ecs/optimized-ami/amazon-linux-2023/{variant}recommended/image_id" for variant in ("", "gpu/")
    }
    assert all(item["includeDeprecated"] for token, item in cloud.calls if token.endswith("getAmi"))
    cloud.answers = {"getAmi": {"architecture": "arm64"}}
    with pytest.raises(SettingError, match=f"^head_ami_id: '{PUBLIC_AMI}' is for arm64; "):
        cloud.run(look_up)
    cloud.answers, cloud.silent = {}, ("getParameter",)
    cloud.run(look_up)
    assert len(warnings) == 2
    assert "ssm:GetParameter" in warnings[0]


def test_a_vpc_that_cannot_be_read_is_used(cloud: Cloud, warnings: list[str]) -> None:
    cloud.silent = ("getVpc",)
    _, network = cloud.run(lambda: look_up(vpc_id="vpc-0a1b", subnet_ids=("subnet-0c2d",)))
    assert network == ExistingNetwork(vpc_id="vpc-0a1b", subnets={"us-west-2b": "subnet-0c2d"})
    [line] = warnings
    assert "(ec2:DescribeVpcs: " in line


def test_a_vpc_without_dhcp_options_has_none_to_read(cloud: Cloud) -> None:
    cloud.vpc = {"dhcpOptionsId": "default"}
    cloud.run(lambda: look_up(vpc_id="vpc-0a1b", subnet_ids=("subnet-0c2d",)))
    assert not [token for token, _ in cloud.calls if token.endswith("getVpcDhcpOptions")]


def test_two_subnets_of_a_zone_are_refused(cloud: Cloud) -> None:
    with pytest.raises(SettingError) as refused:
        cloud.run(lambda: look_up(vpc_id="vpc-0a1b", subnet_ids=("subnet-0e", "subnet-0c2d")))
    assert str(refused.value) == "subnet_ids: 'subnet-0c2d' is in us-west-2b, like subnet-0e; use one subnet per zone"


def test_the_main_route_table_serves_subnets_without_one(cloud: Cloud, warnings: list[str]) -> None:
    cloud.absent = ("getRouteTable",)
    cloud.run(lambda: look_up(vpc_id="vpc-0a1b", subnet_ids=("subnet-0c2d",)))
    asked = [item for token, item in cloud.calls if token.endswith("getRouteTable")]
    assert asked == [{"subnetId": "subnet-0c2d"}, {"routeTableId": "rtb-main"}]
    assert not warnings


@pytest.mark.parametrize(
    ("name", "usages", "grouped", "fits"),
    [
        ("g5.xlarge", ["spot"], True, True),
        ("t3.large", ["on-demand"], False, True),
        ("t3.large", ["on-demand"], True, True),
        ("p5.48xlarge", ["on-demand", "spot"], True, True),
        ("mac1.metal", ["spot"], False, False),
    ],
)
def test_instance_types_of_ec2s_catalogue(
    cloud: Cloud, name: str, usages: list[str], grouped: bool, fits: bool
) -> None:
    def ask() -> Any:
        questions = lookups.instance_types("worker_instance_types", [name], REGION, usages, grouped=grouped)
        return lookups.described(questions, lookups.ask_all(questions))

    if fits:
        [described] = cloud.run(ask)
        assert described.name == name
        assert described.boot_modes
        return
    with pytest.raises(SettingError, match=f"^worker_instance_types: '{name}' "):
        cloud.run(ask)


def test_the_smallest_disk_of_a_pool_holds_the_image(cloud: Cloud, warnings: list[str]) -> None:
    prep = {"instance_types": ["c6i.large"], "max": 1, "root_volume_gib": 50}
    cloud.answers = {"getImage": {"imageSizeInBytes": 20 * 2**30}}
    cloud.run(lambda: look_up(image_uri=f"{ECR}:v1"))
    assert not warnings
    cloud.run(lambda: look_up(image_uri=f"{ECR}:v1", worker_pools={"prep": prep}))
    assert [line.rpartition("; ")[2] for line in warnings] == ["raise worker_pools.prep.root_volume_gib"]
    warnings.clear()
    cloud.run(lambda: look_up(image_uri=f"{ECR}:v1", worker_pools={"prep": {**prep, "max": 0}}))
    assert not warnings


L4 = {"instance_types": ["g6.xlarge"], "max": 5}


@pytest.mark.parametrize(
    ("settings", "lacking"),
    [
        ({"worker_count": 5}, {"subnet-b"}),  # beside the head
        ({"worker_count": 6}, {"subnet-b", "subnet-c"}),
        ({"worker_count": 6, "availability_zones": ["us-west-2c"]}, {"subnet-c"}),
        ({"worker_count": 1, "worker_pools": {"l4": L4}}, {"subnet-b"}),
        (
            {"worker_count": 1, "worker_pools": {"l4": {**L4, "zones": ["us-west-2c"]}}},
            {"subnet-c"},
        ),
    ],
)
def test_room_is_that_of_the_nodes_in_a_zone(
    cloud: Cloud, warnings: list[str], settings: dict[str, Any], lacking: set[str]
) -> None:
    cloud.subnet_zones, cloud.subnet = {"subnet-c": "us-west-2c"}, {"cidrBlock": "10.0.0.0/28"}  # for five nodes
    args = RayClusterArgs(vpc_id="vpc-0a1b", subnet_ids=["subnet-b", "subnet-c"], **settings)
    cloud.run(lambda: lookups.existing_network(args, CALLER))
    assert {name for name in ("subnet-b", "subnet-c") if any(f"'{name}' (10" in line for line in warnings)} == lacking
