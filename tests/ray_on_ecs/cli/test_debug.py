"""`ray-on-ecs debug`: a run whose driver answers, and runs that have no ranks."""

from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from ray_on_ecs.cli import debug
from ray_on_ecs.cli.main import main
from ray_on_ecs.cluster.clusters import LocalCluster
from ray_on_ecs.storage import layout
from ray_on_ecs.storage.run_storage import RunStorage
from tests.ray_on_ecs.cli.folders import Folders, Jobs, job

SENTENCE = "7 ranks wait in all_reduce, train.py:40; rank 5 is in load_batch, data.py:88\n"


class Drivers(Jobs):
    """Jobs of run `mine`, of which the last one is under way: its driver stores a text as the answer to a request."""

    def __init__(self, storage: RunStorage) -> None:
        path = str(Path(storage.uri).parent)
        metadata = {"run_name": "mine", "storage_path": path}
        super().__init__(job("mine", "FAILED", metadata=metadata), job("mine.2", metadata=metadata))
        self.jobs |= {"done": job("done", "SUCCEEDED"), "other": job("other")}
        self.storage, self.text = storage, SENTENCE
        self.asked: list[str] = []

    def ask_stacks(self, job_id: str, request: str) -> None:
        self.asked.append(job_id)
        if self.text:
            self.storage.write(f"{layout.STACKS_FOLDER}/{request}/{layout.STACKS}", self.text)


@pytest.fixture
def drivers(folders: Folders) -> Iterator[Drivers]:
    found = Drivers(folders.of("mine"))
    with mock.patch.object(LocalCluster, "jobs", return_value=found):
        yield found


def test_answer_of_the_last_driver_is_shown(
    drivers: Drivers, folders: Folders, capsys: pytest.CaptureFixture[str]
) -> None:
    folders.status("mine", "training")
    drivers.text = f"{SENTENCE}\x1b[2J\n"
    assert main(["debug", "--local", "mine"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(SENTENCE)
    assert "\x1b" not in out
    assert drivers.asked == ["mine.2"]
    assert err.startswith(f"all threads and processes: {folders.of('mine').uri}/stalls/20")


@pytest.mark.parametrize(("state", "waits"), [("queued", "waits in the queue"), ("waiting", "waits for workers")])
def test_run_that_waits_has_no_ranks(
    drivers: Drivers, folders: Folders, capsys: pytest.CaptureFixture[str], state: str, waits: str
) -> None:
    folders.status("mine", state)
    assert main(["debug", "--local", "mine"]) == 2
    assert capsys.readouterr().err == (
        f"ray-on-ecs: run mine {waits}, and has no ranks yet; ray-on-ecs logs --local mine shows what for\n"
    )
    assert not drivers.asked


@pytest.mark.parametrize("name", ["done", "old"])
def test_run_that_is_not_under_way_is_refused(
    drivers: Drivers, folders: Folders, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    folders.status("old", "finished")  # its job is no longer listed
    assert main(["debug", "--local", name]) == 2
    assert capsys.readouterr().err == (
        f"ray-on-ecs: run {name} is not under way; ray-on-ecs runs --local lists the runs, and "
        f"ray-on-ecs logs --local {name} shows how it has ended\n"
    )


def test_driver_that_does_not_answer_is_one_line(
    drivers: Drivers, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(debug, "ANSWER_SECONDS", 0.5)
    drivers.text = ""
    assert main(["debug", "--local", "mine"]) == 3
    assert "the driver of run mine has not answered" in capsys.readouterr().err
