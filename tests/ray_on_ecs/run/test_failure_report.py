"""Files of a failed run; tests/faults has whole runs."""

from dataclasses import replace
from pathlib import Path

import pytest

from ray_on_ecs.config import RunConfig
from ray_on_ecs.errors import TrainingError
from ray_on_ecs.run import failure_report
from ray_on_ecs.run.failure_policy import Failure, Raise
from ray_on_ecs.run.group import Peer, WorkerRank, WorkerStatus
from ray_on_ecs.run.last_words import LastWords
from ray_on_ecs.run.memory import OUT_OF_MEMORY
from ray_on_ecs.run.stacks import Frame, ProcessStacks, Stacks, Thread
from ray_on_ecs.run.stacks_request import SILENT
from ray_on_ecs.storage.run_storage import RunStorage


@pytest.fixture
def run(tmp_path: Path) -> tuple[RunConfig, RunStorage]:
    config = RunConfig(storage_path=str(tmp_path), run_name="failed", hang_timeout=600.0)
    return config, RunStorage.open(config.storage_path, "failed")


def test_stacks_of_all_ranks_are_stored(run: tuple[RunConfig, RunStorage]) -> None:
    frame = Frame("train", "/home/me/train.py", 7)
    processes = (ProcessStacks(12, name="python", state="sleeping", threads=(Thread("MainThread", (frame,)),)),)
    workers = {
        0: WorkerStatus(started_at=1.0, stacks=Stacks(processes=processes, node="i-0abc, 10.0.2.7")),
        1: WorkerStatus(started_at=1.0),
        2: WorkerStatus(started_at=1.0, status=0, has_ended=True),
    }
    places = failure_report.picture_of(workers, [WorkerRank(rank, 3) for rank in range(3)], run[0])
    folder = failure_report.store_stacks(places, workers, run[1])
    stored = {path.name: path.read_text() for path in Path(folder).iterdir()}
    stack = "process 12 (python, sleeping)\n  thread MainThread\n    train (/home/me/train.py:7)\n"
    summary = stored.pop("stacks.txt")
    assert stored == {"rank_0.txt": stack, "rank_1.txt": "It has not answered.\n"}
    assert summary.startswith(
        "rank 0 (i-0abc, 10.0.2.7) is in train, train.py:7; rank 1 has not answered; "
        "rank 2 has ended with exit status 0\n"
    )


@pytest.mark.parametrize("request_id", ["20261129-180000-00ff", SILENT, ""])
def test_stacks_of_another_request_are_not_stored(run: tuple[RunConfig, RunStorage], request_id: str) -> None:
    earlier = Stacks("20261129-170000-00ff", words="of an earlier request")
    of_request = Stacks(request_id, words="of this one")
    workers = {
        0: WorkerStatus(started_at=1.0, stacks=of_request),
        1: WorkerStatus(started_at=1.0, stacks=earlier),
        2: WorkerStatus(),
        3: WorkerStatus(started_at=1.0, status=0, has_ended=True, stacks=earlier),
        4: WorkerStatus(started_at=1.0, status=1, has_ended=True, stacks=earlier),
        5: WorkerStatus(started_at=1.0, stacks=Stacks(request_id)),
        6: WorkerStatus(started_at=1.0, status=0, has_ended=True, stacks=of_request),
    }
    places = failure_report.picture_of(workers, [WorkerRank(rank, 7) for rank in workers], run[0], request_id)
    folder = Path(failure_report.store_stacks(places, workers, run[1], request_id))
    assert {path.name: path.read_text() for path in folder.glob("rank_*")} == {
        "rank_0.txt": "of this one",
        "rank_1.txt": "It has not answered.\n",
        "rank_2.txt": "It has not started.\n",
        "rank_4.txt": "It has ended with exit status 1.\n",
        "rank_5.txt": "It runs no Python process.\n",
        "rank_6.txt": "of this one",
    }
    assert (folder.name == request_id) == request_id.startswith("2026")


@pytest.mark.parametrize(("status", "correct"), [(None, ""), (1, "correct the script; "), (-9, "")])
def test_error_names_file_and_command_that_resumes(
    run: tuple[RunConfig, RunStorage], status: int | None, correct: str
) -> None:
    config, storage = run
    failure = Failure("ValueError: no", rank=0, status=status, log=("its last line",))
    error = failure_report.write_error(failure, Raise(TrainingError, str(failure)), config, storage)
    way_on = f"{correct}the same command with --run-name failed resumes the run"
    assert str(error) == f"training failed on rank 0: ValueError: no; see {storage.uri}/error.json; {way_on}"
    document = storage.read_json("error.json")
    assert (document["what"], document["rank"], document["log"]) == ("ValueError: no", 0, ["its last line"])


def ended(status: int | None, at: float | None, text: str = "") -> WorkerStatus:
    return WorkerStatus(status=status, ended_at=at, words=LastWords(text))


