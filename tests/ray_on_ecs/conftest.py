"""The fixtures of tests/training, whose recipe some tests of the checkpoints train."""

from tests.training.conftest import on_ranks, one_thread, s3

__all__ = ["on_ranks", "one_thread", "s3"]
