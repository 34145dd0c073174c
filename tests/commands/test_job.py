"""Runs as jobs of a Ray head: a user who lost the connection finds them again."""

import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.job_submission import JobInfo, JobStatus, JobSubmissionClient

from ray_on_ecs.cli.main import main
from ray_on_ecs.cluster import jobs
from ray_on_ecs.cluster.clusters import HeadCluster
from ray_on_ecs.cluster.head import Head
from ray_on_ecs.config import RunConfig
from ray_on_ecs.errors import ResourceError
from tests.commands.conftest import CLASSIFIER
from tests.commands.head import ON_HEAD, SECONDS, TOKEN, commands, read_until
from tests.commands.head import Head as RayHead
from tests.waiting import free_ports, until

SHORT = ("--run-name", "short", "--num-workers", "2", *CLASSIFIER, "--model", "own:build", "--epochs", "2")
LONG = ("--run-name", "long", "--num-workers", "1", *CLASSIFIER, "--model", "own:held", "--epochs", "10")
# Arguments: the target port, and the port it listens on. Like a session's connection to the head, it can be cut.
CONNECTION = """
import asyncio, sys
async def copy(reader, writer):
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()
async def connect(reader, writer):
    there, back = await asyncio.open_connection("127.0.0.1", int(sys.argv[1]))
    await asyncio.gather(copy(reader, back), copy(there, writer))
async def main():
    async with await asyncio.start_server(connect, "127.0.0.1", int(sys.argv[2])) as server:
        print("listening", flush=True)
        await server.serve_forever()
asyncio.run(main())
"""


@pytest.fixture(scope="module")
def ray_jobs(head: RayHead) -> JobSubmissionClient:
    return JobSubmissionClient(head.dashboard, headers={"Authorization": f"Bearer {TOKEN['RAY_AUTH_TOKEN']}"})


