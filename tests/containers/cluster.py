"""The cluster of the stack on one machine: its container definitions, started on a private network beside an S3."""

import json
import re
import subprocess
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infra import commands, containers
from infra.sizing import TaskSize
from tests.containers.engine import Engine, arguments

ROOT = Path(__file__).parents[2]
HEAD_HOST = "head.ray.internal"
BUCKET = "training"
METRICS = "ray-on-ecs/test"
S3 = "s3"
AWS = {"AWS_ACCESS_KEY_ID": "local", "AWS_SECRET_ACCESS_KEY": "local", "AWS_ENDPOINT_URL": f"http://{S3}:5000"}
SIZE = TaskSize(vcpus=1, memory_mib=3072, gpus=0)
# A model of one's own, on every node: with it a run of many short epochs can be disturbed in its middle.
MODELS = "/opt/models"
EPOCHS = 25
LONG = ("--model=tiny:mlp", "--dataset=synthetic", "--samples=20000", f"--epochs={EPOCHS}")

NODES = """
import json, ray
ray.init(address="auto", logging_level="ERROR", log_to_driver=False)
print(json.dumps([node for node in ray.nodes() if node["Alive"]]))
"""
FREE = """
import ray
ray.init(address="auto", logging_level="ERROR", log_to_driver=False)
print("free:", ray.available_resources().get("CPU", 0))
"""
JOBS = """
import json
from raynode import api, head
print(json.dumps({job["submission_id"]: job["status"] for job in api.get(head.JOBS) if job["submission_id"]}))
"""
CREATE = f"import boto3; boto3.client('s3', endpoint_url='http://127.0.0.1:5000').create_bucket(Bucket='{BUCKET}')"
READ = """
import boto3, sys
s3 = boto3.client("s3", endpoint_url="http://127.0.0.1:5000")
try:
    sys.stdout.write(s3.get_object(Bucket="{bucket}", Key="{key}")["Body"].read().decode())
except s3.exceptions.NoSuchKey:
    pass
"""
LIST = """
import boto3
s3 = boto3.client("s3", endpoint_url="http://127.0.0.1:5000")
pages = s3.get_paginator("list_objects_v2").paginate(Bucket="{bucket}", Prefix="{prefix}")
print("\\n".join(each["Key"] for page in pages for each in page.get("Contents", [])))
"""
PUBLISHED = """
import boto3
cloudwatch = boto3.client("cloudwatch", endpoint_url="http://127.0.0.1:5000", region_name="us-east-1")
print("\\n".join(each["MetricName"] for each in cloudwatch.list_metrics(Namespace="{namespace}")["Metrics"]))
"""


