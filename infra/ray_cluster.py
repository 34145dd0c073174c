"""RayCluster component: a Ray cluster on Amazon ECS, for Pulumi programs in any language.

Pulumi derives the schema for other languages from the annotations and docstrings of RayCluster, and can't read
annotations that `from __future__ import annotations` turned into strings.
"""

import os
from pathlib import Path
from typing import Any

import pulumi

from infra import config
from infra.auth import AuthToken, AuthTokenArgs
from infra.cluster import Cluster, ClusterArgs
from infra.cluster_info import ClusterInfo, ClusterInfoArgs
from infra.config import RayClusterArgs
from infra.definitions import commands
from infra.discovery import Discovery, DiscoveryArgs
from infra.image import Image, ImageArgs
from infra.monitoring import Monitoring, MonitoringArgs
from infra.network import Network, NetworkArgs
from infra.node_group import NodeGroup, NodeGroupArgs
from infra.node_scaling import NodeScaling, NodeScalingArgs
from infra.service import Service, ServiceArgs
from infra.sessions import Sessions, SessionsArgs
from infra.storage import Storage, StorageArgs
from infra.tags import add_tags, name_prefix
from infra.task_definition import TaskDefinition
from infra.task_factory import TaskFactory

ROOT = Path(__file__).parents[1]


