"""Why a cluster can't be reached, where that decides what a command does next."""

from training.errors import ResourceError


class HeadAway(ResourceError):
    """The head doesn't answer now: it is starting, or being replaced."""


class StackGone(ResourceError):
    """The outputs of a stack are there, and nothing else of it."""
