"""What every training of ours shares, in plain PyTorch: the epoch loop, DDP, the optimizer, step times, random states.

It knows no recipe, no storage and no Ray, so the same code runs under Ray Train and alone.
"""
