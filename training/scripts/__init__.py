"""Anybody's training: the settings, environment, process, folder, inputs, packages and metrics of a user's script.

It knows the script as a command that reads torchrun's environment variables, and neither Ray nor any recipe.
"""
