"""Folders of runs in the training's format, on a disk or in S3, and a head that answers with given jobs."""

import json
import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ray_on_ecs.cluster.stack import Stack
from ray_on_ecs.storage import layout
from ray_on_ecs.storage.run_storage import RunStorage
from ray_on_ecs.storage.snapshot import KeptFile, Snapshot, write_snapshot
from tests.aws import REGION
from tests.serving import serving

SCRIPT = {"num_workers": 2, "storage_path": "results", "command": ["train.py", "--lr", "1"], "env": []}


def outputs(bucket: str) -> dict[str, Any]:
    """The outputs of a stack with this bucket; runs need no others."""
    return {
        **{each.name: "x" for each in fields(Stack) if each.name != "name"},
        "region": REGION,
        "bucket": bucket,
        "services": {"head": "x"},
        "default_gpus": 2,
        "estimated_hourly_usd": None,
    }


def moment(ago: float = 0.0) -> str:
    return (datetime.now(UTC) - timedelta(seconds=ago)).isoformat(timespec="milliseconds")


class Folders:
    """Writes runs under a storage path."""

    def __init__(self, path: str) -> None:
        self.path = path

    def of(self, name: str) -> RunStorage:
        return RunStorage.open(self.path, name)

    def status(self, name: str, state: str, **changed: Any) -> None:
        document = {
            "run_name": name,
            "state": state,
            "started": moment(720),
            "updated": moment(),
            "step": 25,
            "loss": 0.25,
            "metrics": {"loss": 0.25, "accuracy": 0.5, "lr": None},
            "workers": 2,
            "cost_usd": 0.42,
            "instances": None,
            "job": name,
            "error": None,
            "changed": ["command"],
            "next": f"ray-on-ecs run --run-name {name} train.py",
        }
        self.of(name).write_json(layout.STATUS, {**document, **changed})

    def read(self, name: str) -> dict[str, Any]:
        """Return the status of a run."""
        return self.of(name).read_json(layout.STATUS) or {}

    def script(self, name: str, records: int = 20, *, is_finished: bool = True, **settings: Any) -> None:
        """Write a run of a script, without a status."""
        storage = self.of(name)
        config = {**SCRIPT, "run_name": name, **settings}
        history = [
            {"step": 10 * index, "time": moment(), "loss": 1 / index, "val_loss": 1.1 / index, "lr": 0.1}
            for index in range(1, records + 1)
        ]
        storage.write_json(layout.SETTINGS, {"format": 1, "settings": config})
        storage.write_lines(layout.METRICS, history)
        if is_finished:
            storage.write_json(layout.RESULT, {**_result(config, history[-1]), "command": config["command"]})
            self.files(name, "model.pt")

    def files(self, name: str, *paths: str) -> None:
        """Write a snapshot with files of a script, which hold their names."""
        storage = self.of(name)
        for path in paths:
            storage.write(f"files/{path}", f"content of files/{path}")
        kept = {path: KeptFile(f"files/{path}", len(f"content of files/{path}")) for path in paths}
        write_snapshot(storage, Snapshot(kept))

    def age(self, seconds: float, *names: str) -> None:
        """Make files of a folder as old as this."""
        then = datetime.now().timestamp() - seconds
        for name in names:
            os.utime(Path(self.path, name), (then, then))


def _result(config: dict[str, Any], last: dict[str, Any]) -> dict[str, Any]:
    return {
        "run_name": config["run_name"],
        "metrics": last,
        "hardware": {"workers": 2, "device": "CPU"},
        "versions": {"torch": "2"},
        "times": {"started": moment(3 * 3600), "finished": moment(), "total_seconds": 14.5},
        "cost": {"usd": 0.5, "on_demand_usd": 1.0, "instance_hours": 1.0, "instances": []},
        "config": config,
        "files": {},
    }


def job(run_name: str, status: str = "RUNNING", **changed: Any) -> dict[str, Any]:
    """A job as Ray's REST API has it."""
    started = int(1000 * (datetime.now().timestamp() - 30))
    metadata = {"run_name": run_name, "storage_path": "results"}
    given = {"submission_id": run_name, "status": status, "metadata": metadata, "start_time": started}
    return {"type": "SUBMISSION", "entrypoint": "python -P -m ray_on_ecs.run train.py", **given, **changed}


@contextmanager
def head(jobs: Sequence[dict[str, Any]]) -> Generator[str]:
    """Answer as the dashboard of a head with these jobs would; yields its URL."""
    answers = {"/api/version": {"version": "4", "ray_version": version("ray")}, "/api/jobs/": list(jobs)}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps(answers[self.path]).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with serving(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as server:
        yield f"http://127.0.0.1:{server.server_port}"
