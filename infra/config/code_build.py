"""Calls of a build in CodeBuild: credentials and rights are checked before it, and each error has its remedy."""

from __future__ import annotations

import asyncio
import re
import time
from functools import cache
from typing import Any

from botocore import exceptions, xform_name
from botocore.parsers import ResponseParserError

from infra.config.clients import ERRORS, client
from infra.errors import DENIED, Refusal, error_reason, warn
from infra.types import Location

POLL_SECONDS = 5
# For as long a call that fails for a passing reason is repeated: shorter than the 5 minutes of a build's token.
PATIENCE_SECONDS = 240
UNREACHABLE = (exceptions.ConnectionError, exceptions.HTTPClientError, ResponseParserError)
# Parts of error codes: of errors that pass, and of credentials that have ended or that AWS does not know.
# https://docs.aws.amazon.com/IAM/latest/APIReference/CommonErrors.html
# https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html
# https://docs.aws.amazon.com/sdkref/latest/guide/feature-retry-behavior.html
PASSING = ("Throttl", "TooManyRequests", "LimitExceeded", "ThroughputExceeded", "SlowDown", "ServiceUnavailable")
PASSING += ("Internal", "IDPCommunication", "RequestTimeout", "RequestAborted", "OperationAborted")
PASSING += ("ConditionalRequestConflict", "PriorRequestNotComplete", "TransactionInProgress")
CREDENTIALS = ("Expired", "ClientTokenId", "UnrecognizedClient", "AccessKeyId", "InvalidToken", "AuthenticationToken")
CREDENTIALS += ("Signature", "TimeTooSkewed", "TokenRefreshRequired", "AuthFailure", "InvalidSecurity")
# Errors of this machine's configuration, with those whose class is named so: botocore has no base class for them.
CONFIGURATION = (exceptions.EndpointProviderError, exceptions.PartialCredentialsError, OSError, ValueError)
ABSENT = ("RepositoryNotFoundException", "ResourceNotFoundException", "NoSuchBucket")
ROLE = "sts:AssumeRole"
RESTORE = "`pulumi up --refresh --run-program` restores"
SIGN_IN = "sign in again, and check AWS_PROFILE, aws:profile and this machine's clock"
OF_CALLS = "CodeBuild is called with the credentials of the environment or of aws:profile"
WAY_OUT = "set image_uri to an existing image, or build with Docker (image_build local)"


async def check(location: Location, project: str, *, needs_rights: bool = True) -> None:
    """Refuse credentials that can't build, by calls that change nothing; warn if AWS does not answer.

    The right to start a build can't be tried without one, and Service Quotas shows builds that a new account may not
    run.

    CodeBuild may not know the `project` yet. Without `needs_rights`, a caller who may not read it is warned.
    """
    action = "sts:GetCallerIdentity"
    try:
        account = (await call(action, location.region))["Account"]
        action = "codebuild:BatchGetProjects"
        if account == location.account:
            await call(action, location.region, names=[project])
            return
    except ERRORS as error:
        refusal = _refusal(action, error)
        if _may_pass(error):
            warn(f"image: CodeBuild could not be checked ({action}: {error_reason(error)}); continuing")
        elif needs_rights or action.startswith("sts:") or not _is_denied(action, error):
            raise refusal from error
        else:
            warn(f"{refusal} (these credentials could not build a changed image)")
        return
    raise Refusal(
        "image",
        f"{OF_CALLS}, which are of account {account}, and the stack is in {location.account}; choose others with "
        f"AWS_PROFILE, or {WAY_OUT}",
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
    """AWS's answer, None for the error `absent`; what may pass is asked again. A build may be under way meanwhile."""
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
    """AWS's answer, in a thread: the program's event loop registers other resources meanwhile.

    A new client may ask for credentials, e.g. a profile's credential_process.
    """
    service, operation = action.split(":")
    return await asyncio.to_thread(lambda: getattr(_client(service, region), xform_name(operation))(**arguments))


@cache
def _client(service: str, region: str) -> Any:
    return client(service, region)


def _code(error: Exception) -> str:
    return error.response.get("Error", {}).get("Code", "") if isinstance(error, exceptions.ClientError) else ""


def _may_pass(error: Exception) -> bool:
    if not isinstance(error, exceptions.ClientError):
        return isinstance(error, (*UNREACHABLE, exceptions.CredentialRetrievalError))
    code, text = _code(error), str(error)
    if code == "AccountLimitExceededException":  # other builds occupy the queue, unless the account has none
        return "more than 0 " not in text
    # The role of a new project is not known everywhere at once.
    is_new = code == "InvalidInputException" and ROLE in text
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return is_new or status >= 500 or any(each in code for each in PASSING)


def _is_own(action: str, error: Exception) -> bool:
    """True unless boto3 had no credentials for the call: it gets them by other operations, e.g. AssumeRole."""
    return isinstance(error, exceptions.ClientError) and error.operation_name == action.partition(":")[2]


def _is_denied(action: str, error: Exception) -> bool:
    """True if the caller, whom AWS knows, lacks a right."""
    code = _code(error)
    denied = any(each in f"{code} {error_reason(error)}".lower() for each in DENIED)
    return denied and _is_own(action, error) and not any(each in code for each in CREDENTIALS)


def _refusal(action: str, error: Exception, *, is_under_way: bool = False) -> Refusal:
    """Refusal in one line with its remedy; the other ways to an image are left out if a build is under way."""
    problem, remedy = f"({action}: {error_reason(error)})", _remedy(action, error)
    if is_under_way:
        steps = [remedy, "`pulumi up` again, which follows it"] if remedy else ["`pulumi up` again, which follows it"]
        return Refusal("image", f"the build goes on, but can't be followed {problem}; {', and '.join(steps)}")
    if not remedy and _may_pass(error):
        remedy = "try again"
    return Refusal("image", f"CodeBuild can't build it {problem}; {', or '.join(filter(None, [remedy, WAY_OUT]))}")


def _remedy(action: str, error: Exception) -> str:
    """Remedy for an error; empty if it passes by itself, or has none."""
    if not isinstance(error, exceptions.ClientError):
        return _remedy_here(error)
    code, text = _code(error), error_reason(error)
    if ROLE in text and _is_own(action, error):
        return f"{RESTORE} the trust policy of the build's role"
    if _may_pass(error):
        return ""
    if not _is_own(action, error) or any(each in code for each in CREDENTIALS):
        return SIGN_IN
    if code == "AccountLimitExceededException":
        return "ask AWS Support for builds of Linux/Large, whatever Service Quotas shows for a new account"
    if _is_denied(action, error):
        # S3 names the KMS action that its key's policy lacks.
        named = re.search(r"perform: ([\w-]+:\w+)", text)
        return f"allow the caller {named[1] if named else action} (docs/accounts.md)"
    if code.startswith("KMS."):
        return "check the KMS key of the bucket"
    return f"{RESTORE} what is gone" if code in ABSENT else ""


def _remedy_here(error: Exception) -> str:
    """Remedy for an error of this machine; empty if AWS can't be reached."""
    if isinstance(error, UNREACHABLE):
        return ""
    if isinstance(error, exceptions.MissingDependencyException):
        return "`pip install 'boto3[crt]'`"
    if isinstance(error, exceptions.NoCredentialsError):
        return f"sign in, as {OF_CALLS}"
    if isinstance(error, CONFIGURATION) or re.search("Config|Invalid", type(error).__name__):
        return "correct ~/.aws/config and the variables AWS_*"
    return SIGN_IN
