"""`ray-on-ecs --local` against a Ray head: the same verbs as on a stack."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import pytest

from ray_on_ecs.cli.main import main
from ray_on_ecs.cluster.head import Head as RestHead
from ray_on_ecs.node.api import AnswerError
from ray_on_ecs.node.ports import free_ports
from tests.commands.conftest import TINY
from tests.commands.head import SECONDS, TOKEN, Head, commands, read_until
from tests.waiting import until

Start = Callable[..., subprocess.Popen[str]]
Type = Callable[..., tuple[int, str, str]]
# Forwards a port to another one, as a session does. Arguments: the target port, and the port it listens on.
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
# The command, with a shorter limit for a silent log.
IMPATIENT = """
import sys
from ray_on_ecs.cluster import head
from ray_on_ecs.__main__ import main
head.SILENT_SECONDS, head.REQUEST_SECONDS = 2, 10
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def laptop(environment: dict[str, str], head: Head, tmp_path: Path) -> Iterator[Start]:
    """Start `ray-on-ecs COMMAND --local`, with the head of the tests."""
    own = {**environment, **head.variables, "RAY_API_SERVER_ADDRESS": head.dashboard}
    with commands("ray_on_ecs", own, tmp_path) as start:
        yield lambda command, *words, **options: start(command, "--local", *words, **options)


@pytest.fixture
def in_process(head: Head, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Type:
    """Run such a command in this process, for those that need no Ray client; return its exit status and output."""

    def run(command: str, *words: str, **variables: str) -> tuple[int, str, str]:
        own = {**head.variables, "RAY_API_SERVER_ADDRESS": head.dashboard, **variables}
        for name, value in own.items():
            monkeypatch.setenv(name, value)
        return main([command, "--local", *words]), *capsys.readouterr()

    return run


def at(port: int) -> dict[str, str]:
    return {"RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{port}"}


@contextmanager
def connected(head: Head, port: int) -> Generator[subprocess.Popen[str]]:
    """Forward a port to the head's dashboard."""
    command = [sys.executable, "-c", CONNECTION, head.dashboard.rpartition(":")[2], str(port)]
    connection = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert connection.stdout
        assert connection.stdout.readline()
        yield connection
    finally:
        connection.kill()
        connection.communicate()


def test_detached_run_is_followed_over_cuts_and_stopped(laptop: Start, head: Head, tmp_path: Path) -> None:
    holds = {step: tmp_path / f"hold-{step}" for step in (2, 3)}
    for file in holds.values():
        file.touch()
    flags = (word for step, file in holds.items() for word in ("--hold", str(step), str(file)))
    run = ("--run-name", "left", "--num-workers", "1", *TINY, *flags)
    detached = laptop("run", "--detach", "--json", *run)
    out, err = detached.communicate(timeout=SECONDS)
    assert detached.returncode == 0, err
    assert json.loads(out)["job"] == "left"

    port, other = free_ports(2)
    with connected(head, port) as cut, connected(head, other) as asleep:
        repeated = laptop("run", *run, **at(port))
        follower = laptop("logs", "--follow", "left", code=IMPATIENT, **at(other))
        logs = {process: read_until(process, "step 2: loss") for process in (repeated, follower)}
        cut.kill()
        cut.wait()
        asleep.send_signal(signal.SIGSTOP)  # as when a laptop sleeps: nothing is closed, and no data arrives
        for process in logs:
            assert process.stderr
            assert any("lost the connection" in line for line in process.stderr)
        asleep.send_signal(signal.SIGCONT)
        with connected(head, port):
            holds[2].unlink()
            for process in logs:
                logs[process] += read_until(process, "step 3: loss")
                assert logs[process].count("script   tiny.py") == 1
                assert [logs[process].count(f"step {step}: loss") for step in (1, 2, 3)] == [1, 1, 1]
            line = "run left is already active as job left, with the flags of its first command: its log from the start"
            assert logs[repeated].startswith(f"{line}\n")

            repeated.send_signal(signal.SIGINT)
            _, err = repeated.communicate(timeout=SECONDS)
            assert repeated.returncode == 130
            goes_on = "ray-on-ecs logs --local --follow left shows its log, ray-on-ecs stop --local left stops it"
            assert err.endswith(f"run left continues as job left: {goes_on}\n")
        status = head.storage / "left" / "status.json"
        until(lambda: json.loads(status.read_text())["state"] == "training")

        stop = laptop("stop", "left")
        _, err = stop.communicate(timeout=SECONDS)
        assert stop.returncode == 0, err
        assert "run left is stopped" in err
        _, err = follower.communicate(timeout=SECONDS)
        assert follower.returncode == 130
        way_on = "nothing is stored yet, so the same command with --run-name left starts from the beginning"
        assert err.endswith(f"ray-on-ecs: job left was stopped; {way_on}\n")
    assert json.loads(status.read_text())["state"] == "interrupted"


def test_ray_answers_every_request_for_jobs(head: Head) -> None:
    ray, texts = RestHead(head.dashboard, TOKEN["RAY_AUTH_TOKEN"]), list[str]()
    ray.submit("twice", "echo said", {"run_name": "echo"})
    with pytest.raises(AnswerError, match=r"500: ValueError: Job with submission_id twice already exists"):
        ray.submit("twice", "echo said", {})
    ray.tail("twice", texts.append)
    assert ray.job("twice")["status"] == "SUCCEEDED"
    assert "".join(texts) == ray.log("twice")
    assert "\nsaid\n" in ray.log("twice")
    assert ray.submitted_jobs()["twice"]["metadata"] == {"run_name": "echo"}
    ray.stop_job("twice")
    for ask in (ray.job, ray.stop_job, ray.log, lambda job: ray.tail(job, print)):
        with pytest.raises(AnswerError, match=r"refused at http://.*/absent[a-z/]* \(404: .*\)"):
            ask("absent")


def test_wrong_token_is_one_line(in_process: Type) -> None:
    line = "the Ray head refuses the token; set RAY_AUTH_TOKEN to the cluster's"
    assert in_process("run", *TINY, RAY_AUTH_TOKEN="another") == (2, "", f"ray-on-ecs: {line}\n")
    status, out, _ = in_process("doctor", RAY_AUTH_TOKEN="another")
    assert status == 1
    assert out.splitlines()[0].endswith(f"  Ray: {line}")


def test_status_shows_the_state_of_ray(in_process: Type) -> None:
    status, out, err = in_process("status")
    assert status == 0, err
    first, *lines = out.splitlines()
    assert first == "this machine"
    titles = [line.split()[0] for line in lines]
    assert titles == ["head", "GPUs", "jobs"]
    assert f"Ray {version('ray')}, up " in lines[0]
    assert lines[0].endswith(" of 2 CPUs in use")
    assert lines[1].endswith("0 of 0 in use, 0 requested")


def test_status_as_json(in_process: Type) -> None:
    _, out, _ = in_process("status", "--json")
    document = json.loads(out)
    assert document["gpus"] == {"used": 0, "total": 0, "requested": 0}
    [node] = document["nodes"]
    assert (node["kind"], node["cpus"]) == ("head", 2)


def test_doctor_passes_all_checks(in_process: Type) -> None:
    status, out, err = in_process("doctor")
    assert status == 0, out + err
    assert [line.partition(":")[0] for line in out.splitlines()] == ["ok  Ray", "ok  nodes", "ok  storage"]


def test_doctor_names_an_unwritable_folder(in_process: Type, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    status, out, _ = in_process("doctor", RAY_ON_ECS_STORAGE_PATH=str(tmp_path / "file" / "runs"))
    assert status == 1
    assert "can't be written" in out.splitlines()[-1]
