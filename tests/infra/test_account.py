"""Pre-flight checks of existing resources: absent, unsuitable, or not readable."""

from __future__ import annotations

import re
from typing import Any

import pytest
from infra.config.settings import Settings, key_of

from infra.config import account
from infra.errors import SettingError
from tests.infra.fake_aws import ACCOUNT, DIGEST, REGION, Cloud

AMI = "ami-0123456789abcdef0"
ROOT = {"deviceName": "/dev/xvda", "ebs": {"volume_size": "30"}}
LARGE = {"deviceName": "/dev/xvda", "ebs": {"volume_size": "200"}}
GOOD_AMI = {"architecture": "x86_64", "rootDeviceName": "/dev/xvda", "blockDeviceMappings": [ROOT]}
KEY = f"arn:aws:kms:{REGION}:{ACCOUNT}:key/1"
SECRET = f"arn:aws:secretsmanager:{REGION}:{ACCOUNT}:secret:registry"
REGISTRY = {"image_uri": "registry.example/ray@sha256:" + "a" * 64}
ECR = f"{ACCOUNT}.dkr.ecr.{REGION}.amazonaws.com/team/ray"

# Setting, its value, other required settings, and the AWS function that is called.
ROWS: list[tuple[str, Any, dict[str, Any], str]] = [
    ("permissions_boundary", f"arn:aws:iam::{ACCOUNT}:policy/boundary", {}, "getPolicy"),
    ("task_policy_arns", (f"arn:aws:iam::{ACCOUNT}:policy/read-features",), {}, "getPolicy"),
    ("instance_policy_arns", (f"arn:aws:iam::{ACCOUNT}:policy/session-key",), {}, "getPolicy"),
    ("registry_secret_arn", SECRET, REGISTRY, "getSecret"),
    ("job_secrets", (f"arn:aws:secretsmanager:{REGION}:{ACCOUNT}:secret:hf-abcdef",), {}, "getSecret"),
    ("kms_key_arn", KEY, {}, "getKey"),
    ("kms_key_arn", KEY, {}, "getRole"),
    ("bucket_name", "company-runs", {}, "getBucket"),
    ("data_buckets", ("my-data/images",), {}, "getBucket"),
    ("image_uri", f"{ECR}:v1", {}, "getImage"),
    ("image_uri", f"{ECR}@{DIGEST}", {}, "getImage"),
    ("head_ami_id", AMI, {}, "getAmi"),
    ("worker_ami_id", AMI, {}, "getAmi"),
]
# Settings, unsuitable answers, and the error message.
UNFIT = [
    (
        {"kms_key_arn": KEY},
        {"key": {"enabled": False, "keyState": "PendingDeletion"}},
        "is PendingDeletion and of type",
    ),
    ({"kms_key_arn": KEY}, {"key": {"keySpec": "RSA_2048"}}, "is Enabled and of type RSA_2048; use an enabled, symm"),
    ({"bucket_name": "runs"}, {"bucket_region": "eu-west-1"}, "is in another region, but the stack is in us-west-2; "),
    (
        {"worker_ami_id": AMI},
        {"amis": {AMI: {**GOOD_AMI, "architecture": "arm64"}}},
        "is for arm64 with root device /dev/xvda; use one derived from the Amazon ECS-optimized AMI",
    ),
    (
        {"head_ami_id": AMI},
        {"amis": {AMI: {**GOOD_AMI, "rootDeviceName": "/dev/sda1"}}},
        "is for x86_64 with root device /dev/sda1; ",
    ),
    (
        {"worker_ami_id": AMI},
        {"amis": {AMI: {**GOOD_AMI, "blockDeviceMappings": [LARGE]}}},
        "has a root volume of 200 GiB, which must not exceed rootVolumeGib (100); raise rootVolumeGib to 200",
    ),
]


def check(cloud: Cloud, **settings: Any) -> None:
    """Ask about settings that are otherwise the defaults."""
    cloud.amis = cloud.amis or {AMI: GOOD_AMI}
    cloud.run(lambda: account.check(Settings(**settings), REGION, ACCOUNT))


@pytest.mark.parametrize(("field", "value", "more", "function"), ROWS)
def test_absent_resources_are_refused(
    cloud: Cloud, warnings: list[str], field: str, value: Any, more: dict[str, Any], function: str
) -> None:
    values, named = {**more, field: value}, value[0] if isinstance(value, tuple) else str(value).lower()
    check(cloud, **values)
    assert any(token.endswith(f":{function}") for token, _ in cloud.calls)
    assert not warnings
    cloud.silent = (function,)
    check(cloud, **values)
    [line] = warnings
    assert re.fullmatch(
        rf"{key_of(field)}: {named} could not be looked up with \w+:\w+ \(.*AccessDenied.*\); continuing", line
    )
    cloud.silent, cloud.absent = (), (function,)
    with pytest.raises(SettingError) as refused:
        check(cloud, **values)
    message = str(refused.value)
    assert message.startswith(f"{key_of(field)}: '{named}' could not be found (")
    assert re.search(r"\); (use|push|create) ", message)
    assert "\n" not in message


@pytest.mark.parametrize(("settings", "answers", "line"), UNFIT)
def test_unsuitable_resources_are_refused(
    cloud: Cloud, settings: dict[str, Any], answers: dict[str, Any], line: str
) -> None:
    vars(cloud).update(answers)
    with pytest.raises(SettingError) as refused:
        check(cloud, **settings)
    [(field, value)] = settings.items()
    assert str(refused.value).startswith(f"{key_of(field)}: '{value}' {line}")


def test_data_bucket_of_another_region_is_warned_about(cloud: Cloud, warnings: list[str]) -> None:
    cloud.bucket_region = "eu-west-1"
    check(cloud, data_buckets=("my-data",))
    [line] = warnings
    assert line.startswith("dataBuckets: 'my-data' is in another region, but the stack is in us-west-2; ")
    assert "charges for data transfer" in line


def test_images_of_other_accounts_are_not_looked_up(cloud: Cloud) -> None:
    check(cloud, image_uri=f"{ECR}:v1".replace(ACCOUNT, "210987654321"))
    assert not cloud.calls


def test_ecr_image_lookup_by_digest_or_tag(cloud: Cloud) -> None:
    for uri in (f"{ECR}:v1", f"{ECR}@{DIGEST}", f"{ECR}:v1@{DIGEST}"):
        check(cloud, image_uri=uri)
    asked = [arguments for _, arguments in cloud.calls]
    assert [(item.get("imageTag"), item.get("imageDigest")) for item in asked] == [
        ("v1", None),
        (None, DIGEST),
        (None, DIGEST),
    ]
    assert {item["repositoryName"] for item in asked} == {"team/ray"}


@pytest.mark.parametrize(
    "settings",
    [
        {"registry_secret_arn": SECRET.replace(REGION, "eu-west-1"), **REGISTRY},
        {"kms_key_arn": KEY.replace(REGION, "eu-west-1")},
        {"job_secrets": (SECRET.replace(REGION, "eu-west-1"),)},
    ],
    ids=["registry", "key", "job"],
)
def test_resources_of_another_region_are_refused(cloud: Cloud, settings: dict[str, Any]) -> None:
    with pytest.raises(SettingError, match="is in eu-west-1, but the stack is in us-west-2; "):
        check(cloud, **settings)
