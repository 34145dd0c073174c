"""The cluster of the stack on one machine: its container definitions on a private network with an S3."""

import json
import re
import secrets
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from infra.definitions import commands, containers
from infra.definitions.sizing import TaskSize
from infra.definitions.user_data import INSTANCE_FILE
from ray_on_ecs.contract import CLUSTERS_PREFIX, CPU_POOL, DEFAULT_POOL, secrets_prefix
from ray_on_ecs.jobs.documents import HEAD as STATE
from tests.containers.engine import Engine, arguments
from tests.local_cluster import BUSY_MACHINE
from tests.waiting import LIMIT_SECONDS, until
from tests.worker_pools import cpu_group, node_group, workers

ROOT = Path(__file__).parents[2]
HEAD_HOST = "head.ray.internal"
BUCKET = "training"
METRICS = "ray-on-ecs/test"
# As in docker/compose.yaml.
NAME = "laptop"
DOCUMENTS = f"{CLUSTERS_PREFIX}/{NAME}"
CLUSTER_INFO = "workers"
S3 = "s3"
AWS = {"AWS_ACCESS_KEY_ID": "local", "AWS_SECRET_ACCESS_KEY": "local", "AWS_ENDPOINT_URL": f"http://{S3}:5000"}
# Of the stack, as `pulumi stack output --json` prints them.
TOKEN_PARAMETER = "token"
OUTPUTS = {
    "region": "us-east-1",
    "bucket": BUCKET,
    "cluster_name": NAME,
    "head_instance_id": "i-0123456789abcdef0",
    "head_host": HEAD_HOST,
    "token_parameter": TOKEN_PARAMETER,
    "cluster_info_parameter": CLUSTER_INFO,
    "shell_document": "tests-shell",
    "forward_document": "tests-forward",
    "services": {"head": "head", "workers": "workers"},
    "log_group": "logs",
    "estimated_hourly_usd": 7200,
}
SIZE = TaskSize(vcpus=1, memory_mib=4096, gpus=0)
# In most tests the pool `default` has nodes without the GPUs of its description, and so its runs train on CPUs.
ON_CPUS = {"RAY_ON_ECS_DEVICE": "cpu"}
# Kinds of workers: their pool, and those with a GPU, which is fake_cuda.py's.
POOLS = {"worker": DEFAULT_POOL, "cpu-worker": CPU_POOL, "gpu-worker": DEFAULT_POOL, "l4-worker": "l4"}
WITH_GPU = {"gpu-worker", "l4-worker"}
# The stack's description of the workers, and the instance metadata: a dollar a second. It does not name an ECS
# cluster, so the head scales nothing.
WORKERS = {
    **workers(
        workers=node_group(zone="us-east-1a", group="workers"),
        cpu_workers=cpu_group(types=["g5.xlarge"], zone="us-east-1a", units=1, max=1, group="workers"),
        l4_workers=node_group("l4", "g6.xlarge", zone="us-east-1b", max=1),
    ),
    "cluster": "",
    "prices": {"g5.xlarge": 3600, "g6.xlarge": 3600},
}
INSTANCE = {"instance_type": "g5.xlarge", "zone": "us-east-1a", "market": "on-demand"}
L4_INSTANCE = {"instance_type": "g6.xlarge", "zone": "us-east-1b", "market": "on-demand"}
# A user's model on every node: a run with it has many short epochs of four steps, and can be disturbed in the
# middle. It is slow until the file HURRY exists.
MODELS, HURRY = "/opt/models", "/tmp/hurry"
# A folder with a user's code, on every node.
CODE = "/opt/code"
EPOCHS, STEPS_PER_EPOCH = 80, 4
LONG = ("--model=tiny:mlp", "--data=digits", "--samples=512", "--batch-size=64", f"--epochs={EPOCHS}")
# The most epochs of a test that disturbs a run, also on a slow machine.
ROOM = 25
# The delay that `docker stop` may add to the stop timeout before it kills.
GRACE_SECONDS = 45

