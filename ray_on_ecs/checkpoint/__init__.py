"""Checkpoints of a script, from memory to storage and back."""
