"""Clients of boto3, for what the AWS provider can't do, and the errors of their calls."""

from __future__ import annotations

from typing import Any

import boto3
import pulumi_aws as aws
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from botocore.parsers import ResponseParserError

# With what boto3 leaves as it is, e.g. of a profile's credential_process that is missing or does not print JSON.
ERRORS = (BotoCoreError, ClientError, ResponseParserError, OSError, RuntimeError, ValueError)


def client(service: str, region: str) -> Any:
    """boto3 client with the credentials of the environment or of the stack's `aws:profile`."""
    # A preview without internet access must not wait for boto3's default retries.
    config = Config(connect_timeout=5, read_timeout=10, retries={"total_max_attempts": 2})
    return boto3.Session(profile_name=aws.config.profile).client(service, region_name=region, config=config)
