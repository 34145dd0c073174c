"""A worker in use protects its ECS task, and no other node does."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from ray_on_ecs.node.protection import EXPIRES_MINUTES, IDLE_SECONDS
from tests.containers.cluster import Cluster
from tests.waiting import until

PROTECT = {"ProtectionEnabled": True, "ExpiresInMinutes": EXPIRES_MINUTES}
RELEASE = {"ProtectionEnabled": False}
DONE = "/tmp/done"
# ECS's agent on an instance: prints what each node puts.
AGENT = """
import http.server

class Handler(http.server.BaseHTTPRequestHandler):
    def do_PUT(self):
        print(self.path, self.rfile.read(int(self.headers["Content-Length"])).decode(), flush=True)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"protection": {}}')

    def log_message(self, *args):
        pass

http.server.HTTPServer(("", 8000), Handler).serve_forever()
"""
# Argument: the ID of the node on which the work is.
WORK = f"""
import os, sys, time
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

ray.init(address="auto", log_to_driver=False)

@ray.remote(num_cpus=1)
def work():
    while not os.path.exists("{DONE}"):
        time.sleep(0.5)

ray.get(work.options(scheduling_strategy=NodeAffinitySchedulingStrategy(sys.argv[1], soft=False)).remote())
"""


class Agent:
    """The agent's container, and what the nodes have put."""

    def __init__(self, cluster: Cluster) -> None:
        self._engine, self.name = cluster.engine, f"{cluster.network}-agent"
        options = ("--detach", f"--name={self.name}", f"--network={cluster.network}")
        self._engine.run("run", *options, cluster.image, "python", "-c", AGENT)
        self._address = self._engine.address(self.name, cluster.network)

    def uri(self, node: str) -> str:
        return f"http://{self._address}:8000/{node}"

    def states(self, node: str) -> list[dict[str, Any]]:
        lines = [line.partition(" ") for line in self._engine.logs(self.name).splitlines()]
        return [json.loads(body) for path, _, body in lines if path == f"/{node}/task-protection/v1/state"]


@pytest.fixture
def agent(cluster: Cluster) -> Iterator[Agent]:
    made = Agent(cluster)
    try:
        yield made
    finally:
        cluster.engine.remove(made.name)


def test_a_worker_is_protected_while_it_works(cluster: Cluster, agent: Agent, tmp_path: Path) -> None:
    with ExitStack() as nodes:
        busy, idle = (
            nodes.enter_context(cluster.one_more("worker", name, ECS_AGENT_URI=agent.uri(name)))
            for name in ("busy", "idle")
        )
        address = cluster.engine.address(busy, cluster.network)
        until(lambda: len(cluster.nodes()) == 5, 180, lambda: cluster.engine.logs(busy) + cluster.engine.logs(idle))
        [node] = [each["node_id"] for each in cluster.nodes() if each["node_ip"] == address]
        command = ("exec", cluster.head, "python", "-c", WORK, node)
        work = cluster.engine.start(*command, output=tmp_path / "work.log")
        until(lambda: agent.states("busy"), 120, lambda: (tmp_path / "work.log").read_text())

        cluster.engine.execute(busy, "touch", DONE)
        assert work.wait(120) == 0, (tmp_path / "work.log").read_text()
        until(lambda: RELEASE in agent.states("busy"), IDLE_SECONDS + 120, lambda: cluster.engine.logs(busy))
        *protected, released = agent.states("busy")
        assert set(map(str, protected)) == {str(PROTECT)}, "renewed each minute, and released last"
        assert released == RELEASE
        assert agent.states("idle") == [], "a scale-in may stop it"
        assert "protection" not in cluster.engine.logs(busy), "nothing has failed"
