"""RayCluster component: a Ray cluster on Amazon ECS, for Pulumi programs.

`from __future__ import annotations` would turn the types of the outputs, which component/ inherits, into strings.
"""

import os
import re
from pathlib import Path
from typing import Any

import pulumi

from infra.auth import AuthToken, AuthTokenArgs
from infra.choices import Choices, ChoicesArgs
from infra.cluster import Cluster, ClusterArgs
from infra.cluster_info import ClusterInfo, ClusterInfoArgs
from infra.config import RayClusterArgs, identity, runs, services
from infra.config.location import check_zone
from infra.config.plan import make_plan
from infra.definitions import build_context, commands
from infra.definitions.mounts import mount_all
from infra.discovery import Discovery, DiscoveryArgs
from infra.errors import AS_WRITTEN
from infra.file_system import FileSystems, FileSystemsArgs
from infra.head_sleep import HeadSleep, HeadSleepArgs
from infra.image import CodeBuildArgs, Image, ImageArgs
from infra.image_build import ImageBuild
from infra.monitoring import Monitoring, MonitoringArgs
from infra.nat_sleep import NatSleep, NatSleepArgs
from infra.network import Network, NetworkArgs
from infra.node_group import NodeGroup, NodeGroupArgs
from infra.node_scaling import NodeScaling, NodeScalingArgs
from infra.service import Service, ServiceArgs
from infra.sessions import Sessions, SessionsArgs
from infra.storage import Storage, StorageArgs
from infra.tags import add_tags, kind_in_names, metrics_namespace, name_prefix
from infra.task_definition import TaskDefinition
from infra.task_factory import TaskFactory

ROOT = Path(__file__).parents[1]


