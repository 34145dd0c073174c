"""The recipe whose settings a config has; it imports that recipe alone."""

from __future__ import annotations

from training.engine.config import TrainingConfig
from training.engine.recipe import Recipe
from training.recipes.language.config import LanguageConfig


def recipe_of(config: TrainingConfig) -> Recipe:
    """Return the recipe that trains what a config says."""
    if isinstance(config, LanguageConfig):
        from training.recipes.language.recipe import LANGUAGE

        return LANGUAGE
    from training.recipes.images.recipe import IMAGES

    return IMAGES
