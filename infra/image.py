"""Training image: built locally, pushed to an ECR repository, and referenced by its digest."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pulumi
import pulumi_aws as aws
import pulumi_awsx as awsx

from infra.tags import tags

# Tasks pull by digest when they restart, so an image must outlive later builds.
UNTAGGED_IMAGES_KEPT = 10
# BuildKit's output in place of awsx's `push`: an instance unpacks zstd layers faster than gzip layers. Force also
# converts layers of the base image and of earlier builds. Without a level above 0 the provider ignores the compression.
# https://docs.docker.com/build/exporters/image-registry/
# https://github.com/pulumi/pulumi-docker-build/blob/main/provider/internal/export.go
OUTPUT = "type=registry,oci-mediatypes=true,compression=zstd,compression-level=3,force-compression=true"


@dataclass(frozen=True, kw_only=True)
class ImageArgs:
    """Inputs of Image; paths are relative to the project's root."""

    context: str
    dockerfile: str
    kms_key_arn: pulumi.Input[str] = ""


class Image(pulumi.ComponentResource):
    """ECR repository and the image of all Ray nodes."""

    image_uri: pulumi.Output[str]

    def __init__(self, name: str, args: ImageArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("ray-on-ecs:infra:Image", name, None, opts)
        repository = self._repository(name, args.kms_key_arn)
        image = awsx.ecr.Image(
            f"{name}-build",
            awsx.ecr.ImageArgs(
                repository_url=repository.repository_url,
                context=args.context,
                dockerfile=args.dockerfile,
                # The architecture of the instances, which may differ from the building machine's.
                platform="linux/amd64",
                # awsx's default name is the same in every cluster of a program.
                image_name=name,
            ),
            opts=pulumi.ResourceOptions(parent=self, transforms=[push_zstd]),
        )
        self.image_uri = image.image_uri
        self.register_outputs({"image_uri": self.image_uri})

    def _repository(self, name: str, kms_key_arn: pulumi.Input[str]) -> aws.ecr.Repository:
        encryption = None
        if kms_key_arn:
            encryption = [aws.ecr.RepositoryEncryptionConfigurationArgs(encryption_type="KMS", kms_key=kms_key_arn)]
        repository = aws.ecr.Repository(
            f"{name}-repository",
            # ECR refuses to delete a repository with images otherwise.
            force_delete=True,
            encryption_configurations=encryption,
            image_scanning_configuration=aws.ecr.RepositoryImageScanningConfigurationArgs(scan_on_push=True),
            tags=tags(f"{name}-repository"),
            opts=pulumi.ResourceOptions(parent=self),
        )
        aws.ecr.LifecyclePolicy(
            f"{name}-lifecycle",
            repository=repository.name,
            policy=json.dumps(lifecycle_policy()),
            opts=pulumi.ResourceOptions(parent=self),
        )
        return repository


def push_zstd(args: pulumi.ResourceTransformArgs) -> pulumi.ResourceTransformResult | None:
    """Transform of the build inside awsx's component, which has no argument for the compression of layers."""
    if args.type_ != "docker-build:index:Image":
        return None
    return pulumi.ResourceTransformResult({**args.props, "push": False, "exports": [{"raw": OUTPUT}]}, args.opts)


def lifecycle_policy() -> dict[str, Any]:
    """ECR lifecycle policy for untagged images: each build moves the tag away from the one before it."""
    rule = {
        "rulePriority": 1,
        "description": "Keep the latest builds for restarting tasks and rollbacks",
        "selection": {
            "tagStatus": "untagged",
            "countType": "imageCountMoreThan",
            "countNumber": UNTAGGED_IMAGES_KEPT,
        },
        "action": {"type": "expire"},
    }
    return {"rules": [rule]}
