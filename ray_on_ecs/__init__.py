"""The command `ray-on-ecs`: everything between a laptop and the cluster, once `pulumi up` has ended."""