NODES = """
import json
from ray_on_ecs.node import api, ports
listed = api.ask(f"http://127.0.0.1:{ports.DASHBOARD}/api/v0/nodes?detail=1")["data"]["result"]["result"]
print(json.dumps([node for node in listed if node["state"] == "ALIVE"]))
"""
# The state and the node of each current or earlier worker of a run.
WORKERS_OF_RUNS = """
import json
from ray_on_ecs.node import api, ports
url = f"http://127.0.0.1:{ports.DASHBOARD}/api/v0/actors?detail=1&limit=1000"
of_runs = ("RayTrainWorker", "ScriptActor")
actors = [each for each in api.ask(url)["data"]["result"]["result"] if each["class_name"] in of_runs]
print(json.dumps([(each["state"], each["node_id"]) for each in actors]))
"""
# Arguments: the names of two runs. Prints whether their models are equal.
EQUAL = """
import sys
import boto3
s3 = boto3.client("s3")
def weights(run):
    return s3.get_object(Bucket="{bucket}", Key=f"runs/{{run}}/model.safetensors")["Body"].read()
first, second = map(weights, sys.argv[1:])
print(first == second)
"""
CREATE = """
import json
import boto3
where = {{"endpoint_url": "http://127.0.0.1:5000", "region_name": "us-east-1"}}
boto3.client("ssm", **where).put_parameter(Name="{name}", Type="String", Value={value!r}, Overwrite=True)
s3 = boto3.client("s3", **where)
s3.create_bucket(Bucket="{bucket}")
public = {{"Effect": "Allow", "Principal": "*", "Action": "s3:GetObject", "Resource": "arn:aws:s3:::{bucket}/*"}}
s3.put_bucket_policy(Bucket="{bucket}", Policy=json.dumps({{"Version": "2012-10-17", "Statement": [public]}}))
"""
# Unsigned, without boto3, which takes a second of a core: runs are looked at again and again.
READ = """
import sys, urllib.error, urllib.request
try:
    sys.stdout.write(urllib.request.urlopen("http://127.0.0.1:5000/{bucket}/{key}").read().decode())
except urllib.error.HTTPError as error:
    if error.code != 404:
        raise
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

# A signal to the processes of a name; containers have no tools for that.
SIGNAL = """
import contextlib, os, pathlib, signal
for folder in pathlib.Path("/proc").glob("[0-9]*"):
    with contextlib.suppress(OSError):  # some end meanwhile
        if (folder / "comm").read_text().strip() == "{process}":
            os.kill(int(folder.name), signal.{signal})
"""


@dataclass(frozen=True)
class Trained:
    """A run that has ended: its name, its log, and the containers' IDs."""

    name: str
    log: str
    containers: list[str]


