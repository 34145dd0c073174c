"""Existing S3 buckets: the AWS provider's answer, and facts that it has no data source for, by boto3."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import boto3
import pulumi
import pulumi_aws as aws
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from infra.errors import is_absent

REDIRECTED = ("MovedPermanently", "PermanentRedirect", "StatusCode: 301")


def get(name: str, opts: pulumi.InvokeOptions | None) -> Any:
    """Answer for a bucket; S3 redirects requests from another region, which the provider reports as an error."""
    try:
        return aws.s3.get_bucket(bucket=name, opts=opts)
    except Exception as error:
        if any(text in str(error) for text in REDIRECTED):
            return SimpleNamespace(bucket_region="another region")
        raise


def s3(region: str) -> Any:
    """S3 client, with the credentials of the environment or of the stack's `aws:profile`."""
    config = Config(connect_timeout=5, read_timeout=10, retries={"total_max_attempts": 2})
    return boto3.Session(profile_name=aws.config.profile).client("s3", region_name=region, config=config)


def facts(name: str, region: str, account: str, opts: pulumi.InvokeOptions | None) -> Any:
    """Facts that the AWS provider has no data source for, each None if S3 does not tell."""
    client = s3(region)

    def told(call: Callable[..., Any], **more: str) -> Any:
        try:
            return call(Bucket=name, **more)
        except (BotoCoreError, ClientError) as error:
            return {} if is_absent(str(error)) else None

    versioning, lifecycle = told(client.get_bucket_versioning), told(client.get_bucket_lifecycle_configuration)
    expire = lifecycle is None or any(
        rule["Status"] == "Enabled" and "NoncurrentVersionExpiration" in rule for rule in lifecycle.get("Rules", [])
    )
    lock = (told(client.get_object_lock_configuration) or {}).get("ObjectLockConfiguration", {}).get("Rule", {})
    default = lock.get("DefaultRetention", {})
    encryption = told(client.get_bucket_encryption) or {"ServerSideEncryptionConfiguration": {"Rules": [{}]}}
    [rule] = encryption["ServerSideEncryptionConfiguration"]["Rules"]
    own = told(client.head_bucket) is None or told(client.head_bucket, ExpectedBucketOwner=account) is not None
    return SimpleNamespace(
        is_own=own,
        versions_expire=expire or (versioning or {}).get("Status") != "Enabled",
        retention=" ".join(f"{default[unit]} {unit.lower()}" for unit in ("Days", "Years") if unit in default),
        kms_key=rule.get("ApplyServerSideEncryptionByDefault", {}).get("KMSMasterKeyID", ""),
    )
