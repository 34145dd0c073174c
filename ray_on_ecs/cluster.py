"""The cluster that a command talks to: a stack's, through Session Manager; this machine's; or that of compose."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from training.errors import ResourceError, UsageError, one_line

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

    from ray_on_ecs.stack import Stack
    from training.run.storage import RunStorage

DASHBOARD_PORT = 8265
LOCAL_ADDRESS = f"http://127.0.0.1:{DASHBOARD_PORT}"
# See docker/compose.yaml.
COMPOSE_TOKEN = "only-for-this-laptop"
COMPOSE_STORAGE = "s3://training/runs"
COMPOSE_S3 = "http://127.0.0.1:5001"
REQUEST_SECONDS = 20.0
# A head that starts pulls its image first.
HEAD_SECONDS = 1800.0
RETRY_SECONDS = 2.0
WRONG_TOKEN = "the Ray head refuses the token"


@dataclass
class Head:
    """A Ray head that answers, at an address of this machine.

    Attributes:
        url: Of its dashboard, without a slash at its end.
        token: Ray's token; empty if the cluster has none.
    """

    url: str
    token: str = ""

    def get(self, path: str) -> Any:
        """Return the JSON that a path of the dashboard answers with.

        Raises:
            UsageError: The head refuses the token.
            ResourceError: The head doesn't answer.
        """
        return self._get(path).json()

    def date(self) -> str | None:
        """Return the head's clock as HTTP says it, if it does."""
        return self._get("/api/version").headers.get("Date")

    @cached_property
    def jobs(self) -> JobSubmissionClient:
        """The client of Ray's Jobs API."""
        from training.job import connect  # it imports Ray

        self.export()
        return connect()

    def export(self) -> None:
        """Let Ray's own clients in this process find it: they read the environment."""
        os.environ["RAY_API_SERVER_ADDRESS"] = self.url
        if self.token:
            os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=self.token)

    def _get(self, path: str) -> Any:
        import requests

        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        try:
            with requests.Session() as session:
                session.trust_env = False  # a proxy would read the token, and can't reach this machine
                answer = session.get(self.url + path, headers=headers, timeout=REQUEST_SECONDS)
            if answer.status_code in (401, 403):
                raise UsageError(WRONG_TOKEN)
            answer.raise_for_status()
            answer.json()
        except (requests.RequestException, ValueError) as cause:
            raise ResourceError(f"the Ray head doesn't answer ({one_line(cause)})") from cause
        return answer


class Cluster(ABC):
    """A cluster, which need not be up.

    Attributes:
        name: What errors call it.
        storage_path: Where its runs are, seen from here.
    """

    name: str
    storage_path: str

    @property
    def stack(self) -> Stack | None:
        """The stack, or None for a cluster of this machine."""
        return None

    @contextmanager
    def connect(self) -> Generator[Head]:
        """Reach the head; whatever had to be opened is closed afterwards.

        Raises:
            UsageError: The head refuses the token, or something to reach it with is missing here.
            ResourceError: It can't be reached.
        """
        with self._reach() as head:
            try:
                head.get("/api/version")
            except UsageError as refused:
                raise UsageError(f"{refused}; {self.token_hint}") from refused
            except ResourceError as cause:
                raise self.explain(cause) from cause
            yield head

    @contextmanager
    def connect_when_up(self, say: Callable[[str], None]) -> Generator[Head]:
        """Reach the head as `connect` does, and wait for one that is starting.

        Args:
            say: Gets the reason to wait, as often as it is another one.
        """
        deadline, said = time.monotonic() + HEAD_SECONDS, ""
        while True:
            opened = self.connect()
            try:
                head = opened.__enter__()
                break
            except ResourceError as cause:
                if time.monotonic() > deadline or not self.may_start(cause):
                    raise
                if said != (said := str(cause)):
                    say(f"waiting for the Ray head: {cause}")
                time.sleep(RETRY_SECONDS)
        try:
            yield head
        finally:
            opened.__exit__(None, None, None)

    def may_start(self, cause: ResourceError) -> bool:
        """Return whether it is worth waiting for a head that can't be reached for this cause."""
        return False

    @property
    def token_hint(self) -> str:
        """What to do where the token is wrong."""
        return "set RAY_AUTH_TOKEN to the cluster's"

    def explain(self, cause: ResourceError) -> ResourceError:
        """Return the error that says best why the head doesn't answer."""
        return cause

    def storage(self, run_name: str) -> RunStorage:
        """Return the folder of a run; nothing is created.

        Raises:
            UsageError: The storage path can't be reached.
        """
        from training.run.storage import RunStorage

        self.prepare_storage()
        return RunStorage.open(self.storage_path, run_name)

    def prepare_storage(self) -> None:  # noqa: B027
        """Set what this process needs to read the storage path."""

    def run_flags(self) -> dict[str, Any]:
        """Return the settings, by name, that a run on this cluster has if nobody gives others."""
        return {}

    @contextmanager
    def forward(self, host: str, port: int) -> Generator[int]:
        """Make a port of a node reachable from here; yields the port of this machine."""
        yield port

    @abstractmethod
    def shell(self) -> list[str]:
        """Return the command that opens a shell on the head."""

    @abstractmethod
    def _reach(self) -> Any:
        """Return a context that yields the Head, unasked."""


