"""The fixtures of tests/training, which the tests of the checkpoints share."""

from tests.training.conftest import on_ranks, s3

__all__ = ["on_ranks", "s3"]
