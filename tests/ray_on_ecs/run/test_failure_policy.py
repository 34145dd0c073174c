"""Restarts after failures, by a clock and a run of the test."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from ray_on_ecs.errors import StorageError, TrainingError, UsageError
from ray_on_ecs.run.failure_policy import (
    FAILURES_A_DAY,
    SETTLING_SECONDS,
    Failure,
    FailurePolicy,
    Mark,
    Raise,
    Restart,
)
from ray_on_ecs.run.last_words import LastWords


class Run:
    """A run with attempts that the test fails."""

    def __init__(self, max_restarts: int = 3, mark: Mark | None = None) -> None:
        self.now = 1_000_000.0
        self.mark = mark or Mark()
        self.is_lost = False
        self.policy = FailurePolicy(max_restarts, self._read, clock=lambda: self.now)
        self.policy.began()

    def fail(self, failure: Failure, seconds: float = 1.0) -> Restart | Raise:
        """Let the attempt fail after these seconds, and the next one begin."""
        self.now += seconds
        decision = self.policy.decide(failure)
        self.policy.began()
        return decision

    def store(self) -> None:
        """Store a file now."""
        self.mark = Mark(self.mark.step, self.now)

    def step(self, step: int) -> None:
        self.mark = Mark(step, self.mark.stored_at)

    def _read(self) -> Mark:
        if self.is_lost:
            raise OSError("no answer")
        return self.mark


def failed(text: str = "", status: int = 1, place: str | None = "train.py:3") -> Failure:
    """The failure of a script: `text` is the last line of its traceback."""
    name = text.partition(":")[0] or None
    words = LastWords(text, name if status > 0 else None, place if name else None)
    return Failure(f"train.py ended: {text}", rank=0, status=status, words=words)


KILLED = failed(status=-9)


@pytest.mark.parametrize(
    "failure",
    [
        *map(
            failed,
            (
                "SyntaxError: '(' was never closed",
                "IndentationError: unexpected indent",
                "ImportError: cannot import name 'x'",
                "ModuleNotFoundError: No module named 'x'",
                "NameError: name 'x' is not defined",
                "UnboundLocalError: x",
                "TypeError: x",
                "AttributeError: x",
                "KeyError: 'x'",
                "ValueError: x",
                "FileNotFoundError: [Errno 2] No such file or directory: 'x'",
            ),
        ),
        failed(status=2),
        failed(status=126),
        failed(status=127),
    ],
    ids=lambda failure: failure.words.text.partition(":")[0] or str(failure.status),
)
def test_user_error_ends_only_a_run_without_progress(failure: Failure) -> None:
    decision = Run().fail(failure)
    assert isinstance(decision, Raise)
    assert (decision.error, decision.is_recorded) == (UsageError, True)
    for earlier in (Mark(step=7), Mark(stored_at=5.0)):
        assert isinstance(Run(mark=earlier).fail(failure), Restart)
    run = Run()
    run.step(1)
    assert isinstance(run.fail(failure), Restart)


def test_mistake_is_named_with_its_remedy() -> None:
    failure = failed("ModuleNotFoundError: No module named 'x'")
    decision = Run().fail(replace(failure, words=replace(failure.words, advice="name its package")))
    assert isinstance(decision, Raise)
    assert decision.line.endswith("No module named 'x'; name its package")


@pytest.mark.parametrize(
    ("first", "second", "ends"),
    [
        ("RuntimeError: a", "RuntimeError: b", True),
        ("my.errors.Broken: a", "my.errors.Broken: a", True),
        ("RuntimeError: a", "ZeroDivisionError: a", False),
        ("OSError: [Errno 5] Input/output error", None, False),
        ("ConnectionResetError: x", None, False),
        ("TimeoutError: x", None, False),
        ("botocore.exceptions.ClientError: SlowDown", None, False),
        ("torch.distributed.DistBackendError: x", None, False),
        ("RuntimeError: CUDA error: an illegal memory access was encountered", None, False),
        ("RuntimeError: NCCL communicator was aborted", None, False),
        ("RuntimeError: [pair.cc:545] Read error: Connection closed by peer", None, False),
        ("RuntimeError: DataLoader worker (pid 12) is killed by signal: Bus error.", None, False),
        ("RuntimeError: DataLoader worker (pid(s) 12) exited unexpectedly", None, False),
        ("wandb.errors.errors.CommError: Run initialization has timed out", None, False),
        ("wandb.errors.CommError: x", None, False),
        ("wandb.errors.errors.UsageError: api_key not configured", None, True),
        ("huggingface_hub.errors.HfHubHTTPError: 503 Server Error", None, False),
        ("huggingface_hub.errors.RepositoryNotFoundError: 404", None, True),
        ("grpc._channel._InactiveRpcError: x", None, False),
        ("boto3.exceptions.S3UploadFailedError: Failed to upload", None, False),
        ("fsspec.exceptions.FSTimeoutError", None, False),
        ("mlflow.exceptions.MlflowException: API request failed", None, False),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", None, True),
    ],
)
def test_repeated_exception_ends_the_run(first: str, second: str | None, ends: bool) -> None:
    run = Run()
    assert isinstance(run.fail(failed(first)), Restart)
    run.step(100)
    decision = run.fail(failed(second or first))
    assert isinstance(decision, Raise) is ends
    if isinstance(decision, Raise):
        assert decision.error is TrainingError
        assert ("smaller batch" in decision.line) is ("out of memory" in first)


def test_same_type_in_another_line_is_another_error() -> None:
    run = Run()
    assert isinstance(run.fail(failed("RuntimeError: a", place="train.py:3")), Restart)
    assert isinstance(run.fail(failed("RuntimeError: a", place="train.py:4")), Restart)


def test_repeated_flag_error_ends_a_run_with_progress() -> None:
    run, wrong = Run(mark=Mark(step=5)), Failure("x", status=2, words=LastWords("error: unrecognized arguments"))
    assert isinstance(run.fail(wrong), Restart)
    assert isinstance(run.fail(wrong), Raise)


def fail_often(run: Run, failure: Failure, before: Callable[[int], None], times: int = 10) -> int:
    """Return how many failures the run survives."""
    for number in range(times):
        before(number)
        if isinstance(run.fail(failure), Raise):
            return number
    return times


@pytest.mark.parametrize("max_restarts", [0, 1, 3])
@pytest.mark.parametrize(
    "failure", [KILLED, Failure("no progress", "hung"), Failure("lost")], ids=lambda each: each.what
)
def test_failures_without_progress_are_limited(max_restarts: int, failure: Failure) -> None:
    assert fail_often(Run(max_restarts), failure, lambda number: None) == max_restarts


def test_only_a_greater_step_is_progress() -> None:
    run = Run(1)
    assert fail_often(run, KILLED, lambda number: run.step(10 * number)) == 10
    run = Run(1)
    assert fail_often(run, KILLED, lambda number: run.step(10 - number)) == 1


@pytest.mark.parametrize(("seconds", "survived"), [(SETTLING_SECONDS - 1, 1), (SETTLING_SECONDS, 10)])
def test_new_file_is_progress_after_a_long_attempt(seconds: float, survived: int) -> None:
    run = Run(1)

    def store(number: int) -> None:
        run.now += seconds
        run.store()

    assert fail_often(run, KILLED, store) == survived


DATED = "output/train/20261127-120001-resnet50/last.pth.tar"


@pytest.mark.parametrize(
    ("failure", "is_beyond", "stored", "ages", "survived"),
    [
        # A script that never loads its checkpoint, and fails at the same age.
        (KILLED, False, "last.pt", (3600.0,), 1),
        (KILLED, None, DATED, (3600.0,), 1),
        (KILLED, None, "outputs/2026-11-27/12-00-01/last.ckpt", (3600.0,), 1),
        (KILLED, None, "lightning_logs/version_3/checkpoints/epoch=1.ckpt", (3600.0,), 1),
        (KILLED, None, "runs/Nov27_12-00-01_host/last.pt", (3600.0,), 1),
        (KILLED, None, "out/27-11-2026_12-00/last.pt", (3600.0,), 1),
        (KILLED, None, "logs/2026_11_27/last.pt", (3600.0,), 1),
        (KILLED, None, "out/1764244801/last.pt", (3600.0,), 1),
        (KILLED, None, "mlruns/0/0123456789abcdef0123456789abcdef/artifacts/last.pt", (3600.0,), 1),
        (KILLED, False, "last.pt", (3600.0, 3900.0, 3500.0), 1),
        (failed(status=-7), False, "last.pt", (3600.0,), 1),
        # Healthy ones, on machines that fail.
        (KILLED, True, "last.pt", (3600.0,), 10),
        (KILLED, True, DATED, (3600.0,), 10),
        (KILLED, None, "last.pt", (3600.0,), 10),
        (KILLED, None, "checkpoint-20000000/model.pt", (3600.0,), 10),
        (KILLED, None, "step_1000000000000/model.pt", (3600.0,), 10),
        (KILLED, None, "out/model-20261127-120001.pt", (3600.0,), 10),
        (KILLED, False, DATED, (3600.0, 7200.0), 10),  # its numbers may begin at 0 in each start
        (KILLED, False, DATED, (90.0, 9000.0, 700.0), 10),
        (failed(status=-15), False, DATED, (3600.0,), 10),  # of a person, or of the machine's end
        (Failure("a node was lost", rank=0), False, DATED, (3600.0,), 10),
        (Failure("no progress", "hung"), False, DATED, (3600.0,), 10),
        (Failure("", "reclaimed"), False, DATED, (3600.0,), 10),
    ],
)
def test_new_files_of_a_start_that_repeats_the_last_one(
    failure: Failure, is_beyond: bool | None, stored: str, ages: tuple[float, ...], survived: int
) -> None:
    run = Run(1)

    def store(number: int) -> None:
        run.now += ages[number % len(ages)]
        run.mark = Mark(None, run.now, stored, is_beyond if number else None)

    assert fail_often(run, failure, store) == survived


def test_failures_with_progress_are_limited_within_a_day() -> None:
    run = Run(1)
    assert fail_often(run, KILLED, run.step, times=100) == FAILURES_A_DAY

    def a_while_later(number: int) -> None:
        run.step(1000 + number)
        run.now += 2 * 3600

    run = Run(1)
    assert fail_often(run, KILLED, a_while_later, times=100) == 100, "weeks on machines that fail every two hours"


def test_unreadable_storage_is_not_progress() -> None:
    run = Run(1)
    run.step(5)
    run.is_lost = True
    assert [type(run.fail(KILLED)) for _ in range(2)] == [Restart, Raise]


def test_preemptions_are_not_failures() -> None:
    run, reclaimed = Run(max_restarts=2), Failure("", "reclaimed")
    assert fail_often(run, reclaimed, run.step, times=100) == 100
    assert fail_often(run, reclaimed, lambda number: None) == 2, "nodes reclaimed before any progress"
    run = Run(max_restarts=1)
    assert isinstance(run.fail(reclaimed), Restart)
    assert isinstance(run.fail(KILLED), Restart)
    assert isinstance(Run(max_restarts=0).fail(reclaimed), Restart)


@pytest.mark.parametrize("cause", [UsageError("--x: no"), StorageError("it is away")], ids=["usage", "storage"])
def test_permanent_failure_ends_the_run(cause: TrainingError) -> None:
    decision = Run(mark=Mark(step=5)).fail(Failure(str(cause), rank=1, cause=cause))
    assert decision == Raise(type(cause), str(cause), is_recorded=isinstance(cause, StorageError))
