"""What CloudWatch learns of a run, and that the run doesn't depend on it."""

import math
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import boto3
import pytest
from rich.console import Console

from tests.aws import Told, told
from training.monitoring import cloudwatch
from training.monitoring.cloudwatch import Publisher
from training.monitoring.run_state import RunState

EPOCH = {"steps": 10, "train_loss": 0.5, "test_loss": 0.75, "test_accuracy": 0.9, "samples_per_second": 1000.0}
Published = Callable[[], dict[str, Told]]


@pytest.fixture
def state(monkeypatch: pytest.MonkeyPatch, aws_variables: dict[str, str]) -> RunState:
    """What stands on the run_state; the environment leads to the AWS of the tests."""
    for name, value in aws_variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)  # it would keep the credentials of another test
    state = RunState()
    monkeypatch.setattr(cloudwatch, "read_run_state", lambda run_state: state)
    return state


@pytest.fixture
def namespace(request: pytest.FixtureRequest) -> str:
    """One for each test: what CloudWatch holds stays until the tests end."""
    return request.node.name


@pytest.fixture
def publisher(state: RunState, namespace: str) -> Publisher:
    return Publisher(run_state=None, namespace=namespace, console=Console(width=100))


@pytest.fixture
def published(cloudwatch_client: Any, namespace: str) -> Published:
    return lambda: told(cloudwatch_client, namespace)


def finish(state: RunState, epoch: int, **metrics: float) -> None:
    state.finish_epoch({"epoch": epoch, **EPOCH, **metrics})


def test_a_run_that_begins_is_progress(publisher: Publisher, published: Published) -> None:
    publisher._publish()
    assert published() == {"RunProgress": (1, 1, "Count")}, "the time of an idle stop begins anew"


def test_the_steps_since_the_last_time_are_published(
    state: RunState, publisher: Publisher, published: Published
) -> None:
    for step in (3, 7):
        state.advance(0, step, 10)
        publisher._publish()
    assert published() == {"RunProgress": (2, 1 + 3 + 4, "Count")}


def test_a_run_that_makes_no_step_publishes_nothing(
    state: RunState, publisher: Publisher, published: Published
) -> None:
    state.advance(0, 3, 10)
    for _ in range(3):
        publisher._publish()
    assert published() == {"RunProgress": (1, 1 + 3, "Count")}, "a run that hangs must look like one"


def test_an_epoch_is_published_once_with_what_it_came_to(
    state: RunState, publisher: Publisher, published: Published
) -> None:
    for epoch in range(2):
        finish(state, epoch, test_accuracy=0.8 + epoch / 10)
        publisher._publish()
    assert published() == {
        "RunProgress": (2, 1 + 20, "Count"),
        "TrainLoss": (2, 1.0, "None"),
        "TestLoss": (2, 1.5, "None"),
        "TestAccuracy": (2, 0.8 + 0.9, "None"),
        "SamplesPerSecond": (2, 2000, "Count/Second"),
    }


def test_a_loss_that_is_no_number_does_not_hide_the_rest(
    state: RunState, publisher: Publisher, published: Published
) -> None:
    finish(state, 0, train_loss=math.nan, test_loss=math.inf)
    publisher._publish()
    assert set(published()) == {"RunProgress", "TestAccuracy", "SamplesPerSecond"}, "CloudWatch would refuse all"


def test_a_loop_of_ones_own_may_leave_a_metric_out(state: RunState, publisher: Publisher, published: Published) -> None:
    state.finish_epoch({"epoch": 0, "steps": 10, "test_accuracy": 0.9, "train_loss": None})
    publisher._publish()
    assert set(published()) == {"RunProgress", "TestAccuracy"}, "what is there is published, and the run goes on"


def test_the_first_steps_go_at_once_and_the_last_at_the_end(
    state: RunState, publisher: Publisher, published: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cloudwatch, "LOOK_SECONDS", 0.01)
    state.advance(0, 1, 10)
    with publisher:
        _wait_for(lambda: bool(published()))
        state.advance(0, 5, 10)
        state.advance(0, 9, 10)
    assert published() == {"RunProgress": (2, 1 + 1 + 8, "Count")}, "once a minute is enough, and nothing is lost"


def test_an_interrupted_run_does_not_wait_for_cloudwatch(
    state: RunState, publisher: Publisher, published: Published
) -> None:
    state.advance(0, 5, 10)
    with pytest.raises(SystemExit), publisher:
        raise SystemExit
    assert published() == {}


def test_a_cloudwatch_that_is_not_there_is_one_line_and_gets_everything_later(
    state: RunState,
    publisher: Publisher,
    published: Published,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    aws_server: str,
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    for epoch in range(2):
        finish(state, epoch)
        publisher._publish()
    said = capsys.readouterr().out
    assert said.startswith("CloudWatch doesn't take the run's progress; the training goes on (EndpointConnectionError")
    assert said.count("\n") == 1, "once a run"
    monkeypatch.setenv("AWS_ENDPOINT_URL", aws_server)
    del publisher._client
    finish(state, 2)
    publisher._publish()
    assert published()["RunProgress"] == (1, 1 + 30, "Count")
    assert published()["TestAccuracy"].count == 3


def test_an_image_without_boto3_is_one_line(
    state: RunState, publisher: Publisher, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    finish(state, 0)
    publisher._publish()
    assert "the training goes on (ModuleNotFoundError" in capsys.readouterr().out


def test_a_board_that_cannot_be_asked_is_no_failure(publisher: Publisher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cloudwatch, "read_run_state", lambda run_state: None)
    with publisher:
        pass


def test_without_a_namespace_nothing_runs_and_boto3_is_not_imported() -> None:
    script = """if True:
        import sys, threading
        from training.monitoring import cloudwatch
        before = threading.active_count()
        with cloudwatch.publish_metrics(None, None, None):
            assert threading.active_count() == before
        sys.exit("boto3" in sys.modules)
    """
    assert subprocess.run([sys.executable, "-c", script], timeout=180, check=False).returncode == 0


def test_steps_that_were_lost_with_a_worker_count_as_made() -> None:
    state = RunState()
    for epoch, step in ((0, 1), (0, 8)):
        state.advance(epoch, step, 10)
    for epoch, step in ((0, 1), (0, 4)):  # it goes on from a checkpoint
        state.advance(epoch, step, 10)
    assert state.steps_completed == 8 + 4


def test_a_continued_run_has_made_no_steps_before_it_began() -> None:
    state = RunState()
    state.advance(7, 1, 10)
    finish(state, 7)
    state.advance(8, 2, 10)
    assert state.steps_completed == 12


def _wait_for(reached: Callable[[], bool]) -> None:
    for _ in range(200):
        if reached():
            return
        threading.Event().wait(0.05)
    raise AssertionError("it never came")
