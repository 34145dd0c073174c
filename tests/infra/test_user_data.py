"""User data of the instances."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import cast

import pytest

from infra.definitions.user_data import (
    INSTANCE_DIR,
    INSTANCE_FILE,
    NOTICES_UNIT,
    PASS_ON_NOTICES,
    machine_image,
    user_data,
)
from ray_on_ecs.contract import LIFECYCLE_STATE, NOTICES_FILE, REBALANCE, SCHEDULED_EVENTS, SPOT_ACTION
from tests.serving import serving
from tests.waiting import until


def test_agent_joins_cluster_and_blocks_imds() -> None:
    assert user_data("ray-cluster").splitlines()[:14] == [
        "#!/bin/bash",
        "cat >> /etc/ecs/ecs.config <<'EOF'",
        "ECS_CLUSTER=ray-cluster",
        "ECS_ENABLE_TASK_IAM_ROLE=true",
        "ECS_AWSVPC_BLOCK_IMDS=true",
        "ECS_SELINUX_CAPABLE=true",
        "ECS_IMAGE_PULL_BEHAVIOR=once",
        "ECS_ENGINE_TASK_CLEANUP_WAIT_DURATION=10m",
        "ECS_IMAGE_PULL_INACTIVITY_TIMEOUT=10m",
        "ECS_CONTAINER_CREATE_TIMEOUT=10m",
        "ECS_CONTAINER_START_TIMEOUT=10m",
        "ECS_RESERVED_MEMORY=256",
        "ECS_ENABLE_SPOT_INSTANCE_DRAINING=true",
        "EOF",
    ]


INSTANCE = {
    "instance-type": "g5.xlarge",
    "placement/availability-zone": "us-west-2b",
    "instance-life-cycle": "spot",
    "instance-id": "i-0abc",
    "placement/region": "us-west-2",
    "services/domain": "amazonaws.com",
    "dynamic/instance-identity/document": '{\n  "instanceId" : "i-0abc",\n  "pendingTime" : "2026-01-01T00:00:00Z"\n}',
}
# Notices as AWS's documentation shows them.
NOTICES = {
    SPOT_ACTION: '{"action": "terminate", "time": "2017-09-18T08:22:00Z"}',
    REBALANCE: '{"noticeTime": "2020-10-27T08:22:00Z"}',
    LIFECYCLE_STATE: "Terminated",
    SCHEDULED_EVENTS: """[
  {
    "NotBefore" : "21 Jan 2019 09:00:43 GMT",
    "Code" : "system-reboot",
    "Description" : "scheduled reboot",
    "EventId" : "instance-event-0d59937288b749b32",
    "NotAfter" : "21 Jan 2019 09:17:23 GMT",
    "State" : "active"
  }
]""",
}


class Metadata(ThreadingHTTPServer):
    """The instance metadata service, which wants its token; `faults` are by path."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.texts, self.faults = dict(INSTANCE), dict[str, str]()
        self.tokens = 0
        self.asked = 0


