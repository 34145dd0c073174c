"""`ray-on-ecs stop`: one run, or all active runs."""

import json
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from ray_on_ecs import secrets
from ray_on_ecs.cli.logs import jobs_of
from ray_on_ecs.cli.main import main
from ray_on_ecs.cluster.clusters import ComposeCluster
from ray_on_ecs.errors import UsageError
from ray_on_ecs.jobs.record import SECRETS
from tests.ray_on_ecs.cli.folders import Folders, Jobs, job, jobs_here


@pytest.fixture
def head() -> Iterator[Jobs]:
    """Two active runs, and one that has ended."""
    with jobs_here(job("first"), job("second", "PENDING"), job("done", "SUCCEEDED")) as jobs:
        yield jobs


def test_run_that_is_not_active_is_one_line(head: Jobs, folders: Folders, capsys: pytest.CaptureFixture[str]) -> None:
    folders.status("old", "finished")  # its job is no longer listed
    for name in ("done", "old"):
        assert main(["stop", "--local", name]) == 2
        line = f"ray-on-ecs: run {name} is not under way; ray-on-ecs runs --local lists the runs\n"
        assert capsys.readouterr().err == line


@pytest.mark.parametrize("verb", ["debug", "fetch", "history", "logs", "open", "rm", "stop"])
@pytest.mark.parametrize(
    ("name", "hint"),
    [("nihgt", "did you mean night?"), ("absent", "ray-on-ecs runs --local lists the runs")],
    ids=["typo", "other"],
)
def test_unknown_run_is_not_found(
    head: Jobs, folders: Folders, capsys: pytest.CaptureFixture[str], verb: str, name: str, hint: str
) -> None:
    folders.status("night", "finished")
    assert main([verb, "--local", name]) == 2
    assert capsys.readouterr().err.endswith(f"ray-on-ecs: run '{name}' not found in {folders.path}; {hint}\n")


def test_only_the_named_run_is_stopped(head: Jobs, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stop", "--local", "first"]) == 0
    assert "run first is stopped" in capsys.readouterr().err
    assert head.states == {"first": "STOPPED", "second": "PENDING", "done": "SUCCEEDED"}


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
    stopped = ["first", "second"]
    assert sorted(lines[:2]) == [f"stopping run {job_id}" for job_id in stopped]
    assert lines[2:] == [f"all runs in {Path.cwd()}/results are stopped"]
    assert {job_id for job_id, state in head.states.items() if state == "STOPPED"} == set(stopped)
    assert main(["stop", "--local", "--all"]) == 0
    assert capsys.readouterr().err == f"there is not a run under way in {Path.cwd()}/results\n"


OWN = {"first": "/data/my runs", "second": "/other"}


@pytest.mark.parametrize("names", [(), ("first",), ("first", "second")])
@pytest.mark.parametrize("has_own", [True, False])
def test_all_leaves_the_runs_of_other_folders(
    folders: Folders, capsys: pytest.CaptureFixture[str], names: tuple[str, ...], has_own: bool
) -> None:
    given = [job(name, metadata={"run_name": name, "storage_path": OWN[name]}) for name in names]
    own = [job("mine", metadata={"run_name": "mine", "storage_path": folders.path})] if has_own else []
    ended = job("ended", "SUCCEEDED", metadata={"run_name": "ended", "storage_path": "/other"})
    with jobs_here(*own, *given, ended) as server:
        assert main(["stop", "--local", "--all"]) == 0
        assert {name for name, state in server.states.items() if state == "RUNNING"} == set(names)
    lines = capsys.readouterr().err.splitlines()
    stopped = ["stopping run mine", f"all runs in {folders.path} are stopped"]
    assert lines[: 1 + has_own] == (stopped if has_own else [f"there is not a run under way in {folders.path}"])
    way = "RAY_ON_ECS_STORAGE_PATH='/data/my runs' ray-on-ecs stop --local first stops"
    others = {1: f"1 run in /data/my runs; {way} it", 2: f"2 runs in /data/my runs, /other; {way} one"}
    assert lines[1 + has_own :] == ([f"not stopped: {others[len(names)]}"] if names else [])


def test_all_on_a_cluster_stops_every_storage_path(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = Jobs(job("first"), job("second", metadata={"run_name": "second", "storage_path": "/mnt/efs"}))
    monkeypatch.setattr(ComposeCluster, "jobs", lambda *_: jobs)
    assert main(["stop", "--compose", "--all"]) == 0
    assert set(jobs.states.values()) == {"STOPPED"}


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
    with jobs_here(job("same", metadata=paths["p1"]), job("same.2", metadata=paths["p2"])) as server:
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
    with jobs_here(job("night", status, metadata={"run_name": "night", "storage_path": path})) as server:
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
    jobs = Jobs(*listed)
    cluster = ComposeCluster()
    cluster.storage_path = "s3://bucket/training"
    if paths == ["/a", "/b"]:
        of_jobs = "ray-on-ecs stop night-0 or ray-on-ecs stop night-1"
        with pytest.raises(UsageError, match=f"each of /a, /b: {of_jobs}$"):
            jobs_of(cluster, jobs, "night", "stop")
    else:
        assert list(jobs_of(cluster, jobs, "night", "stop")) == [f"night-{len(paths) - 1}"]


@pytest.mark.parametrize("stored", ["not json", "5", "[]", "[5, 6]", "null", "{}", "[" * 9000, '["s3://b/r"]', "[[]]"])
def test_broken_metadata_of_a_job_stop_nothing_else(stored: str) -> None:
    with jobs_here(job("first", metadata={"run_name": "first", SECRETS: stored}), job("second")) as server:
        assert main(["stop", "--local", "--all"]) == 0
        assert set(server.states.values()) == {"STOPPED"}
