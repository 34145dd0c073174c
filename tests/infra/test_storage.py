"""S3 bucket: private, encrypted, and deleted with the stack or retained."""

from __future__ import annotations

import json

import pytest

from infra.storage import Storage, StorageArgs
from tests.infra.fake_aws import Cloud

PROTECTION = (
    "storage-public-access-block",
    "storage-ownership",
    "storage-tls-only",
    "storage-encryption",
    "storage-lifecycle",
)


def storage(cloud: Cloud, retain: bool = False) -> Storage:
    """A bucket with valid defaults."""
    return cloud.run(lambda: Storage("storage", StorageArgs(retain=retain)))


def test_bucket_is_force_destroyed(cloud: Cloud) -> None:
    storage(cloud)
    bucket = cloud.resources["storage-bucket"]
    assert bucket.inputs["forceDestroy"] is True
    assert not bucket.retain_on_delete


def test_retained_bucket_keeps_its_settings(cloud: Cloud) -> None:
    storage(cloud, retain=True)
    assert cloud.resources["storage-bucket"].inputs["forceDestroy"] is False
    for name in ("storage-bucket", *PROTECTION):
        assert cloud.resources[name].retain_on_delete, name


def test_nothing_in_the_bucket_can_be_public(cloud: Cloud) -> None:
    storage(cloud)
    block = cloud.resources["storage-public-access-block"].inputs
    switches = ("blockPublicAcls", "blockPublicPolicy", "ignorePublicAcls", "restrictPublicBuckets")
    assert all(block[switch] is True for switch in switches)


def test_the_bucket_alone_decides_who_owns_its_objects(cloud: Cloud) -> None:
    storage(cloud)
    rule = cloud.resources["storage-ownership"].inputs["rule"]
    assert rule == {"objectOwnership": "BucketOwnerEnforced"}


def test_objects_are_encrypted_at_rest(cloud: Cloud) -> None:
    storage(cloud)
    (rule,) = cloud.resources["storage-encryption"].inputs["rules"]
    assert rule["applyServerSideEncryptionByDefault"] == {"sseAlgorithm": "AES256"}


def test_requests_without_tls_are_refused(cloud: Cloud) -> None:
    storage(cloud)
    tls_only = cloud.resources["storage-tls-only"]
    (statement,) = json.loads(tls_only.inputs["policy"])["Statement"]
    assert statement["Effect"] == "Deny"
    assert statement["Resource"] == ["arn:aws:s3:::training-bucket", "arn:aws:s3:::training-bucket/*"]
    assert "storage-public-access-block" in tls_only.dependencies


def test_parts_of_broken_uploads_expire(cloud: Cloud) -> None:
    storage(cloud)
    rule, *_ = cloud.resources["storage-lifecycle"].inputs["rules"]
    assert rule == {
        "id": "expire-unfinished-uploads",
        "status": "Enabled",
        "filter": {"prefix": ""},
        "abortIncompleteMultipartUpload": {"daysAfterInitiation": 3.0},
    }


@pytest.mark.parametrize(("days", "expected"), [(0, 1), (30, 30)])
def test_old_versions_expire(cloud: Cloud, days: int, expected: int) -> None:
    cloud.run(lambda: Storage("storage", StorageArgs(version_days=days)))
    _, rule, of_state = cloud.resources["storage-lifecycle"].inputs["rules"]
    assert rule["noncurrentVersionExpiration"] == {"noncurrentDays": expected}
    assert rule["expiration"] == {"expiredObjectDeleteMarker": True}
    assert of_state["filter"] == {"prefix": "clusters/"}, "the head writes its state each ten seconds"
    assert of_state["noncurrentVersionExpiration"] == {"noncurrentDays": 1}
    assert ("storage-versions" in cloud.resources) == (days > 0)
    if days:
        assert "storage-versions" in cloud.resources["storage-lifecycle"].dependencies


def test_an_existing_bucket_is_used_and_not_changed(cloud: Cloud) -> None:
    bucket = cloud.run(lambda: Storage("storage", StorageArgs(existing="company-runs", partition="aws-cn")))
    assert cloud.resources.keys() == {"storage"}
    assert cloud.value(bucket.bucket.name) == "company-runs"
    assert cloud.value(bucket.bucket.arn) == "arn:aws-cn:s3:::company-runs"


@pytest.mark.parametrize("name", PROTECTION)
def test_every_setting_is_one_of_this_bucket(cloud: Cloud, name: str) -> None:
    storage(cloud)
    assert cloud.resources[name].inputs["bucket"] == "training-bucket"
