"""A run that waits for a node, and then for its first step, on a real Ray cluster: the parts of its start."""

import json
import re
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from ray_on_ecs.contract import INSTANCE_FILE_VARIABLE
from ray_on_ecs.node import labels
from ray_on_ecs.node.task_metadata import METADATA_VARIABLE
from tests.commands.head import SECONDS
from tests.local_cluster import LocalCluster
from tests.serving import serving
from tests.waiting import until

pytestmark = pytest.mark.ray
SCRIPT = 'print("step 1 loss 0.5", flush=True)\n'


class Agent(BaseHTTPRequestHandler):
    """The ECS agent's metadata endpoint."""

    task: ClassVar[dict[str, Any]] = {}

    def do_GET(self) -> None:
        """Answer with the task."""
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(self.task).encode())

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


def flags_of_node(folder: Path, monkeypatch: pytest.MonkeyPatch, requested: datetime) -> list[str]:
    """The flags of `ray-worker` on an instance that launched for this request, with tenths of seconds for minutes."""
    at = [
        datetime.fromtimestamp(requested.timestamp() + tenths / 10, UTC).isoformat().replace("+00:00", "Z")
        for tenths in (1, 2, 3, 5)
    ]
    file = folder / "instance.json"
    kind = {"instance_type": "g5.xlarge", "zone": "us-west-2a", "market": "spot"}
    file.write_text(json.dumps({**kind, "launched": at[0], "booted": at[1]}))
    monkeypatch.setattr(Agent, "task", {"PullStartedAt": at[2], "PullStoppedAt": at[3], "Containers": []})
    monkeypatch.setenv(INSTANCE_FILE_VARIABLE, str(file))
    with serving(ThreadingHTTPServer(("127.0.0.1", 0), Agent)) as agent:
        monkeypatch.setenv(METADATA_VARIABLE, f"http://127.0.0.1:{agent.server_port}/v4/1234")
        return labels.flags()


def test_run_from_zero_shows_where_its_time_went(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text(SCRIPT)
    status = tmp_path / "mine" / "status.json"

    def start_so_far() -> dict[str, Any] | None:
        found = json.loads(status.read_text()) if status.exists() else {}
        return found["starts"][-1] if found.get("state") == "waiting" else None

    with LocalCluster(0) as cluster, (tmp_path / "log").open("wb") as log:
        words = ("--storage-path", str(tmp_path), "--run-name", "mine", "--num-workers", "1", "--worker-timeout", "900")
        driver = cluster.start_training(*words, "--working-dir", str(tmp_path / "code"), "train.py", log=log)
        waits = until(start_so_far)
        assert not waits["is_over"]
        assert waits["parts"].keys() <= {"workers"}
        cluster.add_worker(*flags_of_node(tmp_path, monkeypatch, datetime.fromisoformat(waits["requested"])))
        assert driver.wait(SECONDS) == 0, (tmp_path / "log").read_text()
    [start] = json.loads((tmp_path / "mine" / "result.json").read_text())["starts"]
    parts = start["parts"]
    assert list(parts) == ["alarm", "instance", "boot", "image", "Ray", "environment", "first step"]
    assert list(parts.values())[:4] == pytest.approx([0.1, 0.1, 0.1, 0.2], abs=0.02)
    assert start["is_over"]
    output = (tmp_path / "log").read_text()
    [line] = re.findall(r"ray-on-ecs: start (\d+) min (\d+) s = .*Ray \d+:\d\d", output)
    assert 60 * int(line[0]) + int(line[1]) == round(sum(parts.values()))
    assert f"{line[0]} min {line[1]} s = " in (tmp_path / "mine" / "report.html").read_text()
