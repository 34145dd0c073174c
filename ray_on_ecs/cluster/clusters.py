"""Clusters that a command can use: a stack's, through Session Manager; this machine's; or docker compose's."""

from __future__ import annotations

import hashlib
import os
import shlex
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray_on_ecs import secrets
from ray_on_ecs.addresses import check_address
from ray_on_ecs.cluster import local_head
from ray_on_ecs.cluster.head import Head
from ray_on_ecs.cluster.local_head import LocalHead
from ray_on_ecs.contract import DASHBOARD_URL, secrets_prefix
from ray_on_ecs.errors import HeadGone, HeadUnavailable, ResourceError, UsageError, counted
from ray_on_ecs.node import api, ports
from ray_on_ecs.node.api import AnswerError, TokenError
from ray_on_ecs.node.jobs import ENDED

if TYPE_CHECKING:
    from ray_on_ecs.cluster.stack import Stack
    from ray_on_ecs.storage.run_storage import RunStorage

# Set in the image, where commands are for the container's own cluster.
CLUSTER_VARIABLE, HEAD = "RAY_ON_ECS_CLUSTER", "head"
# See docker/compose.yaml.
COMPOSE_VARIABLES = Path("docker/.env")
COMPOSE_STORAGE = "s3://training/runs"
STORAGE_PATH = "RAY_ON_ECS_STORAGE_PATH"
COMPOSE_S3 = "http://127.0.0.1:5001"
COMPOSE_CLUSTER = "laptop"
COMPOSE_PORTS = {8888: 18888}
# A new head pulls its image first; in the head's container only its dashboard can be down.
HEAD_SECONDS, DASHBOARD_SECONDS = 1800.0, 60.0
RETRY_SECONDS = 5.0
# Number of workers of a run without GPUs.
DEFAULT_WORKERS = 2


class Cluster(ABC):
    """Cluster that a command is for; it need not be up.

    Attributes:
        name: Its name in errors.
        storage_path: The folder or prefix of its runs, as this machine reaches it.
        typed: The cluster flag that the user typed, with a space before it; empty without one.
        typed_path: The storage path that the user typed, which hints repeat as an environment variable.
        start_seconds: Time to wait for its head.
    """

    name: str
    storage_path: str
    typed: str = ""
    typed_path: str = ""
    start_seconds: float = HEAD_SECONDS

    def command(self, words: str) -> str:
        """Return a command on the same cluster, for hints.

        Args:
            words: The subcommand and its arguments, such as `logs RUN`.
        """
        subcommand, space, arguments = words.partition(" ")
        path = f"{STORAGE_PATH}={shlex.quote(self.typed_path)} " if self.typed_path else ""
        return f"{path}ray-on-ecs {subcommand}{self.typed}{space}{arguments}"

    @property
    def is_here(self) -> bool:
        """True if its jobs can read the files of this machine."""
        return False

    def absolute(self, storage_path: str) -> str:
        """Return a storage path as its jobs need it."""
        return storage_path

    def document_storage(self, storage: RunStorage) -> RunStorage:
        """Return the folder for a run's document, which this machine can write.

        Args:
            storage: The run's folder.
        """
        return storage

    def code_storage(self, storage: RunStorage) -> RunStorage:
        """Return a folder of a run next to which this machine can store the code; `storage` is the run's own."""
        return storage

    @property
    def stack(self) -> Stack | None:
        """The stack, or None for a cluster of this machine."""
        return None

    @contextmanager
    def connect(self) -> Generator[Head]:
        """Connect to the head until the block ends.

        Raises:
            UsageError: The head refuses the token, or a program for the connection is not installed.
            ResourceError: The head can't be reached.
        """
        with self._reach() as head:
            try:
                head.get("/api/version", "ray_version")
            except UsageError as refused:
                raise UsageError(f"{refused}; {self.token_hint}") from refused
            except AnswerError as cause:
                raise self.explain(cause) from cause
            yield head

    @contextmanager
    def connect_when_up(self, say: Callable[[str], None]) -> Generator[Head]:
        """Connect like `connect`, and wait for a head that is starting.

        Args:
            say: Prints the reason of the wait, whenever it changes.
        """
        deadline = time.monotonic() + self.start_seconds
        last_reason = ""
        with ExitStack() as connection:
            while True:
                try:
                    head = connection.enter_context(self.connect())
                    break
                except HeadUnavailable as cause:
                    if time.monotonic() > deadline:
                        raise
                    if str(cause) != last_reason:
                        say(f"waiting for the Ray head: {cause}")
                    last_reason = str(cause)
                    time.sleep(RETRY_SECONDS)
            yield head

    @property
    def ends_with_run(self) -> bool:
        """True if a run starts the head, and the last run ends it."""
        return False

    def up(self, workers: int, say: Callable[[str], None]) -> bool:
        """Start a head that ends with its runs, unless it is up; return True if it is up now.

        Args:
            workers: The number of workers of the run; 0 if the cluster decides.
            say: Prints a line about the start.

        Raises:
            ResourceError: The head does not start.
        """
        return False

    def down(self, run_name: str = "") -> bool:
        """End a head that ends with its runs, unless it has others than this one; return True if it has ended.

        Args:
            run_name: A run below the storage path, which is killed if it is under way; empty for none.
        """
        return False

    @property
    def token_hint(self) -> str:
        """The way out of a wrong token."""
        return "set RAY_AUTH_TOKEN to the cluster's"

    def explain(self, cause: AnswerError) -> ResourceError:
        """Return the most precise error for a head that doesn't answer."""
        return cause

    def storage(self, run_name: str, path: str = "") -> RunStorage:
        """Return the folder of a run, without creating it; `path` replaces the storage path.

        Raises:
            UsageError: The storage path can't be reached.
        """
        from ray_on_ecs.storage.run_storage import RunStorage

        return RunStorage.open(path or self.storage_path, run_name, **self.s3_options())

    def secrets_of(self, uri: str) -> secrets.Store:
        """Return the store of a run's secrets, by the run's folder."""
        return secrets.store(uri)

    def s3_options(self) -> dict[str, Any]:
        """Return the arguments of `Bucket` for its storage path: a command gives up sooner than a run."""
        if "://" not in self.storage_path:
            return {}
        from ray_on_ecs.cluster import aws

        return aws.limits()

    @property
    def default_workers(self) -> int | None:
        """The number of workers of a run that does not say it; None if its driver decides."""
        return None

    @contextmanager
    def forward(self, host: str, port: int) -> Generator[int]:
        """Forward a port of a node, by its name in the cluster; yields the local port."""
        yield port

    @abstractmethod
    def shell(self) -> list[str]:
        """Return the command that opens a shell on the head."""

    @abstractmethod
    def _reach(self) -> Any:
        """Return a context that yields the Head, without checking that it answers."""


