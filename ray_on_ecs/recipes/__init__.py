"""Parts of a training script that are not training: options, the process group, data sets, weights.

The recipes in training/ are made of them, and a script of your own may be. Each module is public: options, ranks,
images, batch_norm, documents and language_models. Only those that a script imports need PyTorch, torchvision or
transformers.
"""
