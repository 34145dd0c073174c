"""Without the token nothing answers but a refusal, and the token is nowhere to be read."""

import json
from dataclasses import replace

import pytest

from raynode import ports
from tests.containers.cluster import HEAD_HOST, Cluster
from tests.containers.engine import Engine

KNOCK = """
import sys, urllib.error, urllib.request as u
def status(url, **headers):
    try:
        return u.urlopen(u.Request(url, headers=headers, method=sys.argv[1]), timeout=10).status
    except urllib.error.HTTPError as refusal:
        return refusal.code
for url in sys.argv[2:]:
    print(status(url), status(url, Authorization="Bearer wrong"))
"""
DASHBOARD = [
    "/api/version", "/api/jobs/", "/api/v0/nodes", "/nodes?view=summary", "/logical/actors", "/api/cluster_status",
    "/metrics", "/api/authenticate", "/api/v0/logs?node_ip=127.0.0.1", "/worker/traceback?pid=1",
]  # fmt: skip
AGENT = ["/api/job_agent/jobs/1", "/logs/", "/api/runtime_envs"]


@pytest.fixture
def stranger(cluster: Cluster) -> Cluster:
    """The cluster as it looks to one who has another token."""
    return replace(cluster, engine=Engine(cluster.engine.command, {"RAY_AUTH_TOKEN": "another"}))


def refusals(cluster: Cluster, method: str, *urls: str) -> list[str]:
    """The statuses of each URL without a token and with a wrong one, asked for from a worker."""
    return cluster.engine.execute(cluster.workers[0], "python", "-c", KNOCK, method, *urls).stdout.split("\n")[:-1]


def test_the_dashboard_and_the_agents_refuse(cluster: Cluster) -> None:
    head = f"http://{HEAD_HOST}:{ports.DASHBOARD}"
    urls = [head + path for path in DASHBOARD]
    assert refusals(cluster, "GET", *urls[:-3]) == ["401 403"] * len(urls[:-3])
    assert refusals(cluster, "POST", f"{head}/api/jobs/", *urls[-3:]) == ["401 403"] * 4
    for address in cluster.addresses().values():
        agents = [f"http://{address}:{ports.AGENT}{path}" for path in AGENT]
        assert refusals(cluster, "GET", *agents) == ["401 403"] * len(agents)


def test_a_job_is_refused(stranger: Cluster) -> None:
    job = ("ray", "job", "submit", f"--address=http://{HEAD_HOST}:{ports.DASHBOARD}", "--", "true")
    with stranger.one_more("worker", "job", command=job) as name:
        status, log = ended(stranger, name)
        assert status != 0
        assert "token" in log.lower(), log


def test_a_node_is_refused(stranger: Cluster) -> None:
    join = ("ray", "start", f"--address={HEAD_HOST}:{ports.GCS}", "--block")
    with stranger.one_more("worker", "node", command=join) as name:
        status, log = ended(stranger, name)
        assert status != 0
        assert "token" in log.lower(), log


def test_a_driver_is_refused(stranger: Cluster) -> None:
    with stranger.one_more("worker", "driver", command=python(f"ray.init('{HEAD_HOST}:{ports.GCS}')")) as name:
        status, log = ended(stranger, name)
        assert status != 0
        assert "token" in log.lower(), log


def test_a_client_gets_no_answer(cluster: Cluster, stranger: Cluster) -> None:
    connect = python(f"ray.init('ray://{HEAD_HOST}:{ports.CLIENT}'); print('connected')")
    assert "connected" in cluster.engine.execute(cluster.workers[0], *connect).stdout, "it is there for the token"
    with stranger.one_more("worker", "client", command=connect) as name:
        status, log = ended(stranger, name)
        assert status != 0
        assert "connected" not in log


def test_the_token_is_in_no_log_and_no_description(cluster: Cluster) -> None:
    token = cluster.engine.secrets["RAY_AUTH_TOKEN"]
    for name in (cluster.head, *cluster.workers):
        assert token not in cluster.engine.logs(name)
        found = cluster.engine.execute(name, "grep", "-rlsa", token, "/tmp", "/home/ray", check=False).stdout
        assert not found, "Ray's own logs go where people look at them"
        commands = cluster.engine.execute(name, "sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '").stdout
        assert token not in commands, "every user of the host reads command lines"
        description = cluster.engine.inspect(name)
        environment = description["Config"].pop("Env")
        assert [each for each in environment if token in each] == [f"RAY_AUTH_TOKEN={token}"]
        assert token not in json.dumps(description), "it stands in its own variable and nowhere else"


def python(statements: str) -> tuple[str, ...]:
    """A command that runs these after `import ray`."""
    return ("python", "-c", f"import ray; {statements}")


def ended(cluster: Cluster, name: str) -> tuple[int, str]:
    """Exit status and log of a container that ends within a minute."""
    status = int(cluster.engine.run("wait", name, timeout=60).stdout)
    return status, cluster.engine.logs(name)