@pytest.fixture
def follow(
    environment: dict[str, str], head: RayHead, tmp_path: Path
) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start `ray-on-ecs run` as on the head; end the commands that still follow after the test."""
    own = {**environment, **head.variables, "RAY_API_SERVER_ADDRESS": head.dashboard, **ON_HEAD}
    with commands("ray_on_ecs", own, tmp_path) as start:
        yield partial(start, "run")


@pytest.fixture
def long_run(follow: Callable[..., subprocess.Popen[str]], hold: Path, ray_jobs: JobSubmissionClient) -> Iterator[str]:
    """The job of a run that outlasts the test; the command that followed it was killed."""
    first = follow(*LONG)
    read_until(first, "train loss")
    first.kill()
    first.wait()
    job_id = _latest(ray_jobs, "long")
    yield job_id
    ray_jobs.stop_job(job_id)
    until(lambda: ray_jobs.get_job_status(job_id).is_terminal())


def test_finished_run_is_refused_a_second_time(
    follow: Callable[..., subprocess.Popen[str]], head: RayHead, ray_jobs: JobSubmissionClient
) -> None:
    process = follow(*SHORT)
    out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, out + err
    assert out.startswith("run short is submitted as job short\n")
    assert "[rank 0] epoch 1/" in out
    assert "results in " in out
    assert err.endswith("ray-on-ecs open short shows its report, ray-on-ecs fetch short copies it to this machine\n")
    folder = head.storage / "short"
    assert (folder / "result.json").exists()
    status = json.loads((folder / "status.json").read_text())
    assert (status["state"], status["job"]) == ("finished", "short")
    [log] = (folder / "logs").iterdir()
    assert log.read_text() == out.partition("\n")[2]
    assert "test_accuracy" in (folder / "report.html").read_text()
    again = follow(*SHORT)
    out, err = again.communicate(timeout=SECONDS)
    assert again.returncode == 2
    assert "run 'short' is finished" in err
    assert _status(ray_jobs, "short") == "SUCCEEDED"


def test_repeated_command_follows_the_run_from_the_start(
    follow: Callable[..., subprocess.Popen[str]], long_run: str, ray_jobs: JobSubmissionClient
) -> None:
    assert _status(ray_jobs, long_run) == "RUNNING"
    second = follow(*LONG)
    seen = read_until(second, "train loss")
    line = f"run long is already active as job {long_run}, with the flags of its first command: its log from the start"
    assert seen.startswith(f"{line}\n"), seen
    assert "script   image_classifier.py" in seen
    assert _latest(ray_jobs, "long") == long_run, "a second driver would write into the same run"
    second.send_signal(signal.SIGINT)
    _, err = second.communicate(timeout=SECONDS)
    assert second.returncode == 130
    assert f"run long continues as job {long_run}" in err
    assert "ray-on-ecs logs --follow long shows its log, ray-on-ecs stop long stops it" in err
    assert "Traceback" not in err
    assert _status(ray_jobs, long_run) == "RUNNING"


def test_lost_connection_is_restored_and_stop_is_reported(
    follow: Callable[..., subprocess.Popen[str]], long_run: str, head: RayHead, ray_jobs: JobSubmissionClient
) -> None:
    [port] = free_ports(1)
    there = head.dashboard.rpartition(":")[2]

    def connect() -> subprocess.Popen[bytes]:
        connection = subprocess.Popen([sys.executable, "-c", CONNECTION, there, str(port)], stdout=subprocess.PIPE)
        assert connection.stdout
        connection.stdout.readline()
        return connection

    connection = connect()
    cut, whole = follow(*LONG, RAY_API_SERVER_ADDRESS=f"http://127.0.0.1:{port}"), follow(*LONG)
    seen = {process: read_until(process, "train loss") for process in (cut, whole)}
    connection.kill()
    connection.communicate()
    connection = connect()
    try:
        ray_jobs.stop_job(long_run)
        for process in (cut, whole):
            out, err = process.communicate(timeout=SECONDS)
            assert process.returncode == 130
            line = f"ray-on-ecs: job {long_run} was stopped; the same command with --run-name long resumes the run\n"
            assert err.endswith(line)
            assert ("lost the connection (" in err) == (process is cut)
            assert (seen[process] + out).count("script   image_classifier.py") == 1
    finally:
        connection.kill()
        connection.communicate()
    status = json.loads((head.storage / "long" / "status.json").read_text())
    assert status["state"] == "interrupted"


def test_generated_run_name_can_be_given_again(
    follow: Callable[..., subprocess.Popen[str]], ray_jobs: JobSubmissionClient
) -> None:
    process = follow("--num-workers", "1", *CLASSIFIER, "--epochs", "0")
    out, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 2
    name = out.split()[1]
    assert name.startswith("image-classifier-")
    found: Any = ray_jobs.get_job_info(name)
    assert f" --run-name {name} " in found.entrypoint
    assert found.entrypoint.endswith(" image_classifier.py --data digits --samples 256 --epochs 0")


def test_wrong_token_is_one_line(follow: Callable[..., subprocess.Popen[str]]) -> None:
    process = follow("--run-name", "refused", *SHORT[2:], RAY_AUTH_TOKEN="another")
    out, err = process.communicate(timeout=SECONDS)
    assert (process.returncode, out) == (2, "")
    assert err.startswith("ray-on-ecs: the Ray head refuses the token; set RAY_AUTH_TOKEN to the cluster's"), err
    assert err.count("\n") == 1


def test_missing_head_is_one_line_and_status_3(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAY_ON_ECS_CLUSTER", "head")
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://127.0.0.1:9")
    monkeypatch.setattr(HeadCluster, "start_seconds", 0.0)
    assert main(["run", *CLASSIFIER]) == 3
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("its dashboard doesn't answer at http://127.0.0.1:9") == err.count("\n") == 1


@pytest.fixture
def followed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., int]:
    """Return the exit status of the command for a job with this end and an empty log."""
    begun: list[Any] = []
    script = tmp_path / "code" / "train.py"
    script.parent.mkdir()
    script.touch()

    def follow(
        *given: str,
        submitted: list[dict[str, Any]] | None = None,
        **details: Any,
    ) -> int:
        class Client:
            def __init__(self, address: str) -> None:
                pass

            def list_jobs(self) -> list[Any]:
                return begun

            def submit_job(self, **job: Any) -> None:
                named = {"submission_id": job["submission_id"], "metadata": job["metadata"], "start_time": 1}
                begun.append(SimpleNamespace(**named, status=JobStatus.SUCCEEDED))
                if submitted is not None:
                    submitted.append(job)

            async def tail_job_logs(self, job_id: str) -> AsyncIterator[str]:
                yield ""

            def get_job_info(self, job_id: str) -> JobInfo:
                return JobInfo(entrypoint="python", **details)

        monkeypatch.setattr("ray.job_submission.JobSubmissionClient", Client)
        monkeypatch.setattr(Head, "get", lambda self, path: {"data": {"result": {"result": []}}})
        monkeypatch.setenv("RAY_ON_ECS_CLUSTER", "head")
        monkeypatch.setenv("RAY_ON_ECS_STORAGE_PATH", str(tmp_path / "runs"))
        return main(["run", *given, "--run-name", "gone", "--working-dir", str(script.parent), script.name])

    return follow


def test_driver_ended_by_a_signal_has_shell_status(
    followed: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert followed(status="FAILED", driver_exit_code=-9) == 137
    line = "ray-on-ecs: job gone was ended by signal 9; the same command with --run-name gone resumes the run\n"
    assert capsys.readouterr().err.endswith(line)


def test_job_without_a_driver_has_a_reason(followed: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert followed(status="FAILED", message="The actor\ndied.") == 1
    line = "ray-on-ecs: job gone failed (The actor died.); the same command with --run-name gone resumes the run\n"
    assert capsys.readouterr().err.endswith(line)


@pytest.mark.parametrize("given", [["-1"], ["x"], ["1.5"], []], ids=["negative", "text", "fraction", "nothing"])
def test_wrong_number_of_resubmissions_is_one_line(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--max-resubmissions", *given]) == 2
    err = capsys.readouterr().err
    assert err.startswith("ray-on-ecs: "), err
    assert "--max-resubmissions" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("given", "environment", "allowed"),
    [([], None, "3"), (["--max-resubmissions", "0"], "5", "0"), (["--max-resubmissions=7"], None, "7"), ([], "5", "5")],
    ids=["the default", "none", "another number", "of the environment"],
)
def test_job_has_its_limit_of_resubmissions(
    monkeypatch: pytest.MonkeyPatch,
    followed: Callable[..., int],
    given: list[str],
    environment: str | None,
    allowed: str,
) -> None:
    monkeypatch.delenv("RAY_ON_ECS_MAX_RESUBMISSIONS", raising=False)
    if environment:
        monkeypatch.setenv("RAY_ON_ECS_MAX_RESUBMISSIONS", environment)
    submitted: list[dict[str, Any]] = []
    followed(*given, submitted=submitted, status="SUCCEEDED", driver_exit_code=0)
    [job] = submitted
    assert job["metadata"]["max_resubmissions"] == allowed
    assert "resubmissions" not in job["entrypoint"]


MINE = jobs.Submission({"run_name": "mine", "storage_path": "runs"}, RunConfig(command=("train.py",)))


class Refusing:
    """A Jobs API that refuses the first jobs for these reasons, and takes the next one."""

    def __init__(self, *reasons: str) -> None:
        self.reasons = list(reasons)
        self.submitted: list[str] = []

    def list_jobs(self) -> list[Any]:
        return [
            SimpleNamespace(submission_id=each, metadata=MINE.run, status=JobStatus.RUNNING) for each in self.submitted
        ]

    def submit_job(self, *, submission_id: str, **_: Any) -> None:
        if self.reasons:
            raise RuntimeError(self.reasons.pop(0))
        self.submitted.append(submission_id)


def test_submission_is_repeated_until_the_agent_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "POLL_SECONDS", 0.01)
    api: Any = Refusing(*["No available agent to submit job, please try again later."] * 5)
    assert jobs.find_or_submit(api, MINE, {}) == "mine"
    assert api.submitted == ["mine"]


@pytest.mark.parametrize("is_taken", [False, True])
def test_lost_response_submits_no_second_job(monkeypatch: pytest.MonkeyPatch, is_taken: bool) -> None:
    monkeypatch.setattr(jobs, "POLL_SECONDS", 0.01)

    class Losing(Refusing):
        def submit_job(self, *, submission_id: str, **given: Any) -> None:
            lost, self.lost = self.lost, False
            if is_taken or not lost:
                super().submit_job(submission_id=submission_id, **given)
            if lost:
                raise ConnectionError("Remote end closed connection without response")

        lost = True

    api: Any = Losing()
    assert jobs.find_or_submit(api, MINE, {}) == "mine"
    assert api.submitted == ["mine"]


def test_lost_race_is_repeated_with_a_limit() -> None:
    api: Any = Refusing(*["Job with submission_id mine already exists."] * jobs.SUBMIT_ATTEMPTS)
    with pytest.raises(ResourceError, match="the Ray head did not accept the job"):
        jobs.find_or_submit(api, MINE, {})


def _latest(jobs: JobSubmissionClient, name: str) -> str:
    """Return the ID of the last job of a run."""
    listed: list[Any] = jobs.list_jobs()
    mine = [each for each in listed if (each.metadata or {}).get("run_name") == name]
    return max(mine, key=lambda each: each.start_time).submission_id


def _status(jobs: JobSubmissionClient, job_id: str) -> str:
    return jobs.get_job_status(job_id).value
