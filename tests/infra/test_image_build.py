"""Build in CodeBuild: started in `up` alone, followed to its end, and refused in one line that names imageUri."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import pulumi
import pytest
from botocore.exceptions import (
    ClientError,
    ConfigNotFound,
    ConfigParseError,
    CredentialRetrievalError,
    EndpointConnectionError,
    EndpointProviderError,
    InfiniteLoopConfigError,
    InvalidConfigError,
    InvalidDefaultsMode,
    InvalidRegionError,
    InvalidRetryModeError,
    LoginRefreshRequired,
    MissingDependencyException,
    NoCredentialsError,
    PartialCredentialsError,
    ProfileNotFound,
    ReadTimeoutError,
    TokenRetrievalError,
    UnauthorizedSSOTokenError,
)
from botocore.parsers import ResponseParserError

from infra import image_build
from infra.config import code_build
from infra.definitions.build_context import FILE, BuildContext, File
from infra.image_build import ImageBuild
from infra.types import Location
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
# Name of the project of a stack that has none.
PROBE = "ray-on-ecs-image-project"
PLACE = Location(partition="aws", account=ACCOUNT, region=REGION, zones=())
SUCCEEDED, FAILED, FAULT, STOPPED, TIMED_OUT = "SUCCEEDED", "FAILED", "FAULT", "STOPPED", "TIMED_OUT"
PHASES = ("SUBMITTED", "QUEUED", "PROVISIONING", "DOWNLOAD_SOURCE", "INSTALL", "PRE_BUILD", "BUILD")


def error(code: str, text: str = "no", status: int = 400, operation: str = "") -> ClientError:
    """Error of an operation, by default of the one that is called."""
    answer: Any = {"Error": {"Code": code, "Message": text}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return ClientError(answer, operation)


DENIED = error("AccessDeniedException", "User: me is not authorized to perform: codebuild:X with an explicit deny")
LOST = ReadTimeoutError(endpoint_url="https://codebuild")
AWAY = EndpointConnectionError(endpoint_url="https://codebuild")
THROTTLED = error("ThrottlingException", "Rate exceeded")
# Errors of boto3's sources of credentials, as it raises them.
NO_JSON = ValueError("Expecting value: line 1 column 1 (char 0)")
NO_TOOL = FileNotFoundError(2, "No such file or directory", "/opt/team/credentials")
STILL_EXPIRED = RuntimeError("Credentials were refreshed, but the refreshed credentials are still expired.")
OF_BOTO3 = (NO_JSON, NO_TOOL, STILL_EXPIRED)
PASSING = (
    *("RequestTimeout", "RequestTimeoutException", "RequestAbortedException", "OperationAborted"),
    *("ConditionalRequestConflict", "PriorRequestNotComplete", "BandwidthLimitExceeded", "LimitExceededException"),
    *("RequestLimitExceeded", "ProvisionedThroughputExceededException", "TransactionInProgressException"),
    *("ThrottledException", "EC2ThrottledException", "RequestThrottled", "KMS.ThrottlingException"),
)


@dataclass
class Aws:
    """STS, ECR, S3, CodeBuild and CloudWatch Logs: a build takes two looks, and ends as the next of `ends` says.

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
    account: str = ACCOUNT
    threads: set[threading.Thread] = field(default_factory=set)

    def __getattribute__(self, name: str) -> Any:
        found = object.__getattribute__(self, name)
        if not callable(found) or name.startswith("_"):
            return found

        def call(**asked: Any) -> Any:
            self.calls.append(name)
            self.threads.add(threading.current_thread())
            errors = self.failing.get(name, [])
            failure = errors.pop(0) if errors else None
            if isinstance(failure, ClientError) and not failure.operation_name:
                answer: Any = failure.response
                failure = ClientError(answer, "".join(map(str.title, name.split("_"))))
            if failure and not (failure is LOST and name == "start_build"):
                raise failure
            answer = found(**asked)
            if failure:
                raise failure
            return answer

        return call

    def get_caller_identity(self) -> Any:
        return {"Account": self.account}

    def batch_get_projects(self, names: list[str]) -> Any:
        assert names in ([NAMES["project"]], [PROBE]), "the deployer's policies name no other project"
        return {"projects": []}

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
        given = {variable["name"]: variable["value"] for variable in variables}
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
        def client(service: str, region: str) -> Aws:
            aws.threads.add(threading.current_thread())  # it may ask a profile's credential_process
            return aws

        monkeypatch.setattr(code_build, "_client", client)
        monkeypatch.setattr(pulumi.runtime, "is_dry_run", lambda: preview)
        return asyncio.run(ImageBuild(context=CONTEXT, location=PLACE, project=PROBE).image_uri(names))

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
    assert {*aws.calls} <= {"describe_images", "get_caller_identity", "batch_get_projects"}


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
        *({"get_log_events": [failure] * 9, "delete_object": [failure]} for failure in OF_BOTO3),
        *({"batch_get_builds": [error(code)] * 5} for code in PASSING),
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
    ("end", "reason"),
    [
        ((FAILED, "SUBMITTED"), "CodeBuild is not authorized to perform: sts:AssumeRole on r"),
        ((FAILED, "SUBMITTED"), "Unable to assume role r"),
        ((FAULT, "PROVISIONING"), "Unable to assume role: r"),
        ((FAILED, "QUEUED"), "unable to assume role"),
        (
            (FAILED, "PROVISIONING"),
            "Service role r does not allow AWS CodeBuild to create Amazon CloudWatch Logs log streams for build b",
        ),
        ((FAILED, "PROVISIONING"), "The service role r does not allow AWS CodeBuild to pull image i"),
        ((FAILED, "DOWNLOAD_SOURCE"), "User: r is not authorized to perform: logs:CreateLogStream on l"),
    ],
)
def test_a_build_whose_role_lacks_a_right_names_the_role(run: Run, end: tuple[str, str], reason: str) -> None:
    context = {"statusCode": "ACCESS_DENIED", "message": reason}
    with pytest.raises(pulumi.RunError, match=r"\); `pulumi up --refresh --run-program` restores its role\n"):
        run(Aws(ends=[end] * 3, contexts=[context]))


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


