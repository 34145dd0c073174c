"""Clusters: this machine, with Ray only for Ray programs, and the token of compose."""

import os
from pathlib import Path

import pytest

from ray_on_ecs.cli.main import main
from ray_on_ecs.cluster import local_head, stack
from ray_on_ecs.cluster.clusters import ComposeCluster, LocalCluster
from ray_on_ecs.cluster.local_head import LocalHead
from ray_on_ecs.config import RunConfig
from ray_on_ecs.errors import HeadGone, ResourceError, UsageError
from ray_on_ecs.node.api import AnswerError

OF_RAY = [("busy", "127.0.0.1:2", "RUNNING"), ("ended", "127.0.0.1:2", "FAILED"), ("script", None, "RUNNING")]
Local = tuple[LocalCluster, list[str], list[str]]
PROGRAM = RunConfig(command=("tune.py",), driver=True)


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Local:
    """This machine, with four CPUs and without Ray; a list for lines, and what is done with Ray."""
    done: list[str] = []
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(local_head, "start", lambda cpus: done.append(f"start {cpus}") or object())
    monkeypatch.setattr(local_head, "end_unused", lambda: done.append("end"))
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    return LocalCluster(), [], done


@pytest.mark.parametrize(("workers", "lines"), [(None, []), ("1:8", []), (4, []), (8, ["8 workers share 4 CPUs"])])
def test_script_needs_no_ray(
    local: Local, monkeypatch: pytest.MonkeyPatch, workers: int | str | None, lines: list[str]
) -> None:
    cluster, said, done = local
    with cluster.ready_for(RunConfig(command=("train.py",), num_workers=workers), said.append):
        pass
    assert (said, done) == (lines, [])


@pytest.mark.parametrize(
    ("cpus", "workers", "most"), [(2, 64, None), (2, 65, 64), (2, "1000:2000", 64), (32, 128, None), (32, 129, 128)]
)
def test_far_too_many_workers_are_refused(
    local: Local, monkeypatch: pytest.MonkeyPatch, cpus: int, workers: int | str, most: int | None
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cpus)
    cluster, _, done = local
    config = RunConfig(command=("train.py",), num_workers=workers)
    if most is None:
        assert cluster.check_settings(config) == config
        return
    rule = rf"^--num-workers: [\d,]+ workers are too many for this machine's {cpus} CPUs; give {most} at most$"
    with pytest.raises(UsageError, match=rule):
        cluster.check_settings(config)
    assert not done


def test_ray_program_starts_ray_and_ends_it_if_it_is_not_submitted(local: Local) -> None:
    cluster, said, done = local
    with cluster.ready_for(PROGRAM, said.append):
        assert cluster._ray
        assert (said, done) == (["starting Ray on this machine"], ["start 4"])
    assert done == ["start 4", "end"]


@pytest.mark.parametrize("answers", [True, False])
def test_running_ray_is_for_the_next_program(local: Local, monkeypatch: pytest.MonkeyPatch, answers: bool) -> None:
    cluster, said, done = local
    head = LocalHead("http://127.0.0.1:1", "127.0.0.1:2", "secret", 1, "identity", "ray")
    monkeypatch.setattr(local_head, "find", lambda: head)
    monkeypatch.setattr(local_head, "answers", lambda _: answers)
    with cluster.ready_for(PROGRAM, said.append):
        assert (cluster._ray == head) == answers
        if answers:
            assert cluster.jobs()._ray == head.variables
    assert (said, done) == (([], ["end"]) if answers else (["starting Ray on this machine"], ["start 4", "end"]))
    cluster.end_unused()
    assert done[-1] == "end"


def test_ray_of_a_run_is_not_ended_by_another(local: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, said, done = local
    head = LocalHead("http://127.0.0.1:1", "127.0.0.1:2", "secret", 1, "identity", "ray")
    own = {"run_name": "mine", "storage_path": "/my runs"}
    jobs = [{"submission_id": name, "ray": ray, "status": status, "metadata": own} for name, ray, status in OF_RAY]
    monkeypatch.setattr(local_head, "find", lambda: head)
    monkeypatch.setattr(local_head, "answers", lambda _: False)
    monkeypatch.setattr(local_head.MachineJobs, "list_jobs", lambda _: jobs)
    cluster.typed = " --local"
    stop = "RAY_ON_ECS_STORAGE_PATH='/my runs' ray-on-ecs stop --local mine"
    with pytest.raises(ResourceError, match=f"does not answer, and busy uses it; .* {stop}$"):
        cluster.ready_for(PROGRAM, said.append).__enter__()
    assert (said, done) == ([], [])
    silent = AnswerError("http://127.0.0.1:1", "silent")
    assert str(cluster.explain(silent)).endswith(f"; {stop} ends it")


def test_missing_ray_is_one_line(local: Local) -> None:
    cluster, _, _ = local
    with pytest.raises(HeadGone, match=r"^Ray is not running on this machine; a Ray program starts it$"):
        cluster.shell()


def test_hints_repeat_a_storage_path_of_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for given, hint in (("results", ""), ("my runs", f"RAY_ON_ECS_STORAGE_PATH='{tmp_path}/my runs' ")):
        monkeypatch.setenv("RAY_ON_ECS_STORAGE_PATH", given)
        assert LocalCluster().command("runs") == f"{hint}ray-on-ecs runs"


def test_hints_repeat_a_typed_storage_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ON_ECS_STORAGE_PATH", raising=False)
    cluster = LocalCluster()
    cluster.typed = " --local"
    assert cluster.command("fetch first") == "ray-on-ecs fetch --local first"
    cluster.typed_path = "/mnt/my runs"
    assert cluster.command("fetch first") == "RAY_ON_ECS_STORAGE_PATH='/mnt/my runs' ray-on-ecs fetch --local first"


@pytest.mark.parametrize(
    ("content", "variable", "token"),
    [
        ("RAY_AUTH_TOKEN=abc\n", "", "abc"),
        ("A=1\nRAY_AUTH_TOKEN=a=b", "", "a=b"),
        ("RAY_AUTH_TOKEN=abc\n", "other", "other"),
        ("A=1\n", "", ""),
        (None, "", ""),
    ],
)
def test_token_of_compose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None, variable: str, token: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAY_AUTH_TOKEN", variable)
    if content is not None:
        (tmp_path / "docker").mkdir()
        (tmp_path / "docker/.env").write_text(content)
    with ComposeCluster()._reach() as head:
        assert head.token == token


@pytest.mark.parametrize("words", [["rm", "first"], ["logs", "first"], ["stop", "first"], ["runs"], ["stop", "--all"]])
@pytest.mark.parametrize("has_run", [False, True])
def test_without_a_stack_the_runs_of_this_machine_are_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    has_run: bool,
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(stack, "CHECKOUT", tmp_path / "nowhere")
    monkeypatch.chdir(tmp_path)
    if has_run:
        (tmp_path / "results" / "first").mkdir(parents=True)
    assert main(words) == 2
    output = capsys.readouterr().err
    assert "Pulumi.yaml not found here" in output
    assert output.startswith("ray-on-ecs: for the runs of this machine give --local; for a cluster: ") == has_run
