"""Packaged jobs of one file each: plain PyTorch, and programs on Ray."""
