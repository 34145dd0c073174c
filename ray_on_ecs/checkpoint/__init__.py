"""Checkpoints, from memory to storage and back, and the rules for resuming from one.

It saves and restores any `engine.trainer.Trainer`, under Ray, under torchrun and alone.
"""
