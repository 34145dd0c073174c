"""The driver's side of a worker group, with an actor in this process and simulated workers."""

from dataclasses import replace
from typing import Any, cast

import pytest
from ray_on_ecs.run.script_group import Decider, ScriptGroup, access_denied_hint, describe, missing_file_hint
from ray_on_ecs.tracking.run_actor import RunActor, RunClient

from ray_on_ecs.config import RunConfig
from ray_on_ecs.errors import Interrupted, TrainingError
from ray_on_ecs.run import script_group
from ray_on_ecs.run.failure_policy import Failure
from ray_on_ecs.run.group import Directive, WorkerStatus
from ray_on_ecs.run.last_words import LastWords
from tests.log_lines import collect_lines
from tests.run_folders import Clock


class LocalClient(RunClient):
    """Calls the actor in this process."""

    def __init__(self) -> None:
        self.actor = RunActor()

    def direct(self, directive: Any) -> Any:
        return self.actor.direct(directive)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(script_group, "time", clock)
    return clock


class Group:
    """Two workers on two nodes, and the requests to the driver."""

    def __init__(self, **settings: Any) -> None:
        self.client = LocalClient()
        self.failures: list[Failure] = []
        self.said = collect_lines()
        self.stacks: list[dict[int, str]] = []
        self.draining: dict[str, float | None] = {}
        self.error: TrainingError | None = None
        decider = Decider(lambda: None, self._decide, self._store_stacks)
        config = RunConfig(command=("train.py",), **settings)
        self.scripts = ScriptGroup(self.client, config, decider, lambda: self.draining)
        self.name = "first"
        self.members = [self._member(rank) for rank in range(2)]
        self.poll()

    def _member(self, rank: int) -> WorkerStatus:
        return WorkerStatus("127.0.0.1", 1, rank, 2, f"node-{rank}", started_at=1.0)

    def tell(self, rank: int, **changes: Any) -> None:
        self.members[rank] = replace(self.members[rank], **changes)

    def poll(self) -> Directive:
        """Let the workers report and the driver poll; return the replies."""
        for _ in range(2):
            for rank, each in enumerate(self.members):
                self.client.actor.update(self.name, rank, each, False)
            self.scripts.poll()
        return self.client.actor.update(self.name, 0, self.members[0], False)[0]

    def end(self, *ranks: int, status: int = -15) -> None:
        for rank in ranks or (0, 1):
            if self.members[rank].status is None:
                self.tell(rank, status=status, ended_at=200.0)
            self.tell(rank, has_ended=True, is_stored=True)

    def restart(self) -> None:
        generation = self.scripts._directive.generation
        self.members = [replace(self._member(rank), generation=generation) for rank in range(2)]

    def _decide(self, failure: Failure) -> None:
        self.failures.append(failure)
        if self.error:
            raise self.error

    def _store_stacks(self, stacks: dict[int, str]) -> str:
        self.stacks.append(stacks)
        return "stalls/1"


def test_workers_leave_after_all_scripts_succeed() -> None:
    group = Group()
    assert group.poll().action == "run"
    group.end(0, status=0)
    assert group.poll().action == "run"
    group.end(1, status=0)
    assert group.poll().action == "leave"
    assert not group.failures
    assert group.scripts.error is None


def test_failed_script_restarts_the_group(clock: Clock) -> None:
    group = Group()
    group.tell(1, status=1, ended_at=100.0, words=LastWords("RuntimeError: x", "RuntimeError"))
    told = group.poll()
    assert (told.action, told.generation) == ("end", 0)
    assert told.end_at == clock.now + 30
    assert not group.failures
    group.end()
    told = group.poll()
    assert (told.action, told.generation) == ("run", 1)
    assert [(each.rank, each.status) for each in group.failures] == [(1, 1)]
    group.restart()
    group.end(status=0)
    assert group.poll().action == "leave"


def test_failed_run_ends_without_ray_train_error() -> None:
    group = Group()
    group.error = TrainingError("no more")
    group.tell(0, status=1, ended_at=100.0)
    group.poll()
    group.end()
    assert group.poll().action == "leave"
    assert group.scripts.error is group.error


