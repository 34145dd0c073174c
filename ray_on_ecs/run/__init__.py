"""The runner: a script on N workers of a Ray cluster, under torchrun's environment variables."""
