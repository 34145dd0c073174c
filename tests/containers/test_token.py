"""Without the token every service refuses to answer, and the token cannot be read anywhere."""

import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import pytest

from infra.definitions.containers import STATE_DIR
from ray_on_ecs.node import ports
from tests.containers.cluster import HEAD_HOST, Cluster, Trained
from tests.containers.engine import Engine
from tests.waiting import until

# Arguments: GET or POST, then URLs. Prints the statuses without a token and with a wrong one.
KNOCK = """
import sys, urllib.error, urllib.request as u
def status(url, **headers):
    try:
        return u.urlopen(u.Request(url, headers=headers, method=sys.argv[1]), timeout=30).status
    except urllib.error.HTTPError as refusal:
        return refusal.code
for url in sys.argv[2:]:
    print(status(url), status(url, Authorization="Bearer wrong"))
"""
# Arguments: host:port/method of gRPC. Prints the status codes without a token and with a wrong one.
CALL = """
import grpc, sys
def code(target, method, *token):
    call = grpc.insecure_channel(target).unary_unary("/" + method)
    try:
        return call(b"", timeout=30, metadata=token) and "OK"
    except grpc.RpcError as refusal:
        return refusal.code().name
for each in sys.argv[1:]:
    target, _, method = each.partition("/")
    print(code(target, method), code(target, method, ("authorization", "Bearer wrong")))
"""
# A driver with an actor that outlasts any wait for its ports.
DRIVE = """
import ray, time
@ray.remote(num_cpus=0)
class Actor:
    def here(self): return True
ray.init(address="auto")
actor = Actor.remote()
ray.get(actor.here.remote())
time.sleep(300)
"""
LISTENING = """
import psutil
print(*{each.laddr.port for each in psutil.net_connections() if each.status == "LISTEN"})
"""
GET = [
    "/api/version", "/api/jobs/", "/api/v0/nodes", "/nodes?view=summary", "/logical/actors", "/api/cluster_status",
    "/metrics", "/api/v0/logs?node_ip=127.0.0.1", "/worker/traceback?pid=1",
]  # fmt: skip
POST = ["/api/jobs/", "/api/authenticate"]
AGENT = ["/api/job_agent/jobs/1", "/logs/", "/api/runtime_envs"]
RUNTIME_ENV = ["/get_or_create_runtime_env", "/delete_runtime_env_if_possible"]
HEAD_CALLS = {
    ports.GCS: "ray.rpc.NodeInfoGcsService/GetAllNodeInfo",
    ports.CLIENT: "ray.rpc.RayletDriver/ClusterInfo",
}
NODE_CALLS = {
    ports.NODE["--node-manager-port"]: "ray.rpc.NodeManagerService/GetNodeStats",
    ports.NODE["--object-manager-port"]: "ray.rpc.ObjectManagerService/Pull",
    ports.NODE["--dashboard-agent-grpc-port"]: "ray.rpc.LogService/ListLogs",
}
WORKER_PORTS = (ports.NODE["--min-worker-port"], ports.NODE["--max-worker-port"])
RUNTIME_ENV_PORT = "--runtime-env-agent-port"
WORKER_CALL = "ray.rpc.CoreWorkerService/PushTask"


Strangers = dict[str, Future[tuple[int, str]]]


@pytest.fixture(scope="module")
def strangers(made: Cluster) -> Iterator[Strangers]:
    """A job, a node and a driver with a wrong token: exit status and log of each. They run at the same time."""
    made.settle()
    stranger = replace(made, engine=Engine(made.engine.command, {"RAY_AUTH_TOKEN": "another"}))

    def run(name: str, *command: str) -> tuple[int, str]:
        with stranger.one_more("worker", name, *made.hosts(), command=command) as container:
            return stranger.engine.wait(container)

    dashboard, gcs = f"http://{HEAD_HOST}:{ports.DASHBOARD}", f"{HEAD_HOST}:{ports.GCS}"
    with ThreadPoolExecutor(3) as pool:
        yield {
            "job": pool.submit(run, "job", "ray", "job", "submit", f"--address={dashboard}", "--", "true"),
            "node": pool.submit(run, "node", "ray", "start", f"--address={gcs}", "--block"),
            "driver": pool.submit(run, "driver", "python", "-c", f"import ray; ray.init('{gcs}')"),
        }


