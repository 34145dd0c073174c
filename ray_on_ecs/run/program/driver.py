"""Ray programs: scripts that start their workers themselves, with Ray Train, Ray Tune, Ray Data or plain Ray.

Such a script runs once, beside the run's driver on the head. To the driver it is a group of one worker, which is a
thread of the driver: the run's folder, the metrics, the restarts and the ends are those of any script.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import ray

from ray_on_ecs.command import RAY_SETTINGS
from ray_on_ecs.config import JOB_VARIABLE
from ray_on_ecs.errors import one_line
from ray_on_ecs.run.environment import CALLBACK_VARIABLES, ScriptEnvironment
from ray_on_ecs.run.program import main as program_main
from ray_on_ecs.run.program import worker as program_worker
from ray_on_ecs.run.ray_private import CHANGE_FOLDER
from ray_on_ecs.run.worker import Process, ScriptWorker, Settings
from ray_on_ecs.run.worker_rank import WorkerRank
from ray_on_ecs.storage import layout

logger = logging.getLogger(__name__)

# The metrics of Ray Train and Ray Tune: Ray creates these classes in `fit`.
REPORTERS = ("ray_on_ecs.run.program.reports.TrainReporter", "ray_on_ecs.run.program.reports.TuneReporter")
START_MARGIN_SECONDS = 60.0


def run_program(settings: Settings) -> dict[str, Any]:
    """Run a Ray program until the driver lets it leave; the function of the driver's own thread.

    Raises:
        UsageError: The program can't be started.
        OSError: The storage can't be read.
    """
    with RayProgram(settings, WorkerRank()) as worker:
        return worker.run()


class RayProgram(ScriptWorker):
    """The run's driver in the place of a worker: it runs the program, which starts the workers."""

    _trials = ""

    def _argv(self, python: str) -> tuple[str, ...]:
        # -P keeps the current folder, the user's, off the import path until the script begins.
        return self._config.argv(python, ("-P", "-m", program_main.__name__))

    def _variables(self, environment: ScriptEnvironment, exchange: Path) -> dict[str, str]:
        """Return the program's environment, whose callbacks of Ray are the user's and ours."""
        # Without W&B's: a program may begin a W&B run for each trial.
        variables = environment.variables(self._launcher_variables(), exchange)
        for name, reporter in zip(CALLBACK_VARIABLES, REPORTERS, strict=True):
            users = self._config.variables.get(name) or os.environ.get(name)
            variables[name] = f"{users},{reporter}" if users else reporter
        return variables

    def _launcher_variables(self) -> dict[str, str]:
        """Return the variables of a Ray program; one of them holds the variables of its workers."""
        storage = self._storage.uri
        path = {program_main.STORAGE_VARIABLE: f"{storage}/{layout.RAY_FOLDER}"}
        needs = program_worker.needs_of(self._settings, str(self._folder))
        of_workers = {
            **path,
            "RUN_NAME": self._storage.run_name,
            "RUN_URI": storage,
            "RAY_ADDRESS": ray.get_runtime_context().gcs_address,  # else Ray's own actors look for a cluster
            program_worker.NEEDS_VARIABLE: json.dumps(needs),
            **self._settings["code"].git,
            **self._config.variables,
        }
        return {
            **RAY_SETTINGS,
            **path,
            # Later than the run's driver ends the wait, so that Ray does not warn of it each minute.
            "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": str(self._config.worker_timeout + START_MARGIN_SECONDS),
            CHANGE_FOLDER: "0",  # Ray Train's workers stay in the folder with the code
            "RAY_DEDUP_LOGS": "0",  # a line of each rank is a line, though Ray finds them alike
            "RAY_OVERRIDE_JOB_RUNTIME_ENV": "1",  # a script's own runtime environment is merged, and wins
            "TORCHELASTIC_RESTART_COUNT": str(self._member.status.generation),
            JOB_VARIABLE: json.dumps(_job(of_workers)),
        }

    def _report_script(self, process: Process) -> None:
        """Report how the program is doing; one that waits, or whose workers compute without a word, does not hang."""
        if self._config.hang_timeout is None or self._settings["is_waiting"]():
            process.heard()
        super()._report_script(process)

    def _write_metrics(self, exchange: Path, *, is_last: bool = False) -> None:
        """Store the metrics, and the table of Ray Tune's trials."""
        super()._write_metrics(exchange, is_last=is_last)
        try:
            trials = (exchange / layout.TRIALS).read_text()
            if trials != self._trials:
                self._storage.write(layout.TRIALS, trials)
                self._trials = trials
        except FileNotFoundError:
            pass
        except OSError as cause:
            logger.warning(f"the trials could not be stored, and will be tried again ({one_line(cause)})")

    def _hardware(self) -> dict[str, Any] | None:
        """Return None: the program starts the workers."""
        return None


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
