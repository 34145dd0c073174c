"""S3 bucket of the runs: checkpoints, logs and results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pulumi
import pulumi_aws as aws

from infra.definitions import policies
from infra.types import ResourceRef
from ray_on_ecs.contract import CLUSTERS_PREFIX

# S3 keeps, and charges for, the parts of an incomplete multipart upload until a lifecycle rule removes them.
# https://docs.aws.amazon.com/AmazonS3/latest/userguide/mpuoverview.html
UNFINISHED_UPLOAD_DAYS = 3


@dataclass(frozen=True, kw_only=True)
class StorageArgs:
    """Inputs of Storage; an `existing` bucket is used instead of a new one, and not changed."""

    retain: bool = False
    version_days: int = 0
    existing: pulumi.Input[str] = ""
    partition: str = "aws"
    kms_key_arn: pulumi.Input[str] = ""


class Storage(pulumi.ComponentResource):
    """Private, encrypted bucket, deleted with the stack unless `retain` is set; or an existing bucket."""

    bucket: ResourceRef

    def __init__(self, name: str, args: StorageArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("ray-on-ecs:infra:Storage", name, None, opts)
        if args.existing:
            arn = pulumi.Output.concat(f"arn:{args.partition}:s3:::", args.existing)
            self.bucket = ResourceRef(name=pulumi.Output.from_input(args.existing), arn=arn)
            self.register_outputs({"bucket_name": args.existing})
            return
        # The bucket's settings are retained with it: without its policy it would accept plain HTTP.
        child_opts = pulumi.ResourceOptions(parent=self, retain_on_delete=args.retain)
        bucket = aws.s3.Bucket(f"{name}-bucket", force_destroy=not args.retain, opts=child_opts)
        self.bucket = ResourceRef(name=bucket.bucket, arn=bucket.arn)
        self._keep_private(name, child_opts)
        self._encrypt(name, args.kms_key_arn, child_opts)
        # The rule for noncurrent versions takes effect only on a bucket whose versioning is already enabled.
        after = pulumi.ResourceOptions()
        if args.version_days:
            versions = aws.s3.BucketVersioning(
                f"{name}-versions",
                bucket=self.bucket.name,
                versioning_configuration={"status": "Enabled"},
                opts=child_opts,
            )
            after = pulumi.ResourceOptions(depends_on=[versions])
        self._expire(name, args.version_days, pulumi.ResourceOptions.merge(child_opts, after))
        self.register_outputs({"bucket_name": self.bucket.name})

    def _keep_private(self, name: str, opts: pulumi.ResourceOptions) -> None:
        block = aws.s3.BucketPublicAccessBlock(
            f"{name}-public-access-block",
            bucket=self.bucket.name,
            block_public_acls=True,
            block_public_policy=True,
            ignore_public_acls=True,
            restrict_public_buckets=True,
            opts=opts,
        )
        aws.s3.BucketOwnershipControls(
            f"{name}-ownership",
            bucket=self.bucket.name,
            rule={"object_ownership": "BucketOwnerEnforced"},
            opts=opts,
        )
        aws.s3.BucketPolicy(
            f"{name}-tls-only",
            bucket=self.bucket.name,
            policy=pulumi.Output.json_dumps(self.bucket.arn.apply(lambda arn: policies.tls_only(bucket_arn=arn))),
            # S3 answers 409 to a bucket policy and a public access block at the same moment.
            opts=pulumi.ResourceOptions.merge(opts, pulumi.ResourceOptions(depends_on=[block])),
        )

    def _encrypt(self, name: str, kms_key_arn: pulumi.Input[str], opts: pulumi.ResourceOptions) -> None:
        """Default encryption with S3 managed keys, or with a KMS key and an S3 Bucket Key.

        A Bucket Key avoids a KMS request for each object.
        https://docs.aws.amazon.com/AmazonS3/latest/userguide/bucket-key.html
        """
        by_default: Any = {
            "sse_algorithm": "aws:kms" if kms_key_arn else "AES256",
            "kms_master_key_id": kms_key_arn or None,
        }
        aws.s3.BucketServerSideEncryptionConfiguration(
            f"{name}-encryption",
            bucket=self.bucket.name,
            rules=[
                {
                    "apply_server_side_encryption_by_default": by_default,
                    "bucket_key_enabled": bool(kms_key_arn) or None,
                }
            ],
            opts=opts,
        )

    def _expire(self, name: str, version_days: int, opts: pulumi.ResourceOptions) -> None:
        """Lifecycle rules for incomplete uploads and noncurrent versions.

        The latter also apply without versioning: versions may remain from a time when `version_days` was set. The head
        writes its state every ten seconds, so its versions stay for a day.
        """
        old = {"noncurrent_days": max(version_days, 1)}
        marker = {"expired_object_delete_marker": True}
        everything: Any = {"status": "Enabled", "filter": {"prefix": ""}}
        rules: list[Any] = [
            {
                "id": "expire-unfinished-uploads",
                "abort_incomplete_multipart_upload": {"days_after_initiation": UNFINISHED_UPLOAD_DAYS},
            },
            {"id": "expire-old-versions", "noncurrent_version_expiration": old, "expiration": marker},
            {
                "id": "expire-old-versions-of-clusters",
                "filter": {"prefix": f"{CLUSTERS_PREFIX}/"},
                "noncurrent_version_expiration": {"noncurrent_days": 1},
            },
        ]
        aws.s3.BucketLifecycleConfiguration(
            f"{name}-lifecycle",
            bucket=self.bucket.name,
            rules=[{**everything, **rule} for rule in rules],
            opts=opts,
        )
