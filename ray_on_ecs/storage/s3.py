"""S3 access of the command line: boto3's credentials, and short timeouts."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray_on_ecs.storage.run_storage import RunStorage

CONNECT_SECONDS = 10
REQUEST_SECONDS = 30
ATTEMPTS = 3


@dataclass(frozen=True)
class S3Access:
    """Region, credentials and endpoint of a bucket; None for the environment's.

    Attributes:
        session_token: The token of temporary credentials.
        endpoint: The URL of an S3-compatible store.
    """

    region: str | None = None
    access_key: str | None = None
    secret_key: str | None = None
    session_token: str | None = None
    endpoint: str | None = None

    def client(self, service: str = "s3") -> Any:
        """Return a boto3 client of S3, or of another service."""
        import boto3
        from botocore.config import Config

        retries = {"total_max_attempts": ATTEMPTS}
        return boto3.client(
            service,
            region_name=self.region,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            aws_session_token=self.session_token,
            endpoint_url=self.endpoint,
            config=Config(connect_timeout=CONNECT_SECONDS, read_timeout=CONNECT_SECONDS, retries=retries),
        )

    def open(self, storage_path: str, run_name: str) -> RunStorage:
        """Return the folder of a run under an `s3://bucket/prefix`, without a request to S3."""
        from pyarrow import fs

        from ray_on_ecs.storage.run_storage import RunStorage

        environment = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        filesystem = fs.S3FileSystem(
            region=self.region,
            access_key=self.access_key,
            secret_key=self.secret_key,
            session_token=self.session_token,
            endpoint_override=self.endpoint or environment,
            connect_timeout=CONNECT_SECONDS,
            request_timeout=REQUEST_SECONDS,
            retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=ATTEMPTS),
        )
        uri = storage_path.rstrip("/")
        return RunStorage(filesystem, uri.removeprefix("s3://"), run_name, f"{uri}/{run_name}")
