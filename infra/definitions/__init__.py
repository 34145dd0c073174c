"""Pure data and arithmetic: container definitions, policies, commands, sizes, metrics. Nothing here imports Pulumi."""
