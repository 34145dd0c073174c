"""Ray programs: scripts that start their workers themselves, with Ray Train, Ray Tune, Ray Data or plain Ray.

Such a script runs once, beside the run's driver on the head. To the driver it is a group of one worker, which is a
thread of the driver: the run's folder, the metrics, the restarts and the ends are those of any script.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ray_on_ecs.cluster_info import read_cluster_info
from ray_on_ecs.command import RAY_SETTINGS
from ray_on_ecs.config import JOB_VARIABLE, RunConfig
from ray_on_ecs.node.outage import Outage
from ray_on_ecs.run.environment import CALLBACK_VARIABLES
from ray_on_ecs.run.launcher import Process, Start
from ray_on_ecs.run.pool_choice import default_workers
from ray_on_ecs.run.process import ProcessOptions, ScriptProcess
from ray_on_ecs.run.program import main as program_main
from ray_on_ecs.run.program import worker as program_worker
from ray_on_ecs.run.program.resources import ProgramWatch
from ray_on_ecs.storage import layout
from ray_on_ecs.storage.run_storage import RunStorage

# The metrics of Ray Train and Ray Tune: Ray creates these classes in `fit`.
REPORTERS = ("ray_on_ecs.run.program.reports.TrainReporter", "ray_on_ecs.run.program.reports.TuneReporter")
OF_RAY_TRAIN = {
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # its workers stay in the folder with the code, instead of one that it makes
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",  # it would print the workers' lines twice
    # The interval at which the controller polls the workers, also for their end.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.3",
    # A spot interruption notice leaves only a minute or two.
    "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "1",
}


# Until a storage that has failed is tried again.
AGAIN_SECONDS = 2.0


class ProgramLauncher:
    """Starts a Ray program, which starts its workers; see Launcher.

    Args:
        storage: The run's folder.
        needs: What each worker process of the program needs: see `program.worker.needs_of`.
        watch: Looks at what the program waits for.
    """

    def __init__(self, storage: RunStorage, needs: Mapping[str, Any], watch: ProgramWatch) -> None:
        self._storage = storage
        self._needs = needs
        self._watch = watch
        self._hang_timeout: float | None = None
        self._trials = ""
        self._next_store = 0.0
        self._outage = Outage("the storage of the trials", seconds=0)

    def process(self, start: Start, options: ProcessOptions) -> Process:
        """See Launcher."""
        self._hang_timeout = start.config.hang_timeout
        # -P keeps the current folder, the user's, off the import path until the script begins.
        runner = ("-P", "-m", program_main.__name__)
        process = ScriptProcess(start.config.argv(start.environment.python, options.variables, runner), options)
        self._watch.pid = process.pid
        return process

    def variables(self, start: Start) -> dict[str, str]:
        """See Launcher; without W&B's, since a program may begin a W&B run for each trial."""
        config, storage = start.config, self._storage.uri
        path = {program_main.STORAGE_VARIABLE: f"{storage}/{layout.RAY_FOLDER}"}
        needs = {**self._needs, "folder": str(start.environment.folder)}
        of_workers = {  # of its workers, as one variable of the program
            **path,
            "RUN_NAME": self._storage.run_name,
            "RUN_URI": storage,
            "RAY_ADDRESS": start.environment.cluster,  # else Ray's own actors look for a cluster
            program_worker.NEEDS_VARIABLE: json.dumps(needs).replace("$", "\\u0024"),  # which Ray would expand
            **start.environment.git,
            **config.variables,
        }
        variables = {
            **RAY_SETTINGS,
            **OF_RAY_TRAIN,
            **path,
            **stack_gpus(config),
            # Later than the run's driver ends the wait, so that Ray does not warn of it each minute.
            "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": str(config.worker_timeout + 60.0),
            "RAY_DEDUP_LOGS": "0",  # a line of each rank is a line, though Ray finds them alike
            "RAY_OVERRIDE_JOB_RUNTIME_ENV": "1",  # a script's own runtime environment is merged, and wins
            "TORCHELASTIC_RESTART_COUNT": str(start.number),
            JOB_VARIABLE: json.dumps(_job(of_workers)),
        }
        for name, reporter in zip(CALLBACK_VARIABLES, REPORTERS, strict=True):
            users = config.variables.get(name) or os.environ.get(name)
            variables[name] = f"{users},{reporter}" if users else reporter
        return variables

    def look(self, process: Process, exchange: Path) -> None:
        """Store the table of Ray Tune's trials.

        A program that waits, or whose workers compute and print nothing, does not hang.
        """
        if self._hang_timeout is None or self._watch.waits_since is not None:
            process.heard()
        if time.monotonic() < self._next_store and process.wait(0.0) is None:
            return
        trials = self._trials
        with suppress(OSError):  # there are none yet
            trials = (exchange / layout.TRIALS).read_text()
        if trials == self._trials:
            return
        if self._outage.attempt(lambda: self._storage.write(layout.TRIALS, trials), time.monotonic()):
            self._trials = trials
        else:
            self._next_store = time.monotonic() + AGAIN_SECONDS


def stack_gpus(config: RunConfig) -> dict[str, str]:
    """Return the variable with the GPUs that a script would get by default, which may not be there yet; on a stack.

    It is 0 with --device cpu, and on a stack without GPUs, which starts CPU nodes for a program.
    """
    info = read_cluster_info()
    if config.device == "cpu" or (info and not any(group["gpu"] and group["max"] for group in info["groups"].values())):
        return {"STACK_GPUS": "0"}
    number = default_workers(replace(config, driver=False), info) if info else None
    return {"STACK_GPUS": str(number)} if number else {}


def _job(variables: dict[str, str]) -> dict[str, Any]:
    """Return the job configuration with which the program joins Ray: this job's, with more variables."""
    job: dict[str, Any] = json.loads(os.environ.get(JOB_VARIABLE) or "{}")
    environment = job.get("runtime_env") or {}
    job["runtime_env"] = {
        **environment,
        "env_vars": {**environment.get("env_vars", {}), **variables},
        "worker_process_setup_hook": f"{program_worker.__name__}.set_up",
    }
    return job
