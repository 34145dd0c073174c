"""What can be trained out of the box: one package for each recipe.

A recipe builds a `Trainer` and says what is special about its metrics. It knows nothing of Ray, storage or checkpoints.
"""

# The packages, as `--recipe` names them.
RECIPES = ("language",)