def test_scripts_have_until_the_deadline_of_a_notice(clock: Clock) -> None:
    group = Group()
    group.draining = {"node-1": clock.now + 100, "node-of-another-run": clock.now + 5}
    group.scripts._checked_nodes_at = 0.0
    told = group.poll()
    assert (told.action, told.ranks) == ("end", (1,))
    assert 90 < told.end_at - clock.now < 100
    group.end(status=0)
    assert group.poll().action == "leave"
    assert group.scripts.is_reclaimed
    group.scripts.new_fit()
    assert not group.scripts.is_reclaimed


@pytest.mark.parametrize(
    ("settings", "told", "ends"),
    [
        ({}, {}, False),
        ({}, {"has_steps": True}, True),
        ({"hang_timeout": 600.0}, {}, True),
        ({"hang_timeout": 3000.0}, {"has_steps": True}, False),
    ],
)
def test_silence_after_reported_steps_is_a_hang(settings: Any, told: Any, ends: bool) -> None:
    group = Group(**settings)
    group.tell(0, silent_seconds=1000.0, **told)
    assert group.poll().action == "run"
    group.tell(1, silent_seconds=1000.0)
    assert (group.poll().action == "abort") is ends
    if ends:
        for rank in range(2):
            group.tell(rank, stacks=f"of rank {rank}", status=-6)
        group.end()
        assert group.poll().generation == 1
        assert [each.kind for each in group.failures] == ["hung"]
        assert group.stacks == [{0: "of rank 0", 1: "of rank 1"}]


def test_ended_scripts_do_not_hang() -> None:
    group = Group(hang_timeout=600.0)
    for rank in range(2):
        group.tell(rank, status=0, ended_at=1.0, silent_seconds=float("inf"), has_steps=True, has_ended=True)
    assert group.poll().action == "run"


def test_silent_script_without_steps_continues() -> None:
    group = Group()
    for rank in range(2):
        group.tell(rank, silent_seconds=1000.0)
    assert group.poll().wants_stacks
    for rank in range(2):
        group.tell(rank, stacks=f"of rank {rank}")
    for _ in range(3):
        assert group.poll().action == "run"
    assert group.stacks == [{0: "of rank 0", 1: "of rank 1"}]
    assert len(group.said) == 1
    assert "has been silent for 1000 s" in group.said[0]


def test_stop_ends_scripts_and_run() -> None:
    group = Group()
    group.scripts.stop(Interrupted("stop"))
    assert group.poll().action == "end"
    group.end()
    assert group.poll().action == "leave"
    assert isinstance(group.scripts.error, Interrupted)
    assert not group.failures


def test_lost_workers_are_ignored() -> None:
    group = Group()
    group.scripts.new_fit()
    assert group.poll().group == ""
    group.name = "second"
    group.restart()
    told = group.poll()
    assert (told.group, told.generation, told.action) == ("second", 1, "run")


def ended(status: int | None, at: float | None, text: str = "") -> WorkerStatus:
    return WorkerStatus("", 1, 0, 3, status=status, ended_at=at, words=LastWords(text))


@pytest.mark.parametrize(
    ("members", "rank", "what"),
    [
        ([ended(-15, 12.0), ended(-9, 10.0)], 1, "train.py was ended by signal 9: it printed nothing"),
        ([ended(-9, 10.0, "DONE 3")], 0, "train.py was ended by signal 9: its last line was 'DONE 3'"),
        (
            [ended(-11, 10.0, "Fatal Python error: Segmentation fault in f")],
            0,
            "train.py was ended by signal 11: Fatal Python error: Segmentation fault in f",
        ),
        ([ended(1, 10.0, "a"), ended(1, 10.5, "b")], 0, "train.py ended with exit status 1: a"),
        (
            [ended(1, 13.0, "lost a peer"), ended(0, 10.0)],
            0,
            "train.py ended with exit status 1: lost a peer; rank 1 had ended with exit status 0, 3 s before",
        ),
        ([ended(1, 10.2, "a"), ended(0, 10.0)], 0, "train.py ended with exit status 1: a"),
        ([ended(1, 10.0, "a"), ended(0, None), ended(None, None)], 0, "train.py ended with exit status 1: a"),
    ],
    ids=["killed", "killed after a line", "crashed", "first", "left early", "left at once", "of mpirun"],
)
def test_first_rank_to_leave_is_blamed(members: list[WorkerStatus], rank: int, what: str) -> None:
    failure = describe(dict(enumerate(members)), "train.py")
    assert (failure.rank, failure.what) == (rank, what)


