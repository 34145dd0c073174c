"""Build in CodeBuild: started in `up` alone, followed to its end, and refused in one line that names imageUri."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import pulumi
import pytest
from botocore.exceptions import ClientError, EndpointConnectionError, NoCredentialsError, ReadTimeoutError

from infra import image_build
from infra.definitions.build_context import FILE, BuildContext, File
from infra.image_build import ImageBuild
from tests.infra.fake_aws import ACCOUNT, DIGEST, REGION, REGISTRY

CONTEXT = BuildContext([File("docker/Dockerfile", FILE, b"FROM scratch\n")])
URI = f"{REGISTRY}/training@{DIGEST}"
NAMES = {
    "repository": f"{REGISTRY}/training",
    "project": "ray-on-ecs-image-project-1a2b",
    "bucket": "runs",
    "key": "clusters/ray-dev/image/",
    "policy": "p",
}
SUCCEEDED, FAILED, FAULT, STOPPED, TIMED_OUT = "SUCCEEDED", "FAILED", "FAULT", "STOPPED", "TIMED_OUT"
PHASES = ("SUBMITTED", "QUEUED", "PROVISIONING", "DOWNLOAD_SOURCE", "INSTALL", "PRE_BUILD", "BUILD")


def error(code: str, text: str = "no", status: int = 400) -> ClientError:
    answer: Any = {"Error": {"Code": code, "Message": text}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return ClientError(answer, "Call")


DENIED = error("AccessDeniedException", "User: me is not authorized to perform: codebuild:X with an explicit deny")
LOST = ReadTimeoutError(endpoint_url="https://codebuild")
AWAY = EndpointConnectionError(endpoint_url="https://codebuild")
THROTTLED = error("ThrottlingException", "Rate exceeded")


@dataclass
class Aws:
    """ECR, S3, CodeBuild and CloudWatch Logs: a build takes two looks, and ends as the next of `ends` says.

    Attributes:
        ends: Status and last phase of each build.
        failing: Errors of the next calls, by operation. A start that fails with LOST has been made.
        pushes: False for a build that leaves no image.
        hidden: Answers without a new image.
        unseen: Answers without a new build.
    """

    ends: list[tuple[str, str]] = field(default_factory=lambda: [(SUCCEEDED, "BUILD")])
    failing: dict[str, list[Exception]] = field(default_factory=dict)
    image: bool = False
    pushes: bool = True
    hidden: int = 0
    log: list[str] = field(default_factory=list)
    stream: bool = True
    contexts: list[dict[str, str]] = field(default_factory=list)
    builds: list[dict[str, Any]] = field(default_factory=list)
    objects: dict[str, bytes] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    tokens: dict[str, dict[str, Any]] = field(default_factory=dict)
    unseen: int = 0

    def __getattribute__(self, name: str) -> Any:
        found = object.__getattribute__(self, name)
        if not callable(found) or name.startswith("_"):
            return found

        def call(**asked: Any) -> Any:
            self.calls.append(name)
            errors = self.failing.get(name, [])
            failure = errors.pop(0) if errors else None
            if failure and not (failure is LOST and name == "start_build"):
                raise failure
            answer = found(**asked)
            if failure:
                raise failure
            return answer

        return call

    def describe_images(self, registryId: str, repositoryName: str, imageIds: list[dict[str, str]]) -> Any:
        assert (registryId, repositoryName, imageIds) == (ACCOUNT, "training", [{"imageTag": CONTEXT.tag}])
        if self.image and self.hidden:
            self.hidden -= 1
        elif self.image:
            return {"imageDetails": [{"imageDigest": DIGEST}]}
        raise error("ImageNotFoundException")

    def put_object(self, Bucket: str, Key: str, Body: bytes) -> None:
        self.objects[f"{Bucket}/{Key}"] = Body

    def delete_object(self, Bucket: str, Key: str) -> None:
        self.objects.pop(f"{Bucket}/{Key}", None)

    def list_builds_for_project(self, projectName: str, sortOrder: str) -> Any:
        assert (projectName, sortOrder) == (NAMES["project"], "DESCENDING")
        return {"ids": [build["id"] for build in reversed(self.builds)]}

    def start_build(
        self, projectName: str, idempotencyToken: str, environmentVariablesOverride: list[dict[str, str]]
    ) -> Any:
        if idempotencyToken not in self.tokens:
            self.tokens[idempotencyToken] = self._begin(projectName, environmentVariablesOverride)
        return {"build": dict(self.tokens[idempotencyToken])}

    def _begin(self, project: str, variables: list[dict[str, str]]) -> dict[str, Any]:
        given = {each["name"]: each["value"] for each in variables}
        if "SHA256" in given:
            source = self.objects[given["SOURCE"].removeprefix("s3://")]
            assert hashlib.sha256(source).hexdigest() == given["SHA256"]
            assert given["REPOSITORY"] == NAMES["repository"]
        identity = f"{project}:{len(self.builds)}"
        build = {
            "id": identity,
            "arn": f"arn:aws:codebuild:{REGION}:{ACCOUNT}:build/{identity}",
            "buildStatus": "IN_PROGRESS",
            "currentPhase": "QUEUED",
            "startTime": datetime(2026, 11, 29, 11, 12, tzinfo=UTC),
            "environment": {"environmentVariables": variables},
            "looks": 0,
        }
        self.builds.append(build)
        return build

    def batch_get_builds(self, ids: list[str]) -> Any:
        assert ids, "CodeBuild refuses an empty list"
        if self.unseen:
            self.unseen -= 1
            return {"builds": [], "buildsNotFound": ids}
        return {"builds": [self._look(build) for build in self.builds if build["id"] in ids]}

    def _look(self, build: dict[str, Any]) -> dict[str, Any]:
        build["looks"] += 1
        if build["looks"] >= 2 and build["buildStatus"] == "IN_PROGRESS":
            status, last = self.ends.pop(0)
            reached = PHASES[: PHASES.index(last) + 1]
            phases: list[dict[str, Any]] = [{"phaseType": phase, "phaseStatus": SUCCEEDED} for phase in reached]
            build["phases"] = phases
            build["buildStatus"], build["currentPhase"] = status, "COMPLETED"
            if status == SUCCEEDED:
                self.image = self.pushes
            else:
                phases[-1] |= {"phaseStatus": status, "contexts": self.contexts}
        if self.stream:
            build["logs"] = {"groupName": "image-logs", "streamName": "0"}
        return dict(build)

    def get_log_events(self, logGroupName: str, logStreamName: str, limit: int, startFromHead: bool) -> Any:
        assert not startFromHead
        return {"events": [{"message": f"{line}\n"} for line in self.log[-limit:]]}


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Messages of a build, whose pauses take no time."""
    lines: list[str] = []
    now = [0.0]

    async def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(image_build.asyncio, "sleep", sleep)
    monkeypatch.setattr(image_build.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(pulumi.log, "info", lambda text, **_: lines.append(text))
    monkeypatch.setattr(pulumi.log, "warn", lines.append)
    return lines


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, told: list[str]) -> Callable[..., Any]:
    """Build in an account, in `up` or in a preview."""

    def build(aws: Aws, *, preview: bool = False, names: Any = NAMES) -> Any:
        monkeypatch.setattr(image_build, "_client", lambda service, region: aws)
        monkeypatch.setattr(pulumi.runtime, "is_dry_run", lambda: preview)
        return asyncio.run(ImageBuild(context=CONTEXT, region=REGION).image_uri(names))

    return build


