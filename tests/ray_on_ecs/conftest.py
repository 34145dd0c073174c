"""The fixtures of tests/training, which the tests of the checkpoints share."""

from tests.training.conftest import on_ranks, one_thread, s3

__all__ = ["on_ranks", "one_thread", "s3"]
