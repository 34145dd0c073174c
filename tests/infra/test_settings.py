"""Stack configuration: defaults, and one-line errors for invalid values."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pulumi
import pytest
import yaml

from infra import config
from infra.config import RayClusterArgs, arguments, docker
from infra.config.__main__ import files
from infra.config.arguments import WORKER_GROUPS
from infra.config.settings import Alerts, Scale, Settings, key_of
from infra.config.validation import RETENTION_DAYS
from infra.errors import SettingError
from tests.infra.fake_aws import Cloud, security_group

ROOT = Path(__file__).parents[2]
PROJECT = yaml.safe_load((ROOT / "Pulumi.yaml").read_text())
SECRET = "arn:aws:secretsmanager:us-west-2:123456789012:secret"
POLICY = "arn:aws:iam::123456789012:policy/read-features"
BAD = [
    ("headAmiId", "ami-1", "is not an AMI ID"),
    ("workerAmiId", "al2023", "is not an AMI ID"),
    ("headInstanceType", "m5", "is not an EC2 instance type"),
    ("headInstanceType", "", "is not an EC2 instance type"),
    ("workerInstanceTypes", "g5_xlarge", "is not an EC2 instance type"),
    ("workerInstanceTypes", "G5.xlarge", "is not an EC2 instance type"),
    ("workerCount", "-1", "must not be negative"),
    ("workerCount", "two", "is not an integer"),
    ("workerCount", "1.5", "is not an integer"),
    ("vpcCidr", "10.0.0.0", "must be /16"),
    ("vpcCidr", "10.0.0.0/8", "must be /16"),
    ("vpcCidr", "10.0.0.0/25", "must be /16"),
    ("vpcCidr", "10.0.0.1/16", "has host bits set"),
    ("vpcCidr", "fd00::/16", "is not an IPv4 CIDR block"),
    ("vpcCidr", "172.17.0.0/20", "overlaps Docker's bridge"),
    ("vpcCidr", "8.8.0.0/16", "is public"),
    ("vpcCidr", "172.32.0.0/16", "is public"),
    ("minWorkers", "-1", "must not be negative"),
    ("minWorkers", "3", "must not exceed workerCount (2)"),
    ("minWorkers", "few", "is not an integer"),
    ("maxWorkers", "-1", "must not be negative"),
    ("maxWorkers", "1", "must be at least workerCount (2)"),
    ("maxWorkers", "many", "is not an integer"),
    ("idleTimeoutMinutes", "-5", "must be 15"),
    ("idleTimeoutMinutes", "14", "must be 15"),
    ("idleTimeoutMinutes", "1441", "must be 15"),
    ("idleTimeoutMinutes", "1h", "is not an integer"),
    ("redeployWorkers", "once more", "is not a single word"),
    ("rotateToken", "once more", "is not a single word"),
    ("vpcId", "my-vpc", "is not a VPC ID"),
    ("vpcId", "vpc-0a1b", "requires subnetIds"),
    ("subnetIds", "subnet_1", "is not a subnet ID"),
    ("subnetIds", "subnet-0c2d", "requires vpcId"),
    ("checkQuotas", "often", "is not a boolean"),
    ("maxHourlyUsd", "-0.5", "is not an amount in USD"),
    ("maxHourlyUsd", "nan", "is not an amount in USD"),
    ("maxHourlyUsd", "cheap", "is not a number"),
    ("alertEmail", "team", "is not a valid email address"),
    ("alertEmail", "team@example", "is not a valid email address"),
    ("alertEmail", "a@example.com, b@example.com", "is not a valid email address"),
    ("workerInstanceTypes", "g5.xlarge,g5.xlarge", "contains g5.xlarge twice"),
    ("cpuWorkerInstanceTypes", "c6i", "is not an EC2 instance type"),
    ("cpuWorkerCount", "-1", "must not be negative"),
    ("minCpuWorkers", "1", "must not exceed cpuWorkerCount (0)"),
    ("maxCpuWorkers", "-1", "must not be negative"),
    ("spot", "often", "is not a boolean"),
    ("onDemandWorkers", "1", "requires spot"),
    ("onDemandWorkers", "-1", "must not be negative"),
    ("spreadZones", "true", "requires at least two availability zones"),
    ("natGateway", "no", "is not a boolean"),
    ("registrySecretArn", "my-secret", "is not a Secrets Manager ARN"),
    ("registrySecretArn", f"{SECRET}:registry", "requires imageUri"),
    ("jobSecrets", "hf-token", "is not a Secrets Manager ARN"),
    ("jobSecrets", f"{SECRET}:hf-*", "is not a Secrets Manager ARN"),
    ("jobSecrets", f"{SECRET}:hf,{SECRET}:hf", f"contains {SECRET}:hf twice"),
    ("tags", "team", "is not key=value"),
    ("tags", "name=mine", "uses a reserved key of this stack"),
    ("tags", "Ray-on-ecs:stack=mine", "uses a reserved key of this stack"),
    ("tags", "aws:team=vision", "uses the prefix aws:"),
    ("tags", "team=a|b", "is not a valid tag for all AWS services"),
    ("permissionsBoundary", "boundary", "is not an IAM policy ARN"),
    ("taskPolicyArns", "read-features", "is not an IAM policy ARN"),
    ("taskPolicyArns", f"{POLICY},{POLICY}", f"contains {POLICY} twice"),
    ("taskPolicyArns", ",".join(f"{POLICY}-{number}" for number in range(11)), "has more than the 10 managed policies"),
    ("instancePolicyArns", "session-key", "is not an IAM policy ARN"),
    ("rolePath", "teams", "is not an IAM path"),
    ("kmsKeyArn", "alias/company", "is not a KMS key ARN"),
    ("monthlyBudgetUsd", "0", "must be at least 1"),
    ("monthlyBudgetUsd", "12.5", "is not an integer"),
    ("availabilityZones", "us west 2a", "is not an availability zone"),
    ("imageUri", "https://example.com/image", "is not an image reference"),
    ("imageUri", "image with spaces", "is not an image reference"),
    ("imageUri", "foo", "is not an image reference"),
    ("imageUri", "public.example/ray", "is not an image reference"),
    ("imageUri", "public.example/ray@sha256:12", "is not an image reference"),
    ("bucketName", "s3://runs", "is not an S3 bucket name"),
    ("bucketName", "runs--usw2-az1--x-s3", "is a directory bucket"),
    ("objectVersionDays", "-1", "must be 0 to 3650"),
    ("retainBucket", "maybe", "is not a boolean"),
    ("dataBuckets", "s3://my-data", "is not an S3 bucket"),
    ("dataBuckets", "my-data--usw2-az1--x-s3", "is a directory bucket"),
    ("dataBuckets", "My_Data", "is not an S3 bucket"),
    ("dataBuckets", "my-data/*", "is not an S3 bucket"),
    ("rootVolumeGib", "30", "must be 50"),
    ("rootVolumeGib", "99999", "must be 50"),
    ("rootVolumeGib", "big", "is not an integer"),
    ("logRetentionDays", "31", "is not a retention period"),
    ("logRetentionDays", "0", "is not a retention period"),
    ("logRetentionDays", "month", "is not an integer"),
]


def load(cloud: Cloud, **config: str) -> Settings:
    """The settings that a stack with this configuration has."""
    cloud.config = config
    return cloud.run(Settings.load)


def test_settings_match_arguments_pulumi_yaml_and_docs() -> None:
    of_groups = {setting for arguments in WORKER_GROUPS.values() for setting in arguments.values()}
    assert {*RayClusterArgs.__annotations__, *of_groups} == {*vars(Settings()), *WORKER_GROUPS, "environment"}
    assert not RayClusterArgs.__required_keys__
    for path, text in files().items():
        assert path.read_text() == text, f"{path.name} is stale: python -m infra.config --write"


def test_the_engine_makes_the_virtual_environment_itself() -> None:
    assert PROJECT["name"] == "ray-on-ecs"
    assert PROJECT["runtime"] == {"name": "python", "options": {"toolchain": "pip", "virtualenv": ".venv"}}


def test_an_empty_configuration_is_the_default_one(cloud: Cloud) -> None:
    assert load(cloud) == Settings()


# Valid value of each setting: text in the configuration, and parsed value.
GOOD: dict[str, tuple[str, Any]] = {
    "head_instance_type": ("m5.large", "m5.large"),
    "worker_instance_types": ("g5.12xlarge, g6.12xlarge", ("g5.12xlarge", "g6.12xlarge")),
    "head_ami_id": ("ami-0123456789abcdef0", "ami-0123456789abcdef0"),
    "worker_ami_id": ("ami-01234567", "ami-01234567"),
    "worker_count": ("0", 0),
    "min_workers": ("0", 0),
    "max_workers": ("4", 4),
    "idle_timeout_minutes": ("60", 60),
    "spot": ("true", True),
    "on_demand_workers": ("1", 1),
    "cpu_worker_instance_types": ("c6i.large", ("c6i.large",)),
    "cpu_worker_count": ("1", 1),
    "min_cpu_workers": ("0", 0),
    "max_cpu_workers": ("3", 3),
    "redeploy_workers": ("again", "again"),
    "rotate_token": ("2026-11", "2026-11"),
    "vpc_cidr": ("192.168.0.0/20", "192.168.0.0/20"),
    "vpc_id": ("vpc-0a1b", "vpc-0a1b"),
    "subnet_ids": ("subnet-0c2d,subnet-0e", ("subnet-0c2d", "subnet-0e")),
    "availability_zones": ("us-west-2b,us-west-2a", ("us-west-2b", "us-west-2a")),
    "spread_zones": ("true", True),
    "nat_gateway": ("true", True),
    "image_uri": ("public.example/ray@sha256:" + "0" * 64, "public.example/ray@sha256:" + "0" * 64),
    "registry_secret_arn": (f"{SECRET}:registry", f"{SECRET}:registry"),
    "bucket_name": ("", ""),  # excludes the next two
    "retain_bucket": ("true", True),
    "object_version_days": ("30", 30),
    "data_buckets": ("my-data, other.data/images/2026,", ("my-data", "other.data/images/2026")),
    "job_secrets": (f"{SECRET}:hf-AbCdEf, {SECRET}:team/wandb-1", (f"{SECRET}:hf-AbCdEf", f"{SECRET}:team/wandb-1")),
    "root_volume_gib": ("200", 200),
    "log_retention_days": ("7", 7),
    "check_quotas": ("false", False),
    "max_hourly_usd": ("12.5", 12.5),
    "alert_email": ("team@example.com", "team@example.com"),
    "monthly_budget_usd": ("900", 900),
    "tags": ("Project=vision, stack=42", {"Project": "vision", "stack": "42"}),
    "permissions_boundary": ("arn:aws:iam::123456789012:policy/boundary", "arn:aws:iam::123456789012:policy/boundary"),
    "task_policy_arns": (POLICY, (POLICY,)),
    "instance_policy_arns": (POLICY, (POLICY,)),
    "role_path": ("/teams/ml/", "/teams/ml/"),
    "kms_key_arn": ("arn:aws:kms:us-west-2:123456789012:key/1a2b", "arn:aws:kms:us-west-2:123456789012:key/1a2b"),
}


def test_every_key_is_read(cloud: Cloud) -> None:
    assert GOOD.keys() == vars(Settings()).keys()
    expected = Settings(**{name: value for name, (_, value) in GOOD.items()})
    assert load(cloud, **{key_of(name): text for name, (text, _) in GOOD.items()}) == expected


def test_an_existing_bucket_is_read(cloud: Cloud) -> None:
    assert load(cloud, bucketName="company-runs").bucket_name == "company-runs"


def test_every_key_has_a_bad_value_to_refuse() -> None:
    assert {key for key, _, _ in BAD} == PROJECT["config"].keys()


@pytest.mark.parametrize(("key", "value", "rule"), BAD)
def test_a_bad_value_is_refused_in_one_line(cloud: Cloud, key: str, value: str, rule: str) -> None:
    with pytest.raises(SettingError) as refused:
        load(cloud, **{key: value})
    message = str(refused.value)
    assert message.startswith(f"{key}: ")
    assert value in message
    assert rule in message
    assert re.search("; [a-z]+ ", message)
    assert "\n" not in message


@pytest.mark.parametrize(
    ("key", "hint"), [("workerCout", "did you mean 'workerCount'?"), ("color", "Pulumi.yaml lists all keys.")]
)
def test_unknown_keys_are_refused(cloud: Cloud, key: str, hint: str) -> None:
    with pytest.raises(pulumi.RunError) as refused:
        load(cloud, **{key: "secret"})
    expected = f"{key}: unknown configuration key; {hint} Remove it: `pulumi config rm {key}`"
    assert str(refused.value) == expected


def test_keys_of_a_renamed_project_are_refused(cloud: Cloud) -> None:
    with pytest.raises(
        pulumi.RunError, match=r"^my-ray:spot: belongs to another project; rename it to ray-on-ecs:spot$"
    ):
        load(cloud, **{"my-ray:spot": "true"})
    assert load(cloud, **{"aws:region": "us-west-2", "pulumi:tags": '{"team": "vision"}'}) == Settings()


def test_bad_value_raises_run_error(cloud: Cloud) -> None:
    cloud.config = {"workerCount": "-1"}
    with pytest.raises(pulumi.RunError, match=r"^workerCount: -1 must not be negative; "):
        cloud.run(lambda: config.load("vision"))


@pytest.mark.parametrize(
    "uri",
    [
        "123456789012.dkr.ecr.us-west-2.amazonaws.com/team/ray:2.60",
        "public.ecr.aws/team/ray@sha256:" + "0" * 64,
        "localhost:5000/ray:latest",
        "python:3.11-slim",
    ],
)
def test_every_usual_image_reference_is_taken(uri: str) -> None:
    assert Settings(image_uri=uri).image_uri == uri


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("idle_timeout_minutes", 15),
        ("idle_timeout_minutes", 1440),
        ("max_workers", 2),
        ("min_workers", 2),
        ("vpc_cidr", "100.64.0.0/16"),
        ("root_volume_gib", 50),
        ("root_volume_gib", 16384),
        ("vpc_cidr", "10.0.0.0/24"),
        ("worker_count", 0),
    ],
)
def test_a_limit_itself_is_allowed(field: str, value: Any) -> None:
    settings: dict[str, Any] = {field: value}
    assert getattr(Settings(**settings), field) == value


def test_every_period_of_cloudwatch_is_allowed() -> None:
    assert all(Settings(log_retention_days=days) for days in RETENTION_DAYS)


def test_min_workers_above_max_workers_is_refused(cloud: Cloud) -> None:
    with pytest.raises(SettingError) as refused:
        load(cloud, minWorkers="5", maxWorkers="4")
    assert str(refused.value) == "minWorkers: 5 must not exceed maxWorkers (4); lower it, or raise maxWorkers"


def scale(initial: int, fewest: int, most: int, job: int, idle: int = 30) -> Scale:
    return Scale(initial_count=initial, min_count=fewest, max_count=most, default_job_count=job, idle_minutes=idle)


@pytest.mark.parametrize(
    ("config", "workers"),
    [
        ({}, scale(2, 0, 2, 2)),
        ({"workerCount": "0"}, scale(0, 0, 0, 0)),
        ({"maxWorkers": "4"}, scale(2, 0, 4, 2)),
        ({"workerCount": "0", "maxWorkers": "4"}, scale(0, 0, 4, 4)),
        ({"minWorkers": "1", "maxWorkers": "4"}, scale(2, 1, 4, 2)),
        ({"minWorkers": "2"}, scale(2, 2, 2, 2)),
        ({"idleTimeoutMinutes": "0"}, scale(2, 0, 2, 2, idle=0)),
        ({"idleTimeoutMinutes": "60"}, scale(2, 0, 2, 2, idle=60)),
    ],
)
def test_counts_and_idle_time_give_the_scale(cloud: Cloud, config: dict[str, str], workers: Scale) -> None:
    assert load(cloud, **config).workers == workers


def test_alerts_combine_email_and_budget(cloud: Cloud) -> None:
    made = load(cloud, alertEmail=" team+gpu@mail.example.co.uk ", monthlyBudgetUsd="900").alerts
    assert made == Alerts(email="team+gpu@mail.example.co.uk", monthly_usd=900)


ECR = "123456789012.dkr.ecr.us-west-2.amazonaws.com/ray:1"
ELSEWHERE = "registry.example/ray:1"


@pytest.mark.parametrize(
    ("config", "line"),
    [
        (
            {"natGateway": "false", "vpcId": "vpc-0a1b", "subnetIds": "subnet-0c2d"},
            "natGateway: 'false' cannot be combined with vpcId (vpc-0a1b); ",
        ),
        (
            {"natGateway": "false", "imageUri": ELSEWHERE},
            "natGateway: 'false' leaves the registry of imageUri",
        ),
        (
            {"registrySecretArn": f"{SECRET}:x", "imageUri": ECR},
            f"registrySecretArn: '{SECRET}:x' cannot be combined with an image in ECR",
        ),
        (
            {"bucketName": "company-runs", "retainBucket": "true"},
            "retainBucket: 'true' cannot be combined with bucketName (company-runs); set false",
        ),
        (
            {"bucketName": "company-runs", "objectVersionDays": "7"},
            "objectVersionDays: '7' cannot be combined with bucketName (company-runs); set 0",
        ),
        ({"spot": "true", "onDemandWorkers": "3"}, "onDemandWorkers: 3 must not exceed the maximum of 2 workers"),
        (
            {"cpuWorkerCount": "2"},
            "cpuWorkerInstanceTypes: '' is required for up to 2 CPU workers; use a type, e.g. c6i.2xlarge",
        ),
        (
            {"tags": "team=a,Team=b"},
            "tags: 'team=a' has a key that differs only in case from another",
        ),
        (
            {"minCpuWorkers": "-2"},
            "minCpuWorkers: -2 must not be negative; use the number of instances that the scale-in keeps, or",
        ),
        ({"cpuWorkerCount": "2", "maxCpuWorkers": "1"}, "maxCpuWorkers: 1 must be at least cpuWorkerCount (2)"),
        (
            {"subnetIds": "subnet-0c2d,subnet-0c2d", "vpcId": "vpc-0a1b"},
            "subnetIds: 'subnet-0c2d,subnet-0c2d' contains",
        ),
    ],
)
def test_settings_that_do_not_go_together_are_refused(cloud: Cloud, config: dict[str, str], line: str) -> None:
    with pytest.raises(SettingError) as refused:
        load(cloud, **config)
    assert str(refused.value).startswith(line)


def test_nat_gateway_off_accepts_ecr_images(cloud: Cloud) -> None:
    assert not load(cloud, natGateway="false", imageUri=ECR).nat_gateway
    assert not load(cloud, natGateway="false").nat_gateway


def test_settings_and_arguments_round_trip(cloud: Cloud) -> None:
    settings = load(cloud, **{key_of(name): text for name, (text, _) in GOOD.items()})
    assert arguments.read(arguments.of_settings(settings)).settings == settings
    assert load(cloud, maxWorkers="0").max_workers is None


def test_preview_checks_docker_if_image_is_built(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(docker, "check", lambda *, is_up: asked.append(is_up()))

    def read(**of_stack: str) -> None:
        cloud.config = of_stack
        cloud.run(lambda: config.load("vision"))

    read()
    cloud.preview = True
    read(imageUri="public.example/ray:1")
    assert asked == []
    read()
    cloud.security_groups = [security_group("vision")]
    read()
    assert asked == [False, True]


def test_another_account_is_refused_before_anything_is_planned(cloud: Cloud) -> None:
    cloud.account = "999999999999"
    with pytest.raises(pulumi.RunError, match=r"^aws:allowedAccountIds: the stack is in account 123456789012, and "):
        cloud.run(lambda: config.load("vision"))


def test_cpu_workers_scale_as_workers_do(cloud: Cloud) -> None:
    options = {"cpuWorkerInstanceTypes": "c6i.large", "cpuWorkerCount": "1", "minCpuWorkers": "0", "maxCpuWorkers": "3"}
    made = load(cloud, **options, idleTimeoutMinutes="30").cpu_workers
    assert made == scale(1, 0, 3, 1)


def test_workers_can_be_withdrawn_whatever_their_market(cloud: Cloud) -> None:
    assert load(cloud, workerCount="0", spot="true", onDemandWorkers="1").workers.max_count == 0
