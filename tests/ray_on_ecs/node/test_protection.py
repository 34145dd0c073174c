"""A node in use protects its task, an idle one does not, and neither a silent Ray nor a failing agent ends anything."""

import re
from collections.abc import Callable, Iterator

import pytest

from ray_on_ecs.contract import DOCUMENTS_VARIABLE, HEAD_STATE_VARIABLE
from ray_on_ecs.jobs.machine import MachineJobs
from ray_on_ecs.node import demand, head, metrics, outage, protection, worker
from ray_on_ecs.node.protection import IDLE_SECONDS, POLL_SECONDS, RENEW_SECONDS, Protection
from tests.ecs_agent import BLOCKED, DENIED, PROTECT, RELEASE, SET, Agent
from tests.serving import serving

COMMAND_NAME = "ray-worker"


@pytest.fixture
def agent() -> Iterator[Agent]:
    with serving(Agent()) as server:
        yield server


class Node:
    """A node whose use the test decides; an exception in the place of an answer is raised."""

    now = 1000.0

    def __init__(self, url: str) -> None:
        self.answer: bool | Exception | None = False
        self.protection = Protection(url, self._in_use)

    def _in_use(self) -> bool | None:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def passes(self, seconds: float, answer: bool | Exception | None) -> None:
        """Let time pass while the question has this answer."""
        self.answer = answer
        end = self.now + seconds
        while self.now < end:
            self.now += POLL_SECONDS
            self.protection.poll()

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def node(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> Node:
    made = Node(f"http://127.0.0.1:{agent.server_port}/api/1{protection.PATH}")
    monkeypatch.setattr(protection, "time", made)
    return made


def test_a_node_in_use_is_protected_and_renews(agent: Agent, node: Node) -> None:
    node.passes(POLL_SECONDS, True)
    assert agent.put == [("/api/1/task-protection/v1/state", PROTECT)]
    node.passes(10 * RENEW_SECONDS, True)
    assert agent.states == [PROTECT] * 11


def test_an_idle_node_is_released_once(agent: Agent, node: Node) -> None:
    node.passes(600, False)
    assert agent.states == []
    node.passes(POLL_SECONDS, True)
    node.passes(IDLE_SECONDS, False)
    assert RELEASE not in agent.states
    node.passes(600, False)
    assert agent.states[-1] == RELEASE
    assert agent.states.count(RELEASE) == 1
    node.passes(POLL_SECONDS, True)
    assert agent.states[-1] == PROTECT


def test_a_node_that_the_head_releases_does_not_wait(agent: Agent, node: Node) -> None:
    node.passes(POLL_SECONDS, True)
    node.passes(POLL_SECONDS, None)
    assert agent.states == [PROTECT, RELEASE]
    node.passes(POLL_SECONDS, True)
    assert agent.states[-1] == PROTECT


def test_a_silent_ray_keeps_the_protection(agent: Agent, node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    node.passes(POLL_SECONDS, True)
    node.passes(3600, OSError("the GCS does not answer"))
    assert agent.states == [PROTECT] * 61
    node.passes(IDLE_SECONDS, False)
    assert RELEASE not in agent.states
    node.passes(POLL_SECONDS, False)
    assert agent.states[-1] == RELEASE
    begins, ends = capsys.readouterr().err.splitlines()
    assert begins.startswith("ray-worker: the protection of this task has failed for 60 s (OSError: the GCS does not")
    assert ends == "ray-worker: the protection of this task works again"


def test_a_silent_ray_protects_no_idle_node(agent: Agent, node: Node) -> None:
    node.passes(3600, RuntimeError())
    assert agent.states == []


@pytest.mark.parametrize(
    ("status", "answer", "said"),
    [
        (500, "busy", r"ECS's agent doesn't answer at http://.*/state \(500: busy\)"),
        (400, DENIED, "AccessDeniedException"),
        (200, BLOCKED, "ECS refuses: .*DEPLOYMENT_BLOCKED"),
        (200, "text", 'ECS refuses: "text"'),
        (200, "[]", "ECS refuses"),
    ],
)
def test_failing_agent_costs_one_line(
    agent: Agent, node: Node, capsys: pytest.CaptureFixture[str], status: int, answer: object, said: str
) -> None:
    agent.fail(status, answer)
    node.passes(120, True)
    assert agent.states == [PROTECT] * 12
    agent.fail(200, SET)
    node.passes(POLL_SECONDS, True)
    agent.fail(status, answer)
    node.passes(300, False)
    assert agent.states.count(RELEASE) > 1
    agent.fail(200, SET)
    released = agent.states.count(RELEASE)
    node.passes(300, False)
    assert agent.states.count(RELEASE) == released + 1
    lines = capsys.readouterr().err.splitlines()
    assert [line.endswith("works again") for line in lines] == [False, True, False, True], lines
    assert re.search(said, lines[0])


def test_protection_whose_answer_was_lost_is_released(agent: Agent, node: Node) -> None:
    agent.loses_answers = True
    node.passes(POLL_SECONDS, True)
    assert agent.states == [PROTECT]
    node.passes(IDLE_SECONDS + POLL_SECONDS, False)
    assert agent.states[-1] == RELEASE


def test_released_node_is_never_protected_again(agent: Agent, node: Node) -> None:
    node.passes(POLL_SECONDS, True)
    node.protection.release()
    assert agent.states == [PROTECT, RELEASE]
    node.passes(600, True)
    node.protection.release()
    assert agent.states == [PROTECT, RELEASE]


def test_failed_release_is_tried_again(agent: Agent, node: Node) -> None:
    node.passes(POLL_SECONDS, True)
    agent.fail(500, "busy")
    with pytest.raises(OSError, match="busy"):
        node.protection.release()
    agent.fail(200, SET)
    node.passes(POLL_SECONDS, True)  # and by the thread
    assert agent.states == [PROTECT, RELEASE, RELEASE]


def test_unprotected_node_asks_nothing_at_its_release(agent: Agent, node: Node) -> None:
    node.protection.release()
    node.passes(600, True)
    assert agent.states == []


def test_a_failure_of_seconds_says_nothing(agent: Agent, node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(10):
        node.passes(outage.REPORT_SECONDS, OSError("Ray still starts"))
        node.passes(POLL_SECONDS, False)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("agent_uri", "threads"), [("http://169.254.170.2/api/1", 1), ("", 0)])
def test_outside_ecs_nothing_is_done(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], agent_uri: str, threads: int
) -> None:
    begun: list[object] = []
    monkeypatch.setenv(protection.AGENT_VARIABLE, agent_uri)
    monkeypatch.setattr(protection.threading.Thread, "start", lambda thread: begun.append(thread))
    protection.start(lambda: True)()
    assert len(begun) == threads
    assert capsys.readouterr() == ("", "")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, ray_arguments: list[str]) -> dict[str, Callable[[], bool]]:
    """The question of the node that was started; Ray is not."""
    asked: dict[str, Callable[[], bool]] = {}
    monkeypatch.setattr(protection, "start", lambda in_use: asked.update({"node": in_use}) or (lambda: None))
    monkeypatch.setattr("sys.argv", ["ray"])
    monkeypatch.setenv(worker.RECONNECT, "600")  # which it sets itself otherwise
    return asked


