"""boto3's clients, and the translation of its errors into the project's.

Every call to AWS goes through a client of this module, so that proxies, certificates, endpoints, profiles and logins
that boto3 takes from the environment and its configuration files hold for each of them.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from typing import Any

from ray_on_ecs.errors import ResourceError, TrainingError, UsageError, one_line

CONNECT_SECONDS, READ_SECONDS, ATTEMPTS = 10.0, 30.0, 3  # boto3's 60 s and 5 would be minutes without a line
# As many as the threads that copy files (boto3 has 10).
CONNECTIONS = 32
# Error codes for invalid or expired credentials.
BAD_CREDENTIALS = {
    *("ExpiredToken", "ExpiredTokenException", "InvalidClientTokenId", "UnrecognizedClientException"),
    *("RequestExpired", "InvalidAccessKeyId", "SignatureDoesNotMatch", "AuthFailure", "InvalidToken"),
}
# Error codes for missing permissions, and of emulators that lack an operation.
DENIED = {
    *("AccessDenied", "AccessDeniedException", "UnauthorizedOperation", "403", "UnknownOperationException"),
    *("NotImplemented", "InvalidAction"),
}
SKEWED = {"RequestTimeTooSkewed", "RequestInTheFuture"}
# S3 answers them with an ETag; a page of a proxy or a portal lacks it.
WITH_ETAG = {"HeadObject", "GetObject", "PutObject", "UploadPart"}
_making = threading.RLock()


class Refused(ResourceError):
    """AWS has returned an error, with this code."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class WebPage(Exception):
    """The answer is not AWS's, but a web page."""


def client(
    service: str,
    *,
    connect_seconds: float = CONNECT_SECONDS,
    read_seconds: float = READ_SECONDS,
    attempts: int = ATTEMPTS,
    **options: Any,
) -> Any:
    """Return the client of a service, with options of boto3; UsageError if its configuration is broken."""
    limits = (connect_seconds, read_seconds, attempts)
    with translated(service), _making:  # a session must not be used by several threads
        return _client(_environment(), service, limits, tuple(sorted(options.items())))


def session() -> Any:
    """Return the session, which refreshes its credentials."""
    with translated("boto3"), _making:
        return _session(_environment())


def _environment() -> tuple[tuple[str, str], ...]:
    """Return the variables that boto3 reads: a script may set them before it opens a bucket."""
    names = (name for name in os.environ if name.startswith("AWS_") or name.lower().endswith("_proxy"))
    return tuple(sorted((name, os.environ[name]) for name in names))


@cache
def _session(environment: object) -> Any:
    import boto3

    return boto3.Session()


@cache  # a client costs a fifth of a second
def _client(environment: object, service: str, limits: tuple[float, float, int], options: tuple[Any, ...]) -> Any:
    from botocore.config import Config

    connect_seconds, read_seconds, attempts = limits
    config = Config(
        connect_timeout=connect_seconds,
        read_timeout=read_seconds,
        retries={"total_max_attempts": attempts, "mode": "standard"},
        max_pool_connections=CONNECTIONS,
    )
    made = _session(environment).client(service, config=config, **dict(options))
    made.meta.events.register("after-call", _refuse_page)
    made.meta.events.register_first("needs-retry.s3", _refuse_redirect)
    return made


def _begin_child() -> None:
    _client.cache_clear()  # it must not send requests over its parent's connections
    _making.release()


os.register_at_fork(before=_making.acquire, after_in_parent=_making.release, after_in_child=_begin_child)


def _refuse_redirect(response: Any, **_: Any) -> None:
    """Refuse a portal's redirect, after which boto3 would ask again and again for the bucket's region."""
    if response and 300 < response[0].status_code < 400 and response[0].status_code != 304:
        headers, parsed = response[0].headers, response[1]
        if "x-amz-bucket-region" not in headers and not parsed.get("Error", {}).get("Region"):
            raise WebPage(f"HTTP {response[0].status_code} to {headers.get('location', 'another address')}")


