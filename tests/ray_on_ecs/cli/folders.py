"""Folders of runs in the training's format, on a disk or in S3, and jobs of this machine."""

import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import fields
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest import mock

from ray_on_ecs.cluster.clusters import LocalCluster
from ray_on_ecs.cluster.stack import Stack
from ray_on_ecs.jobs.machine import STOP, MachineJobs
from ray_on_ecs.jobs.record import Job
from ray_on_ecs.storage import layout
from ray_on_ecs.storage.run_storage import RunStorage
from ray_on_ecs.storage.snapshot import KeptFile, Snapshot, write_snapshot
from tests.aws import REGION

SCRIPT = {"num_workers": 2, "storage_path": "results", "command": ["train.py", "--lr", "1"], "env": []}


def outputs(bucket: str) -> dict[str, Any]:
    """The outputs of a stack with this bucket; runs need no others."""
    return {
        **{field.name: "x" for field in fields(Stack) if field.name != "name"},
        "region": REGION,
        "bucket": bucket,
        "services": {"head": "x"},
        "estimated_hourly_usd": None,
    }


def moment(ago: float = 0.0) -> str:
    return (datetime.now(UTC) - timedelta(seconds=ago)).isoformat(timespec="milliseconds")


def age_object(bucket: str, key: str, seconds: float) -> None:
    """Let an object of S3 be written this many seconds ago."""
    from moto.core import DEFAULT_ACCOUNT_ID
    from moto.s3.models import s3_backends

    written = datetime.now(UTC).replace(tzinfo=None) - timedelta(seconds=seconds)
    s3_backends[DEFAULT_ACCOUNT_ID]["aws"].buckets[bucket].keys[key].last_modified = written


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


def job(run_name: str, status: str = "RUNNING", **changed: Any) -> Job:
    """A job in the format of its record (jobs/record.py)."""
    started = int(1000 * (datetime.now().timestamp() - 30))
    metadata = {"run_name": run_name, "storage_path": "results"}
    given = {"submission_id": run_name, "status": status, "metadata": metadata, "start_time": started}
    ended = {"end_time": None, "driver_exit_code": None, "message": None, "is_interrupted": False}
    return {**given, **ended, "uri": "", "log": run_name, "ray": None, **changed}


class Jobs(MachineJobs):
    """Jobs of this machine without processes: a stopped one has ended, and each has one line in its log."""

    stop_seconds = 60.0

    def __init__(self, *jobs: Job) -> None:
        self.jobs = {each["submission_id"]: each for each in jobs}

    @property
    def states(self) -> dict[str, str]:
        return {job_id: each["status"] for job_id, each in self.jobs.items()}

    def list_jobs(self) -> list[Job]:
        return [*self.jobs.values()]

    def job(self, job_id: str) -> Job:
        return self.jobs[job_id]

    def stop_job(self, job_id: str, mark: str = STOP) -> None:
        self.jobs[job_id]["status"] = "STOPPED"

    def log(self, job_id: str) -> str:
        return "a line\n"


@contextmanager
def jobs_here(*jobs: Job) -> Generator[Jobs]:
    """Let this machine have these jobs, for the commands in this process."""
    found = Jobs(*jobs)
    with mock.patch.object(LocalCluster, "jobs", return_value=found):
        yield found
