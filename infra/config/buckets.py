"""Existing S3 buckets: the AWS provider's answer, and facts that it has no data source for, by boto3."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any

import pulumi
import pulumi_aws as aws

from infra.config.clients import ERRORS, client
from infra.config.together import in_threads
from infra.errors import is_absent
from ray_on_ecs.contract import RUNS_PREFIX

REDIRECTED = ("MovedPermanently", "PermanentRedirect", "StatusCode: 301")
# Storage classes whose objects have to be restored before they can be read.
# https://docs.aws.amazon.com/AmazonS3/latest/userguide/archived-objects.html
ARCHIVES = ("GLACIER", "DEEP_ARCHIVE")
# Requests for the facts of the stack's own bucket, and of one with data.
OF_RUNS = (
    "head_bucket",
    "get_bucket_versioning",
    "get_bucket_lifecycle_configuration",
    "get_object_lock_configuration",
    "get_bucket_encryption",
)
OF_DATA = ("get_bucket_request_payment", "get_bucket_encryption")


def get(name: str, opts: pulumi.InvokeOptions | None) -> Any:
    """Answer for a bucket; S3 redirects requests from another region, which the provider reports as an error."""
    try:
        return aws.s3.get_bucket(bucket=name, opts=opts)
    except Exception as error:
        if any(text in str(error) for text in REDIRECTED):
            return SimpleNamespace(bucket_region="another region")
        raise


class Facts:
    """Facts that the AWS provider has no data source for, from requests to S3, which may refuse them."""

    def __init__(self, name: str, region: str, account: str, requests: Sequence[str], opts: Any = None) -> None:
        """Start the requests, which are names of a client's methods."""
        s3 = client("s3", region)
        calls = {request: partial(getattr(s3, request), Bucket=name) for request in requests}
        if "head_bucket" in calls:
            calls["of_account"] = partial(calls["head_bucket"], ExpectedBucketOwner=account)
        self._asked = dict(zip(calls, in_threads(*calls.values()), strict=True))

    def _answer(self, request: str) -> Any:
        try:
            return self._asked[request].result()
        except ERRORS as error:
            return {} if is_absent(str(error)) else None

    @property
    def is_own(self) -> bool:
        """True if the bucket belongs to this account."""
        return self._answer("head_bucket") is None or self._answer("of_account") is not None

    @property
    def versions_expire(self) -> bool:
        """False if noncurrent versions of runs stay for ever."""
        versioning = self._answer("get_bucket_versioning") or {}
        if versioning.get("Status") != "Enabled" or self._rules is None:
            return True
        of_all = [rule for rule, prefix in self._of_runs() if f"{RUNS_PREFIX}/".startswith(prefix)]
        return any("NoncurrentVersionExpiration" in rule for rule in of_all)

    @property
    def expiration(self) -> str:
        """Age or date at which a lifecycle rule deletes runs, or empty."""
        for rule, _ in self._of_runs():
            after = rule.get("Expiration", {})
            if "Days" in after:
                return f"after {after['Days']} days"
            if "Date" in after:
                return f"on {after['Date']:%Y-%m-%d}"
        return ""

    @property
    def archive(self) -> str:
        """Storage class of ARCHIVES to which a lifecycle rule moves runs, or empty."""
        moves = [move["StorageClass"] for rule, _ in self._of_runs() for move in rule.get("Transitions", ())]
        return next((name for name in moves if name in ARCHIVES), "")

    @property
    def retention(self) -> str:
        """Default retention of Object Lock, or empty."""
        lock = (self._answer("get_object_lock_configuration") or {}).get("ObjectLockConfiguration", {})
        default = lock.get("Rule", {}).get("DefaultRetention", {})
        return " ".join(f"{default[unit]} {unit.lower()}" for unit in ("Days", "Years") if unit in default)

    @property
    def kms_key(self) -> str:
        """KMS key that encrypts new objects, empty for S3's."""
        answer = self._answer("get_bucket_encryption") or {}
        [rule] = answer.get("ServerSideEncryptionConfiguration", {}).get("Rules") or [{}]
        return rule.get("ApplyServerSideEncryptionByDefault", {}).get("KMSMasterKeyID", "")

    @property
    def payer(self) -> str | None:
        """BucketOwner or Requester."""
        return (self._answer("get_bucket_request_payment") or {}).get("Payer")

    @cached_property
    def _rules(self) -> list[Any] | None:
        """Enabled lifecycle rules, or None if S3 does not tell."""
        answer = self._answer("get_bucket_lifecycle_configuration")
        return None if answer is None else [rule for rule in answer.get("Rules", []) if rule["Status"] == "Enabled"]

    def _of_runs(self) -> Iterator[tuple[Any, str]]:
        """Lifecycle rules for some objects of runs, which have no tags, and their prefixes."""
        for rule in self._rules or ():
            prefix, has_tags = _filter(rule)
            if not has_tags and (prefix.startswith(f"{RUNS_PREFIX}/") or f"{RUNS_PREFIX}/".startswith(prefix)):
                yield rule, prefix


def _filter(rule: Any) -> tuple[str, bool]:
    """Prefix of a lifecycle rule, also in its older form, and True if it is for objects with tags."""
    where = rule.get("Filter", {})
    both = where.get("And", {})
    prefix = rule.get("Prefix") or where.get("Prefix") or both.get("Prefix") or ""
    return prefix, bool(where.get("Tag") or both.get("Tags"))
