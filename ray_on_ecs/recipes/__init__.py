"""Parts of a training script that are not training: options, the process group, data sets, models and weights.

The recipes in training/ use them, and your scripts may do so too: docs/recipes.md lists the modules, which are public.
Only those that a script imports need PyTorch, torchvision or transformers.
"""
