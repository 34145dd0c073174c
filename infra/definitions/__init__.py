"""Container definitions, policies, commands, sizes and metrics, as pure functions without Pulumi."""
