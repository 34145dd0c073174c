"""Why a node doesn't start, and the exit status each cause has."""


class NodeError(Exception):
    """This node ends before Ray runs; the message is one line for whoever reads its log."""

    exit_status = 1


class StartError(NodeError):
    """This node can't start or join as it is configured; another try would end the same way."""

    exit_status = 2


class HeadError(NodeError):
    """The head didn't answer in time."""

    exit_status = 3


class GpuError(NodeError):
    """The GPUs that the task was promised are not there, or don't compute."""

    exit_status = 4
