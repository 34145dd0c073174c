"""Ray on Amazon ECS for distributed PyTorch: one cluster from the stack's configuration, and the stack's outputs."""

import pulumi

from infra.config import RayClusterArgs
from infra.ray_cluster import RayCluster

# Project and stack can be renamed, so their names are not in it: a new logical name would replace every resource.
NAME = "ray-on-ecs"

args = RayClusterArgs.from_config()
cluster = RayCluster(NAME, args)

pulumi.export("bucket", cluster.bucket)
pulumi.export("head_instance_id", cluster.head_instance_id)
pulumi.export("cluster_name", cluster.cluster_name)
pulumi.export("image_uri", cluster.image_uri)
pulumi.export("log_group", cluster.log_group)
pulumi.export("metrics_dashboard", cluster.metrics_dashboard)
pulumi.export("estimated_hourly_usd", cluster.estimated_hourly_usd.apply(lambda usd: usd or "unknown"))
pulumi.export("idle_cost", cluster.idle_cost)
pulumi.export("default_gpus", cluster.default_gpus)
pulumi.export("connection", cluster.connection)
pulumi.export("train_command", cluster.train_command)
pulumi.export("shell_command", cluster.shell_command)
pulumi.export("dashboard_command", cluster.dashboard_command)
pulumi.export("token_command", cluster.token_command)
if args.sleep_after_minutes:
    pulumi.export("wake_command", cluster.wake_command)
