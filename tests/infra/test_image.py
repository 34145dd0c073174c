"""Training image: build inputs and ECR repository."""

from __future__ import annotations

import json

import pulumi
import pulumi_awsx as awsx
import pulumi_docker_build as docker_build

from infra.image import OUTPUT, Image, ImageArgs, lifecycle_policy
from tests.infra.fake_aws import DIGEST, REGISTRY, Cloud


def image(cloud: Cloud) -> Image:
    """An image with the project's own paths."""
    return cloud.run(image_component)


def image_component() -> Image:
    """The same, for the program of a test."""
    return Image("image", ImageArgs(context=".", dockerfile="./docker/Dockerfile"))


def test_image_build_inputs(cloud: Cloud) -> None:
    image(cloud)
    assert cloud.resources["image-build"].inputs == {
        "repositoryUrl": f"{REGISTRY}/training",
        "context": ".",
        "dockerfile": "./docker/Dockerfile",
        "platform": "linux/amd64",
        "imageName": "image",
    }


def test_awsx_pushes_zstd_layers(cloud: Cloud) -> None:
    cloud.run(_built_as_awsx_does)
    build = cloud.resources["image-container"].inputs
    assert build["tags"] == ["registry/training:image"]
    assert (build["push"], build["exports"]) == (False, [{"raw": OUTPUT}])
    assert {"compression=zstd", "oci-mediatypes=true", "force-compression=true"} <= set(OUTPUT.split(","))
    assert "compression-level=3" in OUTPUT.split(","), "the provider ignores the compression without a level"


def _built_as_awsx_does() -> None:
    """The child that awsx adds to its component (awsx/ecr/image.ts)."""
    parent = next(child for child in image_component()._childResources if isinstance(child, awsx.ecr.Image))
    opts = pulumi.ResourceOptions(parent=parent)
    docker_build.Image("image-container", push=True, tags=["registry/training:image"], opts=opts)


def test_the_image_is_known_by_its_digest(cloud: Cloud) -> None:
    assert cloud.value(image(cloud).image_uri) == f"{REGISTRY}/training@{DIGEST}"


def test_the_repository_goes_with_its_images(cloud: Cloud) -> None:
    image(cloud)
    repository = cloud.resources["image-repository"].inputs
    assert repository["forceDelete"] is True
    assert repository["imageScanningConfiguration"] == {"scanOnPush": True}


def test_earlier_builds_are_kept_for_tasks_that_restart(cloud: Cloud) -> None:
    image(cloud)
    lifecycle = cloud.resources["image-lifecycle"].inputs
    assert lifecycle["repository"] == "image-repository"
    assert json.loads(lifecycle["policy"]) == lifecycle_policy()


def test_only_untagged_images_expire() -> None:
    (rule,) = lifecycle_policy()["rules"]
    assert rule["selection"] == {"tagStatus": "untagged", "countType": "imageCountMoreThan", "countNumber": 10}
    assert rule["action"] == {"type": "expire"}
