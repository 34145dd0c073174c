"""A head that sleeps and wakes, with an empty disk each time, and is killed at each step of that.

The head is a real `ray-head` without Ray, and CloudWatch moto's; the alarms and ECS are played here.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from moto.cloudwatch.models import cloudwatch_backends
from moto.core import DEFAULT_ACCOUNT_ID

from ray_on_ecs.cluster import wake
from ray_on_ecs.cluster.wake import Waker
from ray_on_ecs.contract import (
    CLOUDWATCH_NAMESPACE_VARIABLE,
    DOCUMENTS_VARIABLE,
    HEAD_IDLE,
    HEAD_REQUESTED,
    HEAD_STATE_VARIABLE,
    SLEEP_VARIABLE,
)
from ray_on_ecs.jobs import remote
from ray_on_ecs.jobs.documents import Documents
from ray_on_ecs.jobs.machine import MachineJobs
from ray_on_ecs.jobs.record import ENDED, REQUEST, RESUBMISSIONS, Job
from ray_on_ecs.jobs.remote import RemoteJobs, is_asleep
from ray_on_ecs.node.ports import free_ports
from ray_on_ecs.storage.disk import Disk
from tests.aws import REGION, environment
from tests.local_cluster import REPOSITORY
from tests.ray_on_ecs.node.test_desk import DRIVER, JANE
from tests.waiting import LIMIT_SECONDS, until
from tests.worker_pools import node_group, workers

# The idle time after which the head sleeps.
AFTER_SECONDS = 1.5
# In the place of `ray start`: the answers of a Ray without workers and jobs.
RAY = """
import http.server, json, signal, sys
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda *_: sys.exit(0))
ANSWERS = {
    "/api/jobs/": [],
    "/api/version": {"ray_version": "2.60.0"},
    "/api/gcs_healthz": {},
    "/api/cluster_status": {"data": {"clusterStatus": {}}},
    "/api/v0/nodes": {"data": {"result": {"result": []}}},
    "/nodes": {"data": {"summary": []}},
}
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps(ANSWERS[self.path.partition("?")[0]]).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_):
        pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
# `ray-head` in short times, on a machine without other processes.
HEAD = """
import json, sys
from pathlib import Path
from ray_on_ecs.jobs import machine
from ray_on_ecs.node import api, desk, head, idle, metrics, ports, resource_state
given = json.loads(sys.argv.pop(1))
machine.DRIVER = ("-c", given["driver"])
ports.DASHBOARD, ports.default_address = given["port"], lambda: "127.0.0.1"
head.RAY = (sys.executable, "-c", given["ray"], str(given["port"]))
idle.PROC, idle.LOOK_SECONDS, metrics.PUBLISH_SECONDS = Path(given["proc"]), 0.2, 0.5
desk.POLL_SECONDS, desk.STATE_SECONDS = 0.1, 0.3
api.check_gcs = lambda *_: None
metrics.read_cluster_info = lambda: given["info"]
resource_state.read = lambda gcs: resource_state.ResourceState()
resource_state.read_nodes = lambda gcs: [gcs]
head.main()
"""


