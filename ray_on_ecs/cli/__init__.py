"""The command line `ray-on-ecs`: one module for each command."""
