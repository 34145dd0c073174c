"""Ray actor of a run: workers report to it, and the driver reads the reports and sends its directive.

Messages hold absolute values. Workers repeat their status and the driver its directive, so an actor that Ray has
restarted has them again within a second; progress and metrics return with the next step.
"""

from __future__ import annotations

import threading
import uuid
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

REPORT_SECONDS = 0.5
ANSWER_SECONDS = 5.0


@dataclass(frozen=True)
class Progress:
    """Progress of the workers.

    Attributes:
        workers: ID of these workers; a restart gets another one.
        step: Steps done, as their script reports them.
    """

    workers: str
    step: int


@dataclass(frozen=True)
class RunState:
    """State of the actor.

    Attributes:
        incarnation: ID of the actor's process; a restart by Ray changes it.
        progress: The last report, or None before the first.
        metrics: The metrics that the reader doesn't have, by number, in order.
        url: The page that an experiment tracker has for the run, or None.
        guess: Loss and step of the output of a script that reports none, or None.
    """

    incarnation: str
    progress: Progress | None
    metrics: dict[int, Any]
    url: str | None = None
    guess: dict[str, Any] | None = None


class RunActor:
    """Actor with the last reports, the members of the newest worker group and the driver's directive."""

    def __init__(self) -> None:
        self._incarnation = uuid.uuid4().hex
        self._progress: Progress | None = None
        self._metrics: dict[int, Any] = {}
        self._url: str | None = None
        self._guess: dict[str, Any] | None = None
        self._groups: list[str] = []
        self._members: dict[int, Any] = {}
        self._directive: Any = None

    def report(self, progress: Progress) -> None:
        """Keep the progress."""
        self._progress = progress

    def report_metrics(self, number: int, metrics: Any) -> None:
        """Keep metrics under their number."""
        self._metrics[number] = metrics

    def report_url(self, url: str) -> None:
        """Keep the URL of the run's page at an experiment tracker."""
        self._url = url

    def report_guess(self, guess: dict[str, Any]) -> None:
        """Keep what is taken from the output."""
        self._guess = guess

    def read(self, after: int) -> RunState:
        """Return the state, with the metrics above a number."""
        new = {number: self._metrics[number] for number in sorted(self._metrics) if number > after}
        return RunState(self._incarnation, self._progress, new, self._url, self._guess)

    def update(self, group: str, rank: int, member: Any, wants_members: bool) -> tuple[Any, dict[int, Any]]:
        """Store a worker's status; return the directive, and all members if it wants them.

        Updates of a group that has been replaced are ignored. A restarted actor learns past groups from the directive.
        """
        if self._directive is not None and group in self._directive.past:
            return self._directive, {}
        if group not in self._groups:
            self._groups.append(group)
            self._members = {}
        if group != self._groups[-1]:
            return self._directive, {}
        self._members[rank] = member
        return self._directive, self._members if wants_members else {}

    def direct(self, directive: Any) -> tuple[str | None, dict[int, Any]]:
        """Store the directive; return the newest worker group and its members by rank."""
        self._directive = directive
        newest = self._groups[-1] if self._groups else None
        return newest, self._members


class RunClient:
    """Client of the actor. Its methods don't wait for a report to arrive, and don't fail when the actor is gone.

    The driver creates the actor with the first call, and workers find it by its name. So the head starts Ray Train's
    controller first, which everything else waits for: a head without CPUs starts one process at a time.

    Args:
        name: The actor's name, unique in the job.
        is_driver: True for the driver's client, which creates the actor.
    """

    def __init__(self, name: str, is_driver: bool = False) -> None:
        self._name = name
        self._is_driver = is_driver
        self._actor: Any = None
        self._finding = threading.Lock()

    def __reduce__(self) -> tuple[type[RunClient], tuple[str]]:
        return RunClient, (self._name,)

    def report(self, progress: Progress) -> None:
        """Report the progress."""
        self._call("report", progress)

    def report_metrics(self, number: int, metrics: Any) -> None:
        """Report metrics under their number, in order."""
        self._call("report_metrics", number, metrics)

    def report_url(self, url: str) -> None:
        """Report the URL of the run's page at an experiment tracker."""
        self._call("report_url", url)

    def report_guess(self, guess: dict[str, Any]) -> None:
        """Report loss and step of the output of a script that reports none."""
        self._call("report_guess", guess)

    def read(self, after: int) -> RunState | None:
        """Return the state with the metrics above a number, or None if the actor doesn't answer."""
        return self._ask("read", after)

    def update(
        self, group: str, rank: int, member: Any, wants_members: bool = False
    ) -> tuple[Any, dict[int, Any]] | None:
        """Send a worker's status; return the directive and the members, or None if the actor doesn't answer."""
        return self._ask("update", group, rank, member, wants_members)

    def direct(self, directive: Any) -> tuple[str | None, dict[int, Any]] | None:
        """Send the directive; return the newest group and its members, or None if the actor doesn't answer."""
        return self._ask("direct", directive)

    def _call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the actor; return Ray's reference to the result, or None before the actor exists."""
        with self._finding:  # Ray ends the actor with the driver's first handle, so a second thread must not replace it
            try:
                self._actor = self._actor or self._find()
            except (RayError, ValueError):  # ValueError: an actor of this name does not exist
                return None
        return getattr(self._actor, method).remote(*arguments)

    def _find(self) -> Any:
        if self._is_driver:
            with suppress(ValueError):  # an earlier request has created it, and the response was lost
                return _create(self._name)
        return ray.get_actor(self._name)

    def _ask(self, method: str, *arguments: Any) -> Any:
        reference = self._call(method, *arguments)
        if reference is None:
            return None
        try:
            return ray.get(reference, timeout=ANSWER_SECONDS)
        except RayError:
            return None


def create_run_actor() -> RunClient:
    """Return the driver's client of a new actor, which the first call creates."""
    return RunClient(f"run-{uuid.uuid4().hex}", is_driver=True)


def _create(name: str) -> Any:
    """Create the actor on the driver's node, so that it survives the loss of a worker node."""
    actor: Any = ray.remote(RunActor)
    return actor.options(
        name=name,
        num_cpus=0,
        max_restarts=-1,
        max_task_retries=-1,  # calls during a restart arrive once the actor is back
        scheduling_strategy=NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False),
    ).remote()
