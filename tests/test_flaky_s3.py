"""The proxy in front of the tests' S3 fails what it should, and nothing else."""

import http.client
import urllib.error
import urllib.request

import pytest

from tests.flaky_s3 import flaky_proxy


def get(url: str) -> int:
    return urllib.request.urlopen(url, timeout=30).status


def test_requests_pass_outside_an_outage_and_fail_within_one(aws_server: str) -> None:
    with flaky_proxy(aws_server, 0.0) as proxy:
        assert get(f"{proxy.url}/moto-api/") == 200
        with proxy.outage():
            for _ in range(4):
                with pytest.raises((urllib.error.URLError, http.client.HTTPException, ConnectionError)):
                    get(f"{proxy.url}/moto-api/")
        assert get(f"{proxy.url}/moto-api/") == 200
        assert proxy.failed == 4