def refusals(cluster: Cluster, program: str, *arguments: str) -> set[str]:
    """Run a program in a worker's container and return its lines of output."""
    return set(cluster.engine.python(cluster.workers[0], program, *arguments).splitlines())


def test_http_is_refused(cluster: Cluster) -> None:
    head = f"http://{HEAD_HOST}:{ports.DASHBOARD}"
    assert refusals(cluster, KNOCK, "GET", *(head + path for path in GET)) == {"401 403"}
    assert refusals(cluster, KNOCK, "POST", *(head + path for path in POST)) == {"401 403"}
    for address in cluster.addresses().values():
        agent, runtime_env = f"http://{address}:{ports.AGENT}", f"http://{address}:{ports.NODE[RUNTIME_ENV_PORT]}"
        assert refusals(cluster, KNOCK, "GET", *(agent + path for path in AGENT)) == {"401 403"}
        assert refusals(cluster, KNOCK, "POST", *(runtime_env + path for path in RUNTIME_ENV)) == {"401 403"}


def test_grpc_is_refused(cluster: Cluster) -> None:
    calls = [f"{HEAD_HOST}:{port}/{method}" for port, method in HEAD_CALLS.items()]
    for address in cluster.addresses().values():
        calls += [f"{address}:{port}/{method}" for port, method in NODE_CALLS.items()]
    assert refusals(cluster, CALL, *calls) == {"UNAUTHENTICATED UNAUTHENTICATED"}


def test_ray_processes_refuse_other_tokens(cluster: Cluster) -> None:
    cluster.engine.run("exec", "--detach", cluster.head, "python", "-c", DRIVE)

    def answers() -> set[str]:
        """Return the answers of all listening processes, except processes that have ended since."""
        calls = [
            f"{address}:{port}/{WORKER_CALL}"
            for name, address in cluster.addresses().items()
            for port in map(int, cluster.engine.python(name, LISTENING).split())
            if port in range(*WORKER_PORTS)
        ]
        return refusals(cluster, CALL, *calls) - {"UNAVAILABLE UNAVAILABLE"}

    assert until(answers) == {"UNAUTHENTICATED UNAUTHENTICATED"}


def test_job_is_refused(strangers: Strangers) -> None:
    refused(strangers["job"])


def test_node_is_refused(strangers: Strangers) -> None:
    refused(strangers["node"])


def test_driver_is_refused(strangers: Strangers) -> None:
    refused(strangers["driver"])


def refused(stranger: Future[tuple[int, str]]) -> None:
    status, log = stranger.result()
    assert status != 0
    assert "token" in log.lower(), log


def test_token_is_only_in_its_variable(cluster: Cluster, trained: Trained) -> None:
    token = cluster.engine.secrets["RAY_AUTH_TOKEN"]
    assert token not in trained.log
    for name in cluster.names:
        assert token not in cluster.engine.logs(name)
        search = cluster.engine.execute(
            name, "grep", "-rlsa", "--devices=skip", token, "/tmp", "/home/ray", STATE_DIR, check=False
        )
        assert not search.stdout, "users can read Ray's logs, and its state outlives it"
        commands = cluster.engine.execute(name, "sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '").stdout
        assert "raylet" in commands
        assert token not in commands, "every user of the host can read command lines"
        description = cluster.engine.inspect(name)
        environment = description["Config"].pop("Env")
        assert [each for each in environment if token in each] == [f"RAY_AUTH_TOKEN={token}"]
        assert token not in json.dumps(description)
