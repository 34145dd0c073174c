"""Training image: build inputs and ECR repository."""

from __future__ import annotations

import json

from infra.image import Image, ImageArgs, lifecycle_policy
from tests.infra.fake_aws import DIGEST, REGISTRY, Cloud


def image(cloud: Cloud) -> Image:
    """An image with the project's own paths."""
    return cloud.run(lambda: Image("image", ImageArgs(context=".", dockerfile="./docker/Dockerfile")))


def test_image_build_inputs(cloud: Cloud) -> None:
    image(cloud)
    assert cloud.resources["image-build"].inputs == {
        "repositoryUrl": f"{REGISTRY}/training",
        "context": ".",
        "dockerfile": "./docker/Dockerfile",
        "platform": "linux/amd64",
        "imageName": "image",
    }


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
