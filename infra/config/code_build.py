"""Calls of a build in CodeBuild: credentials and rights are checked before it, and each error has its remedy."""

from __future__ import annotations

import asyncio
import re
import time
from functools import cache
from typing import Any

from botocore import xform_name
from botocore.exceptions import BotoCoreError, ClientError, ConnectionError, CredentialRetrievalError, HTTPClientError
from botocore.parsers import ResponseParserError

from infra.config.clients import client
from infra.errors import DENIED, Refusal, error_reason, warn
from infra.types import Location

POLL_SECONDS = 5
# For as long a call that fails for a passing reason is repeated: shorter than the 5 minutes of a build's token.
PATIENCE_SECONDS = 240
ERRORS = (BotoCoreError, ClientError, ResponseParserError)
UNREACHABLE = (ConnectionError, HTTPClientError, ResponseParserError)
# Parts of error codes: of errors that pass, and of credentials that have ended or that AWS does not know.
# https://docs.aws.amazon.com/IAM/latest/APIReference/CommonErrors.html
# https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html
PASSING = ("Throttl", "TooManyRequests", "RequestLimitExceeded", "SlowDown", "ServiceUnavailable", "Internal")
CREDENTIALS = ("Expired", "ClientTokenId", "UnrecognizedClient", "AccessKeyId", "InvalidToken", "AuthenticationToken")
CREDENTIALS += ("Signature", "TimeTooSkewed")
ABSENT = ("RepositoryNotFoundException", "ResourceNotFoundException", "NoSuchBucket")
ROLE = "sts:AssumeRole"
RESTORE = "`pulumi up --refresh --run-program` restores"
WAY_OUT = "set image_uri to an existing image, or build with Docker (image_build local)"


async def check(location: Location, project: str) -> None:
    """Refuse credentials that can't build, by calls that change nothing; warn if AWS does not answer.

    The right to start a build can't be tried without one, and Service Quotas shows builds that a new account may not
    run.

    Args:
        location: Place of the stack.
        project: Name of CodeBuild's project, which may not exist yet.

    Raises:
        Refusal: The credentials are of another account, or AWS refuses them.
    """
    action = "sts:GetCallerIdentity"
    try:
        account = (await call(action, location.region))["Account"]
        action = "codebuild:BatchGetProjects"
        if account == location.account:
            await call(action, location.region, names=[project])
            return
    except ERRORS as error:
        if not _may_pass(error):
            raise _refusal(action, error) from error
        warn(f"image: CodeBuild could not be checked ({action}: {error_reason(error)}); continuing")
        return
    raise Refusal(
        "image",
        f"CodeBuild is called with the credentials of the environment or of aws:profile, which are of account {account}"
        f", and the stack is in {location.account}; choose others with AWS_PROFILE, or {WAY_OUT}",
    )


async def ask(
    action: str,
    region: str,
    *,
    patience: float = PATIENCE_SECONDS,
    absent: str = "",
    is_under_way: bool = False,
    **arguments: Any,
) -> Any:
    """AWS's answer, None for the error `absent`; what may pass is asked again. A build may be under way meanwhile.

    Raises:
        Refusal: AWS refuses, or does not answer in time.
    """
    until = time.monotonic() + patience
    while True:
        try:
            return await call(action, region, **arguments)
        except ERRORS as error:
            if absent and _code(error) == absent:
                return None
            if not _may_pass(error) or time.monotonic() >= until:
                raise _refusal(action, error, is_under_way=is_under_way) from error
        await asyncio.sleep(POLL_SECONDS)


async def call(action: str, region: str, **arguments: Any) -> Any:
    """AWS's answer, in a thread: the program's event loop registers other resources meanwhile."""
    service, operation = action.split(":")
    return await asyncio.to_thread(getattr(_client(service, region), xform_name(operation)), **arguments)


@cache
def _client(service: str, region: str) -> Any:
    return client(service, region)


def _code(error: Exception) -> str:
    return error.response.get("Error", {}).get("Code", "") if isinstance(error, ClientError) else ""


def _may_pass(error: Exception) -> bool:
    if not isinstance(error, ClientError):
        return isinstance(error, (*UNREACHABLE, CredentialRetrievalError))
    code, text = _code(error), str(error)
    if code == "AccountLimitExceededException":  # other builds occupy the queue, unless the account has none
        return "more than 0 " not in text
    # The role of a new project is not known everywhere at once.
    is_new = code == "InvalidInputException" and ROLE in text
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return is_new or status >= 500 or any(each in code for each in PASSING)


def _refusal(action: str, error: Exception, *, is_under_way: bool = False) -> Refusal:
    """Refusal in one line with the remedy, and with another way to an image unless a build is under way."""
    problem, remedy = f"({action}: {error_reason(error)})", _remedy(action, error)
    if is_under_way:
        steps = [remedy, "`pulumi up` again, which follows it"] if remedy else ["`pulumi up` again, which follows it"]
        return Refusal("image", f"the build goes on, but can't be followed {problem}; {', and '.join(steps)}")
    if not remedy and _may_pass(error):
        remedy = "try again"
    return Refusal("image", f"CodeBuild can't build it {problem}; {', or '.join(filter(None, [remedy, WAY_OUT]))}")


def _remedy(action: str, error: Exception) -> str:
    """Remedy for an error; empty for one that passes by itself, or that has none."""
    code, text = _code(error), error_reason(error)
    if isinstance(error, UNREACHABLE):
        return ""
    # Another operation is one by which boto3 gets its credentials, e.g. AssumeRole for a profile's role.
    is_own = isinstance(error, ClientError) and error.operation_name == action.partition(":")[2]
    if not is_own or any(each in code for each in CREDENTIALS):
        return "sign in again, and check AWS_PROFILE, aws:profile and this machine's clock"
    if ROLE in text:
        return f"{RESTORE} the trust policy of the build's role"
    if code == "AccountLimitExceededException" and not _may_pass(error):
        return "ask AWS Support for builds of Linux/Large, whatever Service Quotas shows for a new account"
    if any(each in f"{code} {text}".lower() for each in DENIED):
        # S3 names the KMS action that its key's policy lacks.
        named = re.search(r"perform: ([\w-]+:\w+)", text)
        return f"allow the caller {named[1] if named else action} (docs/accounts.md)"
    if code.startswith("KMS."):
        return "check the KMS key of the bucket"
    return f"{RESTORE} what is gone" if code in ABSENT else ""