class Stack:
    """ECS's service of the head with its two alarms, whose steps `look` takes.

    Attributes:
        wanted: The service's desired count.
        can_sleep: False while the alarm of an idle head does not act.
        starts: The number of heads so far.
    """

    def __init__(self, folder: Path, variables: dict[str, str]) -> None:
        self.folder, self.documents = folder, Documents(Disk(), str(folder / "documents"))
        self.namespace = f"ray-on-ecs/{folder.name.replace('[', '-').replace(']', '')}"
        self._variables = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "RAY_"))},
            **variables,
            "PYTHONPATH": str(REPOSITORY),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": "of-the-tests",
            CLOUDWATCH_NAMESPACE_VARIABLE: self.namespace,
            SLEEP_VARIABLE: str(AFTER_SECONDS / 60),
            DOCUMENTS_VARIABLE: str(folder / "documents"),
        }
        (folder / "proc" / "net").mkdir(parents=True)
        (folder / "proc" / "net" / "tcp").write_text("  sl  local_address rem_address   st\n")
        self.wanted, self.starts, self._seen = 1, 0, 0
        self.can_sleep = True
        self._process: subprocess.Popen[bytes] | None = None
        self._disk = folder

    def look(self) -> None:
        """Let the alarms act on new metrics, and ECS start the head if one is wanted and none runs."""
        data = [each for each in self._data() if each.namespace == self.namespace]
        new, self._seen = data[self._seen :], len(data)
        is_requested = any(each.name == HEAD_REQUESTED and each.value >= 1 for each in new)
        is_idle = any(each.name == HEAD_IDLE and each.value >= AFTER_SECONDS / 60 for each in new)
        if is_requested:
            self.wanted = 1
        elif is_idle and self.wanted and self.can_sleep:
            self.wanted = 0
            if self._process:
                self._process.terminate()
        if self.wanted and not self.runs:
            self._start()

    @staticmethod
    def _data() -> list[Any]:
        return cloudwatch_backends[DEFAULT_ACCOUNT_ID][REGION].metric_data

    @property
    def runs(self) -> bool:
        """True while the head's process runs."""
        return self._process is not None and self._process.poll() is None

    @property
    def jobs(self) -> MachineJobs:
        """The drivers on the head's disk."""
        return MachineJobs(self._disk / "jobs", is_head=True)

    def _start(self) -> None:
        self.starts += 1
        self._disk = self.folder / f"disk-{self.starts}"
        self._disk.mkdir()
        given = {
            "driver": DRIVER,
            "ray": RAY,
            "port": free_ports(1)[0],
            "proc": str(self.folder / "proc"),
            "info": workers(workers=node_group()),
        }
        with (self.folder / f"head-{self.starts}.log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", HEAD, json.dumps(given)],
                env={**self._variables, HEAD_STATE_VARIABLE: str(self._disk)},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def kill(self) -> None:
        """Kill the head with all its processes, as the loss of its instance does."""
        if self._process:
            with suppress(ProcessLookupError):  # it has just ended
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(LIMIT_SECONDS)
        for job in self.jobs.list_jobs():
            if job["status"] not in ENDED:
                self.jobs.kill_job(job["submission_id"])

    @property
    def is_asleep(self) -> bool:
        """True if the head has gone to sleep."""
        return not self.wanted and not self.runs

    @property
    def state(self) -> Any:
        """The state that a head has written last."""
        return self.documents.read_head()[1]

    @property
    def listed(self) -> list[Job]:
        """The jobs of that state."""
        return self.state.jobs

    def until(self, condition: Callable[[], Any]) -> None:
        """Look until a condition holds."""

        def holds() -> Any:
            self.look()
            return condition()

        until(holds, between=0.05, why=lambda: "".join(path.read_text() for path in self.folder.glob("*.log")))


@pytest.fixture
def stack(aws_server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stack]:
    monkeypatch.setattr(remote, "SILENT_SECONDS", 1.5)
    monkeypatch.setattr(wake, "SILENT_SECONDS", 1.5)
    monkeypatch.setattr(wake, "REPEAT_SECONDS", 0.5)
    monkeypatch.setattr(remote, "POLL_SECONDS", 0.1)
    for name, value in environment(aws_server).items():
        monkeypatch.setenv(name, value)
    with tempfile.TemporaryDirectory(prefix="sleep-") as folder:
        stack = Stack(Path(folder), environment(aws_server))
        yield stack
        stack.kill()


@contextmanager
def submitted(stack: Stack, name: str) -> Generator[list[str]]:
    """Request a run as another machine; a list that gets its job's ID, or the error."""
    metadata = {"run_name": name, "storage_path": str(stack.folder / "runs"), "max_resubmissions": "3"}
    ends: list[str] = []

    def submit() -> None:
        jobs = RemoteJobs(stack.documents, lambda: JANE, lambda line: None, waker=Waker(lambda line: None))
        try:
            ends.append(jobs.submit(str(stack.folder / "runs" / name), metadata))
        except Exception as error:
            ends.append(repr(error))

    thread = threading.Thread(target=submit)
    thread.start()
    yield ends
    thread.join(LIMIT_SECONDS)