class Handler(BaseHTTPRequestHandler):
    """Answers as the service does, or not."""

    def do_PUT(self) -> None:
        """Hand out the next token."""
        service = cast(Metadata, self.server)
        assert self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
        service.tokens += 1
        self._answer("token", f"token-{service.tokens}")

    def do_GET(self) -> None:
        """Answer for one path."""
        service = cast(Metadata, self.server)
        service.asked += 1
        path = self.path.removeprefix("/latest/").removeprefix("meta-data/")
        if self.headers["X-aws-ec2-metadata-token"] != f"token-{service.tokens}":
            self.send_error(401)
        elif path not in service.texts:
            self.send_error(404)
        else:
            self._answer(path, service.texts[path])

    def _answer(self, path: str, text: str) -> None:
        fault = cast(Metadata, self.server).faults.get(path, "")
        if fault == "silence":
            time.sleep(2 * TIMEOUT_SECONDS)
        elif fault.isdecimal():
            self.send_error(int(fault))
        else:
            self.send_response(200)
            body = text.encode()
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[: len(body) // 2 if fault == "half" else None])

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def metadata() -> Iterator[Metadata]:
    with serving(Metadata()) as server:
        yield server


# Of the script in these tests.
TIMEOUT_SECONDS, PAUSE_SECONDS = 0.5, 0.05


def in_folder(script: str, folder: Path, metadata: Metadata) -> str:
    """Return a script that asks the stand-in and writes into a folder, with shorter times."""
    for name in ("/etc/ecs", "/etc/systemd/system", "/usr/local/bin", INSTANCE_DIR):
        script = script.replace(name, str(folder))
    script = script.replace("169.254.169.254", f"127.0.0.1:{metadata.server_port}")
    return script.replace("-m 2", f"-m {TIMEOUT_SECONDS}").replace("sleep 1", f"sleep {PAUSE_SECONDS}")


def start(script: str, folder: Path, silent: int = 0) -> None:
    """Run the user data, with stand-ins for systemd, and for Session Manager, which answers after some requests."""
    programs = {
        "systemctl": f'echo "$@" >> {folder}/systemctl',
        "systemd-run": 'shift; exec "$@"',
        "sleep": "",
        "curl": f"""case "$*" in
          *https://ssm.us-west-2.amazonaws.com/) echo >> {folder}/asked; (($(wc -l < {folder}/asked) > {silent})) ;;
          *) exec {shutil.which("curl")} "$@" ;;
        esac""",
    }
    (folder / "bin").mkdir()
    for name, text in programs.items():
        (folder / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / "bin" / name).chmod(0o755)
    path = {"PATH": f"{folder}/bin:{os.environ['PATH']}"}
    subprocess.run(["bash", "-eu", "-c", script], check=True, timeout=60, cwd=folder, env=os.environ | path)


@pytest.mark.parametrize(("silent", "restarts"), [(0, 0), (1, 1), (7, 1)])
def test_session_manager_is_restarted_once_it_is_reached(
    metadata: Metadata, tmp_path: Path, silent: int, restarts: int
) -> None:
    start(in_folder(user_data("ray-cluster"), tmp_path, metadata), tmp_path, silent)
    assert (tmp_path / "systemctl").read_text().count("restart amazon-ssm-agent") == restarts
    assert len((tmp_path / "asked").read_text()) == silent + 1


@pytest.mark.parametrize("document", [None, "", "<html>not found</html>", "{}"])
def test_the_instance_says_what_it_is(metadata: Metadata, tmp_path: Path, document: str | None) -> None:
    if document is not None:
        metadata.texts["dynamic/instance-identity/document"] = document
    script = in_folder(user_data("ray-cluster"), tmp_path, metadata)
    (tmp_path / "stat").write_text("cpu  1 2 3\nbtime 1767225630\nprocesses 4\n")
    script = script.replace("/proc/stat", f"{tmp_path}/stat")
    start(script, tmp_path)
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
    unit = (tmp_path / f"{NOTICES_UNIT}.service").read_text().splitlines()
    assert {f"ExecStart={tmp_path}/{NOTICES_UNIT}", "Restart=always", "WantedBy=multi-user.target"} <= set(unit)
    assert (tmp_path / "systemctl").read_text() == f"enable --now --no-block {NOTICES_UNIT}\n"
    program = tmp_path / NOTICES_UNIT
    assert program.read_text() == in_folder(PASS_ON_NOTICES, tmp_path, metadata)
    assert os.access(program, os.X_OK)


class Unit:
    """The unit's script; `start` starts it again, as systemd does."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        self.file, self.metadata = folder / NOTICES_FILE, metadata
        self._script = in_folder(PASS_ON_NOTICES, folder, metadata)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._process = subprocess.Popen(["bash", "-c", self._script], start_new_session=True)

    def kill(self) -> None:
        if self._process:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def texts(self) -> dict[str, str]:
        return json.loads(self.file.read_text()) if self.file.exists() else {}

    def passes_on(self, texts: dict[str, str]) -> bool:
        return self.texts() == {path: text.replace("\n", " ") for path, text in texts.items()}

    def goes_on(self) -> None:
        """Wait for some rounds."""
        asked = self.metadata.asked + 12
        until(lambda: self.metadata.asked >= asked, between=PAUSE_SECONDS)


@pytest.fixture
def unit(metadata: Metadata, tmp_path: Path) -> Iterator[Unit]:
    machine = Unit(tmp_path, metadata)
    yield machine
    machine.kill()


def test_notices_are_passed_on_until_they_end(unit: Unit, metadata: Metadata) -> None:
    unit.start()
    until(unit.file.exists)
    assert unit.texts() == {}
    metadata.texts |= NOTICES
    del metadata.texts[SCHEDULED_EVENTS]  # which is asked less often
    expected = {path: text for path, text in NOTICES.items() if path != SCHEDULED_EVENTS}
    until(lambda: unit.passes_on(expected))
    del metadata.texts[SPOT_ACTION], expected[SPOT_ACTION]
    until(lambda: unit.passes_on(expected))


def test_all_notices_are_passed_on_at_the_start(unit: Unit, metadata: Metadata) -> None:
    metadata.texts |= NOTICES
    unit.start()
    until(lambda: unit.passes_on(NOTICES))


FAULTS = ("silence", "half", "500", "503", "401", "403")


@pytest.mark.parametrize("fault", FAULTS)
def test_an_answer_that_fails_changes_nothing(unit: Unit, metadata: Metadata, fault: str) -> None:
    metadata.texts |= NOTICES
    unit.start()
    until(lambda: unit.passes_on(NOTICES))
    metadata.faults[SPOT_ACTION] = fault
    metadata.texts[LIFECYCLE_STATE] = "InService"
    unit.goes_on()
    until(lambda: unit.passes_on({**NOTICES, LIFECYCLE_STATE: "InService"}))


def test_no_answer_leaves_the_file_to_grow_old(unit: Unit, metadata: Metadata) -> None:
    unit.start()
    until(unit.file.exists)
    metadata.faults = dict.fromkeys(metadata.texts | NOTICES, "500")
    metadata.texts |= NOTICES
    unit.goes_on()
    written = unit.file.stat().st_mtime_ns
    unit.goes_on()
    assert unit.file.stat().st_mtime_ns == written
    metadata.faults = {}
    until(lambda: SPOT_ACTION in unit.texts())
    written = unit.file.stat().st_mtime_ns
    until(lambda: unit.file.stat().st_mtime_ns > written)


def test_expired_token_is_renewed(unit: Unit, metadata: Metadata) -> None:
    unit.start()
    until(unit.file.exists)
    metadata.faults["token"] = "503"
    metadata.tokens += 1  # the script's is none any longer
    unit.goes_on()
    metadata.texts[LIFECYCLE_STATE] = "InService"
    metadata.faults = {}
    until(lambda: unit.passes_on({LIFECYCLE_STATE: "InService"}))


def test_killed_script_goes_on_after_its_restart(unit: Unit, metadata: Metadata) -> None:
    metadata.texts |= {path: text for path, text in NOTICES.items() if path != SCHEDULED_EVENTS}
    unit.start()
    until(lambda: SPOT_ACTION in unit.texts())
    unit.kill()
    assert SPOT_ACTION in unit.texts()
    (unit.file.with_name(f"{NOTICES_FILE}.new")).write_text("half")
    metadata.texts[LIFECYCLE_STATE] = "InService"
    unit.start()
    until(lambda: unit.texts().get(LIFECYCLE_STATE) == "InService")
    assert json.loads(unit.texts()[SPOT_ACTION]) == json.loads(NOTICES[SPOT_ACTION])


def test_any_text_makes_a_whole_document(unit: Unit, metadata: Metadata) -> None:
    text = """<a href="x">\\ & % $(date) `date` ' é</a>"""
    metadata.texts[SPOT_ACTION] = text
    unit.start()
    until(lambda: unit.passes_on({SPOT_ACTION: text}))


@pytest.mark.parametrize(("gpu", "variant"), [(False, ""), (True, "gpu/")])
def test_the_image_is_amazon_linux_2023_for_ecs(gpu: bool, variant: str) -> None:
    parameter = f"/aws/service/ecs/optimized-ami/amazon-linux-2023/{variant}recommended/image_id"
    assert machine_image(gpu=gpu) == f"resolve:ssm:{parameter}"
