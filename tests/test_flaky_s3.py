"""The proxy in front of the tests' S3 fails only the intended requests."""

import http.client
import urllib.error
import urllib.request
from typing import Any

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError, ConnectionClosedError

from tests.aws import BUCKET, REGION
from tests.flaky_s3 import flaky_proxy


def get(url: str) -> int:
    return urllib.request.urlopen(url, timeout=30).status


def test_requests_fail_only_during_an_outage(aws_server: str) -> None:
    with flaky_proxy(aws_server, 0.0) as proxy:
        assert get(f"{proxy.url}/moto-api/") == 200
        with proxy.outage():
            for _ in range(4):
                with pytest.raises((urllib.error.URLError, http.client.HTTPException, ConnectionError)):
                    get(f"{proxy.url}/moto-api/")
        assert get(f"{proxy.url}/moto-api/") == 200
        assert proxy.failed == 4


def once(service: str, url: str) -> Any:
    """Return a client that sends each request once."""
    config = Config(retries={"total_max_attempts": 1})
    keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test"}
    return boto3.client(service, endpoint_url=url, region_name=REGION, config=config, **keys)


def test_request_with_a_lost_response_is_executed(aws_server: str, s3_client: Any) -> None:
    with flaky_proxy(aws_server, 0.0) as proxy:
        client = once("s3", proxy.url)
        proxy.decide("lose", "PUT .*/done")
        with pytest.raises(ConnectionClosedError):
            client.put_object(Bucket=BUCKET, Key="flaky/done", Body=b"1", IfNoneMatch="*")
        assert s3_client.get_object(Bucket=BUCKET, Key="flaky/done")["Body"].read() == b"1"
        with pytest.raises(ClientError, match="PreconditionFailed"):
            client.put_object(Bucket=BUCKET, Key="flaky/done", Body=b"1", IfNoneMatch="*")
        assert list(proxy.lost_requests) == [f"PUT /{BUCKET}/flaky/done"]


def test_failed_request_passes_on_retry(aws_server: str, s3_client: Any) -> None:
    with flaky_proxy(aws_server, 0.5, 0.5, spared=1) as proxy:
        client = once("s3", proxy.url)
        outcomes = []
        for _ in range(40):
            try:
                client.list_objects_v2(Bucket=BUCKET, Prefix="flaky")
                outcomes.append(True)
            except (ClientError, ConnectionClosedError):
                outcomes.append(False)
        assert outcomes == [False, True] * 20
        assert min(proxy.failed, proxy.lost) > 3


def test_other_services_answer_all_requests(aws_server: str) -> None:
    with flaky_proxy(aws_server, 1.0) as proxy:
        client = once("cloudwatch", proxy.url)
        for _ in range(5):
            client.list_metrics(Namespace="none")
        assert proxy.failed == 0