class RayCluster(pulumi.ComponentResource):
    """Ray on Amazon ECS for distributed PyTorch: network, bucket, image, head, GPU and CPU workers, monitoring.

    Its name is the prefix of all resource names, so a long name is shortened. Account and region are those of its AWS
    provider. While Pulumi plans, the constructor validates the arguments with calls through that provider, and looks
    for a deployed cluster of this name; prices are read with the credentials of the environment.
    """

    bucket: pulumi.Output[str]
    """Name of the S3 bucket of the runs."""
    head_instance_id: pulumi.Output[str]
    """ID of the head's EC2 instance, the target of Session Manager."""
    cluster_name: pulumi.Output[str]
    """Name of the ECS cluster."""
    image_uri: pulumi.Output[str]
    """Container image of the head and the workers."""
    log_group: pulumi.Output[str]
    """Name of the CloudWatch log group of all containers."""
    metrics_dashboard: pulumi.Output[str]
    """Name of the CloudWatch dashboard: training, GPUs, tasks, network."""
    estimated_hourly_usd: pulumi.Output[float | None]
    """On-demand cost of all instances in USD per hour; none if prices are not available."""
    default_gpus: pulumi.Output[int]
    """Number of GPUs that a job requests by default."""
    vpc_id: pulumi.Output[str]
    """ID of the VPC."""
    subnet_ids: pulumi.Output[list[str]]
    """IDs of the private subnets, one in each zone."""
    security_group_id: pulumi.Output[str]
    """ID of the tasks' security group, a source for ingress rules of other resources."""
    task_role_arns: pulumi.Output[dict[str, str]]
    """ARNs of the IAM task roles by kind of node: head, workers and, with CPU workers, cpu-workers."""
    task_definition_arns: pulumi.Output[dict[str, str]]
    """ARNs of the task definitions by kind of node."""
    connection: pulumi.Output[dict[str, Any]]
    """Names that `ray-on-ecs` uses to connect; a program that exports it as `connection` can be its stack."""
    train_command: pulumi.Output[str]
    """Command that trains on the cluster through Session Manager and streams the log."""
    shell_command: pulumi.Output[str]
    """Command that opens a shell in the head's container."""
    dashboard_command: pulumi.Output[str]
    """Command that forwards the Ray dashboard to http://localhost:8265."""
    token_command: pulumi.Output[str]
    """Command that prints the Ray token, for the dashboard's login."""

    def __init__(self, name: str, args: RayClusterArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        arguments = config.read(args)
        super().__init__("ray-on-ecs:index:RayCluster", name, None, opts)
        self._prefix = prefix = name_prefix(name)
        self._settings = settings = arguments.settings
        self._plan = plan = config.plan(arguments, prefix, pulumi.InvokeOptions(parent=self))
        if plan.up:
            config.announce_update()
        tags = add_tags(settings.tags, plan.default_tags)
        self._opts = opts = pulumi.ResourceOptions(parent=self, transforms=[tags])

        cluster = self._cluster()
        network = self._network(cluster)
        storage = self._storage()
        image_uri = plan.image_uri or self._image().image_uri
        auth_args = AuthTokenArgs(kms_key_arn=settings.kms_key_arn, rotate=settings.rotate_token)
        auth = AuthToken(f"{prefix}-auth", auth_args, opts)
        discovery = Discovery(f"{prefix}-discovery", DiscoveryArgs(namespace=cluster.name, vpc_id=network.vpc_id), opts)

        node_groups = self._node_groups(cluster, network)
        association = cluster.associate([group.provider_name for group in node_groups.values()])
        agents = [group.join_cluster(association) for group in node_groups.values()]
        info = self._cluster_info(network, node_groups["workers"])
        factory = TaskFactory(
            cluster=cluster.ref,
            location=plan.location,
            security=settings.security,
            image_uri=image_uri,
            registry_secret_arn=settings.registry_secret_arn,
            logs=cluster.logs,
            token_parameter_arn=auth.parameter_arn,
            bucket=storage.bucket,
            data_buckets=settings.data_buckets,
            job_secrets=settings.job_secrets,
            environment=arguments.environment,
        )
        task_args = factory.by_kind(
            plan.nodes,
            head_host=discovery.head_host,
            cluster_info_parameter=info.parameter,
            group=node_groups["workers"].group,
        )
        # In the singular: head-task, worker-task, cpu-worker-task.
        tasks = {
            kind: TaskDefinition(f"{prefix}-{kind.removesuffix('s')}-task", kind_args, opts)
            for kind, kind_args in task_args.items()
        }
        # Every service depends on the policies of all kinds, since a run needs all kinds of nodes until its end:
        # otherwise `destroy` could take a worker's permissions before its last checkpoint is saved.
        after = [association, *agents]
        for task in tasks.values():
            after += task.role_policies
        services = self._services(cluster, network, discovery, node_groups, tasks, after)
        refs = {kind: service.ref for kind, service in services.items()}
        monitoring_args = MonitoringArgs(region=plan.region, services=refs, alerts=settings.alerts)
        monitoring = Monitoring(f"{prefix}-monitoring", monitoring_args, opts)
        sessions = Sessions(f"{prefix}-sessions", SessionsArgs(gpus=plan.gpus), opts)

        self.bucket = storage.bucket.name
        self.head_instance_id = node_groups["head"].instance_id(services["head"])
        self.cluster_name = cluster.ref.name
        self.image_uri = pulumi.Output.from_input(image_uri)
        self.log_group = cluster.logs.name
        self.metrics_dashboard = monitoring.dashboard_name
        self.estimated_hourly_usd = pulumi.Output.from_input(plan.hourly_usd)
        self.default_gpus = pulumi.Output.from_input(plan.gpus)
        self.vpc_id = network.vpc_id
        self.subnet_ids = pulumi.Output.all(*network.ref.subnets.values())
        self.security_group_id = network.ref.tasks_group_id
        self.task_role_arns = pulumi.Output.all(**{kind: task.role_arn for kind, task in tasks.items()})
        self.task_definition_arns = pulumi.Output.all(**{kind: task.definition_arn for kind, task in tasks.items()})
        self.connection = self._connection(
            head_host=discovery.head_host,
            token_parameter=auth.parameter_name,
            cluster_info_parameter=info.parameter.name,
            shell_document=sessions.shell,
            forward_document=sessions.forward,
            services={kind: ref.name for kind, ref in refs.items()},
        )
        self.train_command = self._session(sessions.train)
        self.shell_command = self._session(sessions.shell)
        forward = pulumi.Output.all(self.head_instance_id, discovery.head_host, sessions.forward)
        self.dashboard_command = forward.apply(lambda names: commands.dashboard(plan.region, *names))
        self.token_command = auth.parameter_name.apply(lambda parameter: commands.token(plan.region, parameter))
        self.register_outputs({output: getattr(self, output) for output in RayCluster.__annotations__})

    def _cluster(self) -> Cluster:
        settings = self._settings
        args = ClusterArgs(
            made_for=self._plan.identity,
            log_retention_days=settings.log_retention_days,
            kms_key_arn=settings.kms_key_arn,
        )
        return Cluster(f"{self._prefix}-ray", args, self._opts)

    def _network(self, cluster: Cluster) -> Network:
        plan, settings = self._plan, self._settings
        args = NetworkArgs(
            vpc_cidr=settings.vpc_cidr,
            location=plan.location,
            cluster_name=config.check_state(cluster.name, cluster.made_for, plan.identity, plan.up),
            nat_gateway=settings.nat_gateway,
            spot=settings.spot,
            reads_secrets=bool(settings.job_secrets),
            instance_policies=bool(settings.instance_policy_arns),
        )
        return Network(f"{self._prefix}-network", args, self._opts)

    def _storage(self) -> Storage:
        settings = self._settings
        args = StorageArgs(
            retain=settings.retain_bucket,
            version_days=settings.object_version_days,
            existing=settings.bucket_name,
            partition=self._plan.location.partition,
            kms_key_arn=settings.kms_key_arn,
        )
        storage = Storage(f"{self._prefix}-storage", args, self._opts)
        if self._plan.up and not (settings.retain_bucket or settings.bucket_name):
            config.announce_runs(storage.bucket.name, pulumi.InvokeOptions(parent=self))
        return storage

    def _image(self) -> Image:
        # awsx includes the path in its hash, so a relative path keeps the image unchanged on other machines.
        context = os.path.relpath(ROOT)
        args = ImageArgs(
            context=context, dockerfile=f"{context}/docker/Dockerfile", kms_key_arn=self._settings.kms_key_arn
        )
        return Image(f"{self._prefix}-image", args, self._opts)

    def _node_groups(self, cluster: Cluster, network: Network) -> dict[str, NodeGroup]:
        node_groups = {}
        for kind, node in self._plan.nodes.items():
            args = NodeGroupArgs(
                location=self._plan.location,
                cluster=cluster.ref,
                network=network.ref,
                node=node,
                security=self._settings.security,
                managed_scaling=kind in self._plan.scales,
                root_volume_gib=self._settings.root_volume_gib,
            )
            node_groups[kind] = NodeGroup(f"{self._prefix}-{kind}", args, self._opts)
        return node_groups

    def _cluster_info(self, network: Network, workers: NodeGroup) -> ClusterInfo:
        plan = self._plan
        args = ClusterInfoArgs(
            head=plan.head,
            worker=plan.worker,
            cpu_worker=plan.cpu_worker,
            scales=plan.scales,
            default_gpus=plan.gpus,
            group_name=workers.group.name,
            subnets=network.ref.subnets,
            placement_groups=workers.placement_groups,
        )
        return ClusterInfo(f"{self._prefix}-cluster-info", args, self._opts)

    def _services(
        self,
        cluster: Cluster,
        network: Network,
        discovery: Discovery,
        node_groups: dict[str, NodeGroup],
        tasks: dict[str, TaskDefinition],
        after: list[pulumi.Resource],
    ) -> dict[str, Service]:
        """ECS services by kind, the head's first, and the scaling of the workers' services."""
        services = {}
        for kind, node in self._plan.nodes.items():
            scale = self._plan.scales.get(kind)
            # Nodes read the token only when they start, so a new token redeploys all of them.
            triggers = {"token": self._settings.rotate_token}
            if scale:
                triggers["redeploy"] = self._settings.redeploy_workers
            args = ServiceArgs(
                cluster=cluster.ref,
                network=network.ref,
                # All zones to which zone failover can move the group: ECS places tasks only in the service's subnets.
                zones=tuple(network.ref.subnets) if node.moves else node.zones,
                task_definition_arn=tasks[kind].definition_arn,
                capacity_provider=node_groups[kind].provider_name,
                count=scale.initial_count if scale else 1,
                autoscaled=scale is not None and scale.max_count > 0,
                redeploy={cause: value for cause, value in triggers.items() if value},
                registry_arn=None if scale else discovery.registry_arn,
                after=after,
            )
            services[kind] = Service(f"{self._prefix}-ray-{kind}", args, self._opts)
            if scale and scale.max_count:
                scaling_args = NodeScalingArgs(
                    service=services[kind].ref,
                    head=services["head"].ref,
                    group_name=node_groups[kind].group.name,
                    scale=scale,
                    kind=kind,
                    node=node,
                )
                NodeScaling(f"{self._prefix}-{kind}-scaling", scaling_args, self._opts)
        return services

    def _connection(self, **names: Any) -> pulumi.Output[dict[str, Any]]:
        """Output `connection`: the outputs that `ray-on-ecs` needs, the region, and other names."""
        return pulumi.Output.all(
            bucket=self.bucket,
            head_instance_id=self.head_instance_id,
            cluster_name=self.cluster_name,
            log_group=self.log_group,
            estimated_hourly_usd=self.estimated_hourly_usd,
            default_gpus=self.default_gpus,
            region=self._plan.region,
            **names,
        )

    def _session(self, document: pulumi.Output[str]) -> pulumi.Output[str]:
        """Command that starts a session with the head's instance."""
        names = pulumi.Output.all(self.head_instance_id, document)
        return names.apply(lambda values: commands.session(self._plan.region, *values))
