"""Clusters that a command can use: a stack's or compose's, through its bucket; the head's own; or this machine."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray_on_ecs import pools, secrets
from ray_on_ecs.addresses import check_address
from ray_on_ecs.cluster import aws
from ray_on_ecs.cluster.head import Head
from ray_on_ecs.cluster.jobs import Jobs
from ray_on_ecs.cluster.stack import OR_LOCAL, Stack, find
from ray_on_ecs.cluster.wake import Waker, workers_of_run
from ray_on_ecs.cluster_info import ClusterInfo, read_cluster_info
from ray_on_ecs.config import POOLS, RunConfig
from ray_on_ecs.contract import CLUSTER_INFO_VARIABLE, CLUSTERS_PREFIX, DASHBOARD_URL, RUNS_PREFIX, secrets_prefix
from ray_on_ecs.errors import HeadGone, HeadUnavailable, ResourceError, TrainingError, UsageError, counted
from ray_on_ecs.flags import environment_variable, flag
from ray_on_ecs.jobs.documents import Documents
from ray_on_ecs.jobs.machine import MachineJobs
from ray_on_ecs.jobs.record import Job
from ray_on_ecs.jobs.remote import RemoteJobs
from ray_on_ecs.node import api, drivers, ports
from ray_on_ecs.node.api import AnswerError
from ray_on_ecs.node.ray_status import workers_of
from ray_on_ecs.rules import is_run_name
from ray_on_ecs.signals import keys_for
from ray_on_ecs.storage.bucket import Bucket, StorageFault
from ray_on_ecs.storage.run_storage import RunStorage

if TYPE_CHECKING:
    from ray_on_ecs.cluster.local_head import LocalHead

# `head` in the image, where commands are for the container's own cluster; or a cluster's bucket.
CLUSTER_VARIABLE, HEAD = "RAY_ON_ECS_CLUSTER", "head"
# See docker/compose.yaml.
COMPOSE_VARIABLES = Path("docker/.env")
COMPOSE = f"s3://training/{CLUSTERS_PREFIX}/laptop"
STORAGE_PATH = "RAY_ON_ECS_STORAGE_PATH"
COMPOSE_S3 = "http://127.0.0.1:5001"
COMPOSE_PORTS = {8888: 18888}
# Number of workers of a run without GPUs.
DEFAULT_WORKERS = 2
# More are refused on this machine: the larger of both.
MOST_WORKERS, WORKERS_PER_CPU = 64, 4


class Cluster(ABC):
    """Cluster that a command is for; it need not be up."""

    name: str  # in errors
    storage_path: str  # as this machine reaches it
    typed: str = ""  # the cluster flag that the user typed, with a space before it
    typed_path: str = ""  # the storage path that the user typed, which hints repeat as an environment variable
    reads_path: bool = True  # other commands can read the run's storage path, and not only the cluster's own
    stack: Stack | None = None
    is_here: bool = False  # its jobs can read the files of this machine
    ends_with_command: bool = False  # Ctrl-C ends the run that is followed; else it continues on the cluster
    starts_workers: bool = False  # its workers are instances, which start for a run and stop

    def command(self, words: str, storage_path: str = "") -> str:
        """Return a command on the same cluster, such as `logs RUN`, for hints; the run may be below another path."""
        subcommand, space, arguments = words.partition(" ")
        is_other = storage_path.rstrip("/") not in ("", self.storage_path.rstrip("/"))
        typed = storage_path if is_other else self.typed_path
        path = f"{STORAGE_PATH}={shlex.quote(typed)} " if typed else ""
        return f"{path}ray-on-ecs {subcommand}{self.typed}{space}{arguments}"

    def absolute(self, storage_path: str) -> str:
        """Return a storage path as its jobs need it."""
        return storage_path

    def document_storage(self, storage: RunStorage) -> RunStorage:
        """Return the folder for a run's document, which this machine can write; `storage` is the run's own."""
        return storage

    def code_storage(self, storage: RunStorage) -> RunStorage:
        """Return a folder of a run next to which this machine can store the code; `storage` is the run's own."""
        return storage

    def check_settings(self, config: RunConfig) -> RunConfig:
        """Refuse pools or GPUs that the cluster does not have, as far as this machine knows: UsageError.

        Return the settings, without those that the environment gives for a cluster with pools, where there are none.
        """
        for name in POOLS if not self.starts_workers else ():
            if (value := getattr(config, name)) == os.environ.get(environment_variable(name)):
                config = replace(config, **{name: None})
            elif value is not None:
                raise UsageError(f"{flag(name)}: {self.name} has no pools; leave it out")
        if config.require_efa and not self.starts_workers:
            raise UsageError(f"--require-efa: {self.name} has no pools with EFA; leave it out")
        info = None
        if config.gpu is not None or config.pool is not None:
            with suppress(TrainingError):  # the head checks them, too
                info = self.known_pools()
        if info:
            pools.candidates(info, gpus=config.gpu_names, pools=config.pool_names)
        return config

    @abstractmethod
    def known_pools(self) -> ClusterInfo | None:
        """Return the cluster's pools, as far as names need them; None if they are not known. TrainingError likewise."""

    @abstractmethod
    def jobs(self, say: Callable[[str], None] = lambda _: None) -> Jobs:
        """Return the jobs of the cluster; `say` prints a line about a wait."""

    @contextmanager
    def connect_to_ray(self) -> Generator[Head]:
        """Connect to the Ray head until the block ends; raise as `connect` does."""
        with self._reach() as head:
            try:
                head.get("/api/version", "ray_version")
            except UsageError as refused:
                raise UsageError(f"{refused}; {self.token_hint}") from refused
            except AnswerError as cause:
                raise self.explain(cause) from cause
            yield head

    @contextmanager
    def ready_for(self, config: RunConfig, say: Callable[[str], None]) -> Generator[None]:
        """Have what a run needs beside its driver, until the block has submitted it; ResourceError if it fails."""
        yield

    def end_unused(self) -> None:  # noqa: B027
        """End what was started for jobs that have ended."""

    @property
    def token_hint(self) -> str:
        """The way out of a wrong token."""
        return "set RAY_AUTH_TOKEN to the cluster's"

    def explain(self, cause: AnswerError) -> ResourceError:
        """Return the most precise error for a head that doesn't answer."""
        return cause

    def storage(self, run_name: str, path: str = "") -> RunStorage:
        """Return the folder of a run, without creating it; `path` replaces the storage path."""
        return RunStorage.open(path or self.storage_path, run_name, **self.s3_options())

    def secrets_of(self, uri: str) -> secrets.Store:
        """Return the store of a run's secrets, by the run's folder."""
        return secrets.store(uri)

    def s3_options(self) -> dict[str, Any]:
        """Return the arguments of `Bucket` for its storage path: a command gives up sooner than a run."""
        return aws.limits() if "://" in self.storage_path else {}

    @contextmanager
    def forward(self, host: str, port: int) -> Generator[int]:
        """Forward a port of a node, by its name in the cluster; yields the local port."""
        yield port

    @abstractmethod
    def shell(self) -> AbstractContextManager[subprocess.Popen[Any]]:
        """Return a context that opens a shell on the head and yields its process."""

    @abstractmethod
    def _reach(self) -> Any:
        """Return a context that yields the Head, without checking that it answers."""


