"""The order of requests whose times are equal: S3's are whole seconds."""

import os
from pathlib import Path

import pytest

from ray_on_ecs.jobs.documents import REQUESTS, RUN, STOP, BrokenError, Documents, Request
from ray_on_ecs.storage.disk import Disk

METADATA = {"run_name": "mine", "storage_path": "runs"}


@pytest.mark.parametrize("number", range(8))
def test_stop_comes_after_the_run_that_it_stops(tmp_path: Path, number: int) -> None:
    documents = Documents(Disk(), str(tmp_path))
    run = documents.write_request("jane", RUN, uri="runs/mine", metadata=METADATA)
    documents.write_request("jane", STOP, jobs=[run])
    documents.write_request("bob", STOP, jobs=[run])
    for file in (tmp_path / REQUESTS).glob("*/*.json"):
        os.utime(file, (1000, 1000))
    assert [_kind(request) for request in documents.requests()] == [RUN, STOP, STOP]


def test_older_request_comes_first(tmp_path: Path) -> None:
    documents = Documents(Disk(), str(tmp_path))
    stop = documents.write_request("jane", STOP, jobs=["mine"])
    run = documents.write_request("jane", RUN, uri="runs/mine", metadata=METADATA)
    for second, request in enumerate((stop, run), 1000):
        os.utime(tmp_path / REQUESTS / "jane" / f"{request}.json", (second, second))
    assert [_kind(request) for request in documents.requests()] == [STOP, RUN]


def test_broken_request_is_among_the_others(tmp_path: Path) -> None:
    documents = Documents(Disk(), str(tmp_path))
    documents.write_request("jane", STOP, jobs=["mine"])
    documents.write_request("jane", "dance")
    for file in (tmp_path / REQUESTS).glob("*/*.json"):
        os.utime(file, (1000, 1000))
    assert {_kind(request) for request in documents.requests()} == {STOP, "broken"}


def _kind(request: Request | tuple[str, BrokenError]) -> str:
    return request.kind if isinstance(request, Request) else "broken"
