"""Ray on Amazon ECS for distributed PyTorch: the settings, the components in order, and what the stack exports."""

from functools import partial

import pulumi

from infra import commands
from infra.auth import AuthToken, AuthTokenArgs
from infra.capacity import Capacity, CapacityArgs
from infra.cluster import Cluster, ClusterArgs
from infra.discovery import Discovery, DiscoveryArgs
from infra.image import Image, ImageArgs
from infra.network import Network, NetworkArgs
from infra.plan import Plan
from infra.ray_head import RayHead, RayHeadArgs
from infra.ray_node import RayNodeArgs
from infra.ray_workers import RayWorkers, RayWorkersArgs
from infra.settings import Settings
from infra.storage import Storage, StorageArgs

settings = Settings.load()
plan = Plan.of(settings)

network = Network("network", NetworkArgs(vpc_cidr=settings.vpc_cidr, availability_zone=plan.zone, region=plan.region))
storage = Storage("storage", StorageArgs(retain=settings.retain_bucket))
image_uri = settings.image_uri or Image("image", ImageArgs(context=".", dockerfile="./docker/Dockerfile")).image_uri
auth = AuthToken("auth", AuthTokenArgs())
discovery = Discovery("discovery", DiscoveryArgs(vpc_id=network.vpc_id))

cluster = Cluster("ray", ClusterArgs(log_retention_days=settings.log_retention_days))
instances = partial(
    CapacityArgs,
    cluster_name=cluster.name,
    subnet_id=network.subnet_id,
    security_group_id=network.security_group_id,
    root_volume_gib=settings.root_volume_gib,
    depends_on=[network],
)
head_capacity = Capacity("head", instances(instance_type=settings.head_instance_type, count=1))
worker_capacity = Capacity(
    "workers", instances(instance_type=settings.worker_instance_type, count=settings.worker_count, gpu=True)
)
association = cluster.associate([head_capacity.provider, worker_capacity.provider])

node = RayNodeArgs(
    cluster_arn=cluster.arn,
    subnet_id=network.subnet_id,
    security_group_id=network.security_group_id,
    region=plan.region,
    image_uri=image_uri,
    log_group_name=cluster.log_group_name,
    log_group_arn=cluster.log_group_arn,
    token_parameter_arn=auth.parameter_arn,
    bucket_name=storage.bucket_name,
    bucket_arn=storage.bucket_arn,
    depends_on=[association, network],
)
registry_arn, head_host = discovery.registry_arn, discovery.head_host
RayHead("ray-head", RayHeadArgs(node=node, provider=head_capacity.provider, size=plan.head, registry_arn=registry_arn))
RayWorkers(
    "ray-workers",
    RayWorkersArgs(
        node=node, provider=worker_capacity.provider, size=plan.worker, count=settings.worker_count, head_host=head_host
    ),
)

head_id = head_capacity.instance_id()
dashboard = pulumi.Output.all(plan.region, head_id, head_host).apply(lambda at: commands.dashboard(*at))
pulumi.export("bucket", storage.bucket_name)
pulumi.export("head_instance_id", head_id)
pulumi.export("cluster_name", cluster.name)
pulumi.export("image_uri", image_uri)
pulumi.export("log_group", cluster.log_group_name)
pulumi.export("train_command", head_id.apply(partial(commands.train, plan.region, plan.gpus)))
pulumi.export("shell_command", head_id.apply(partial(commands.shell, plan.region)))
pulumi.export("dashboard_command", dashboard)
pulumi.export("token_command", auth.parameter_name.apply(partial(commands.token, plan.region)))
