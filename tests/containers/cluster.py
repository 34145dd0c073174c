"""The cluster of the stack on one machine: its container definitions, started on a private network beside an S3."""

import json
import re
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
S3 = "s3"
AWS = {"AWS_ACCESS_KEY_ID": "local", "AWS_SECRET_ACCESS_KEY": "local", "AWS_ENDPOINT_URL": f"http://{S3}:5000"}
SIZE = TaskSize(vcpus=1, memory_mib=3072, gpus=0)

NODES = """
import json, ray
ray.init(address="auto", logging_level="ERROR", log_to_driver=False)
print(json.dumps([node for node in ray.nodes() if node["Alive"]]))
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


@dataclass
class Cluster:
    """A head, its workers and an S3, each a container of its own on `network`."""

    engine: Engine
    image: str
    network: str
    workers: list[str] = field(default_factory=list)
    started: int = 0

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
            return containers.head(common, bucket=BUCKET)
        return containers.worker(common, head_host=HEAD_HOST)

    def run(self, kind: str, name: str, *options: str, command: Sequence[str] = (), **variables: str) -> None:
        """Start a node, or another command in a node's container; `variables` go before the definition's."""
        definition = self.definition(kind)
        if command:
            definition["command"] = list(command)
        self.engine.remove(name)
        networks = () if any(each.startswith("--network=") for each in options) else (f"--network={self.network}",)
        given = arguments(definition, {**AWS, **variables})
        self.engine.run("run", "--detach", f"--name={name}", *networks, *options, *given)

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

    def start_worker(self) -> str:
        """Start one more worker; its container."""
        self.started += 1
        name = f"{self.network}-worker-{self.started}"
        self.run("worker", name)
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
        return json.loads(self.engine.python(self.head, NODES).splitlines()[-1])

    def addresses(self) -> dict[str, str]:
        """The address of each node's container on the network."""
        return {name: self.engine.address(name, self.network) for name in (self.head, *self.workers)}

    def submit(self, *flags: str) -> list[str]:
        """The command that the stack's `train_command` runs in the head, with more flags."""
        inside = re.search(r"docker exec -it \$c (ray job submit .*?)\"", commands.train("us-east-1", 2, "i-1"))
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

    @contextmanager
    def one_more(self, kind: str, name: str, *options: str, **given: Any) -> Generator[str]:
        """A container beside the cluster, gone afterwards; its name."""
        name = f"{self.network}-{name}"
        self.run(kind, name, *options, **given)
        try:
            yield name
        finally:
            self.engine.remove(name)

    def close(self) -> None:
        """Leave nothing behind."""
        self.engine.remove(self.head, self.storage, *self.workers)
        self.engine.run("network", "rm", "--force", self.network, check=False)


def until(condition: Callable[[], Any], seconds: float) -> Any:
    """Wait for a condition to hold; what it holds."""
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s"
        time.sleep(1)
    return result
