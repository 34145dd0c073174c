"""Training image: ECR repository, the build by Docker, and the resources of the build by CodeBuild."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pulumi
import pulumi_awsx as awsx
import pulumi_docker_build as docker_build
import pytest
import yaml

from infra.definitions.build_context import FILE, BuildContext, File
from infra.image import OUTPUT, CodeBuildArgs, Image, ImageArgs, lifecycle_policy
from infra.types import Location, ResourceRef, SecurityOptions
from tests.infra.fake_aws import ACCOUNT, DIGEST, REGION, REGISTRY, Cloud
from tests.infra.stacks import KEY

BUILDSPEC = (Path(__file__).parents[2] / "docker" / "buildspec.yml").read_text()
SPECIFICATION: dict[str, Any] = yaml.safe_load(BUILDSPEC)


def image(cloud: Cloud) -> Image:
    """An image that Docker builds, with the project's own paths."""
    return cloud.run(image_component)


def image_component() -> Image:
    """The same, for the program of a test."""
    return Image("image", ImageArgs(context=".", tag="build-1a2b"))


def built_in_codebuild(cloud: Cloud, *, key: str = "", partition: str = "aws") -> Mapping[str, str]:
    """An image that CodeBuild builds; return the names with which its build is called."""
    called: list[Mapping[str, str]] = []

    def program() -> Image:
        output = pulumi.Output.from_input
        args = CodeBuildArgs(
            build=lambda names: called.append(names) or f"{names['repository']}@{DIGEST}",
            buildspec=BUILDSPEC,
            bucket=ResourceRef(name=output("runs"), arn=output(f"arn:{partition}:s3:::runs")),
            cluster="ray-dev",
            location=Location(partition=partition, account=ACCOUNT, region=REGION, zones=()),
            security=SecurityOptions(
                permissions_boundary=f"arn:aws:iam::{ACCOUNT}:policy/boundary", role_path="/teams/", kms_key_arn=key
            ),
            log_retention_days=30,
        )
        return Image("image", ImageArgs(context=".", tag="build-1a2b", codebuild=args))

    assert cloud.value(cloud.run(program).image_uri) == f"{REGISTRY}/training@{DIGEST}"
    [names] = called
    return names


def test_image_build_inputs(cloud: Cloud) -> None:
    image(cloud)
    assert cloud.resources["image-build"].inputs == {
        "repositoryUrl": f"{REGISTRY}/training",
        "context": ".",
        "dockerfile": "./docker/Dockerfile",
        "platform": "linux/amd64",
        "imageName": "image",
        "cacheFrom": [f"{REGISTRY}/training:cache"],
    }


def test_awsx_pushes_zstd_layers_under_the_tag_of_the_context(cloud: Cloud) -> None:
    cloud.run(_built_as_awsx_does)
    build = cloud.resources["image-container"].inputs
    assert build["tags"] == ["registry:5000/training:build-1a2b", "registry:5000/training:cache"]
    assert (build["push"], build["exports"]) == (False, [{"raw": OUTPUT}])
    assert {"compression=zstd", "oci-mediatypes=true", "force-compression=true"} <= set(OUTPUT.split(","))
    assert "compression-level=3" in OUTPUT.split(","), "the provider ignores the compression without a level"


def test_a_machine_without_docker_can_destroy_the_stack(cloud: Cloud) -> None:
    cloud.run(_built_as_awsx_does)
    assert cloud.resources["image-container"].retain_on_delete, "docker-build deletes through a Docker daemon"


def _built_as_awsx_does() -> None:
    """The child that awsx adds to its component (awsx/ecr/image.ts)."""
    parent = next(child for child in image_component()._childResources if isinstance(child, awsx.ecr.Image))
    opts = pulumi.ResourceOptions(parent=parent)
    docker_build.Image("image-container", push=True, tags=["registry:5000/training:image"], opts=opts)


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


def test_images_expire_after_ten_others() -> None:
    selected = [rule["selection"] for rule in lifecycle_policy()["rules"]]
    assert selected == [
        # The image in use, ten before it, which earlier versions may have pushed, and the cache.
        {"tagStatus": "tagged", "tagPatternList": ["*"], "countType": "imageCountMoreThan", "countNumber": 12},
        {"tagStatus": "untagged", "countType": "imageCountMoreThan", "countNumber": 10},
    ]
    assert [rule["rulePriority"] for rule in lifecycle_policy()["rules"]] == [1, 2]


