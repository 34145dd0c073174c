"""Checks of a stack on AWS: refusals, and the undoing of each change after a failure at any call."""

import re
from collections.abc import Callable, Generator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from datetime import UTC, datetime, timedelta
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from drills import aws, aws_checks
from drills.aws_site import Site
from ray_on_ecs.aws import Refused
from ray_on_ecs.errors import ResourceError, UsageError
from ray_on_ecs.jobs.remote import SILENT_SECONDS
from tests.front import Front
from tests.ray_on_ecs.cli.account import Laptop, create_account, group_name
from tests.ray_on_ecs.cli.folders import job
from tests.ray_on_ecs.ray_head import RayHead
from tests.serving import serving

BORN = datetime(2026, 11, 1, tzinfo=UTC)
TASK = {
    "taskArn": "arn:aws:ecs:us-east-1:123456789012:task/1",
    "containerInstanceArn": "instance",
    "desiredStatus": "RUNNING",
    "group": "service:w-b",
    **{step: BORN + timedelta(seconds=10 * number) for number, step in enumerate(aws_checks.STEPS)},
}
SERVICES = {"head": "h", "workers": "w", "workers-b": "w-b", "h100-workers": "x"}
# Nothing that the checks wait for takes longer than a call.
LIMITS = {"POLL_SECONDS": 0.0, "START_SECONDS": 60.0, "DEPLOYMENT_SECONDS": 0.0, "DRAIN_SECONDS": 60.0}


class Cloud(Site):
    """A stack whose AWS and commands are these methods; `fail` is called before and after each call.

    Attributes:
        runs: The runs under way.
        status: The state of the worker's container instance.
        calls: The calls so far.
        draining_ends: A drained task gets SIGTERM.
    """

    def __init__(self) -> None:
        stack = SimpleNamespace(name="ml", region="us-east-1", cluster_name="c", services=SERVICES)
        group = {"pool": "default", "types": ["g5.xlarge"], "spot": False}
        groups = {"workers": group, "workers-b": group, "h100-workers": {**group, "pool": "h100"}}
        info: Any = {"groups": groups, "prices": None}
        super().__init__(stack, info, self, [])  # ty: ignore[invalid-argument-type]
        self.runs, self.age, self.gpus, self.status = set[str](), 0.0, 0.0, "ACTIVE"
        self.calls: list[str] = []
        self.fail: Callable[[str], None] = lambda moment: None
        self.draining_ends = True

    def read(self) -> Any:
        jobs = [job(name) for name in self.runs]
        return SimpleNamespace(ray={"gpus": {"used": self.gpus}}), self.age, jobs

    def ask(self, service: str, method: str, /, **arguments: Any) -> Any:
        with self._failing(method):
            return getattr(self, method)(**arguments)

    def command(self, verb: str, *words: str, script: str = "") -> str:
        with self._failing(verb):
            if verb == "stop":
                self.runs.remove(words[0])
            elif "--detach" in words:
                self.runs.add(words[words.index("--run-name") + 1])
            return "[head] answer: accepted\n"

    @contextmanager
    def _failing(self, call: str) -> Generator[None]:
        self.calls.append(call)
        self.fail("before")
        yield
        self.fail("after")

    def list_tasks(self, serviceName: str, desiredStatus: str = "RUNNING", **_: Any) -> Any:
        assert serviceName in ("w", "w-b"), "the run is in the default pool"
        return {"taskArns": [TASK["taskArn"]] if (serviceName, desiredStatus) == ("w-b", "RUNNING") else []}

    def get_task_protection(self, **_: Any) -> Any:
        return {"protectedTasks": [{"taskArn": TASK["taskArn"], "protectionEnabled": bool(self.runs)}]}

    def describe_tasks(self, **_: Any) -> Any:
        stopping = {"stoppingAt": BORN} if self.status == "DRAINING" and self.draining_ends else {}
        return {"tasks": [TASK | stopping]}

    def update_service(self, service: str, **_: Any) -> None:
        assert service == "w-b", "its worker is in the second zone"

    def describe_services(self, **_: Any) -> Any:
        return {
            "services": [{"deployments": [{"status": "PRIMARY", "rolloutState": "IN_PROGRESS", "runningCount": 1}]}]
        }

    def describe_scaling_activities(self, **_: Any) -> Any:
        return {"ScalingActivities": []}

    def update_container_instances_state(self, status: str, **_: Any) -> None:
        self.status = status


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten(monkeypatch)


def shorten(patch: pytest.MonkeyPatch) -> None:
    for name, seconds in LIMITS.items():
        patch.setattr(aws_checks, name, seconds)


def test_all_checks_pass_and_block_has_no_account(capsys: pytest.CaptureFixture[str]) -> None:
    assert aws.drill(Cloud()) == 0
    shown = capsys.readouterr().out
    for name in aws.CHECKS:
        assert re.search(rf"\| {re.escape(name)} \| pass, \d+ s \| ", shown), name
    assert "createdAt +0 s, connectivityAt +10 s" in shown
    assert "123456789012" not in shown


