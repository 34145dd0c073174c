"""The packaged recipes: an image classifier and a language model, trained with DDP on Ray Train."""
