"""The dashboard of a Ray head with the nodes of a test."""

from __future__ import annotations

import json
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from typing import Any, cast

from ray_on_ecs.node.labels import fingerprint

TOKEN = "of-the-stack"


class RayHead(ThreadingHTTPServer):
    """The dashboard of a Ray head: the answers of Ray 2.60, for the nodes of a test.

    Attributes:
        nodes: The nodes in the format of the state API.
        usage: Used GPUs by node.
        waiting: The pending shapes, and the number of each.
        version: Ray's version.
        jobs: The states of the jobs in the head's state.
        is_up: False before its first state.
        has_ray: False if Ray does not answer it.
        silent_seconds: The age of its state.
        code: The fingerprint of its code.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Dashboard)
        self.reset()

    def reset(self) -> None:
        """Have no workers."""
        self.nodes = [node("head", {"CPU": 2.0}, {}, is_head_node=True)]
        self.usage: dict[str, float] = {}
        self.waiting: list[tuple[dict[str, float], int]] = []
        self.version = version("ray")
        self.jobs: list[str] = []
        self.is_up = self.has_ray = True
        self.silent_seconds, self.code = 0.0, fingerprint()

    def add_worker(self, used: float = 0.0, gpus: float = 1.0, **labels: str) -> None:
        """Add a node, by default with one GPU."""
        known = {
            "instance-type": "g5.xlarge",
            "ray.io/availability-zone": "us-east-1a",
            "ray.io/market-type": "on-demand",
        }
        self.nodes.append(node(f"worker-{len(self.nodes)}", {"CPU": 4.0, "GPU": gpus}, {**known, **labels}))
        self.usage[self.nodes[-1]["node_id"]] = used

    def answer(self, path: str) -> Any:
        """Return the answer of the dashboard."""
        match path.partition("?")[0]:
            case "/api/version":
                return {"version": "4", "ray_version": self.version, "session_name": "session"}
            case "/api/v0/nodes":
                return {"result": True, "data": {"result": {"total": len(self.nodes), "result": self.nodes}}}
            case "/api/cluster_status":
                usage = {name: {"GPU": [used, 8.0], "CPU": [0.0, 4.0]} for name, used in self.usage.items()}
                load = {"resourceDemand": self.waiting, "pgDemand": [], "usageByNode": usage}
                return {"data": {"clusterStatus": {"loadMetricsReport": load}}}
        return None


def node(name: str, resources: dict[str, float], labels: dict[str, str], **more: Any) -> dict[str, Any]:
    """A node as Ray's state API has it, started 6,600 s ago."""
    return {
        "node_id": name,
        "is_head_node": False,
        "state": "ALIVE",
        "state_message": None,
        "resources_total": resources,
        "labels": labels,
        "start_time_ms": 1000 * (time.time() - 6600),
        "end_time_ms": 0,
        **more,
    }


class Dashboard(BaseHTTPRequestHandler):
    """Answers with the head's state, and with 403 to another token."""

    def do_GET(self) -> None:
        found = cast(RayHead, self.server).answer(self.path)
        is_let_in = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        self.send_response((200 if found is not None else 404) if is_let_in else 403)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(found).encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""
