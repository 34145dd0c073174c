"""Errors that end a run, a command or a node, with exit statuses. Others are bugs and keep their traceback."""

import errno
from collections.abc import Callable, Sequence

LONGEST_CAUSE = 300
# Numbers of an OSError for which more space is the way out.
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


class TrainingError(Exception):
    """The run failed while it trained; the message has the command that resumes it."""

    exit_status = 1


class Interrupted(TrainingError):
    """The user stopped the run; its checkpoints so far are kept."""

    exit_status = 130


class LimitReached(TrainingError):
    """The run has reached its limit in hours or dollars; `next_command`, with a higher one, resumes it."""

    exit_status = 4
    next_command: Sequence[str] = ()


class EfaError(TrainingError):
    """NCCL does not use EFA, and the run must; its script was not started on these nodes, and its files are kept."""

    exit_status = 5


class StorageError(TrainingError):
    """The storage could not be read or written, after several retries."""


class UsageError(TrainingError):
    """A setting, a folder or a data set is invalid; nothing was created or trained."""

    exit_status = 2


class ResourceError(TrainingError):
    """The cluster or AWS could not provide what the command needs, such as workers within the timeout."""

    exit_status = 3


class ScriptError(Exception):
    """A user's script failed or hung; it may be restarted."""


class HeadUnavailable(ResourceError):
    """The head doesn't answer: it is starting, or being replaced."""


class HeadGone(ResourceError):
    """The head does not exist, and is not starting."""


class StackNotFound(HeadGone):
    """The resources in a stack's outputs don't exist."""


class NodeError(Exception):
    """A node exits before it starts Ray; the message is one line for the container's log."""

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


def resume_line(run_name: str | None, command: str = "the same command") -> str:
    """Return how a run that has ended goes on."""
    return f"{command} with --run-name {run_name} resumes the run"


def one_line(cause: object) -> str:
    """Return an error's message on one line of limited length."""
    return " ".join(str(cause).split())[:LONGEST_CAUSE]


def failure_of(call: Callable[[], object]) -> str | None:
    """Call a function; return the reason of a failure on one line, or None."""
    try:
        call()
    except Exception as cause:
        return one_line(f"{type(cause).__name__}: {cause}")
    return None


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: `1 worker`, `2 workers`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