class RemoteCluster(Cluster):
    """Cluster whose head is reached through a bucket."""

    bucket: str
    cluster_name: str  # which distinguishes it from others of the bucket
    _run: RunConfig | None = None  # that is about to be submitted

    @contextmanager
    def ready_for(self, config: RunConfig, say: Callable[[str], None]) -> Generator[None]:
        self._run = config  # its workers are woken with a head that sleeps
        yield

    def head_phase(self) -> str:
        """Return what a head that starts waits for; empty if that is not known."""
        return ""

    def known_pools(self) -> ClusterInfo | None:
        return workers_of(self.jobs().state()[0].ray)

    @property
    def client_options(self) -> dict[str, Any]:
        """Options of clients of services other than S3."""
        return self.s3_options()

    def jobs(self, say: Callable[[str], None] = lambda _: None) -> RemoteJobs:
        documents = Documents(Bucket(**self.s3_options()), f"{self.bucket}/{CLUSTERS_PREFIX}/{self.cluster_name}")
        waker = Waker(say, self.head_phase, partial(workers_of_run, self._run))
        return RemoteJobs(documents, partial(aws.user_id, **self.client_options), say, self.secrets_of, waker)

    def _secrets_in(self, uri: str, call: Callable[..., Any]) -> secrets.Store:
        """Return the store of a run's secrets. The head's state has their key: a user may know the bucket alone."""
        return secrets.parameters(
            secrets_prefix(self.cluster_name), uri, call, lambda: self.jobs().state()[0].secrets_key
        )

    def document_storage(self, storage: RunStorage) -> RunStorage:
        # In the bucket if the storage path is a folder of the nodes, apart from other runs.
        if not storage.is_local:
            return storage
        of_path = hashlib.sha256(self.storage_path.encode()).hexdigest()[:12]
        return self.storage(storage.run_name, f"s3://{self.bucket}/{RUNS_PREFIX}/.documents/{of_path}")

    def code_storage(self, storage: RunStorage) -> RunStorage:
        return storage if not storage.is_local else self.storage(storage.run_name, f"s3://{self.bucket}/{RUNS_PREFIX}")

    def s3_options(self) -> dict[str, Any]:
        return aws.limits()  # also for a storage path on the nodes: the document is in the bucket


