"""Ray on Amazon ECS for distributed PyTorch: the settings, the components in order, and what the stack exports."""

import pulumi

from infra import config
from infra.auth import AuthToken, AuthTokenArgs
from infra.capacity import Capacity, CapacityArgs
from infra.cluster import Cluster, ClusterArgs
from infra.definitions import commands
from infra.discovery import Discovery, DiscoveryArgs
from infra.image import Image, ImageArgs
from infra.monitoring import Monitoring, MonitoringArgs
from infra.network import Network, NetworkArgs
from infra.ray_nodes import TaskDefaults
from infra.ray_service import RayService, RayServiceArgs
from infra.ray_task import RayTask
from infra.storage import Storage, StorageArgs
from infra.tags import name_prefix
from infra.worker_price import WorkerPrice, WorkerPriceArgs
from infra.worker_scaling import WorkerScaling, WorkerScalingArgs

settings, plan = config.load()
scale = settings.workers
prefix = name_prefix(pulumi.get_project(), pulumi.get_stack())

network = Network(f"{prefix}-network", NetworkArgs(vpc_cidr=settings.vpc_cidr, location=plan.location))
storage = Storage(f"{prefix}-storage", StorageArgs(retain=settings.retain_bucket))
image_uri = (
    settings.image_uri or Image(f"{prefix}-image", ImageArgs(context=".", dockerfile="./docker/Dockerfile")).image_uri
)
auth = AuthToken(f"{prefix}-auth", AuthTokenArgs())
price = WorkerPrice(f"{prefix}-worker-price", WorkerPriceArgs(worker=plan.worker))
discovery = Discovery(f"{prefix}-discovery", DiscoveryArgs(namespace=prefix, vpc_id=network.vpc_id))
cluster = Cluster(f"{prefix}-ray", ClusterArgs(log_retention_days=settings.log_retention_days))

head_capacity = Capacity(
    f"{prefix}-head",
    CapacityArgs(
        location=plan.location,
        cluster=cluster.ref,
        network=network.ref,
        node=plan.head,
        root_volume_gib=settings.root_volume_gib,
    ),
)
worker_capacity = Capacity(
    f"{prefix}-workers",
    CapacityArgs(
        location=plan.location,
        cluster=cluster.ref,
        network=network.ref,
        node=plan.worker,
        managed_scaling=scale.autoscaled,
        root_volume_gib=settings.root_volume_gib,
    ),
)
association = cluster.associate([head_capacity.provider_name, worker_capacity.provider_name])

tasks = TaskDefaults(
    cluster=cluster.ref,
    location=plan.location,
    image_uri=image_uri,
    logs=cluster.logs,
    token_parameter_arn=auth.parameter_arn,
    bucket=storage.bucket,
    data_buckets=settings.data_buckets,
)
head_task = RayTask(f"{prefix}-head-task", tasks.head(plan.head.task, price.parameter))
worker_task = RayTask(f"{prefix}-worker-task", tasks.worker(plan.worker.task, discovery.head_host))
needed = [association, *head_task.role_policies, *worker_task.role_policies]
head = RayService(
    f"{prefix}-ray-head",
    RayServiceArgs(
        cluster=cluster.ref,
        network=network.ref,
        task_definition_arn=head_task.definition_arn,
        capacity_provider=head_capacity.provider_name,
        count=1,
        registry_arn=discovery.registry_arn,
        after=needed,
    ),
)
workers = RayService(
    f"{prefix}-ray-workers",
    RayServiceArgs(
        cluster=cluster.ref,
        network=network.ref,
        task_definition_arn=worker_task.definition_arn,
        capacity_provider=worker_capacity.provider_name,
        count=scale.initial_count,
        autoscaled=scale.autoscaled,
        redeploy=settings.redeploy_workers,
        after=needed,
    ),
)
if scale.autoscaled:
    WorkerScaling(
        f"{prefix}-scaling",
        WorkerScalingArgs(
            service=workers.ref, group_name=worker_capacity.group_name, workers=scale, gpus=plan.worker.task.gpus
        ),
    )
monitoring = Monitoring(
    f"{prefix}-monitoring",
    MonitoringArgs(region=plan.region, head=head.ref, workers=workers.ref, alerts=settings.alerts),
)

head_id = head_capacity.instance_id()
reach = pulumi.Output.all(head_id, discovery.head_host)
pulumi.export("bucket", storage.bucket.name)
pulumi.export("head_instance_id", head_id)
pulumi.export("cluster_name", cluster.ref.name)
pulumi.export("image_uri", image_uri)
pulumi.export("log_group", cluster.logs.name)
pulumi.export("metrics_dashboard", monitoring.dashboard_name)
pulumi.export("estimated_hourly_usd", plan.hourly_usd or "unknown")
pulumi.export("train_command", head_id.apply(lambda head: commands.train(plan.region, plan.gpus, head)))
pulumi.export("shell_command", head_id.apply(lambda head: commands.shell(plan.region, head)))
pulumi.export("dashboard_command", reach.apply(lambda known: commands.dashboard(plan.region, *known)))
pulumi.export("token_command", auth.parameter_name.apply(lambda name: commands.token(plan.region, name)))
