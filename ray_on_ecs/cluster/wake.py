"""Wake of a head that sleeps: metrics that request it and the workers of a run, and lines while it starts.

Two alarms of the stack act on the metrics, so a user needs one permission of CloudWatch beside those for the bucket. A
request is published before there is work for the head, and again each minute until the head has answered: a command
that is killed in between wakes a cluster for nothing, and none leaves work for which nothing wakes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta

from ray_on_ecs.aws import DENIED, Refused, client, translated
from ray_on_ecs.config import RunConfig
from ray_on_ecs.errors import ResourceError, TrainingError, UsageError, counted, one_line
from ray_on_ecs.jobs.documents import HeadState, Wake
from ray_on_ecs.jobs.remote import SILENT_SECONDS, is_asleep
from ray_on_ecs.node.demand import Need
from ray_on_ecs.node.metrics import Datum, head_requested, of_kind
from ray_on_ecs.node.ray_status import workers_of

# Between two publications, and after one that failed.
REPEAT_SECONDS, AGAIN_SECONDS = 60.0, 10.0
# Between two lines that say the same, and between two looks at AWS.
LINE_SECONDS, PHASE_SECONDS = 60.0, 15.0
# Short: the command waits for the head meanwhile, and publishes again if that is silent.
LIMITS = {"connect_seconds": 5, "read_seconds": 10, "attempts": 1}
# ECS ends the instance of a head that has gone to sleep after a quarter of an hour.
WARM_SECONDS = 900.0
TIME, PARTS = "about 5 minutes", "alarm 10 to 30 s, instance 60 s, image 2 to 4 minutes, Ray 30 s"
WARM_TIME = "30 to 60 s, as its instance is still there"


class Denied(ResourceError):
    """The user may not request the head."""


class Waker:
    """Requests of one command for a head, and lines while it starts.

    `phase` returns what a head that starts waits for, empty if that is not known, and `workers` the metrics that
    request the workers of a run, by the head's last state.
    """

    def __init__(
        self,
        say: Callable[[str], None],
        phase: Callable[[], str] = str,
        workers: Callable[[HeadState], Sequence[Datum]] = lambda state: (),
    ) -> None:
        self._say, self._phase, self._workers = say, phase, workers
        self._due_at = self._told_at = self._looked_at = float("-inf")
        self._has_failed = False  # the last publication
        self._began_at: float | None = None
        self._known = ""  # phase
        self._said: set[str] = set()

    def ask(self, state: HeadState, age: float) -> None:
        """Publish a request before there is work; a fault that may pass is told, and any is ignored if the head is up.

        If it sleeps: Denied if AWS denies the request, UsageError if the credentials can't be used.
        """
        try:
            self._publish(state, age)
        except (Denied, UsageError) as cause:
            if is_asleep(state, age):
                cause.args = (f"the cluster is asleep, and can't be woken: {cause}",)
                raise
        except TrainingError as cause:
            if is_asleep(state, age):
                self._tell_failure(cause)

    def wait(self, state: HeadState, age: float) -> bool:
        """Publish again if that is due, and tell what a silent head waits for; True if others need not tell it."""
        is_silent = age > SILENT_SECONDS
        if state.wake and time.monotonic() >= self._due_at and (is_silent or not self._has_failed):
            try:
                self._publish(state, age)
            except TrainingError as cause:
                if is_silent:
                    self._tell_failure(cause)
        if state.wake and is_silent:
            self._tell(state, age)
        return self._began_at is not None

    def _publish(self, state: HeadState, age: float) -> None:
        if state.wake:
            # A head that runs knows better which workers are needed. One that is silent may have a run, and the alarms
            # know of its silence by what is missing.
            workers = self._workers(state) if is_asleep(state, age) else ()
            self._due_at = time.monotonic() + AGAIN_SECONDS
            self._has_failed = True
            publish(state.wake, [head_requested(), *workers])
            self._has_failed = False
            self._due_at = time.monotonic() + REPEAT_SECONDS

    def _tell_failure(self, cause: TrainingError) -> None:
        line = f"the request for the head is not published yet, and is tried again ({one_line(cause)})"
        if line not in self._said:
            self._said.add(line)
            self._say(line)

    def _tell(self, state: HeadState, age: float) -> None:
        """Tell what the head waits for: at first, when that changes, and each minute."""
        now, before = time.monotonic(), self._known
        if now - self._looked_at >= PHASE_SECONDS:
            self._known, self._looked_at = self._phase(), now
        if self._began_at is None:
            self._began_at = self._told_at = now
            self._begin(state, age)
        if self._known and self._known != before:
            self._told_at = now
            self._say(f"waiting for the head: {self._known}")
        if now - self._told_at >= LINE_SECONDS:
            self._told_at = now
            minutes = counted(int(now - self._began_at) // 60, "minute")
            self._say(f"waiting for the head: {minutes} so far" + (f"; {self._known}" if self._known else ""))

    def _begin(self, state: HeadState, age: float) -> None:
        if not is_asleep(state, age):
            self._say(f"the head is starting, or being replaced: it wrote its state at {clock(age)}")
            return
        parts = "" if self._known else f" ({PARTS})"
        wakes = WARM_TIME if age < WARM_SECONDS else f"{TIME}{parts}"
        self._say(f"asleep since {clock(age)}; the cluster wakes in {wakes}")


def publish(wake: Wake, data: Sequence[Datum]) -> None:
    """Publish metrics of a cluster as a user; Denied if the user may not, and else any TrainingError."""
    try:
        with translated("cloudwatch"):
            cloudwatch = client("cloudwatch", region_name=wake.region, **LIMITS)
            cloudwatch.put_metric_data(Namespace=wake.namespace, MetricData=list(data))
    except Refused as refused:
        if refused.code not in DENIED:
            raise
        needs = f"ask for cloudwatch:PutMetricData in the namespace {wake.namespace}, as in docs/accounts.md"
        raise Denied(f"access denied ({one_line(refused)}); {needs}") from refused


def workers_of_run(config: RunConfig | None, state: HeadState) -> list[Datum]:
    """Return the two metrics of scale-out for a run's workers, as the head publishes them once it is awake."""
    from ray_on_ecs.run.pool_choice import first_need

    info = workers_of(state.ray)
    need = first_need(config, info) if config and info else None
    if not (need and info):
        return []
    kind, number = need
    with_gpus = bool(info["groups"][kind]["gpu"])
    unit = "GPU" if with_gpus else "CPU"
    data = of_kind(kind, Need(requested=number, available=0, in_use=0), with_gpus)
    # The others are the head's alone, and tell that it is there.
    return [each for each in data if each["MetricName"] in (f"{unit}s", f"{unit}sRequested")]


def clock(age: float) -> str:
    """Return the time so many seconds ago, by this machine's clock, with the day if that is another one."""
    now = datetime.now()
    moment = now - timedelta(seconds=age)
    return f"{moment:%H:%M}" if moment.date() == now.date() else f"{moment:%Y-%m-%d %H:%M}"
