"""The packaged recipe, a language model, trained with DDP or FSDP on Ray Train, and programs on PyTorch and Ray."""
