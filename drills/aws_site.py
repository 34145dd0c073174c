"""Stack that a drill on AWS has for itself: its calls, its commands, and the undoing of its changes."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ray_on_ecs.cluster import aws
from ray_on_ecs.cluster.stack import Stack
from ray_on_ecs.cluster_info import ClusterInfo
from ray_on_ecs.errors import ResourceError, UsageError, one_line
from ray_on_ecs.jobs.record import Job, goes_on
from ray_on_ecs.jobs.remote import SILENT_SECONDS, RemoteJobs

SCRIPT = "drill.py"


@dataclass
class Site:
    """Stack, the drill's run, and the changes to undo.

    Attributes:
        stack: The stack.
        info: The description of its workers.
        jobs: The jobs of its head.
        flags: The flags of ray-on-ecs for this stack.
        name: The name of the drill's run, and the prefix of its others.
        task: The worker's task, as ECS described it at its start; empty before.
        undo: Undoes the drill's changes.
        left: The changes that could not be undone.
    """

    stack: Stack
    info: ClusterInfo
    jobs: RemoteJobs
    flags: list[str]
    name: str = field(default_factory=lambda: f"first-hour-{time.strftime('%H%M%S')}")
    task: dict[str, Any] = field(default_factory=dict)
    undo: ExitStack = field(default_factory=ExitStack)
    left: list[str] = field(default_factory=list)

    def ask(self, service: str, method: str, /, **arguments: Any) -> Any:
        """Call AWS; raise as `aws.call` does."""
        return aws.call(self.stack, service, method, **arguments)

    def ecs(self, method: str, /, **arguments: Any) -> Any:
        """Call ECS about the cluster."""
        return self.ask("ecs", method, cluster=self.stack.cluster_name, **arguments)

    def command(self, verb: str, *words: str, script: str = "") -> str:
        """Run a command of ray-on-ecs in a folder with `SCRIPT`, and return its output; ResourceError if it fails."""
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, SCRIPT).write_text(script)
            line = [sys.executable, "-m", "ray_on_ecs", verb, *self.flags, *words]
            done = subprocess.run(line, cwd=folder, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if done.returncode:
            raise ResourceError(f"ray-on-ecs {verb}: {one_line(done.stderr or done.stdout)}")
        return done.stdout

    def at_end(self, by_hand: str, call: Callable[[], object]) -> None:
        """Undo a change at the end. Call it before the change, which may succeed without an answer."""

        def end() -> None:
            try:
                call()
            except BaseException as cause:  # also a second Ctrl-C: the other changes are undone nevertheless
                self.left.append(f"NOT UNDONE ({one_line(cause) or 'interrupted'}): {by_hand}")

        self.undo.callback(end)

    def stop(self) -> None:
        """Stop the drill's run, if it is under way."""
        if self.name in _under_way(self.jobs.read()[2]):
            self.command("stop", self.name)

    def check_unused(self) -> None:
        """Raise UsageError if another run or Ray program uses the stack, or its head is silent."""
        state, age, jobs = self.jobs.read()
        names = _under_way(jobs)
        others = [name for name in names if not name.startswith(self.name)]
        gpus = (state.ray.get("gpus") or {}).get("used", 0)
        if others:
            use = f"run {others[0]} is under way; wait for its end"
        elif gpus and not names:
            use = f"a Ray program uses {gpus:g} GPUs; wait for its end"
        elif age > SILENT_SECONDS:
            use = (
                f"its head has been silent for {age:.0f} s, so it may have a run; ray-on-ecs doctor looks for the cause"
            )
        else:
            return
        raise UsageError(f"stack {self.stack.name}: {use}")


def _under_way(jobs: Iterable[Job]) -> list[str]:
    return [str((job.get("metadata") or {}).get("run_name")) for job in jobs if goes_on(job)]