class StackCluster(RemoteCluster):
    """Cluster of a stack."""

    starts_workers = True

    def __init__(self, stack: Stack) -> None:
        self.stack = self._stack = stack
        self.bucket, self.cluster_name = stack.bucket, stack.cluster_name
        self.name = f"stack {stack.name}"
        self.storage_path = stack.storage_path

    @property
    def token_hint(self) -> str:
        stack = self._stack
        return (
            "it was started with another one; who deploys the stack gives it the stack's by aws ecs update-service "
            f"--region {stack.region} --cluster {stack.cluster_name} --service {stack.services['head']} "
            "--force-new-deployment"
        )

    @contextmanager
    def _reach(self) -> Generator[Head]:
        token = aws.token(self._stack)
        with self.forward(self._stack.head_host, ports.DASHBOARD) as port:
            yield Head(f"http://127.0.0.1:{port}", token)

    @contextmanager
    def forward(self, host: str, port: int) -> Generator[int]:
        # Through the head's instance, from which every node is reachable.
        from ray_on_ecs.cluster import session

        with session.forwarded_port(self._stack, host, port) as local:
            yield local

    def explain(self, cause: AnswerError) -> ResourceError:
        from ray_on_ecs.cluster import aws_status

        return aws_status.explain_head(self._stack) or cause

    def head_phase(self) -> str:
        from ray_on_ecs.cluster import aws_status

        return aws_status.head_phase(self._stack)

    def s3_options(self) -> dict[str, Any]:
        return {**aws.limits(), "region_name": self._stack.region}

    def secrets_of(self, uri: str) -> secrets.Store:
        return self._secrets_in(uri, partial(aws.call, self._stack, "ssm"))

    def shell(self) -> AbstractContextManager[subprocess.Popen[Any]]:
        from ray_on_ecs.cluster import session

        return session.started(self._stack, self._stack.shell_document, program=keys_for)


class HeadCluster(Cluster):
    """Cluster of the head in whose container this is."""

    name = "this cluster"

    def __init__(self) -> None:
        given = os.environ.get(STORAGE_PATH) or RunConfig.storage_path
        check_address(STORAGE_PATH, given)
        self.storage_path = self.absolute(given)
        if self.is_here and self.storage_path != self.absolute(RunConfig.storage_path):
            self.typed_path = self.storage_path  # it may be set for this command alone, as in a hint
        self.starts_workers = CLUSTER_INFO_VARIABLE in os.environ and not self.is_here

    def known_pools(self) -> ClusterInfo | None:
        return read_cluster_info()

    def jobs(self, say: Callable[[str], None] = lambda _: None) -> MachineJobs:
        return drivers.of_head()

    def absolute(self, storage_path: str) -> str:
        # A job starts in another folder.
        return storage_path if "://" in storage_path else str(Path(storage_path).expanduser().absolute())

    @contextmanager
    def _reach(self) -> Generator[Head]:
        yield Head(DASHBOARD_URL, api.own_token())

    def explain(self, cause: AnswerError) -> ResourceError:
        # It is unavailable for a moment, as the head restarts its dashboard.
        return HeadUnavailable(f"its dashboard doesn't answer at {DASHBOARD_URL} ({cause.reason})")

    def shell(self) -> AbstractContextManager[subprocess.Popen[Any]]:
        with self._reach() as head:
            os.environ["RAY_API_SERVER_ADDRESS"] = head.url
            if head.token:
                os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=head.token)
        for name in ("NO_PROXY", "no_proxy"):  # a proxy would read the token, and can't reach this machine
            os.environ[name] = ",".join(filter(None, [os.environ.get(name), "127.0.0.1,localhost"]))
        os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        return keys_for([os.environ.get("SHELL", "sh")])


