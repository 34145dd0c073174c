"""User data of the instances."""

from __future__ import annotations

import json
import subprocess
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from infra.definitions.user_data import INSTANCE_DIR, INSTANCE_FILE, machine_image, user_data
from tests.serving import serving


def test_agent_joins_cluster_and_blocks_imds() -> None:
    assert user_data("ray-cluster").splitlines()[:13] == [
        "#!/bin/bash",
        "cat >> /etc/ecs/ecs.config <<'EOF'",
        "ECS_CLUSTER=ray-cluster",
        "ECS_ENABLE_TASK_IAM_ROLE=true",
        "ECS_AWSVPC_BLOCK_IMDS=true",
        "ECS_IMAGE_PULL_BEHAVIOR=once",
        "ECS_ENGINE_TASK_CLEANUP_WAIT_DURATION=10m",
        "ECS_IMAGE_PULL_INACTIVITY_TIMEOUT=10m",
        "ECS_CONTAINER_CREATE_TIMEOUT=10m",
        "ECS_CONTAINER_START_TIMEOUT=10m",
        "ECS_RESERVED_MEMORY=256",
        "ECS_ENABLE_SPOT_INSTANCE_DRAINING=true",
        "EOF",
    ]


METADATA = {
    "api/token": "token",
    "meta-data/instance-type": "g5.xlarge",
    "meta-data/placement/availability-zone": "us-west-2b",
    "meta-data/instance-life-cycle": "spot",
    "meta-data/instance-id": "i-0abc",
    "dynamic/instance-identity/document": '{\n  "instanceId" : "i-0abc",\n  "pendingTime" : "2026-01-01T00:00:00Z"\n}',
}


class Metadata(BaseHTTPRequestHandler):
    """The instance metadata service, which wants its token."""

    def do_PUT(self) -> None:
        """Hand out the token."""
        assert self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
        self.do_GET()

    def do_GET(self) -> None:
        """Answer for one path."""
        path = self.path.removeprefix("/latest/")
        allowed = path == "api/token" or self.headers["X-aws-ec2-metadata-token"] == "token"
        self.send_response(200 if allowed and path in METADATA else 404)
        self.end_headers()
        self.wfile.write(METADATA.get(path, "").encode() if allowed else b"")

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.mark.parametrize("document", [None, "", "<html>not found</html>", "{}"])
def test_the_instance_says_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, document: str | None) -> None:
    if document is not None:
        monkeypatch.setitem(METADATA, "dynamic/instance-identity/document", document)
    with serving(ThreadingHTTPServer(("127.0.0.1", 0), Metadata)) as server:
        script = user_data("ray-cluster").replace("169.254.169.254", f"127.0.0.1:{server.server_port}")
        script = script.replace("/etc/ecs/ecs.config", f"{tmp_path}/ecs.config").replace(INSTANCE_DIR, str(tmp_path))
        (tmp_path / "stat").write_text("cpu  1 2 3\nbtime 1767225630\nprocesses 4\n")
        script = script.replace("/proc/stat", f"{tmp_path}/stat")
        subprocess.run(["bash", "-eu", "-c", script], check=True, timeout=60)
    description = json.loads((tmp_path / INSTANCE_FILE).read_text())
    assert description == {
        "instance_type": "g5.xlarge",
        "zone": "us-west-2b",
        "market": "spot",
        "instance_id": "i-0abc",
        "launched": "2026-01-01T00:00:00Z" if document is None else "",
        "booted": "1767225630",
    }
    assert "ECS_CLUSTER=ray-cluster" in (tmp_path / "ecs.config").read_text()


@pytest.mark.parametrize(("gpu", "variant"), [(False, ""), (True, "gpu/")])
def test_the_image_is_amazon_linux_2023_for_ecs(gpu: bool, variant: str) -> None:
    parameter = f"/aws/service/ecs/optimized-ami/amazon-linux-2023/{variant}recommended/image_id"
    assert machine_image(gpu=gpu) == f"resolve:ssm:{parameter}"