# Errors that no repetition mends, and the remedy in their line.
CORRECT = "correct ~/.aws/config and the variables AWS_*"
SIGN_IN = "sign in again, and check AWS_PROFILE, aws:profile and this machine's clock"
FINAL: dict[str, tuple[Exception, str]] = {
    "denied": (DENIED, "allow the caller codebuild:X (docs/accounts.md)"),
    "denied by S3": (error("AccessDenied", "Access Denied", 403), "allow the caller ACTION (docs/accounts.md)"),
    "denied by a key": (
        error("AccessDenied", "User: me is not authorized to perform: kms:GenerateDataKey on resource: k"),
        "allow the caller kms:GenerateDataKey (docs/accounts.md)",
    ),
    **{
        code: (error(code, "The token is expired or invalid", 403), SIGN_IN)
        for code in (
            *("ExpiredToken", "ExpiredTokenException", "RequestExpired", "InvalidToken", "InvalidClientTokenId"),
            *("UnrecognizedClientException", "InvalidAccessKeyId", "MissingAuthenticationTokenException"),
            *("SignatureDoesNotMatch", "InvalidSignatureException", "IncompleteSignature", "RequestTimeTooSkewed"),
            *("TokenRefreshRequired", "AuthFailure", "InvalidSecurity"),
        )
    },
    **{
        code: (error(code, "no", 403), "allow the caller ACTION (docs/accounts.md)")
        for code in ("NotAuthorized", "UnauthorizedAccess", "UnauthorizedOperation")
    },
    "no credentials": (
        NoCredentialsError(),
        "sign in, as CodeBuild is called with the credentials of the environment or of aws:profile",
    ),
    "still expired": (STILL_EXPIRED, SIGN_IN),
    "half of them": (PartialCredentialsError(provider="env", cred_var="AWS_SECRET_ACCESS_KEY"), CORRECT),
    **{
        str(failure): (failure, CORRECT)
        for failure in (
            *(NO_JSON, NO_TOOL, ValueError("Invalid endpoint: localhost"), ValueError("No closing quotation")),
            *(PermissionError(13, "Permission denied", "/opt"), InvalidConfigError(error_msg="no sso-session")),
            *(ConfigParseError(path="config"), InfiniteLoopConfigError(source_profile="p", visited_profiles=["p"])),
            *(
                InvalidDefaultsMode(mode="fast", valid_modes="legacy"),
                InvalidRetryModeError(provided_retry_mode="x", valid_modes="y"),
            ),
            *(
                ConfigNotFound(path="config"),
                EndpointProviderError(msg="Invalid region"),
                InvalidRegionError(region_name="us_west"),
            ),
        )
    },
    "no package": (MissingDependencyException(msg="needs botocore[crt]"), "`pip install 'boto3[crt]'`"),
    "no profile": (ProfileNotFound(profile="team"), SIGN_IN),
    "an ended session": (UnauthorizedSSOTokenError(), SIGN_IN),
    "a token without an answer": (TokenRetrievalError(provider="sso", error_msg="Token has expired"), SIGN_IN),
    "an ended login": (LoginRefreshRequired(), SIGN_IN),
    "the role of a profile": (
        error("AccessDenied", "User: me is not authorized to perform: sts:AssumeRole on r", 403, "AssumeRole"),
        SIGN_IN,
    ),
    "no builds": (
        error("AccountLimitExceededException", "Cannot have more than 0 builds in queue for the account"),
        "ask AWS Support for builds of Linux/Large, whatever Service Quotas shows for a new account",
    ),
    "a disabled key": (error("KMS.DisabledException", "k is disabled"), "check the KMS key of the bucket"),
    **{
        code: (error(code), "`pulumi up --refresh --run-program` restores what is gone")
        for code in ("RepositoryNotFoundException", "ResourceNotFoundException", "NoSuchBucket")
    },
    "a mistake": (error("InvalidInputException", "Invalid environment variable"), ""),
    "no subscription": (error("OptInRequired", "The AWS Access Key Id needs a subscription for the service"), ""),
}
# Errors that may pass, and the remedy once they have lasted too long, beside another try.
LASTING: dict[str, tuple[Exception, str]] = {
    "away": (AWAY, ""),
    "no AWS": (ResponseParserError("<html>"), ""),
    "throttled": (THROTTLED, ""),
    **{code: (error(code), "") for code in PASSING},
    "a throttled role of a profile": (error("Throttling", operation="AssumeRole"), ""),
    "no identity provider": (error("IDPCommunicationError", operation="AssumeRoleWithWebIdentity"), ""),
    "a fault": (error("InternalFailure", status=500), ""),
    "a full queue": (error("AccountLimitExceededException", "Cannot have more than 5 builds in queue"), ""),
    "a role without trust": (
        error("InvalidInputException", "CodeBuild is not authorized to perform: sts:AssumeRole on r"),
        "`pulumi up --refresh --run-program` restores the trust policy of the build's role",
    ),
    "no answer of a profile": (CredentialRetrievalError(provider="process", error_msg="no"), SIGN_IN),
}
ACTIONS = {
    "get_caller_identity": "sts:GetCallerIdentity",
    "batch_get_projects": "codebuild:BatchGetProjects",
    "describe_images": "ecr:DescribeImages",
    "list_builds_for_project": "codebuild:ListBuildsForProject",
    "put_object": "s3:PutObject",
    "start_build": "codebuild:StartBuild",
    "batch_get_builds": "codebuild:BatchGetBuilds",
}
# A build is under way only at the last one, and the first two are calls of a check.
CHECKS, FOLLOWING = ("get_caller_identity", "batch_get_projects"), "batch_get_builds"
WAY_OUT = "set image_uri to an existing image, or build with Docker (image_build local)"