Run = Callable[..., Any]


def variables(tag: str) -> list[dict[str, str]]:
    return [{"name": "TAG", "value": tag}]


def test_an_image_in_the_repository_is_not_built(run: Run, told: list[str]) -> None:
    for preview in (True, False):
        aws = Aws(image=True)
        assert run(aws, preview=preview) == URI
        assert aws.calls == ["describe_images"]
    assert not told


def test_up_builds_a_missing_image(run: Run, told: list[str]) -> None:
    aws = Aws(log=["#7 installing torch"])
    assert run(aws) == URI
    assert len(aws.builds) == 1
    assert not aws.objects, "the source is not left in the bucket"
    page = f"projects/{NAMES['project']}/build/{NAMES['project']}%3A0?region={REGION}"
    assert told[0] == (
        f"image: CodeBuild builds it, some 8 minutes: https://console.aws.amazon.com/codesuite/codebuild/{page}"
    )
    assert told[1:] == ["image: 0:05 queued: #7 installing torch", "image: 0:10 completed: #7 installing torch"]


@pytest.mark.parametrize(
    "names",
    [
        NAMES,
        {**NAMES, "project": pulumi.UNKNOWN, "key": pulumi.UNKNOWN},
        {**NAMES, "repository": pulumi.UNKNOWN},
        pulumi.UNKNOWN,
    ],
    ids=["changed code", "from Docker to CodeBuild", "new stack", "nothing known"],
)
def test_a_preview_builds_nothing_and_names_minutes_and_price(run: Run, told: list[str], names: Any) -> None:
    aws = Aws()
    assert run(aws, preview=True, names=names) is pulumi.UNKNOWN
    assert told == ["image: CodeBuild builds it in `pulumi up`, some 8 minutes, about 0.16 USD"]
    assert {*aws.calls} <= {"describe_images"}


