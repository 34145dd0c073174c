"""The fixtures of the language recipe, which the tests of the old checkpoints train."""

from tests.training.recipes.language.conftest import code, config, node, texts

__all__ = ["code", "config", "node", "texts"]
