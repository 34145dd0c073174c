"""Why a node doesn't start, and the exit status each cause has."""


class StartError(Exception):
    """This node can't start or join as it is configured; another try would end the same way."""

    exit_status = 2


class HeadError(StartError):
    """The head didn't answer in time."""

    exit_status = 3


class GpuError(StartError):
    """The GPUs that the task was promised are not there, or don't compute."""

    exit_status = 4