class StackCluster(Cluster):
    """Cluster of a stack."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self.name = f"stack {stack.name}"
        self.storage_path = stack.storage_path

    @property
    def stack(self) -> Stack:
        """See Cluster."""
        return self._stack

    @contextmanager
    def _reach(self) -> Generator[Head]:
        from ray_on_ecs.cluster import aws

        token = aws.token(self.stack)
        with self.forward(self.stack.head_host, ports.DASHBOARD) as port:
            yield Head(f"http://127.0.0.1:{port}", token)

    @contextmanager
    def forward(self, host: str, port: int) -> Generator[int]:
        """See Cluster: through the head's instance, from which every node is reachable."""
        from ray_on_ecs.cluster import aws
        from ray_on_ecs.cluster.session import forwarded_port

        instance_id = aws.head_instance(self.stack)
        document = self.stack.forward_document
        with forwarded_port(self.stack.region, instance_id, document, host, port, aws.variables()) as local:
            yield local

    def document_storage(self, storage: RunStorage) -> RunStorage:
        """See Cluster: in the stack's bucket if the storage path is a folder of the nodes, apart from other runs."""
        if not storage.is_local:
            return storage
        of_path = hashlib.sha256(self.storage_path.encode()).hexdigest()[:12]
        return self.storage(storage.run_name, f"{self._stack.storage_path}/.documents/{of_path}")

    def code_storage(self, storage: RunStorage) -> RunStorage:
        """See Cluster."""
        return storage if not storage.is_local else self.storage(storage.run_name, self._stack.storage_path)

    @property
    def default_workers(self) -> int | None:
        """See Cluster: a worker for each GPU of the stack; the run waits for them."""
        return self.stack.default_gpus or None

    @property
    def token_hint(self) -> str:
        """See Cluster."""
        stack = self.stack
        return (
            f"it was started with another one: aws ecs update-service --region {stack.region} --cluster "
            f"{stack.cluster_name} --service {stack.services['head']} --force-new-deployment gives it the stack's"
        )

    def explain(self, cause: AnswerError) -> ResourceError:
        """See Cluster."""
        from ray_on_ecs.cluster.aws_status import explain_head

        return explain_head(self.stack) or cause

    def s3_options(self) -> dict[str, Any]:
        """See Cluster."""
        from ray_on_ecs.cluster import aws

        return {**aws.limits(), "region_name": self.stack.region}

    def secrets_of(self, uri: str) -> secrets.Store:
        """See Cluster."""
        from ray_on_ecs.cluster import aws

        return secrets.parameters(secrets_prefix(self.stack.cluster_name), uri, partial(aws.call, "ssm", self.stack))

    def shell(self) -> list[str]:
        """See Cluster."""
        from ray_on_ecs.cluster import aws

        return aws.shell_command(self.stack)