@pytest.mark.parametrize("ends", [False, True], ids=["to the end of the script", "while it stores"])
def test_group_started_during_a_stop_leaves(ends: bool) -> None:
    group = Group()
    error = TrainingError("interrupted")
    group.scripts.stop(error)
    waits_until = group.scripts.waits_until
    if ends:
        group.end()
        assert group.poll().action == "leave"
    group.name = "second"
    told = group.poll()
    assert (told.group, told.action) == ("second", "leave")
    assert group.scripts.waits_until == waits_until
    assert group.scripts.error is error


def test_group_started_after_the_end_leaves() -> None:
    group = Group()
    group.end(status=0)
    assert group.poll().action == "leave"
    group.name = "second"
    told = group.poll()
    assert (told.group, told.action) == ("second", "leave")


def test_stop_before_workers_start_does_not_wait(clock: Clock) -> None:
    scripts = ScriptGroup(LocalClient(), RunConfig(command=("train.py",)), cast("Decider", None), dict)
    scripts.stop(TrainingError("interrupted"))
    assert scripts.waits_until < clock.now + 5


def test_run_without_its_last_files_fails() -> None:
    group = Group(run_name="mine")
    group.end(status=0)
    group.tell(1, not_stored="503 SlowDown")
    assert group.poll().action == "leave"
    wanted = "the last files could not be stored (503 SlowDown); continue with --run-name mine"
    assert str(group.scripts.error) == wanted


def test_restarted_run_reports_unstored_files() -> None:
    group = Group()
    group.tell(1, status=1, ended_at=100.0)
    group.poll()
    group.end()
    group.tell(0, not_stored="503 SlowDown")
    told = group.poll()
    assert (told.action, told.generation) == ("run", 1)
    assert group.said == ["the last files could not be stored (503 SlowDown)"]


def test_restarted_actor_ignores_the_previous_group() -> None:
    group = Group()
    past, group.name = group.members, "second"
    group.poll()
    group.restart()
    group.client.actor = RunActor()
    assert group.poll().group == "second"
    assert group.client.actor.update("first", 0, past[0], True)[1] == {}
    told = group.poll()
    assert (told.group, told.action) == ("second", "run")
    assert group.client.direct(told)[0] == "second"


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("FileNotFoundError: [Errno 2] No such file or directory: 'data/train.bin'", "data/"),
        ("/bin/sh: cannot open /x/weights.pt: No such file", "weights.pt"),
        ("FileNotFoundError: [Errno 2] No such file or directory: 'my-weights.pt'", None),
        ("FileNotFoundError: [Errno 2] No such file or directory: 'other'", None),
        ("ValueError: data/train.bin is too short", None),
    ],
)
def test_excluded_file_is_named(text: str, hint: str | None) -> None:
    said = f"; {hint} was left out of the upload, and --include '{hint}' brings it" if hint else ""
    assert missing_file_hint(text, ["data/", "weights.pt"]) == said


def test_few_excluded_files_are_named() -> None:
    names = ["a.bin", "b.bin", "c.bin", "d.bin"]
    assert missing_file_hint("OSError: b.bin and a.bin: not found", names) == (
        "; a.bin, b.bin were left out of the upload, and --include 'a.bin' --include 'b.bin' brings them"
    )
    assert "c.bin were left" in missing_file_hint(f"{' '.join(names)}: No such file", names)


@pytest.mark.parametrize(
    ("text", "storage", "said"),
    [
        (
            "OSError: AWS Error ACCESS_DENIED during PutObject",
            "s3://mine/runs",
            "; tasks may write below s3://mine/runs",
        ),
        ("ClientError: An error occurred (AccessDenied)", "s3://mine", "; tasks may write below s3://mine, and"),
        ("OSError: AWS Error ACCESS_DENIED during PutObject", "results", ""),
        ("ValueError: denied", "s3://mine/runs", ""),
    ],
)
def test_access_denied_by_the_bucket_is_explained(text: str, storage: str, said: str) -> None:
    config = RunConfig(command=("train.py",), storage_path=storage)
    assert access_denied_hint(text, config).startswith(said)
    assert bool(access_denied_hint(text, config)) == bool(said)
    assert ("Ray's results" in access_denied_hint(text, replace(config, driver=True))) == bool(said)
