"""Parts of a training script that are not training: options, the process group, data sets, models, weights.

The recipes in training/ are made of them, and a script of your own may be; each module is public. Only those that a
script imports need PyTorch, torchvision or transformers.

For every script: options, ranks. Of images: images, image_batches, photographs, image_models, batch_norm. Of language
models: documents, chats, language_models, token_loss, document_attention, batch_size.
"""
