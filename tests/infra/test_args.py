"""Arguments from a stack's configuration and from Python: defaults, and one-line errors for invalid values."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pulumi
import pytest
import yaml

from component.generate import files
from infra.config import RayClusterArgs
from infra.config.args import defaults
from infra.config.worker_pool import WorkerPoolArgs
from infra.definitions.nat import UNNEEDED_MINUTES
from infra.errors import Refusal, SettingError
from infra.types import Scale
from ray_on_ecs.contract import key_of
from tests.infra.fake_aws import Cloud, later

ROOT = Path(__file__).parents[2]
PROJECT = yaml.safe_load((ROOT / "Pulumi.yaml").read_text())
SECRET = "arn:aws:secretsmanager:us-west-2:123456789012:secret"
POLICY = "arn:aws:iam::123456789012:policy/read-features"
BAD = [
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
    ("maxWorkers", "-1", "must not be negative"),
    ("maxWorkers", "1", "must be at least workerCount (2)"),
    ("idleTimeoutMinutes", "-5", "must be 15"),
    ("idleTimeoutMinutes", "14", "must be 15"),
    ("idleTimeoutMinutes", "1441", "must be 15"),
    ("sleepAfterMinutes", "-5", "must be 15"),
    ("sleepAfterMinutes", "14", "must be 15"),
    ("sleepAfterMinutes", "1441", "must be 15"),
    ("vpcId", "vpc-0a1b", "requires subnetIds"),
    ("subnetIds", "subnet-0c2d", "requires vpcId"),
    ("maxHourlyUsd", "-0.5", "must not be negative"),
    ("maxHourlyUsd", "nan", "is not a finite number"),
    ("maxHourlyUsd", "inf", "is not a finite number"),
    ("maxHourlyUsd", "cheap", "is not a number"),
    ("alertEmail", "team", "is not a valid email address"),
    ("alertEmail", "team@example", "is not a valid email address"),
    ("alertEmail", "a@example.com, b@example.com", "is not a valid email address"),
    ("workerInstanceTypes", "g5.xlarge,g5.xlarge", "contains a value twice"),
    ("cpuWorkerCount", "-1", "must not be negative"),
    ("minCpuWorkers", "-1", "must not be negative"),
    ("maxCpuWorkers", "-1", "must not be negative"),
    ("spot", "often", "is not a boolean"),
    ("onDemandWorkers", "1", "requires spot"),
    ("onDemandWorkers", "-1", "must not be negative"),
    *(("workerEfa", value, "must be auto, true or false") for value in ("yes", "on", "1", "True")),
    ("spreadZones", "true", "requires at least two availability zones"),
    ("registrySecretArn", f"{SECRET}:registry", "requires imageUri"),
    ("jobSecrets", f"{SECRET}:hf,{SECRET}:hf", "contains a value twice"),
    ("tags", "team", "is not key=value"),
    ("tags", "name=mine", "uses a reserved key of this stack"),
    ("tags", "Ray-on-ecs:stack=mine", "uses a reserved key of this stack"),
    ("tags", "aws:team=vision", "uses the prefix aws:"),
    ("tags", "team=a|b", "is not a valid tag for all AWS services"),
    ("taskPolicyArns", f"{POLICY},{POLICY}", "contains a value twice"),
    ("rolePath", "teams", "is not an IAM path"),
    ("environment", "A", "is not key=value"),
    ("environment", "AWS_REGION=x", "'AWS_REGION' is reserved for the cluster's containers"),
    ("monthlyBudgetUsd", "0", "must be at least 1"),
    ("monthlyBudgetUsd", "12.5", "is not an integer"),
    ("imageUri", "https://example.com/image", "is not an image reference"),
    ("imageUri", "image with spaces", "is not an image reference"),
    ("imageUri", "foo", "is not an image reference"),
    ("imageUri", "public.example/ray", "is not an image reference"),
    ("imageUri", "public.example/ray@sha256:12", "is not an image reference"),
    ("imageBuild", "docker", "is not one of auto, local, codebuild; codebuild needs no Docker"),
    ("imageBuild", "CodeBuild", "is not one of"),
    ("imageBuild", "true", "is not one of"),
    ("bucketName", "s3://runs", "is not an S3 bucket"),
    ("bucketName", "runs--usw2-az1--x-s3", "is a directory bucket"),
    ("objectVersionDays", "-1", "must not be negative"),
    ("dataBuckets", "s3://my-data", "is not an S3 bucket"),
    ("dataBuckets", "my-data--usw2-az1--x-s3", "is a directory bucket"),
    ("dataBuckets", "My_Data", "is not an S3 bucket"),
    ("dataBuckets", "my-data other", "and several by commas"),
    *(
        (key, f"{before}my-data/{prefix}", f"has the prefix {prefix!r}; use one without spaces, *, ?, ${{ and empty")
        for key, before in (("dataBuckets", ""), ("mounts", "data=s3://"))
        for prefix in ("*", "a?", "a b", "/a", "a//b", "a//", "${user}", "a other/b")
    ),
    *(
        ("mounts", f"data=s3://my-data{between}text=s3://my-text", "has several mounts; separate mounts by commas")
        for between in (" ", "/a b ", ";", "\t", "/")
    ),
    *(
        ("mounts", f"{name}=s3://my-data", "is not a name of a mount")
        for name in ("a_b", "-a", "a-", "a/b", ".", 33 * "a")
    ),
    *(("mounts", f"{name}=s3://my-data", "is a reserved name") for name in ("fsx", "efs")),
    *(
        ("mounts", f"data={address}", "is not a folder of S3")
        for address in ("my-data/faces", "/data", "S3://my-data", "s3:/my-data", "https://my-data", "", "fs-01234567")
    ),
    *(("mounts", f"data={address}", "is not an S3 bucket") for address in ("s3://", "s3:///faces", "s3://My_Data")),
    ("mounts", "data=s3://my-data--usw2-az1--x-s3", "is a directory bucket"),
    *(("fsxLustre", name, "is not the ID of a file system") for name in ("fs-1", "fsap-0123456789abcdef0", "my-fs")),
    *(("efs", name, "is not the ID of a file system") for name in ("fs-01234567:/", "fs-01234567.efs", "FS-01234567")),
    *(("fsxLustreGib", gib, "is not a capacity") for gib in ("1", "600", "1199", "1201", "3600", "-1200")),
    ("fsxLustre", "fs-01234567", "requires vpcId"),
    ("efs", "fs-01234567", "requires vpcId"),
    ("rootVolumeGib", "30", "must be 50"),
    ("rootVolumeGib", "99999", "must be 50"),
]


def load(cloud: Cloud, **config: str) -> RayClusterArgs:
    """The arguments of a stack with this configuration."""
    cloud.config = config
    return cloud.run(RayClusterArgs.from_config)


def test_generated_files_are_current() -> None:
    for path, text in files().items():
        assert path.read_text() == text, f"{path.name} is stale: python -m component.generate --write"


def test_the_engine_makes_the_virtual_environment_itself() -> None:
    assert PROJECT["name"] == "ray-on-ecs"
    assert PROJECT["runtime"] == {"name": "python", "options": {"toolchain": "pip", "virtualenv": ".venv"}}


def test_an_empty_configuration_is_the_default_one(cloud: Cloud) -> None:
    assert vars(load(cloud)) == vars(RayClusterArgs())


# Valid value of each key: text in the configuration, and parsed value.
GOOD: dict[str, tuple[str, Any]] = {
    "head_instance_type": ("m5.xlarge", "m5.xlarge"),
    "worker_instance_types": ("g5.12xlarge, g6.12xlarge", ("g5.12xlarge", "g6.12xlarge")),
    "head_ami_id": ("ami-0123456789abcdef0", "ami-0123456789abcdef0"),
    "worker_ami_id": ("ami-01234567", "ami-01234567"),
    "worker_count": ("0", 0),
    "min_workers": ("0", 0),
    "max_workers": ("4", 4),
    "idle_timeout_minutes": ("60", 60),
    "sleep_after_minutes": ("60", 60),
    "run_max_hours": ("24", 24.0),
    "run_max_usd": ("99.5", 99.5),
    "spot": ("true", True),
    "on_demand_workers": ("1", 1),
    "worker_efa": ("auto", "auto"),
    "cpu_worker_instance_types": ("c6i.large", ("c6i.large",)),
    "cpu_worker_count": ("1", 1),
    "min_cpu_workers": ("0", 0),
    "max_cpu_workers": ("3", 3),
    "worker_pools": (
        '{"h100": {"instanceTypes": ["p5.48xlarge"], "max": 2}}',
        {"h100": WorkerPoolArgs(instance_types=("p5.48xlarge",), max=2)},
    ),
    "redeploy_workers": ("again", "again"),
    "rotate_token": ("2026-11", "2026-11"),
    "vpc_cidr": ("192.168.0.0/20", "192.168.0.0/20"),
    "vpc_id": ("vpc-0a1b", "vpc-0a1b"),
    "subnet_ids": ("subnet-0c2d,subnet-0e", ("subnet-0c2d", "subnet-0e")),
    "availability_zones": ("us-west-2b,us-west-2a", ("us-west-2b", "us-west-2a")),
    "spread_zones": ("true", True),
    "nat_gateway": ("true", True),
    "nat_instance": ("false", False),
    "image_uri": ("public.example/ray@sha256:" + "0" * 64, "public.example/ray@sha256:" + "0" * 64),
    "image_build": ("codebuild", "codebuild"),
    "registry_secret_arn": (f"{SECRET}:registry", f"{SECRET}:registry"),
    "bucket_name": ("", ""),  # excludes the next two
    "retain_bucket": ("true", True),
    "object_version_days": ("30", 30),
    "data_buckets": ("my-data, other.data/images/2026,", ("my-data", "other.data/images/2026")),
    "mounts": (
        "data=s3://my-data/year=2026, All-1=s3://other",
        {"data": "s3://my-data/year=2026", "All-1": "s3://other"},
    ),
    "fsx_lustre": ("", ""),
    "fsx_lustre_gib": ("4800", 4800),
    "efs": ("", ""),
    "job_secrets": (f"{SECRET}:hf-AbCdEf, {SECRET}:team/wandb-1", (f"{SECRET}:hf-AbCdEf", f"{SECRET}:team/wandb-1")),
    "environment": ("HF_HOME=/tmp/hf, NCCL_DEBUG=INFO", {"HF_HOME": "/tmp/hf", "NCCL_DEBUG": "INFO"}),
    "root_volume_gib": ("200", 200),
    "worker_capacity_reservation_id": ("", ""),  # excludes several types
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
    assert GOOD.keys() == defaults().keys()
    args = load(cloud, **{key_of(name): text for name, (text, _) in GOOD.items()})
    assert vars(args) == {name: value for name, (_, value) in GOOD.items()}
    assert vars(RayClusterArgs(**{name: value for name, (_, value) in GOOD.items()})) == vars(args)


def test_an_existing_bucket_is_read(cloud: Cloud) -> None:
    assert load(cloud, bucketName="company-runs").bucket_name == "company-runs"


@pytest.mark.parametrize(("key", "value", "rule"), BAD)
def test_a_bad_value_is_refused_in_one_line(cloud: Cloud, key: str, value: str, rule: str) -> None:
    with pytest.raises(SettingError) as refused:
        load(cloud, **{key: value})
    message = str(refused.value)
    assert message.startswith(f"{key}: ")
    assert value.partition("=")[0] in message
    assert rule in message
    assert re.search("; [a-z]+ ", message)
    assert "\n" not in message


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("workerCout", "did you mean workerCount or"),
        ("worker_count", "did you mean workerCount or"),
        ("instanceType", "did you mean headInstanceType or workerInstanceTypes"),
        ("color", "Pulumi.yaml lists all keys."),
    ],
)
def test_unknown_keys_are_refused(cloud: Cloud, key: str, hint: str) -> None:
    with pytest.raises(pulumi.RunError) as refused:
        load(cloud, **{key: "secret"})
    assert str(refused.value).startswith(f"{key}: unknown configuration key; {hint}")
    assert str(refused.value).endswith(f" Remove it: `pulumi config rm {key}`")
    assert "secret" not in str(refused.value)


RESERVED = (
    "PATH", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_REGION",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_ROLE_ARN", "AWS_WEB_IDENTITY_TOKEN_FILE", "ECS_AGENT_URI",
    "AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE", "RAY_ON_ECS_CLUSTER", "RAY_AUTH_TOKEN", "PYTHONPATH",
)  # fmt: skip


@pytest.mark.parametrize("variable", RESERVED)
def test_variables_of_the_containers_are_refused(variable: str) -> None:
    with pytest.raises(SettingError, match=rf"^environment: '{variable}' is reserved for the cluster's containers; "):
        RayClusterArgs(environment={variable: "x"})


@pytest.mark.parametrize("variable", ["HF_TOKEN", "WANDB_API_KEY", "db_password", "CLIENT_SECRET", "MY_ACCESS_KEY"])
def test_a_variable_that_looks_like_a_secret_is_warned_about(warnings: list[str], variable: str) -> None:
    RayClusterArgs(environment={variable: "x", "RAY_ON_ECS_LOG": "debug", "TOKENIZERS_PARALLELISM": "false"})
    [line] = warnings
    assert line.startswith(f"environment: {variable} is plain in the state and in task definitions; give jobs secrets")


def test_keys_of_a_renamed_project_are_refused(cloud: Cloud) -> None:
    with pytest.raises(
        pulumi.RunError, match=r"^my-ray:spot: belongs to another project; rename it to ray-on-ecs:spot$"
    ):
        load(cloud, **{"my-ray:spot": "true"})
    assert load(cloud, **{"aws:region": "us-west-2", "pulumi:tags": '{"team": "vision"}'})


@pytest.mark.parametrize("key", ["alertEmail", "imageUri", "workerCount", "spot", "tags", "workerInstanceTypes"])
def test_secret_values_are_refused_and_not_shown(cloud: Cloud, key: str) -> None:
    cloud.secret_keys, value = (key,), "team@example.com"
    with pytest.raises(pulumi.RunError) as refused:
        load(cloud, **{key: value})
    assert str(refused.value).startswith(f"{key}: is stored as a secret, and its value would be plain in previews")
    assert value not in str(refused.value)


def test_secret_key_that_only_the_environment_names_is_refused(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PULUMI_CONFIG_SECRET_KEYS", f'["{cloud.project}:alertEmail"]')
    with pytest.raises(Refusal, match=r"^alertEmail: is stored as a secret"):
        load(cloud, alertEmail="team@example.com")


WRONG_ARNS = (
    "name", "arn:", "arn:aws", "arn:aws:kms:us-west-2", ":::::", "alias/company", "1234abcd-12ab-34cd",
    "arn:aws:iam::123456789012:role/x", "arn:aws:kms:us-west-2:123456789012:alias/company",
    "arn:aws:secretsmanager:us-west-2:12345:secret:x", "arn:aws:iam::123456789012:policy/", "arn:aws:iam::x:policy/a",
    "ARN:AWS:KMS:us-west-2:123456789012:key/1", "arn:aws:kms::123456789012:key/1", "arn:aws:s3:::bucket", "my key",
)  # fmt: skip
OF_ARNS = (
    *("registry_secret_arn", "job_secrets", "permissions_boundary"),
    *("task_policy_arns", "instance_policy_arns", "kms_key_arn"),
)


@pytest.mark.parametrize("field", OF_ARNS)
@pytest.mark.parametrize("arn", WRONG_ARNS)
def test_what_is_no_arn_of_its_kind_is_refused(field: str, arn: str) -> None:
    value: Any = (arn,) if isinstance(defaults()[field], tuple) else arn
    with pytest.raises(SettingError, match=rf"^{field}: '{re.escape(arn)}' is not the ARN of an? ") as refused:
        RayClusterArgs(**{field: value})
    assert "\n" not in str(refused.value)


LATER: dict[str, Any] = {
    "image_uri": "ray", "bucket_name": "Runs", "data_buckets": ("s3://data",), "registry_secret_arn": "name",
    "job_secrets": ("name",), "permissions_boundary": "name", "task_policy_arns": ("name",),
    "instance_policy_arns": ("name",), "kms_key_arn": "1234abcd-12ab", "tags": {"team": "a&b"},
}  # fmt: skip


@pytest.mark.parametrize("field", LATER)
def test_outputs_follow_the_rules_when_they_are_known(cloud: Cloud, field: str) -> None:
    def program() -> RayClusterArgs:
        def output(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(map(output, value))
            return {key: output(part) for key, part in value.items()} if isinstance(value, dict) else later(value)

        fields: dict[str, Any] = {"image_uri": "a/b:1"} if field == "registry_secret_arn" else {}
        return RayClusterArgs(**{**fields, field: output(LATER[field])})

    with pytest.raises(SettingError, match=f"^{field}: "):
        cloud.run(program)


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("tags", {"Name": "later"}, "uses a reserved key"),
        ("tags", {"a": "later", "A": "y"}, "differs only in case"),
        ("environment", {"RAY_AUTH_TOKEN": "later"}, "is reserved for"),
        ("environment", {"": "x"}, "is not the name of an environment variable"),
        ("environment", {"MY VAR": "x"}, "is not the name of an environment variable"),
        ("environment", {"1A": "x"}, "is not the name of an environment variable"),
        ("environment", {"A-B": "x"}, "is not the name of an environment variable"),
        ("environment", {"ÄRA": "x"}, "is not the name of an environment variable"),
    ],
)
def test_names_are_checked_also_of_later_values(cloud: Cloud, field: str, value: dict[str, Any], problem: str) -> None:
    def program() -> RayClusterArgs:
        outputs: Any = {key: later(text) if text == "later" else text for key, text in value.items()}
        return RayClusterArgs(**{field: outputs})

    with pytest.raises(SettingError, match=problem):
        cloud.run(program)


@pytest.mark.parametrize(
    ("key", "value"),
    [("availabilityZones", '["us-west-2b","us-west-2a"]'), ("workerInstanceTypes", "[]"), ("dataBuckets", ' ["a"]'),
     ("tags", '{"team":"vision"}'), ("environment", '[{"A": 1}]')],
)  # fmt: skip
def test_lists_as_json_are_refused(cloud: Cloud, key: str, value: str) -> None:
    with pytest.raises(
        SettingError,
        match=rf"^{key}: .* is in (braces|brackets); use text without them, separated by commas, as in a[,=]",
    ):
        load(cloud, **{key: value})


@pytest.mark.parametrize("key", ["tags", "environment"])
@pytest.mark.parametrize("value", ["A=1,A=2", "A=1,B=2,A=1", "A=1, A =1"])
def test_a_name_that_is_set_twice_is_refused(cloud: Cloud, key: str, value: str) -> None:
    with pytest.raises(SettingError, match=rf"^{key}: 'A' is set twice; set each name once$"):
        load(cloud, **{key: value})


def test_a_value_twice_beside_an_output_is_refused(cloud: Cloud) -> None:
    with pytest.raises(SettingError, match=r"^data_buckets: 'a-b,a-b' contains a value twice"):
        cloud.run(lambda: RayClusterArgs(data_buckets=(later("c-d"), "a-b", "a-b")))


@pytest.mark.parametrize(
    "name",
    ["b--usw2-az1--x-s3", "point-abc-s3alias", "x--ol-s3", "m.mrap", "t--table-s3", "192.168.1.1", "my..data",
     "xn--bucket", "sthree-bucket", "amzn-s3-demo-bucket", "ab", "Runs", "a_b", "-ab", "ab-", ".abc", "s3://abc",
     "a" * 64, "bucket/"],
)  # fmt: skip
def test_what_is_no_general_purpose_bucket_is_refused(name: str) -> None:
    with pytest.raises(SettingError, match=r"^bucket_name: '.*' is "):
        RayClusterArgs(bucket_name=name)


def test_a_key_of_another_project_may_be_set_here_too(cloud: Cloud) -> None:
    assert load(cloud, **{"network:vpcId": "vpc-9", "vpcId": "vpc-1", "subnetIds": "subnet-1"}).vpc_id == "vpc-1"


@pytest.mark.parametrize(
    "uri", ["registry.example/worker_count:latest", "worker_count.example/a:1", "a/b:worker_count", "a/spot:True"]
)
def test_names_within_a_value_stay_as_they_are(cloud: Cloud, warnings: list[str], uri: str) -> None:
    assert load(cloud, imageUri=uri).as_written(f"image_uri: {uri} and worker_count.") == (
        f"imageUri: {uri} and workerCount."
    )


PYTHON: list[tuple[str, Any, str]] = [
    ("worker_instance_types", "g5.xlarge", "'g5.xlarge' is not a list; use a list, also for a single value"),
    ("worker_instance_types", [], "'' is empty; use a family and a size, e.g. g5.xlarge"),
    ("worker_instance_types", ["g5.xlarge", 5], "5 is not a string; use text"),
    ("worker_instance_types", ["g5.xlarge", "g5.xlarge"], "'g5.xlarge,g5.xlarge' contains a value twice; "),
    ("worker_instance_types", later(["g5.xlarge"]), "must be known while Pulumi plans, and is an Output; use a plain"),
    ("worker_instance_types", [later("g5.xlarge")], "must be known while Pulumi plans, and contains an Output; "),
    ("worker_count", "2", "'2' is not an integer; use one, e.g. 2"),
    ("worker_count", 1.5, "1.5 is not an integer; use one"),
    ("worker_count", None, "None is not an integer; use one"),
    ("worker_count", later(2), "must be known while Pulumi plans, and is an Output; use a plain value"),
    ("root_volume_gib", True, "True is not an integer; use one, e.g. 100"),
    ("max_hourly_usd", "5", "'5' is not a number; use one, e.g. 5"),
    ("max_hourly_usd", True, "True is not a number; use one, e.g. 5"),
    ("object_version_days", "week", "'week' is not an integer; use one, e.g. 5"),
    ("fsx_lustre_gib", "1200GiB", "'1200GiB' is not an integer; use one, e.g. 1200"),
    ("sleep_after_minutes", "1h", "'1h' is not an integer; use one, e.g. 60"),
    *(("worker_efa", number, f"'{number}' must be auto, true or false") for number in (0, 1)),
    ("head_instance_type", 5, "5 is not a string; use text"),
    ("kms_key_arn", 5, "5 is not a string; use text"),
    ("role_path", later("/ml/"), "must be known while Pulumi plans, and is an Output; use a plain value"),
    ("spot", "yes", "'yes' is not a boolean; use true or false"),
    ("spot", 1, "1 is not a boolean; use true or false"),
    ("tags", ["a=b"], "['a=b'] is not a dictionary; use a dictionary of texts"),
    ("tags", later({}), "must be known while Pulumi plans, and is an Output; use a plain value"),
    ("tags", {"a": 1}, "1 is not a string; use text"),
    ("environment", {1: "A"}, "1 is not a string; use text"),
    ("environment", {"RAY_AUTH_TOKEN": "x"}, "'RAY_AUTH_TOKEN' is reserved for the cluster's containers; "),
    ("data_buckets", [later("one"), None], "None is not a string; use text"),
    ("subnet_ids", later(["subnet-a"]), "must be known while Pulumi plans, and is an Output; use a plain value"),
    ("max_workers", 1, "1 must be at least worker_count (2); raise it, or lower worker_count"),
    ("cpu_worker_count", -1, "-1 must not be negative; use a number, or 0"),
    ("on_demand_workers", 1, "1 requires spot; set both or neither"),
    ("vpc_id", "vpc-0a1b", "'vpc-0a1b' requires subnet_ids; set both or neither"),
]


@pytest.mark.parametrize(("field", "value", "line"), PYTHON)
def test_python_is_told_of_its_fields(field: str, value: Any, line: str) -> None:
    given: dict[str, Any] = {field: value}
    with pytest.raises(pulumi.RunError) as refused:
        RayClusterArgs(**given)
    assert str(refused.value).startswith(f"{field}: {line}")


def test_both_spellings_are_for_their_own_users(cloud: Cloud) -> None:
    with pytest.raises(SettingError, match=r"^maxWorkers: 1 must be at least workerCount \(2\); "):
        load(cloud, maxWorkers="1")
    with pytest.raises(SettingError, match=r"^max_workers: 1 must be at least worker_count \(2\); "):
        RayClusterArgs(max_workers=1)


def test_values_keep_their_spelling(cloud: Cloud) -> None:
    with pytest.raises(SettingError) as refused:
        load(cloud, tags="worker_count=a|b")
    assert "'worker_count=a|b'" in str(refused.value)


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
    assert RayClusterArgs(image_uri=uri).image_uri == uri


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("idle_timeout_minutes", 15),
        ("idle_timeout_minutes", 1440),
        ("sleep_after_minutes", 15),
        ("sleep_after_minutes", 1440),
        ("max_workers", 2),
        ("max_workers", 0),
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
    assert getattr(RayClusterArgs(**settings), field) == value


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
        ({"minWorkers": "3"}, scale(3, 3, 3, 3)),
        ({"idleTimeoutMinutes": "0"}, scale(2, 0, 2, 2, idle=0)),
        ({"idleTimeoutMinutes": "60"}, scale(2, 0, 2, 2, idle=60)),
    ],
)
def test_counts_and_idle_time_give_the_scale(cloud: Cloud, config: dict[str, str], workers: Scale) -> None:
    assert load(cloud, **config).scale("default") == workers


def test_alerts_combine_email_and_budget(cloud: Cloud) -> None:
    args = load(cloud, alertEmail=" team+gpu@mail.example.co.uk ", monthlyBudgetUsd="900")
    assert (args.alert_email, args.monthly_budget_usd) == ("team+gpu@mail.example.co.uk", 900)


ECR = "123456789012.dkr.ecr.us-west-2.amazonaws.com/ray:1"
ELSEWHERE = "registry.example/ray:1"


@pytest.mark.parametrize(
    ("config", "line"),
    [
        (
            {"natGateway": "false", "vpcId": "vpc-0a1b", "subnetIds": "subnet-0c2d"},
            "natGateway: false cannot be combined with vpcId (vpc-0a1b); ",
        ),
        (
            {"natGateway": "false", "imageUri": ELSEWHERE},
            "natGateway: false leaves the registry of imageUri",
        ),
        (
            {"natInstance": "true", "natGateway": "false"},
            "natInstance: true replaces the NAT gateway, and natGateway (false) wants no internet access; leave out",
        ),
        (
            {"natInstance": "true", "vpcId": "vpc-0a1b", "subnetIds": "subnet-0c2d"},
            "natInstance: true cannot be combined with vpcId (vpc-0a1b); leave it out",
        ),
        (
            {"registrySecretArn": f"{SECRET}:x", "imageUri": ECR},
            f"registrySecretArn: '{SECRET}:x' cannot be combined with imageUri ({ECR}); leave it empty",
        ),
        (
            {"bucketName": "company-runs", "retainBucket": "true"},
            "retainBucket: true cannot be combined with bucketName (company-runs); leave it out",
        ),
        (
            {"bucketName": "company-runs", "objectVersionDays": "7"},
            "objectVersionDays: 7 cannot be combined with bucketName (company-runs); leave it out",
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
            {"minCpuWorkers": "1"},
            "cpuWorkerInstanceTypes: '' is required for up to 1 CPU workers; use a type, e.g. c6i.2xlarge",
        ),
        ({"minWorkers": "3", "maxWorkers": "2"}, "maxWorkers: 2 must be at least minWorkers (3); raise it, or"),
        (
            {"cpuWorkerInstanceTypes": "c6i.large", "cpuWorkerCount": "2", "maxCpuWorkers": "1"},
            "maxCpuWorkers: 1 must be at least cpuWorkerCount (2)",
        ),
        (
            {"subnetIds": "subnet-0c2d,subnet-0c2d", "vpcId": "vpc-0a1b"},
            "subnetIds: 'subnet-0c2d,subnet-0c2d' contains",
        ),
        (
            {
                **{"sleepAfterMinutes": "60", "minWorkers": "1", "idleTimeoutMinutes": "0"},
                "workerPools": '{"h100": {"instanceTypes": ["p5.48xlarge"], "max": 2, "min": 1}}',
            },
            "sleepAfterMinutes: 60 cannot be combined with minWorkers (1) and workerPools.h100.min (1) and "
            "idleTimeoutMinutes (0); let all workers scale in, or set sleepAfterMinutes to 0",
        ),
    ],
)
def test_settings_that_do_not_go_together_are_refused(cloud: Cloud, config: dict[str, str], line: str) -> None:
    with pytest.raises(SettingError) as refused:
        load(cloud, **config)
    assert str(refused.value).startswith(line)


H100 = {"instance_types": ["p5.48xlarge"], "max": 2}
L4 = {"instance_types": ["g6.xlarge"], "max": 2}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"min_workers": 1}, "min_workers (1)"),
        ({"idle_timeout_minutes": 0}, "idle_timeout_minutes (0)"),
        ({"cpu_worker_instance_types": ["c6i.large"], "min_cpu_workers": 2}, "min_cpu_workers (2)"),
        ({"worker_pools": {"h100": {**H100, "min": 1}}}, "worker_pools.h100.min (1)"),
        (
            {"worker_pools": {"h100": {**H100, "min": 1, "zones": ["us-west-2a", "us-west-2b"]}}},
            "worker_pools.h100.min (1)",
        ),
        (
            {"worker_pools": {"l4": {**L4, "min": 2}, "h100": {**H100, "min": 1}}},
            "worker_pools.h100.min (1) and worker_pools.l4.min (2)",
        ),
        (
            {"min_workers": 2, "worker_pools": {"l4": L4, "h100": {**H100, "min": 1}}, "idle_timeout_minutes": 0},
            "min_workers (2) and worker_pools.h100.min (1) and idle_timeout_minutes (0)",
        ),
    ],
)
def test_sleep_without_scale_in_is_refused(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(SettingError) as refused:
        RayClusterArgs(sleep_after_minutes=60, **fields)
    hint = "let all workers scale in, or set sleep_after_minutes to 0: a head with workers does not sleep"
    assert str(refused.value) == f"sleep_after_minutes: 60 cannot be combined with {named}; {hint}"
    assert RayClusterArgs(**fields).sleep_after_minutes == 0
    assert RayClusterArgs(sleep_after_minutes=60, worker_pools={"l4": L4, "h100": H100}).sleep_after_minutes == 60


def test_nat_instance_outlives_idle_workers() -> None:
    sleeps: dict[str, Any] = {"sleep_after_minutes": 20, "nat_instance": True}
    assert RayClusterArgs(**sleeps, idle_timeout_minutes=20 + UNNEEDED_MINUTES).nat_instance
    assert RayClusterArgs(nat_instance=True, idle_timeout_minutes=51).nat_instance, "always on"
    assert RayClusterArgs(sleep_after_minutes=20, idle_timeout_minutes=51).sleep_after_minutes
    with pytest.raises(SettingError) as refused:
        RayClusterArgs(**sleeps, idle_timeout_minutes=51)
    assert str(refused.value) == (
        "idle_timeout_minutes: 51 exceeds sleep_after_minutes (20) + 30: with nat_instance the way to ECS could end "
        "before the workers; use at most 50, a longer sleep_after_minutes, or nat_instance false"
    )


def test_nat_gateway_off_accepts_ecr_images(cloud: Cloud) -> None:
    assert not load(cloud, natGateway="false", imageUri=ECR).nat_gateway
    assert not load(cloud, natGateway="false").nat_gateway


def test_cpu_workers_scale_as_workers_do(cloud: Cloud) -> None:
    options = {"cpuWorkerInstanceTypes": "c6i.large", "cpuWorkerCount": "1", "minCpuWorkers": "0", "maxCpuWorkers": "3"}
    args = load(cloud, **options, idleTimeoutMinutes="30").scale("cpu")
    assert args == scale(1, 0, 3, 1)


def test_workers_can_be_withdrawn_whatever_their_market(cloud: Cloud) -> None:
    assert load(cloud, workerCount="0", spot="true", onDemandWorkers="1").scale("default").max_count == 0


def test_two_file_systems_for_one_folder_are_refused() -> None:
    network: dict[str, Any] = {"vpc_id": "vpc-0a1b", "subnet_ids": ["subnet-0c2d"]}
    with pytest.raises(SettingError, match=r"^fsx_lustre_gib: 1200 cannot be combined with fsx_lustre \(fs-01234567\)"):
        RayClusterArgs(**network, fsx_lustre="fs-01234567", fsx_lustre_gib=1200)