@pytest.mark.parametrize(
    ("operation", "kind"),
    [
        (operation, kind)
        for operation in ACTIONS
        for kind in ({**FINAL, **LASTING} if operation not in CHECKS else FINAL)
        if operation != FOLLOWING
    ],
)
def test_a_refusal_is_one_line_that_names_a_ready_image(run: Run, operation: str, kind: str) -> None:
    failure, remedy = {**FINAL, **LASTING}[kind]
    aws = Aws(failing={operation: [failure] * 999})
    with pytest.raises(pulumi.RunError) as refused:
        run(aws)
    line = str(refused.value)
    reason, _, ways = line.partition("); ")
    assert reason.startswith(f"image: CodeBuild can't build it ({ACTIONS[operation]}: ")
    first = remedy.replace("ACTION", ACTIONS[operation]) or "try again" * (kind in LASTING)
    assert ways == (f"{first}, or {WAY_OUT}" if first else WAY_OUT)
    assert "\n" not in line
    assert not aws.builds


@pytest.mark.parametrize("kind", [*FINAL, *LASTING])
def test_a_build_that_can_no_longer_be_seen_goes_on(run: Run, kind: str) -> None:
    failure, remedy = {**FINAL, **LASTING}[kind]
    aws = Aws(failing={FOLLOWING: [failure] * 999})
    with pytest.raises(pulumi.RunError) as refused:
        run(aws)
    reason, _, ways = str(refused.value).partition("); ")
    assert reason.startswith(f"image: the build goes on, but can't be followed ({ACTIONS[FOLLOWING]}: ")
    first, last = remedy.replace("ACTION", ACTIONS[FOLLOWING]), "`pulumi up` again, which follows it"
    assert ways == (f"{first}, and {last}" if first else last)
    assert aws.objects, "it may not have read its source yet"
    aws.failing.clear()
    assert run(aws) == URI
    assert len(aws.builds) == 1