def _changes() -> list[Any]:
    """Each call of a drill, before and after it has an effect, with an answer of AWS and with Ctrl-C."""
    cloud = Cloud()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        shorten(patch)
        aws.drill(cloud)
    calls = cloud.calls
    assert {"run", "update_service", "update_container_instances_state"} <= set(calls)
    first_undo = len(calls) - 1 - calls[::-1].index("update_container_instances_state")
    return [
        pytest.param(number, moment, error, id=f"{number}-{call}-{moment}-{type(error).__name__}")
        for number, call in enumerate(calls[:first_undo])
        for moment in ("before", "after")
        for error in (Refused("AccessDenied", "autoscaling: not authorized"), KeyboardInterrupt())
    ]


@pytest.mark.parametrize(("number", "moment", "error"), _changes())
def test_every_change_is_undone_after_a_failure(number: int, moment: str, error: BaseException) -> None:
    cloud = Cloud()

    def fail(now: str) -> None:
        if (len(cloud.calls) - 1, now) == (number, moment):
            raise error

    cloud.fail = fail
    assert aws.drill(cloud) == (1 if isinstance(error, Refused) else 130)
    assert (cloud.runs, cloud.status) == (set(), "ACTIVE")


def test_failed_undo_names_the_command_and_others_are_undone(capsys: pytest.CaptureFixture[str]) -> None:
    cloud = Cloud()

    def fail(moment: str) -> None:
        if cloud.calls[-1] == "stop":
            raise ResourceError("ray-on-ecs stop: the head is silent")

    cloud.fail = fail
    assert aws.drill(cloud) == 1
    shown = capsys.readouterr().out
    assert f"NOT UNDONE (ray-on-ecs stop: the head is silent): ray-on-ecs stop {cloud.name}" in shown
    assert cloud.status == "ACTIVE"


def test_protected_task_without_sigterm_fails_the_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cloud = Cloud()
    cloud.draining_ends = False
    monkeypatch.setattr(aws_checks, "DRAIN_SECONDS", 0.0)
    assert aws.drill(cloud) == 1
    assert "got no SIGTERM" in capsys.readouterr().out


@pytest.mark.parametrize("use", [{"runs": {"night"}}, {"gpus": 1.0}, {"age": SILENT_SECONDS + 1}], ids=str)
def test_stack_in_use_is_not_disturbed(use: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    cloud = Cloud()
    vars(cloud).update(use)
    with mock.patch.object(aws, "find", return_value=cloud):
        assert aws.main(["--yes-this-costs-money"]) == 2
    assert capsys.readouterr().err.startswith("python -m drills.aws: stack ml: ")
    assert not cloud.calls


def test_run_of_another_user_ends_the_drill() -> None:
    cloud = Cloud()

    def fail(moment: str) -> None:
        if cloud.calls[-1] == "run":
            cloud.runs.add("night")

    cloud.fail = fail
    assert aws.drill(cloud) == 1
    assert "update_service" not in cloud.calls
    assert cloud.runs == {"night"}


@pytest.mark.parametrize("flag", ["--y", "--yes", "--yes-this-costs"])
def test_money_flag_has_no_short_form(flag: str) -> None:
    with mock.patch.object(aws, "find", side_effect=AssertionError), pytest.raises(SystemExit) as ended:
        aws.main([flag])
    assert ended.value.code == 2


def test_checks_without_a_worker_say_nothing_about_aws() -> None:
    cloud = Cloud()
    for check in (aws_checks.agent, aws_checks.deploy, aws_checks.drain):
        assert aws.attempt(cloud, check) == (None, "no worker has started: this check needs F")


def test_denied_check_is_not_checked() -> None:
    def check(site: Site) -> aws_checks.Answer:
        raise Refused("AccessDeniedException", "not allowed")

    passed, answer = aws.attempt(Cloud(), check)
    assert (passed, answer.startswith("not checked: ")) == (False, True)


def test_bucket_of_a_cluster_is_refused_before_aws_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ON_ECS_CLUSTER", "s3://bucket")
    with mock.patch.object(aws, "choose", side_effect=AssertionError), pytest.raises(UsageError, match="unset it"):
        aws.find(None, None)


def test_money_flag_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    with mock.patch.object(aws, "find", side_effect=AssertionError), pytest.raises(SystemExit) as ended:
        aws.main([])
    assert ended.value.code == 2
    assert "--yes-this-costs-money" in capsys.readouterr().err


def test_run_under_way_refuses_a_real_stack(
    aws_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(Front(aws_server)) as front, serving(RayHead()) as head:
        account = create_account(aws_server)
        laptop = Laptop(account.url, account.outputs, front, head, tmp_path)
        head.jobs = ["RUNNING"]
        laptop.put_state()
        for name, value in laptop.variables.items():
            monkeypatch.setenv(name, value)
        assert aws.main(["--yes-this-costs-money", *laptop.outputs_flag()]) == 2
        head.jobs = []
        laptop.put_state()
        monkeypatch.chdir(Path(laptop.outputs_flag()[1]).parent)
        site = aws.find(None, Path(laptop.outputs_flag()[1]).name)
        assert site.flags == ["--outputs", laptop.outputs_flag()[1]], "its commands run in other folders"
        site.check_unused()
        laptop.undo.close()
    assert "stack outputs: run run-0 is under way" in capsys.readouterr().err
    assert site.info["groups"]["workers"]["group"] == group_name("workers")
