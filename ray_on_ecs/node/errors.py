"""Errors that keep a node from starting, with their exit statuses."""


class NodeError(Exception):
    """The node exits before it starts Ray; the message is one line for the container's log."""

    exit_status = 1


class StartError(NodeError):
    """The node can't start or join with its configuration; another attempt would fail, too."""

    exit_status = 2


class HeadError(NodeError):
    """The head didn't answer in time."""

    exit_status = 3


class GpuError(NodeError):
    """The GPUs that the task requested are missing, or don't compute."""

    exit_status = 4