@dataclass
class Cluster:
    """A head, its workers and an S3, each a container of its own on `network`."""

    engine: Engine
    image: str
    network: str
    workers: list[str] = field(default_factory=list)
    started: int = 0
    runs: list["Run"] = field(default_factory=list)

    @property
    def head(self) -> str:
        """The head's container."""
        return f"{self.network}-head"

    @property
    def storage(self) -> str:
        """The container of the S3."""
        return f"{self.network}-{S3}"

    def definition(self, kind: str) -> containers.Container:
        """The stack's own definition of a head or a worker, of a size that fits here."""
        common = containers.Common(
            image=self.image, log_group="logs", region="us-east-1", token_arn="arn:token", size=SIZE
        )
        if kind == "head":
            return containers.head(common, bucket=BUCKET, metrics_namespace=METRICS)
        return containers.worker(common, head_host=HEAD_HOST)

    def state(self, name: str) -> str:
        """The volume that a head's container leaves behind."""
        return f"{name}-state"

    def run(self, kind: str, name: str, *options: str, command: Sequence[str] = (), **variables: str) -> None:
        """Start a node, or another command in a node's container; `variables` go before the definition's."""
        definition = self.definition(kind)
        if command:
            definition["command"] = list(command)
        self.engine.remove(name)
        networks = () if any(each.startswith("--network=") for each in options) else (f"--network={self.network}",)
        models = f"--volume={Path(__file__).parent / 'tiny.py'}:{MODELS}/tiny.py:ro"
        kept = {containers.STATE: self.state(name)}
        given = arguments(definition, {**AWS, "PYTHONPATH": MODELS, **variables}, kept)
        self.engine.run("run", "--detach", f"--name={name}", *networks, models, *options, *given)

    def start_storage(self, image: str) -> None:
        """Start the S3 and make its bucket."""
        self.engine.run(
            "run", "--detach", f"--name={self.storage}", f"--network={self.network}", f"--network-alias={S3}",
            *(f"--env={name}={value}" for name, value in AWS.items() if name != "AWS_ENDPOINT_URL"),
            image,
        )  # fmt: skip
        until(lambda: self.engine.execute(self.storage, "python", "-c", CREATE, check=False).returncode == 0, 60)

    def start_head(self) -> None:
        """Start the head under its name, as a new container."""
        self.run("head", self.head, f"--network-alias={HEAD_HOST}")

    def start_worker(self, *options: str, **variables: str) -> str:
        """Start one more worker; its container."""
        self.started += 1
        name = f"{self.network}-worker-{self.started}"
        self.run("worker", name, *options, **variables)
        self.workers.append(name)
        return name

    def replace_stopped(self) -> None:
        """What ECS does: a new container for each one that has ended."""
        if not self.is_running(self.head):
            self.start_head()
        for name in [each for each in self.workers if not self.is_running(each)]:
            self.workers.remove(name)
            self.engine.remove(name)
        while len(self.workers) < 2:
            self.start_worker()

    def settle(self, seconds: float = 180) -> None:
        """Replace what has ended until a head and two workers are well, and the head knows just these."""
        self.until(lambda: all(map(self.is_well, (self.head, *self.workers))) and len(self.nodes()) == 3, seconds)

    def until(self, condition: Callable[[], Any], seconds: float) -> Any:
        """Wait for a condition while what ends is replaced."""

        def replaced_and_true() -> Any:
            self.replace_stopped()
            return condition()

        return until(replaced_and_true, seconds)

    def is_running(self, name: str) -> bool:
        """Whether a container is there and runs."""
        done = self.engine.run("inspect", "--format={{.State.Status}}", name, check=False)
        return done.stdout.strip() == "running"

    def is_well(self, name: str) -> bool:
        """What the definition's own health check says."""
        kind = "head" if name == self.head else "worker"
        _, *command = self.definition(kind)["healthCheck"]["command"]
        return self.engine.execute(name, *command, check=False).returncode == 0

    def nodes(self) -> list[dict[str, Any]]:
        """The nodes that the head knows as alive, as `ray.nodes()` has them."""
        [listed] = [line for line in self.engine.python(self.head, NODES).splitlines() if line.startswith("[{")]
        return json.loads(listed)

    def free_cpus(self) -> float:
        """The CPUs that no work holds."""
        return float(self.engine.python(self.head, FREE).rpartition("free:")[2])

    def jobs(self) -> dict[str, str]:
        """The status of each submitted job, by its submission id."""
        return json.loads(self.engine.python(self.head, JOBS))

    def addresses(self) -> dict[str, str]:
        """The address of each node's container on the network."""
        return {name: self.engine.address(name, self.network) for name in (self.head, *self.workers)}

    def submit(self, *flags: str) -> list[str]:
        """The command that the stack's `train_command` runs in the head, with more flags."""
        inside = re.search(r"exec -it \$c (python -m training\.job .*?)\"", commands.train("us-east-1", 2, "i-1"))
        assert inside is not None, "train_command has another form"
        return [*inside[1].split(), *flags]

    def train(self, run_name: str, *flags: str, seconds: float = 240) -> str:
        """Train to the end; the job's log."""
        command = self.submit(f"--run-name={run_name}", *flags)
        done = self.engine.run("exec", self.head, *command, check=False, timeout=seconds)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def read(self, key: str) -> str:
        """An object of the bucket, empty if it isn't there."""
        return self.engine.python(self.storage, READ.format(bucket=BUCKET, key=key))

    def keys(self, prefix: str) -> set[str]:
        """The keys of the bucket below a prefix, without it."""
        listed = self.engine.python(self.storage, LIST.format(bucket=BUCKET, prefix=prefix)).split()
        return {key.removeprefix(prefix) for key in listed}

    def metrics(self) -> set[str]:
        """The names of the metrics that head and job have published."""
        return set(self.engine.python(self.storage, PUBLISHED.format(namespace=METRICS)).split())

    @contextmanager
    def one_more(self, kind: str, name: str, *options: str, **given: Any) -> Generator[str]:
        """A container beside the cluster, gone afterwards; its name."""
        name = f"{self.network}-{name}"
        self.run(kind, name, *options, **given)
        try:
            yield name
        finally:
            self.engine.remove(name)
            self.engine.remove_volume(self.state(name))

    def close(self) -> None:
        """Leave nothing behind."""
        self.engine.remove(self.head, self.storage, *self.workers)
        self.engine.remove_volume(self.state(self.head))


class Run(threading.Thread):
    """A run that goes on while the test does something to the cluster."""

    def __init__(self, cluster: Cluster, name: str, *flags: str) -> None:
        super().__init__(daemon=True)
        self.cluster, self.run_name, self.flags = cluster, name, flags
        self.log = self.failure = ""
        cluster.runs.append(self)
        self.start()

    def run(self) -> None:
        try:
            self.log = self.cluster.train(self.run_name, *self.flags, seconds=420)
        except (AssertionError, subprocess.TimeoutExpired) as failure:
            self.failure = str(failure)

    def epochs(self) -> int:
        """The epochs whose metrics are in the bucket."""
        assert not self.failure, self.failure
        return len(self.cluster.read(f"runs/{self.run_name}/metrics.jsonl").splitlines())

    def wait_for_epochs(self, count: int) -> None:
        """Wait until this many are trained."""
        until(lambda: self.epochs() >= count, 180)

    def finish(self, seconds: float) -> None:
        """Wait for the end while what ended is replaced; every epoch has been trained and none counts twice."""
        self.cluster.until(lambda: not self.is_alive(), seconds)
        assert not self.failure, self.failure
        lines = self.cluster.read(f"runs/{self.run_name}/metrics.jsonl").splitlines()
        assert [json.loads(line)["epoch"] for line in lines] == list(range(EPOCHS))

    def addresses(self, epoch: int) -> set[str]:
        """Where the ranks trained an epoch, for the last time if it was repeated."""
        lines = re.findall(rf"ip=([\d.]+)\)[^\n]*\[Epoch {epoch} \|", self.log)
        return set(lines[-2:])


def until(condition: Callable[[], Any], seconds: float) -> Any:
    """Wait for a condition to hold; what it holds."""
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s"
        time.sleep(1)
    return result