def test_codebuild_needs_no_resource_of_docker(cloud: Cloud) -> None:
    names = built_in_codebuild(cloud)
    assert not cloud.of_type("awsx:ecr:Image")
    assert names == {
        "repository": f"{REGISTRY}/training",
        "project": "image-project",
        "bucket": "runs",
        "key": "clusters/ray-dev/image/",
        "policy": "image-role-policy-id",
    }


def test_a_project_has_no_source_that_changes_with_the_code(cloud: Cloud) -> None:
    built_in_codebuild(cloud)
    project = cloud.resources["image-project"].inputs
    assert project["source"] == {"type": "NO_SOURCE", "buildspec": BUILDSPEC}
    assert project["artifacts"] == {"type": "NO_ARTIFACTS"}
    assert project["environment"]["privilegedMode"] is True, "Docker's daemon does not start otherwise"
    assert project["logsConfig"] == {"cloudwatchLogs": {"groupName": "image-logs"}}
    assert project["buildTimeout"] < 60


@pytest.mark.parametrize(("partition", "key"), [("aws", ""), ("aws-cn", ""), ("aws-us-gov", ""), ("aws", KEY)])
def test_the_role_of_a_build_reaches_its_own_repository_alone(cloud: Cloud, partition: str, key: str) -> None:
    built_in_codebuild(cloud, key=key, partition=partition)
    role = cloud.resources["image-role"].inputs
    assert (role["path"], role["permissionsBoundary"]) == ("/teams/", f"arn:aws:iam::{ACCOUNT}:policy/boundary")
    [trust] = json.loads(role["assumeRolePolicy"])["Statement"]
    assert trust["Principal"] == {"Service": "codebuild.amazonaws.com"}
    source = f"arn:{partition}:codebuild:{REGION}:{ACCOUNT}:project/*"
    assert trust["Condition"] == {
        "ArnLike": {"aws:SourceArn": source},
        "StringEquals": {"aws:SourceAccount": ACCOUNT},
    }
    statements = json.loads(cloud.resources["image-role-policy"].inputs["policy"])["Statement"]
    resources = {action: statement["Resource"] for statement in statements for action in statement["Action"]}
    service = f"arn:aws:service:{REGION}:{ACCOUNT}"
    assert resources == {
        "s3:GetObject": f"arn:{partition}:s3:::runs/clusters/ray-dev/image/*",
        "ecr:GetAuthorizationToken": "*",
        **dict.fromkeys(
            [
                *("ecr:BatchCheckLayerAvailability", "ecr:BatchGetImage", "ecr:GetDownloadUrlForLayer"),
                *("ecr:CompleteLayerUpload", "ecr:InitiateLayerUpload", "ecr:PutImage", "ecr:UploadLayerPart"),
            ],
            f"{service}:image-repository",
        ),
        **dict.fromkeys(["logs:CreateLogStream", "logs:PutLogEvents"], f"{service}:image-logs:*"),
        "kms:Decrypt": f"arn:{partition}:kms:{REGION}:*:key/*",
    }
    [context] = [
        statement["Condition"]["StringLike"] for statement in statements if "kms:Decrypt" in statement["Action"]
    ]
    assert context == {
        "kms:ViaService": [f"s3.{REGION}.amazonaws.*"],
        "kms:EncryptionContext:aws:s3:arn": [
            f"arn:{partition}:s3:::runs/clusters/ray-dev/image/*",
            f"arn:{partition}:s3:::runs",
        ],
    }


def test_the_log_of_builds_is_kept_like_the_others(cloud: Cloud) -> None:
    built_in_codebuild(cloud, key=KEY)
    logs = cloud.resources["image-logs"].inputs
    assert (logs["retentionInDays"], logs["kmsKeyId"]) == (30, KEY)