class LocalCluster(Cluster):
    """Ray cluster on this machine: at `RAY_API_SERVER_ADDRESS`, or of the head that `run --local` starts."""

    name = "this machine"
    start_seconds = DASHBOARD_SECONDS

    def __init__(self) -> None:
        given = os.environ.get(STORAGE_PATH) or "results"
        check_address(STORAGE_PATH, given)
        self.storage_path = self.absolute(given)
        self._address = os.environ.get("RAY_API_SERVER_ADDRESS", "").rstrip("/")
        self._reservation: int | None = None

    @property
    def is_here(self) -> bool:
        """See Cluster."""
        return True

    def absolute(self, storage_path: str) -> str:
        """See Cluster: a job starts in another folder."""
        return storage_path if "://" in storage_path else str(Path(storage_path).expanduser().absolute())

    @contextmanager
    def _reach(self) -> Generator[Head]:
        if self._address:
            yield _head_at(self._address)
            return
        started = local_head.find()
        if started is None:
            raise HeadGone(
                "the Ray head is not running on this machine; ray-on-ecs run --local starts it, or set "
                "RAY_API_SERVER_ADDRESS to the dashboard of another"
            )
        yield Head(started.url, started.token)

    def up(self, workers: int, say: Callable[[str], None]) -> bool:
        """See Cluster."""
        if not self.ends_with_run:
            return False
        with local_head.lock():
            cpus = os.cpu_count() or 1
            needed = workers or DEFAULT_WORKERS
            started = local_head.find()
            if started and 0 < started.cpus < workers:
                if self._is_used(started):
                    raise UsageError(
                        f"--num-workers: Ray on this machine is in use, and was started for "
                        f"{counted(started.cpus, 'worker')}, not for {workers}; give --num-workers {started.cpus}, or "
                        f"end its runs first: {self.command('stop --all')}"
                    )
                local_head.stop(started)
                started = None
            if not started:
                shared = f"; {needed} workers share {counted(cpus, 'CPU')}" if needed > cpus else ""
                say(f"starting Ray on this machine{shared}")
                local_head.start(max(cpus, needed))
            # Between this and the submission, Ray has no job of this command, and another one's end would stop it.
            self._reservation = local_head.reserve()
        return True

    @property
    def ends_with_run(self) -> bool:
        """See Cluster: not a head at RAY_API_SERVER_ADDRESS, which is the user's."""
        return not self._address

    def down(self, run_name: str = "") -> bool:
        """See Cluster."""
        if not self.ends_with_run:
            return False
        with local_head.lock():
            if self._reservation is not None:
                os.close(self._reservation)
                self._reservation = None
            started = local_head.find()
            if started is not None:
                if self._is_used(started, run_name):
                    return False
                local_head.stop(started)
        return True

    def _is_used(self, head: LocalHead, run_name: str = "") -> bool:
        """Return whether a head has other runs than this one, or another command is about to submit one."""
        try:
            jobs = Head(head.url, head.token).list_jobs()
        except (AnswerError, TokenError):  # a busy head may be silent for a while
            return True
        for job in jobs:
            metadata = job.get("metadata") or {}
            path = str(metadata.get("storage_path") or "").rstrip("/")
            is_own = (metadata.get("run_name"), path) == (run_name, self.storage_path.rstrip("/"))
            if job["status"] not in ENDED and not is_own:
                return True
        return local_head.is_reserved()

    def explain(self, cause: AnswerError) -> ResourceError:
        """See Cluster."""
        if self._address:
            return ResourceError(
                f"no Ray head answers at {_head_at(self._address).url}; correct RAY_API_SERVER_ADDRESS, or unset it: "
                "ray-on-ecs run --local then starts one"
            )
        started = local_head.find()
        pid = started.pid if started else 0
        return HeadUnavailable(f"the Ray head of this machine doesn't answer ({cause.reason}); kill -9 -{pid} ends it")

    def shell(self) -> list[str]:
        """See Cluster."""
        with self._reach() as head:
            os.environ["RAY_API_SERVER_ADDRESS"] = head.url
            if head.token:
                os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=head.token)
        for name in ("NO_PROXY", "no_proxy"):  # a proxy would read the token, and can't reach this machine
            os.environ[name] = ",".join(filter(None, [os.environ.get(name), "127.0.0.1,localhost"]))
        os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        return [os.environ.get("SHELL", "sh")]


