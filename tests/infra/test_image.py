"""The training image: built for the instances, kept long enough, known by its digest."""

from __future__ import annotations

import json

from infra.image import Image, ImageArgs, lifecycle_policy
from tests.infra.fake_aws import DIGEST, REGISTRY, Cloud


def image(cloud: Cloud) -> Image:
    """An image with the project's own paths."""
    return cloud.run(lambda: Image("image", ImageArgs(context=".", dockerfile="./docker/Dockerfile")))


def test_the_image_is_built_from_the_project_for_the_instances(cloud: Cloud) -> None:
    image(cloud)
    assert cloud.resources["image-build"].inputs == {
        "repositoryUrl": f"{REGISTRY}/training",
        "context": ".",
        "dockerfile": "./docker/Dockerfile",
        "platform": "linux/amd64",
        "imageName": "image",
    }, "built on an Arm laptop for itself, the image would not start"


def test_the_image_is_known_by_its_digest(cloud: Cloud) -> None:
    assert cloud.value(image(cloud).image_uri) == f"{REGISTRY}/training@{DIGEST}", (
        "a tag moves, and workers that restart would run other code than the head"
    )


def test_the_repository_goes_with_its_images(cloud: Cloud) -> None:
    image(cloud)
    repository = cloud.resources["image-repository"].inputs
    assert repository["forceDelete"] is True, "`destroy` fails on a repository with images"
    assert repository["imageScanningConfiguration"] == {"scanOnPush": True}, "known vulnerabilities should be seen"


def test_earlier_builds_are_kept_for_tasks_that_restart(cloud: Cloud) -> None:
    image(cloud)
    lifecycle = cloud.resources["image-lifecycle"].inputs
    assert lifecycle["repository"] == "image-repository", "the rule belongs to this repository"
    assert json.loads(lifecycle["policy"]) == lifecycle_policy(), "the rule that is tested is the one that is set"


def test_only_untagged_images_expire() -> None:
    (rule,) = lifecycle_policy()["rules"]
    assert rule["selection"] == {"tagStatus": "untagged", "countType": "imageCountMoreThan", "countNumber": 10}, (
        "the tagged image is the one that runs"
    )
    assert rule["action"] == {"type": "expire"}, "images cost storage"
