"""The language model: its settings, corpus, tokenizer, model, sharding, trainer and Hugging Face folders."""