@dataclass(frozen=True)
class Machine:
    """A folder in which bash runs the build specification, with `aws`, `docker` and `sleep` that note their calls."""

    folder: Path

    def program(self, name: str, script: str) -> None:
        path = self.folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f'#!/bin/bash\necho "{name} $*" >> {self.folder}/calls\n{script}\n')
        path.chmod(0o700)

    def run(self, context: BuildContext, sha256: str = "") -> subprocess.CompletedProcess[str]:
        """Run all commands in one shell until one fails, as CodeBuild does."""
        source = context.zip()
        (self.folder / "source.zip").write_bytes(source)
        commands = [line for phase in SPECIFICATION["phases"].values() for line in phase["commands"]]
        script = "\n".join(f"{{ {line.rstrip()}\n}} || exit 1" for line in commands)
        variables = {
            "SOURCE": "s3://runs/clusters/ray/image/build-1.zip",
            "SHA256": sha256 or hashlib.sha256(source).hexdigest(),
            "REPOSITORY": f"{REGISTRY}/training",
            "TAG": "build-1",
            "OUTPUT": OUTPUT,
            "PATH": f"{self.folder}/bin:/usr/bin:/bin",
            **SPECIFICATION["env"]["variables"],
        }
        place = self.folder / "codebuild"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        return subprocess.run(["bash", "-c", script], cwd=place, env=variables, capture_output=True, text=True)

    def calls(self, beginning: str) -> list[str]:
        """Calls that begin so."""
        return [line for line in (self.folder / "calls").read_text().splitlines() if line.startswith(beginning)]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    if not shutil.which("unzip"):
        pytest.skip("CodeBuild has unzip, and this machine hasn't")
    made = Machine(tmp_path)
    made.program("aws", f'case "$1" in s3) cp {tmp_path}/source.zip "${{@: -1}}";; ecr) echo password;; esac')
    made.program("docker", 'if [ "$1" = login ]; then read -r secret; [ "$secret" = password ]; fi')
    made.program("sleep", "")
    return made


CONTEXT = BuildContext([File("docker/Dockerfile", FILE, b"FROM scratch\n"), File("LICENSE", FILE, b"Apache\n")])


def test_the_build_specification_builds_the_unpacked_source(machine: Machine) -> None:
    done = machine.run(CONTEXT)
    assert done.returncode == 0, done.stderr
    [login] = machine.calls("docker login")
    assert login.endswith(f"--password-stdin {REGISTRY}")
    buildkit = SPECIFICATION["env"]["variables"]["BUILDKIT"]
    assert "@sha256:" in buildkit
    assert machine.calls("docker buildx create")[0].endswith(f"--driver-opt image=mirror.gcr.io/{buildkit}")
    [build] = machine.calls("docker buildx build")
    repository = f"{REGISTRY}/training"
    assert build.split() == [
        *("docker", "buildx", "build", "--platform", "linux/amd64", "--file", "context/docker/Dockerfile"),
        *("--progress", "plain", "--provenance=false", "--tag", f"{repository}:build-1", "--output", OUTPUT),
        *("--cache-from", f"type=registry,ref={repository}:cache"),
        *("--cache-to", f"{OUTPUT},mode=max,image-manifest=true,ignore-error=true,ref={repository}:cache", "context"),
    ]
    assert (machine.folder / "codebuild/context/LICENSE").read_text() == "Apache\n"


def test_a_source_that_a_run_has_exchanged_is_not_built(machine: Machine) -> None:
    assert machine.run(CONTEXT, sha256="0" * 64).returncode
    assert not machine.calls("docker")


def test_a_build_waits_for_the_policy_of_its_role(machine: Machine) -> None:
    tries = machine.folder / "tries"
    script = f'if [ "$1" = s3 ]; then echo x >> {tries}; [ $(wc -l < {tries}) = 3 ] && cp {machine.folder}/source.zip'
    machine.program("aws", f'{script} "${{@: -1}}"; else echo password; fi')
    assert machine.run(CONTEXT).returncode == 0
    assert len(machine.calls("aws s3")) == 3


def test_a_build_takes_buildkit_from_docker_hub_without_the_mirror(machine: Machine) -> None:
    machine.program("docker", 'cat > /dev/null; [[ "$*" != "pull --quiet mirror"* ]]')
    assert machine.run(CONTEXT).returncode == 0
    assert "image=docker.io/moby/buildkit:" in machine.calls("docker buildx create")[0]


@pytest.mark.parametrize(("failures", "passes"), [(1, True), (2, False)])
def test_a_failed_build_is_tried_once_more(machine: Machine, failures: int, passes: bool) -> None:
    count = f'$(grep -c "^docker buildx build" {machine.folder}/calls)'
    machine.program("docker", f'cat > /dev/null; [[ "$*" != "buildx build"* ]] || [ {count} -gt {failures} ]')
    assert (machine.run(CONTEXT).returncode == 0) is passes
    assert len(machine.calls("docker buildx build")) == 2


@pytest.mark.parametrize("step", ["login", "buildx create"])
def test_a_failed_step_ends_the_build(machine: Machine, step: str) -> None:
    machine.program("docker", f'cat > /dev/null; [[ "$*" != "{step}"* ]]')
    assert machine.run(CONTEXT).returncode
    assert not machine.calls("docker buildx build")