def _refuse_page(http_response: Any, parsed: Any, model: Any, **_: Any) -> None:
    is_ok = http_response.status_code < 300
    if is_ok and model.name in WITH_ETAG:
        is_page = "etag" not in http_response.headers
    elif is_ok and model.name == "ListObjectsV2":
        is_page = "IsTruncated" not in parsed
    else:
        is_read = not (is_ok and model.has_streaming_output)
        is_page = is_read and http_response.content[:100].lstrip().lower().startswith((b"<!doctype html", b"<html"))
    if is_page:
        raise WebPage(f"HTTP {http_response.status_code} of {http_response.url.partition('?')[0]}")


@contextmanager
def translated(what: str) -> Generator[None]:
    """Translate boto3's errors in this block (see `explain`)."""
    try:
        yield
    except Exception as cause:
        if (error := explain(cause, what)) is None:
            raise
        raise error from cause


def explain(cause: Exception, what: str) -> TrainingError | None:
    """Return the error for an exception of boto3 in a call of `what`, or None for other exceptions.

    It is a UsageError if credentials or the configuration are at fault, Refused if AWS has returned an error, and else
    a ResourceError.
    """
    from botocore import exceptions, parsers

    line = one_line(cause)
    match cause:
        case (
            exceptions.NoCredentialsError()
            | exceptions.PartialCredentialsError()
            | exceptions.CredentialRetrievalError()
            | exceptions.ProfileNotFound()
            | exceptions.SSOError()
            | exceptions.TokenRetrievalError()
            | exceptions.LoginError()
        ):
            return credentials_error(line)
        case exceptions.MissingDependencyException():
            return UsageError(f"boto3 lacks a package for your login ({line}); pip install 'boto3[crt]'")
        case exceptions.ClientError():
            code = cause.response.get("Error", {}).get("Code", "")
            if code in BAD_CREDENTIALS or (code == "AccessDenied" and cause.operation_name == "AssumeRole"):
                return credentials_error(line)
            if code in SKEWED:
                return UsageError(f"{what}: AWS refuses requests of this machine, whose clock is wrong; set its time")
            return Refused(code, f"{what}: {line}")
        case exceptions.SSLError():
            return ResourceError(
                f"{what}: the certificate is not trusted ({line}); AWS_CA_BUNDLE names a file with your network's"
            )
        case exceptions.ProxyConnectionError():
            return ResourceError(f"{what}: the proxy can't be reached ({line}); correct HTTPS_PROXY or set NO_PROXY")
        case exceptions.BotoCoreError() if not isinstance(
            cause, exceptions.ConfigParseError | exceptions.InvalidRegionError
        ):
            return ResourceError(f"{what}: AWS can't be reached ({line}); check the network, HTTPS_PROXY and endpoints")
        # Also of a login's program that is missing or prints other text.
        case exceptions.BotoCoreError() | OSError() | json.JSONDecodeError():
            return _misconfigured(what, line)
        case ValueError() if line.startswith("Invalid endpoint"):
            return _misconfigured(what, line)
        # boto3's parsers fail on answers of another form.
        case parsers.ResponseParserError() | WebPage() | AttributeError() | LookupError() | TypeError() | ValueError():
            return foreign(what, line)
    return None


def _misconfigured(what: str, line: str) -> UsageError:
    return UsageError(f"{what}: AWS's configuration is broken ({line}); correct ~/.aws/config and the variables AWS_*")


def foreign(what: str, reason: str) -> ResourceError:
    """Return the error for an answer that is not AWS's."""
    return ResourceError(
        f"{what}: not an answer of AWS's ({reason}); something between this machine and AWS answers: a proxy, a "
        "filter or a portal that wants a login"
    )


def credentials_error(reason: str) -> UsageError:
    """Return the error for missing or invalid credentials."""
    login = "run aws sso login or set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
    return UsageError(f"AWS credentials are missing or expired ({reason}); {login}")
