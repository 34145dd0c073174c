"""The reasons why a node doesn't start, and the exit status of each."""


class NodeError(Exception):
    """The node exits before it starts Ray; the message is one line for the container's log."""

    exit_status = 1


class StartError(NodeError):
    """The node can't start or join as it is configured; another attempt would fail in the same way."""

    exit_status = 2


class HeadError(NodeError):
    """The head didn't answer in time."""

    exit_status = 3


class GpuError(NodeError):
    """The GPUs that the task requested are missing, or don't compute."""

    exit_status = 4
