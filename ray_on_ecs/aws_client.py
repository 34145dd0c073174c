"""boto3 clients of processes in the cluster, with short timeouts instead of boto3's 60 s and five attempts."""

from __future__ import annotations

from typing import Any


def aws_client(service: str, *, connect_seconds: float, read_seconds: float, attempts: int) -> Any:
    """Return a boto3 client.

    Args:
        service: The AWS service, such as `ssm`.
        connect_seconds: The timeout of a connection.
        read_seconds: The timeout of a response.
        attempts: The maximum number of requests per call.
    """
    import boto3
    from botocore.config import Config

    retries = {"total_max_attempts": attempts}
    config = Config(connect_timeout=connect_seconds, read_timeout=read_seconds, retries=retries)
    return boto3.client(service, config=config)