@dataclass
class Cluster:
    """A head, its workers and an S3, each in a separate container on `network`."""

    engine: Engine
    image: str
    network: str
    code: Path
    workers: list[str] = field(default_factory=list)
    started: int = 0
    on_two_networks: str = ""
    last: Trained | None = None

    @property
    def head(self) -> str:
        """The head's container."""
        return f"{self.network}-head"

    @property
    def names(self) -> tuple[str, ...]:
        """The nodes' containers, the head first."""
        return self.head, *self.workers

    @property
    def instance(self) -> Path:
        """The folder with the instance metadata."""
        return self.code.parent / "instance"

    @property
    def l4_instance(self) -> Path:
        """The folder with the instance metadata of the pool `l4`."""
        return self.code.parent / "l4-instance"

    @property
    def storage(self) -> str:
        """The container of the S3."""
        return f"{self.network}-{S3}"

    def definition(self, kind: str, cluster: str = NAME) -> containers.Container:
        """The stack's definition of a cluster's head or worker, of a size for this machine."""
        common = containers.ContainerDefaults(
            image=self.image,
            log_group="logs",
            region="us-east-1",
            token_arn="arn:token",
            secrets_prefix=secrets_prefix(NAME),
            size=replace(SIZE, gpus=int(kind in WITH_GPU)),
        )
        if kind == "head":
            return containers.head(
                common,
                bucket=BUCKET,
                cluster=cluster,
                metrics_namespace=METRICS,
                cluster_info_parameter=CLUSTER_INFO,
            )
        return containers.worker(common, head_host=HEAD_HOST, pool=POOLS[kind])

    def state(self, name: str) -> str:
        """The volume that a head's container leaves behind."""
        return f"{name}-state"

    def run(self, kind: str, name: str, *options: str, command: Sequence[str] = (), **variables: str) -> None:
        """Start a node, or another command in a node's container; `variables` go before the definition's."""
        # Another head has another cluster's documents: it would take this one over.
        definition = self.definition(kind, NAME if name == self.head else name)
        if command:
            definition["command"] = list(command)
        self.engine.remove(name)
        networks = () if any(option.startswith("--network=") for option in options) else (f"--network={self.network}",)
        here = Path(__file__).parent
        modules = {"tiny.py": "tiny.py", "fake_cuda.py": "sitecustomize.py"}
        folders = {self.code: CODE, **{here / file: f"{MODELS}/{module}" for file, module in modules.items()}}
        volumes = (f"--volume={source}:{target}:ro" for source, target in folders.items())
        instance = self.l4_instance if kind == "l4-worker" else self.instance
        kept = {containers.STATE_VOLUME: self.state(name), containers.INSTANCE_VOLUME: str(instance)}
        niceness = {"RAY_worker_niceness": BUSY_MACHINE["RAY_worker_niceness"]}
        gpu = {"FAKE_CUDA": "0"} if kind in WITH_GPU else {}
        own = {**AWS, **ON_CPUS, "PYTHONPATH": MODELS, "HURRY": HURRY, **gpu, **niceness}
        given = arguments(definition, {**own, **variables}, kept)
        self.engine.run("run", "--detach", f"--name={name}", *networks, *volumes, *options, *given)

    def start_storage(self, image: str) -> None:
        """Start the S3, with its bucket and the parameter with the price of a worker: a dollar a second."""
        self.engine.run(
            "run", "--detach", f"--name={self.storage}", f"--network={self.network}", f"--network-alias={S3}",
            *(f"--env={name}={value}" for name, value in AWS.items() if name != "AWS_ENDPOINT_URL"),
            image,
        )  # fmt: skip
        create = CREATE.format(bucket=BUCKET, name=CLUSTER_INFO, value=json.dumps(WORKERS))
        until(lambda: self.engine.execute(self.storage, "python", "-c", create, check=False).returncode == 0)

    def start_head(self) -> None:
        """Start the head under its name, as a new container."""
        self.run("head", self.head, f"--network-alias={HEAD_HOST}")

    def start_worker(self, *options: str, **variables: str) -> str:
        """Start one more worker and return its container."""
        self.started += 1
        name = f"{self.network}-worker-{self.started}"
        self.run("worker", name, *options, **variables)
        self.workers.append(name)
        return name

    def start_on_two_networks(self, other: str) -> None:
        """Replace the first worker by one in two networks, unless there is one."""
        if self.on_two_networks in self.workers:
            return
        for name in self.workers[:1]:
            self.workers.remove(name)
            self.engine.remove(name)
        # The other network first: it has the container's first interface and its host name.
        self.on_two_networks = self.start_worker(f"--network={other}")
        self.engine.run("network", "connect", self.network, self.on_two_networks)

    def replace_stopped(self) -> None:
        """Start a new container for each one that has ended, as ECS does."""
        running = self.engine.running()
        if self.head not in running:
            self.start_head()
        for name in [worker for worker in self.workers if worker not in running]:
            self.workers.remove(name)
            self.engine.remove(name)
        while len(self.workers) < 2:
            self.start_worker()

    def settle(self, seconds: float = LIMIT_SECONDS) -> None:
        """Replace ended containers until a head and two workers are healthy, and the head knows only these."""

        def why() -> str:
            ill = [name for name in self.names if not self.is_well(name)]
            logs = "\n".join(f"{name}:\n{self.engine.logs(name)[-2000:]}" for name in ill)
            return f"not well: {ill}; nodes: {[] if self.head in ill else self.nodes()}\n{logs}"

        self.until(lambda: all(map(self.is_well, self.names)) and len(self.nodes()) == 3, seconds, why)

    def until(self, condition: Callable[[], Any], seconds: float = LIMIT_SECONDS, why: Callable[[], str] = str) -> Any:
        """Wait for a condition, and replace ended containers meanwhile."""

        def replaced_and_true() -> Any:
            self.replace_stopped()
            return condition()

        return until(replaced_and_true, seconds, why)

    def is_running(self, name: str) -> bool:
        """Return whether a container exists and runs."""
        return name in self.engine.running()

    def is_well(self, name: str) -> bool:
        """Return whether the definition's health check passes."""
        kind = "head" if name == self.head else "worker"
        _, *command = self.definition(kind)["healthCheck"]["command"]
        return self.engine.execute(name, *command, check=False).returncode == 0

    def nodes(self) -> list[dict[str, Any]]:
        """The nodes that the head knows as alive, as Ray's state API has them."""
        return self._ask_dashboard(NODES)

    def trained_on(self, *states: str) -> set[str]:
        """The addresses of the present nodes that have or had Ray Train workers, optionally in these states."""
        addresses = {node["node_id"]: node["node_ip"] for node in self.nodes()}
        workers = self._ask_dashboard(WORKERS_OF_RUNS)
        return {addresses[node] for state, node in workers if node in addresses and (not states or state in states)}

    def jobs(self) -> dict[str, str]:
        """The status of each job, by its ID, in the state that the head has written last."""
        document = self.read(f"{DOCUMENTS}/{STATE}")
        return {job["submission_id"]: job["status"] for job in json.loads(document)["jobs"]} if document else {}

    def _ask_dashboard(self, program: str) -> Any:
        """The JSON that a program prints in the head; a head is healthy before its dashboard answers."""
        command = ("python", "-c", program)
        return json.loads(until(lambda: self.engine.execute(self.head, *command, check=False).stdout))

    def stop_jobs(self) -> None:
        """Stop the running jobs, as their user does: the head doesn't resubmit them."""
        self.engine.execute(self.head, "ray-on-ecs", "stop", "--all")

    def same_weights(self, first: str, second: str) -> bool:
        """Return whether two runs ended with equal models."""
        return self.engine.python(self.head, EQUAL.format(bucket=BUCKET), first, second) == "True"

    def addresses(self) -> dict[str, str]:
        """The address of each node's container on the network."""
        return {name: self.engine.address(name, self.network) for name in self.names}

    def places(self) -> set[str]:
        """The addresses of the workers."""
        return {self.engine.address(name, self.network) for name in self.workers}

    def hosts(self) -> list[str]:
        """Options that let a container find head and S3 without a name server.

        Some engines' servers lose a question while other containers come and go, and then a name has no address.
        """
        known = {HEAD_HOST: self.head, S3: self.storage}
        return [f"--add-host={host}:{self.engine.address(name, self.network)}" for host, name in known.items()]

    def submit(self, run_name: str, *flags: str) -> list[str]:
        """The command of a run of the image classifier on two workers, with flags of the script."""
        return ["ray-on-ecs", "run", f"--run-name={run_name}", "--num-workers=2", "image_classifier.py", *flags]

    def train(self, run_name: str, *flags: str, seconds: float = 600) -> str:
        """Train to the end by the stack's `train_command`, with flags of the script, and return the job's log."""
        inside = re.search(r"exec -it \$c ray-on-ecs run (.*)$", commands.train(2))
        assert inside is not None
        command = ["ray-on-ecs", "run", f"--run-name={run_name}", *inside[1].split(), *flags, "--no-use-gpu"]
        done = self.engine.run("exec", self.head, *command, check=False, timeout=seconds)
        assert done.returncode == 0, done.stdout + done.stderr + self.engine.logs(self.head)[-8000:]
        return done.stdout

    def trained(self) -> Trained:
        """A finished run on these containers, shared by all tests that only read it."""
        containers = [self.engine.inspect(name)["Id"] for name in self.names]
        if not self.last or self.last.containers != containers:
            name = f"whole-{secrets.token_hex(2)}"
            self.last = Trained(name, self.train(name, "--data=digits", "--epochs=3"), containers)
        return self.last

    def stop(self, name: str) -> tuple[int, float]:
        """Exit status of a node after SIGTERM, and the seconds until it ended."""
        began = time.monotonic()
        # SIGTERM; SIGKILL, and 137, after the definition's stop timeout
        self.engine.run("stop", name, timeout=180)
        seconds = time.monotonic() - began
        return self.engine.wait(name)[0], seconds

    def signal(self, name: str, process: str, signal: str) -> None:
        """Send a signal to the processes of a name in a container."""
        self.engine.python(name, SIGNAL.format(process=process, signal=signal))

    def signal_all(self, name: str, signal: str) -> None:
        """Send a signal to all processes of a container but its init; an engine's `pause` may fail while many run."""
        self.engine.python(name, f"import os, signal; os.kill(-1, signal.{signal})")

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
        """Yield the name of another container, which is removed afterwards."""
        name = f"{self.network}-{name}"
        self.run(kind, name, *options, **given)
        try:
            yield name
        finally:
            self.engine.remove(name)
            self.engine.remove_volume(self.state(name))

    def close(self) -> None:
        """Remove all containers and volumes."""
        self.engine.remove(self.head, self.storage, *self.workers)
        self.engine.remove_volume(self.state(self.head))


