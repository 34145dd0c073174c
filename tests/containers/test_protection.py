"""Only nodes in use protect their ECS task: a worker during work and a head during a job."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ray_on_ecs.contract import INSTANCE_FILE_VARIABLE, NOTICES_FILE, SPOT_ACTION
from ray_on_ecs.node.protection import EXPIRES_MINUTES, IDLE_SECONDS
from tests.containers.cluster import Cluster
from tests.waiting import until

PROTECT = {"ProtectionEnabled": True, "ExpiresInMinutes": EXPIRES_MINUTES}
RELEASE = {"ProtectionEnabled": False}
DONE = "/tmp/done"
# A worker on a separate instance, and the notice there.
INSTANCE = {INSTANCE_FILE_VARIABLE: "/tmp/instance.json"}
NOTICE = json.dumps({SPOT_ACTION: json.dumps({"action": "terminate"})})
# ECS's agent on an instance: prints the requests of each node.
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
# Argument: the ID of the node for the work.
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
# A job of Ray without counted resources.
JOB = ("sh", "-c", f"while ! [ -e {DONE} ]; do sleep 0.5; done")


class Agent:
    """The agent's container, and the requests of the nodes."""

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


@pytest.fixture
def nodes(cluster: Cluster, agent: Agent) -> Iterator[dict[str, str]]:
    """Three more workers of the cluster, and a head without workers; their containers by name."""
    kinds = {"busy": "worker", "idle": "worker", "spot": "worker", "lone": "head"}
    with ExitStack() as stack:
        made = {
            name: stack.enter_context(
                cluster.one_more(kind, name, ECS_AGENT_URI=agent.uri(name), **(INSTANCE if name == "spot" else {}))
            )
            for name, kind in kinds.items()
        }
        logs = partial(cluster.engine.logs, made["busy"])
        until(lambda: len(cluster.nodes()) == 6, why=logs)
        yield made


def test_nodes_are_protected_while_they_work(
    cluster: Cluster, agent: Agent, nodes: dict[str, str], tmp_path: Path
) -> None:
    engine = cluster.engine
    by_address = {node["node_ip"]: node["node_id"] for node in cluster.nodes()}
    until(lambda: engine.execute(nodes["lone"], "ray", "job", "list", check=False).returncode == 0)
    logs = {name: tmp_path / f"{name}.log" for name in ("busy", "spot", "lone")}
    worker, spot = (
        engine.start(
            *("exec", cluster.head, "python", "-c", WORK, by_address[engine.address(nodes[name], cluster.network)]),
            output=logs[name],
        )
        for name in ("busy", "spot")
    )
    head = engine.start("exec", nodes["lone"], "ray", "job", "submit", "--", *JOB, output=logs["lone"])
    until(lambda: all(map(agent.states, logs)), why=lambda: "".join(log.read_text() for log in logs.values()))

    engine.execute(nodes["spot"], "sh", "-c", f"echo '{NOTICE}' > /tmp/{NOTICES_FILE}")
    until(lambda: RELEASE in agent.states("spot"), why=partial(engine.logs, nodes["spot"]))
    until(lambda: "EC2 terminates this Spot Instance: draining" in engine.logs(nodes["spot"]))
    assert spot.poll() is None, "it works until its end"

    for name, work in (("busy", worker), ("spot", spot), ("lone", head)):
        engine.execute(nodes[name], "touch", DONE)
        assert work.wait(120) == 0, logs[name].read_text()
    for name in logs:
        until(lambda name=name: RELEASE in agent.states(name), IDLE_SECONDS + 120, partial(engine.logs, nodes[name]))
        *protected, released = agent.states(name)
        assert set(map(str, protected)) == {str(PROTECT)}
        assert released == RELEASE
        assert "protection" not in engine.logs(nodes[name])
    assert agent.states("idle") == []