@pytest.mark.parametrize("failure", [DENIED, AWAY, THROTTLED, error("RepositoryNotFoundException")])
def test_a_preview_that_may_not_look_goes_on(run: Run, told: list[str], failure: Exception) -> None:
    assert run(Aws(failing={"describe_images": [failure] * 9}), preview=True) is pulumi.UNKNOWN
    assert told[0].startswith("image: ")
    assert "ecr:DescribeImages" in told[0]


@pytest.mark.parametrize("times", [1, 3])
def test_a_start_whose_answer_is_lost_starts_one_build(run: Run, times: int) -> None:
    aws = Aws(failing={"start_build": [LOST] * times})
    assert run(aws) == URI
    assert len(aws.builds) == 1


def test_a_build_of_an_interrupted_up_is_followed(run: Run, told: list[str]) -> None:
    aws = Aws()
    aws._begin(NAMES["project"], variables("build-other"))
    aws._begin(NAMES["project"], variables(CONTEXT.tag))
    aws._begin(NAMES["project"], variables("build-other"))
    assert run(aws) == URI
    assert "start_build" not in aws.calls
    assert told[0].startswith("image: CodeBuild is at it since 11:12: https://")


@pytest.mark.parametrize("status", [FAILED, STOPPED, TIMED_OUT, FAULT, SUCCEEDED])
def test_an_earlier_build_that_has_ended_is_no_obstacle(run: Run, status: str) -> None:
    aws = Aws()
    aws._begin(NAMES["project"], variables(CONTEXT.tag))["buildStatus"] = status
    assert run(aws) == URI
    assert len(aws.builds) == 2


@pytest.mark.parametrize(
    "failing",
    [
        {"start_build": [THROTTLED] * 5},
        {"start_build": [error("InternalFailure", status=500)]},
        {
            "start_build": [
                error("InvalidInputException", "CodeBuild is not authorized to perform: sts:AssumeRole on r")
            ]
        },
        {"start_build": [error("AccountLimitExceededException", "Cannot have more than 5 builds in queue")]},
        {"batch_get_builds": [AWAY] * 20},
        {"batch_get_builds": [error("ServiceUnavailable", status=503)] * 5},
        {"list_builds_for_project": [THROTTLED]},
        {"describe_images": [AWAY, THROTTLED]},
        {"put_object": [error("SlowDown", status=503)]},
        {"get_log_events": [DENIED] * 9},
        {"get_log_events": [error("ResourceNotFoundException")] * 9},
        {"delete_object": [DENIED]},
    ],
)
def test_what_passes_is_waited_for(run: Run, failing: dict[str, list[Exception]]) -> None:
    aws = Aws(failing=failing)
    assert run(aws) == URI
    assert len(aws.builds) == 1


def test_a_new_build_and_a_new_image_may_be_seen_late(run: Run) -> None:
    assert run(Aws(hidden=3, unseen=3)) == URI


def test_a_build_without_a_stream_yet_is_followed(run: Run, told: list[str]) -> None:
    assert run(Aws(stream=False)) == URI
    assert told[1] == "image: 0:05 queued"


@pytest.mark.parametrize("early", [(FAULT, "PROVISIONING"), (FAILED, "SUBMITTED"), (FAILED, "PROVISIONING")])
def test_a_build_that_did_not_begin_is_started_again(run: Run, early: tuple[str, str]) -> None:
    aws = Aws(ends=[early, early, (SUCCEEDED, "BUILD")])
    assert run(aws) == URI
    assert len(aws.builds) == 3


@pytest.mark.parametrize(
    ("end", "number", "line"),
    [
        (
            (FAILED, "BUILD"),
            1,
            "image: the build failed in BUILD (COMMAND_EXECUTION_ERROR: exit status 1); `pulumi up`",
        ),
        ((FAILED, "PRE_BUILD"), 1, "image: the build failed in PRE_BUILD ("),
        ((FAILED, "PROVISIONING"), 3, "image: the build failed in PROVISIONING ("),
        ((FAULT, "BUILD"), 1, "image: the build ended by a fault of CodeBuild in BUILD ("),
        ((STOPPED, "BUILD"), 1, "image: the build was stopped in BUILD ("),
        ((STOPPED, "QUEUED"), 1, "image: the build was stopped in QUEUED ("),
        ((TIMED_OUT, "BUILD"), 1, "image: the build took too long in BUILD ("),
        ((TIMED_OUT, "QUEUED"), 1, "image: the build took too long in QUEUED ("),
    ],
)
def test_a_failed_build_shows_its_last_lines_and_a_link(run: Run, end: tuple[str, str], number: int, line: str) -> None:
    log = [f"line {index}" for index in range(30)] + ["\x1b[31m#9 ERROR: \x1b[0mno such package\r"]
    context = {"statusCode": "COMMAND_EXECUTION_ERROR", "message": "exit status 1"}
    aws = Aws(ends=[end] * 3, log=log, contexts=[context])
    with pytest.raises(pulumi.RunError) as failed:
        run(aws)
    head, *lines, link = str(failed.value).splitlines()
    assert head.startswith(line)
    assert lines == [*(f"line {index}" for index in range(11, 30)), "#9 ERROR: no such package"]
    assert link.startswith("https://console.aws.amazon.com/codesuite/codebuild/projects/")
    assert len(aws.builds) == number


