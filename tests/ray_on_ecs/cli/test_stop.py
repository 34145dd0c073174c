"""`ray-on-ecs stop`: one run, or all active runs."""

import json
import shlex
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from ray_on_ecs.node.jobs import SECRETS

from ray_on_ecs import secrets
from ray_on_ecs.cli.logs import jobs_of
from ray_on_ecs.cli.main import main
from ray_on_ecs.cluster.clusters import ComposeCluster
from ray_on_ecs.errors import UsageError
from tests.ray_on_ecs.cli.folders import job
from tests.serving import serving


class Jobs(HTTPServer):
    """The Jobs API of a head, with these jobs; a stopped job has ended."""

    def __init__(self, *jobs: dict[str, Any]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.jobs = {each["submission_id"]: each for each in jobs}

    @property
    def states(self) -> dict[str, str]:
        return {job_id: each["status"] for job_id, each in self.jobs.items()}


class Handler(BaseHTTPRequestHandler):
    """Answers as Ray's dashboard does."""

    def do_GET(self) -> None:
        head = cast(Jobs, self.server)
        if self.path == "/api/version":
            self._answer({"version": "4", "ray_version": version("ray")})
        else:
            job_id = self.path.removeprefix("/api/jobs/")
            if job_id.endswith("/logs"):
                self._answer({"logs": "a line\n"})
            else:
                self._answer(head.jobs[job_id] if job_id else list(head.jobs.values()))

    def do_POST(self) -> None:
        head = cast(Jobs, self.server)
        head.jobs[self.path.split("/")[3]]["status"] = "STOPPED"
        self._answer({"stopped": True})

    def _answer(self, document: object) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(document).encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: the tests report errors."""


@pytest.fixture
def head(monkeypatch: pytest.MonkeyPatch) -> Iterator[Jobs]:
    """A head with two active runs, an active job of Ray's commands, and an ended job."""
    plain = job("plain", metadata=None, submission_id="raysubmit_1")
    with serving(Jobs(job("first"), job("second", "PENDING"), job("done", "SUCCEEDED"), plain)) as server:
        monkeypatch.setenv("RAY_API_SERVER_ADDRESS", f"http://127.0.0.1:{server.server_port}")
        yield server


def test_run_that_is_not_active_is_one_line(head: Jobs, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stop", "--local", "absent"]) == 2
    assert capsys.readouterr().err == (
        "ray-on-ecs: run absent is not under way; ray-on-ecs runs --local lists the runs\n"
    )


def test_only_the_named_run_is_stopped(head: Jobs, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stop", "--local", "first"]) == 0
    assert "run first is stopped" in capsys.readouterr().err
    assert head.states == {"first": "STOPPED", "second": "PENDING", "done": "SUCCEEDED", "raysubmit_1": "RUNNING"}


@pytest.mark.parametrize("words", [("first",), ("--all",)], ids=["one", "all"])
def test_stop_deletes_secrets(
    head: Jobs, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    stores = {name: secrets.store(f"s3://bucket/runs/{name}") for name in ("first", "done")}
    for name, store in stores.items():
        head.jobs[name]["metadata"][SECRETS] = json.dumps([f"s3://bucket/runs/{name}", "TOKEN"])
        store.put({"TOKEN": "value"})
    assert main(["stop", "--local", *words]) == 0
    assert [name for name, store in stores.items() if store.read(["TOKEN"])] == ["done"]
    stores["first"].put({"TOKEN": "value"})  # as if it could not be deleted earlier
    assert main(["stop", "--local", "first"]) == 2
    assert not stores["first"].read(["TOKEN"])


def test_all_lists_and_stops_every_job(head: Jobs, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stop", "--local", "--all"]) == 0
    lines = capsys.readouterr().err.splitlines()
    stopped = ["first", "raysubmit_1", "second"]
    assert sorted(lines[:3]) == [f"stopping job {job_id}" for job_id in stopped]
    assert lines[3:] == ["all submitted jobs are stopped"]
    assert {job_id for job_id, state in head.states.items() if state == "STOPPED"} == set(stopped)
    assert main(["stop", "--local", "--all"]) == 0
    assert capsys.readouterr().err == "no submitted job is under way\n"


@pytest.mark.parametrize("words", [(), ("--all", "first")], ids=["neither", "both"])
def test_stop_requires_a_run_or_all(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stop", "--local", *words]) == 2
    assert "RUN: give the name of one run, or --all" in capsys.readouterr().err


def test_run_of_another_folder_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("p1", "p2"):
        (tmp_path / name).mkdir()
    paths = {name: {"run_name": "same", "storage_path": str(tmp_path / name / "results")} for name in ("p1", "p2")}
    with serving(Jobs(job("same", metadata=paths["p1"]), job("same.2", metadata=paths["p2"]))) as server:
        monkeypatch.setenv("RAY_API_SERVER_ADDRESS", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.chdir(tmp_path / "p2")
        assert main(["stop", "--local", "same"]) == 0
        assert server.states == {"same": "RUNNING", "same.2": "STOPPED"}
        monkeypatch.chdir(tmp_path)
        for verb in ("stop", "logs"):
            assert main([verb, "--local", "same"]) == 2
        first, second = (str(tmp_path / name / "results") for name in ("p1", "p2"))
        assert capsys.readouterr().err.splitlines()[1:] == [
            f"ray-on-ecs: run same is below {first} and {second}: "
            f"RAY_ON_ECS_STORAGE_PATH={first} ray-on-ecs {verb} --local same"
            for verb in ("stop", "logs")
        ]
        assert server.states["same"] == "RUNNING"
        monkeypatch.setenv("RAY_ON_ECS_STORAGE_PATH", first)
        assert main(["logs", "--local", "same"]) == 0
        assert main(["stop", "--local", "same"]) == 0
        assert server.states["same"] == "STOPPED"


@pytest.mark.parametrize("path", ["/data/my runs", "s3://bucket/runs", "/data/runs/"])
@pytest.mark.parametrize("status", ["RUNNING", "PENDING", "SUCCEEDED"])
def test_way_to_a_run_of_another_storage_path_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], path: str, status: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with serving(Jobs(job("night", status, metadata={"run_name": "night", "storage_path": path}))) as server:
        monkeypatch.setenv("RAY_API_SERVER_ADDRESS", f"http://127.0.0.1:{server.server_port}")
        assert main(["stop", "--local", "night"]) == 2
        line = capsys.readouterr().err
        start = f"ray-on-ecs: run night is below {path}: "
        assert line.startswith(start)
        setting, *words = shlex.split(line.removeprefix(start))
        assert words == ["ray-on-ecs", "stop", "--local", "night"]
        monkeypatch.setenv(*setting.split("=", 1))
        assert main(["stop", "--local", "night"]) == (0 if status != "SUCCEEDED" else 2)
        assert server.states == {"night": "STOPPED" if status != "SUCCEEDED" else status}


@pytest.mark.parametrize("paths", [["/a"], ["/a", "/b"], ["/a", "s3://bucket/training"]])
def test_run_of_another_storage_path_on_a_stack(paths: list[str]) -> None:
    """A stack's storage path is not the environment's."""
    listed = [
        job(f"night-{n}", metadata={"run_name": "night", "storage_path": path}, start_time=n)
        for n, path in enumerate(paths)
    ]
    head = SimpleNamespace(submitted_jobs=lambda: {each["submission_id"]: each for each in listed})
    cluster = ComposeCluster()
    cluster.storage_path = "s3://bucket/training"
    if paths == ["/a", "/b"]:
        with pytest.raises(UsageError, match=r"each of /a, /b: in .* ray job stop night-0 or ray job stop night-1$"):
            jobs_of(cluster, cast(Any, head), "night", "stop")
    else:
        assert list(jobs_of(cluster, cast(Any, head), "night", "stop")) == [f"night-{len(paths) - 1}"]


def test_notebook_is_stopped_by_its_name(head: Jobs) -> None:
    metadata = {"run_name": "notebook-1", "storage_path": "jupyterlab"}
    head.jobs["notebook-1"] = job("notebook-1", metadata=metadata)
    assert main(["stop", "--local", "notebook-1"]) == 0
    assert [name for name, state in head.states.items() if state == "STOPPED"] == ["notebook-1"]


@pytest.mark.parametrize("stored", ["not json", "5", "[]", "[5, 6]", "null", "{}", "[" * 9000, '["s3://b/r"]', "[[]]"])
def test_broken_metadata_of_a_job_stop_nothing_else(monkeypatch: pytest.MonkeyPatch, stored: str) -> None:
    with serving(Jobs(job("first", metadata={"run_name": "first", SECRETS: stored}), job("second"))) as server:
        monkeypatch.setenv("RAY_API_SERVER_ADDRESS", f"http://127.0.0.1:{server.server_port}")
        assert main(["stop", "--local", "--all"]) == 0
        assert set(server.states.values()) == {"STOPPED"}