@pytest.mark.parametrize("preview", [True, False], ids=["preview", "up"])
@pytest.mark.parametrize("operation", CHECKS)
@pytest.mark.parametrize("kind", LASTING)
def test_a_check_without_an_answer_is_a_warning(
    run: Run, told: list[str], kind: str, operation: str, preview: bool
) -> None:
    aws = Aws(failing={operation: [LASTING[kind][0]]})
    assert run(aws, preview=preview) == (pulumi.UNKNOWN if preview else URI)
    assert told[0].startswith(f"image: CodeBuild could not be checked ({ACTIONS[operation]}: ")


@pytest.mark.parametrize(
    ("kind", "operation", "names"),
    [
        (kind, operation, names)
        for kind in ("denied", "ExpiredToken", "no credentials", str(NO_TOOL))
        for operation in CHECKS
        for names in (pulumi.UNKNOWN, NAMES)
        if (kind, operation, names) != ("denied", "batch_get_projects", NAMES)
    ],
)
def test_a_forbidden_codebuild_is_refused_before_resources_exist(
    run: Run, kind: str, operation: str, names: Any
) -> None:
    failure, remedy = FINAL[kind]
    with pytest.raises(pulumi.RunError) as refused:
        run(Aws(failing={operation: [failure]}), preview=True, names=names)
    assert remedy in str(refused.value)


@pytest.mark.parametrize("names", [NAMES, {**NAMES, "project": pulumi.UNKNOWN}], ids=["up", "up with Docker"])
@pytest.mark.parametrize("code", ["AccessDeniedException", "AccessDenied", "UnauthorizedOperation", "NotAuthorized"])
def test_a_preview_of_a_stack_that_is_up_warns_of_rights(
    run: Run, told: list[str], code: str, names: dict[str, Any]
) -> None:
    failing: dict[str, list[Exception]] = {"batch_get_projects": [error(code)] * 2}
    assert run(Aws(failing=failing), preview=True, names=names) is pulumi.UNKNOWN
    assert told[0].startswith("image: CodeBuild can't build it (codebuild:BatchGetProjects: ")
    assert told[0].endswith(f"{WAY_OUT} (these credentials could not build a changed image)")
    with pytest.raises(pulumi.RunError, match=r"allow the caller codebuild:BatchGetProjects"):
        run(Aws(failing=failing))


@pytest.mark.parametrize("preview", [True, False], ids=["preview", "up"])
@pytest.mark.parametrize("failing", [{}, {"describe_images": [DENIED]}], ids=["seen", "denied"])
def test_credentials_of_another_account_are_named_before_a_build(
    run: Run, told: list[str], failing: dict[str, list[Exception]], preview: bool
) -> None:
    aws = Aws(account="999999999999", failing=failing)
    with pytest.raises(pulumi.RunError) as refused:
        run(aws, preview=preview)
    assert str(refused.value) == (
        "image: CodeBuild is called with the credentials of the environment or of aws:profile, which are of account "
        f"999999999999, and the stack is in {ACCOUNT}; choose others with AWS_PROFILE, or {WAY_OUT}"
    )
    assert not aws.builds
    assert not told


def test_an_update_of_other_resources_asks_nothing_of_codebuild(run: Run) -> None:
    aws = Aws()
    assert run(aws, names={**NAMES, "bucket": pulumi.UNKNOWN}) is pulumi.UNKNOWN
    assert aws.calls == ["describe_images"]


def test_calls_leave_the_event_loop_to_other_resources(run: Run) -> None:
    aws = Aws(log=["#7 installing torch"])
    run(aws)
    assert {*aws.calls} == {*ACTIONS, "get_log_events", "delete_object"}
    assert threading.main_thread() not in aws.threads


@pytest.mark.parametrize(
    ("arn", "console"),
    [("arn:aws-cn:", "console.amazonaws.cn"), ("arn:aws-us-gov:", "console.amazonaws-us-gov.com")],
)
def test_the_link_leads_to_the_console_of_the_partition(run: Run, told: list[str], arn: str, console: str) -> None:
    aws = Aws()
    aws._begin(NAMES["project"], variables(CONTEXT.tag))["arn"] = f"{arn}codebuild:x"
    run(aws)
    assert f"https://{console}/" in told[0]