class HeadCluster(LocalCluster):
    """Cluster of the container that this runs in, whose environment has the storage path."""

    name = "this cluster"

    def __init__(self) -> None:
        super().__init__()
        self._address = self._address or DASHBOARD_URL

    @property
    def is_here(self) -> bool:
        """See Cluster: the workers are in other containers."""
        return False

    def explain(self, cause: AnswerError) -> ResourceError:
        """See Cluster: unavailable for a moment, as the head restarts its dashboard."""
        return HeadUnavailable(f"its dashboard doesn't answer at {self._address} ({cause.reason})")


def _head_at(address: str) -> Head:
    return Head(address if "://" in address else f"http://{address}", api.own_token())


class ComposeCluster(Cluster):
    """Cluster of docker/compose.yaml on this machine."""

    name = "compose"
    storage_path = COMPOSE_STORAGE

    @contextmanager
    def _reach(self) -> Generator[Head]:
        yield Head(DASHBOARD_URL, os.environ.get("RAY_AUTH_TOKEN") or self._token())

    @property
    def token_hint(self) -> str:
        """See Cluster."""
        return f"set RAY_AUTH_TOKEN to the one in {COMPOSE_VARIABLES}, or run the command in the folder of the project"

    def _token(self) -> str:
        """Return the token that compose reads; empty if the command runs in another folder."""
        try:
            lines = COMPOSE_VARIABLES.read_text().splitlines()
        except OSError:
            return ""
        return next((line.partition("=")[2] for line in lines if line.startswith("RAY_AUTH_TOKEN=")), "")

    def explain(self, cause: AnswerError) -> ResourceError:
        """See Cluster."""
        return ResourceError(
            f"no Ray head answers at {DASHBOARD_URL}; docker compose --file docker/compose.yaml up --detach starts it"
        )

    @contextmanager
    def forward(self, host: str, port: int) -> Generator[int]:
        """See Cluster: compose publishes the ports of the head's dashboard and notebook."""
        yield COMPOSE_PORTS.get(port, port)

    def s3_options(self) -> dict[str, Any]:
        """See Cluster."""
        keys = {"aws_access_key_id": "local", "aws_secret_access_key": "local"}
        return {**super().s3_options(), **keys, "region_name": "us-east-1", "endpoint_url": COMPOSE_S3}

    def secrets_of(self, uri: str) -> secrets.Store:
        """See Cluster: in the emulated AWS of its bucket."""
        ask = partial(secrets.ask, "ssm", options=self.s3_options())
        return secrets.parameters(secrets_prefix(COMPOSE_CLUSTER), uri, ask)

    def shell(self) -> list[str]:
        """See Cluster."""
        return ["docker", "compose", "--file", "docker/compose.yaml", "exec", "head", "bash"]


def choose(stack: str | None, outputs: str | None, *, local: bool | None, compose: bool | None) -> Cluster:
    """Return the cluster of the flags.

    Raises:
        TrainingError: The stack can't be found (see `stack.find`).
    """
    if sum(map(bool, (local, compose, stack, outputs))) > 1:
        raise UsageError("--stack, --outputs, --local and --compose: give one of them")
    if local:
        return LocalCluster()
    if compose:
        return ComposeCluster()
    if not (stack or outputs) and os.environ.get(CLUSTER_VARIABLE) == HEAD:
        return HeadCluster()
    from ray_on_ecs.cluster.stack import find

    return StackCluster(find(stack, outputs))