@contextmanager
def cluster_of(engine: Engine, image: str, s3_image: str, code: Path) -> Generator[Cluster]:
    """A cluster with its S3; `settle` starts the nodes."""
    with engine.network(f"ray-{secrets.token_hex(3)}") as network:
        cluster = Cluster(engine, image, network, code)
        for folder, metadata in {cluster.instance: INSTANCE, cluster.l4_instance: L4_INSTANCE}.items():
            folder.mkdir(exist_ok=True)
            (folder / INSTANCE_FILE).write_text(json.dumps(metadata))
        try:
            cluster.start_storage(s3_image)
            yield cluster
        finally:
            cluster.close()


class Run:
    """A run during disturbances of the cluster, seen through its command."""

    def __init__(self, cluster: Cluster, name: str, output: Path) -> None:
        self.cluster, self.name, self.output = cluster, name, output
        self.again()

    def again(self) -> None:
        """Start the same command again."""
        command = self.cluster.submit(self.name, *LONG)
        self.process = self.cluster.engine.start("exec", self.cluster.head, *command, output=self.output)

    @property
    def log(self) -> str:
        """The output of the command so far."""
        return self.output.read_text()

    def is_alive(self) -> bool:
        """Return whether the command still runs."""
        return self.process.poll() is None

    def epochs(self) -> int:
        """The number of epochs with metrics in the bucket, each once."""
        assert self.process.poll() in (None, 0), self.log
        folder = f"runs/{self.name}"  # while it trains, they are in a part
        lines = self.cluster.read(f"{folder}/metrics/000000000.jsonl") or self.cluster.read(f"{folder}/metrics.jsonl")
        steps = [each["step"] for each in map(json.loads, lines.splitlines()) if "test_loss" in each]
        assert steps == [STEPS_PER_EPOCH * (epoch + 1) for epoch in range(len(steps))]
        return len(steps)

    def goes_on(self, seconds: float = LIMIT_SECONDS) -> None:
        """Wait until the present workers have trained an epoch, and replace ended containers meanwhile."""
        epoch = self.epochs() + 2  # the next epoch may be trained and not yet stored

        def is_everywhere() -> bool:
            return self.cluster.trained_on("ALIVE") == self.cluster.places()

        self.cluster.until(lambda: self.epochs() > epoch and is_everywhere(), seconds)

    def finish(self, seconds: float = LIMIT_SECONDS) -> None:
        """Let the run train fast to its end; every epoch has been trained."""
        for name in self.cluster.workers:
            self.cluster.engine.execute(name, "touch", HURRY)
        until(lambda: not self.is_alive(), seconds)
        for name in self.cluster.workers:
            self.cluster.engine.execute(name, "rm", HURRY)
        assert self.epochs() == EPOCHS, self.log
        assert self.cluster.read(f"runs/{self.name}/result.json"), self.log


@dataclass
class Disturbed:
    """A run that several tests disturb in turn: a start takes longer than most disturbances."""

    cluster: Cluster
    folder: Path
    run: Run | None = None
    begun: int = 0

    def under_way(self) -> Run:
        """The run, in its middle: the previous test's if enough epochs are left."""
        run = self.run
        if not run or not run.is_alive() or run.epochs() > EPOCHS - ROOM:
            self.end()
            self.begun += 1
            name = f"disturbed-{self.begun}"
            run = self.run = Run(self.cluster, name, self.folder / f"{name}.log")
        begun = run.epochs()
        until(lambda: run.epochs() > begun + 1)
        return run

    def end(self) -> None:
        """Stop the unfinished run and its followers."""
        if self.run:
            self.cluster.settle()
            self.cluster.stop_jobs()
            self.run.process.wait(LIMIT_SECONDS)