class LocalCluster(HeadCluster):
    """This machine without a cluster: drivers are processes here, and only Ray programs have a Ray head."""

    name = "this machine"
    is_here = True
    ends_with_command = True
    _ray: LocalHead | None = None

    def jobs(self, say: Callable[[str], None] = lambda _: None) -> MachineJobs:
        return MachineJobs(ray=self._ray.variables if self._ray else None, ends_ray=True)

    def check_settings(self, config: RunConfig) -> RunConfig:
        # The number of workers, too.
        cpus = os.cpu_count() or 1
        workers = config.workers[0] if config.workers else DEFAULT_WORKERS
        if workers > (most := max(MOST_WORKERS, WORKERS_PER_CPU * cpus)):
            what = f"{workers:,} workers are too many for this machine's {counted(cpus, 'CPU')}"
            raise UsageError(f"--num-workers: {what}; give {most} at most")
        return super().check_settings(config)

    @contextmanager
    def ready_for(self, config: RunConfig, say: Callable[[str], None]) -> Generator[None]:
        # A Ray program needs Ray, which ends with its driver.
        cpus = os.cpu_count() or 1
        workers = config.workers[0] if config.workers else DEFAULT_WORKERS
        if not config.driver:
            if workers > cpus:
                say(f"{workers} workers share {counted(cpus, 'CPU')}")
            yield
            return
        from ray_on_ecs.cluster import local_head

        with local_head.lock():
            self._ray = local_head.find()
            if self._ray is None or not local_head.answers(self._ray):
                if self._ray and (jobs := local_head.runs_on(self._ray)):
                    names = ", ".join(str(job["submission_id"]) for job in jobs)
                    line = f"Ray on this machine does not answer, and {names} uses it"
                    raise ResourceError(f"{line}; wait for its end, or end it by {self._stop_of(jobs[0])}")
                say("starting Ray on this machine")
                self._ray = local_head.start(max(cpus, workers))
            try:
                yield
            finally:
                local_head.end_unused()  # if nothing was submitted

    def end_unused(self) -> None:
        """See Cluster: Ray, if the parent of the last driver was killed, or is about to end it."""
        from ray_on_ecs.cluster import local_head

        if local_head.find():
            with local_head.lock():
                local_head.end_unused()

    @contextmanager
    def _reach(self) -> Generator[Head]:
        from ray_on_ecs.cluster import local_head

        started = local_head.find()
        if started is None:
            raise HeadGone("Ray is not running on this machine; a Ray program starts it")
        yield Head(started.url, started.token)

    def explain(self, cause: AnswerError) -> ResourceError:
        from ray_on_ecs.cluster import local_head

        ray = local_head.find()
        stops = " and ".join(map(self._stop_of, local_head.runs_on(ray) if ray else ())) or self.command("stop --all")
        return ResourceError(f"Ray on this machine doesn't answer ({cause.reason}); {stops} ends it")

    def _stop_of(self, job: Job) -> str:
        """Return the command that stops a job's run, which may be another folder's."""
        metadata = job["metadata"]
        return self.command(f"stop {metadata.get('run_name')}", str(metadata.get("storage_path", "")))