def run_of(stack: Stack, name: str) -> list[Job]:
    return [job for job in stack.listed if job["metadata"]["run_name"] == name]


def has_begun(stack: Stack, name: str) -> bool:
    return (stack.folder / "runs" / name / "starts").exists()


def has_ended(stack: Stack, name: str) -> bool:
    return any(job["status"] in ENDED and job["metadata"]["run_name"] == name for job in stack.jobs.list_jobs())


# The moments at which the head is killed while a user's request is on its way, in their order.
STEPS: dict[str, Callable[[Stack], bool]] = {
    "starting": lambda stack: stack.runs,
    "awake": lambda stack: stack.runs and stack.state.idle_minutes < AFTER_SECONDS / 60,
    "recorded": lambda stack: bool(run_of(stack, "mine")),
    "running": lambda stack: has_begun(stack, "mine"),
    "ended": lambda stack: has_ended(stack, "mine"),
    "stopping": lambda stack: not stack.wanted and stack.runs,
}


@pytest.mark.parametrize("step", STEPS)
def test_killed_head_loses_nothing_on_its_way_through_sleep(stack: Stack, step: str) -> None:
    end = stack.folder / "runs" / "mine" / "end"
    stack.until(lambda: stack.is_asleep)
    heads = stack.starts
    with submitted(stack, "mine") as ends:
        if step in ("ended", "stopping"):
            stack.until(lambda: has_begun(stack, "mine"))
            end.write_text("0")
        stack.until(lambda: STEPS[step](stack))
        stack.kill()
        stack.until(lambda: has_begun(stack, "mine"))
        end.write_text("0")
        stack.until(lambda: ends)
    stack.until(lambda: stack.is_asleep)
    assert ends == ["mine"]
    assert step == "stopping" or is_asleep(stack.state, remote.SILENT_SECONDS + 1), "and its state says so"
    accepted = [job for job in run_of(stack, "mine") if job["metadata"].get(RESUBMISSIONS) is None]
    assert len({job["metadata"][REQUEST] for job in run_of(stack, "mine")}) == len(accepted) == 1
    assert [job["status"] for job in run_of(stack, "mine")][-1] == "SUCCEEDED"
    assert not stack.documents.requests()
    log = RemoteJobs(stack.documents, lambda: JANE, print).log(run_of(stack, "mine")[-1]["submission_id"])
    assert log == "begins\nends\n"
    assert stack.starts - heads <= 3

    with submitted(stack, "next") as ends:
        stack.until(lambda: ends)
    assert ends == ["next"]
    assert run_of(stack, "mine")[-1]["status"] == "SUCCEEDED", "the next head knows it"


def test_request_in_the_last_second_wakes_the_next_head(stack: Stack) -> None:
    """Its client is killed at once, so that the head alone can ask for the next one."""
    stack.can_sleep = False
    stack.until(lambda: stack.state.idle_minutes * 60 > AFTER_SECONDS)
    process = stack._process
    assert process
    os.kill(process.pid, signal.SIGSTOP)  # before it can see the request
    metadata = {"run_name": "mine", "storage_path": str(stack.folder / "runs"), "max_resubmissions": "3"}
    stack.documents.write_request(JANE, "run", uri=str(stack.folder / "runs" / "mine"), metadata=metadata)
    stack.wanted, stack.can_sleep = 0, True
    process.terminate()
    os.kill(process.pid, signal.SIGCONT)
    stack.until(lambda: has_begun(stack, "mine"))
    (stack.folder / "runs" / "mine" / "end").write_text("0")
    stack.until(lambda: stack.is_asleep)
    assert [job["status"] for job in run_of(stack, "mine")][-1] == "SUCCEEDED"
