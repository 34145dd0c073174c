"""Parts of a training script that are not training: options, the process group, data sets, models and weights.

The recipes in training/ are made of them, and a script of your own may be; docs/recipes.md lists the modules, which are
public. Only those that a script imports need PyTorch, torchvision or transformers.
"""
