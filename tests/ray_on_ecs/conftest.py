"""The fixtures of tests/training, whose recipes some tests of the checkpoints train."""

from tests.training.conftest import config, digits, on_ranks, one_thread, s3

__all__ = ["config", "digits", "on_ranks", "one_thread", "s3"]