class RayCluster(pulumi.ComponentResource):
    """Ray on Amazon ECS for distributed PyTorch: network, bucket, image, head, GPU and CPU workers, monitoring.

    Its name is the prefix of all resource names, so a long name is shortened. Account and region are those of its AWS
    provider. While Pulumi plans, the constructor validates the arguments with calls through that provider; prices are
    read with the credentials of the environment.
    """

    bucket: pulumi.Output[str]
    """Name of the S3 bucket of the runs."""
    head_instance_id: pulumi.Output[str]
    """ID of the head's EC2 instance, the target of Session Manager; empty for a head that sleeps, as it changes."""
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
    idle_cost: pulumi.Output[str]
    """Cost of a month training, idle, and asleep with `sleepAfterMinutes`, by part, and the command that ends it."""
    default_gpus: pulumi.Output[int]
    """Number of GPUs that a job requests by default in the pool `default`."""
    vpc_id: pulumi.Output[str]
    """ID of the VPC."""
    subnet_ids: pulumi.Output[list[str]]
    """IDs of the private subnets, one in each zone."""
    security_group_id: pulumi.Output[str]
    """ID of the tasks' security group, a source for ingress rules of other resources."""
    task_role_arns: pulumi.Output[dict[str, str]]
    """ARNs of the IAM task roles by kind of node: head, workers and, for example, cpu-workers or h100-workers."""
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
    wake_command: pulumi.Output[str]
    """Command that wakes a head that sleeps; none for one that does not."""

    def __init__(self, name: str, args: RayClusterArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        AS_WRITTEN.set(args.as_written)
        super().__init__("ray-on-ecs:index:RayCluster", name, None, opts)
        self._args, self._prefix, self._sleeps = args, name_prefix(name), args.sleep_after_minutes > 0
        self._plan = plan = make_plan(args, self._prefix, pulumi.InvokeOptions(parent=self))
        prefix, region, tags = self._prefix, plan.location.region, add_tags(args.tags, plan.default_tags)
        self._opts = opts = pulumi.ResourceOptions(parent=self, transforms=[tags])

        zones, fixed = plan.location.candidates, identity.identity_of(args, plan)
        choices = Choices(f"{prefix}-choices", ChoicesArgs(name=f"{prefix}-ray", zones=zones, identity=fixed), opts)
        cluster = self._cluster(choices)
        network = self._network(choices)
        storage = self._storage()
        image_uri = plan.image_uri or self._image(cluster, storage).image_uri
        auth_args = AuthTokenArgs(kms_key_arn=args.kms_key_arn, rotate=args.rotate_token)
        auth = AuthToken(f"{prefix}-auth", auth_args, opts)
        discovery = Discovery(
            f"{prefix}-discovery", DiscoveryArgs(namespace=cluster.ref.name, vpc_id=network.vpc_id), opts
        )

        mounts = self._mounts(network, storage)
        node_groups = self._node_groups(cluster, network, mounts)
        head_group, start_arns = node_groups["head"].group, []
        if network.nat_group and self._sleeps:
            nat_args = NatSleepArgs(cluster=cluster.ref.name, head_group=head_group, nat_group=network.nat_group)
            start_arns = [NatSleep(f"{prefix}-nat-sleep", nat_args, opts).start_arn]
        providers = [group.provider_name for group in node_groups.values()]
        association = cluster.associate(providers, services.end_services(region))
        agents = [group.join_cluster(association) for group in node_groups.values()]
        info = self._cluster_info(cluster, network, node_groups)
        factory = TaskFactory(
            cluster=cluster.ref,
            location=plan.location,
            security=args.security,
            image_uri=image_uri,
            registry_secret_arn=args.registry_secret_arn,
            logs=cluster.logs,
            token_parameter_arn=auth.parameter_arn,
            bucket=storage.bucket,
            data_buckets=args.data_buckets,
            job_secrets=args.job_secrets,
            environment=args.environment,
            mounts=bool(args.mounts or args.fsx_lustre or args.fsx_lustre_gib or args.efs),
        )
        task_args = factory.by_kind(
            plan.nodes,
            head_host=discovery.head_host,
            cluster_info_parameter=info.parameter,
            groups={kind: group.group for kind, group in node_groups.items()},
            sleep_after_minutes=args.sleep_after_minutes,
            run_max_hours=args.run_max_hours,
            run_max_usd=args.run_max_usd,
        )
        tasks = {
            kind: TaskDefinition(f"{prefix}-{_singular(kind_in_names(prefix, kind))}-task", kind_args, opts)
            for kind, kind_args in task_args.items()
        }
        # Every service depends on the policies of all kinds, since a run needs all kinds of nodes until its end:
        # otherwise `destroy` could take a worker's permissions before its last checkpoint is saved.
        after = [association, *agents]
        for task in tasks.values():
            after += task.role_policies
        made = self._services(cluster, network, discovery, node_groups, tasks, after)
        refs = {kind: service.ref for kind, service in made.items()}
        if self._sleeps:
            minutes = args.sleep_after_minutes
            sleep_args = HeadSleepArgs(
                service=refs["head"], group=head_group, after_minutes=minutes, start_arns=start_arns
            )
            HeadSleep(f"{prefix}-head-sleep", sleep_args, opts)
        monitoring_args = MonitoringArgs(
            region=region,
            partition=plan.location.partition,
            services=refs,
            alert_email=args.alert_email,
            monthly_budget_usd=args.monthly_budget_usd,
            sleeping_group=head_group.name if self._sleeps else None,
        )
        monitoring = Monitoring(f"{prefix}-monitoring", monitoring_args, opts)
        sessions = Sessions(f"{prefix}-sessions", SessionsArgs(gpus=plan.gpus), opts)

        self.bucket = storage.bucket.name
        if self._sleeps:  # each wake starts another instance
            self.head_instance_id = pulumi.Output.from_input("")
            target = head_group.name.apply(lambda group: commands.instance_of(region, group))
        else:
            self.head_instance_id = target = node_groups["head"].instance_id(made["head"])
        self.cluster_name = cluster.ref.name
        self.image_uri = pulumi.Output.from_input(image_uri)
        self.log_group = cluster.logs.name
        self.metrics_dashboard = monitoring.dashboard_name
        self.estimated_hourly_usd = pulumi.Output.from_input(plan.hourly_usd)
        self.idle_cost = pulumi.Output.from_input(plan.idle_cost)
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
        self.train_command = self._session(target, sessions.train)
        self.shell_command = self._session(target, sessions.shell)
        forward = pulumi.Output.all(target, discovery.head_host, sessions.forward)
        self.dashboard_command = forward.apply(lambda names: commands.dashboard(region, *names))
        self.token_command = auth.parameter_name.apply(lambda parameter: commands.token(region, parameter))
        namespace = metrics_namespace(cluster.ref.name)
        self.wake_command = namespace.apply(lambda name: commands.wake(region, name) if self._sleeps else "")
        self.register_outputs({output: getattr(self, output) for output in RayCluster.__annotations__})

    def _cluster(self, choices: Choices) -> Cluster:
        identity.check_new(choices.cluster_name, self._plan, self._prefix, pulumi.InvokeOptions(parent=self))
        name = identity.check_identity(choices.cluster_name, choices.identity, self._args, self._plan)
        args = ClusterArgs(
            name=name, log_retention_days=self._args.log_retention_days, kms_key_arn=self._args.kms_key_arn
        )
        return Cluster(f"{self._prefix}-ray", args, self._opts)

    def _network(self, choices: Choices) -> Network:
        args, location = self._args, self._plan.location
        zone: pulumi.Input[str] = next(iter(location.worker_zones), "")
        kept = choices.zone.apply(lambda kept: check_zone(args, location, kept))
        network_args = NetworkArgs(
            vpc_cidr=args.vpc_cidr,
            location=location,
            zone=zone or kept,
            nat_zone=kept,
            nat_gateway=args.nat_gateway,
            nat_instance=args.nat_instance,
            sleeps=self._sleeps,
            security=args.security,
            # Also with EFA off: EC2 does not delete a group that running instances have.
            efa=any(instance.efa_cards for node in self._plan.nodes.values() for instance in node.instances),
        )
        return Network(f"{self._prefix}-network", network_args, self._opts)

    def _storage(self) -> Storage:
        args = self._args
        storage_args = StorageArgs(
            retain=args.retain_bucket,
            version_days=args.object_version_days,
            existing=args.bucket_name,
            partition=self._plan.location.partition,
            kms_key_arn=args.kms_key_arn,
        )
        storage = Storage(f"{self._prefix}-storage", storage_args, self._opts)
        if not (args.retain_bucket or args.bucket_name):
            runs.announce_runs(storage.bucket.name, pulumi.InvokeOptions(parent=self))
        return storage

    def _image(self, cluster: Cluster, storage: Storage) -> Image:
        plan, context = self._plan, build_context.read(ROOT)
        build = ImageBuild(context=context, location=plan.location, project=f"{self._prefix}-image-project")
        codebuild = CodeBuildArgs(
            build=build.image_uri,
            buildspec=(ROOT / "docker" / "buildspec.yml").read_text(),
            bucket=storage.bucket,
            cluster=cluster.ref.name,
            location=plan.location,
            security=self._args.security,
            log_retention_days=self._args.log_retention_days,
        )
        args = ImageArgs(
            # Relative, so that it is the same on other machines.
            context=os.path.relpath(ROOT),
            tag=context.tag,
            kms_key_arn=self._args.kms_key_arn,
            codebuild=codebuild if plan.image_builder == "codebuild" else None,
        )
        return Image(f"{self._prefix}-image", args, self._opts)

    def _mounts(self, network: Network, storage: Storage) -> pulumi.Input[str]:
        """Commands that mount the nodes' file systems."""
        args, found = self._args, self._plan.file_systems
        if not (args.fsx_lustre or args.fsx_lustre_gib or args.efs):
            return mount_all(found.mounts)
        file_systems_args = FileSystemsArgs(
            **vars(found),
            lustre_gib=args.fsx_lustre_gib,
            vpc_id=network.vpc_id,
            network=network.ref,
            bucket=storage.bucket,
            security=args.security,
        )
        return FileSystems(f"{self._prefix}-file-systems", file_systems_args, self._opts).commands

    def _node_groups(self, cluster: Cluster, network: Network, mounts: pulumi.Input[str]) -> dict[str, NodeGroup]:
        node_groups = {}
        for kind, node in self._plan.nodes.items():
            args = NodeGroupArgs(
                location=self._plan.location,
                cluster=cluster.ref,
                network=network.ref,
                node=node,
                security=self._args.security,
                managed_scaling=kind in self._plan.scales or self._sleeps,
                mounts=mounts,
                mounted=tuple(self._plan.file_systems.mounts.s3.values()),
                efs=self._args.efs,
            )
            name = kind_in_names(self._prefix, kind)
            node_groups[kind] = NodeGroup(f"{self._prefix}-{name}", args, self._opts)
        return node_groups

    def _cluster_info(self, cluster: Cluster, network: Network, node_groups: dict[str, NodeGroup]) -> ClusterInfo:
        plan = self._plan
        args = ClusterInfoArgs(
            cluster=cluster.ref.name,
            zone=network.ref.zone,
            nodes=plan.nodes,
            scales=plan.scales,
            group_names={kind: group.group.name for kind, group in node_groups.items()},
            provider_names={kind: group.provider_name for kind, group in node_groups.items()},
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
        made = {}
        for kind, node in self._plan.nodes.items():
            scale, name = self._plan.scales.get(kind), kind_in_names(self._prefix, kind)
            # Nodes read the token only when they start, so a new token redeploys all of them.
            triggers = {"token": self._args.rotate_token}
            if scale:
                triggers["redeploy"] = self._args.redeploy_workers
            args = ServiceArgs(
                cluster=cluster.ref,
                network=network.ref,
                subnets=network.ref.subnets_in(node.zones),
                task_definition_arn=tasks[kind].definition_arn,
                capacity_provider=node_groups[kind].provider_name,
                count=scale.initial_count if scale else 1,
                autoscaled=scale is not None,
                sleeps=self._sleeps and scale is None,
                before_update=None if scale else services.start_head(self._plan.location.region),
                redeploy={cause: value for cause, value in triggers.items() if value},
                registry_arn=None if scale else discovery.registry_arn,
                after=after,
            )
            made[kind] = Service(f"{self._prefix}-ray-{name}", args, self._opts)
            if scale:
                scaling_args = NodeScalingArgs(
                    cluster=cluster.ref,
                    service=made[kind].ref,
                    head=made["head"].ref,
                    head_role=tasks["head"].role_name,
                    group=node_groups[kind].group,
                    scale=scale,
                    kind=kind,
                    node=node,
                )
                NodeScaling(f"{self._prefix}-{name}-scaling", scaling_args, self._opts)
        return made

    def _connection(self, **names: Any) -> pulumi.Output[dict[str, Any]]:
        """Output `connection`: the outputs that `ray-on-ecs` needs, the region, and other names."""
        costs = self._plan.costs
        return pulumi.Output.all(
            bucket=self.bucket,
            head_instance_id=self.head_instance_id,
            cluster_name=self.cluster_name,
            log_group=self.log_group,
            estimated_hourly_usd=self.estimated_hourly_usd,
            idle_hourly_usd=costs and costs.idle,
            asleep_hourly_usd=costs and costs.asleep,
            region=self._plan.location.region,
            **names,
        )

    def _session(self, instance: pulumi.Output[str], document: pulumi.Output[str]) -> pulumi.Output[str]:
        """Command that starts a session with the head's instance."""
        names = pulumi.Output.all(instance, document)
        return names.apply(lambda values: commands.session(self._plan.location.region, *values))


def _singular(kind: str) -> str:
    """Kind of one node: `head`, `worker`, `cpu-worker`, `worker-b`."""
    return re.sub(r"workers(-[a-z])?$", r"worker\1", kind)
