"""What ends a run early, and the exit status each cause has. A bug is none of these and keeps its traceback."""

LONGEST_CAUSE = 300


class TrainingError(Exception):
    """The run failed while it trained; the message says what is left and how to go on."""

    exit_status = 1


class Interrupted(TrainingError):
    """The user stopped the run; its checkpoints so far are kept."""

    exit_status = 130


class StorageError(TrainingError):
    """The storage could not be read or written, however often it was tried."""


class UsageError(TrainingError):
    """A setting, a folder or a data set that can't be used; nothing was created or trained."""

    exit_status = 2


class ResourceError(TrainingError):
    """The cluster didn't offer the workers that the run asked for within the time given."""

    exit_status = 3


class ScriptError(Exception):
    """A user's script failed or hung; it may be started again."""


def one_line(cause: object) -> str:
    """What a cause says, on one line that isn't too long for a screen."""
    return " ".join(str(cause).split())[:LONGEST_CAUSE]


def counted(number: int, noun: str) -> str:
    """Return a number of things: `1 worker`, `2 workers`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


class HeadUnavailable(ResourceError):
    """The head doesn't answer now: it is starting, or being replaced."""


class HeadGone(ResourceError):
    """There is no head, and none is starting."""


class StackNotFound(HeadGone):
    """The outputs of a stack are there, and nothing else of it."""