class StackCluster(Cluster):
    """The cluster of a stack."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self.name = f"stack {stack.name}".strip()
        self.storage_path = stack.storage_path

    @property
    def stack(self) -> Stack:
        """See Cluster."""
        return self._stack

    @contextmanager
    def _reach(self) -> Generator[Head]:
        from ray_on_ecs import aws

        token = aws.token(self.stack)
        with self.forward(self.stack.head_host, DASHBOARD_PORT) as port:
            yield Head(f"http://127.0.0.1:{port}", token)

    @contextmanager
    def forward(self, host: str, port: int) -> Generator[int]:
        """See Cluster: through the head's instance, as all nodes let each other in."""
        from ray_on_ecs import aws
        from ray_on_ecs.session import forwarded_port

        with forwarded_port(self.stack.region, aws.head_instance(self.stack), host, port) as local:
            yield local

    def run_flags(self) -> dict[str, Any]:
        """See Cluster: a worker for each GPU of the stack, which the run waits for."""
        return {"num_workers": self.stack.gpus} if self.stack.gpus else {}

    @property
    def token_hint(self) -> str:
        """See Cluster."""
        stack = self.stack
        return (
            f"it was started with another one: aws ecs update-service --region {stack.region} --cluster "
            f"{stack.cluster_name} --service {stack.services.get('head')} --force-new-deployment gives it the stack's"
        )

    def may_start(self, cause: ResourceError) -> bool:
        """See Cluster: what is gone doesn't come by waiting."""
        from ray_on_ecs import aws

        return not isinstance(cause, aws.StackGone)

    def explain(self, cause: ResourceError) -> ResourceError:
        """See Cluster."""
        from ray_on_ecs import aws

        return aws.explain_head(self.stack) or cause

    def prepare_storage(self) -> None:
        """Give the credentials of the AWS SDK for Python to pyarrow, whose own SDK knows fewer ways to log in."""
        from ray_on_ecs import aws

        aws.export_credentials(self.stack)

    def shell(self) -> list[str]:
        """See Cluster."""
        from ray_on_ecs import aws

        return aws.shell_command(self.stack)


class LocalCluster(Cluster):
    """A Ray cluster that runs on this machine, such as that of `ray start --head`."""

    name = "this machine"

    def __init__(self) -> None:
        given = os.environ.get("TRAINING_STORAGE_PATH") or "results"
        # A job starts in a folder of its own.
        self.storage_path = given if "://" in given else str(Path(given).expanduser().absolute())
        self._head = Head(
            os.environ.get("RAY_API_SERVER_ADDRESS", LOCAL_ADDRESS).rstrip("/"), os.environ.get("RAY_AUTH_TOKEN", "")
        )

    @contextmanager
    def _reach(self) -> Generator[Head]:
        yield self._head

    def explain(self, cause: ResourceError) -> ResourceError:
        """See Cluster."""
        return ResourceError(
            f"no Ray head answers at {self._head.url}; start one by ray start --head, or set RAY_API_SERVER_ADDRESS to "
            "the address of its dashboard"
        )

    def run_flags(self) -> dict[str, Any]:
        """See Cluster."""
        return {"storage_path": self.storage_path}

    def shell(self) -> list[str]:
        """See Cluster."""
        self._head.export()
        return [os.environ.get("SHELL", "sh")]


class ComposeCluster(Cluster):
    """The cluster of docker/compose.yaml on this machine."""

    name = "compose"
    storage_path = COMPOSE_STORAGE

    @contextmanager
    def _reach(self) -> Generator[Head]:
        yield Head(LOCAL_ADDRESS, os.environ.get("RAY_AUTH_TOKEN", COMPOSE_TOKEN))

    def explain(self, cause: ResourceError) -> ResourceError:
        """See Cluster."""
        return ResourceError(
            f"no Ray head answers at {LOCAL_ADDRESS}; docker compose --file docker/compose.yaml up --detach starts it"
        )

    def prepare_storage(self) -> None:
        """Set the address of compose's S3, and credentials that it takes."""
        os.environ.update(
            AWS_ENDPOINT_URL=COMPOSE_S3,
            AWS_ACCESS_KEY_ID="local",
            AWS_SECRET_ACCESS_KEY="local",
            AWS_REGION="us-east-1",
        )

    def shell(self) -> list[str]:
        """See Cluster."""
        return ["docker", "compose", "--file", "docker/compose.yaml", "exec", "head", "bash"]


def choose(stack: str | None, outputs: str | None, *, local: bool, compose: bool) -> Cluster:
    """Return the cluster that the flags name.

    Raises:
        TrainingError: There is none (see `stack.find`).
    """
    if sum((local, compose, bool(stack or outputs))) > 1:
        raise UsageError("--stack, --outputs, --local and --compose: give one of them")
    if local:
        return LocalCluster()
    if compose:
        return ComposeCluster()
    from ray_on_ecs.stack import find

    return StackCluster(find(stack, outputs))


CLUSTER_FLAGS = (
    click.option("--stack", metavar="NAME", envvar="RAY_ON_ECS_STACK", help="The Pulumi stack; else the selected one."),
    click.option(
        "--outputs",
        metavar="FILE",
        envvar="RAY_ON_ECS_OUTPUTS",
        help="A file with the stack's outputs, for those without Pulumi (pulumi stack output --json > FILE).",
    ),
    click.option("--local", is_flag=True, help="A Ray cluster on this machine, at RAY_API_SERVER_ADDRESS."),
    click.option("--compose", is_flag=True, help="The cluster of docker/compose.yaml."),
)


def cluster_flags(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the flags that name a cluster: `stack`, `outputs`, `local` and `compose`."""
    for option in reversed(CLUSTER_FLAGS):
        function = option(function)
    return function


def on_cluster(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the flags that name a cluster, and call it with `cluster` in their place."""

    @cluster_flags
    @wraps(function)
    def called(*args: Any, stack: str | None, outputs: str | None, local: bool, compose: bool, **given: Any) -> Any:
        return function(*args, cluster=choose(stack, outputs, local=local, compose=compose), **given)

    return called
