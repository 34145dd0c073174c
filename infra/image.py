"""Training image in an ECR repository, built by this machine's Docker or by AWS CodeBuild, and named by its digest."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pulumi
import pulumi_aws as aws
import pulumi_awsx as awsx

from infra.definitions import policies
from infra.definitions.build_context import DOCKERFILE
from infra.roles import make_role
from infra.types import Location, ResourceRef, SecurityOptions
from ray_on_ecs.contract import CLUSTERS_PREFIX

# Tasks pull by digest when they restart, so an image must outlive later builds.
EARLIER_IMAGES_KEPT = 10
# BuildKit's output in place of awsx's `push`: an instance unpacks zstd layers faster than gzip layers. Force also
# converts layers of the base image and of earlier builds. Without a level above 0 the provider ignores the compression.
# https://docs.docker.com/build/exporters/image-registry/
# https://github.com/pulumi/pulumi-docker-build/blob/main/provider/internal/export.go
OUTPUT = "type=registry,oci-mediatypes=true,compression=zstd,compression-level=3,force-compression=true"
# Tag of the layers that the next build reuses, on any machine.
CACHE = "cache"
# 8 vCPUs, 15 GiB and 128 GB. https://docs.aws.amazon.com/codebuild/latest/userguide/build-env-ref-compute-types.html
COMPUTE, BUILD_OS = "BUILD_GENERAL1_LARGE", "aws/codebuild/amazonlinux-x86_64-standard:5.0"
LONGEST_BUILD_MINUTES, LONGEST_QUEUE_MINUTES = 45, 60


@dataclass(frozen=True, kw_only=True)
class CodeBuildArgs:
    """Inputs of a build in CodeBuild.

    Attributes:
        build: Gets the repository's URL, the project's name, and the place of the source in S3 without `.zip`; returns
            the image's URI, or pulumi.UNKNOWN in a preview.
        buildspec: Build specification.
        bucket: Bucket for the source.
        cluster: Name of the ECS cluster, in whose folder of the bucket the source is.
    """

    build: Callable[[Mapping[str, str]], Any]
    buildspec: str
    bucket: ResourceRef
    cluster: pulumi.Input[str]
    location: Location
    security: SecurityOptions
    log_retention_days: int


@dataclass(frozen=True, kw_only=True)
class ImageArgs:
    """Inputs of Image: the build context's path and its tag; without `codebuild`, this machine's Docker builds it."""

    context: str
    tag: str
    kms_key_arn: pulumi.Input[str] = ""
    codebuild: CodeBuildArgs | None = None


class Image(pulumi.ComponentResource):
    """ECR repository and the image of all Ray nodes."""

    image_uri: pulumi.Output[str]

    def __init__(self, name: str, args: ImageArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("ray-on-ecs:infra:Image", name, None, opts)
        repository = self._repository(name, args.kms_key_arn)
        if args.codebuild:
            self.image_uri = self._built_by_codebuild(name, args.codebuild, repository)
        else:
            self.image_uri = self._built_by_docker(name, args, repository)
        self.register_outputs({"image_uri": self.image_uri})

    def _repository(self, name: str, kms_key_arn: pulumi.Input[str]) -> aws.ecr.Repository:
        repository = aws.ecr.Repository(
            f"{name}-repository",
            # ECR refuses to delete a repository with images otherwise.
            force_delete=True,
            encryption_configurations=[{"encryption_type": "KMS", "kms_key": kms_key_arn}] if kms_key_arn else None,
            image_scanning_configuration={"scan_on_push": True},
            opts=pulumi.ResourceOptions(parent=self),
        )
        opts, policy = pulumi.ResourceOptions(parent=self), json.dumps(lifecycle_policy())
        aws.ecr.LifecyclePolicy(f"{name}-lifecycle", repository=repository.name, policy=policy, opts=opts)
        return repository

    def _built_by_docker(self, name: str, args: ImageArgs, repository: aws.ecr.Repository) -> pulumi.Output[str]:
        image = awsx.ecr.Image(
            f"{name}-build",
            awsx.ecr.ImageArgs(
                repository_url=repository.repository_url,
                context=args.context,
                dockerfile=f"{args.context}/{DOCKERFILE}",
                # The architecture of the instances, which may differ from the building machine's.
                platform="linux/amd64",
                # awsx names its child after the image, so that the tag here would replace it with each build.
                image_name=name,
                cache_from=[pulumi.Output.concat(repository.repository_url, ":", CACHE)],
            ),
            opts=pulumi.ResourceOptions(parent=self, transforms=[push_as(args.tag)]),
        )
        return image.image_uri

    def _built_by_codebuild(self, name: str, args: CodeBuildArgs, repository: aws.ecr.Repository) -> pulumi.Output[str]:
        logs = aws.cloudwatch.LogGroup(
            f"{name}-logs",
            retention_in_days=args.log_retention_days,
            kms_key_id=args.security.kms_key_arn or None,
            opts=pulumi.ResourceOptions(parent=self),
        )
        key = pulumi.Output.concat(CLUSTERS_PREFIX, "/", args.cluster, "/image/")
        role, policy = self._role(name, args, repository, logs, pulumi.Output.concat(args.bucket.arn, "/", key, "*"))
        project = aws.codebuild.Project(
            f"{name}-project",
            description="Builds the image of the Ray nodes during `pulumi up`",
            service_role=role.arn,
            # `pulumi up` uploads the source of each build, so that a change of code leaves the project as it is.
            source=aws.codebuild.ProjectSourceArgs(type="NO_SOURCE", buildspec=args.buildspec),
            artifacts=aws.codebuild.ProjectArtifactsArgs(type="NO_ARTIFACTS"),
            environment=aws.codebuild.ProjectEnvironmentArgs(
                type="LINUX_CONTAINER",
                compute_type=COMPUTE,
                image=BUILD_OS,
                # For Docker's daemon in the build's container.
                privileged_mode=True,
            ),
            build_timeout=LONGEST_BUILD_MINUTES,
            queued_timeout=LONGEST_QUEUE_MINUTES,
            logs_config={"cloudwatch_logs": {"group_name": logs.name}},
            opts=pulumi.ResourceOptions(parent=self),
        )
        names = pulumi.Output.all(
            repository=repository.repository_url,
            project=project.name,
            bucket=args.bucket.name,
            key=key,
            # Without its policy the role can neither read the source nor push.
            policy=policy.id,
        )
        return names.apply(args.build, run_with_unknowns=True)

    def _role(
        self,
        name: str,
        args: CodeBuildArgs,
        repository: aws.ecr.Repository,
        logs: aws.cloudwatch.LogGroup,
        source_arn: pulumi.Output[str],
    ) -> tuple[aws.iam.Role, aws.iam.RolePolicy]:
        """Role of the project, with the rights of this repository, its source and its log."""
        place = args.location
        trust = policies.assumed_for("codebuild.amazonaws.com", place.arn("codebuild", "project/*"))
        role = make_role(f"{name}-role", trust, args.security, self)
        document = pulumi.Output.all(
            repository_arn=repository.arn,
            source_arn=source_arn,
            bucket_arn=args.bucket.arn,
            log_group_arn=logs.arn,
            keys_arn=f"arn:{place.partition}:kms:{place.region}:*:key/*",
        ).apply(lambda arns: json.dumps(policies.image_build(**arns)))
        opts = pulumi.ResourceOptions(parent=self)
        return role, aws.iam.RolePolicy(f"{name}-role-policy", role=role.name, policy=document, opts=opts)


def push_as(tag: str) -> Callable[[pulumi.ResourceTransformArgs], pulumi.ResourceTransformResult | None]:
    """Transform of the build inside awsx's component, which has no arguments for tags and the compression of layers."""

    def push(args: pulumi.ResourceTransformArgs) -> pulumi.ResourceTransformResult | None:
        if args.type_ != "docker-build:index:Image":
            return None
        tags: Any = args.props["tags"]
        repository = tags[0].rpartition(":")[0]
        names = [f"{repository}:{tag}", f"{repository}:{CACHE}"]
        # To delete the image takes Docker, which another machine may lack; the repository goes with its images.
        kept = pulumi.ResourceOptions.merge(args.opts, pulumi.ResourceOptions(retain_on_delete=True))
        return pulumi.ResourceTransformResult(
            {**args.props, "tags": names, "push": False, "exports": [{"raw": OUTPUT}]}, kept
        )

    return push


def lifecycle_policy() -> dict[str, Any]:
    """ECR lifecycle policy: builds have tags of their own, and each build's cache leaves the one before it untagged.

    Builds are counted under any tag, as those of earlier versions of this project have another one.
    https://docs.aws.amazon.com/AmazonECR/latest/userguide/lifecycle_policy_parameters.html
    """
    kept = [
        # The image in use and the cache, which is pushed with each build, are beside the earlier ones.
        ("builds for restarting tasks and rollbacks", {"tagStatus": "tagged", "tagPatternList": ["*"]}, 2),
        ("images and caches without a tag", {"tagStatus": "untagged"}, 0),
    ]
    rules = [
        {
            "rulePriority": priority,
            "description": f"Keep the latest {what}",
            "selection": {**which, "countType": "imageCountMoreThan", "countNumber": EARLIER_IMAGES_KEPT + others},
            "action": {"type": "expire"},
        }
        for priority, (what, which, others) in enumerate(kept, 1)
    ]
    return {"rules": rules}