@pytest.mark.parametrize(
    ("aws", "line"),
    [
        (Aws(stream=False), "it has no log"),
        (Aws(), "its log is empty"),
        (Aws(log=["x"], failing={"get_log_events": [DENIED] * 9}), "its log could not be read (logs:GetLogEvents: "),
    ],
)
def test_a_failed_build_without_a_log_says_so(run: Run, aws: Aws, line: str) -> None:
    aws.ends = [(FAILED, "BUILD")]
    with pytest.raises(pulumi.RunError) as failed:
        run(aws)
    assert str(failed.value).splitlines()[1].startswith(line)


def test_a_build_that_vanishes_ends_the_wait(run: Run) -> None:
    with pytest.raises(
        pulumi.RunError, match=r"^image: CodeBuild no longer knows its build https://.*; `pulumi up` ag"
    ):
        run(Aws(unseen=9999))


def test_a_build_that_leaves_no_image_is_refused(run: Run) -> None:
    with pytest.raises(pulumi.RunError, match=rf"^image: the build succeeded, but .* has no image {CONTEXT.tag}; see"):
        run(Aws(pushes=False))


@pytest.mark.parametrize(
    ("operation", "failure", "words"),
    [
        ("start_build", DENIED, "allow the caller codebuild:StartBuild (docs/accounts.md), or set image_uri"),
        ("list_builds_for_project", DENIED, "allow the caller codebuild:ListBuildsForProject"),
        ("describe_images", DENIED, "allow the caller ecr:DescribeImages"),
        ("put_object", error("AccessDenied", "Access Denied", 403), "allow the caller s3:PutObject"),
        ("put_object", error("NoSuchBucket", "The specified bucket does not exist", 404), "set image_uri"),
        (
            "start_build",
            error("AccountLimitExceededException", "Cannot have more than 0 builds in queue for the account"),
            "the account may not run another build in CodeBuild (",
        ),
        ("start_build", error("ResourceNotFoundException", "Project cannot be found"), "not those of an explicit"),
        ("describe_images", error("RepositoryNotFoundException"), "not those of an explicit provider"),
        ("start_build", NoCredentialsError(), "Unable to locate credentials"),
        ("start_build", error("ExpiredTokenException", "The security token is expired"), "is expired"),
        ("start_build", error("InvalidInputException", "Invalid environment variable"), "Invalid environment"),
    ],
)
def test_a_refusal_is_one_line_that_names_a_ready_image(
    run: Run, operation: str, failure: Exception, words: str
) -> None:
    aws = Aws(failing={operation: [failure] * 99})
    with pytest.raises(pulumi.RunError) as refused:
        run(aws)
    line = str(refused.value)
    assert line.startswith("image: ")
    assert words in line
    assert "set image_uri to an existing image" in line
    assert "\n" not in line
    assert not aws.builds


@pytest.mark.parametrize("operation", ["start_build", "list_builds_for_project", "put_object", "describe_images"])
def test_aws_that_stays_away_ends_the_wait(run: Run, operation: str) -> None:
    with pytest.raises(pulumi.RunError, match=r"^image: CodeBuild can't build it \(.*Could not connect.*\); try again"):
        run(Aws(failing={operation: [AWAY] * 999}))


@pytest.mark.parametrize("failure", [AWAY, DENIED, error("ExpiredTokenException", "expired")])
def test_a_build_that_can_no_longer_be_seen_goes_on(run: Run, failure: Exception) -> None:
    aws = Aws(failing={"batch_get_builds": [failure] * 999})
    with pytest.raises(
        pulumi.RunError, match="The build goes on without this `pulumi up`, and the next one follows it"
    ):
        run(aws)
    assert aws.objects, "it may not have read its source yet"
    aws.failing.clear()
    assert run(aws) == URI
    assert len(aws.builds) == 1


@pytest.mark.parametrize(
    ("arn", "console"),
    [("arn:aws-cn:", "console.amazonaws.cn"), ("arn:aws-us-gov:", "console.amazonaws-us-gov.com")],
)
def test_the_link_leads_to_the_console_of_the_partition(run: Run, told: list[str], arn: str, console: str) -> None:
    aws = Aws()
    aws._begin(NAMES["project"], variables(CONTEXT.tag))["arn"] = f"{arn}codebuild:x"
    run(aws)
    assert f"https://{console}/" in told[0]
