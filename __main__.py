"""Ray on Amazon ECS for distributed PyTorch: the settings, the components in order, and what the stack exports."""

from functools import partial

import pulumi

from infra import commands, ray_node
from infra.auth import AuthToken, AuthTokenArgs
from infra.capacity import Capacity, CapacityArgs
from infra.cluster import Cluster, ClusterArgs
from infra.discovery import Discovery, DiscoveryArgs
from infra.image import Image, ImageArgs
from infra.monitoring import Monitoring, MonitoringArgs
from infra.network import Network, NetworkArgs
from infra.plan import Plan
from infra.ray_head import RayHead, RayHeadArgs
from infra.ray_workers import RayWorkers, RayWorkersArgs
from infra.settings import Settings
from infra.storage import Storage, StorageArgs
from infra.worker_price import WorkerPrice, WorkerPriceArgs
from infra.worker_scaling import WorkerScaling, WorkerScalingArgs

settings = Settings.load()
plan, workers = Plan.of(settings), settings.workers

network = Network("network", NetworkArgs(vpc_cidr=settings.vpc_cidr, place=plan.place))
storage = Storage("storage", StorageArgs(retain=settings.retain_bucket))
image_uri = settings.image_uri or Image("image", ImageArgs(context=".", dockerfile="./docker/Dockerfile")).image_uri
auth = AuthToken("auth", AuthTokenArgs())
price = WorkerPrice("worker-price", WorkerPriceArgs(price=plan.worker_price))
discovery = Discovery("discovery", DiscoveryArgs(vpc_id=network.vpc_id))

cluster = Cluster("ray", ClusterArgs(log_retention_days=settings.log_retention_days))
capacity = partial(CapacityArgs, cluster=cluster.handle, site=network.site, root_volume_gib=settings.root_volume_gib)
head_capacity = Capacity("head", capacity(instance_type=settings.head_instance_type, count=1))
worker_capacity = Capacity(
    "workers",
    capacity(instance_type=settings.worker_instance_type, count=workers.most, managed=workers.elastic, gpu=True),
)

node = ray_node.RayNodeArgs(
    cluster=cluster.handle,
    site=network.site,
    region=plan.region,
    image_uri=image_uri,
    logs=cluster.logs,
    token_parameter_arn=auth.parameter_arn,
    bucket=storage.bucket,
    data_buckets=settings.data_buckets,
)
head = RayHead(
    "ray-head",
    RayHeadArgs(
        node=node,
        provider=head_capacity.provider,
        size=plan.head,
        registry_arn=discovery.registry_arn,
        worker_price=price.parameter,
    ),
)
ray_workers = RayWorkers(
    "ray-workers",
    RayWorkersArgs(
        node=node, provider=worker_capacity.provider, size=plan.worker, workers=workers, head_host=discovery.head_host
    ),
)
ray_node.start([head, ray_workers], after=[cluster.associate([head_capacity.provider, worker_capacity.provider])])
if workers.elastic:
    moved = WorkerScalingArgs(
        service=ray_workers.service, group_name=worker_capacity.group_name, workers=workers, gpus=plan.worker.gpus
    )
    WorkerScaling("scaling", moved)
monitored = MonitoringArgs(region=plan.region, head=head.service, workers=ray_workers.service, alerts=settings.alerts)
monitoring = Monitoring("monitoring", monitored)

head_id = head_capacity.instance_id()
reach = pulumi.Output.all(head_id, discovery.head_host)
pulumi.export("bucket", storage.bucket.name)
pulumi.export("head_instance_id", head_id)
pulumi.export("cluster_name", cluster.handle.name)
pulumi.export("image_uri", image_uri)
pulumi.export("log_group", cluster.logs.name)
pulumi.export("metrics_dashboard", monitoring.dashboard_name)
pulumi.export("estimated_hourly_usd", plan.hourly_usd or "unknown")
pulumi.export("train_command", head_id.apply(partial(commands.train, plan.region, plan.gpus)))
pulumi.export("shell_command", head_id.apply(partial(commands.shell, plan.region)))
pulumi.export("dashboard_command", reach.apply(lambda at: commands.dashboard(plan.region, *at)))
pulumi.export("token_command", auth.parameter_name.apply(partial(commands.token, plan.region)))
