"""Environment of a script, however it is started: packages, network, secrets and inputs."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ray_on_ecs import sdk
from ray_on_ecs.config import RunConfig
from ray_on_ecs.rules import OF_LAUNCHER
from ray_on_ecs.run import collectives, nccl_interface
from ray_on_ecs.storage.run_storage import RunStorage

# True if the process group's store is served already, so that rank 0's script does not serve it.
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
# Ray imports these when a script calls Ray Train's or Ray Tune's `fit`.
CALLBACK_VARIABLES = ("RAY_TRAIN_CALLBACKS", "RAY_TUNE_CALLBACKS")
NOT_A_DRIVER = dict.fromkeys(CALLBACK_VARIABLES, "ray_on_ecs.run.program.not_a_driver.NotADriver")
# Of Ray's own variables, what a script needs that joins the cluster itself; the last one is of a head at 127.0.0.1.
OF_CLUSTER = (
    *("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"),
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER",
)
OF_RAY = ("RAY_", "__RAY_")
OWN = "RAY_ON_ECS_"
# W&B's variables of a run's ID and of resuming it, and the most characters of the former.
WANDB = ("WANDB_RUN_ID", "WANDB_RESUME")
WANDB_LENGTH = 64


def without_ray(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a Ray worker without the ones that Ray sets for the worker process itself."""
    return {
        name: value
        for name, value in variables.items()
        if name in OF_CLUSTER or name.startswith(OWN) or not name.startswith(OF_RAY)
    }


@dataclass(frozen=True, kw_only=True)
class ScriptEnvironment:
    """The node's preparation for a run's script, which is the same at each start.

    Attributes:
        config: The run's settings.
        storage: The run's folder in the storage.
        run_id: The run's ID, which a run of the same name does not share.
        folder: The script's working directory.
        python: The interpreter with the packages of --requirements.
        secrets: The values of --secret, by variable.
        inputs: Where the inputs are, by variable.
        git: The commit of the code, by variable.
        cluster: The address of the Ray head, or nothing on one machine without Ray.
    """

    config: RunConfig
    storage: RunStorage
    run_id: str
    folder: Path
    python: str
    secrets: Mapping[str, str]
    inputs: Mapping[str, str]
    git: Mapping[str, str]
    cluster: str

    def variables(self, launcher: Mapping[str, str], exchange: Path) -> dict[str, str]:
        """Return the script's variables: this process's without Ray's, then the runner's, then the user's.

        Args:
            launcher: The variables that a launcher, such as torchrun, would set.
            exchange: The folder of the messages from the script to its worker.
        """
        # Another launcher's place, as in a shell of torchrun's or of a notebook, is not this worker's.
        base = {name: value for name, value in without_ray(os.environ).items() if not re.fullmatch(OF_LAUNCHER, name)}
        head = self.cluster.rpartition(":")[0] or "127.0.0.1"
        programs = [str(Path(python).parent) for python in (self.python, sys.executable)]  # of the packages
        variables = {
            **base,
            **nccl_interface.variables(head, base),
            **({"RAY_ADDRESS": self.cluster} if self.cluster else {}),
            "PATH": os.pathsep.join([*programs, os.environ.get("PATH", os.defpath)]),
            "PYTHONFAULTHANDLER": "1",
            "PYTHONUNBUFFERED": "1",
            **launcher,
            "RUN_NAME": self.storage.run_name,
            "RUN_DIR": str(self.folder),
            "RUN_URI": self.storage.uri,
            **self.git,
            sdk.FOLDER_VARIABLE: str(exchange),
            **self.inputs,
            **self.config.variables,
            **self.secrets,
        }
        return variables | self._recording(variables, exchange)

    def _recording(self, variables: Mapping[str, str], exchange: Path) -> dict[str, str]:
        """Return the variable by which the script's collectives are read, unless that is switched off."""
        if self.config.driver or variables.get(collectives.AUTOLOAD) == "0":
            return {}
        with suppress(OSError):  # a full disk: the script starts without the reader
            paths = variables.get("PYTHONPATH"), str(collectives.install(exchange))
            return {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        return {}

    def wandb_variables(self, rank: int) -> dict[str, str]:
        """Return the variables with which `wandb.init()` continues a W&B run after restarts, unless the user sets them.

        Only rank 0's: ranks with one ID would write into one run of W&B, and mpirun's ranks share their variables.
        https://docs.wandb.ai/models/runs/resuming
        """
        users = {*os.environ, *self.config.variables, *self.secrets}
        if rank != 0 or self.config.mpi or not users.isdisjoint(WANDB):
            return {}
        return dict(zip(WANDB, (wandb_id(self.storage.run_name, self.run_id), "allow"), strict=True))


def wandb_id(run_name: str, run_id: str) -> str:
    """Return the ID that W&B knows a run by."""
    return f"{run_name[: WANDB_LENGTH - len(run_id) - 1]}-{run_id}"