@pytest.mark.parametrize(("nodes", "what"), [((0, 0), ""), ((0, 1), " on node 1")], ids=["one node", "two nodes"])
def test_program_of_a_node_is_named_by_its_node(nodes: tuple[int, int], what: str) -> None:
    members = [
        replace(member, peer=Peer("host", 1, node))
        for member, node in zip([ended(0, None), ended(1, 10.0, "a")], nodes, strict=True)
    ]
    config = RunConfig(command=("train.sh",), per_node=True)
    failure = failure_report.describe(dict(enumerate(members)), config, [])
    assert (failure.rank, failure.what) == (None, f"train.sh ended with exit status 1{what}: a")


@pytest.mark.parametrize(
    ("members", "rank", "what"),
    [
        ([ended(-15, 12.0), ended(-9, 10.0)], 1, "train.py was ended by signal 9: it printed nothing"),
        ([ended(-9, 10.0, "DONE 3")], 0, "train.py was ended by signal 9: its last line was 'DONE 3'"),
        ([ended(-9, 10.0, f"{OUT_OF_MEMORY} (x)")], 0, f"train.py was ended by signal 9: {OUT_OF_MEMORY} (x)"),
        (
            [ended(-7, 10.0)],
            0,
            "train.py was ended by signal 7: it printed nothing; the shared memory (/dev/shm) may be full",
        ),
        (
            [ended(-7, 10.0, "Fatal Python error: Bus error")],
            0,
            "train.py was ended by signal 7: Fatal Python error: Bus error; the shared memory (/dev/shm) may be full",
        ),
        (
            [ended(1, 10.0, "RuntimeError: killed by signal: Bus error. workers are out of shared memory.")],
            0,
            "train.py ended with exit status 1: "
            "RuntimeError: killed by signal: Bus error. workers are out of shared memory.",
        ),
        (
            [ended(-11, 10.0, "Fatal Python error: Segmentation fault in f")],
            0,
            "train.py was ended by signal 11: Fatal Python error: Segmentation fault in f",
        ),
        (
            [ended(-6, 10.0, "C++ exception: CUDA error")],
            0,
            "train.py was ended by signal 6: C++ exception: CUDA error",
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
    ids=[
        *("killed", "killed after a line", "memory", "bus error", "bus error of Python", "bus error of PyTorch"),
        *("crashed", "crashed in C++", "first", "left early", "left at once", "of mpirun"),
    ],
)
def test_first_rank_to_leave_is_blamed(members: list[WorkerStatus], rank: int, what: str) -> None:
    failure = failure_report.describe(dict(enumerate(members)), RunConfig(command=("train.py",)), [])
    assert (failure.rank, failure.what) == (rank, what)


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
    assert failure_report.missing_file_hint(text, ["data/", "weights.pt"]) == said


def test_few_excluded_files_are_named() -> None:
    names = ["a.bin", "b.bin", "c.bin", "d.bin"]
    assert failure_report.missing_file_hint("OSError: b.bin and a.bin: not found", names) == (
        "; a.bin, b.bin were left out of the upload, and --include 'a.bin' --include 'b.bin' brings them"
    )
    assert "c.bin were left" in failure_report.missing_file_hint(f"{' '.join(names)}: No such file", names)


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
    assert failure_report.access_denied_hint(text, config).startswith(said)
    assert bool(failure_report.access_denied_hint(text, config)) == bool(said)
    assert ("Ray's results" in failure_report.access_denied_hint(text, replace(config, driver=True))) == bool(said)


@pytest.mark.parametrize(
    ("text", "arguments", "flag"),
    [
        ("train.py: error: unrecognized arguments: --num-workers 2", ("--num-workers", "2"), "--num-workers"),
        ("train.py: error: unrecognized arguments: --run-name=a --lr 1", ("--run-name=a", "--lr", "1"), "--run-name"),
        ("Error: No such option: --metric", ("--metric", "loss=x"), "--metric"),
        (
            "FATAL Flags parsing error: Unknown command line flag 'requirements'",
            ("--requirements", "a"),
            "--requirements",
        ),
        ("ERROR: Could not consume arg: --keep-gib", ("--keep-gib", "1"), "--keep-gib"),
        ("TypeError: main() got an unexpected keyword argument 'env'", ("--env", "A=1"), "--env"),
        ("train.py: error: unrecognized arguments: --lr 2", ("--lr", "2"), None),
        ("train.py: error: unrecognized arguments: --lr 2", ("--lr", "2", "--num-workers", "2"), None),  # the script's
        ("train.py: error: unrecognized arguments: --num-workers-x", ("--num-workers-x",), None),
        ("train.py: error: argument --metric: invalid choice: 'x'", ("--metric", "x"), None),
        ("RuntimeError: --num-workers 2", ("--num-workers", "2"), None),
        ("ValueError: Unknown env Foo-v0", ("--env", "Foo-v0"), None),
        ("ValueError: Unknown metric: acc", ("--metric", "acc"), None),
        ("ValueError: unexpected input shape (3, 4)", ("--input", "x"), None),
    ],
)
def test_flag_of_the_run_after_the_script_is_named(text: str, arguments: tuple[str, ...], flag: str | None) -> None:
    config = RunConfig(command=("train.py", *arguments))
    said = f"; {flag} is a flag of ray-on-ecs run, and belongs before train.py" if flag else ""
    assert failure_report.misplaced_flag_hint(text, config) == said
    assert failure_report.describe({0: ended(2, 1.0, text)}, config, []).what.endswith(f"{text}{said}")
