"""The packaged jobs, each in one file: plain PyTorch, and programs on Ray."""
