"""The training image: built here, pushed to the stack's own repository, and known by its digest."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pulumi
import pulumi_aws as aws
import pulumi_awsx as awsx

from infra.tags import tags

# Running tasks pull by digest when they restart, so an image has to outlive the builds that follow it.
UNTAGGED_IMAGES_KEPT = 10


@dataclass(frozen=True, kw_only=True)
class ImageArgs:
    """Inputs of Image: paths from the project's root."""

    context: str
    dockerfile: str
    kms_key_arn: pulumi.Input[str] = ""


class Image(pulumi.ComponentResource):
    """An ECR repository and the image in it, which both kinds of Ray node run."""

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
                # The instances' architecture, whatever the machine that builds has.
                platform="linux/amd64",
                # awsx would give the build the same name in every cluster of a program.
                image_name=name,
            ),
            opts=pulumi.ResourceOptions(parent=self),
        )
        self.image_uri = image.image_uri
        self.register_outputs({"image_uri": self.image_uri})

    def _repository(self, name: str, kms_key_arn: pulumi.Input[str]) -> aws.ecr.Repository:
        repository = aws.ecr.Repository(
            f"{name}-repository",
            force_delete=True,
            encryption_configurations=_encryption(kms_key_arn),
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


def _encryption(kms_key_arn: pulumi.Input[str]) -> list[aws.ecr.RepositoryEncryptionConfigurationArgs] | None:
    if not kms_key_arn:
        return None
    return [aws.ecr.RepositoryEncryptionConfigurationArgs(encryption_type="KMS", kms_key=kms_key_arn)]


def lifecycle_policy() -> dict[str, Any]:
    """Every build takes the tag from the one before it: keep the latest of those, and let older ones go."""
    rule = {
        "rulePriority": 1,
        "description": "Keep the latest builds, for tasks that restart and for going back",
        "selection": {
            "tagStatus": "untagged",
            "countType": "imageCountMoreThan",
            "countNumber": UNTAGGED_IMAGES_KEPT,
        },
        "action": {"type": "expire"},
    }
    return {"rules": [rule]}