class BucketCluster(RemoteCluster):
    """Cluster of which only the bucket is known.

    Its address is `s3://BUCKET/clusters/CLUSTER`, or `s3://BUCKET` if the bucket is one cluster's; else UsageError.
    """

    starts_workers = True

    def __init__(self, address: str) -> None:
        found = re.fullmatch(rf"s3://([a-z0-9][a-z0-9.-]+)(?:/{CLUSTERS_PREFIX}/([\w.-]+))?/?", address)
        if not found:
            wanted = f"s3://BUCKET or s3://BUCKET/{CLUSTERS_PREFIX}/CLUSTER"
            raise UsageError(f"{CLUSTER_VARIABLE}: {address!r} is not a cluster's bucket; give {wanted}")
        self.bucket, self._given = found[1], found[2]
        self.storage_path = f"s3://{found[1]}/{RUNS_PREFIX}"
        self.name = address.rstrip("/")

    @cached_property
    def cluster_name(self) -> str:
        """See RemoteCluster; UsageError if it is not in the bucket, or if the bucket has several and none is given."""
        try:
            names = Bucket(**self.s3_options()).listing(f"{self.bucket}/{CLUSTERS_PREFIX}").folders
        except StorageFault as cause:
            raise cause.error from cause
        if self._given in names or (self._given and not names):  # the first head is starting
            return str(self._given)
        if len(names) == 1 and not self._given:
            return names[0]
        choice = " or ".join(f"s3://{self.bucket}/{CLUSTERS_PREFIX}/{name}" for name in names)
        way_out = f"give {choice}" if names else "pulumi up creates a cluster, whose head then writes its state"
        what = f"cluster {self._given} is not in s3://{self.bucket}"
        if not self._given:
            what = f"s3://{self.bucket} has {counted(len(names), 'cluster')}"
        raise UsageError(f"{CLUSTER_VARIABLE}: {what}; {way_out}")

    def secrets_of(self, uri: str) -> secrets.Store:
        return self._secrets_in(uri, partial(secrets.ask, "ssm", options=self.client_options))

    @cached_property
    def client_options(self) -> dict[str, Any]:
        """See RemoteCluster; of the bucket's region: this machine may have another one, or none."""
        answer = Bucket(**self.s3_options()).call("head_bucket", self.bucket)
        region = answer["ResponseMetadata"]["HTTPHeaders"].get("x-amz-bucket-region")
        return {**({"region_name": region} if region else {}), **self.s3_options()}

    def _reach(self) -> Any:
        raise UsageError(f"{CLUSTER_VARIABLE} names a bucket, which is enough for runs; Ray needs --stack or --outputs")

    def shell(self) -> AbstractContextManager[subprocess.Popen[Any]]:
        return self._reach()


class ComposeCluster(BucketCluster):
    """Cluster of docker/compose.yaml on this machine."""

    cluster_name = COMPOSE.rpartition("/")[2]
    starts_workers = False

    def __init__(self) -> None:
        super().__init__(COMPOSE)
        self.name = "compose"

    @contextmanager
    def _reach(self) -> Generator[Head]:
        # The token that compose reads, unless the command runs in another folder.
        lines = COMPOSE_VARIABLES.read_text().splitlines() if COMPOSE_VARIABLES.is_file() else []
        file = dict(line.split("=", 1) for line in lines if "=" in line)
        yield Head(DASHBOARD_URL, os.environ.get("RAY_AUTH_TOKEN") or file.get("RAY_AUTH_TOKEN", ""))

    @property
    def token_hint(self) -> str:
        return f"set RAY_AUTH_TOKEN to the one in {COMPOSE_VARIABLES}, or run the command in the folder of the project"

    def explain(self, cause: AnswerError) -> ResourceError:
        return ResourceError(
            f"no Ray head answers at {DASHBOARD_URL}; docker compose --file docker/compose.yaml up --detach starts it"
        )

    @contextmanager
    def forward(self, host: str, port: int) -> Generator[int]:
        # Compose publishes the ports of the head's dashboard and notebook.
        yield COMPOSE_PORTS.get(port, port)

    def s3_options(self) -> dict[str, Any]:
        keys = {"aws_access_key_id": "local", "aws_secret_access_key": "local"}
        return {**super().s3_options(), **keys, "region_name": "us-east-1", "endpoint_url": COMPOSE_S3}

    def shell(self) -> AbstractContextManager[subprocess.Popen[Any]]:
        return keys_for(["docker", "compose", "--file", "docker/compose.yaml", "exec", "head", "bash"])


def choose(stack: str | None, outputs: str | None, *, local: bool | None, compose: bool | None) -> Cluster:
    """Return the cluster of the flags; TrainingError if the stack can't be found (see `stack.find`)."""
    if sum(map(bool, (local, compose, stack, outputs))) > 1:
        raise UsageError("--stack, --outputs, --local and --compose: give one of them")
    if local:
        return LocalCluster()
    if compose:
        return ComposeCluster()
    address = os.environ.get(CLUSTER_VARIABLE)
    if address and not (stack or outputs):
        return HeadCluster() if address == HEAD else BucketCluster(address)
    try:
        return StackCluster(find(stack, outputs))
    except TrainingError as cause:
        if not (stack or outputs) and _has_local_runs():
            on_cluster = str(cause).removesuffix(OR_LOCAL)
            cause.args = (f"for the runs of this machine give --local; for a cluster: {on_cluster}",)
        raise


def _has_local_runs() -> bool:
    """Return whether a command with --local would find a run."""
    with suppress(OSError, TrainingError):
        storage = LocalCluster().storage("")
        is_any = storage.is_local and any(map(is_run_name, storage.listing().folders))
        return is_any or bool(MachineJobs().list_jobs())
    return False