def test_a_worker_asks_the_gcs_about_itself(
    started: dict[str, Callable[[], bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_HEAD_HOST", "localhost")
    monkeypatch.setattr(worker, "join_blocker", lambda host: None)
    monkeypatch.setattr(demand, "node_in_use", lambda gcs, address: (gcs, address) == ("localhost:6379", "127.0.0.1"))
    monkeypatch.setattr(worker.ports, "source_address_for", lambda host: "127.0.0.1")
    worker.start()
    assert started["node"]()


@pytest.mark.parametrize(
    ("own", "of_ray", "in_use"),
    [
        ([], [], False),
        (["SUCCEEDED", "STOPPED"], ["FAILED"], False),
        (["RUNNING"], [], True),
        (["PENDING"], [], True),
        ([], ["RUNNING"], True),
        (["RUNNING"], OSError("Ray does not answer"), True),
        (["FAILED"], OSError("Ray does not answer"), None),
    ],
)
def test_a_head_asks_for_its_jobs_and_those_of_ray(
    started: dict[str, Callable[[], bool]],
    monkeypatch: pytest.MonkeyPatch,
    own: list[str],
    of_ray: list[str] | OSError,
    in_use: bool | None,
) -> None:
    def get(url: str) -> list[dict[str, str]]:
        if isinstance(of_ray, OSError):
            raise of_ray
        return [{"status": status} for status in of_ray]

    monkeypatch.setattr(MachineJobs, "list_jobs", lambda jobs: [{"status": status} for status in own])
    monkeypatch.setattr(metrics, "start", lambda idle: None)
    monkeypatch.setattr(head.api, "ask", get)
    for name in (HEAD_STATE_VARIABLE, DOCUMENTS_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    head.start()
    if in_use is None:
        with pytest.raises(OSError, match="Ray does not answer"):
            started["node"]()
    else:
        assert started["node"]() == in_use
