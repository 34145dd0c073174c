"""Kills by the kernel, as the control groups of the test's files count them."""

import os
import sys
from pathlib import Path

import pytest

from ray_on_ecs.run import memory
from ray_on_ecs.run.process import ProcessOptions, ScriptProcess

EVENTS = "low 0\nhigh 0\nmax 12\noom 3\noom_kill 2\noom_group_kill 0\n"


@pytest.mark.parametrize(
    ("files", "kills"),
    [
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/memory.events": EVENTS}, 2),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.events": EVENTS}, 2),
        ({"proc/self/cgroup": "0::/of/the/host\n", "sys/fs/cgroup/memory.events": EVENTS}, 2),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/\n9:memory:/docker/x\n0::/\n",
                "sys/fs/cgroup/memory/docker/x/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n",
            },
            5,
        ),
        ({"proc/self/cgroup": "0::/\n", "proc/vmstat": "oom_kill 7\noom 9\n"}, 7),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.events": EVENTS, "proc/vmstat": "oom_kill 7\n"}, 2),
        ({}, 0),
    ],
)
def test_kills_are_those_of_the_control_group(tmp_path: Path, files: dict[str, str], kills: int) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert memory.oom_kills(tmp_path) == kills


KILLS_ITSELF = (sys.executable, "-c", "import os; print('step 3', flush=True); os.kill(os.getpid(), 9)")
AS_A_SHELL = (sys.executable, "-c", "print('step 3'); raise SystemExit(137)")
OF_LOADER = (
    *(sys.executable, "-c"),
    "raise RuntimeError('DataLoader worker (pid 12) is killed by signal: Killed. ')",
)
OTHER = (sys.executable, "-c", "print('step 3'); raise SystemExit(1)")


@pytest.mark.parametrize(
    ("argv", "counts", "text"),
    [
        (KILLS_ITSELF, [2, 3], "the kernel ended it, because memory was full (its largest process had 0."),
        (AS_A_SHELL, [2, 3], "the kernel ended it, because memory was full (its largest process had 0."),
        (
            *(OF_LOADER, [2, 3]),
            "RuntimeError: DataLoader worker (pid 12) is killed by signal: Killed: the kernel ended it, because memory",
        ),
        (OF_LOADER, [2, 2], "RuntimeError: DataLoader worker (pid 12) is killed by signal: Killed."),
        (KILLS_ITSELF, [2, 2], "step 3"),
        (OTHER, [2, 3], "step 3"),
    ],
    ids=["killed", "of a shell", "of a DataLoader", "of one without evidence", "without evidence", "another end"],
)
def test_memory_is_named_only_with_evidence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argv: tuple[str, ...], counts: list[int], text: str
) -> None:
    monkeypatch.setattr(memory, "oom_kills", iter(counts).__next__)
    with ScriptProcess(argv, ProcessOptions(os.environ, tmp_path, lambda line: None)) as process:
        assert process.wait(60) is not None
        assert process.last_words.text.startswith(text)
